"""Write the README's table of flags from the settings that `--optimizer` of this package takes.

python tools/flags_table.py [--check]
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # in place of tools/, where one file has the name of a standard module

from megatron_dobb.methods import registry  # noqa: E402
from megatron_dobb.settings.format import flags_table  # noqa: E402

BEGIN, END = "<!-- flags -->\n", "<!-- end of flags -->"


def updated(text: str) -> str:
    """The README with tables made anew between its two marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    tables = ["\n".join(flags_table(method.load("settings"))) for method in registry.methods()]
    return f"{before}{BEGIN}\n" + "\n\n".join(tables) + f"\n\n{END}{after}"


def main() -> int:
    """Write the README, or only compare it; the result is the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing, and fail if the table is out of date")
    readme = ROOT / "README.md"
    text = readme.read_text()
    if parser.parse_args().check:
        return int(updated(text) != text)
    readme.write_text(updated(text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
