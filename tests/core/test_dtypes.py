"""Masks, flags, actions and indices: all dtypes that are accepted, in any memory, mean the same; others are refused."""

import warnings
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from cases import BACKWARD, FORWARD, PREFIX, Call, Target, random_case, same_bits
from test_conventions import SIGNATURES, make_arguments, run_converter
from test_estimators_packed import make_arguments as make_packed_arguments
from test_estimators_packed import make_packed_case

from rl_triton_core import FinalValues, ScanState, compute_gae, losses, normalize_advantages
from rl_triton_core._internal.launch.fast_path import forget_plans
from rl_triton_core._internal.launch.kernels import VARIANTS

SHAPE, LENGTHS = (4, 7), (4, 0, 3, 6)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
REALS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
FLAGS = (torch.bool, *INTEGERS, *REALS)
EVERY_DTYPE = (*FLAGS, *UNSIGNED, torch.complex64, torch.float8_e4m3fn)
GENERATOR = torch.Generator().manual_seed(0)
VECTOR_LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x.contiguous(),
    "strided": lambda x: x.repeat_interleave(3, -1)[..., ::3],
    "unaligned": lambda x: torch.cat([x[:1], x])[1:],
}
LAYOUTS = VECTOR_LAYOUTS | {
    "transposed": lambda x: x.mT.contiguous().mT if x.ndim > 1 else x,
    "one row": lambda x: x[:1].contiguous().expand_as(x),
    "one column": lambda x: x[..., :1].contiguous().expand_as(x),
}


REFERENCE = Target("reference", "cpu", 0)


class Slot(NamedTuple):
    """An argument of a public function that takes one of some dtypes."""

    argument: str
    tensor: torch.Tensor  # bool, or int64
    dtypes: tuple
    compute: Callable  # (target, tensor) -> results, and gradients by inputs
    layouts: dict = LAYOUTS
    other: torch.Tensor | None = None
    """With which results are different; by default another order of the same, or other flags."""
    accepted: tuple = ()  # other dtypes that are not refused


SLOTS: dict[str, Slot] = {}


def draw(*shape):
    return torch.randn(shape, generator=GENERATOR)


def draw_flags(*shape):
    return torch.rand(shape, generator=GENERATOR) < 0.6


def draw_integers(high, *shape):
    return torch.randint(high, shape, generator=GENERATOR)


def add_slots(prefix, function, inputs, dtypes, slots, layouts=LAYOUTS, **arguments):
    """One for each of the tensors in `slots`, beside which the others are as they are."""
    for name, tensor in slots.items():

        def compute(target, x, name=name):
            return differentiate(function, target, inputs, {**slots, **arguments, name: x})

        other = OTHER_OFFSETS if name == "cu_seqlens" else None
        SLOTS[f"{prefix}: {name}"] = Slot(name, tensor, dtypes, compute, layouts, other)


def differentiate(function, target, inputs, arguments):
    """Results with a graph, and gradients; and results without, of functions that compute these in another way."""
    given = {name: x.to(target.device) if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
    leaves = {name: x.to(target.device).requires_grad_() for name, x in inputs.items()}
    results, gradients = [], []
    is_loss = function.__name__ in losses.__all__ or function.__name__.endswith("ppo_loss")
    if is_loss or not target.interpreted:
        results = list_tensors(function(**{**given, **leaves}, backend=target.backend))
        total = sum(x.sum() for x in results if x.requires_grad)
        gradients = torch.autograd.grad(total, [*leaves.values()], materialize_grads=True)
    with torch.no_grad():
        plain = [] if is_loss else list_tensors(function(**{**given, **leaves}, backend=target.backend))
    return [*plain, *results, *gradients]


def list_tensors(results):
    return [results] if isinstance(results, torch.Tensor) else [x for x in results if x is not None]


OFFSETS, OTHER_OFFSETS = torch.tensor([0, *LENGTHS]).cumsum(0), torch.tensor([0, 2, 5, 10, 13])
MASK, VALUES, LOG_PROBS = {"mask": draw_flags(*SHAPE)}, {"values": draw(*SHAPE)}, {"log_probs": draw(*SHAPE)}
LOSS = {name: draw(*SHAPE) for name in ("old_log_probs", "advantages", "returns", "old_values")} | VALUES
LOSS |= {"value_clip": 0.5, "entropy_coef": 0.1, "normalize_advantages": True}
GAUSSIAN, GAUSSIAN_ACTIONS = {"mean": draw(*SHAPE, 3), "log_std": draw(3)}, {"actions": draw(*SHAPE, 3)}
BERNOULLI = MASK | {"actions": draw_flags(*SHAPE, 4)}


def ppo_loss(log_probs, **options):
    return losses.ppo_loss(losses.LogProbs(log_probs), None, **options)


def gaussian_ppo_loss(mean, log_std, **options):
    return losses.ppo_loss(losses.Gaussian(mean, log_std), **options)


def bernoulli_ppo_loss(logits, **options):
    return losses.ppo_loss(losses.Bernoulli(logits), **options)


def categorical_ppo_loss(logits, nvec, **options):
    return losses.ppo_loss(losses.MultiCategorical(logits, nvec) if nvec else losses.Categorical(logits), **options)


add_slots("ppo_loss", ppo_loss, LOG_PROBS | VALUES, FLAGS, MASK, **LOSS)
add_slots("gaussian_ppo_loss", gaussian_ppo_loss, GAUSSIAN, FLAGS, MASK, **LOSS, **GAUSSIAN_ACTIONS)
add_slots("bernoulli_ppo_loss", bernoulli_ppo_loss, {"logits": draw(*SHAPE, 4)}, FLAGS, BERNOULLI, **LOSS)
for name, logits, actions, nvec in (
    ("categorical_ppo_loss", draw(*SHAPE, 4), draw_integers(4, *SHAPE), None),
    ("several categoricals", draw(*SHAPE, 5), draw_integers(2, *SHAPE, 2), (3, 2)),
    ("more actions than a byte counts", draw(*SHAPE, 300), draw_integers(100, *SHAPE), None),
):
    arguments = categorical_ppo_loss, {"logits": logits}
    add_slots(name, *arguments, INTEGERS, {"actions": actions}, **LOSS, **MASK, nvec=nvec)
add_slots("categorical_ppo_loss", *arguments, FLAGS, MASK, **LOSS, actions=actions, nvec=None)
TOKENS, PACKED_TOKENS = {"log_probs": draw(*SHAPE)}, {"log_probs": draw(sum(LENGTHS))}
PACKED_MASK = {"mask": draw_flags(sum(LENGTHS))}
for aggregation in ("token-mean", "sequence-mean", "sequence-sum"):
    name, options = f"grpo_loss, {aggregation}", {"aggregation": aggregation, "old_log_probs": None}
    options["advantages"] = draw(len(LENGTHS))
    add_slots(name, losses.grpo_loss, TOKENS, FLAGS, MASK, **options)
    arguments = f"{name}, packed", losses.grpo_loss, PACKED_TOKENS
    add_slots(*arguments, FLAGS, PACKED_MASK, **options, cu_seqlens=OFFSETS)
    add_slots(*arguments, INTEGERS[:2], {"cu_seqlens": OFFSETS}, VECTOR_LAYOUTS, **options, **PACKED_MASK)

FREQUENT = {"term": 0.3, "trunc": 0.3, "valid": 0.8}
STATE = draw(SHAPE[0])
for estimator in (*BACKWARD, *FORWARD):
    cases = {estimator.name: Call(random_case(estimator, *SHAPE, **FREQUENT)).kwargs}
    if estimator.name != "traces":
        packed = make_packed_case(estimator, LENGTHS, **FREQUENT)
        cases[f"{estimator.name}, packed"] = make_packed_arguments(packed, LENGTHS)
    for name, given in cases.items():
        flags = {key: x for key, x in given.items() if isinstance(x, torch.Tensor) and x.dtype == torch.bool}
        offsets = {key: x for key, x in given.items() if key == "cu_seqlens"}
        inputs = {key: given[key] for key in estimator.inputs}
        add_slots(name, estimator.function, inputs, FLAGS, flags, **{**given, **flags, **offsets})
        add_slots(name, estimator.function, inputs, INTEGERS[:2], offsets, VECTOR_LAYOUTS, **given)
    if estimator in FORWARD:

        def carry_state(done, function=estimator.function, **given):
            results, state = function(**given, state=ScanState(STATE.to(done.device), done), return_state=True)
            return results, *state

        add_slots(estimator.name, carry_state, {"x": draw(*SHAPE)}, FLAGS, {"done": draw_flags(4)}, VECTOR_LAYOUTS)
add_slots("normalize_advantages", normalize_advantages, {"advantages": draw(*SHAPE)}, FLAGS, MASK)


def add_integers(target, x):
    dones = torch.arange(x.numel(), device=x.device).view(x.shape) % 5 == 0
    return [PREFIX.function(x, dones, backend=target.backend)]


SLOTS["prefix: x"] = Slot("x", draw_integers(100, *SHAPE), INTEGERS, add_integers, accepted=REALS)
FINAL = {"env": torch.tensor([0, 2, 3]), "time": torch.tensor([6, 3, 6]), "value": draw(3)}


def follow_values(rewards, backend, **index):
    final = {name: x.to(rewards.device) for name, x in FINAL.items()}
    cut = torch.zeros_like(rewards, dtype=torch.bool).index_put((final["env"], final["time"]), torch.tensor(True))
    bootstrap = FinalValues(**final | index, last_value=1.0)
    return compute_gae(rewards, rewards, truncated=cut, bootstrap_values=bootstrap, backend=backend)


for name in ("env", "time"):
    index = {name: FINAL[name]}
    add_slots("FinalValues", follow_values, {"rewards": draw(*SHAPE)}, (*INTEGERS, *UNSIGNED), index, VECTOR_LAYOUTS)

WITH_BACKEND = list(SLOTS)
REWARDS = draw(*SHAPE)
for mode in ("mean-std", "mean", "leave-one-out"):

    def normalize_groups(target, groups, mode=mode):
        return [losses.group_normalize(REWARDS, groups, mode=mode)]

    SLOTS[f"group_normalize, {mode}"] = Slot("groups", draw_integers(4, *SHAPE), INTEGERS, normalize_groups)
for converter, kinds in SIGNATURES.items():
    given = make_arguments(converter, *SHAPE)
    for name, kind in kinds.items():

        def convert(target, x, name=name, converter=converter, given=given):
            return list_tensors(run_converter(converter, **given | {name: x}))

        layouts = VECTOR_LAYOUTS if kind == "flag_per_env" else LAYOUTS
        if "flag" in kind:
            SLOTS[f"{converter}: {name}"] = Slot(name, given[name], FLAGS, convert, layouts)
INTERPRETED = (  # of those with a backend, one of every kind that kernels read
    *("ppo_loss: mask", "several categoricals: actions", "bernoulli_ppo_loss: actions"),
    *("grpo_loss, sequence-mean, packed: mask", "grpo_loss, sequence-mean, packed: cu_seqlens"),
    *("gae: terminated", "gae, packed: cu_seqlens", "retrace, packed: mask", "traces: truncated"),
    *("prefix: done", "prefix: x", "FinalValues: env", "normalize_advantages: mask"),
)
WITHOUT_BACKEND = [name for name in SLOTS if name not in WITH_BACKEND]


def spell(x, dtype):
    """The same numbers in a dtype; of flags of integers, any that are not 0, those of which some bytes are 0 too."""
    if x.dtype != torch.bool or dtype.is_floating_point or dtype == torch.bool:
        return x.to(dtype)
    limits = torch.iinfo(dtype)
    numbers = [n for n in (1, 2, -1, 256, -(1 << 15), 1 << 16, 1 << 40) if limits.min <= n <= limits.max]
    return torch.tensor(numbers, dtype=dtype).repeat(x.numel())[: x.numel()].view(x.shape) * x.to(dtype)


def check_slot(slot, layout, target, times):
    """To the bit what the plain dtype gives; and what is given matters, and is not written to."""
    make_view, plain = LAYOUTS[layout], LAYOUTS[layout](slot.tensor).contiguous()
    want = slot.compute(target, plain.to(target.device))
    if layout == "contiguous":
        other = slot.other if slot.other is not None else ~plain if plain.dtype == torch.bool else plain.roll(1, 0)
        assert not all(map(same_bits, want, slot.compute(target, other.to(target.device))))
    for dtype in slot.dtypes[:: 2 if target.interpreted else 1]:
        given = make_view(spell(plain, dtype).to(target.device))
        before = given.clone()
        for _ in range(times):
            got = slot.compute(target, given)
            assert all(same_bits(x, y) for x, y in zip(got, want, strict=True)), dtype
        assert same_bits(before, given)


def list_combinations(names):
    return [(name, layout) for name in names for layout in SLOTS[name].layouts]


@pytest.mark.covering
@pytest.mark.parametrize("slot, layout", list_combinations(WITH_BACKEND))
def test_every_dtype_means_the_same(target, slot, layout):
    """In the first calls and in those that take the fast path, which there is on two backends."""
    if target.interpreted and (slot not in INTERPRETED or layout not in ("contiguous", "strided")):
        pytest.skip("it takes long; kernels read others in the same way")
    forget_plans()
    VARIANTS.clear()
    check_slot(SLOTS[slot], layout, target, times=1 if target.interpreted or target.backend == "reference" else 3)


@pytest.mark.parametrize("slot, layout", list_combinations(WITHOUT_BACKEND))
def test_every_dtype_means_the_same_without_a_backend(slot, layout):
    check_slot(SLOTS[slot], layout, REFERENCE, times=1)


@pytest.mark.parametrize("slot", SLOTS)
def test_other_dtypes_are_refused(slot):
    slot = SLOTS[slot]
    for dtype in set(EVERY_DTYPE) - {*slot.dtypes, *slot.accepted}:
        with warnings.catch_warnings(), pytest.raises(TypeError, match=rf"{slot.argument}\b.*{dtype}"):
            warnings.simplefilter("ignore")
            slot.compute(REFERENCE, slot.tensor.to(dtype))
