"""The documentation: the site builds with the command in docs/contributing.md, and its links and examples work."""

import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def build(source: Path, target: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "dirhtml", str(source), str(target)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    target = tmp_path_factory.mktemp("site")
    built = build(DOCS, target)
    assert built.returncode == 0, built.stderr
    return target


class Links(HTMLParser):
    """The links of a page, and the elements that a link can point at."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.targets: set[tuple[Path, str]] = set()
        self.ids: set[str] = set()
        self.page = page
        self.feed(page.read_text())

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.ids.add(values.get("id") or "")
        href = values.get("href")
        if tag == "a" and href and "://" not in href and not href.startswith("mailto:"):
            path, fragment = urldefrag(href)
            target = (self.page.parent / unquote(path)).resolve() if path else self.page.resolve()
            self.targets.add((target / "index.html" if target.is_dir() else target, fragment))


@pytest.mark.full
def test_no_link_of_the_site_leads_nowhere(site):
    pages = {page.resolve(): Links(page) for page in site.rglob("*.html")}
    assert len(pages) > 20
    for page, links in pages.items():
        for target, fragment in links.targets:
            assert target.is_file(), f"{page} links to {target}"
            assert not fragment or target not in pages or fragment in pages[target].ids, f"{page}: {target}#{fragment}"


@pytest.mark.full
def test_a_link_to_a_heading_that_is_not_there_stops_the_build(tmp_path):
    shutil.copy(DOCS / "conf.py", tmp_path)
    conf = (tmp_path / "conf.py").read_text().replace("Path(__file__).resolve().parent.parent", f"Path({str(ROOT)!r})")
    (tmp_path / "conf.py").write_text(conf)
    (tmp_path / "index.md").write_text("# Title\n\n## There\n\n[here](#there)\n")
    assert build(tmp_path, tmp_path / "good").returncode == 0
    (tmp_path / "index.md").write_text("# Title\n\n## There\n\n[here](#not-there)\n")
    broken = build(tmp_path, tmp_path / "bad")
    assert broken.returncode != 0
    assert "not-there" in broken.stderr


@pytest.mark.full
def test_the_faq_is_answered_within_two_clicks_of_the_first_page(site):
    rows = [line for line in (DOCS / "questions.md").read_text().splitlines() if re.match(r"\| .*\?.* \|", line)]
    assert len(rows) == 10
    first, questions = site / "index.html", site / "questions" / "index.html"
    assert (questions.resolve(), "") in Links(first).targets
    # Sphinx's names of headings differ from Markdown's in hyphens.
    answers = {(page, heading.replace("-", "")) for page, heading in Links(questions).targets}
    for row in rows:
        links = re.findall(r"\]\(([\w-]+)\.md(?:#([\w-]+))?\)", row.split("|")[2])
        assert links, row
        for page, heading in links:
            assert ((site / page / "index.html").resolve(), heading.replace("-", "")) in answers


def test_the_python_of_the_quickstart_runs():
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / "quickstart.md").read_text(), re.DOTALL)
    exec(compile(code, "docs/quickstart.md", "exec"), {})


def test_the_readme_links_to_files_that_are_there():
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / "README.md").read_text())
    assert len(links) > 10
    for link in links:
        assert (ROOT / link).exists(), link
