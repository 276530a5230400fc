#!/usr/bin/env python
"""Say what Dobb would cost on any model and parallel layout, in seconds and without a GPU.

    python tools/plan.py --preset llama3-405b --tp 8 --pp 16 --dp 128 --blocks 16 --json plan.json
    python tools/plan.py --args flags.txt --dp 64 --plot trade-off.png

`python tools/plan.py --help` lists the options; docs/planning.md explains them.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

try:
    from tools.planning.cli import main
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}: install what the tools need with pip install -e '.[examples]'") from None

if __name__ == "__main__":
    sys.exit(main())
