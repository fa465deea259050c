"""TorchRL's estimators on a GPU: the numbers, losses and gradients of its own, which take no convolution there.

TorchRL's vectorized functions are convolutions, in TensorFloat-32 by default; its loops are float32.
"""

import pytest
import torch

pytest.importorskip("torchrl")

from test_torchrl import (
    EVERY,
    EVERY_MODULE,
    actor,
    assert_same,
    assert_same_estimates,
    call_with_steps,
    critic,
    functional,
    losses_and_gradients,
    make_module,
    random_rollout,
    random_steps,
)
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import VTrace

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

DEVICE = "cuda"
SHAPES = pytest.mark.parametrize(("shape", "time_dim"), [((20,), -1), ((5, 20, 3), 1), ((200, 64, 1), 0)])


def on_device(steps):
    return {name: x.to(DEVICE) for name, x in steps.items()}


def on_cpu(results):
    return tuple(x.cpu() for x in (results if isinstance(results, tuple) else (results,)))


@EVERY
@SHAPES
def test_functions(function, stock, scalars, shape, time_dim):
    steps = random_steps(shape, torch.float32)
    got = call_with_steps(function, on_device(steps), **scalars, time_dim=time_dim)
    assert {x.device.type for x in (got if isinstance(got, tuple) else (got,))} == {DEVICE}
    assert_same(
        got, call_with_steps(getattr(functional, function.__name__), on_device(steps), **scalars, time_dim=time_dim)
    )
    assert_same(on_cpu(got), on_cpu(call_with_steps(stock, steps, **scalars, time_dim=time_dim)))


@EVERY
def test_with_numbers_nothing_waits(function, stock, scalars):
    steps = on_device(random_steps((5, 20, 1), torch.float32))
    want = call_with_steps(function, steps, **scalars)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = call_with_steps(function, steps, **scalars)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_same(got, want)


def loops(module):
    """The option by which a module of TorchRL takes the loop; V-Trace has nothing else."""
    return {} if issubclass(module, VTrace) else {"vectorized": False}


@EVERY_MODULE
@pytest.mark.parametrize("batch", [(20,), (5, 20), (2, 3, 20)])
def test_modules(module, stock, scalars, batch):
    ours, theirs = (make_module(cls, scalars, **loops(cls)).to(DEVICE) for cls in (module, stock))
    for estimator in (ours, theirs):
        estimator.value_network.to(DEVICE)  # which `to` leaves alone: the loss that owns it moves it
    assert_same_estimates(ours, theirs, random_rollout(*batch).to(DEVICE))


@EVERY_MODULE
def test_losses(module, stock, scalars):
    """A loss on the device, its estimator TorchRL's or ours: losses and gradients."""
    results = []
    for cls in (module, stock):
        loss = ClipPPOLoss(actor(seed=1), critic(seed=1)).to(DEVICE)
        loss.make_value_estimator(cls.for_loss(loss, differentiable=True, **scalars, **loops(cls)))
        results.append(losses_and_gradients(loss, random_rollout(5, 20).to(DEVICE)))
    for ours, theirs in zip(*results, strict=True):
        assert ours.keys() == theirs.keys() and theirs
        for name, x in theirs.items():
            assert_same(ours[name], x)
