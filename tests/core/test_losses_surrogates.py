"""The surrogates of GRPO's successors, ratios of sequences, and weights that the normaliser does not count."""

import math
from functools import partial
from itertools import product

import oracles_losses as oracle
import pytest
import torch
from cases import check_full_graph, make_test_of_refusals
from losses_cases import close
from test_losses_tokens import offsets, padding_mask, tokens

from rl_triton_core.losses import grpo_loss
from rl_triton_core.testing import assert_close

pytestmark = pytest.mark.covering

SURROGATES = ("clip", "cispo", "sapo", "reinforce")
RATIOS = ("token", "sequence", "sequence-token")
AGGREGATIONS = ("token-mean", "sequence-mean", "sequence-sum")
OPTIONS = {"clip": 0.1, "clip_high": 0.3, "tau": 1.3, "tau_negative": 2.1, "kl_coef": 0.2}


def check(target, mask, per_token, weights, rtol, packed=False, spread=1.0, dtype=torch.float32, **options):
    """Loss, statistics and gradient are the oracle's. What stands in masked tokens is not read."""
    log_probs, old, ref, per_row, per_cell = tokens(dtype=dtype)
    old, valid = log_probs + spread * (old - log_probs), mask != 0
    advantages = per_cell if per_token else per_row
    factors = torch.rand(5, 7, generator=torch.Generator().manual_seed(3), dtype=dtype) if weights else None
    if weights:
        factors[0, :2] = 0
    exact = log_probs.double().clone().requires_grad_()
    exact_options = {**OPTIONS, "ref_log_probs": ref, "kl_estimator": "k3", "factors": factors, **options}
    want = oracle.grpo(exact, old, advantages, mask.double(), **exact_options)
    want.loss.backward()

    def place(x):
        x = x[valid] if packed else torch.where(valid, x, torch.nan)
        return x.to(target.device)

    leaf = place(log_probs).requires_grad_()
    got = grpo_loss(
        leaf, place(old), place(advantages) if per_token else advantages.to(target.device), ref_log_probs=place(ref),
        mask=(mask[valid] if packed else mask).to(target.device), weights=place(factors) if weights else None,
        cu_seqlens=offsets().to(target.device) if packed else None, backend=target.backend, **{**OPTIONS, **options},
    )  # fmt: skip
    for name, expected in want._asdict().items():
        close(getattr(got, name), expected, rtol, name)
    got.loss.backward()
    gradient = leaf.grad.double().cpu()
    if not packed:
        assert (gradient[~valid] == 0).all()
        gradient = gradient[valid]
    assert_close(gradient, exact.grad[valid], rtol=rtol)


def test_a_divergence_that_there_is_not_is_not_weighed(target):
    x = torch.ones(3, 2, device=target.device)
    for times_ratio in (False, True):
        got = grpo_loss(x, x, x[:, 0], kl_coef=0.0, kl_times_ratio=times_ratio, backend=target.backend)
        assert got.loss == -1 and got.kl == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("surrogate", SURROGATES)
@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("weights", [False, True])
def test_surrogates_and_ratios(target, surrogate, ratio, aggregation, packed, per_token, weights, dtype):
    if (ratio == "sequence" and per_token) or (dtype == torch.float64 and target.backend == "triton"):
        pytest.skip("it takes none")
    options = {"surrogate": surrogate, "ratio": ratio, "aggregation": aggregation}
    rtol = 1e-12 if dtype == torch.float64 else 4e-6
    check(target, padding_mask(), per_token, weights, rtol, packed, dtype=dtype, **options)


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_a_mask_of_weights(target, surrogate):
    """They are those of a sequence's mean, too."""
    mask = padding_mask() * torch.rand(5, 7, generator=torch.Generator().manual_seed(4))
    for ratio in RATIOS:
        check(target, mask, False, True, 4e-6, surrogate=surrogate, ratio=ratio, aggregation="sequence-mean")


@pytest.mark.parametrize("surrogate", SURROGATES)
@pytest.mark.parametrize("change", [-800.0, -20.0, 20.0, 300.0, 800.0])
@pytest.mark.parametrize("advantage", [-2.0, 0.0, 2.0])
def test_extreme_ratios(target, surrogate, change, advantage):
    """Gradients are finite wherever the loss is bounded, and those of the limit."""
    log_prob = torch.full((1, 1), -1.0, device=target.device, requires_grad=True)
    a = torch.full((1,), advantage, device=target.device)
    got = grpo_loss(log_prob, log_prob.detach() - change, a, surrogate=surrogate, backend=target.backend)
    got.loss.backward()
    bounded = {"cispo": -advantage * (1.2 if change > 0 else 0.8), "sapo": 0.0, "reinforce": -advantage}
    ratio = math.exp(change) if change < 88 else math.inf
    clipped = change > 0 if advantage >= 0 else change < 0
    slope = bounded.get(surrogate, 0.0 if clipped or not advantage else -advantage * ratio)
    assert float(log_prob.grad) == pytest.approx(slope, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("surrogate", SURROGATES[:3])
@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("clamp", [None, 20.0])
def test_a_token_that_cannot_be_drawn_any_more(target, surrogate, ratio, clamp):
    """Of log-probability −∞: loss and gradients are those of the limit."""
    log_probs, old, ref, per_row, _ = tokens()
    options = {"surrogate": surrogate, "ratio": ratio, "clip": 1.0, "log_ratio_clamp": clamp, "kl_estimator": "k1"}
    if ratio != "sequence" and clamp is None:  # else the divergence is part of no product
        options |= {"ref_log_probs": ref, "kl_coef": 0.1, "kl_times_ratio": True}
    log_probs[1, 2] = -1e6
    exact = log_probs.double().requires_grad_()
    want = oracle.grpo(exact, old, per_row, torch.ones(5, 7), aggregation="token-mean", **options)
    want.loss.backward()
    log_probs[1, 2] = -math.inf
    leaf = log_probs.to(target.device).requires_grad_()
    options = {name: x.to(target.device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    got = grpo_loss(leaf, old.to(target.device), per_row.to(target.device), backend=target.backend, **options)
    got.loss.backward()
    if surrogate != "cispo" or clamp is None:  # else a weight of exp(−20) times infinity is part of the loss
        close(got.loss, want.loss, 4e-6, "loss")
    assert_close(leaf.grad.double().cpu(), exact.grad, rtol=4e-6)


@pytest.mark.parametrize("surrogate", SURROGATES)
@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("number", [-math.inf, math.inf, math.nan])
def test_an_advantage_of_0_has_no_loss(target, surrogate, ratio, number):
    """Whatever the ratio is."""
    leaf = torch.tensor([[-1.0, -math.inf, -2.0]], device=target.device, requires_grad=True)
    old, a = torch.full_like(leaf, number), torch.zeros(1, device=target.device)
    got = grpo_loss(leaf, old, a, surrogate=surrogate, ratio=ratio, clip=None, backend=target.backend)
    got.loss.backward()
    assert got.loss == 0 and (leaf.grad == 0).all()


def test_known_answers(target):
    """A sequence of two tokens whose ratios are 2 and 8, so that the sequence's is 4."""
    old = torch.tensor([[-2.0, -3.0]], device=target.device)
    leaf = (old + torch.tensor([[2.0, 8.0]], device=target.device).log()).requires_grad_()
    a = torch.tensor([-3.0], device=target.device)
    for ratio, loss, slopes in (("token", 15.0, [3.0, 12.0]), ("sequence", 12.0, [6.0, 6.0])):
        got = grpo_loss(leaf, old, a, ratio=ratio, clip=None, backend=target.backend)
        assert float(got.loss.detach()) == pytest.approx(loss, rel=1e-6)
        (gradient,) = torch.autograd.grad(got.loss, leaf)
        assert_close(gradient.cpu(), torch.tensor([slopes]), rtol=1e-6)
    got = grpo_loss(leaf, old, -a, ratio="sequence", backend=target.backend)
    assert float(got.loss.detach()) == pytest.approx(-3.6) and got.clip_fraction == 1 and float(got.ratio_max) == 4


def test_weights_are_not_counted(target):
    """A weight of 0 takes a token out of the numerator alone; a mask, out of both."""
    x = torch.zeros(1, 4, device=target.device)
    a, weights = torch.ones(1, device=target.device), torch.tensor([[1.0, 0.0, 2.0, 0.0]], device=target.device)
    options = {"backend": target.backend}
    assert float(grpo_loss(x, x, a, weights=weights, **options).loss) == -0.75
    assert float(grpo_loss(x, x, a, weights=weights, mask=weights != 0, **options).loss) == -1.5
    far = a[:, None].expand(1, 4) / weights.clamp(max=1)
    assert float(grpo_loss(x, x, far, weights=weights, **options).loss) == -0.75
    assert float(grpo_loss(x, x, weights, weights=far, **options).loss) == -0.75
    leaf = far.log().neg().requires_grad_()
    options |= {"entropy_coef": 0.1, "ref_log_probs": x, "kl_coef": 0.1, "kl_estimator": "k2", "normalizer": 0.0}
    got = grpo_loss(leaf, x, a, **options)
    got.loss.backward()
    assert got.loss == 0 and (leaf.grad == 0).all()


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "k1+", "k3+"])
@pytest.mark.parametrize("ratio", ["token", "sequence-token"])
@pytest.mark.parametrize("bound", [None, 0.2])
def test_kl_times_ratio(target, estimator, ratio, bound):
    """Some log-ratios are beyond the bound, and weights of the surrogate do not count."""
    options = {"kl_estimator": estimator, "ratio": ratio, "log_ratio_clamp": bound, "aggregation": "sequence-mean"}
    for surrogate in ("clip", "reinforce"):
        check(target, padding_mask(), False, True, 4e-6, surrogate=surrogate, kl_times_ratio=True, **options)


def test_no_divergence_times_an_infinite_ratio(target):
    x = torch.full((1, 2), -1.0, device=target.device, requires_grad=True)
    old, a = torch.full_like(x, -1000.0), torch.zeros(1, device=target.device)
    options = {"ref_log_probs": x.detach(), "kl_coef": 1.0, "kl_times_ratio": True, "backend": target.backend}
    got = grpo_loss(x, old, a, **options)
    got.loss.backward()
    assert float(got.loss.detach()) == 0 and (x.grad == 0).all()


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_full_graph(backend):
    log_probs, old, _, per_row, per_cell = tokens()
    for surrogate, ratio in product(("sapo", "cispo"), ("token", "sequence")):
        options = {"surrogate": surrogate, "ratio": ratio, "weights": per_cell.abs(), "mask": padding_mask()}
        loss = lambda x, given=options: grpo_loss(2 * x, 2 * old, per_row, backend=backend, **given).loss  # noqa: E731
        check_full_graph(loss, log_probs.requires_grad_(), compare=partial(assert_close, rtol=1e-6))


X = torch.zeros(2, 3)
BAD = {
    "surrogate: got 'ppo'": lambda: grpo_loss(X, X, X, surrogate="ppo"),
    "ratio: got 'row'": lambda: grpo_loss(X, X, X, ratio="row"),
    "ratio: got 'sequence' with advantages per token": lambda: grpo_loss(X, X, X, ratio="sequence"),
    "kl_times_ratio: got 1, expected a bool": lambda: grpo_loss(X, X, X, kl_times_ratio=1),
    "kl_times_ratio: got True with the": lambda: grpo_loss(X, X, X[:, 0], ratio="sequence", kl_times_ratio=True),
    "weights: got shape": lambda: grpo_loss(X, X, X, weights=X[0]),
    "weights: got -1 among": lambda: grpo_loss(X, X, X, weights=X - 1),
    "weights: got dtype": lambda: grpo_loss(X, X, X, weights=X.long()),
    "tau: got 0": lambda: grpo_loss(X, X, X, surrogate="sapo", tau=0.0),
    "tau_negative: got nan": lambda: grpo_loss(X, X, X, surrogate="sapo", tau_negative=math.nan),
}
test_bad_arguments = make_test_of_refusals(BAD)
