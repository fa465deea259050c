"""The kernels of the losses compile for every target, none spills registers, and none is atomic."""

import re
from itertools import product

import pytest
import torch
from ahead_of_time import TARGETS, compile_kernel
from triton.backends.amd.compiler import HIPBackend
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import native_specialize_impl

from rl_triton_core._internal.launch.kernels import describe_argument
from rl_triton_core._internal.loss import kernel as kernels
from rl_triton_core._internal.loss.equations import SURROGATES, Choices, Coefficients
from rl_triton_core._internal.loss.problem import LossProblem, Streams
from rl_triton_core._internal.loss.triton import NUM_WARPS, list_launches
from rl_triton_core._internal.moments.rule import Rule


def empty(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def problem_of(
    head,
    n=1 << 20,
    size=None,
    dtype=torch.float32,
    parts=1,
    exact_kl=False,
    masked=False,
    tokens=False,
    surrogate="clip",
    weigh_kl="none",
):
    widths = [size or (1 if head in ("given", "sampled") else 8)] * parts
    inputs = [empty(n, k, dtype=dtype) for k in widths]
    if head == "given":
        inputs.append(empty(n, 1, dtype=dtype))
    if head == "gaussian":
        inputs.append(empty(n, widths[0], dtype=dtype) if exact_kl else empty(widths[0], dtype=dtype))
    actions = None
    if head not in ("given", "sampled"):
        actions = empty(n, parts, dtype=torch.int64) if head == "categorical" else empty(n, widths[0])
    streams = Streams(
        *(empty(n) for _ in range(4)),
        None if exact_kl else empty(n),
        empty(n, dtype=torch.bool) if masked else None,
        actions,
        empty(257, dtype=torch.float64) if tokens else None,
        empty(258, dtype=torch.int32) if tokens else None,
        empty(dtype=torch.float64) if tokens else None,
    )
    problem = LossProblem(
        Choices(head, "huber", "cleanrl", "none" if exact_kl else "k3", surrogate, weigh_kl),
        tuple(inputs),
        streams,
        empty(n, dtype=dtype),
        tuple(inputs) if exact_kl else (),
        tuple(widths),
        Coefficients(entropy_coef=empty()),
        rule=Rule(1.0, 1e-8, 0.0, 0.0) if masked else None,
        per_sequence=tokens,
    )
    problem.wanted = (True,) * len(problem.differentiable)
    return problem


def compile_for(target, problem):
    """Compile the launches of a problem; return for each the compiled kernel, and what a thread of it needs."""
    gradients = [empty(*x.shape, dtype=x.dtype) for x in problem.differentiable]
    for call in list_launches(problem, gradients, empty(), empty(11)):
        arguments = dict(zip(call.kernel.arg_names, call.arguments, strict=False)) | call.options
        yield compile_kernel(target, call.kernel, arguments, num_warps=call.num_warps)


VARIANTS = {
    "log-probabilities, half": {"head": "sampled", "dtype": torch.bfloat16, "masked": True},
    "entropy": {"head": "given", "masked": True},
    "tokens": {"head": "sampled", "tokens": True},
    **{x: {"head": "sampled", "tokens": True, "surrogate": x} for x in SURROGATES if x != "clip"},
    "KL times ratio": {"head": "sampled", "tokens": True, "weigh_kl": "ratio"},
    "categorical of 64, alone": {"head": "categorical", "size": 64},
    "categorical of 1000": {"head": "categorical", "size": 1000},
    "categorical of 64": {"head": "categorical", "size": 64, "exact_kl": True},
    "three categoricals": {"head": "categorical", "size": 6, "parts": 3, "masked": True},
    "gaussian": {"head": "gaussian", "size": 6},
    "masked gaussian": {"head": "gaussian", "size": 6, "masked": True},
    "gaussian of 32": {"head": "gaussian", "size": 32},
    "gaussian of 32 and an old one": {"head": "gaussian", "size": 32, "exact_kl": True},
    "bernoulli": {"head": "bernoulli", "size": 16},
    "one tile": {"head": "categorical", "n": 64, "masked": True},
}


@pytest.mark.parametrize(
    ("target", "variant"),
    [*(("sm_90", x) for x in VARIANTS), *((x, "masked gaussian") for x in ("sm_80", "sm_100", "gfx942"))],
)
def test_nothing_spills(target, variant):
    for compiled, resources in compile_for(target, problem_of(**VARIANTS[variant])):
        assert 0 < resources.registers <= 255 and resources.spilled_bytes == 0
        assert target != "sm_90" or not re.search(r"\b(atom|red)\.global", compiled.asm["ptx"])


@pytest.mark.parametrize(("size", "wide"), [(2, 1), (6, 3), (7, 0), (18, 9)])
def test_a_thread_has_all_numbers_of_an_element(size, wide):
    problems = problem_of("categorical", size=size), problem_of("sampled")
    (main, needs), (simple, _) = ([*compile_for("sm_90", x)][-2] for x in problems)
    assert main.asm["ptx"].count("shfl") == simple.asm["ptx"].count("shfl"), "they exchange sums over elements alone"
    assert needs.accesses["ld.v2.b32"] >= wide and needs.spilled_bytes == 0


@pytest.mark.parametrize("backend", [CUDABackend(TARGETS["sm_90"]), HIPBackend(TARGETS["gfx942"])])
def test_arguments_described_alike_are_compiled_alike(backend):
    x, large = torch.zeros(64), torch.empty(1 << 30, dtype=torch.int16, device="meta")
    arguments = [None, 0, 1, 2, 16, 1 << 31, 0.5, x, x[1:], x[4:], x.half(), large, (1, x), (2, x), (2, x[1:])]
    for pair in product(arguments, repeat=2):
        if describe_argument(pair[0]) == describe_argument(pair[1]):
            assert len({native_specialize_impl(backend, y, False, True, True) for y in pair}) == 1, pair


def test_gradients_are_scaled_in_wide_pieces():
    kernel = kernels.scale_gradients
    arguments = ((empty(1 << 20),), (1 << 20,), empty(), 1024)
    arguments = dict(zip(kernel.arg_names, arguments, strict=True))
    compiled, _ = compile_kernel("sm_90", kernel, arguments, num_warps=NUM_WARPS)
    assert re.search(r"ld\.global\S*\.v4\.b32", compiled.asm["ptx"])
