"""Every error: its type, a message that names the argument, what came and what is expected; inputs untouched."""

import re

import numpy as np
import pytest
import torch
from cases import same_bits

from rl_triton_core import FinalValues, compute_gae

N, T = 3, 5


def inputs():
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn((2, N, T), generator=generator)
    return {
        "rewards": rewards.clone(),
        "values": values.clone(),
        "terminated": torch.rand((N, T), generator=generator) < 0.2,
        "truncated": torch.rand((N, T), generator=generator) < 0.2,
        "mask": torch.rand((N, T), generator=generator) < 0.8,
        "bootstrap_values": torch.randn((N, T), generator=generator),
    }


def bad(name, expected, *in_message, **changes):
    """`changes` to good arguments raise `expected`; the message names the argument and holds all of `in_message`.

    A function among the changes is called for its value, inside the block that must raise.
    """
    label = f"{name}-{'-'.join(in_message)}-{'-'.join(changes)}"
    return pytest.param(name, expected, in_message, changes, id=re.sub(r"[^\w.,-]+", "_", label))


def floats(*shape, dtype=torch.float32, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


def final(*parts):
    """FinalValues made late: it may check itself."""
    return lambda: FinalValues(*parts)


SHAPE, OTHER = "3, 5", "5, 3"
PER_STEP = ("values", "terminated", "truncated", "mask", "gamma")
NO_FLAG = {"truncated": None}

TABLE = [
    # rewards and values
    bad("rewards", TypeError, "list", "Tensor", rewards=[[0.0] * T] * N),
    bad("rewards", TypeError, "ndarray", "Tensor", rewards=np.zeros((N, T))),
    bad("rewards", TypeError, "None", "Tensor", rewards=None),
    bad("rewards", TypeError, "int64", "float32", rewards=floats(N, T, dtype=torch.int64)),
    bad("rewards", TypeError, "bool", "float32", rewards=floats(N, T, dtype=torch.bool)),
    bad("rewards", TypeError, "complex64", "float32", rewards=floats(N, T, dtype=torch.complex64)),
    bad("rewards", ValueError, "5", rewards=floats(T)),
    bad("rewards", ValueError, "3, 5, 1", rewards=floats(N, T, 1)),
    bad("rewards", ValueError, rewards=floats()),
    bad("values", TypeError, "int32", "float32", values=floats(N, T, dtype=torch.int32)),
    bad("values", TypeError, "float", "Tensor", values=0.0),
    bad("values", ValueError, "3, 6", SHAPE, values=floats(N, T + 1)),
    bad("values", ValueError, "15", SHAPE, values=floats(N * T)),
    # flags and mask
    *(
        bad(name, TypeError, "complex64", "bool", **{name: floats(N, T, dtype=torch.complex64)})
        for name in PER_STEP[1:4]
    ),
    *(bad(name, TypeError, "list", "Tensor", **{name: [[True] * T] * N}) for name in PER_STEP[1:4]),
    bad("terminated", TypeError, "bool", terminated=True),
    # shapes and devices of everything that has one value per step
    *(bad(name, ValueError, OTHER, SHAPE, **{name: floats(T, N)}) for name in PER_STEP),
    *(bad(name, ValueError, "1, 5", SHAPE, **{name: floats(1, T)}) for name in PER_STEP),
    *(bad(name, ValueError, "3, 1", SHAPE, **{name: floats(N, 1)}) for name in PER_STEP),
    *(bad(name, ValueError, "3", SHAPE, **{name: floats(N)}) for name in PER_STEP),
    *(bad(name, ValueError, "meta", "cpu", **{name: floats(N, T, device="meta")}) for name in PER_STEP),
    bad("bootstrap_values", ValueError, "meta", "cpu", bootstrap_values=floats(N, T, device="meta")),
    bad("bootstrap_values", ValueError, "meta", "cpu", bootstrap_values=floats(N, device="meta"), **NO_FLAG),
    # gamma and lambda
    *(bad("gamma", ValueError, text, gamma=float(text)) for text in ("nan", "-0.1", "inf", "-inf")),
    *(bad("gamma", TypeError, type(x).__name__, gamma=x) for x in ("0.9", None, [0.9], 1j)),
    bad("gamma", TypeError, "int64", gamma=floats(N, T, dtype=torch.int64)),
    *(bad("lambda_", ValueError, text, "1", lambda_=float(text)) for text in ("nan", "-0.1", "1.01", "inf", "-inf")),
    *(bad("lambda_", TypeError, type(x).__name__, lambda_=x) for x in ("0.9", None, [0.9], 1j)),
    # the value behind a cut
    bad("bootstrap_values", ValueError, "None", bootstrap_values=None),
    bad("bootstrap_values", ValueError, "None", bootstrap_values=None, **NO_FLAG),
    bad("bootstrap_values", ValueError, "None", bootstrap_values=None, terminated=None, mask=None, **NO_FLAG),
    bad("bootstrap_values", ValueError, "next_values", next_values=floats(N, T)),
    bad("bootstrap_values", ValueError, "next_values", bootstrap_values=0.0, next_values=floats(N, T)),
    bad("bootstrap_values", ValueError, "truncated", "3", bootstrap_values=floats(N)),
    bad("bootstrap_values", ValueError, "4", bootstrap_values=floats(N + 1), **NO_FLAG),
    bad("bootstrap_values", ValueError, "5", bootstrap_values=floats(T), **NO_FLAG),
    bad("bootstrap_values", ValueError, OTHER, SHAPE, bootstrap_values=floats(T, N)),
    bad("bootstrap_values", ValueError, "3, 1", bootstrap_values=floats(N, 1)),
    bad("bootstrap_values", ValueError, "3, 5, 1", bootstrap_values=floats(N, T, 1)),
    bad("bootstrap_values", TypeError, "int64", bootstrap_values=floats(N, T, dtype=torch.int64)),
    bad("bootstrap_values", TypeError, "str", bootstrap_values="0"),
    bad("bootstrap_values", TypeError, "list", bootstrap_values=[0.0] * N),
    bad("next_values", ValueError, OTHER, SHAPE, next_values=floats(T, N), bootstrap_values=None),
    bad("next_values", TypeError, "int64", next_values=floats(N, T, dtype=torch.int64), bootstrap_values=None),
    bad("next_values", TypeError, "float", next_values=0.0, bootstrap_values=None),
    bad("next_values", ValueError, "meta", "cpu", next_values=floats(N, T, device="meta"), bootstrap_values=None),
    # sparse final values
    bad("env", ValueError, "3", bootstrap_values=final([0, N], [0, 0], [1.0, 1.0])),
    bad("env", ValueError, "-1", bootstrap_values=final([0, -1], [0, 0], [1.0, 1.0])),
    bad("time", ValueError, "5", bootstrap_values=final([0, 1], [0, T], [1.0, 1.0])),
    bad("time", ValueError, "-1", bootstrap_values=final([0, 1], [-1, 0], [1.0, 1.0])),
    bad("time", ValueError, "5", bootstrap_values=final(torch.tensor([0]), torch.tensor([T]), floats(1))),
    bad("env", ValueError, "3", bootstrap_values=final(np.array([N]), np.array([0]), np.ones(1))),
    bad("(env|time)", ValueError, "1", "2", bootstrap_values=final([0, 1], [0], [1.0, 1.0])),
    bad("(env|value)", ValueError, "1", "2", bootstrap_values=final([0, 1], [0, 1], [1.0])),
    bad("env", TypeError, "float", bootstrap_values=final(floats(1), torch.tensor([0]), floats(1))),
    bad("time", TypeError, "float", bootstrap_values=final([0], [0.5], [1.0])),
    bad("env", ValueError, "1, 1", bootstrap_values=final([[0]], [0], [1.0])),
    bad("(env|value)", ValueError, "1, 1", bootstrap_values=final([0], [0], floats(1, 1))),
    bad("value", TypeError, "int64", bootstrap_values=final([0], [0], floats(1, dtype=torch.int64))),
    bad("last_value", ValueError, "4", bootstrap_values=final([0], [0], [1.0], floats(N + 1))),
    bad("last_value", ValueError, "3, 5", bootstrap_values=final([0], [0], [1.0], floats(N, T))),
    bad("last_value", TypeError, "str", bootstrap_values=final([0], [0], [1.0], "0")),
    # the rest
    bad("mask_mode", ValueError, "drop", "skip", "reset", mask_mode="drop"),
    bad("mask_mode", ValueError, "drop", "skip", "reset", mask_mode="drop", mask=None),
    *(bad("time_dim", ValueError, str(dim), time_dim=dim) for dim in (2, -3, 7)),
    bad("time_dim", (TypeError, ValueError), "1.0", time_dim=1.0),
    bad("time_dim", (TypeError, ValueError), "time'", time_dim="time"),
    bad("backend", ValueError, "cuda", "triton", "cpu", "reference", backend="cuda"),
    # out
    bad("out", (TypeError, ValueError), "Tensor", "advantages, returns", out=floats(N, T)),
    bad("out", (TypeError, ValueError), "3", "advantages, returns", out=(floats(N, T), floats(N, T), floats(N, T))),
    bad("out", TypeError, "list", out=([[0.0] * T] * N, None)),
    bad("out", ValueError, OTHER, SHAPE, out=(floats(T, N), None)),
    bad("out", ValueError, "1, 5", SHAPE, out=(None, floats(1, T))),
    bad("out", TypeError, "int64", out=(floats(N, T, dtype=torch.int64), None)),
    bad("out", TypeError, "bool", out=(None, floats(N, T, dtype=torch.bool))),
    bad("out", ValueError, "meta", "cpu", out=(floats(N, T, device="meta"), None)),
    bad("out", ValueError, "stride", out=(floats(1, T).expand(N, T), None)),
    bad("out", ValueError, "stride", out=(None, floats(N + T)[: N + T].unfold(0, T, 1)[:N])),
]


@pytest.mark.parametrize(("name", "expected", "in_message", "changes"), TABLE)
def test_bad_input(name, expected, in_message, changes):
    kwargs = {**inputs(), **changes}
    out = kwargs.get("out")
    tensors = [x for x in (*kwargs.values(), *(out if isinstance(out, tuple) else ())) if isinstance(x, torch.Tensor)]
    tensors = [x for x in tensors if x.device.type != "meta"]
    before = [x.clone() for x in tensors]
    with pytest.raises(expected) as caught:
        compute_gae(**{key: x() if callable(x) else x for key, x in kwargs.items()})
    message = str(caught.value)
    assert re.match(rf"(bootstrap_values\W+)?{name}\b", message), message
    assert not [text for text in in_message if text not in message], message
    assert all(same_bits(x, old) for x, old in zip(tensors, before, strict=True))


@pytest.mark.parametrize("name", ["rewards", "values", "bootstrap_values"])
@pytest.mark.parametrize("view", [lambda x: x, lambda x: x[:], lambda x: x.view(-1).view(N, T)])
@pytest.mark.parametrize("place", [0, 1])
def test_out_may_not_be_an_input(name, view, place):
    kwargs = inputs()
    out = [None, None]
    out[place] = view(kwargs[name])
    with pytest.raises(ValueError, match="out"):
        compute_gae(**kwargs, out=tuple(out))


def test_out_may_not_share_memory_with_an_input_or_with_itself():
    memory = torch.zeros(2 * N * T)
    first, shifted = memory[: N * T].view(N, T), memory[1 : N * T + 1].view(N, T)
    kwargs = {**inputs(), "rewards": first}
    for out in ((shifted, None), (None, shifted)):
        with pytest.raises(ValueError, match="out"):
            compute_gae(**kwargs, out=out)
    with pytest.raises(ValueError, match="out"):
        compute_gae(**inputs(), out=(first, shifted))
    with pytest.raises(ValueError, match="out"):
        compute_gae(**inputs(), out=(first, first))
    compute_gae(**inputs(), out=(first, memory[N * T :].view(N, T)))  # neighbours are no overlap


def test_out_may_not_be_one_of_the_flags():
    kwargs = inputs()
    kwargs["terminated"] = kwargs["terminated"].float()
    with pytest.raises(ValueError, match="out"):
        compute_gae(**kwargs, out=(kwargs["terminated"], None))


def test_what_must_not_be_an_error():
    kwargs = inputs()
    for changes in (
        {"gamma": 0},
        {"gamma": 1, "lambda_": 1},
        {"gamma": 2.5},
        {"gamma": np.float32(0.9), "lambda_": np.float64(0.5)},
        {"lambda_": 0},
        {"bootstrap_values": 0},
        {"bootstrap_values": np.float32(0.5)},
        {"terminated": None, "truncated": None, "mask": None},
        {"bootstrap_values": FinalValues([], [], [])},
        {"terminated": torch.full((N, T), torch.nan)},
    ):
        compute_gae(**{**kwargs, **changes})
