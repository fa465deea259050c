"""Log-probabilities and entropies of tokens from logits, with their gradient."""

import math

import oracles_losses as oracle
import pytest
import torch
from cases import check_full_graph, make_test_of_refusals
from hypothesis import given
from hypothesis import strategies as st
from test_estimators_transforms import check_one_compilation

from rl_triton_core._internal.launch.fast_path import forget_plans
from rl_triton_core.losses import token_log_probs
from rl_triton_core.testing import assert_close

pytestmark = pytest.mark.covering

TOLERANCES = {torch.float32: 3e-6, torch.bfloat16: 3e-6, torch.float16: 3e-6, torch.float64: 1e-12}
"""Of results, relative to 1 or to themselves; a gradient is rounded to its own type."""
EPSILONS = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10, torch.float64: 1e-12}


def draw(shape, size, dtype=torch.float32, seed=0, scale=3.0):
    g = torch.Generator().manual_seed(seed)
    logits = (scale * torch.randn(*shape, size, generator=g)).to(dtype)
    return logits, torch.randint(size, shape, generator=g)


def lay_out(logits, layout):
    if layout == "gaps":
        return torch.cat([logits, logits], -1)[..., : logits.shape[-1]]
    if layout == "turned" and logits.ndim > 2:
        return logits.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "sliced" and logits.ndim > 1:
        return torch.cat([logits, logits[..., :1, :]], -2)[..., :-1, :]
    if layout == "vocabulary apart":
        return logits.unsqueeze(-1).expand(*logits.shape, 2).contiguous()[..., 0]
    return logits.contiguous()


def check(target, logits, tokens, mask=None, temperature=1.0, entropy=True, upstream=(1.0, 0.5), **options):
    """Results and gradient are the oracle's where tokens count, and 0 elsewhere."""
    valid = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask != 0
    g = torch.Generator().manual_seed(1)
    weights = [x * torch.randn(tokens.shape, generator=g).clamp(-1, 1) for x in upstream]  # beyond, -inf overflows in
    # the oracle: its entropy is PyTorch's, which replaces it by the least float
    exact = torch.where(valid[..., None], logits.detach(), 0).double().requires_grad_()
    log_probs, entropies, _ = oracle.categorical(exact / temperature, torch.where(valid, tokens, 0).long())
    wanted = (weights[0] * log_probs)[valid].sum() + entropy * (weights[1] * entropies)[valid].sum()
    wanted.backward()
    leaf = logits.detach().to(target.device).requires_grad_()
    got = token_log_probs(
        leaf.view_as(leaf), tokens.to(target.device), mask=None if mask is None else mask.to(target.device),
        temperature=temperature, entropy=entropy, backend=target.backend, **options,
    )  # fmt: skip
    rtol = TOLERANCES[logits.dtype]
    for result, want in zip(got[: 1 + entropy], (log_probs, entropies), strict=False):
        assert result.shape == tokens.shape
        assert result.dtype == (torch.float64 if logits.dtype == torch.float64 else torch.float32)
        assert (result.detach().cpu()[~valid] == 0).all()
        torch.testing.assert_close(result.detach().cpu()[valid].double(), want.detach()[valid], rtol=rtol, atol=rtol)
    assert entropy or got.entropy is None
    moved = [x.to(target.device) for x in weights]
    total = torch.where(valid.to(target.device), got.log_probs * moved[0], 0).sum()
    if entropy:
        total = total + torch.where(valid.to(target.device), got.entropy * moved[1], 0).sum()
    total.backward()
    assert leaf.grad.dtype == logits.dtype
    assert (leaf.grad.cpu()[~valid] == 0).all()
    epsilon = EPSILONS[logits.dtype] * (2 if target.interpreted else 1)  # the interpreter cuts digits off
    torch.testing.assert_close(
        leaf.grad.cpu()[valid].double(), exact.grad[valid], rtol=epsilon, atol=3e-6 / temperature
    )


MASKS = (None, torch.bool, torch.uint8, torch.int64, torch.float16, torch.float32)
LAYOUTS = ("contiguous", "gaps", "turned", "sliced", "vocabulary apart")


@given(data=st.data())
def test_random_calls(target, data):
    """Of any shape, layout and dtype. What stands in masked places is not read."""
    choose = lambda *x: data.draw(st.sampled_from(x))  # noqa: E731
    dtype = choose(*(x for x in TOLERANCES if x != torch.float64 or target.backend != "triton"))
    sizes = (1, 2, 3, 16, 33, 1000) if target.interpreted else (1, 2, 5, 33, 1024, 1025, 4097, 9000)
    shape, size = choose((), (1,), (7,), (2, 3), (3, 1, 2), (2, 2, 2)), choose(*sizes)
    logits, tokens = draw(shape, size, dtype, choose(*range(99)), choose(0.1, 3.0, 30.0))
    if choose(False, True) and size > 1:
        hidden = torch.rand(logits.shape, generator=torch.Generator().manual_seed(5)) < 0.3
        logits = logits.masked_fill(hidden.scatter(-1, tokens[..., None], False), -torch.inf)
    logits, kind, mask = lay_out(logits, choose(*LAYOUTS)), choose(*MASKS), None
    tokens = tokens.to(choose(torch.int64, torch.int32, torch.int16))
    if kind is not None:
        mask = torch.randint(2, shape, generator=torch.Generator().manual_seed(choose(*range(9)))).to(kind)
        logits[mask == 0] = torch.nan
        tokens = torch.where(mask != 0, tokens, choose(-100, 30000)).to(tokens.dtype)
    upstream = choose((1.0, 0.5), (1.0, 0.0), (0.0, 1.0))
    check(target, logits, tokens, mask, choose(0.5, 1.0, 1.7), choose(False, True), upstream)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_in_any_layout(target, layout):
    logits, tokens = draw((2, 3, 4), 5)
    check(target, lay_out(logits, layout), tokens)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [4096, 4097, 20_000, (1 << 18) + 8])
def test_few_tokens_of_large_vocabularies(target, tokens, dtype, size):
    """Which programs share on a GPU."""
    if target.interpreted and size > 1 << 15:
        pytest.skip("too many for the interpreter")
    logits, chosen = draw((tokens,), size, dtype)
    logits[0, -1] = 40.0  # in the last block, so that all sums move to it
    check(target, logits, chosen)


@pytest.mark.parametrize("peaks", [(50.0, 20.0, 0.0), (0.0, 20.0, 50.0), (-torch.inf, 5.0, -torch.inf)])
@pytest.mark.parametrize("highest", [0.0, 300.0])
@pytest.mark.parametrize("programs", [1024, 8])
def test_blocks_of_very_different_logits(target, peaks, highest, programs, monkeypatch):
    """Sums follow a rising peak, ignore blocks far below it or without any logit, and none overflows.

    With few programs, one takes several blocks.
    """
    if target.backend == "triton":
        monkeypatch.setattr("rl_triton_core._internal.tokens.triton.PROGRAMS", programs)
        forget_plans()
    logits = torch.cat([draw((5,), 4096, seed=i)[0] + peak for i, peak in enumerate(peaks)], 1)
    logits[:, 4096 + 9] += highest
    check(target, logits, torch.full((5,), 4096 + 7))


def test_hidden_logits(target):
    """Whole blocks of −∞ or the least number, before others and behind: their differences from others overflow."""
    for dtype in (x for x in TOLERANCES if x != torch.float64 or target.backend != "triton"):
        (logits, tokens), least = draw((3,), 9000, dtype), torch.finfo(dtype).min
        for hidden, chosen in ((slice(0, 5000), 6000), (slice(3, 4200), 1), (slice(4999, None), 4998)):
            for filler in (-torch.inf, least):
                given = logits.index_fill(1, torch.arange(9000)[hidden], filler)
                check(target, given, tokens * 0 + chosen, temperature=0.7)
        uniform, moved = (x.to(target.device) for x in (torch.full_like(logits, least), tokens))
        got = token_log_probs(uniform, moved, entropy=True, backend=target.backend)
        for result, want in zip(got, (-math.log(9000), math.log(9000)), strict=True):
            assert result.cpu().tolist() == pytest.approx([want] * 3, rel=1e-6)


@pytest.mark.parametrize("backend_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["contiguous", "sliced", "vocabulary apart"])
def test_the_gradient_in_the_memory_of_the_logits(target, layout, backend_dtype):
    logits, tokens = (x.to(target.device) for x in draw((3, 4), 50, backend_dtype))
    mask = (tokens % 3 != 0).to(target.device)

    def run(in_place):
        result = lay_out(logits.clone().requires_grad_() * 1, layout)
        result.retain_grad()
        got = token_log_probs(
            result, tokens, mask=mask, entropy=True, inplace_backward=in_place, backend=target.backend
        )
        (got.log_probs * 3 + got.entropy).sum().backward()
        return result

    own, other = run(True), run(False)
    assert torch.equal(own.detach(), other.grad), "the gradient is where the logits were"
    assert torch.equal(own.grad, other.grad) and other.grad.abs().sum() > 0
    assert not torch.equal(other.detach(), other.grad)
    assert not mask.all() and (other.grad[~mask] == 0).all(), "whatever a loss makes of masked results"


def test_who_else_kept_the_logits_is_told(target):
    x, tokens = (t.to(target.device) for t in draw((3,), 8))
    leaf = x.requires_grad_()
    logits = leaf * 1
    squares = logits.square().sum()
    got = token_log_probs(logits, tokens, inplace_backward=True, backend=target.backend)
    total = got.log_probs.sum()
    total.backward(retain_graph=True)
    for loss in (squares, total):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_what_is_not_finite(target):
    """NaN and +∞ stay in their row; a token of probability 0 has a gradient."""
    logits = draw((6,), 40)[0]
    logits[0, 3], logits[1, 5], logits[2, :], logits[3, 7] = torch.nan, torch.inf, -torch.inf, -torch.inf
    leaf = logits.to(target.device).requires_grad_()
    tokens = torch.tensor([7, 5, 7, 7, 7, 7], device=target.device)
    got = token_log_probs(leaf, tokens, entropy=True, backend=target.backend)
    assert got.log_probs[:3].isnan().all() and got.entropy[:3].isnan().all()
    assert got.log_probs[3] == -torch.inf and got.entropy[3:].isfinite().all() and got.log_probs[4:].isfinite().all()
    (got.log_probs + got.entropy).sum().backward()
    assert leaf.grad[:3].isnan().any(1).all() and leaf.grad[3:].isfinite().all()
    exact = logits[3].detach().double().requires_grad_()
    sum(oracle.categorical(exact, tokens[3].cpu())[:2]).backward()
    torch.testing.assert_close(leaf.grad[3].double().cpu(), exact.grad, rtol=1e-5, atol=1e-6)


def test_known_answers(target):
    logits = torch.tensor([[0.0, math.log(3.0)], [2.0, 2.0]], device=target.device, requires_grad=True)
    tokens = torch.tensor([1, 0], device=target.device)
    got = token_log_probs(logits, tokens, entropy=True, backend=target.backend)
    assert_close(got.log_probs.detach().cpu(), torch.tensor([math.log(0.75), math.log(0.5)]), rtol=1e-6)
    want = torch.tensor([-0.75 * math.log(0.75) - 0.25 * math.log(0.25), math.log(2.0)])
    assert_close(got.entropy.detach().cpu(), want, rtol=1e-6)
    got.log_probs.sum().backward()
    assert_close(logits.grad.cpu(), torch.tensor([[-0.25, 0.25], [0.5, -0.5]]), rtol=1e-6)
    hot = token_log_probs(logits, tokens, temperature=2.0, backend=target.backend).log_probs[0]
    assert float(hot.detach()) == pytest.approx(math.log(3**0.5 / (1 + 3**0.5)), rel=1e-6)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("entropy", [False, True])
def test_a_full_graph_with_dynamic_shapes(backend, entropy):
    def loss(logits, tokens, mask):
        got = token_log_probs(2 * logits, tokens, mask=mask, entropy=entropy, temperature=1.5, backend=backend)
        return (got.log_probs * 0.5).sum() + (got.entropy.sum() if entropy else 0)

    calls = [dict(zip(("logits", "tokens"), draw((rows, 2), 30), strict=True)) for rows in (4, 9)]
    for call in calls:
        call |= {"logits": call["logits"].requires_grad_(), "mask": call["tokens"] % 4 != 0}
    check_one_compilation(loss, calls, dynamic=True)
    check_full_graph(loss, *call.values(), dynamic=True)


@pytest.mark.parametrize("in_place", [False, True])
def test_no_tokens(target, in_place):
    """Whose logits share no memory whatever their strides are, and may be a leaf."""
    leaf = torch.zeros(1, 0, 5, device=target.device, requires_grad=True)
    for logits in (leaf, leaf.expand(3, 0, 5), (leaf * 2)[0]):
        tokens, leaf.grad = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=target.device), None
        options = {"entropy": True, "inplace_backward": in_place, "backend": target.backend}
        got = token_log_probs(logits, tokens, **options)
        sum(x.sum() for x in got).backward()
        assert got.log_probs.shape == got.entropy.shape == tokens.shape and leaf.grad.shape == leaf.shape


def test_without_a_graph(target):
    logits, tokens = (x.to(target.device) for x in draw((3,), 5))
    assert not token_log_probs(logits, tokens, backend=target.backend).log_probs.requires_grad
    with torch.no_grad():
        leaf = logits.requires_grad_()
        assert not token_log_probs(leaf, tokens, backend=target.backend).log_probs.requires_grad
    value = token_log_probs(leaf, tokens, backend=target.backend).log_probs.sum()
    with pytest.raises(RuntimeError, match="create_graph: got True"):
        torch.autograd.grad(value, leaf, create_graph=True)


@pytest.mark.parametrize("wrong", [-1, 5])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int16])
def test_a_token_that_there_is_not(target, wrong, dtype):
    logits = torch.zeros(3, 5)
    tokens = torch.tensor([0, wrong, 1], dtype=dtype)
    mask = torch.tensor([1, 0, 1])
    if target.device == "cpu":
        with pytest.raises(ValueError, match=f"tokens: got {wrong} among its values, expected 0 to 4"):
            token_log_probs(logits, tokens, backend=target.backend)
    moved = (x.to(target.device) for x in (logits, tokens, mask))
    got = token_log_probs(*[*moved][:2], mask=mask.to(target.device), backend=target.backend).log_probs
    assert got[1] == 0 and got[0] == got[2] != 0


X, T = torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)
BAD = {
    "logits: got list": lambda: token_log_probs([0.0], T),
    "logits: got dtype torch.int64": lambda: token_log_probs(T, T),
    r"logits: got shape \(\), expected a last": lambda: token_log_probs(X[0, 0], T),
    "logits: got shape .2, 0.": lambda: token_log_probs(X[:, :0], T),
    "tokens: got dtype torch.float32": lambda: token_log_probs(X, X[:, 0]),
    "tokens: got shape .2,., expected .1,.": lambda: token_log_probs(X[:1], T),
    "mask: got shape .1,., expected .2,.": lambda: token_log_probs(X, T, mask=T[:1]),
    "temperature: got 0": lambda: token_log_probs(X, T, temperature=0.0),
    "temperature: got nan": lambda: token_log_probs(X, T, temperature=math.nan),
    "entropy: got 1, expected a bool": lambda: token_log_probs(X, T, entropy=1),
    "inplace_backward: got None": lambda: token_log_probs(X, T, inplace_backward=None),
    "logits: got a leaf": lambda: token_log_probs(X.clone().requires_grad_(), T, inplace_backward=True),
    "logits: got a leaf ": lambda: token_log_probs(X.clone().requires_grad_().view_as(X), T, inplace_backward=True),
    "logits: got elements that share": lambda: token_log_probs(X[:1].expand(2, 3), T, inplace_backward=True),
    "backend: got 'fast'": lambda: token_log_probs(X, T, backend="fast"),
}
test_bad_arguments = make_test_of_refusals(BAD)
