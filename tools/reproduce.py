#!/usr/bin/env python
"""Reproduce the paper's results at a size that a CPU can carry, and show them beside the paper's.

    python tools/reproduce.py table1a
    python tools/reproduce.py compare --preset minutes --seeds 3 --jobs 2

`python tools/reproduce.py --help` lists what there is; docs/reproduction.md explains it.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

try:
    from tools.reproduction.cli import main
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}: install what the tools need with pip install -e '.[examples]'") from None

if __name__ == "__main__":
    sys.exit(main())
