"""Arguments of one call of any estimator, how they are laid out in memory, and what the call must give."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import oracles
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from oracles import CUT, GOES_ON, MASKED

import rl_triton_core as ours
from rl_triton_core import FinalValues, ScanState

LAYOUTS = ("contiguous", "transposed", "strided", "padded", "padded_transposed", "expanded")


class Target(NamedTuple):
    """A backend, the device of its tensors, and the longest window worth its time."""

    backend: str
    device: str
    max_steps: int

    @property
    def interpreted(self):
        return self.backend == "triton" and self.device == "cpu"

    @property
    def compiled(self):
        """Whether long rows cost little."""
        return self.backend == "cpu" or self.device == "cuda"


class Estimator(NamedTuple):
    """One public function and its oracle."""

    name: str
    function: Callable[..., Any]
    table: Callable[..., Any]
    inputs: tuple
    outputs: tuple
    second: str | None = None  # the switch that leaves the second output out

    @property
    def forward(self):
        return self.name in ("traces", "prefix")


GAE = Estimator(
    *("gae", ours.compute_gae, oracles.gae),
    *(("rewards", "values"), ("advantages", "returns"), "compute_returns"),
)
VTRACE = Estimator(
    *("vtrace", ours.compute_vtrace, oracles.vtrace),
    *(("rewards", "values", "log_ratios"), ("targets", "advantages"), "compute_advantages"),
)
RETRACE = Estimator(
    *("retrace", ours.compute_retrace, oracles.retrace),
    *(("rewards", "q_values", "log_ratios", "expected_next_q"), ("targets", "advantages"), "compute_advantages"),
)
LAMBDA = Estimator("lambda", ours.compute_lambda_returns, oracles.lambda_returns, ("rewards", "values"), ("returns",))
DISCOUNTED = Estimator(
    "discounted", ours.compute_discounted_returns, oracles.discounted_returns, ("rewards",), ("returns",)
)
TRACES = Estimator("traces", ours.compute_eligibility_traces, oracles.eligibility_traces, ("x",), ("traces",))
PREFIX = Estimator("prefix", ours.compute_episodic_prefix_sum, oracles.episodic_prefix_sum, ("x",), ("sums",))
LINEAR = Estimator("linear", ours.linear_recurrence, oracles.linear_recurrence, ("alpha", "beta"), ("states",))
BACKWARD = (GAE, VTRACE, RETRACE, LAMBDA, DISCOUNTED)
FORWARD = (TRACES, PREFIX)
BOOTSTRAPPED = (GAE, VTRACE, LAMBDA, DISCOUNTED)  # those that take bootstrap_values
OFF_POLICY = (VTRACE, RETRACE)
TWO_RESULTS = (GAE, VTRACE, RETRACE)
ESTIMATORS = (*BACKWARD, *FORWARD, LINEAR)

FLAGS = ("terminated", "truncated", "dones", "mask")
FORMS = {
    "gae": ("scalar", "dense", "sparse", "next_values", "edge"),
    "vtrace": ("scalar", "dense", "sparse", "next_values", "edge"),
    "lambda": ("scalar", "dense", "sparse", "next_values", "edge"),
    "discounted": ("scalar", "dense", "sparse", "edge"),
    "retrace": ("expected", "actions"),
}


class Sparse(NamedTuple):
    """The parts of FinalValues."""

    env: list
    time: list
    value: list
    edge: Any = None


class Vector(NamedTuple):
    """A decay per feature dimension."""

    array: np.ndarray


def get_name(estimator):
    return estimator.name


@dataclass(frozen=True, repr=False)
class Case:
    """Arguments by name: arrays are float64, int or bool, [num_envs, T, ...] whatever the layout of the call."""

    estimator: Estimator
    args: dict

    def __repr__(self):
        return f"Case({self.estimator.name}, {', '.join(f'{k}={describe_argument(v)}' for k, v in self.args.items())})"

    def _repr_pretty_(self, printer, cycle):
        printer.text(repr(self))

    def __getitem__(self, name):
        return self.args[name]

    def get(self, name, default=None):
        return self.args.get(name, default)

    def replace(self, **changes):
        args = {**self.args, **changes}
        return Case(self.estimator, {name: x for name, x in args.items() if x is not None})

    def map_arrays(self, function, *names):
        """The case after a function of every per-step array, or of those named."""
        arrays = {k: x for k, x in self.args.items() if is_per_step(x) and (not names or k in names)}
        return self.replace(**{name: function(x) for name, x in arrays.items()})

    @property
    def shape(self):
        return self.args[self.estimator.inputs[0]].shape[:2]

    @property
    def valid(self):
        return np.ones(self.shape, bool) if self.get("mask") is None else self["mask"]

    @property
    def boundaries(self):
        names = ("terminated", "truncated", "mask", "mask_mode")
        return {name: self[name] for name in names if name in self.args}

    @property
    def dense(self):
        """The bootstrap as the oracles take it."""
        form, entries = self.get("bootstrap_values"), ()
        if isinstance(form, Sparse):
            entries = zip(form.env, form.time, form.value, strict=True)
            form = None if form.edge is None else np.broadcast_to(form.edge, self.shape[:1])
        return oracles.dense_bootstrap(form, self.shape, self.get("mask"), self.get("mask_mode", "skip"), entries)

    def rounded(self, dtype):
        """The same case after its float arrays have been rounded to dtype; a state is float32 at least."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32

        def round_argument(x):
            if isinstance(x, Sparse):
                edge = x.edge if x.edge is None else round_array(x.edge, dtype)
                return x._replace(value=round_array(x.value, dtype).tolist(), edge=edge)
            if isinstance(x, Vector):
                return Vector(round_array(x.array, dtype))
            if isinstance(x, tuple):
                return (x[0] if x[0].dtype.kind == "i" else round_array(x[0], wide), x[1])
            return round_array(x, dtype) if isinstance(x, np.ndarray) and x.dtype.kind == "f" else x

        return Case(self.estimator, {name: round_argument(x) for name, x in self.args.items()})

    def expected(self, oracle=None, **kwargs):
        """The oracle's results: those of the table unless told otherwise."""
        args = dict(self.args)
        if "bootstrap_values" in args:
            args["bootstrap"] = self.dense
            del args["bootstrap_values"]
        if self.estimator is TRACES:
            args["decay"] = expand_decay(
                args.pop("decay", None), args.pop("gamma", 0.99), args.pop("lambda_", 0.95), args["x"]
            )
        with np.errstate(over="ignore", invalid="ignore"):
            results = (oracle or self.estimator.table)(**args, **kwargs)
        return results if isinstance(results, tuple) else (results,)


def describe_argument(x):
    if isinstance(x, Sparse):
        return f"Sparse({len(x.env)} entries, edge={describe_argument(x.edge)})"
    if isinstance(x, np.ndarray) and x.size > 20:
        return f"{x.dtype}{list(x.shape)}" + (f", {x.sum()} set" if x.dtype == bool else "")
    return repr(x)


def round_array(x, dtype):
    return torch.as_tensor(np.asarray(x, np.float64)).to(dtype).double().numpy()


def expand_decay(decay, gamma, lambda_, x):
    """Any form of a decay as a number or an array that broadcasts over x."""
    if decay is None:
        return gamma * lambda_
    if isinstance(decay, Vector):
        return decay.array
    return decay.reshape(decay.shape + (1,) * (x.ndim - decay.ndim)) if isinstance(decay, np.ndarray) else decay


def is_per_step(x):
    return isinstance(x, np.ndarray) and x.ndim >= 2


# --- random cases -----------------------------------------------------------------------------------------------------

ACTIONS = 3


def draw_input(rng, name, shape):
    if name == "log_ratios":
        return 0.7 * rng.standard_normal(shape)
    if name in ("target_log_probs", "behaviour_log_probs"):
        return -np.abs(rng.standard_normal(shape))
    if name == "next_action_probs":
        return rng.dirichlet(np.ones(ACTIONS), shape)
    if name == "next_q_values":
        return rng.standard_normal((*shape, ACTIONS))
    if name == "beta":
        return rng.uniform(-1, 1, shape)
    return rng.standard_normal(shape)


def random_case(estimator, num_envs, num_steps, seed=0, *, term=0.1, trunc=0.1, valid=1.0, features=(), **changes):
    rng = np.random.default_rng(seed)
    shape = (num_envs, num_steps)
    args = {name: draw_input(rng, name, (*shape, *features)) for name in estimator.inputs}
    flags = {"terminated": term, "truncated": trunc}
    if estimator is PREFIX:
        flags = {"dones": term}
    if estimator is LINEAR:
        args["reverse"] = True
    else:
        args |= {name: rng.random(shape) < p for name, p in flags.items() if p is not None}
        if valid != 1:
            args["mask"] = rng.random(shape) < valid
    if "edge" in FORMS.get(estimator.name, ()):
        args["bootstrap_values"] = rng.standard_normal(shape)
    return Case(estimator, args).replace(**changes)


def with_form(case, form, seed=0, term=None):
    """The case with its continuation told in another form (`FORMS`)."""
    rng = np.random.default_rng(seed)
    if form == "scalar":
        return case.replace(bootstrap_values=1.5)
    if form == "edge":
        return case.replace(truncated=None, bootstrap_values=rng.standard_normal(case.shape[0]))
    if form == "next_values":
        values = None if case.estimator is LAMBDA else case["values"]
        return case.replace(values=values, bootstrap_values=None, next_values=rng.standard_normal(case.shape))
    if form == "actions":
        names = ("next_action_probs", "next_q_values")
        return case.replace(expected_next_q=None, **{name: draw_input(rng, name, case.shape) for name in names})
    return case


def with_log_probs(case, seed=0):
    """The ratio told as two log-probabilities."""
    rng, names = np.random.default_rng(seed), ("target_log_probs", "behaviour_log_probs")
    return case.replace(log_ratios=None, **{name: draw_input(rng, name, case.shape) for name in names})


def classify_case(case):
    """`oracles.classify_steps` of a backward case."""
    return oracles.classify_steps(case.shape, **case.boundaries, gamma=case.get("gamma"))


def find_readable(case):
    """Per input the cells that may be read at all."""
    if case.estimator is LINEAR:
        return {"alpha": case.valid, "beta": case.valid}
    if case.estimator.forward:
        return {"x": case.valid, "decay": case.valid & ~find_starts(case)}
    kind, after = classify_case(case)
    valid, num_lookahead = kind != MASKED, np.zeros(case.shape, bool)
    num_lookahead[np.nonzero(after >= 0)[0], after[after >= 0]] = True
    going_on = (kind == CUT) | (kind == GOES_ON)
    names = ("rewards", "q_values", "log_ratios", "target_log_probs", "behaviour_log_probs", "gamma")
    return {
        **dict.fromkeys(names, valid),
        "values": num_lookahead if case.estimator is LAMBDA else valid,
        "bootstrap_values": kind == CUT,
        **dict.fromkeys(("next_values", "expected_next_q", "next_action_probs", "next_q_values"), going_on),
    }


def find_starts(case):
    ids = oracles.number_trajectories(case.shape, **get_endings(case))
    first = np.zeros(case.shape, bool)
    for n, row in enumerate(ids):
        numbers, at = np.unique(row, return_index=True)
        first[n, at[(numbers >= 0) & (at > 0)]] = True
        if case.get("mask_mode") != "reset":
            first[n, np.flatnonzero(case.valid[n])[:1]] = False  # what comes before the window carries on
    return first


def get_endings(case):
    kept = {name: case[name] for name in ("mask", "mask_mode") if name in case.args}
    if case.estimator is TRACES:
        return case.boundaries
    dones, valid = case.get("dones"), case.valid
    if dones is None or case.get("boundary", "ends_at") == "ends_at":
        return {"terminated": dones, **kept}
    previous_done = np.zeros(case.shape, bool)
    for n in range(case.shape[0]):
        at = np.flatnonzero(valid[n])
        previous_done[n, at[:-1]] = dones[n, at[1:]]
    return {"terminated": previous_done, **kept}


def poison_unread(case):
    """The case with NaN in every cell that must not be read, unless it is constant for a reason."""
    cells = find_readable(case)
    changes = {}
    for name, x in case.args.items():
        if name in cells and is_per_step(x) and x.dtype.kind == "f":
            read = cells[name].reshape(case.shape + (1,) * (x.ndim - 2))
            changes[name] = np.where(read, x, np.nan)
    return case.replace(**changes)


# --- memory -----------------------------------------------------------------------------------------------------------


class Placed(NamedTuple):
    """A tensor and the memory it is a view of; what the view does not cover holds NaN (or nonzero flags)."""

    view: torch.Tensor
    base: torch.Tensor

    def same_view(self, base):
        return torch.as_strided(base, self.view.shape, self.view.stride(), self.view.storage_offset())


def place_array(array, layout, dtype, device):
    """Put an array into memory; the layout is that of its two leading dimensions, and a vector has none.

    "expanded" falls back to contiguous unless the array is constant along one of them.
    """
    source = torch.as_tensor(np.ascontiguousarray(array)).view(array.shape).to(device=device, dtype=dtype)
    if array.ndim < 2:
        return Placed(source, source)
    rows, cols, *rest = source.shape
    for dim in (0, 1) if layout == "expanded" and source.numel() else ():
        line = source.narrow(dim, 0, 1)
        if torch.equal(source, line.expand_as(source)):
            base = line.contiguous()
            return Placed(base.expand_as(source), base)
    shape, cut = {
        "transposed": ((cols, rows, *rest), lambda base: base.transpose(0, 1)),
        "strided": ((2 * rows + 1, 3 * cols + 2, *rest), lambda base: base[1::2, 2::3]),
        "padded": ((rows + 2, cols + 3, *rest), lambda base: base[1 : rows + 1, 2 : cols + 2]),
        "padded_transposed": (
            (*rest, cols + 2, rows + 3),
            lambda base: base.movedim((-1, -2), (0, 1))[2 : rows + 2, 1 : cols + 1],
        ),
    }.get(layout, (tuple(source.shape), lambda base: base))
    base = torch.full(shape, torch.nan if dtype.is_floating_point else 1, dtype=dtype, device=device)
    cut(base).copy_(source)
    return Placed(cut(base), base)


def get_bytes(tensor):
    """The bytes of a tensor, so that NaN equals itself and 0.0 is not -0.0."""
    return tensor.detach().cpu().flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8)


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(get_bytes(a), get_bytes(b))


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


DEFAULT = How()


class Call:
    """A case made into arguments on a device, with the memory behind them."""

    def __init__(self, case, device="cpu", how=DEFAULT):
        self.estimator, self.how, self.device, self.placed = case.estimator, how, device, []
        self.is_time_major = how.time_dim in (0, -2)
        self.integers = case[self.estimator.inputs[0]].dtype.kind == "i"
        self.shape = case[self.estimator.inputs[0]].shape
        self.kwargs = {name: self._make_argument(name, x) for name, x in case.args.items()}
        self.kwargs["time_dim"] = how.time_dim
        if self.estimator.second:
            self.kwargs[self.estimator.second] = how.returns
        self.num_results = len(self.estimator.outputs) - bool(self.estimator.second and not how.returns)

    def _make_argument(self, name, x):
        if name == "state":
            wide = torch.int64 if self.integers else torch.promote_types(self.how.dtype, torch.float32)
            return ScanState(self._place_tensor(x[0], wide), self._place_tensor(x[1], torch.bool))
        if isinstance(x, Sparse):
            edge = self._make_argument("edge", x.edge) if isinstance(x.edge, np.ndarray) else x.edge
            env, time = (torch.tensor(i, dtype=torch.int64, device=self.device) for i in (x.env, x.time))
            return FinalValues(env, time, torch.tensor(x.value, dtype=self.how.dtype, device=self.device), edge)
        if isinstance(x, Vector):
            return self._place_tensor(x.array, self.how.dtype)
        if not isinstance(x, np.ndarray):
            return x
        if name in FLAGS:
            dtype = self.how.mask_dtype if name == "mask" else self.how.flag_dtype
        else:
            dtype = self.how.dtype if x.dtype.kind == "f" else torch.as_tensor(x).dtype
        is_turned = self.is_time_major and x.ndim > 1 and name != "initial"
        return self._place_tensor(x.swapaxes(0, 1) if is_turned else x, dtype)

    def _place_tensor(self, array, dtype):
        layout = self.how.layouts[len(self.placed) % len(self.how.layouts)]
        self.placed.append(place_array(array, layout, dtype, self.device))
        return self.placed[-1].view

    def __call__(self, backend=None, **changes):
        """The results as a tuple of tensors in the layout of the call, as the function gave them."""
        answer = self.estimator.function(**{**self.kwargs, "backend": backend, **changes})
        return (answer,) if isinstance(answer, torch.Tensor) else tuple(answer)

    def env_major(self, tensor):
        return tensor.transpose(0, 1) if self.is_time_major else tensor

    @property
    def result_dtype(self):
        return torch.int64 if self.integers else self.how.result_dtype

    def run_checked(self, backend):
        """The results as [num_envs, T, ...] tensors, after checks of the memory around the call: outputs start as NaN,
        all of them and nothing beside them is written, inputs keep their bits, and the results are `out` itself.
        """
        how, changes, outs = self.how, {}, []
        shape = (self.shape[1], self.shape[0], *self.shape[2:]) if self.is_time_major else self.shape
        filler = 1 if self.integers else torch.nan
        if how.out_layout is not None:
            full = np.full(shape, filler)
            outs = [place_array(full, how.out_layout, self.result_dtype, self.device) for _ in range(self.num_results)]
            views = [out.view for out in outs] + [None] * (len(self.estimator.outputs) - len(outs))
            changes["out"] = tuple(views) if len(views) > 1 else views[0]
        before = [p.base.clone() for p in self.placed]
        results = self(backend, **changes)
        unchanged = all(same_bits(p.base, old) for p, old in zip(self.placed, before, strict=True))
        assert unchanged, "an input was modified"
        for out, got in zip(outs, results, strict=False):
            assert got is out.view, "the result is not the output that was passed"
            beside = out.base.clone()
            out.same_view(beside).fill_(filler)
            assert same_bits(beside, torch.full_like(beside, filler)), "wrote beside the output"
        left_out = [i >= self.num_results for i in range(len(self.estimator.outputs))]
        assert [x is None for x in results] == left_out, f"results left out: expected {left_out}"
        given = results[: self.num_results]
        for x in given:
            what = f"got {x.dtype}{list(x.shape)}, expected {self.result_dtype}{list(shape)} without gradient"
            assert x.shape == shape and x.dtype == self.result_dtype and not x.requires_grad, what
        return [self.env_major(x) for x in given]


# --- comparison -------------------------------------------------------------------------------------------------------


def run_case(case, target, how=DEFAULT):
    """The results, [num_envs, T, ...] on the CPU; everything that must hold of any call is checked."""
    return [x.cpu() for x in Call(case, target.device, how).run_checked(target.backend)]


def flatten_features(x):
    return x.reshape(len(x), int(np.prod(x.shape[1:])))


def check_case(case, target, how=DEFAULT, slack=4.0):
    """Run a case and compare it with the oracle on the same, rounded, inputs.

    The error of each row, in the norm, may be twice that of a serial loop in the precision of the arithmetic, plus
    `slack` roundings of the operands, plus the rounding of the output if its type is coarser. Integers are exact.
    """
    results = run_case(case, target, how)
    case = case.rounded(how.dtype)
    arithmetic = np.float64 if how.dtype == torch.float64 else np.float32
    slack *= 16 if arithmetic == np.float64 else 1  # there the oracle is itself the serial loop
    exact, serial = case.expected(), case.expected(dtype=arithmetic)
    names = case.estimator.outputs
    size = measure_operands(case) + sum(measure_rows(flatten_features(x)) for x in exact[: len(names)])
    for name, result, want, loop in zip(names, results, exact, serial, strict=False):
        got = result.numpy() if result.dtype == torch.int64 else result.double().numpy()
        assert not got[~case.valid].any(), f"{name}: not 0 in masked cells"
        if result.dtype == torch.int64:
            np.testing.assert_array_equal(got, want)
            continue
        wrong = np.argwhere(np.isnan(got) ^ np.isnan(want))
        assert not len(wrong), f"{name}: NaN in one of result and oracle at {wrong.tolist()}"
        limit = 2 * measure_rows(flatten_features(loop - want)) + slack * np.finfo(arithmetic).eps * size
        if torch.finfo(how.result_dtype).eps > np.finfo(arithmetic).eps:  # the interpreter truncates bfloat16
            limit += (
                torch.finfo(how.result_dtype).eps
                * measure_rows(flatten_features(want))
                / (1 if target.interpreted else 2)
            )
        error = measure_rows(flatten_features(got - want))
        wrong = np.flatnonzero(~(error <= limit))
        assert not len(wrong), f"{name}: errors {error[wrong]} of rows {wrong} are larger than {limit[wrong]}"


def assert_gradients(function, inputs, backend):
    """Whole Jacobians are those of finite differences; on the reference backend, in one random direction."""
    assert torch.autograd.gradcheck(function, inputs, fast_mode=backend == "reference")


def assert_equal(got, want):
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def check_full_graph(function, *inputs, compiler="aot_eager", compare=assert_equal, **options):
    """Compiled without a break, a function gives the same results, and gradients by the inputs that require some."""
    torch._dynamo.reset()
    found = []
    for one in (function, torch.compile(function, fullgraph=True, backend=compiler, **options)):
        leaves = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
        results = one(*leaves)
        results = [results] if isinstance(results, torch.Tensor) else [*results]
        total = sum(x.square().sum() for x in results if x.requires_grad)
        wanted = [x for x in leaves if x.requires_grad]
        found.append([*results, *(torch.autograd.grad(total, wanted) if wanted else [])])
    for got, want in zip(*found[::-1], strict=True):
        assert got.requires_grad == want.requires_grad
        compare(got.detach(), want.detach())
    return results


def make_test_of_refusals(calls):
    """A test that calls are refused, by the messages of their errors."""

    @pytest.mark.parametrize("message", calls)
    def test(message):
        with pytest.raises((TypeError, ValueError), match=message):
            calls[message]()

    return test


def measure_rows(x):
    return np.linalg.norm(np.nan_to_num(np.asarray(x, np.float64), posinf=np.inf, neginf=-np.inf), axis=1)


def measure_operands(case):
    """The size of what is added up in every row: the inputs, as far as clipped ratios weigh them."""
    weight = max([1.0, *(case.get(name, 1.0) for name in ("rho_bar", "c_bar", "rho_bar_pg"))])
    skipped = ("gamma", "decay", "beta", "log_ratios", "target_log_probs", "behaviour_log_probs", "next_action_probs")
    arrays = {name: x for name, x in case.args.items() if name not in (*skipped, *FLAGS) and is_per_step(x)}
    return weight * sum(measure_rows(flatten_features(np.where(np.isfinite(x), x, 0.0))) for x in arrays.values())


# --- random calls -----------------------------------------------------------------------------------------------------

SIZES = (0, 1, 2, 3, 4, 5, 7, 8, 9, 11, 13, 15, 16, 17, 31, 32, 33, 37, 63, 64, 65, 127, 128, 129, 255, 256, 257, 300)
SIZES += (511, 512, 513, 1023, 1024, 1025, 2047, 2048, 2049, 4095, 4096, 4097, 5003)
MAX_CELLS = {"reference": 600, "cpu": 1500, "triton": 6000}
FLOATS = [torch.float32, torch.float32, torch.bfloat16, torch.float16]
PRESENT = {"no flags": (), "terminations": ("terminated",), "all": ("terminated", "truncated", "mask")}

PATTERNS = {"none": 0.0, "few": 0.05, "some": 0.3, "every": 1.0}


class Choice(NamedTuple):
    """What makes a call random."""

    target: Target
    rng: np.random.Generator  # of the numbers
    draw: Callable  # chooses one of some
    pick: Callable  # the same, where every choice is compiled on its own, which takes a second

    @property
    def coin(self):
        return self.draw([True, False])


def make_random_call(estimator, target, seed, combination=None):
    """A case with every cell that must not be read filled with NaN, and the way to hand it over.

    The seed says all. Calls of one `combination` share what is compiled for them.
    """
    draw = random.Random(str(seed)).choice
    pick = draw if combination is None else random.Random(str(combination)).choice
    choice = Choice(target, np.random.default_rng(seed), draw, pick)
    if estimator is LINEAR:
        return make_linear_call(choice)
    return (make_forward_call if estimator.forward else make_backward_call)(estimator, choice)


@st.composite
def draw_any_case(draw, estimator, target):
    """A random case of an estimator, and how to hand it over; shrinking a seed makes no smaller case."""
    seed = draw(st.integers(0, 2**32 - 1))
    most = max(3, math.isqrt(settings.default.max_examples))  # combinations that are compiled, of each estimator
    return make_random_call(estimator, target, seed, draw(st.integers(1, most)) if target.backend == "cpu" else None)


def choose_shape(choice):
    target = choice.target
    num_steps = choice.draw([n for n in SIZES if n <= target.max_steps])
    max_envs = 5 if target.interpreted else min(150, max(1, MAX_CELLS[target.backend] // max(num_steps, 1)))
    return choice.draw([n for n in SIZES if n <= max_envs]), num_steps


def choose_how(choice):
    draw, pick = choice.draw, choice.pick
    return How(
        dtype=pick(FLOATS if choice.target.backend == "triton" else [*FLOATS, torch.float64]),
        flag_dtype=pick([torch.bool, torch.uint8, torch.float32, torch.bfloat16]),
        mask_dtype=draw([torch.bool, torch.uint8, torch.float16, torch.float64]),
        time_dim=pick([-1, 0, 1, -2]),
        layouts=tuple(draw(LAYOUTS) for _ in range(draw([1, 2, 3]))),
        out_layout=pick([None, *LAYOUTS[:5]]),
        out_dtype=draw([None, None, torch.float32, torch.bfloat16]),
        returns=pick([True, False]),
    )


def choose_flags(choice, shape, names):
    patterns = {name: choice.draw(list(PATTERNS.values())) for name in names}
    return {name: choice.rng.random(shape) < (1 - p if name == "mask" else p) for name, p in patterns.items()}


def make_backward_call(estimator, choice):
    """Of an estimator that looks ahead."""
    shape = choose_shape(choice)
    _, rng, draw, pick = choice
    case = random_case(estimator, *shape, seed=rng, term=None, trunc=None)
    case = case.replace(**choose_flags(choice, shape, PRESENT[pick(list(PRESENT))]))
    if "mask" in case.args:
        case = case.replace(mask_mode=draw(["skip", "reset"]))
    gamma = pick([0.0, 0.5, 0.99, 1, "per step"])
    if gamma == "per step":
        gamma = np.where(rng.random(shape) < 0.15, 0.0, rng.uniform(0.5, 1.0, shape))
    case = case.replace(gamma=gamma)
    if estimator is not DISCOUNTED:
        case = case.replace(lambda_=draw([0, 0.5, 0.95, 1.0]))
    if "log_ratios" in estimator.inputs:
        bars = {name: draw([0.5, 1.0, 2.0]) for name in ("rho_bar", "c_bar")}
        if bars["c_bar"] > 1:  # decays beyond 1 make errors grow by as much as the luck of the first roundings differs
            case = case.replace(lambda_=0.5)
        if estimator is VTRACE:
            bars["rho_bar_pg"] = draw([None, 0.5, 1.0, 3.0])
        case = case.replace(**bars)
        case = with_log_probs(case, rng) if pick([True, False]) else case
    form = pick([form for form in FORMS[estimator.name] if form != "edge" or "truncated" not in case.args])
    case = with_form(case, form, rng)
    if form == "sparse":
        case = case.replace(bootstrap_values=choose_sparse_values(choice, case))
    return broadcast_input(choice, poison_unread(case)), choose_how(choice)


def choose_sparse_values(choice, case):
    """Values of most of the cuts, and of some other steps."""
    rng = choice.rng
    cuts = classify_case(case)[0] == CUT
    given = rng.random(case.shape) < np.where(cuts, 0.9, 0.05)
    edge = choice.draw([None, 2.5, "tensor"])
    edge = rng.standard_normal(case.shape[0]) if edge == "tensor" else edge
    return Sparse(*(i.tolist() for i in np.nonzero(given)), rng.standard_normal(given.sum()).tolist(), edge)


def broadcast_input(choice, case):
    """One of the inputs the same along a dimension, so that it may be an expanded tensor."""
    name = choice.draw([None, *case.estimator.inputs])
    if name is None or name not in case.args or not case[name].size:
        return case
    x = case[name]
    line = x[:, :1] if choice.coin else x[:1]
    line = np.where(np.isnan(line), 1.0, line) if x.dtype.kind == "f" else line
    return case.replace(**{name: np.broadcast_to(line, x.shape).copy()})


def make_forward_call(estimator, choice):
    """Of eligibility traces and prefix sums."""
    shape = choose_shape(choice)
    _, rng, draw, pick = choice
    features = draw([(), (), (1,), (3,), (2, 2)])
    case = random_case(estimator, *shape, seed=rng, term=None, trunc=None, features=features)
    names = PRESENT[pick(list(PRESENT))]
    if estimator is PREFIX:
        names = tuple({"terminated": "dones"}.get(name, name) for name in names if name != "truncated")
        case = case.replace(boundary=draw(["ends_at", "starts_at"]))
    case = case.replace(**choose_flags(choice, shape, names))
    if "mask" in names:
        case = case.replace(mask_mode=draw(["skip", "reset"]))
    if pick([True, False]):
        value = rng.standard_normal((shape[0], *features))
        case = case.replace(state=(value, rng.random(shape[0]) < 0.3))
    if estimator is TRACES:
        case = case.replace(**choose_decay(choice, case["x"].shape))
    elif pick([True, False]):
        dtype = draw([np.int8, np.int16, np.int32, np.int64])
        case = case.replace(x=rng.integers(-100, 100, case["x"].shape).astype(dtype))
        if "state" in case.args:
            case = case.replace(state=(rng.integers(-9, 9, (shape[0], *features)), case["state"][1]))
    case = broadcast_input(choice, case if case["x"].dtype.kind == "i" else poison_unread(case))
    how = choose_how(choice)
    return case, how if case["x"].dtype.kind == "f" else How(**{**vars(how), "out_dtype": None, "dtype": torch.float32})


def choose_decay(choice, shape):
    """Any form of a decay."""
    rng = choice.rng
    form = choice.pick(["gamma", "number", "per step", "vector", "full"])
    if form == "gamma":
        return {"gamma": choice.draw([0.0, 0.9, 1]), "lambda_": choice.draw([0.0, 0.8, 1])}
    if form == "number":
        return {"decay": choice.draw([0.0, 0.5, 1.0])}
    vector = form == "vector" and len(shape) > 2
    decay = rng.uniform(0, 1, shape[2:] if vector else shape if form == "full" else shape[:2])
    decay[rng.random(decay.shape) < 0.1] = 0.0
    if shape[:2] == shape[2:] == decay.shape:  # which of the two it is, its dimensions have to say
        decay = decay.reshape((1, 1, *shape[2:]) if vector else (*shape[:2], 1, 1))
    return {"decay": Vector(decay) if vector else decay}


def make_linear_call(choice):
    """Of the bare recurrence."""
    shape, rng = choose_shape(choice), choice.rng
    features = choice.draw([(), (3,), (2, 2)])
    case = random_case(LINEAR, *shape, seed=rng, features=features, reverse=choice.coin)
    case["beta"][rng.random(case["beta"].shape) < 0.1] = 0.0
    if choice.pick([True, False]):
        case = case.replace(initial=rng.standard_normal((shape[0], *features)))
    return broadcast_input(choice, case), choose_how(choice)


def skip_repeated_tracing(target, is_one_of_few):
    """Tracing does not depend on the backend: all estimators are traced on the one that compiles them in no time."""
    if target.interpreted or (target.backend == "reference" and not is_one_of_few):
        pytest.skip("tracing does not depend on the backend")
