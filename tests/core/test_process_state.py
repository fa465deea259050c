"""Calls change nothing that other threads of the process see."""

import pytest
import torch
from process_state import assert_unchanged

from rl_triton_core import compute_gae, normalize_advantages
from rl_triton_core._internal.backend import why_unavailable
from rl_triton_core.capture import CapturedStep
from rl_triton_core.cli import selftest
from rl_triton_core.losses import Gaussian, ppo_loss


def estimate_and_train():
    network = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(network.parameters())

    def step(observations, actions, advantages):
        log_std = torch.zeros(2)
        result = ppo_loss(Gaussian(network(observations), log_std), actions, torch.zeros(50), advantages)
        optimizer.zero_grad()
        result.loss.backward()
        optimizer.step()
        return result.loss

    captured = CapturedStep(step, modules=[network], optimizers=[optimizer])
    for _ in range(20):
        values = torch.randn(5, 10)
        advantages = compute_gae(values, values, bootstrap_values=values[:, 0]).advantages
        captured(torch.randn(50, 3), torch.randn(50, 2), normalize_advantages(advantages).flatten())


def test_estimators_losses_and_steps():
    estimate_and_train()
    assert assert_unchanged(estimate_and_train)


def test_the_self_test():
    """On the interpreter: Numba hides warnings while it compiles."""
    if why_unavailable("triton", torch.device("cpu")):
        pytest.skip("triton is not available on a CPU")
    campaign = selftest.Campaign([selftest.Target("triton", "cpu")], 1, 0, 1)
    assert assert_unchanged(lambda: list(selftest.run_campaign(campaign, None)))
