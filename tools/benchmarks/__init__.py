"""Measurements that the documentation shows, of models that the tests make.

Start them in the root of the repository, as in `python -m tools.benchmarks.overlap_times`.
"""

import sys
from pathlib import Path

_TESTS = Path(__file__).resolve().parents[2] / "tests"
sys.path[:0] = [str(_TESTS / folder) for folder in (".", "unit", "distributed")]
