"""Calls change nothing that other threads of the process see, and keep nothing."""

import time
import weakref

import pytest
import torch
from cases import ESTIMATORS, Call, get_name, random_case
from process_state import assert_unchanged
from recorded_graphs import allow_captures

from rl_triton_core import compute_gae, normalize_advantages
from rl_triton_core._internal.backend import why_unavailable
from rl_triton_core.capture import CapturedStep
from rl_triton_core.cli import selftest
from rl_triton_core.losses import Categorical, Gaussian, ppo_loss, token_log_probs


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


@pytest.mark.parametrize("default", [torch.float16, torch.float64, torch.device("meta")])
def test_defaults_of_the_process_are_not_taken(default, target, monkeypatch):
    """Tensors are made as those that are given."""
    if target.backend != "triton":
        allow_captures(monkeypatch)
    torch.manual_seed(0)
    x, offsets, network = torch.randn(4, 6), torch.tensor([0, 3, 4]), torch.nn.Linear(6, 3)
    x, offsets, network = x.to(target.device), offsets.to(target.device), network.to(target.device)
    actions = torch.zeros(4, dtype=torch.int64, device=target.device)
    optimizer, on = torch.optim.Adam(network.parameters()), {"backend": target.backend}

    def call():
        def step(features):
            loss = ppo_loss(Categorical(network(features)), actions, x[:, 0], x[:, 1], **on).loss
            optimizer.zero_grad()
            loss.backward()
            return loss

        captured = CapturedStep(step, modules=[network], optimizers=[optimizer])
        found = [captured(x), token_log_probs(x, actions, **on).log_probs, normalize_advantages(x, **on)]
        packed = compute_gae(x[:, 0], x[:, 1], bootstrap_values=x[:2, 0], cu_seqlens=offsets, **on)
        assert (target.interpreted or captured.reason == "") and captured.stop.dtype == torch.float32
        return [y.detach().cpu() for y in (*found, *packed)]

    want = call()
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(default) if isinstance(default, torch.dtype) else torch.set_default_device(default)
        got = call()
    finally:
        torch.set_default_dtype(before)
        torch.set_default_device(None)
    assert all(map(torch.equal, got, want))


def test_the_self_test():
    """On the interpreter: Numba hides warnings while it compiles."""
    if why_unavailable("triton", torch.device("cpu")):
        pytest.skip("triton is not available on a CPU")
    assert assert_unchanged(lambda: [*selftest.run_cases([("triton", "cpu")], [0], 1, 0)])


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=get_name)
def test_results_go_with_their_last_reference(estimator, target):
    """No call keeps them in a circle, which would take memory until garbage is collected."""
    call = Call(random_case(estimator, 3, 17, valid=0.9), target.device)
    for _ in range(1 if target.interpreted else 4):
        assert not any(x() is not None for x in [weakref.ref(x) for x in call(target.backend)])


def test_losses_go_with_their_last_reference(target):
    numbers, index = torch.randn(3, 5, device=target.device), torch.zeros(3, dtype=torch.int64, device=target.device)
    column = numbers[:, 0].contiguous()
    calls = [
        lambda x: ppo_loss(Categorical(x), index, column, column, backend=target.backend).loss,
        lambda x: token_log_probs(x * 1, index, backend=target.backend).log_probs.sum(),
    ]
    for call in calls:
        for _ in range(1 if target.interpreted else 4):
            logits = numbers.clone().requires_grad_()
            loss = call(logits)
            kept = [weakref.ref(loss), weakref.ref(torch.autograd.grad(loss, logits)[0])]
            del loss
            for _ in range(100):  # a device's thread of the backward pass lets go of a gradient a moment later
                if not any(x() is not None for x in kept):
                    break
                time.sleep(0.01)
            else:
                pytest.fail("a loss or a gradient is kept")
