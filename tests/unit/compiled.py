"""The extension and its CPU kernels, for tests that go through all that this processor runs."""

import pytest

from megatron_dobb.kernels import extension

C = extension.load().module
KERNELS = C.supported_cpu_kernels() if C is not None else []
needs_extension = pytest.mark.skipif(C is None, reason=f"no extension: {extension.load().reason}")
