"""Calls that something else follows: graphs that PyTorch makes, fake tensors, tensors without memory of their own."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

import rl_triton_core as ours
from rl_triton_core.losses import Bernoulli, LogProbs, ppo_loss, token_log_probs

ROLLOUT = (3, 5)
FUNCTIONS = {
    "gae": lambda x, y: ours.compute_gae(x, y, bootstrap_values=0.0).advantages,
    "gae, gradient": lambda x, y: torch.autograd.grad(FUNCTIONS["gae"](x.requires_grad_(), y).square().sum(), x)[0],
    "vtrace": lambda x, y: ours.compute_vtrace(x, y, log_ratios=x, bootstrap_values=y[:, 0]).advantages,
    "returns": lambda x, y: ours.compute_discounted_returns(x, gamma=0.9, bootstrap_values=0.0),
    "traces": lambda x, y: ours.compute_eligibility_traces(x, gamma=0.9, lambda_=0.8),
    "normalised": lambda x, y: ours.normalize_advantages(x),
    "loss": lambda x, y: ppo_loss(LogProbs(x[0]), None, x[0] - 0.1, y[0]).loss,
    "bits": lambda x, y: ppo_loss(Bernoulli(torch.stack([x, y], -1)), torch.stack([x, y], -1) > 0, x - 2, y).loss,
    "tokens": lambda x, y: token_log_probs(x, torch.tensor([1, 2, 3])).log_probs,
}
EACH = pytest.mark.parametrize("name", FUNCTIONS)


def draw(seed, rollout=ROLLOUT):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rollout, generator=generator) for _ in range(2)]


class Wrapped(torch.Tensor):
    """A tensor whose memory is another's, like those of collectives that have not arrived."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        args, kwargs = pytree.tree_map_only(cls, lambda x: x.inner, (args, kwargs or {}))
        return function(*args, **kwargs)


@EACH
@pytest.mark.parametrize("calls", [0, 3])  # so that later ones would be repeated
@pytest.mark.parametrize(("mode", "rollout"), [("real", ROLLOUT), ("symbolic", (3, 8))])
def test_a_graph_has_the_call(name, calls, mode, rollout):
    function = FUNCTIONS[name]
    for seed in range(calls):
        function(*draw(seed))
    graph, other = make_fx(function, tracing_mode=mode)(*draw(0)), draw(7, rollout)
    torch.testing.assert_close(graph(*other), function(*other), rtol=1e-5, atol=1e-6)


@EACH
def test_fake_tensors_have_the_shapes_of_the_results(name):
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        found = FUNCTIONS[name](*map(mode.from_tensor, draw(0)))
    assert found.shape == FUNCTIONS[name](*draw(0)).shape and type(found).__name__ == "FakeTensor"


@pytest.mark.parametrize("name", [x for x in FUNCTIONS if "gradient" not in x])
@pytest.mark.parametrize("wrapped", [(0,), (1,), (0, 1)], ids=str)
def test_tensors_without_memory_of_their_own(name, wrapped):
    given, want = draw(0), FUNCTIONS[name](*draw(0))
    for i in wrapped:
        given[i] = Wrapped(given[i])
    torch.testing.assert_close(FUNCTIONS[name](*given), want, rtol=1e-5, atol=1e-6)


def test_a_tensor_without_memory_within_another_argument():
    policy, (x, y) = type("Policy", (LogProbs,), {}), draw(0)  # a type that the fast path does not look into
    with pytest.raises(TypeError, match="got a Wrapped within another argument, expected a plain torch.Tensor"):
        ppo_loss(policy(Wrapped(x[0])), None, x[0], y[0])


def test_a_trace_of_torchscript_is_refused():
    for _ in range(3):
        FUNCTIONS["gae"](*draw(0))
    with pytest.raises(RuntimeError, match=r"compute_gae: got a call within torch.jit.trace, expected torch.compile"):
        torch.jit.trace(FUNCTIONS["gae"], tuple(draw(0)))
