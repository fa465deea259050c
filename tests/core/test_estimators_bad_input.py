"""Every error of every function: its type, a message that names the argument, what came and what is expected."""

import re

import cases
import numpy as np
import pytest
import torch
from cases import Call, get_name, random_case, same_bits, with_form, with_log_probs

from rl_triton_core import FinalValues, ScanState

N, T, A = 3, 5, 3
BY_NAME = {estimator.name: estimator for estimator in cases.ESTIMATORS}
REQUIRED = ("rewards", "values", "q_values", "x", "alpha", "beta")  # wherever an estimator has them


def make_good_call(estimator, form="plain"):
    """Arguments without a fault, in one of the forms that a call may have."""
    case = random_case(estimator, N, T, **({} if estimator is cases.LINEAR else {"valid": 0.8}))
    if form == "log_probs":
        case = with_log_probs(case)
    elif form != "plain":
        case = with_form(case, form)
    kwargs = Call(case).kwargs
    return {name: x for name, x in kwargs.items() if not name.startswith("compute_")}


def floats(*shape, dtype=torch.float32, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


def bad_call(estimator, name, expected, *in_message, form="plain", **changes):
    """`changes` to good arguments raise `expected`; the message names the argument and holds all of `in_message`."""
    label = f"{estimator.name}-{name}-{'-'.join(in_message)}-{'-'.join(changes)}-{form}"
    return pytest.param(estimator, form, name, expected, in_message, changes, id=re.sub(r"[^\w.,-]+", "_", label))


def list_tensor_errors():
    """What is wrong with a tensor is wrong with every tensor."""
    forms = [(e, "plain") for e in cases.ESTIMATORS]
    forms += [
        (cases.VTRACE, "log_probs"),
        (cases.RETRACE, "log_probs"),
        (cases.RETRACE, "actions"),
        (cases.GAE, "next_values"),
    ]
    forms += [(cases.LAMBDA, "next_values")]
    for estimator, form in forms:
        tensors = {name: x for name, x in make_good_call(estimator, form).items() if isinstance(x, torch.Tensor)}
        for name, x in tensors.items():
            if form != "plain" and name in make_good_call(estimator):
                continue
            kinds = "bool" if x.dtype == torch.bool else "float32"
            wrong = (torch.int64, torch.int16, torch.complex64)
            if x.dtype == torch.bool or (name == "x" and estimator is cases.PREFIX):
                wrong = wrong[2:]
            for dtype in wrong:
                text = str(dtype).removeprefix("torch.")
                yield bad_call(estimator, name, TypeError, text, kinds, form=form, **{name: x.to(dtype)})
            if name != "bootstrap_values":
                yield bad_call(estimator, name, TypeError, "list", "Tensor", form=form, **{name: x.tolist()})
            if name in REQUIRED:
                yield bad_call(estimator, name, (TypeError, ValueError), "None", form=form, **{name: None})
            first = name == estimator.inputs[0]
            if not first:
                yield bad_call(estimator, name, ValueError, "meta", "cpu", form=form, **{name: x.to("meta")})
                for other in (x.transpose(0, 1), x[:1], x[:, :1], x[:, :-1]):
                    shape = ", ".join(map(str, other.shape))
                    yield bad_call(estimator, name, ValueError, shape, form=form, **{name: other})
            if name not in ("bootstrap_values", "alpha", "beta", "x"):
                flat = x.reshape(15, *x.shape[2:])
                wrong = {name: flat[..., None][:, 0] if x.ndim > 2 else flat}
                yield bad_call(estimator, name, ValueError, "15", form=form, **wrong)


def list_scalar_errors():
    """Numbers out of their range or of no numeric type."""
    ranges = {
        "gamma": [*cases.BACKWARD, cases.TRACES],
        "lambda_": [cases.GAE, cases.VTRACE, cases.RETRACE, cases.LAMBDA, cases.TRACES],
    }
    bars = {"rho_bar": cases.OFF_POLICY, "c_bar": cases.OFF_POLICY, "rho_bar_pg": [cases.VTRACE]}
    for name, estimators in {**ranges, **bars}.items():
        for estimator in estimators:
            for text in ("nan", "-0.1", *(() if name in bars else ("inf",)), *(["1.01"] if name == "lambda_" else [])):
                yield bad_call(estimator, name, ValueError, text, **{name: float(text)})
            arrays = (np.ones(1), floats(N, T)) if name in bars else ()
            for x in ("0.9", [0.9], 1j, *arrays, *(() if name == "rho_bar_pg" else (None,))):
                yield bad_call(estimator, name, TypeError, type(x).__name__, **{name: x})
    for estimator in (*cases.BACKWARD, *cases.FORWARD):
        yield bad_call(estimator, "mask_mode", ValueError, "drop", "skip", "reset", mask_mode="drop")
        yield bad_call(estimator, "mask_mode", ValueError, "drop", "skip", "reset", mask_mode="drop", mask=None)
    for estimator in cases.BACKWARD:
        yield bad_call(estimator, "gamma", ValueError, "-inf", gamma=-np.inf)
        yield bad_call(estimator, "gamma", TypeError, "int64", gamma=floats(N, T, dtype=torch.int64))
        yield bad_call(estimator, "terminated", TypeError, "bool", terminated=True)
    for estimator in cases.ESTIMATORS:
        yield from (bad_call(estimator, "time_dim", ValueError, str(dim), time_dim=dim) for dim in (2, -3, 7))
        yield bad_call(estimator, "time_dim", (TypeError, ValueError), "1.0", time_dim=1.0)
        yield bad_call(estimator, "time_dim", (TypeError, ValueError), "time'", time_dim="time")
        yield bad_call(estimator, "backend", ValueError, "numpy", "triton", "cpu", "reference", backend="numpy")


WRONG_FINAL_VALUES = (  # the part that is wrong, the error, what its message holds, and the parts
    ("env", ValueError, ["3"], [0, N], [0, 0], [1.0, 1.0]),
    ("env", ValueError, ["3"], np.array([N]), np.array([0]), np.ones(1)),
    ("env", ValueError, ["-1"], [0, -1], [0, 0], [1.0, 1.0]),
    ("env", ValueError, ["1, 1"], [[0]], [0], [1.0]),
    ("env", TypeError, ["got"], None, [0], [1.0]),
    ("env", TypeError, ["float"], floats(1), torch.tensor([0]), floats(1)),
    ("time", ValueError, ["5"], [0, 1], [0, T], [1.0, 1.0]),
    ("time", ValueError, ["5"], torch.tensor([0]), torch.tensor([T]), floats(1)),
    ("time", ValueError, ["-1"], [0, 1], [-1, 0], [1.0, 1.0]),
    ("time", TypeError, ["got"], [0], "0", [1.0]),
    ("time", TypeError, ["float"], [0], [0.5], [1.0]),
    ("(env|time)", ValueError, ["1", "2"], [0, 1], [0], [1.0, 1.0]),
    ("(env|value)", ValueError, ["1", "2"], [0, 1], [0, 1], [1.0]),
    ("(env|value)", ValueError, ["1, 1"], [0], [0], floats(1, 1)),
    ("value", TypeError, ["got"], [0], [0], [[1.0], []]),
    ("value", TypeError, ["int64"], [0], [0], floats(1, dtype=torch.int64)),
    ("last_value", ValueError, ["4"], [0], [0], [1.0], floats(N + 1)),
    ("last_value", ValueError, ["3, 5"], [0], [0], [1.0], floats(N, T)),
    ("last_value", TypeError, ["str"], [0], [0], [1.0], "0"),
)


def list_continuation_errors():
    """A missing continuation is never silent; one that is told twice is no better."""
    edge, none = floats(N), {"truncated": None}
    for estimator in cases.BOOTSTRAPPED:
        name = "bootstrap_values"
        yield bad_call(estimator, name, ValueError, "None", bootstrap_values=None)
        yield bad_call(estimator, name, ValueError, "None", bootstrap_values=None, terminated=None, mask=None, **none)
        yield bad_call(estimator, name, ValueError, "truncated", bootstrap_values=edge)
        yield bad_call(estimator, name, ValueError, "4", bootstrap_values=floats(N + 1), **none)
        yield bad_call(estimator, name, ValueError, "3, 5, 1", bootstrap_values=floats(N, T, 1))
        yield bad_call(estimator, name, TypeError, "str", bootstrap_values="0")
        yield bad_call(estimator, name, TypeError, "list", bootstrap_values=[0.0] * N)
        yield bad_call(estimator, name, ValueError, "5", bootstrap_values=floats(T), **none)
        yield bad_call(estimator, name, ValueError, "meta", "cpu", bootstrap_values=floats(N, device="meta"), **none)
        for part, expected, in_message, *parts in WRONG_FINAL_VALUES:
            name, values = f"(bootstrap_values.*)?{part}", FinalValues(*parts)
            yield bad_call(estimator, name, expected, *in_message, bootstrap_values=values)
    for estimator in (cases.GAE, cases.VTRACE, cases.LAMBDA):
        values = {"values": None} if estimator is cases.LAMBDA else {}
        yield bad_call(estimator, "bootstrap_values", ValueError, "next_values", next_values=floats(N, T), **values)
    both = {"next_values": floats(N, T), "bootstrap_values": None}
    yield bad_call(cases.LAMBDA, "values", ValueError, "next_values", **both)
    yield bad_call(cases.LAMBDA, "values", ValueError, "None", "next_values", values=None)
    yield bad_call(cases.LAMBDA, "values", ValueError, "None", "next_values", values=None, bootstrap_values=None)


def list_alternatives(estimator, whole, *parts, one):
    """Either the whole, or both parts of which it is made."""
    halves = [{name: one} for name in parts]
    for changes in ({whole: None}, *({whole: None, **half} for half in halves), *halves, dict.fromkeys(parts, one)):
        yield bad_call(estimator, whole, ValueError, *parts, **changes)


def list_ratio_errors():
    for estimator in cases.OFF_POLICY:
        names = "log_ratios", "target_log_probs", "behaviour_log_probs"
        yield from list_alternatives(estimator, *names, one=floats(N, T))


def list_expectation_errors():
    names = "expected_next_q", "next_action_probs", "next_q_values"
    yield from list_alternatives(cases.RETRACE, *names, one=floats(N, T, A))
    changes = {"next_q_values": floats(N, T, A + 1)}
    yield bad_call(cases.RETRACE, "next_q_values", ValueError, "3, 5, 4", "3, 5, 3", form="actions", **changes)
    yield bad_call(cases.RETRACE, "next_q_values", ValueError, "3, 5", form="actions", next_q_values=floats(N, T))
    yield bad_call(
        cases.RETRACE, "next_action_probs", ValueError, "3, 5", form="actions", next_action_probs=floats(N, T)
    )


def list_scan_errors():
    """What only the forward functions take."""
    for estimator in cases.FORWARD:
        yield bad_call(estimator, "x", ValueError, "5", x=floats(T))
        yield bad_call(estimator, "state", TypeError, "Tensor", "ScanState", state=floats(N))
        yield bad_call(estimator, "state", (TypeError, ValueError), "ScanState", state=(floats(N),))
        for value, done in (
            (floats(N + 1), floats(N) > 0),
            (floats(N), floats(N + 1) > 0),
            (floats(N, 1), floats(N) > 0),
            (floats(N), floats(N, 1) > 0),
            (floats(N, device="meta"), floats(N) > 0),
        ):
            yield bad_call(estimator, "state", ValueError, state=ScanState(value, done))
        yield bad_call(
            estimator, "state", TypeError, "complex", state=ScanState(floats(N), floats(N, dtype=torch.complex64))
        )
        yield bad_call(estimator, "state", TypeError, "bool", state=ScanState(floats(N) > 0, floats(N) > 0))
    yield bad_call(cases.PREFIX, "boundary", ValueError, "ends", "ends_at", "starts_at", boundary="ends")
    yield bad_call(cases.PREFIX, "x", TypeError, "bool", x=floats(N, T) > 0)
    yield bad_call(cases.PREFIX, "x", TypeError, "complex64", x=floats(N, T, dtype=torch.complex64))
    integers = {"x": floats(N, T, dtype=torch.int32)}
    yield bad_call(
        cases.PREFIX, "state", TypeError, "float32", "int64", **integers, state=ScanState(floats(N), floats(N) > 0)
    )
    yield bad_call(cases.PREFIX, "out", TypeError, "float32", "int64", **integers, out=floats(N, T))
    for decay in (floats(N, T - 1), floats(T, N), floats(N), floats(N, T, 1)):
        yield bad_call(cases.TRACES, "decay", ValueError, ", ".join(map(str, decay.shape)), decay=decay)
    yield bad_call(cases.TRACES, "decay", TypeError, "str", decay="0.9")
    yield bad_call(cases.TRACES, "decay", ValueError, "nan", decay=float("nan"))
    yield bad_call(cases.TRACES, "decay", TypeError, "int64", decay=floats(N, T, dtype=torch.int64))
    for initial in (floats(N + 1), floats(N, 1), floats(T)):
        yield bad_call(cases.LINEAR, "initial", ValueError, str(initial.shape[0]), initial=initial)
    yield bad_call(cases.LINEAR, "initial", TypeError, "float", "Tensor", initial=0.0)
    yield bad_call(cases.LINEAR, "initial", ValueError, "meta", initial=floats(N, device="meta"))
    yield bad_call(cases.LINEAR, "alpha", ValueError, "5", alpha=floats(T))


def list_out_errors():
    """A tensor for one result, a tuple for two; nothing that cannot be written to."""
    for estimator in cases.ESTIMATORS:
        two = len(estimator.outputs) > 1

        def make_out(x, two=two):
            return (x, None) if two else x

        yield bad_call(estimator, "out", TypeError, "list", out=make_out([[0.0] * T] * N))
        yield bad_call(estimator, "out", ValueError, "5, 3", "3, 5", out=make_out(floats(T, N)))
        yield bad_call(estimator, "out", TypeError, "int64", out=make_out(floats(N, T, dtype=torch.int64)))
        yield bad_call(estimator, "out", ValueError, "meta", "cpu", out=make_out(floats(N, T, device="meta")))
        yield bad_call(estimator, "out", TypeError, "bool", out=make_out(floats(N, T) > 0))
        yield bad_call(estimator, "out", ValueError, "stride", out=make_out(floats(1, T).expand(N, T)))
        yield bad_call(estimator, "out", ValueError, "stride", out=make_out(floats(N + T).unfold(0, T, 1)[:N]))
        if two:
            yield bad_call(estimator, "out", ValueError, "1, 5", "3, 5", out=(None, floats(1, T)))
            yield bad_call(
                estimator, "out", (TypeError, ValueError), "3", ", ".join(estimator.outputs), out=(floats(N, T),) * 3
            )
            yield bad_call(estimator, "out", (TypeError, ValueError), ", ".join(estimator.outputs), out=floats(N, T))
            second = {estimator.second: False}
            yield bad_call(estimator, "out", ValueError, estimator.outputs[1], out=(None, floats(N, T)), **second)
        else:
            yield bad_call(estimator, "out", (TypeError, ValueError), out=(floats(N, T),))


TABLE = [
    *list_tensor_errors(),
    *list_scalar_errors(),
    *list_continuation_errors(),
    *list_ratio_errors(),
    *list_expectation_errors(),
    *list_scan_errors(),
    *list_out_errors(),
]


def find_tensors(x):
    if isinstance(x, torch.Tensor):
        return [x] if x.device.type != "meta" else []
    return [y for part in x for y in find_tensors(part)] if isinstance(x, tuple) else []


@pytest.mark.parametrize(("estimator", "form", "name", "expected", "in_message", "changes"), TABLE)
def test_bad_input(estimator, form, name, expected, in_message, changes):
    kwargs = {**make_good_call(estimator, form), **changes}
    given = find_tensors(tuple(kwargs.values()))
    before = [x.clone() for x in given]
    with pytest.raises(expected) as caught:
        estimator.function(**kwargs)
    message = str(caught.value)
    assert re.match(rf"{name}\b", message), message
    assert not [text for text in in_message if text not in message], message
    assert all(same_bits(x, old) for x, old in zip(given, before, strict=True))


@pytest.mark.parametrize("estimator", cases.ESTIMATORS, ids=get_name)
def test_out_may_not_be_an_input(estimator):
    for form in ("plain", *(["log_probs"] if estimator in cases.OFF_POLICY else [])):
        kwargs = {name: x.float() if is_tensor(x) else x for name, x in make_good_call(estimator, form).items()}
        for x in filter(is_tensor, kwargs.values()):
            for view in (x, x[:], x.view(-1).view(N, T)):
                for out in [(view, None), (None, view)] if len(estimator.outputs) > 1 else [view]:
                    with pytest.raises(ValueError, match="out"):
                        estimator.function(**kwargs, out=out)


def is_tensor(x):
    return isinstance(x, torch.Tensor)


@pytest.mark.parametrize("estimator", cases.TWO_RESULTS, ids=get_name)
def test_out_may_not_be_one_tensor_twice(estimator):
    memory = floats(N * T + 1)
    out, shifted = memory[:-1].view(N, T), memory[1:].view(N, T)
    for twice in ((out, out), (out, out[:]), (out, shifted)):
        with pytest.raises(ValueError, match="out"):
            estimator.function(**make_good_call(estimator), out=twice)


@pytest.mark.parametrize("estimator", cases.ESTIMATORS, ids=get_name)
def test_out_may_not_overlap_an_input_in_part(estimator):
    """Views of the same strides, one a step or a row further on; columns in between share nothing."""
    kwargs = make_good_call(estimator)
    name = estimator.inputs[0]
    memory = floats(N + 1, T + 1)
    first, a_step_on, a_row_on = memory[:N, :T], memory[:N, 1:], memory[1:, :T]
    for one, other in ((first, a_step_on), (first, a_row_on), (a_step_on, a_row_on)):
        one.copy_(kwargs[name])
        for x, out in ((one, other), (other, one)):
            with pytest.raises(ValueError, match=r"^out.* shares"):
                estimator.function(**{**kwargs, name: x}, out=(out, None) if len(estimator.outputs) > 1 else out)
    memory = floats(N, T, 2)
    memory[..., 0] = kwargs[name]
    out = (memory[..., 1], None) if len(estimator.outputs) > 1 else memory[..., 1]
    estimator.function(**{**kwargs, name: memory[..., 0]}, out=out)


def test_what_must_not_be_an_error():
    for estimator in cases.ESTIMATORS:
        kwargs = make_good_call(estimator)
        optional = [name for name in ("terminated", "truncated", "dones", "mask") if name in kwargs]
        estimator.function(**{**kwargs, **dict.fromkeys(optional)})
        estimator.function(**{**kwargs, **{name: torch.ones(N, T) for name in optional}})
        if "bootstrap_values" in kwargs:
            for value in (0, np.float32(0.5), FinalValues([], [], [])):
                estimator.function(**{**kwargs, "bootstrap_values": value})
        if "log_ratios" in kwargs:
            for bar in (0, 0.0, 1, np.float32(2.0), float("inf"), np.float32("inf"), 1e30):
                estimator.function(**{**kwargs, "rho_bar": bar, "c_bar": bar})
        if estimator in cases.BACKWARD:
            for gamma in (0, 1, 2.5, np.float32(0.9)):
                estimator.function(**{**kwargs, "gamma": gamma})
        if estimator in (cases.GAE, cases.VTRACE, cases.RETRACE, cases.LAMBDA):
            for lambda_ in (0, 1, np.float64(0.5)):
                estimator.function(**{**kwargs, "lambda_": lambda_})
    BY_NAME["traces"].function(**{**make_good_call(cases.TRACES), "decay": 1})
    cases.DISCOUNTED.function(floats(N, T), bootstrap_values=0.0)
