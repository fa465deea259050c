"""Networks this small lose time to several threads; the examples' environments serve the tests too."""

import sys

import gymnasium
import pytest
import torch

sys.modules.setdefault("gym", gymnasium)  # RL-Games 1.6.1 imports the older name


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
