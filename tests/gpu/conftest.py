"""Leaves out, and says so, what cannot even be imported here."""

import importlib.util

import torch

NEEDED = ("transformer_engine", "megatron.core")


def _missing():
    if not torch.cuda.is_available():
        return ["a GPU"]
    return [name for name in NEEDED if importlib.util.find_spec(name.partition(".")[0]) is None]


collect_ignore = ["test_te_adapters_on_gpu.py"] if _missing() else []


def pytest_report_header():
    return f"left out without {', '.join(_missing())}: tests of Transformer Engine's layers" if _missing() else None
