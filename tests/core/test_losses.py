"""The losses: equations, gradients, edge cases, accuracy, memory formats, and what they refuse."""

import math
import random

import pytest
import torch
from cases import make_test_of_refusals
from hypothesis import given, settings
from hypothesis import strategies as st
from losses_cases import HEADS, Case, call, check, differentiate, leaves, make

from rl_triton_core import losses
from rl_triton_core.losses import Bernoulli, Categorical, Gaussian, LogProbs, MultiCategorical, get_gradients, ppo_loss
from rl_triton_core.testing import assert_close

pytestmark = pytest.mark.covering

NAN, INF = math.nan, math.inf
POLICY_OPTIONS = {
    "plain": {},
    "clip-higher and dual clip": {"clip": 0.1, "clip_high": 0.3, "dual_clip": 1.2, "entropy_coef": 0.01},
    "clamped": {"log_ratio_clamp": 0.25, "kl_clip": 0.02, "kl_coef": 0.3, "kl_estimator": "k3"},
    "normalized": {"normalize_advantages": True, "correction": 0, "epsilon": 0.5, "entropy_coef": -0.1},
}
VALUE_CLIPS, DISTANCES = ("none", "sb3", "cleanrl", "rllib"), ("mse", "huber")


def value_options(clip, distance):
    clips = {} if clip == "none" else {"value_clip": 0.25, "value_clip_mode": clip}
    return {**clips, "value_loss": distance, "huber_delta": 0.7, "value_factor": 0.5}


def mask_of(n, kind, seed=5):
    if kind is None:
        return None
    flags = torch.rand(n, generator=torch.Generator().manual_seed(seed)) < 0.6
    return flags * torch.rand(n, generator=torch.Generator().manual_seed(6)) * 2 if kind == "weights" else flags


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("options", POLICY_OPTIONS)
@pytest.mark.parametrize("mask", [None, "flags", "weights"])
def test_heads(target, head, options, mask):
    check(make(head), target, mask=mask_of(37, mask), **{"entropy_coef": 0.02, **POLICY_OPTIONS[options]})


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("clip", VALUE_CLIPS)
def test_values(target, clip, distance):
    case, options = make("ppo", n=200), value_options(clip, distance)
    check(case, target, value_coef=0.7, mask=mask_of(200, "weights"), **options)


@pytest.mark.parametrize("clips", [{}, {"log_ratio_clamp": 0.25, "kl_clip": 0.02}, {"log_ratio_clamp": 0.25}])
@pytest.mark.parametrize("suffix", ["+", ""])
@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_estimators_of_kl(target, kind, suffix, clips):
    check(make("ppo", n=100), target, kl_coef=0.4, kl_estimator=kind + suffix, mask=mask_of(100, "flags"), **clips)


@pytest.mark.parametrize("head", ["categorical", "multi", "nvec", "gaussian", "gaussian per state", "bernoulli"])
def test_exact_kl(target, head):
    check(make(head), target, exact_kl=True, kl_coef=0.3, mask=mask_of(37, "flags"))


@given(seed=st.integers(0, 1 << 30), n=st.integers(1, 70), size=st.integers(1, 9), choice=st.integers(0, 1 << 30))
def test_any_minibatch(target, seed, n, size, choice):
    """With any options; of a few combinations on the cpu backend, which compiles each of them for seconds."""
    few = max(2, math.isqrt(settings.default.max_examples))
    pick = random.Random(choice % few if target.backend == "cpu" else choice).choice
    head, policy, value = pick(HEADS), pick(sorted(POLICY_OPTIONS)), value_options(pick(VALUE_CLIPS), pick(DISTANCES))
    mask = mask_of(n, pick([None, "flags", "weights"]), seed)
    if mask is not None and (not mask.any() or mask.sum() < 3):
        mask = None
    options = POLICY_OPTIONS[policy]
    if options.get("normalize_advantages") and n < 3:
        options = {}
    case = make(head, n, size, seed)
    case.data["returns"][0] += 1  # they vary, if there are two
    if n == 1 or (mask is not None and mask.sum() < 3):
        case.network["values"], case.data["returns"] = case.network["values"] * 0, case.data["returns"] * 0
    check(case, target, mask=mask, rtol=1e-4, grad_rtol=1e-4, **value, **options)


def test_gradients_without_a_backward_pass(target):
    x = torch.randn(3, device=target.device, requires_grad=True)
    values = x.detach().clone()
    loss = ppo_loss(
        LogProbs(x), None, x.detach() + 0.1, values + 1, values=values, returns=x.detach(), backend=target.backend
    ).loss
    by_log_probs, by_values = get_gradients(loss)
    assert by_values is None
    assert torch.equal(by_log_probs, torch.autograd.grad(loss, x)[0])
    for other in (loss.detach(), x.sum()):
        with pytest.raises(ValueError, match="loss: got a tensor with grad_fn"):
            get_gradients(other)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap])
def test_transforms_are_refused(target, transform):
    x = torch.zeros(3, device=target.device)
    for function in (
        lambda y: losses.grpo_loss(y[None], x[None], x[:1], backend=target.backend).loss,
        lambda y: losses.token_log_probs(y[None], x[:1].long(), backend=target.backend).log_probs.sum(),
    ):
        with pytest.raises(RuntimeError, match=r"^\w+: got a call under torch.func"):
            transform(function)(x if transform is torch.func.grad else x.expand(2, 3))


def test_a_second_derivative_is_refused(target):
    x = torch.zeros(3, device=target.device, requires_grad=True)
    loss = ppo_loss(LogProbs(x), None, x.detach(), x.detach() + 1, backend=target.backend).loss
    with pytest.raises(RuntimeError, match="create_graph: got True"):
        torch.autograd.grad(loss, x, create_graph=True)


@pytest.mark.parametrize("head", ["categorical", "gaussian"])
def test_a_retained_graph_gives_the_same_gradient_again(target, head):
    case = make(head)
    network, inputs = leaves(case.network)
    loss = call(case, network, device=target.device, backend=target.backend).loss
    first = torch.autograd.grad(3 * loss, inputs, retain_graph=True)
    kept = [x.clone() for x in first]
    for x in first:
        x.zero_()  # what a caller does with a gradient is its own business
    second = torch.autograd.grad(3 * loss, inputs)
    for got, want in zip(second, kept, strict=True):
        assert_close(got, want, rtol=0)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, inputs)


@pytest.mark.parametrize("factor", [1.0, 0.0, -2.5])
def test_the_incoming_gradient_scales(target, factor):
    check(make("categorical"), target, factor=factor)


def test_only_what_requires_grad_has_a_gradient(target):
    case = make("gaussian")
    network, _ = leaves(case.network)
    network["mean"].requires_grad_(False)
    call(case, network, device=target.device, backend=target.backend, entropy_coef=0.1).loss.backward()
    assert network["mean"].grad is None and network["log_std"].grad.abs().sum() > 0
    with torch.no_grad():
        assert not call(case, network, device=target.device, backend=target.backend).loss.requires_grad


EXACT_VALUES = [("sb3", "mse"), ("cleanrl", "huber"), ("rllib", "huber")]
EXACT_OPTIONS = POLICY_OPTIONS | {" ".join(names): value_options(*names) for names in EXACT_VALUES}
EXACT_OPTIONS |= {name: {"kl_estimator": name, "kl_coef": 0.1} for name in ("k1", "k2+", "k3")}
EXACT_OPTIONS |= {"exact KL": {"exact_kl": True, "kl_coef": 0.1}}
"""Of equations those that float32 has in other pairs."""


@pytest.mark.parametrize("options", EXACT_OPTIONS)
@pytest.mark.parametrize("head", HEADS)
def test_float64(float64_target, head, options):
    """With numbers and weights that float32 does not hold."""
    options = {"entropy_coef": 0.1, "value_coef": 0.7, **EXACT_OPTIONS[options]}
    options["exact_kl"] = head not in ("ppo", "entropy") and options.get("exact_kl", False)
    options["kl_coef"] = options.get("kl_coef", 0.0) if options["exact_kl"] or "kl_estimator" in options else 0.0
    case = make(head, dtype=torch.float64)
    check(case, float64_target, mask=mask_of(37, "weights").double() / 3, rtol=1e-13, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head", ["ppo", "categorical", "gaussian", "bernoulli"])
def test_half_precision(target, head, dtype):
    case = make(head, dtype=dtype)
    check(case, target, rtol=1e-5, grad_rtol=8e-3 if dtype == torch.bfloat16 else 1e-3)


def test_gradients_in_float16_are_scaled_before_they_are_rounded(target):
    n = 1 << 8
    x = torch.zeros(n, dtype=torch.float16, device=target.device, requires_grad=True)
    loss = ppo_loss(LogProbs(x), None, x.detach(), torch.full_like(x, 2.0**-18), backend=target.backend).loss
    (65536 * loss).backward()
    assert_close(x.grad.float(), torch.full((n,), -(2.0**-10), device=target.device), rtol=1e-3)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("n", [0, 5])
def test_no_element_that_counts(target, head, n):
    """The loss and the gradients are 0, whatever stands in the masked elements."""
    case = poisoned(make(head, n=max(n, 1)), slice(None))
    if not n:
        case = Case(case.head, *({k: v if k == "nvec" else head_of(v) for k, v in x.items()} for x in case[1:]))
    options = {"value_clip": 0.2, "normalize_advantages": True, "entropy_coef": 0.1, "kl_coef": 1.0}
    kl = {"kl_estimator": "k3"} if head in ("ppo", "entropy") else {"exact_kl": True}
    got, inputs = differentiate(case, target, mask=torch.zeros(n, dtype=torch.bool), **options, **kl)
    assert got.loss == 0 and got.explained_variance.isnan()
    assert all(x == 0 for name, x in got._asdict().items() if name != "explained_variance")
    assert all(x.grad.eq(0).all() for x in inputs)


def head_of(x):
    """No rows, of what has rows."""
    return [y[:0] for y in x] if isinstance(x, list) else x[:0] if x.shape != (5,) else x


def poisoned(case, where):
    """NaN in all real tensors of these rows."""

    def spoil(x):
        if isinstance(x, list):
            return [spoil(y) for y in x]
        if isinstance(x, torch.Tensor) and x.is_floating_point() and len(x) == len(case.data["advantages"]):
            x = x.clone()
            x[where] = NAN
        elif isinstance(x, torch.Tensor) and not x.is_floating_point():
            x = x.clone()
            x[where] = -7
        return x

    return Case(case.head, *({name: spoil(x) for name, x in group.items()} for group in case[1:]))


@pytest.mark.parametrize("head", HEADS)
def test_what_is_masked_leaves_no_trace(target, head):
    clean = make(head)
    mask = mask_of(37, "flags")
    options = {"mask": mask, "normalize_advantages": True, "value_clip": 0.2, "entropy_coef": 0.1, "kl_coef": 0.5}
    options |= {"kl_estimator": "k3"} if head in ("ppo", "entropy") else {"exact_kl": True}
    results = []
    for case in (clean, poisoned(clean, ~mask)):
        got, inputs = differentiate(case, target, **options)
        results.append([*(x.detach().cpu() for x in got), *(x.grad for x in inputs)])
    for want, got in zip(*results, strict=True):
        assert torch.equal(want, got)
    assert all(x.grad[~mask].eq(0).all() for x in inputs if len(x) == 37)


def test_advantages_are_normalized_over_what_counts(target):
    x = torch.tensor([1.0, 2.0, 6.0, 50.0], device=target.device)
    mask, options = x < 50, {"normalize_advantages": True, "backend": target.backend}
    want = ppo_loss(LogProbs(x[:3] / 9), None, x[:3] / 10, x[:3], **options)
    got = ppo_loss(LogProbs(x / 9), None, x / 10, x, mask=mask, **options)
    assert_close(torch.stack(got[:9]), torch.stack(want[:9]), rtol=1e-6)
    terms = [math.exp(a / 90) * (a - 3) / math.sqrt(7) for a in (1, 2, 6)]
    assert float(got.policy_loss) == pytest.approx(-sum(terms) / 3, rel=1e-5)


def test_a_valid_nan_spoils_the_loss(target):
    case = poisoned(make("categorical"), slice(3, 4))
    assert call(case, case.network, device=target.device, backend=target.backend).loss.isnan()


def test_a_ratio_or_a_divergence_that_is_nan_has_such_a_gradient(target):
    """Of its element alone, as PyTorch's operations without a clamp have it."""
    x = torch.tensor([-1.0, -2.0, -3.0], device=target.device)
    for reference in (False, True):
        leaf, other = x.clone().requires_grad_(), x.clone()
        other[1] = NAN
        options = {"ref_log_probs": other, "kl_coef": 0.1, "kl_estimator": "k3"} if reference else {}
        got = ppo_loss(LogProbs(leaf), None, x if reference else other, x, backend=target.backend, **options)
        got.loss.backward()
        assert leaf.grad.isnan().tolist() == [False, True, False]


ONLY_LOGGED = [
    ("ppo", "values", INF, {"value_coef": 0.0}),
    ("ppo", "values", NAN, {"value_factor": 0.0}),
    *(("ppo", "returns", -INF, {"value_coef": 0.0, **value_options(x, "huber")}) for x in VALUE_CLIPS[:3]),
    ("entropy", "entropy", INF, {}),
    *(("ppo", "ref_log_probs", -INF, {"kl_estimator": x}) for x in ("k1", "k2", "k3", "k1+", "k3+")),
    ("categorical", "old_logits", NAN, {"exact_kl": True}),
    ("bernoulli", "old_logits", NAN, {"exact_kl": True}),
    ("gaussian per state", "old_log_std", 1e3, {"exact_kl": True}),
]


@pytest.mark.parametrize(("head", "name", "number", "options"), ONLY_LOGGED)
def test_a_term_with_the_coefficient_0_does_not_enter_the_loss(target, head, name, number, options):
    """Be it infinite: loss and gradients are those without that number."""
    results = []
    for spoilt in (False, True):
        case = make(head)
        if spoilt:
            next(group for group in case[1:] if name in group)[name][3] = number
        network, inputs = leaves(case.network)
        moved = {key: x.to(target.device) for key, x in network.items()}
        got = call(case, moved, device=target.device, backend=target.backend, **options)
        got.loss.backward()
        results.append([got.loss.detach().cpu(), *(x.grad for x in inputs)])
        finite = all(float(x.detach()) < INF for x in (got.value_loss, got.entropy, got.kl))
        assert finite != spoilt or options.get("value_factor") == 0
    for want, x in zip(*results, strict=True):
        assert torch.equal(want, x)


@pytest.mark.parametrize("advantage", [0.0, 2.0])
def test_a_gaussian_that_cannot_draw_the_action(target, advantage):
    """Its ratio is 0, and so are the derivatives, which would be 0 times infinity."""
    case = make("gaussian per state")
    case.network["log_std"][3], case.data["advantages"][3] = -1e3, advantage
    got, inputs = differentiate(case, target)
    assert got.loss.isfinite() and got.ratio_min == 0
    assert all(x.grad.isfinite().all() for x in inputs) and inputs[0].grad[3].eq(0).all()


def test_one_element(target):
    """SB3 does not normalise one advantage; the variance of one return explains nothing."""
    x = torch.zeros(1, device=target.device, requires_grad=True)
    old, options = x.detach(), {"normalize_advantages": True, "backend": target.backend}
    got = ppo_loss(LogProbs(x), None, old, old + 2, values=old, returns=old, **options)
    assert got.loss == -2 and got.explained_variance.isnan()
    got.loss.backward()
    assert x.grad == -2


@pytest.mark.parametrize("advantage, loss, grad", [(1.0, -1.2, 0.0), (0.0, 0.0, 0.0), (-1.0, 3.0, 0.0)])
def test_a_ratio_that_overflows(target, advantage, loss, grad):
    x = torch.full((1,), 500.0, device=target.device, requires_grad=True)
    options = {"dual_clip": 3.0, "backend": target.backend}
    got = ppo_loss(LogProbs(x), None, x.detach() * 0, torch.full_like(x.detach(), advantage), **options)
    got.loss.backward()
    assert float(got.loss.detach()) == pytest.approx(loss) and x.grad == grad
    clamped = ppo_loss(
        LogProbs(x.detach()), None, x.detach() * 0, x.detach() / -500, log_ratio_clamp=20, backend=target.backend
    )
    assert float(clamped.loss) == pytest.approx(math.exp(20), rel=1e-6)


def test_actions_that_are_not_allowed(target):
    logits = torch.tensor([[0.0, -INF, math.log(3.0)], [-INF, 5.0, -INF]], device=target.device, requires_grad=True)
    actions, old = torch.tensor([2, 1], device=target.device), torch.tensor([0.75, 1.0], device=target.device).log()
    policy, options = Categorical(logits, logits.detach()), {"entropy_coef": 0.5, "kl_coef": 1.0}
    got = ppo_loss(policy, actions, old, old * 0 + 1, backend=target.backend, **options)
    entropy = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75)) / 2
    assert float(got.entropy) == pytest.approx(entropy, rel=1e-6) and abs(float(got.kl)) < 1e-7
    got.loss.backward()
    slope = 0.5 * 0.25 * (math.log(0.25) + 2 * entropy) * 0.5 + 0.125
    want = torch.tensor([[slope, 0.0, -slope], [0.0, 0.0, 0.0]], device=target.device)
    assert_close(logits.grad, want, rtol=1e-6)


def test_categorical_logits_that_are_large(target):
    logits = torch.tensor([[1e30, -1e30], [3e38, 3e38]], device=target.device, requires_grad=True)
    actions, old = torch.zeros(2, dtype=torch.int64, device=target.device), logits.detach()[:, 0] * 0
    got = ppo_loss(Categorical(logits), actions, old, old + 1, entropy_coef=0.5, backend=target.backend)
    got.loss.backward()
    assert float(got.entropy) == pytest.approx(math.log(2) / 2)
    assert float(got.loss.detach()) == pytest.approx(-0.75 - math.log(2) / 4)
    assert_close(logits.grad.cpu(), torch.tensor([[0, 0], [-0.125, 0.125]]), rtol=1e-6)


@pytest.mark.parametrize("action", [-1, 3])
def test_an_action_that_there_is_not(target, action):
    logits = torch.zeros(2, 3, device=target.device)
    actions = torch.tensor([0, action], device=target.device)
    got = ppo_loss(Categorical(logits), actions, logits[:, 0], logits[:, 0] + 1, backend=target.backend)
    assert got.loss.isnan()


@pytest.mark.parametrize(("size", "is_likely"), [(1e3, True), (1e30, True), (INF, True), (1e3, False)])
def test_bernoulli_logits_that_are_large(target, size, is_likely):
    logits = torch.tensor([[size, -size]], device=target.device, requires_grad=True)
    old = torch.full((1,), 0.0 if is_likely else -2 * size, device=target.device)
    actions, coefficient = (logits > 0) == is_likely, float(is_likely)
    got = ppo_loss(Bernoulli(logits), actions, old, old * 0 + 1, entropy_coef=coefficient, backend=target.backend)
    got.loss.backward()
    assert got.loss == -1 and logits.grad.tolist() == [[0, 0] if is_likely else [1, -1]]


def test_known_answers(target):
    """By hand: ratios 1, 1.5 and 0.5."""
    old = torch.zeros(3, device=target.device)
    new = torch.tensor([1.0, 1.5, 0.5], device=target.device).log()
    advantages = torch.tensor([2.0, 1.0, -1.0], device=target.device)
    got = ppo_loss(LogProbs(new), None, old, advantages, backend=target.backend)
    assert float(got.loss) == pytest.approx(-(2 + 1.2 - 0.8) / 3)
    assert float(got.clip_fraction) == pytest.approx(2 / 3) and float(got.ratio_mean) == 1
    assert (float(got.ratio_min), float(got.ratio_max)) == pytest.approx((0.5, 1.5))
    assert float(got.entropy) == pytest.approx(-math.log(0.75) / 3) == float(got.approx_kl_k1)
    v, r, old_v = (torch.tensor([x], device=target.device) for x in (1.0, 0.0, 0.5))
    options = {"returns": r, "old_values": old_v, "backend": target.backend}
    for mode, want in (("sb3", 0.36), ("cleanrl", 1.0), ("rllib", 0.1)):
        got = ppo_loss(LogProbs(r), None, r, r, values=v, value_clip=0.1, value_clip_mode=mode, **options)
        assert float(got.value_loss) == pytest.approx(want)
    assert float(ppo_loss(LogProbs(r), None, r, r, values=v * 3, huber_delta=1.0, **options).value_loss) == 2.5


@pytest.mark.parametrize("head, n", [("ppo", 5000), ("categorical", 3000), ("gaussian", 3000)])
def test_sums_are_as_exact_as_their_rounding(target, head, n):
    """Where the terms do not cancel: at most twice the rounding of the exact sum of float32 terms."""
    n = n if not target.interpreted else 300
    case = make(head, n=n)
    case.data["advantages"] = case.data["advantages"].abs() + 0.5
    check(case, target, rtol=4e-7, grad_rtol=2e-6)
    got = call(case, case.network, device=target.device, backend=target.backend).value_loss
    exact = ((case.network["values"].double() - case.data["returns"].double()) ** 2).mean()
    assert abs(float(got) / float(exact) - 1) < 2**-23


def test_kl_of_nearly_equal_policies_keeps_its_digits(target):
    x = torch.full((64,), 1e-4, device=target.device)
    got = ppo_loss(
        LogProbs(x), None, x * 0, x, ref_log_probs=x * 2, kl_estimator="k3", kl_coef=1.0, backend=target.backend
    )
    assert float(got.approx_kl) == pytest.approx(math.expm1(1e-4) - 1e-4, rel=1e-4)
    assert float(got.kl) == pytest.approx(5.0001667e-9, rel=1e-5)


def test_any_shape_and_strides(target):
    case = make("categorical", n=24, size=4)
    want = call(case, case.network, device=target.device, backend=target.backend)

    def spread_out(x):
        if x.shape[0] != 24:
            return x
        x = x.view(4, 6, *x.shape[1:])
        return x.transpose(0, 1).contiguous().transpose(0, 1)

    moved = Case(case.head, *({name: spread_out(x) for name, x in group.items()} for group in case[1:]))
    network, _ = leaves(moved.network)
    logits = network["logits"].detach().transpose(-1, -2).contiguous().transpose(-1, -2).requires_grad_()
    got = call(moved, {**network, "logits": logits}, device=target.device, backend=target.backend)
    assert torch.equal(got.loss.detach(), want.loss)
    got.loss.backward()
    assert logits.grad.shape == (4, 6, 4)


def test_log_sigma_of_each_element_in_memory_of_one(target):
    """It has a gradient for each element although all share memory."""
    case = make("gaussian per state", size=2)
    shared = case.network["log_std"][0]
    gradients = []
    for form in (shared.repeat(37, 1), shared.expand(37, -1)):
        log_std = form.to(target.device).detach().requires_grad_()
        result = call(case, {**case.network, "log_std": log_std}, device=target.device, backend=target.backend)
        gradients += torch.autograd.grad(result.loss, log_std)
    assert torch.equal(*gradients) and gradients[0].shape == (37, 2)


def test_numbers_as_tensors(target):
    case = make("ppo")
    names = "clip", "entropy_coef", "value_clip", "value_coef", "kl_coef", "clip_high"
    numbers = dict(zip(names, (0.15, 0.03, 0.2, 0.3, 0.2, 0.3), strict=True))
    options = {"kl_estimator": "k2", "device": target.device, "backend": target.backend}
    want = call(case, case.network, **options, **numbers)
    got = call(case, case.network, **options, **{k: torch.tensor(x) for k, x in numbers.items()})
    assert_close(torch.stack(got), torch.stack(want), rtol=1e-7)


X, Y = torch.zeros(4), torch.zeros(4, 1)
BAD = {
    "old_log_probs: got shape": lambda: ppo_loss(LogProbs(X), None, X[:3], X),
    "old_log_probs: got NoneType": lambda: ppo_loss(LogProbs(X), None, None, X),
    "advantages: got NoneType": lambda: ppo_loss(Categorical(torch.zeros(4, 5)), X.int(), X, None),
    "advantages: got dtype": lambda: ppo_loss(LogProbs(X), None, X, X.int()),
    "advantages: got a tensor that requires grad": lambda: ppo_loss(LogProbs(X), None, X, X.clone().requires_grad_()),
    "returns: got None": lambda: ppo_loss(LogProbs(X), None, X, X, values=X),
    "values: got None": lambda: ppo_loss(LogProbs(X), None, X, X, returns=X),
    "old_values: got None": lambda: ppo_loss(LogProbs(X), None, X, X, values=X, returns=X, value_clip=0.2),
    "value_clip_mode: got 'both'": lambda: ppo_loss(LogProbs(X), None, X, X, value_clip_mode="both"),
    "huber_delta: got -1.0": lambda: ppo_loss(LogProbs(X), None, X, X, huber_delta=-1.0),
    "policy: got Tensor": lambda: ppo_loss(X, X, X, X),
    "actions: got Tensor together with LogProbs": lambda: ppo_loss(LogProbs(X), X, X, X),
    "actions: got NoneType": lambda: ppo_loss(Categorical(Y), None, X, X),
    "entropy: got shape": lambda: ppo_loss(LogProbs(X, X[:3]), None, X, X),
    "kl_estimator: got 'k4'": lambda: ppo_loss(LogProbs(X), None, X, X, kl_estimator="k4"),
    "kl_coef: got one without": lambda: ppo_loss(LogProbs(X), None, X, X, kl_coef=0.1),
    "clip: got -0.1": lambda: ppo_loss(LogProbs(X), None, X, X, clip=-0.1),
    "value_coef: got inf": lambda: ppo_loss(LogProbs(X), None, X, X, values=X, returns=X, value_coef=math.inf),
    "dual_clip: got 0.5": lambda: ppo_loss(LogProbs(X), None, X, X, dual_clip=0.5),
    "entropy_coef: got shape": lambda: ppo_loss(LogProbs(X), None, X, X, entropy_coef=X),
    "entropy_coef: got a tensor that requires grad": lambda: ppo_loss(
        LogProbs(X), None, X, X, entropy_coef=X.sum().requires_grad_()
    ),
    "epsilon: got -1": lambda: ppo_loss(
        LogProbs(X), None, X, X, normalize_advantages=losses.Normalization(epsilon=-1.0)
    ),
    "normalize_advantages: got int": lambda: ppo_loss(LogProbs(X), None, X, X, normalize_advantages=1),
    "mask: got shape": lambda: ppo_loss(LogProbs(X), None, X, X, mask=X[:2]),
    "logits: got no tensor": lambda: ppo_loss(MultiCategorical([]), X, X, X),
    "logits: got shape": lambda: ppo_loss(Categorical(X.view(4, 1)[:, :0]), X.int(), X, X),
    "nvec: got .* add up to 5": lambda: ppo_loss(MultiCategorical(torch.zeros(4, 5), [2, 2]), X.int(), X, X),
    "nvec: got .* together with 2": lambda: ppo_loss(MultiCategorical([Y] * 2, [2, 2]), X.int(), X, X),
    "actions: got dtype": lambda: ppo_loss(Categorical(torch.zeros(4, 5)), X, X, X),
    "old_logits: got 4 elements of sizes": lambda: ppo_loss(Categorical(Y, torch.zeros(4, 2)), X.int(), X, X),
    "old_logits: got 3 elements": lambda: ppo_loss(Categorical(Y, Y[:3]), X.int(), X, X),
    "old_log_std: got one of": lambda: ppo_loss(Gaussian(Y, X[:1], Y), Y, X, X),
    "log_std: got shape": lambda: ppo_loss(Gaussian(X.view(4, 1), X[:2]), X.view(4, 1), X, X),
    "ref_log_probs: got them and": lambda: ppo_loss(Bernoulli(Y, Y), Y, X, X, ref_log_probs=X),
}
test_bad_arguments = make_test_of_refusals(BAD)
