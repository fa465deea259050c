"""The loss of GRPO from hidden states, its statistics and gradients, against the equations in float64."""

from itertools import product

import oracles_losses as oracle
import pytest
import torch
from gpu_checks import forbid_waiting
from losses_cases import close
from test_losses_linear import draw
from test_losses_logits import EPSILONS
from test_losses_surrogates import AGGREGATIONS, OPTIONS, RATIOS, SURROGATES
from test_losses_tokens import offsets, padding_mask, tokens

from rl_triton_core.losses import get_gradients, grpo_loss, linear_grpo_loss, linear_token_log_probs, token_log_probs

pytestmark = pytest.mark.covering

DTYPES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.1, torch.float16: 0.02}
OPTIONS = OPTIONS | {"kl_coef": 0.2, "kl_estimator": "k3", "entropy_coef": 0.3}

PAIRS = [(a, b, c, a ^ b, a ^ c, b ^ c) for a, b, c in product((False, True), repeat=3)]  # of each two switches, all
FACTORS = torch.rand(2, 5, 7, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
OTHERS = (FACTORS[0], None), (FACTORS[1].float(), 1), (11.1, None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk", [4, None])
@pytest.mark.parametrize("surrogate", SURROGATES)
@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("switches", PAIRS, ids=str)
def test_the_equation(target, dtype, chunk, surrogate, ratio, aggregation, switches):
    """Loss, statistics and gradients are the oracle's; what stands where the mask is 0 is not read."""
    packed, per_token, entropy, *others = switches
    weights, share, normalizer = (x if on else y for on, (x, y) in zip(others, OTHERS, strict=True))
    if (ratio == "sequence" and per_token) or (dtype == torch.float64 and target.backend == "triton"):
        pytest.skip("it takes none")
    given, (_, old, ref, per_row, per_cell) = draw(dtype, (5, 7)), tokens(dtype=torch.float64)
    exact = [x.double().clone().requires_grad_() for x in given[:3]]
    log_p = (torch.nn.functional.linear(*exact) / 0.7).log_softmax(-1)
    log_probs = log_p.gather(-1, given[3][..., None])[..., 0]
    old, ref = (log_probs.detach() + 0.5 * x for x in (old, ref))
    advantages, mask = per_cell if per_token else per_row, padding_mask() * share
    about = {"surrogate": surrogate, "ratio": ratio, "aggregation": aggregation, "normalizer": normalizer, **OPTIONS}
    own = {"factors": weights, "entropy": -(log_p.exp() * log_p).sum(-1) if entropy else None, "ref_log_probs": ref}
    wanted = oracle.grpo(log_probs, old, advantages, mask.double(), **own, **about)
    (3 * wanted.loss).backward()
    valid = mask != 0

    def place(x, hole=torch.nan):
        if x is not None:
            empty = torch.full_like(x, hole)
            x = (x[valid] if packed else torch.where(valid.view(5, 7, *[1] * (x.ndim - 2)), x, empty)).to(target.device)
        return x if x is None or x.dtype != torch.float64 or dtype == torch.float64 else x.float()

    advantages = place(advantages) if per_token else advantages.to(target.device, place(old).dtype)
    leaves = [x.to(target.device).clone().requires_grad_() for x in (place(given[0]), *given[1:3])]
    got = linear_grpo_loss(
        *leaves[:2], place(given[3], -100), place(old), advantages,
        bias=leaves[2], temperature=0.7, entropy=entropy, chunk=chunk, ref_log_probs=place(ref), weights=place(weights),
        mask=(mask[valid] if packed else mask).to(target.device), backend=target.backend,
        cu_seqlens=offsets().to(target.device) if packed else None, **about,
    )  # fmt: skip
    for name, expected in wanted._asdict().items():
        close(getattr(got, name), expected, DTYPES[dtype], name)
    (3 * got.loss).backward()
    for x, want in zip(leaves, [place(exact[0].grad, 0), exact[1].grad, exact[2].grad], strict=True):
        bound = 64 * EPSILONS[dtype] * want.abs().max().item()
        torch.testing.assert_close(x.grad.double().cpu(), want.double().cpu(), rtol=0, atol=bound)


def make_call(dtype=torch.float32):
    hidden, weight, _, ids = draw(dtype, (5, 7))
    return {"hidden": hidden, "weight": weight, "tokens": ids, "old_log_probs": None, "advantages": torch.randn(5)}


def test_a_reference_by_hidden_states():
    call = make_call()
    *layer, bias = (x + 1 for x in draw(seed=4, shape=(5, 7))[:3])
    common, found = {"kl_coef": 0.5, "temperature": 0.7}, []
    for own in (None, bias):
        ref = linear_token_log_probs(*layer, call["tokens"], bias=own, temperature=0.7).log_probs
        result = linear_grpo_loss(**call, reference=layer if own is None else [*layer, own], **common)
        assert torch.equal(result.loss, linear_grpo_loss(**call, ref_log_probs=ref, **common).loss)
        found.append(result.kl)
    assert 0 not in found and found[0] != found[1]


@pytest.mark.parametrize("learned", [("hidden",), ("weight",), ()])
def test_gradients_of_what_asks_for_one_alone(learned):
    """They are ready with the loss; without one, there is no graph."""
    call = make_call()
    for name in learned:
        call[name].requires_grad_()
    loss = linear_grpo_loss(**call).loss
    assert loss.requires_grad == bool(learned)
    if learned:
        ready = [x for x in get_gradients(loss) if x is not None]
        (gradient,) = torch.autograd.grad(loss, [call[name] for name in learned], retain_graph=True)
        assert len(ready) == 1 and torch.equal(ready[0], gradient) and gradient.any()
        again = torch.autograd.grad(2 * loss, [call[name] for name in learned])[0]
        assert torch.equal(again, 2 * gradient)
    with torch.no_grad():
        assert torch.equal(linear_grpo_loss(**call).loss, loss.detach()) and not linear_grpo_loss(**call).loss.grad_fn


def test_a_tied_embedding_and_autocast():
    call = make_call(torch.float64)
    (states, leaf, ids, *others), grads = call.values(), []
    for way in (linear_grpo_loss, lambda h, w, t, *args: grpo_loss(token_log_probs(h @ w.t(), t).log_probs, *args)):
        own = leaf.clone().requires_grad_()
        way(states + own[ids], own, ids, *others).loss.backward()
        grads.append(own.grad)
    torch.testing.assert_close(*grads, rtol=0, atol=1e-12)
    call = make_call()
    with torch.autocast("cpu", torch.bfloat16):
        cast = linear_grpo_loss(**call).loss
    half = {name: x.bfloat16() if name in ("hidden", "weight") else x for name, x in call.items()}
    assert torch.equal(cast, linear_grpo_loss(**half).loss) and cast.dtype == torch.float32


def test_gradients_of_float16_are_not_lost_before_a_scaled_loss():
    """A loss of a million tokens has gradients that float16 does not have, which a factor brings back."""
    call = make_call(torch.float16)
    call["hidden"].requires_grad_()
    linear_grpo_loss(**call, normalizer=1e3).loss.backward()
    plain, call["hidden"].grad = call["hidden"].grad.float(), None
    for scale, mask in ((1e6, 1.0), (1e-6, 1e12), (1e15, 1e-9)):
        (scale * linear_grpo_loss(**call, normalizer=1e9, mask=torch.full((5, 7), mask)).loss).backward()
        torch.testing.assert_close(call["hidden"].grad.float(), plain, rtol=2e-3, atol=1e-5)
        call["hidden"].grad = None


def test_a_sum_of_many_tokens_is_not_that_of_float16():
    hidden, tokens = torch.ones(1, 4096, 1, dtype=torch.float16), torch.zeros(1, 4096, dtype=torch.int64)
    weight = torch.zeros(2, 1, dtype=torch.float16, requires_grad=True)
    mask, advantages = torch.full((1, 4096), 0.5), torch.tensor([64.0])
    linear_grpo_loss(hidden, weight, tokens, None, advantages, mask=mask).loss.backward()
    assert weight.grad.flatten().tolist() == [-32.0, 32.0]


def test_weights_of_a_sequence_are_not_rounded_and_those_of_tokens_may_differ_in_sign():
    weight = torch.zeros(2, 1, requires_grad=True)
    call = torch.ones(1, 3, 1), weight, torch.zeros(1, 3, dtype=torch.int64), None, torch.tensor([1.0])
    weights = torch.tensor([[1.0, 1.0, 1.0078125]], dtype=torch.bfloat16)
    linear_grpo_loss(*call, ratio="sequence", weights=weights).loss.backward()
    assert weight.grad[1].item() == pytest.approx(0.5 * (3 + 0.0078125) / 3, rel=1e-6)
    mask, weights = torch.tensor([[2.0, -1.0, 0.0]]), torch.tensor([[1.0, 4.0, 1.0]])
    loss = linear_grpo_loss(*call, ratio="sequence", weights=weights, mask=mask, normalizer=1).loss
    assert loss.item() == 2


@pytest.mark.parametrize("ratio, sizes", [("token", [6] * 5 + [5]), ("sequence", [7] * 5)])
def test_chunks_keep_sequences_whole_where_these_have_a_ratio(monkeypatch, ratio, sizes):
    made, multiply = [], torch.mm
    monkeypatch.setattr(torch, "mm", lambda *args, **out: made.append(len(args[0])) or multiply(*args, **out))
    call = make_call()
    call["hidden"].requires_grad_()
    linear_grpo_loss(**call, ratio=ratio, chunk=6).loss.backward()
    assert made[::2] == made[1::2] == sizes  # the logits', and those of their gradient


@pytest.mark.parametrize("divisor", [0.0, torch.tensor(0.0)])
def test_a_normalizer_of_0_leaves_nothing(divisor):
    call = make_call()
    call["hidden"].requires_grad_()
    loss = linear_grpo_loss(**call, normalizer=divisor).loss
    loss.backward()
    assert loss == 0 and not call["hidden"].grad.any()


@pytest.mark.gpu
@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_on_a_gpu_nothing_waits(ratio, aggregation):
    call = {name: None if x is None else x.cuda() for name, x in make_call(torch.bfloat16).items()}
    call["hidden"].requires_grad_()
    options = {"ratio": ratio, "aggregation": aggregation, "chunk": 8, "mask": padding_mask().cuda()}
    linear_grpo_loss(**call, **options).loss.backward()
    with forbid_waiting():
        linear_grpo_loss(**call, **options).loss.backward()


@pytest.mark.parametrize(
    "name, change",
    {
        "old_log_probs: got shape": {"old_log_probs": torch.zeros(3)},
        "advantages: got shape": {"advantages": torch.zeros(3)},
        "reference: got one together": {"reference": draw(shape=(5, 7))[:2], "ref_log_probs": torch.zeros(5, 7)},
        "reference: got 1 of them": {"reference": [torch.ones(5, 7, 5)]},
        "ratio: got 'row'": {"ratio": "row"},
        "entropy": {"entropy": 1},
        "clips": {"clips": 1},
        "hidden: got shape": {"hidden": torch.ones(())},
        "tokens: got shape": {"hidden": torch.ones(7, 5), "tokens": torch.ones(7, dtype=torch.int64)},
    }.items(),
    ids=str,
)
def test_bad_input_is_named_before_any_product(monkeypatch, name, change):
    monkeypatch.setattr(torch, "mm", None)
    call = make_call() | change
    call["hidden"].requires_grad_()
    with pytest.raises((TypeError, ValueError), match=name):
        linear_grpo_loss(**call)
