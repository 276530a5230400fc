"""Run an unmodified training script with `--optimizer dobb` available.

python -m megatron_dobb pretrain_gpt.py --optimizer dobb --use-distributed-optimizer ...
torchrun --nproc-per-node 8 -m megatron_dobb pretrain_gpt.py --optimizer dobb ...
python -m megatron_dobb doctor
"""

import os
import runpy
import sys

from .autoload import wait_for_megatron
from .errors import DobbError
from .version import __version__

DOCTOR = "doctor"
USAGE = f"""usage: python -m megatron_dobb SCRIPT [ARGUMENT ...]
       python -m megatron_dobb doctor [--json]

Runs a Megatron training script, such as pretrain_gpt.py, that then accepts
--optimizer dobb and the --dobb-* flags (listed by: python -m megatron_dobb SCRIPT --help).
Under torchrun: torchrun --nproc-per-node 8 -m megatron_dobb SCRIPT [ARGUMENT ...]

doctor says what works in this environment and what to do about the rest. A script is named by its
path: doctor.py is one, and a file that is called just doctor is run as ./doctor.

megatron_dobb {__version__}"""


def main() -> None:
    """Prepare to patch Megatron, then run the script as `__main__` with its own arguments."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        sys.exit(0 if arguments else 2)
    if arguments[0] == "--version":
        print(__version__)
        return
    if arguments[0] == DOCTOR:
        from . import doctor

        if os.path.isfile(DOCTOR):
            print(f"megatron_dobb: to run the file {DOCTOR!r} of this folder instead, give ./{DOCTOR}", file=sys.stderr)
        sys.exit(doctor.main(arguments[1:]))
    script = arguments[0]
    if not os.path.isfile(script):
        print(
            f"megatron_dobb: no script {script!r} in {os.getcwd()}; give the path of a training script",
            file=sys.stderr,
        )
        sys.exit(2)
    wait_for_megatron()
    sys.argv = arguments
    if not sys.flags.safe_path:  # as Python does for any script: its folder replaces the current one
        sys.path[0] = os.path.dirname(os.path.abspath(script))
    try:
        runpy.run_path(script, run_name="__main__")
    except DobbError as error:
        # Print only the message, which says what to do; Megatron's traceback would bury it.
        if os.environ.get("MEGATRON_DOBB_TRACEBACK") == "1":
            raise
        print(f"megatron_dobb: error: {error}", file=sys.stderr, flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
