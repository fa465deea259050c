"""Log-probabilities and losses where processes share a vocabulary, against the equations in float64."""

import math
from contextlib import suppress
from functools import partial

import pytest
import torch
from processes import GLOO, run_ranks
from test_losses_linear import draw, solve_exactly, weigh
from torch import distributed

from rl_triton_core import available_backends
from rl_triton_core._internal.arguments import groups
from rl_triton_core.losses import linear_grpo_loss, linear_token_log_probs, token_log_probs

SIZES = {(0, 1): (10, 27), (0, 1, 2): (5, 20, 12)}  # of the parts, by the ranks that have them
SIZE, SHAPE = 37, (5, 7)
CHANGES = {
    "group: got 'all'": {"group": "all"},
    "expected at least 0": {"first": -1},
    "0 without a group": {"group": None, "first": 3},
    "first: got 1.0": {"first": 1.0},
}


def make_logits():
    """Logits and tokens. The first tokens have parts without a finite logit, the next ones no distribution at all."""
    g = torch.Generator().manual_seed(0)
    logits, tokens = 3 * torch.randn(*SHAPE, SIZE, generator=g), torch.randint(SIZE, SHAPE, generator=g)
    logits[0, 0, :10], logits[0, 1, 5:], tokens[0, :2] = -math.inf, -math.inf, 3
    logits[0, 2], logits[0, 3, 30], logits[0, 4, 3], logits[0, 5, :10] = -math.inf, math.nan, math.inf, math.nan
    mask = torch.rand(SHAPE, generator=g) < 0.7
    mask[0] = True
    logits[~mask], tokens[~mask] = math.nan, -100
    return logits, tokens, mask


def run_logits(own, **options):
    """Log-probabilities and entropies from the logits of a part, and the gradient by these."""
    logits, tokens, mask = make_logits()
    leaf = logits[..., own].clone().requires_grad_()
    results = token_log_probs(leaf, tokens, mask=mask, **options)
    weigh([x.nan_to_num(0, 0, 0) for x in results]).backward()
    return *(x.detach() for x in results), leaf.grad


def run_rank(rank, backends):
    """What one process computes as a member of each group, and errors."""
    groups = {members: distributed.new_group(members) if len(members) == 2 else "world" for members in SIZES}
    found = {
        ranks: compute(rank, group, SIZES[ranks], backends[ranks]) for ranks, group in groups.items() if rank in ranks
    }
    start = sum(SIZES[0, 1, 2][:rank])
    call, errors = {"logits": torch.zeros(1, SIZES[0, 1, 2][rank]), "tokens": torch.ones(1, dtype=torch.int64)}, []
    for change in CHANGES.values():
        try:
            token_log_probs(**call | {"group": "world", "first": start} | change)
        except (TypeError, ValueError) as error:
            errors.append(str(error))
    return found, errors


def compute(rank, group, sizes, backends):
    """Results and gradients, by the backend and what they are of."""
    start = sum(sizes[:rank])
    own, about, found = slice(start, start + sizes[rank]), {"group": group, "first": start}, {}
    layer, reference = draw(shape=SHAPE, size=SIZE), draw(shape=SHAPE, size=SIZE, seed=1)
    gather, calls = groups.gather_rows, []
    groups.gather_rows = lambda *args: (calls.append(1), gather(*args))[1]
    for backend in backends:
        options = {**about, "backend": backend, "temperature": 0.7, "entropy": True}
        for _ in range(3):  # the third would repeat what the second has recorded
            calls.clear()
            found[backend, "logits"] = run_logits(own, **options)
            assert len(calls) == 1
        for name, kwargs in {"linear": {}, "token": {}, "sequence": {"ratio": "sequence"}}.items():
            states, weight, bias, ids = (x.clone() for x in layer)
            leaves = states, weight[own].clone(), bias[own].clone()
            _ = [x.requires_grad_() for x in leaves]
            kwargs |= {"bias": leaves[2], "chunk": 7, **options}
            if name == "linear":
                results = linear_token_log_probs(*leaves[:2], ids, **kwargs)
                weigh(results).backward()
            else:
                kwargs["reference"] = reference[0], *(x[own] for x in reference[1:3])
                results = linear_grpo_loss(*leaves[:2], ids, None, torch.arange(5.0), **kwargs, kl_coef=0.1)[:1]
                results[0].backward()
            found[backend, name] = *(x.detach() for x in results), *(x.grad for x in leaves)
    groups.gather_rows = gather
    return found


def solve_logits():
    """The same in float64 by the equation, the gradient of all parts, and which entropies are finite."""
    logits, tokens, mask = make_logits()
    log_p = (logits.double() / 0.7).log_softmax(-1)
    probs, chosen = log_p.exp(), torch.where(mask, tokens, 0)[..., None]
    surprise = torch.where(probs == 0, 0, -probs * log_p)
    results = [torch.where(mask, x, 0) for x in (log_p.gather(-1, chosen)[..., 0], surprise.sum(-1))]
    share = torch.linspace(-1, 1, mask.numel(), dtype=torch.float64).view(*SHAPE, 1)
    finite = [x.isfinite()[..., None] for x in results]
    by_entropy = -torch.where(probs == 0, 0, probs * (log_p + results[1][..., None]))
    by_log_prob = torch.zeros_like(log_p).scatter_(-1, chosen, 1.0) - probs
    slope = sum(c * torch.where(x, y, 0) for c, x, y in zip((1, 0.5), finite, (by_log_prob, by_entropy), strict=True))
    return (*results, torch.where(mask[..., None], share * slope / 0.7, 0)), finite[1]


def call_in_turns(monkeypatch, calls):
    """Results of calls that would be made in a process each: of a first time what they send is kept for all."""
    sent = []

    def keep_row(own, group):
        sent.append(own)
        raise EOFError

    monkeypatch.setattr(groups, "check_group", lambda group: group)
    monkeypatch.setattr(groups, "gather_rows", keep_row)
    for call in calls:
        with suppress(EOFError):
            call()
    monkeypatch.setattr(groups, "gather_rows", lambda own, group: torch.cat(sent))
    return [call() for call in calls]


@pytest.mark.parametrize("sizes", SIZES.values(), ids=len)
def test_parts_in_one_process(target, sizes, monkeypatch):
    if target.device != "cpu":
        pytest.skip("gloo is for the CPU")
    found, finite = solve_logits()
    options = {"group": "all", "backend": target.backend, "temperature": 0.7, "entropy": True}
    parts = [slice(sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(len(sizes))]
    calls = [partial(run_logits, own, first=own.start, **options) for own in parts]
    for own, got in zip(parts, call_in_turns(monkeypatch, calls), strict=True):
        compare({("", "logits"): got}, {"logits": found}, own, finite)


@pytest.mark.parametrize(("first", "token"), [(4, 8), (0, 1)])
def test_parts_without_a_token_or_with_the_same(first, token, monkeypatch):
    given = torch.zeros(1, 4), torch.tensor([token])
    calls = [partial(token_log_probs, *given, group="all", first=x) for x in (0, first)]
    with pytest.raises(ValueError, match="tokens: got one in no part of the vocabulary or in several"):
        call_in_turns(monkeypatch, calls)


@GLOO
def test_processes_share_a_vocabulary(tmp_path):
    found = {}
    found["logits"], finite = solve_logits()
    layer, reference = draw(torch.float64, SHAPE, SIZE), draw(torch.float64, SHAPE, SIZE, seed=1)
    wanted = solve_exactly(*layer, temperature=0.7)
    found["linear"] = *wanted[0], *wanted[1]
    for ratio in ("token", "sequence"):
        leaves = [x.clone().requires_grad_() for x in layer[:3]]
        options = {"temperature": 0.7, "entropy": True, "ratio": ratio, "kl_coef": 0.1, "reference": reference[:3]}
        rest = layer[3], None, torch.arange(5.0, dtype=torch.float64)
        loss = linear_grpo_loss(*leaves[:2], *rest, bias=leaves[2], **options).loss
        loss.backward()
        found[ratio] = loss, *(x.grad for x in leaves)
    backends = {(0, 1): available_backends("cpu"), (0, 1, 2): ("cpu", "reference")}  # Triton's interpreter is slow
    everything = run_ranks(run_rank, tmp_path, backends, ranks=3)
    for ranks, sizes in SIZES.items():
        for rank in ranks:
            start = sum(sizes[:rank])
            compare(everything[rank][0][ranks], found, slice(start, start + sizes[rank]), finite)
        for (key, got), *others in zip(*(everything[rank][0][ranks].items() for rank in ranks), strict=True):
            assert key[1] == "logits" or all(torch.equal(x[0], got[0]) for _, x in others), "ranks differ"
    for _, errors in everything:
        assert len(errors) == len(CHANGES)
        for text, error in zip(CHANGES, errors, strict=True):
            assert text in error


def compare(of_rank, found, own, finite):
    """Results are the exact ones, and gradients those of this part."""
    for (_, name), got in of_rank.items():
        *rest, last = found[name]
        expected = (*rest, last[..., own]) if name == "logits" else (*rest[:-1], rest[-1][own], last[own])
        for x, want in zip(got, expected, strict=True):
            read = torch.where(finite, x, 0) if name == "logits" and x.ndim > 2 else x
            bound = 3e-6 * max(1.0, want.nan_to_num(0, 0, 0).abs().max().item())
            torch.testing.assert_close(read.double(), want, rtol=3e-6, atol=bound, equal_nan=True)
