"""The kernels of the losses compile for every target, none spills registers, and none is atomic."""

import re

import pytest
import torch
from ahead_of_time import compile_kernel

from rl_triton_core._internal.backends.triton_losses import NUM_WARPS, list_launches
from rl_triton_core._internal.kernels import losses as kernels
from rl_triton_core._internal.loss_equations import Choices, Coefficients
from rl_triton_core._internal.loss_problem import LossProblem, Streams
from rl_triton_core._internal.moments import Rule


def empty(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def problem_of(head, n=1 << 20, size=None, dtype=torch.float32, parts=1, exact_kl=False, masked=False, tokens=False):
    """A problem with everything that there is."""
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
        empty(257) if tokens else None,
        empty(258, dtype=torch.int32) if tokens else None,
        empty() if tokens else None,
    )
    problem = LossProblem(
        Choices(head, "huber", "cleanrl", "none" if exact_kl else "k3"),
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
        arguments = dict(zip(call.kernel.arg_names, call.arguments, strict=False)) | call.constants
        yield compile_kernel(target, call.kernel, arguments, num_warps=NUM_WARPS)


VARIANTS = {
    "log-probabilities": {"head": "sampled"},
    "log-probabilities, half": {"head": "sampled", "dtype": torch.bfloat16, "masked": True},
    "entropy": {"head": "given", "masked": True},
    "tokens": {"head": "sampled", "tokens": True},
    "categorical of 2": {"head": "categorical", "size": 2},
    "categorical of 64": {"head": "categorical", "size": 64, "exact_kl": True},
    "three categoricals": {"head": "categorical", "size": 6, "parts": 3, "masked": True},
    "gaussian": {"head": "gaussian", "size": 6},
    "gaussian of 32": {"head": "gaussian", "size": 32, "exact_kl": True},
    "bernoulli": {"head": "bernoulli", "size": 16},
    "one tile": {"head": "categorical", "n": 64, "masked": True},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_variant_spills(variant):
    for compiled, resources in compile_for("sm_90", problem_of(**VARIANTS[variant])):
        assert 0 < resources.registers <= 255 and resources.spilled_bytes == 0
        assert not re.search(r"\b(atom|red)\.global", compiled.asm["ptx"])


@pytest.mark.parametrize("target", ["sm_80", "sm_100", "gfx942"])
def test_no_target_spills(target):
    for _, resources in compile_for(target, problem_of("gaussian", size=6, masked=True)):
        assert resources.spilled_bytes == 0


def test_gradients_are_scaled_in_wide_pieces():
    kernel = kernels.scale_gradients
    arguments = ((empty(1 << 20),), (1 << 20,), empty(), 1024)
    arguments = dict(zip(kernel.arg_names, arguments, strict=True))
    compiled, _ = compile_kernel("sm_90", kernel, arguments, num_warps=NUM_WARPS)
    assert re.search(r"ld\.global\S*\.v4\.b32", compiled.asm["ptx"])
