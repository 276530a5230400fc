"""docs/field-experience.md names tests that exist."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_test_that_the_page_names_exists():
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs/field-experience.md").read_text())
    assert len(named) > 40
    tests = {}
    for path, name in named:
        if path not in tests:
            tree = ast.parse((ROOT / path).read_text())
            tests[path] = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert name in tests[path], f"{path} has no {name}"


def test_every_row_of_the_page_names_a_test():
    rows = [line for line in (ROOT / "docs/field-experience.md").read_text().splitlines() if line.startswith("| ")]
    claims = [row for row in rows if "Shown by" not in row]
    assert len(claims) > 20
    assert all("::test_" in row for row in claims)
