#!/usr/bin/env python
"""Say what is in a checkpoint of Dobb, and what in it looks unhealthy, without Megatron running and without a GPU.

    python tools/inspect.py checkpoints/ --plot pictures
    python tools/inspect.py checkpoints/iter_0001000 --weights '*.layers.0.*' --json figures.json

`python tools/inspect.py --help` lists the options; docs/inspect.md explains the figures.
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent

if __name__ == "inspect":
    # Python puts a script's folder first on its path. So every script of this folder that needs the standard library's
    # `inspect` finds this file; it takes the other's place in sys.modules, which is what the import then gives.
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    spec = PathFinder.find_spec(__name__, [place for place in sys.path if Path(place).resolve() != HERE])
    if spec is None or spec.loader is None:
        raise ImportError("the standard library's inspect is not on sys.path")
    sys.modules[__name__] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules[__name__])

if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent))
    try:
        from tools.inspection.cli import main
    except ModuleNotFoundError as error:
        raise SystemExit(f"{error}: install what the tools need with pip install -e '.[examples]'") from None
    sys.exit(main())
