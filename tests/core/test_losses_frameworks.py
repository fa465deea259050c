"""Methods of docs/tokens.md by one formula each, and losses in torch.compile. Adapters' tests have frameworks."""

import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cases import check_full_graph
from losses_cases import make
from test_estimators_transforms import check_one_compilation
from torch._dynamo.testing import CompileCounter

from rl_triton_core import compute_discounted_returns, compute_gae, normalize_advantages
from rl_triton_core.losses import Categorical, LogProbs, group_normalize, grpo_loss, ppo_loss
from rl_triton_core.testing import assert_close

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tokens.md"


def gradients(loss, *inputs):
    return [loss.detach(), *torch.autograd.grad(loss, inputs, retain_graph=True)]


def assert_same(ours, theirs, *inputs, rtol=2e-6):
    for got, want in zip(gradients(ours, *inputs), gradients(theirs, *inputs), strict=True):
        assert_close(got.double(), want.double(), rtol=rtol)


def make_batch():
    """Log-probabilities that require grad, and what the equations of the methods read: one formula each, by hand."""
    g = torch.Generator().manual_seed(5)
    log_probs = -torch.rand(6, 9, generator=g, dtype=torch.float64)
    old, ref = log_probs + 0.3 * torch.randn(2, 6, 9, generator=g, dtype=torch.float64)
    rewards, values = torch.randn(2, 6, 9, generator=g, dtype=torch.float64)
    lengths = torch.tensor([9, 3, 1, 5, 7, 2])[:, None]
    x = SimpleNamespace(lp=log_probs.requires_grad_(), old=old, ref=ref, rewards=rewards, values=values)
    x.mask = torch.arange(9) < lengths
    x.m, x.lengths, x.scores = x.mask.double(), lengths, torch.tensor([1.0, 0.0, 0.5, 0.25, 2.0, -1.0]).double()
    x.r = (x.lp - old).exp()
    x.s = (((x.lp - old) * x.m).sum(1, keepdim=True) / lengths).exp()
    x.own_s = x.s.detach() * x.r / x.r.detach()
    x.kl = (ref - x.lp).exp() - (ref - x.lp) - 1
    pairs = x.scores.view(-1, 2)
    x.mean = (pairs - pairs.mean(1, keepdim=True)).view(-1, 1)
    x.std = x.mean / (pairs.std(1).repeat_interleave(2)[:, None] + 1e-6)
    x.others = (pairs - pairs.flip(1)).view(-1, 1)
    x.gae, x.returns = (torch.zeros(6, 10, dtype=torch.float64) for _ in range(2))
    for t in range(8, -1, -1):
        following = values[:, t + 1] * x.m[:, t + 1] if t < 8 else 0
        x.gae[:, t] = (rewards[:, t] + following - values[:, t] + 0.95 * x.gae[:, t + 1]) * x.m[:, t]
        x.returns[:, t] = (rewards[:, t] + x.returns[:, t + 1]) * x.m[:, t]
    valid = x.returns[:, :9][x.mask]
    x.whitened = (x.returns[:, :9] - valid.mean()) / (valid.std() + 1e-8)
    return x


def clip(ratio, a, low=0.2, high=0.2):
    return -torch.minimum(ratio * a, ratio.clamp(1 - low, 1 + high) * a)


def gate(ratio, a):
    tau = 1.05 - 0.05 * (a > 0).double()
    return -a * torch.sigmoid(tau * (ratio - 1)) * 4 / tau


def average(x, losses):
    return ((losses * x.m).sum(1) / x.lengths[:, 0]).mean()


METHODS = {
    "PPO": lambda x: (clip(x.r, x.gae[:, :9]) * x.m).sum() / x.m.sum(),
    "GRPO": lambda x: average(x, clip(x.r, x.std) + 0.04 * x.kl),
    "Dr. GRPO": lambda x: (clip(x.r, x.mean) * x.m).sum() / (6 * 9),
    "DAPO": lambda x: (clip(x.r, x.std, 0.2, 0.28) * x.m).sum() / 100,
    "BNPO": lambda x: (clip(x.r, x.std) * x.m).sum() / x.m.sum(),
    "GSPO": lambda x: average(x, clip(x.s, x.std, 3e-4, 4e-4)),
    "GSPO-token": lambda x: average(x, clip(x.own_s, x.std, 3e-4, 4e-4)),
    "LUSPO": lambda x: (clip(x.s, x.std) * x.m).sum() / 6,
    "CISPO": lambda x: (-x.r.clamp(max=1.1).detach() * x.std * x.lp * x.m).sum() / 100,
    "SAPO": lambda x: average(x, gate(x.r, x.std)),
    "RLOO": lambda x: (-x.others * x.lp * x.m).sum() / 6,
    "GPG": lambda x: (-x.mean * x.lp * x.m).sum() / x.m.sum(),
    "REINFORCE++": lambda x: (clip(x.r, x.whitened) * x.m).sum() / x.m.sum(),
    "GRPO of DeepSeek-V3.2": lambda x: average(x, clip(x.r, x.mean) + 0.04 * x.r * x.kl),
}
FUNCTIONS = (compute_discounted_returns, compute_gae, grpo_loss, normalize_advantages)
READ = ("rewards", "values", "mask", "scores", "ref")


def read_methods():
    if not PAGE.exists():
        pytest.skip("only the package is here")
    rows = re.findall(r"^\| ([^|]+) \| `([^`|]+)`[^|`]* \| `([^`|]+)` \|$", PAGE.read_text(), re.MULTILINE)
    return {name: columns for name, *columns in rows}


@pytest.mark.parametrize("method", METHODS)
def test_methods(method):
    x, (advantages, options) = make_batch(), read_methods()[method]
    names = {function.__name__: partial(function, backend="reference") for function in FUNCTIONS}
    names |= {"group_normalize": group_normalize, "n": 2, **{name: vars(x)[name] for name in READ}}
    names |= {"longest": 9, "all_tokens": 100, "epsilon_max": 1.1}
    ours = eval(f"grpo_loss(lp, old, {advantages}, mask=mask, {options})", names | {"lp": x.lp, "old": x.old})
    assert_same(ours.loss, METHODS[method](x), x.lp, rtol=1e-9)


def test_the_page_has_every_method():
    assert read_methods().keys() == METHODS.keys()


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_full_graph_with_dynamic_shapes(backend):
    def loss(logits, values, actions, old, advantages, returns, mask):
        found = ppo_loss(
            Categorical(2 * logits), actions, old, advantages, values=values, returns=returns, mask=mask,
            entropy_coef=0.01, normalize_advantages=True, backend=backend,
        )  # fmt: skip
        return found.loss, torch.stack(found[1:9]).detach()

    compiler = "inductor" if backend == "cpu" else "aot_eager"
    for n in (12, 31):
        case = make("categorical", n=n)
        inputs = [case.network[name].requires_grad_() for name in ("logits", "values")]
        inputs += [case.data[name] for name in ("actions", "old_log_probs", "advantages", "returns")]
        mask = torch.arange(n) % 3 != 0
        check_full_graph(loss, *inputs, mask, compiler=compiler, compare=partial(assert_close, rtol=1e-6), dynamic=True)


@pytest.mark.parametrize("packed", [False, True])
def test_rows_of_any_length_compile_once(packed):
    calls = []
    for rows, length in ((4, 7), (6, 9), (3, 12)):
        x, old = torch.randn(2, *([rows * length] if packed else [rows, length]))
        calls.append({"log_probs": x.requires_grad_(), "old_log_probs": old, "advantages": torch.randn(rows)})
        calls[-1]["cu_seqlens"] = torch.arange(rows + 1) * length if packed else None
    check_one_compilation(partial(grpo_loss, aggregation="sequence-mean", ratio="sequence"), calls, dynamic=True)


def test_annealed_coefficients_compile_at_most_twice():
    """Once with numbers as constants, once with symbols; and once more with a tensor."""
    x, old, advantages = torch.randn(3, 12)
    x.requires_grad_()

    def loss(clip, entropy_coef):
        return ppo_loss(LogProbs(x), None, old, advantages, clip=clip, entropy_coef=entropy_coef).loss

    counter = CompileCounter()
    compiled = torch.compile(loss, fullgraph=True, backend=counter)
    coefficients = [0.01, 0.02, 0.03, torch.tensor(0.04), torch.tensor(0.05)]
    for i, coefficient in enumerate(coefficients):
        given = 0.2 - 0.01 * i, coefficient
        got, want = (torch.autograd.grad(function(*given), x) for function in (compiled, loss))
        assert torch.equal(*got, *want)
    assert counter.frame_count == 3
