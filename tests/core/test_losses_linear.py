"""Log-probabilities of tokens from hidden states, and gradients, against the layer and the equations in float64."""

import pytest
import torch
from processes import run_ranks
from test_losses_logits import EPSILONS, TOLERANCES
from torch import distributed
from torch.utils.checkpoint import checkpoint

from rl_triton_core._internal.tokens import linear
from rl_triton_core.losses import linear_grpo_loss, linear_token_log_probs, token_log_probs
from rl_triton_core.testing import assert_close

pytestmark = pytest.mark.covering

SHAPE, WIDTH, SIZE = (3, 7), 5, 11
PARTS = slice(0, 4), slice(4, SIZE)


def draw(dtype=torch.float32, shape=SHAPE, size=SIZE, seed=0):
    """Hidden states, a layer's weight and bias, and tokens."""
    g = torch.Generator().manual_seed(seed)
    hidden, weight, bias = (torch.randn(*x, generator=g).to(dtype) for x in ((*shape, WIDTH), (size, WIDTH), (size,)))
    return hidden, weight, bias, torch.randint(size, shape, generator=g)


def weigh(results, mask=None):
    """A sum in which each token counts differently."""
    factors = torch.linspace(-1, 1, results[0].numel(), dtype=torch.float64, device=results[0].device)
    factors = factors.view(results[0].shape) * (1 if mask is None else mask)
    return sum((c * x.double() * factors).sum() for c, x in zip((1.0, 0.5), results, strict=False) if x is not None)


def solve_exactly(hidden, weight, bias, tokens, mask=None, temperature=1.0, entropy=True):
    """Log-probabilities, entropies and gradients in float64."""
    hidden = hidden if mask is None else hidden.masked_fill(~mask.bool()[..., None], 0)
    leaves = [None if x is None else x.detach().double().requires_grad_() for x in (hidden, weight, bias)]
    log_p = (torch.nn.functional.linear(*leaves) / temperature).log_softmax(-1)
    chosen = tokens.long().clamp(min=0)[..., None]  # where masked, there may be any
    found = log_p.gather(-1, chosen)[..., 0], -(log_p.exp() * log_p).sum(-1) if entropy else None
    weigh(found, mask).backward()
    kept = [x if x is None or mask is None else torch.where(mask.bool(), x, 0) for x in found]
    return kept, [None if x is None else x.grad for x in leaves]


def check(target, given, tolerance=None, **options):
    """Results and gradients are the exact ones, up to what the dtype rounds of logits and of gradients."""
    hidden, *_, tokens = given
    mask = options.get("mask")
    found = {name: x for name, x in options.items() if name in ("mask", "temperature", "entropy")}
    wanted, slopes = solve_exactly(*given, **{"entropy": True} | found)
    leaves = [None if x is None else x.detach().clone().to(target.device).requires_grad_() for x in given[:3]]
    if mask is not None:
        options["mask"] = mask.to(target.device)
    results = linear_token_log_probs(
        *leaves[:2], tokens.to(target.device), bias=leaves[2], **{"entropy": True} | options, backend=target.backend
    )
    weigh(results, None if mask is None else mask.to(target.device)).backward()
    half = hidden.dtype in (torch.bfloat16, torch.float16)
    for x, want in zip(results, wanted, strict=True):
        if want is None:
            assert x is None
            continue
        assert x.shape == tokens.shape and (mask is None or not x.cpu()[mask == 0].any())
        rtol = tolerance or (16 * EPSILONS[hidden.dtype] if half else 4 * TOLERANCES[hidden.dtype])
        assert_close(x.cpu().double(), want, rtol=rtol)
    for x, want in zip(leaves, slopes, strict=True):
        if x is not None:
            scale = max(want.abs().flatten().tolist(), default=0.0)
            torch.testing.assert_close(x.grad.cpu().double(), want, rtol=0, atol=16 * EPSILONS[hidden.dtype] * scale)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("chunk", [1, 4, 21, 100, None])
def test_the_equation(target, dtype, chunk):
    if dtype == torch.float64 and target.backend == "triton":
        pytest.skip("not in float64")
    check(target, draw(dtype), chunk=chunk)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("entropy", [False, True])
def test_options(target, has_bias, entropy):
    hidden, weight, bias, tokens = draw()
    check(target, (hidden, weight, bias if has_bias else None, tokens), chunk=4, entropy=entropy, temperature=0.7)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.int64])
def test_what_is_masked_is_not_read(target, dtype):
    hidden, weight, bias, tokens = draw()
    mask = torch.rand(SHAPE, generator=torch.Generator().manual_seed(2)) < 0.5
    hidden[~mask], tokens = torch.nan, torch.where(mask, tokens, -100)
    check(target, (hidden, weight, bias, tokens), chunk=4, mask=mask.to(dtype))


@pytest.mark.parametrize("shape", [(0,), (2, 0), (1,), ()])
def test_few_tokens(target, shape):
    check(target, draw(shape=shape))


@pytest.mark.parametrize("learned", ["hidden", "weight", "neither"])
def test_gradients_of_what_asks_for_one_alone(target, learned):
    hidden, weight, _, tokens = (x.to(target.device) for x in draw())
    hidden.requires_grad_(learned == "hidden")
    weight.requires_grad_(learned == "weight")
    result = linear_token_log_probs(hidden, weight, tokens, chunk=4, backend=target.backend).log_probs
    assert result.requires_grad == (learned != "neither")
    if result.requires_grad:
        result.sum().backward()
    assert (hidden.grad is None, weight.grad is None) == (learned != "hidden", learned != "weight")


def test_a_tied_embedding_gets_both_gradients():
    hidden, weight, _, tokens = draw(torch.float64)
    grads = []
    for way in (linear_token_log_probs, lambda h, w, t: token_log_probs(h @ w.t(), t)):
        leaf = weight.clone().requires_grad_()
        way(hidden + leaf[tokens], leaf, tokens).log_probs.sum().backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(*grads, rtol=0, atol=1e-12)


def test_sums_of_many_chunks_are_not_rounded_to_half_precision():
    """Of 4096 equal contributions, bfloat16 would keep the first 256."""
    hidden, weight = torch.ones(4096, 1, dtype=torch.bfloat16), torch.zeros(2, 1, dtype=torch.bfloat16).requires_grad_()
    tokens = torch.zeros(4096, dtype=torch.int64)
    linear_token_log_probs(hidden, weight, tokens, chunk=1).log_probs.sum().backward()
    torch.testing.assert_close(weight.grad.float(), torch.tensor([[2048.0], [-2048.0]]), rtol=0, atol=0)


def test_autocast_checkpoints_and_compilation_leave_the_numbers():
    hidden, weight, _, tokens = draw()
    plain = linear_token_log_probs(hidden, weight, tokens).log_probs
    with torch.autocast("cpu", torch.bfloat16):
        cast = linear_token_log_probs(hidden, weight, tokens).log_probs
    expected = linear_token_log_probs(hidden.bfloat16(), weight.bfloat16(), tokens).log_probs
    assert torch.equal(cast, expected) and cast.dtype == torch.float32
    leaf = hidden.clone().requires_grad_()
    again = checkpoint(lambda x: linear_token_log_probs(x, weight, tokens).log_probs, leaf, use_reentrant=False)
    again.sum().backward()
    compiled = torch.compile(lambda x: 2 * linear_token_log_probs(x, weight, tokens).log_probs, backend="eager")
    assert torch.equal(again, plain) and leaf.grad.any() and torch.equal(compiled(hidden), 2 * plain)


def test_memory_is_that_of_a_chunk(monkeypatch):
    made, empty = [], torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda x, *size: made.append(size) or empty(x, *size))
    hidden, weight, _, tokens = draw(shape=(64,))
    linear_token_log_probs(hidden.requires_grad_(), weight, tokens, chunk=8).log_probs.sum().backward()
    assert made == [(8, SIZE)] * 2


def test_chunks_are_of_so_many_bytes(monkeypatch):
    monkeypatch.setitem(linear.CHUNK_BYTES, "cpu", 300 * SIZE * 4)
    hidden, weight, bias, tokens = draw(shape=(700,))
    call = linear.LinearTokens(hidden, weight, bias, tokens, None, 1.0, None, None)
    assert call.list_chunks() == [slice(0, 300), slice(300, 600), slice(600, 700)]
    assert call._replace(hidden=hidden[:0]).list_chunks() == [slice(0, 0)]
    assert call._replace(split=object()).list_chunks() == [slice(0, 700)]  # whatever the size of this part


def test_a_second_derivative_is_refused():
    hidden, weight, _, tokens = draw()
    result = linear_token_log_probs(hidden.requires_grad_(), weight, tokens).log_probs.sum()
    with pytest.raises(RuntimeError, match="create_graph: got True"):
        torch.autograd.grad(result, hidden, create_graph=True)


@pytest.mark.parametrize(
    "name, change",
    {
        "hidden: got shape": {"hidden": torch.ones(())},
        "hidden: got list": {"hidden": [1.0]},
        "weight: got shape": {"weight": torch.ones(SIZE, WIDTH + 1)},
        "weight: got torch.float64": {"weight": torch.ones(SIZE, WIDTH, dtype=torch.float64)},
        "bias: got shape": {"bias": torch.ones(SIZE + 1)},
        "bias: got torch.float16": {"bias": torch.ones(SIZE, dtype=torch.float16)},
        "tokens: got shape": {"tokens": torch.ones(3, dtype=torch.int64)},
        "tokens: got": {"tokens": torch.full(SHAPE, SIZE)},
        "mask: got shape": {"mask": torch.ones(3, dtype=torch.bool)},
        "temperature": {"temperature": 0.0},
        "chunk": {"chunk": 0},
        "entropy": {"entropy": 1},
    }.items(),
    ids=str,
)
def test_bad_input_is_named(name, change):
    hidden, weight, _, tokens = draw()
    with pytest.raises((TypeError, ValueError), match=name.split(":")[0]):
        linear_token_log_probs(**{"hidden": hidden, "weight": weight, "tokens": tokens} | change)


def solve_part(rank, device):
    """Gradients, by three ways, of `weigh` in one of two processes that share a vocabulary."""
    own, factors, found = PARTS[rank], torch.linspace(1, -1, 21, device=device).view(SHAPE), []
    about = {"group": "world", "first": own.start, "temperature": 0.7, "entropy": True}
    chunks = about | {"chunk": 4, "mask": factors, "normalizer": 1.0, "entropy_coef": 0.5}
    *layer, tokens = (x.to(device) for x in draw())
    for way in (
        lambda *x: weigh(token_log_probs(torch.nn.functional.linear(*x), tokens, **about)),
        lambda h, w, b: weigh(linear_token_log_probs(h, w, tokens, bias=b, chunk=4, **about)),
        lambda h, w, b: linear_grpo_loss(h, w, tokens, None, torch.ones_like(factors), bias=b, **chunks).loss,
    ):
        leaves = [x.clone().requires_grad_() for x in (layer[0], *(x[own] for x in layer[1:]))]
        value = way(*leaves)
        value.backward()
        if not found:  # what flows through the layer is of its part
            distributed.all_reduce(leaves[0].grad)
        found.append([x.grad for x in leaves] + [value.detach()] * (len(found) < 2))  # a loss has a value of its own
    return found


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no two GPUs")
def test_two_gpus_share_a_vocabulary(tmp_path):
    results, (by_hidden, *by_layer) = solve_exactly(*draw(), temperature=0.7)
    for own, ways in zip(PARTS, run_ranks(solve_part, tmp_path, "cuda", kind="nccl"), strict=True):
        wanted = by_hidden, *(x[own] for x in by_layer), weigh(results)
        for x, want in (pair for found in ways for pair in zip(found, wanted, strict=False)):
            torch.testing.assert_close(x.double(), want, rtol=1e-5, atol=1e-5 * want.abs().max().item())
