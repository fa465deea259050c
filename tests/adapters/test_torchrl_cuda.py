"""TorchRL's estimators on a GPU: the numbers, losses and gradients of its own, which take no convolution there.

TorchRL's vectorized functions are convolutions, in TensorFloat-32 by default; its loops are float32.
"""

import pytest
import torch

pytest.importorskip("torchrl")

from gpu_checks import forbid_waiting
from tensordict.nn import CudaGraphModule
from test_torchrl import EVERY, assert_same, call_with_steps, functional, random_steps
from test_torchrl_losses import DISTRIBUTIONS, compute_results, make_loss, make_minibatch, sum_terms
from torchrl.objectives import ClipPPOLoss

from rl_triton_adapters.torchrl.losses import TritonClipPPOLoss

pytestmark = pytest.mark.gpu

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
    with forbid_waiting():
        got = call_with_steps(function, steps, **scalars)
    assert_same(got, want)


CAPTURED_HEADS = pytest.mark.parametrize("head", ["categorical", "one-hot", "masked", "normal", "independent"])
OPTIONS = {"normalize_advantage": True, "clip_value": 0.3}


@pytest.mark.parametrize("head", DISTRIBUTIONS)
def test_results_and_gradients_of_the_loss(head):
    batch = make_minibatch(head, torch.float32, shape=(512,)).to(DEVICE)
    got, want = (
        compute_results(make_loss(cls, head, torch.float32, **OPTIONS).to(DEVICE), batch)
        for cls in (TritonClipPPOLoss, ClipPPOLoss)
    )
    assert got[2] and list(got[0]) == list(want[0])
    torch.testing.assert_close(got[:2], want[:2], rtol=2e-5, atol=2e-5)


@CAPTURED_HEADS
def test_the_loss_reads_nothing_from_the_device(head):
    batch = make_minibatch(head, torch.float32).to(DEVICE)
    loss = make_loss(TritonClipPPOLoss, head, torch.float32, **OPTIONS).to(DEVICE)
    sum_terms(loss(batch)).backward()
    with forbid_waiting():
        sum_terms(loss(batch)).backward()


class Training:
    """A loss, an optimizer whose step can be captured, and minibatches of one shape."""

    def __init__(self, loss_class, head):
        self.loss = make_loss(loss_class, head, torch.float32, **OPTIONS).to(DEVICE)
        self.optimizer = torch.optim.Adam(self.loss.parameters(), lr=1e-3, fused=True, capturable=True)
        self.batches = [make_minibatch(head, torch.float32, shape=(256,), seed=i).to(DEVICE) for i in range(8)]

    def take_step(self, minibatch):
        losses = self.loss(minibatch)
        self.optimizer.zero_grad()
        sum_terms(losses).backward()
        torch.nn.utils.clip_grad_norm_(self.loss.parameters(), 0.5)
        self.optimizer.step()
        return losses.detach()

    def train(self, step, num_steps=300):
        """Step by step, with schedules; the parameters and the last results."""
        for i in range(num_steps):
            self.loss.entropy_coeff = 0.01 * (1 - i / num_steps)
            self.loss.clip_epsilon.fill_(0.2 * (1 - i / num_steps))
            losses = step(self.batches[i % len(self.batches)].clone())
        return [x.detach().clone() for x in self.loss.parameters()], dict(losses.items())


@pytest.mark.filterwarnings("ignore:Tensordict is registered in PyTree:UserWarning")
@CAPTURED_HEADS
def test_captured_steps_are_the_eager_ones(head):
    eager, captured, stock = (Training(cls, head) for cls in (TritonClipPPOLoss, TritonClipPPOLoss, ClipPPOLoss))
    step = CudaGraphModule(captured.take_step, in_keys=[], out_keys=[])
    want, got = eager.train(eager.take_step), captured.train(step)
    assert isinstance(step.graph, torch.cuda.CUDAGraph)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got[0], stock.train(stock.take_step)[0], rtol=0, atol=1e-4)
