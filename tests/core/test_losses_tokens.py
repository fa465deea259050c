"""GRPO over rows, masks and packed sequences, and rewards relative to their group."""

import itertools
import math

import numpy as np
import oracles_losses as oracle
import pytest
import torch
from cases import make_test_of_refusals
from losses_cases import close

from rl_triton_core.losses import group_normalize, grpo_loss
from rl_triton_core.testing import assert_close

pytestmark = pytest.mark.covering

AGGREGATIONS = ("token-mean", "sequence-mean", "sequence-sum")
LENGTHS = (3, 0, 7, 1, 5)


def tokens(seed=0, rows=5, columns=7, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    log_probs = -torch.rand(rows, columns, generator=g, dtype=dtype)
    old, ref = (log_probs + 0.3 * torch.randn(rows, columns, generator=g, dtype=dtype) for _ in range(2))
    return log_probs, old, ref, *(torch.randn(*size, generator=g, dtype=dtype) for size in ((rows,), (rows, columns)))


def padding_mask(lengths=LENGTHS):
    return torch.arange(7) < torch.tensor(lengths)[:, None]


def offsets():
    return torch.tensor([0, *LENGTHS]).cumsum(0)


@pytest.mark.parametrize("dtype, rtol", [(torch.float32, 2e-6), (torch.float64, 1e-13)])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("normalizer", [None, 11.1])
@pytest.mark.parametrize("kind", [None, "flags", "weights"])
def test_rows_and_packed_rows(target, aggregation, per_token, normalizer, kind, dtype, rtol):
    """Packed rows are the unmasked tokens of a matrix, without the others."""
    if dtype == torch.float64 and target.backend == "triton":
        pytest.skip("it takes none")
    log_probs, old, ref, per_row, per_cell = tokens(dtype=dtype)
    mask = torch.ones(5, 7) if kind is None else padding_mask().to(dtype)
    if kind == "weights":
        mask *= torch.rand(5, 7, generator=torch.Generator().manual_seed(1), dtype=dtype)
    advantages = per_cell if per_token else per_row
    options = {"clip": 0.1, "clip_high": 0.3, "kl_coef": 0.2, "aggregation": aggregation, "normalizer": normalizer}
    exact = log_probs.double().clone().requires_grad_()
    want = oracle.grpo(exact, old, advantages, mask, ref_log_probs=ref, kl_estimator="k3", **options)
    want.loss.backward()
    valid = mask != 0

    def run(select, mask, **more):
        leaf = select(log_probs).clone().requires_grad_()
        streams = [x.to(target.device) for x in (select(old), select(advantages) if per_token else advantages)]
        got = grpo_loss(
            leaf.to(target.device), *streams, ref_log_probs=select(ref).to(target.device),
            mask=None if mask is None else mask.to(target.device), backend=target.backend, **more, **options,
        )  # fmt: skip
        for name, expected in want._asdict().items():
            close(getattr(got, name), expected, rtol, name)
        got.loss.backward()
        assert_close(leaf.grad.double(), select(exact.grad), rtol=rtol)

    run(lambda x: x, None if kind is None else mask if kind == "weights" else mask.bool())
    if kind is None:
        run(lambda x: x.flatten(), None, cu_seqlens=torch.arange(0, 36, 7, device=target.device))
    else:
        weights = mask[valid] if kind == "weights" else None
        run(lambda x: x[valid], weights, cu_seqlens=offsets().to(target.device))


@pytest.mark.parametrize(
    "lengths, packed, want",
    [
        (None, False, (-10 / 6, -(2 + 4 / 3) / 2, -10 / 2)),
        ((3, 1), False, (-10 / 4, -(2 + 4) / 2, -10 / 2)),
        ((3, 0), False, (-6 / 3, -2 / 2, -6 / 2)),
        ((3, 0, 1), True, (-10 / 4, -(2 + 4) / 3, -10 / 3)),
    ],
)
def test_aggregations(target, lengths, packed, want):
    """By hand: tokens of ratio 1, whose losses are −1, −2 and −3, then −4 and zeros."""
    advantages = torch.tensor([[1.0, 2.0, 3.0], [4.0, 0.0, 0.0]], device=target.device)
    options = {}
    if packed:
        advantages = advantages.flatten()[:4]
        options["cu_seqlens"] = torch.tensor([0, *lengths], device=target.device).cumsum(0)
    elif lengths is not None:
        options["mask"] = (torch.arange(3) < torch.tensor(lengths)[:, None]).to(target.device)
    for aggregation, loss in zip(AGGREGATIONS, want, strict=True):
        options |= {"aggregation": aggregation, "backend": target.backend}
        got = grpo_loss(advantages * 0, None, advantages, **options)
        assert float(got.loss) == pytest.approx(loss, rel=1e-6) and got.ratio_mean == 1


def test_as_many_sequences_as_tokens(target):
    """Some of them empty: flat advantages are per sequence, as those of rows are, and a warning says so."""
    x, a = torch.tensor([[-1.0, -2.0, -3.0], [5.0, 2.0, 4.0]], device=target.device)
    cu_seqlens = torch.tensor([0, 0, 2, 3], dtype=torch.int32, device=target.device)
    options = {"cu_seqlens": cu_seqlens, "aggregation": "sequence-mean", "backend": target.backend}
    with pytest.warns(UserWarning, match="as many as sequences and as tokens, and took one per sequence"):
        flat = grpo_loss(x, None, a, **options).loss
    assert float(flat) == float(grpo_loss(x, None, a[:, None], **options).loss) == -2
    assert float(grpo_loss(x, None, a[None], **options).loss) == pytest.approx(-(3.5 + 4) / 3)


@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_answers_of_one_token(target, ratio, recwarn):
    """One advantage of each is one per token and one per sequence."""
    x, a = torch.tensor([[-1.0, -2.0, -3.0], [5.0, 2.0, 4.0]], device=target.device)
    packed, options = {"cu_seqlens": torch.arange(4, device=target.device)}, {"ratio": ratio, "backend": target.backend}
    calls = [(x, a[:, None], packed), (x[:, None], a[:, None], {}), (x[:, None], a, {})]
    calls += [(x, a, packed)] if ratio == "sequence" or target.device == "cpu" else []  # a GPU's offsets are not read
    calls += [(x, a[None], packed)] if ratio == "token" else []
    for log_probs, advantages, more in calls:
        assert float(grpo_loss(log_probs, None, advantages, **more, **options).loss) == pytest.approx(-11 / 3)
    assert not [x for x in recwarn if x.category is UserWarning]


@pytest.mark.parametrize("ratio", ["token", "sequence", "sequence-token"])
def test_a_column_of_advantages_is_one_per_sequence(target, ratio):
    log_probs, old, _, per_row, _ = (x.to(target.device) for x in tokens())
    options = {"ratio": ratio, "weights": -log_probs, "backend": target.backend}
    want, got = (grpo_loss(log_probs, old, a, **options).loss for a in (per_row, per_row[:, None]))
    assert torch.equal(want, got)


def test_the_policy_itself_is_the_old_one(target):
    log_probs, _, _, per_row, _ = (x.to(target.device) for x in tokens())
    leaf = log_probs.clone().requires_grad_()
    got = grpo_loss(leaf, None, per_row, backend=target.backend)
    assert got.ratio_min == got.ratio_max == 1 and got.kl == 0
    got.loss.backward()
    assert_close(leaf.grad, (-per_row / 35)[:, None].expand(5, 7), rtol=1e-6)


def test_sums_of_responses_have_the_ratio_of_rloo(target):
    """As responses of one token: as in TRL's trainer, there is one ratio of each response, which is clipped."""
    log_probs, old, _, per_row, _ = tokens()
    leaf, mask = log_probs.double().requires_grad_(), padding_mask()
    ratio = ((leaf - old) * mask).sum(1).exp()
    want = -torch.minimum(ratio * per_row, ratio.clamp(0.8, 1.2) * per_row).mean()
    own = log_probs.clone().requires_grad_()
    sums = ((x * mask).sum(1, keepdim=True).to(target.device) for x in (own, old))
    got = grpo_loss(*sums, per_row.to(target.device), backend=target.backend).loss
    assert_close(got.detach().double(), want.detach(), rtol=1e-5)
    assert_close(*(torch.autograd.grad(x, y)[0].double() for x, y in ((got, own), (want, leaf))), rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_normalizer_as_a_tensor(target, dtype):
    """Of any dtype that holds the number, also where a row's length times it is more than that holds."""
    if dtype == torch.float64 and target.backend == "triton":
        pytest.skip("it takes none")
    log_probs, old, _, per_row, _ = (x.to(target.device) for x in tokens(columns=40, dtype=dtype))
    rtol = 1e-7 if dtype == torch.float32 else 1e-15
    numbers = (4096,) if target.interpreted else (11, 4096, (1 << 24) + 1)
    for aggregation, number in itertools.product(AGGREGATIONS, numbers):
        options = {"aggregation": aggregation, "backend": target.backend}
        want = grpo_loss(log_probs, old, per_row, normalizer=number, **options).loss
        kinds = (torch.int64, torch.int32, torch.int16, torch.float64, torch.float32, torch.float16)
        for given in kinds[2::3] if target.interpreted else kinds:
            normalizer = torch.tensor(number, device=target.device).to(given)
            if normalizer.double() == number:
                got = grpo_loss(log_probs, old, per_row, normalizer=normalizer, **options).loss
                assert_close(got, want, rtol=rtol)


X = torch.zeros(2, 3)
BAD = {
    "log_probs: got shape": lambda: grpo_loss(X[0], X[0], X[0]),
    "advantages: got shape": lambda: grpo_loss(X, X, X[0]),
    "aggregation: got 'mean'": lambda: grpo_loss(X, X, X, aggregation="mean"),
    "cu_seqlens: got": lambda: grpo_loss(X[0], X[0], X[0], cu_seqlens=torch.tensor([0, 2])),
    "log_probs: got shape .* expected .num_tokens.": lambda: grpo_loss(X, X, X, cu_seqlens=torch.tensor([0, 2])),
    "normalizer: got dtype torch.complex64": lambda: grpo_loss(X, X, X, normalizer=torch.tensor(1j)),
    "normalizer: got -1": lambda: grpo_loss(X, X, X, normalizer=-1),
    "groups: got 4": lambda: group_normalize(X, 4),
    "groups: got 0": lambda: group_normalize(X, 0),
    "groups: got float": lambda: group_normalize(X, 2.0),
    "groups: got shape": lambda: group_normalize(X, torch.tensor([0])),
    "groups: got dtype": lambda: group_normalize(X, X),
    "mode: got 'median'": lambda: group_normalize(X, 2, mode="median"),
    "correction: got -1": lambda: group_normalize(X, 2, correction=-1),
    "epsilon: got nan": lambda: group_normalize(X, 2, epsilon=math.nan),
}
test_bad_arguments = make_test_of_refusals(BAD)


def relative(rewards, groups, mode, correction, epsilon):
    """Group by group, in exact sums."""
    result = [0.0] * len(rewards)
    for group in set(groups):
        r = [x for x, g in zip(rewards, groups, strict=True) if g == group]
        mean = math.fsum(r) / len(r)
        for i, x in enumerate(rewards):
            if groups[i] != group:
                continue
            if mode == "mean":
                result[i] = x - mean
            elif mode == "leave-one-out":
                result[i] = x - (math.fsum(r) - x) / (len(r) - 1) if len(r) > 1 else x
            elif len(r) > correction:
                std = math.sqrt(math.fsum((y - mean) ** 2 for y in r) / (len(r) - correction))
                result[i] = (x - mean) / (std + epsilon) if std + epsilon else 0.0
            else:
                result[i] = x
    return torch.tensor(result, dtype=torch.float64)


@pytest.mark.parametrize("mode", ["mean-std", "mean", "leave-one-out"])
@pytest.mark.parametrize("correction, epsilon", [(1, 1e-6), (0, 0.5), (1, 0)])
@pytest.mark.parametrize("kind", [1, np.int64(4), "ids"])
def test_groups(mode, correction, epsilon, kind):
    g = torch.Generator().manual_seed(0)
    rewards = torch.randn(3, 8, generator=g)
    rewards[0, :4] = 2.5  # all equal
    ids = torch.randint(-3, 4, (3, 8), generator=g) * 10**12 if kind == "ids" else kind
    flat = ids.flatten().tolist() if kind == "ids" else [i // kind for i in range(24)]
    options = {"mode": mode, "correction": correction, "epsilon": epsilon}
    got = group_normalize(rewards, ids, **options)
    want = relative(rewards.flatten().double().tolist(), flat, **options)
    assert got.dtype == torch.float32
    assert_close(got.flatten(), want, rtol=2e-7)
    assert_close(group_normalize(rewards.double(), ids, **options).flatten(), want, rtol=1e-13)


def test_groups_keep_to_themselves():
    """A NaN spoils its group alone, a large mean costs no digits, and no reward is no group."""
    rewards = torch.tensor([1.0, math.nan, 1e8, 1e8 + 8, 3.0])
    for groups in (torch.tensor([7, 7, 2, 2, 9]), torch.tensor([7, 7, 2, 2, 2])[:4]):
        got = group_normalize(rewards[: len(groups)], groups, mode="mean")
        assert got[:2].isnan().all() and got[2:4].tolist() == [-4.0, 4.0]
    empty = torch.zeros(0)
    assert group_normalize(empty, 3).shape == group_normalize(empty, empty.int()).shape == (0,)
