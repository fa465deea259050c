"""Inputs of one GAE call, how they are laid out in memory, and what the call must give."""

import random
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
import oracles
import torch
from hypothesis import settings
from hypothesis import strategies as st

from rl_triton_core import FinalValues, compute_gae

FLOATS = ("rewards", "values", "gamma", "bootstrap_values", "next_values")
FLAGS = ("terminated", "truncated", "mask")
DTYPES = {torch.float32: np.float32, torch.float64: np.float64}
LAYOUTS = ("contiguous", "transposed", "strided", "padded", "padded_transposed", "expanded")


class Sparse(NamedTuple):
    """The parts of FinalValues."""

    env: list
    time: list
    value: list
    edge: Any = None


@dataclass(frozen=True, repr=False)
class Case:
    """The arguments of compute_gae as float64 and bool NumPy arrays, [num_envs, T] whatever the layout of the call."""

    rewards: np.ndarray
    values: np.ndarray
    terminated: Any = None
    truncated: Any = None
    gamma: Any = 0.99
    lambda_: float = 0.95
    bootstrap_values: Any = 0.0
    next_values: Any = None
    mask: Any = None
    mask_mode: str = "skip"

    def __repr__(self):
        parts = {f.name: getattr(self, f.name) for f in fields(self)}
        return f"Case({', '.join(f'{k}={summary(v)}' for k, v in parts.items() if v is not None)})"

    def _repr_pretty_(self, printer, cycle):
        printer.text(repr(self))

    @property
    def valid(self):
        return np.ones(self.rewards.shape, bool) if self.mask is None else self.mask

    @property
    def dense(self):
        """The bootstrap as the oracles take it."""
        form, entries = self.bootstrap_values, ()
        if isinstance(form, Sparse):
            entries = zip(form.env, form.time, form.value, strict=True)
            form = None if form.edge is None else np.broadcast_to(form.edge, len(self.rewards))
        return oracles.dense_bootstrap(form, self.rewards.shape, self.mask, self.mask_mode, entries)

    def rounded(self, dtype):
        """The same case after its float arrays have been rounded to dtype."""
        changes = {}
        for name in FLOATS:
            x = getattr(self, name)
            if isinstance(x, Sparse):
                edge = x.edge if x.edge is None else round_to(x.edge, dtype)
                changes[name] = x._replace(value=round_to(x.value, dtype).tolist(), edge=edge)
            elif isinstance(x, np.ndarray):
                changes[name] = round_to(x, dtype)
        return replace(self, **changes)

    def expected(self, oracle=oracles.gae, **kwargs):
        args = {f.name: getattr(self, f.name) for f in fields(self)}
        args["bootstrap"] = None if args.pop("bootstrap_values") is None else self.dense
        with np.errstate(over="ignore", invalid="ignore"):
            return oracle(**args, **kwargs)


def summary(x):
    if isinstance(x, Sparse):
        return f"Sparse({len(x.env)} entries, edge={summary(x.edge)})"
    if isinstance(x, np.ndarray) and x.size > 20:
        return f"{x.dtype}{list(x.shape)}" + (f", {x.sum()} set" if x.dtype == bool else "")
    return repr(x)


def round_to(x, dtype):
    return torch.as_tensor(np.asarray(x, np.float64)).to(dtype).double().numpy()


def random_case(num_envs, num_steps, seed=0, *, term=0.1, trunc=0.1, valid=1.0, **changes):
    """Normal rewards and values, flags with the given probabilities, a dense bootstrap."""
    rng = np.random.default_rng(seed)
    shape = (num_envs, num_steps)
    rewards, values, bootstrap = rng.standard_normal((3, *shape))
    mask = None if valid == 1 else rng.random(shape) < valid
    case = Case(rewards, values, rng.random(shape) < term, rng.random(shape) < trunc, mask=mask)
    return replace(case, **{"bootstrap_values": bootstrap, **changes})


# --- memory -----------------------------------------------------------------------------------------------------------


class Placed(NamedTuple):
    """A tensor and the memory it is a view of; what the view does not cover holds NaN (or nonzero flags)."""

    view: torch.Tensor
    base: torch.Tensor

    def same_view(self, base):
        return torch.as_strided(base, self.view.shape, self.view.stride(), self.view.storage_offset())


def place(array, layout, dtype, device):
    """Put a matrix into memory; "expanded" falls back to contiguous unless the matrix is constant along a dimension."""
    source = torch.as_tensor(np.ascontiguousarray(array)).to(dtype)
    rows, cols = source.shape
    filler = torch.nan if dtype.is_floating_point else 1

    def carve(base_shape, cut):
        base = torch.full(base_shape, filler, dtype=dtype, device=device)
        cut(base).copy_(source)
        return Placed(cut(base), base)

    if layout == "transposed":
        return carve((cols, rows), lambda base: base.t())
    if layout == "strided":
        return carve((2 * rows + 1, 3 * cols + 2), lambda base: base[1::2, 2::3])
    if layout == "padded":
        return carve((rows + 2, cols + 3), lambda base: base[1 : rows + 1, 2 : cols + 2])
    if layout == "padded_transposed":
        return carve((cols + 2, rows + 3), lambda base: base[1 : cols + 1, 2 : rows + 2].t())
    if layout == "expanded" and source.numel():
        for dim in (0, 1):
            line = source.narrow(dim, 0, 1)
            if torch.equal(source, line.expand_as(source)):
                base = line.contiguous().to(device)
                return Placed(base.expand_as(source), base)
    return carve((rows, cols), lambda base: base)


def bits(tensor):
    """The bytes of a tensor, so that NaN equals itself and 0.0 is not -0.0."""
    return tensor.detach().cpu().flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8)


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


@dataclass(frozen=True)
class How:
    """In which memory, types and layout a case is handed over. Layouts are taken in turn, one for each tensor."""

    dtype: torch.dtype = torch.float32
    flag_dtype: torch.dtype = torch.bool
    mask_dtype: torch.dtype = torch.bool
    time_dim: int = -1
    layouts: tuple = ("contiguous",)
    out_layout: str | None = "contiguous"
    out_dtype: torch.dtype | None = None
    returns: bool = True

    @property
    def result_dtype(self):
        if self.out_layout is not None and self.out_dtype is not None:
            return self.out_dtype
        return torch.float64 if self.dtype == torch.float64 else torch.float32


class Call:
    """A case made into arguments of compute_gae on a device, with the memory behind them."""

    def __init__(self, case, device="cpu", how=How()):
        self.how, self.device, self.placed = how, device, []
        self.turned = how.time_dim in (0, -2)
        self.kwargs = {"gamma": case.gamma, "lambda_": case.lambda_, "mask_mode": case.mask_mode}
        for name in ("rewards", "values", "gamma", "next_values"):
            x = getattr(case, name)
            if isinstance(x, np.ndarray):
                self.kwargs[name] = self._matrix(x, how.dtype)
        for name in FLAGS:
            if getattr(case, name) is not None:
                dtype = how.mask_dtype if name == "mask" else how.flag_dtype
                self.kwargs[name] = self._matrix(getattr(case, name), dtype)
        if case.bootstrap_values is not None:
            self.kwargs["bootstrap_values"] = self._bootstrap(case.bootstrap_values)
        self.kwargs |= {"time_dim": how.time_dim, "compute_returns": how.returns}

    def _matrix(self, array, dtype):
        layout = self.how.layouts[len(self.placed) % len(self.how.layouts)]
        self.placed.append(place(array.T if self.turned else array, layout, dtype, self.device))
        return self.placed[-1].view

    def _bootstrap(self, form):
        if isinstance(form, Sparse):
            edge = self._bootstrap(form.edge) if isinstance(form.edge, np.ndarray) else form.edge
            env, time = (torch.tensor(x, dtype=torch.int64, device=self.device) for x in (form.env, form.time))
            return FinalValues(env, time, torch.tensor(form.value, dtype=self.how.dtype, device=self.device), edge)
        if not isinstance(form, np.ndarray):
            return form
        if form.ndim == 2:
            return self._matrix(form, self.how.dtype)
        tensor = torch.as_tensor(form).to(device=self.device, dtype=self.how.dtype)
        self.placed.append(Placed(tensor, tensor))
        return tensor

    def __call__(self, backend=None, **changes):
        """compute_gae's own answer."""
        return compute_gae(**{**self.kwargs, "backend": backend, **changes})

    def checked(self, backend):
        """The results as [num_envs, T] tensors, after checks of the memory around the call: outputs start as NaN, all
        of them and nothing beside them is written, inputs keep their bits, and the results are `out` itself.
        """
        how, changes, outs = self.how, {}, []
        shape = tuple(self.kwargs["rewards"].shape)
        if how.out_layout is not None:
            nan = np.full(shape, np.nan)
            outs = [place(nan, how.out_layout, how.result_dtype, self.device) for _ in range(1 + how.returns)]
            changes["out"] = (outs[0].view, outs[1].view if how.returns else None)
        before = [p.base.clone() for p in self.placed]
        result = self(backend, **changes)
        assert all(same_bits(p.base, old) for p, old in zip(self.placed, before, strict=True)), "an input was modified"
        for out, got in zip(outs, result, strict=False):
            assert got is out.view
            beside = out.base.clone()
            out.same_view(beside).fill_(torch.nan)
            assert beside.isnan().all(), "wrote beside the output"
        assert (result.returns is not None) == how.returns
        given = [x for x in result if x is not None]
        assert all(x.shape == shape and x.dtype == how.result_dtype and not x.requires_grad for x in given)
        return [x.t() if self.turned else x for x in given]


# --- comparison -------------------------------------------------------------------------------------------------------


def run(case, target, how=How()):
    """Advantages and returns, [num_envs, T] on the CPU; everything that must hold of any call is checked."""
    return [x.cpu() for x in Call(case, target.device, how).checked(target.backend)]


def check(case, target, how=How(), slack=4.0):
    """Run a case and compare it with the oracle on the same, rounded, inputs.

    The error of each row, in the norm, may be twice that of a serial loop in the precision of the arithmetic, plus
    `slack` roundings of the operands, plus the rounding of the output if its type is coarser.
    """
    results = run(case, target, how)
    case = case.rounded(how.dtype)
    arithmetic = np.float64 if how.dtype == torch.float64 else np.float32
    slack *= 16 if arithmetic == np.float64 else 1  # there the oracle is itself the serial loop
    exact, serial = case.expected(), case.expected(dtype=arithmetic)
    size = sum(row_norms(np.where(case.valid, x, 0)) for x in (case.rewards, case.values))
    for name, result, want, loop in zip(("advantages", "returns"), results, exact, serial, strict=False):
        got = result.double().numpy()
        assert (np.isnan(got) == np.isnan(want)).all(), f"{name}: NaN at {np.argwhere(np.isnan(got) ^ np.isnan(want))}"
        assert not got[~case.valid].any(), f"{name}: not 0 in masked cells"
        norm = row_norms(want)
        limit = 2 * row_norms(loop - want) + slack * np.finfo(arithmetic).eps * (2 * norm + size)
        if torch.finfo(how.result_dtype).eps > np.finfo(arithmetic).eps:
            limit += (
                torch.finfo(how.result_dtype).eps * norm / (1 if target.interpreted else 2)
            )  # it truncates bfloat16
        error = row_norms(got - want)
        assert (error <= limit).all(), f"{name}: rows {np.flatnonzero(error > limit)}, {error.max()} > {limit.max()}"


def assert_gradients(function, inputs, backend):
    """Whole Jacobians are those of finite differences; on the reference backend, in one random direction."""
    assert torch.autograd.gradcheck(function, inputs, fast_mode=backend == "reference")


def row_norms(x):
    return np.linalg.norm(np.nan_to_num(np.asarray(x, np.float64), posinf=np.inf, neginf=-np.inf), axis=1)


# --- random cases -----------------------------------------------------------------------------------------------------

SIZES = (0, 1, 2, 3, 4, 5, 7, 8, 9, 11, 13, 15, 16, 17, 31, 32, 33, 37, 63, 64, 65, 127, 128, 129, 255, 256, 257, 300)
SIZES += (511, 512, 513, 1023, 1024, 1025, 2047, 2048, 2049, 4095, 4096, 4097, 5003)
MAX_CELLS = {"reference": 2000, "cpu": 5000, "triton": 20_000}
PATTERNS = {"none": 0.0, "few": 0.05, "some": 0.3, "every": 1.0}


def picker(draw, target, few):
    """Chooses one of some: what the cpu backend compiles a loop of its own for, which takes it a second.

    There it is one of a few combinations of all choices, unless many examples are asked for.
    """
    if target.backend == "cpu" and settings.default.max_examples < 1000:
        return random.Random(draw(st.integers(1, few))).choice
    return lambda options: draw(st.sampled_from(options))


@st.composite
def cases(draw, target):
    """A case with every cell that must not be read filled with NaN, and the way to hand it over."""
    pick = picker(draw, target, few=10)
    num_steps = draw(st.sampled_from([n for n in SIZES if n <= target.max_steps]))
    max_envs = 9 if target.interpreted else min(300, MAX_CELLS[target.backend] // max(num_steps, 1))
    num_envs = draw(st.sampled_from([n for n in SIZES if n <= max_envs]))
    shape = num_envs, num_steps
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))

    def flags():
        pattern = pick([None, *PATTERNS])
        return None if pattern is None else rng.random(shape) < PATTERNS[pattern]

    rewards, values, dense, next_values = rng.standard_normal((4, *shape))
    terminated, truncated = flags(), flags()
    mask = pick([None, 0.9, 0.5, 0.0])
    mask = None if mask is None else rng.random(shape) < mask
    mask_mode = draw(st.sampled_from(["skip", "reset"]))
    valid = np.ones(shape, bool) if mask is None else mask
    none = np.zeros(shape, bool)
    term = none if terminated is None else terminated
    edges = ~np.isnan(oracles.dense_bootstrap(np.ones(num_envs), shape, mask, mask_mode))
    cuts = (edges | (none if truncated is None else truncated)) & valid

    gamma = pick([0.0, 0.5, 0.99, 1, "per step"])
    if gamma == "per step":
        gamma = np.where(rng.random(shape) < 0.15, 0.0, rng.uniform(0.5, 1.0, shape))
        gamma = np.where(valid, gamma, np.nan)
    expand = draw(st.sampled_from(["nothing", "rewards", "values", "flags"]))
    line = np.s_[:, :1] if draw(st.booleans()) else np.s_[:1]
    for x in {"rewards": [rewards], "values": [values], "flags": [term]}.get(expand, []):
        x[:] = x[line]
    if expand not in ("rewards", "values"):
        rewards, values = np.where(valid, rewards, np.nan), np.where(valid, values, np.nan)

    forms = ["scalar", "dense", "sparse", "next_values"] + (["edge"] if truncated is None else [])
    form = pick(forms)
    bootstrap = {"scalar": 1.5, "dense": np.where(cuts & ~term, dense, np.nan), "edge": rng.random(num_envs)}.get(form)
    if form == "sparse":
        edge = draw(st.sampled_from([None, 2.5, "tensor"]))
        given = rng.random(shape) < np.where(cuts, 0.9, 0.05)
        env, time = np.nonzero(given)
        edge = rng.standard_normal(num_envs) if edge == "tensor" else edge
        bootstrap = Sparse(env.tolist(), time.tolist(), dense[given].tolist(), edge)
    if form == "next_values":
        next_values = np.where(valid & ~term, next_values, np.nan)
    case = Case(
        *(rewards, values, terminated, truncated, gamma, draw(st.sampled_from([0, 0.5, 0.95, 1.0])), bootstrap),
        next_values=next_values if form == "next_values" else None,
        mask=mask,
        mask_mode=mask_mode,
    )

    floats = [torch.float32, torch.float32, torch.bfloat16, torch.float16]
    how = How(
        dtype=pick(floats if target.backend == "triton" else [*floats, torch.float64]),
        flag_dtype=pick([torch.bool, torch.uint8, torch.float32, torch.bfloat16]),
        mask_dtype=draw(st.sampled_from([torch.bool, torch.uint8, torch.float16, torch.float64])),
        time_dim=pick([-1, 0, 1, -2]),
        layouts=tuple(draw(st.lists(st.sampled_from(LAYOUTS), min_size=1, max_size=3))),
        out_layout=pick([None, *LAYOUTS[:5]]),
        out_dtype=draw(st.sampled_from([None, None, torch.float32, torch.bfloat16])),
        returns=pick([True, False]),
    )
    return case, how


# --- boundary patterns: bit 0 of a cell is terminated, bit 1 truncated, bit 2 masked ----------------------------------

CELLS = {
    "two episodes": [0, 0, 1, 0, 0, 0],
    "truncated": [0, 0, 2, 0, 0, 0],
    "both flags": [0, 3, 0, 0, 3, 0],
    "every step": [1, 2, 3, 1, 2, 3],
    "last step": [0, 2, 0, 0, 0, 1],
    "masked": [0, 4, 1, 4, 4, 0],
    "masked and done": [0, 5, 2, 6, 0, 7],
    "masked at both ends": [4, 0, 2, 0, 1, 4],
    "no valid step": [4, 5, 6, 7, 4, 4],
}
