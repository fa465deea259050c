"""Masks, flags, actions and indices: every dtype that is accepted, in any memory, means the same; others are refused."""

import warnings
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from cases import BACKWARD, FORWARD, GAE, NSTEP, PREFIX, Call, random_case, same_bits
from test_conventions import SIGNATURES, make_arguments, run_converter
from test_estimators_packed import make_arguments as make_packed_arguments
from test_estimators_packed import make_packed_case

from rl_triton_core import FinalValues, ScanState, compute_gae, losses, normalize_advantages
from rl_triton_core._internal.launch.fast_path import forget_plans

pytestmark = pytest.mark.covering

SHAPE, LENGTHS, NUM_ACTIONS = (6, 9), (4, 0, 3, 7), 300
INDICES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
REALS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
FLAGS = (torch.bool, *INDICES, *REALS)
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
REFUSED = (*UNSIGNED, torch.complex64, torch.float8_e4m3fn)
GENERATOR = torch.Generator().manual_seed(0)
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x.contiguous(),
    "transposed": lambda x: x.mT.contiguous().mT if x.ndim > 1 else x,
    "strided": lambda x: x.repeat_interleave(3, -1)[..., ::3],
    "padded": lambda x: torch.cat([x[:1], x])[1:],
    "one row": lambda x: x[:1].contiguous().expand_as(x),
    "one column": lambda x: x[..., :1].contiguous().expand_as(x),
}


class Slot(NamedTuple):
    """An argument of a public function that takes one of these dtypes."""

    name: str
    compute: Callable
    """(target, tensor) -> the results, and gradients by inputs."""
    tensor: torch.Tensor
    """bool, or int64."""
    dtypes: tuple
    layouts: tuple = tuple(LAYOUTS)
    also: tuple = ()
    """Other dtypes that are not refused."""


SLOTS: dict[str, Slot] = {}


def draw_flags(*shape, share=0.6):
    return torch.rand(shape, generator=GENERATOR) < share


def draw(*shape):
    return torch.randn(shape, generator=GENERATOR)


def differentiate(function, target, inputs, **arguments):
    """Results without a graph, then those with one, and their gradients."""
    given = {name: move(x, target.device) for name, x in arguments.items()}
    leaves = {name: x.to(target.device).requires_grad_() for name, x in inputs.items()}
    with torch.no_grad():
        plain = list_tensors(function(**leaves, **given, backend=target.backend))
    results = list_tensors(function(**leaves, **given, backend=target.backend))
    gradients = torch.autograd.grad(sum(x.sum() for x in results if x.requires_grad), list(leaves.values()))
    return [*plain, *results, *gradients]


def move(x, device):
    """Arguments on a device, in the memory that they have."""
    if isinstance(x, torch.Tensor) and x.device.type != device:
        base = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0).to(device)
        return base.as_strided(x.shape, x.stride(), x.storage_offset())
    return type(x)(*(move(y, device) for y in x)) if isinstance(x, ScanState) else x


def list_tensors(results):
    return [results] if isinstance(results, torch.Tensor) else [x for x in results if x is not None]


def add_slots(prefix, function, inputs, dtypes, /, slots, layouts=tuple(LAYOUTS), **arguments):
    """One for each of the tensors in `slots`, beside which the others are as they are."""
    for name, tensor in slots.items():

        def compute(target, x, name=name):
            return differentiate(function, target, inputs, **{**slots, **arguments, name: x})

        SLOTS[f"{prefix}: {name}"] = Slot(name, compute, tensor, dtypes, layouts)


# --- losses -----------------------------------------------------------------------------------------------------------

LOSS = {"old_log_probs": draw(*SHAPE), "advantages": draw(*SHAPE), "returns": draw(*SHAPE), "old_values": draw(*SHAPE)}
LOSS |= {"value_clip": 0.5, "entropy_coef": 0.1, "normalize_advantages": True}
NETWORK = {"values": draw(*SHAPE)}
MASK = {"mask": draw_flags(*SHAPE)}
LOGITS = NETWORK | {"logits": draw(*SHAPE, NUM_ACTIONS)}
ACTIONS = torch.randint(NUM_ACTIONS, SHAPE, generator=GENERATOR)
add_slots("ppo_loss", losses.ppo_loss, NETWORK | {"log_probs": draw(*SHAPE)}, FLAGS, MASK, **LOSS)
add_slots("categorical_ppo_loss", losses.categorical_ppo_loss, LOGITS, FLAGS, MASK, **LOSS, actions=ACTIONS)
add_slots(
    "categorical_ppo_loss", losses.categorical_ppo_loss, LOGITS, INDICES, {"actions": ACTIONS % 100}, **LOSS, **MASK
)
add_slots(
    "several heads", losses.categorical_ppo_loss, NETWORK | {"logits": draw(*SHAPE, 5)}, INDICES,
    {"actions": torch.randint(2, (*SHAPE, 2), generator=GENERATOR)}, **LOSS, nvec=(3, 2),
)  # fmt: skip
GAUSSIAN = NETWORK | {"mean": draw(*SHAPE, 3), "log_std": draw(3)}
add_slots("gaussian_ppo_loss", losses.gaussian_ppo_loss, GAUSSIAN, FLAGS, MASK, **LOSS, actions=draw(*SHAPE, 3))
BERNOULLI = MASK | {"actions": draw_flags(*SHAPE, 4)}
add_slots(
    "bernoulli_ppo_loss", losses.bernoulli_ppo_loss, NETWORK | {"logits": draw(*SHAPE, 4)}, FLAGS, BERNOULLI, **LOSS
)
KL = {"ref_log_probs": draw(*SHAPE), "estimator": "k3"}
add_slots("kl_divergence", losses.kl_divergence, {"log_probs": draw(*SHAPE)}, FLAGS, MASK, **KL)
add_slots("value_loss", losses.value_loss, {"values": draw(*SHAPE)}, FLAGS, MASK, returns=draw(*SHAPE))
OFFSETS, OTHER_OFFSETS = torch.tensor([0, *LENGTHS]).cumsum(0), torch.tensor([0, 1, 7, 7, 14])
NUM_TOKENS = sum(LENGTHS)
PACKED_LOSS = {"old_log_probs": draw(NUM_TOKENS), "advantages": draw(len(LENGTHS))}
for aggregation in ("token-mean", "sequence-mean", "sequence-sum"):
    name, options = f"grpo_loss, {aggregation}", {"aggregation": aggregation}
    rows = {"old_log_probs": draw(*SHAPE), "advantages": draw(SHAPE[0])}
    add_slots(name, losses.grpo_loss, {"log_probs": draw(*SHAPE)}, FLAGS, MASK, **options, **rows)
    packed = {"cu_seqlens": OFFSETS}, {"mask": draw_flags(NUM_TOKENS)}
    for slots, others, dtypes, layouts in (
        (*packed, INDICES[:2], ("contiguous", "strided", "padded")),
        (*packed[::-1], FLAGS, tuple(LAYOUTS)),
    ):
        add_slots(
            f"{name}, packed", losses.grpo_loss, {"log_probs": draw(NUM_TOKENS)}, dtypes, slots, layouts,
            **others, **options, **PACKED_LOSS,
        )  # fmt: skip

# --- estimators and normalisation -------------------------------------------------------------------------------------

OFFSET_LAYOUTS = ("contiguous", "strided", "padded")
for estimator in (*BACKWARD, NSTEP, *FORWARD):
    more = {"n": 3} if estimator is NSTEP else {}
    cases = {estimator.name: Call(random_case(estimator, *SHAPE, term=0.3, trunc=0.3, valid=0.8, **more)).kwargs}
    if estimator.name != "traces":
        case = make_packed_case(estimator, LENGTHS, term=0.3, trunc=0.3, valid=0.8, **more)
        cases[f"{estimator.name}, packed"] = make_packed_arguments(case, LENGTHS)
    for name, given in cases.items():
        flags = {key: x for key, x in given.items() if isinstance(x, torch.Tensor) and x.dtype == torch.bool}
        inputs = {key: given[key] for key in estimator.inputs}
        others = {key: x for key, x in given.items() if key not in (*flags, *inputs)}
        add_slots(name, estimator.function, inputs, FLAGS, flags, **others)
        if offsets := {key: x for key, x in others.items() if key == "cu_seqlens"}:
            add_slots(name, estimator.function, inputs, INDICES[:2], offsets, OFFSET_LAYOUTS, **{**others, **flags})
    if estimator in FORWARD:
        x, value = draw(*SHAPE, 2), draw(SHAPE[0], 2)

        def carry_state(done, function=estimator.function, value=value, **given):
            sums, state = function(**given, state=ScanState(value.to(done.device), done), return_state=True)
            return sums, *state

        done = {"done": draw_flags(SHAPE[0])}
        add_slots(estimator.name, carry_state, {"x": x}, FLAGS, done, OFFSET_LAYOUTS)
INTEGERS = torch.randint(100, SHAPE, generator=GENERATOR)


def add_integers(target, x):
    dones = {"dones": (INTEGERS % 5 == 0).to(target.device)}
    return [PREFIX.function(x, **dones, backend=target.backend)]


SLOTS["prefix: x"] = Slot("x", add_integers, INTEGERS, INDICES, also=REALS)
FINAL = {"env": torch.tensor([0, 2, 5]), "time": torch.tensor([8, 3, 8]), "value": draw(3)}
for name in ("env", "time"):

    def follow_values(rewards, name=name, backend=None, **index):
        final = {key: x.to(rewards.device) for key, x in FINAL.items()}
        truncated = torch.zeros_like(rewards, dtype=torch.bool)
        truncated[final["env"], final["time"]] = True
        bootstrap = FinalValues(**final | index, last_value=1.0)
        return compute_gae(rewards, rewards, truncated=truncated, bootstrap_values=bootstrap, backend=backend)

    add_slots("FinalValues", follow_values, {"rewards": draw(*SHAPE)}, (*INDICES, *UNSIGNED), {name: FINAL[name]}, OFFSET_LAYOUTS)
add_slots("normalize_advantages", normalize_advantages, {"advantages": draw(*SHAPE)}, FLAGS, MASK)

# --- functions without a backend --------------------------------------------------------------------------------------

WITHOUT_BACKEND = set(SLOTS)
REWARDS = draw(*SHAPE)
for mode in ("mean-std", "mean", "leave-one-out"):

    def normalize_groups(target, groups, mode=mode):
        return [losses.group_normalize(REWARDS, groups, mode=mode)]

    groups = torch.randint(4, SHAPE, generator=GENERATOR)
    SLOTS[f"group_normalize, {mode}"] = Slot("groups", normalize_groups, groups, INDICES)
for converter, kinds in SIGNATURES.items():
    given = make_arguments(converter, *SHAPE)
    for name, kind in kinds.items():
        if "flag" in kind:

            def convert(target, x, name=name, converter=converter, given=given):
                return list_tensors(run_converter(converter, **given | {name: x}))

            layouts = OFFSET_LAYOUTS if kind == "flag_per_env" else tuple(LAYOUTS)
            SLOTS[f"{converter}: {name}"] = Slot(name, convert, given[name], FLAGS, layouts)
WITHOUT_BACKEND = set(SLOTS) - WITHOUT_BACKEND


# --- the tests --------------------------------------------------------------------------------------------------------


def spell(x, dtype):
    """The same numbers in a dtype; of flags of integers, any that are not 0, those of which some bytes are 0 too."""
    if x.dtype != torch.bool or dtype.is_floating_point or dtype == torch.bool:
        return x.to(dtype)
    info = torch.iinfo(dtype)
    numbers = [number for number in (1, 2, -1, 256, -(1 << 15), 1 << 16, 1 << 40) if info.min <= number <= info.max]
    return torch.tensor(numbers, dtype=dtype).repeat(x.numel())[: x.numel()].view(x.shape) * x.to(dtype)


def list_slots():
    return [pytest.param(name, layout, id=f"{name} {layout}") for name, x in SLOTS.items() for layout in x.layouts]


@pytest.mark.parametrize("slot, layout", list_slots())
def test_every_dtype_means_the_same(target, slot, layout):
    """To the bit, in the first calls and in those that take the fast path; and what is given matters."""
    if slot in WITHOUT_BACKEND and target.backend != "reference":
        pytest.skip("it has no backend")
    slot, times = SLOTS[slot], 1 if target.interpreted or target.backend == "reference" else 3
    plain = LAYOUTS[layout](slot.tensor).contiguous()
    want = slot.compute(target, plain.to(target.device))
    if layout == "contiguous":
        other = ~plain if plain.dtype == torch.bool else plain.roll(1, 0)
        other = OTHER_OFFSETS if slot.name == "cu_seqlens" else other
        assert not all(map(same_bits, want, slot.compute(target, other.to(target.device))))
    for dtype in slot.dtypes:
        given = move(LAYOUTS[layout](spell(plain, dtype)), target.device)
        before = given.clone()
        forget_plans()
        for _ in range(times):
            got = slot.compute(target, given)
            assert all(same_bits(x, y) for x, y in zip(got, want, strict=True)), dtype
        assert same_bits(before, given)


@pytest.mark.parametrize("slot", SLOTS)
def test_other_dtypes_are_refused(target, slot):
    if target.backend != "reference":
        pytest.skip("arguments are checked alike on all backends")
    slot = SLOTS[slot]
    for dtype in sorted({*REFUSED, *FLAGS} - {*slot.dtypes, *slot.also}, key=str):
        with warnings.catch_warnings(), pytest.raises(TypeError, match=rf"{slot.name}\b.*{dtype}"):
            warnings.simplefilter("ignore")
            slot.compute(target, slot.tensor.to(dtype))
