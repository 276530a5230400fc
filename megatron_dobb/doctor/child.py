"""Runs checks in a process of their own, and writes what they find to a pipe, a line of JSON each.

    python -m megatron_dobb.doctor.child DESCRIPTOR CHECK ...

Broken libraries end the interpreter without an exception, or write to standard output.
"""

import dataclasses
import json
import os
import sys

from . import checks


def main() -> None:
    with os.fdopen(int(sys.argv[1]), "w") as pipe:
        for name in sys.argv[2:]:
            print(json.dumps({"begins": name}), file=pipe, flush=True)
            for finding in checks.run(name):
                print(json.dumps({"finds": dataclasses.asdict(finding)}), file=pipe, flush=True)
            print(json.dumps({"ends": name}), file=pipe, flush=True)


if __name__ == "__main__":
    main()
