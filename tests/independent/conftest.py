"""The backends, and the records, that are compared with what others compute."""

import pytest
import torch

from rl_triton_core.testing import random_rollout


@pytest.fixture(params=["reference", "cpu"])
def backend(request):
    return request.param


@pytest.fixture
def rollout():
    r = random_rollout(5, 64, truncated_prob=0.1, terminated_prob=0.1, dtype=torch.float64)
    r.terminated[:, -1] = r.truncated[:, -1] = False
    r.terminated[0, -1] = r.truncated[1, -1] = True
    for flags in (r.terminated & ~r.truncated, r.truncated & ~r.terminated, r.terminated & r.truncated):
        assert flags[:, :-1].any()
    return r
