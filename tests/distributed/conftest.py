"""What all multi-process tests share."""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """The ranks have one thread each, and so has the process that checks their results.

    Small products on several threads spend their time waiting for each other where other processes run.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
