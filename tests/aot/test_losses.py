"""Kernels of losses, of normalisation and of tokens compile for every target, none spills, and none is atomic."""

import re
from itertools import product

import pytest
import torch
from ahead_of_time import TARGETS, compile_kernel
from triton.backends.amd.compiler import HIPBackend
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import native_specialize_impl

from rl_triton_core._internal.launch.kernels import CHECKED, describe_argument
from rl_triton_core._internal.loss import kernel as kernels
from rl_triton_core._internal.loss.equations import SURROGATES, Choices, Coefficients
from rl_triton_core._internal.loss.problem import LossProblem, Streams
from rl_triton_core._internal.loss.triton import NUM_WARPS, list_launches
from rl_triton_core._internal.moments import kernel as moments
from rl_triton_core._internal.moments import triton as of_moments
from rl_triton_core._internal.moments.rule import Rule, Task
from rl_triton_core._internal.tokens import triton as of_tokens
from rl_triton_core._internal.tokens.problem import TokenProblem, view_rows


def empty(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def problem_of(
    head, n=1 << 20, size=None, dtype=torch.float32, parts=1, exact_kl=False, masked=False, tokens=False, **choices
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
        Choices(head, "huber", "cleanrl", "none" if exact_kl else "k3", **choices),
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


def compile_calls(target, calls, **options):
    """For each launch it, the compiled kernel, and what a thread of it needs."""
    for call in calls:
        arguments = dict(zip(call.kernel.arg_names, call.arguments, strict=False)) | call.options
        yield call, *compile_kernel(target, call.kernel, arguments, num_warps=call.num_warps, **options)


def compile_for(target, problem):
    gradients = [empty(*x.shape, dtype=x.dtype) for x in problem.differentiable]
    return compile_calls(target, list_launches(problem, gradients, empty(), empty(11)))


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


MOMENTS = {  # shape, dtype, mask, out
    "plain": ((1, 1 << 20), torch.float32, None, torch.float32),
    "masked": ((1, 1 << 20), torch.float32, torch.bool, torch.float32),
    "half": ((1, 1 << 20), torch.bfloat16, torch.float32, torch.bfloat16),
    "narrow": ((1 << 20, 24), torch.float32, torch.bool, torch.float32),
    "wide": ((4096, 2047), torch.float32, torch.bool, torch.float32),
    "huge": ((1, 1 << 33), torch.float16, torch.uint8, torch.float32),
}
TOKENS = {  # tokens, vocabulary, dtype, whether there are a mask and an entropy
    "plain": (4096, 151_936, torch.bfloat16, False, False),
    "all": (4096, 151_936, torch.bfloat16, True, True),
    "float32": (4096, 128_256, torch.float32, True, True),
    "odd": (4096, 50_257, torch.float16, False, True),
    "few": (16, 151_936, torch.bfloat16, True, True),
    "small": (4096, 100, torch.float32, False, True),
    "huge": (40_000, 1 << 18, torch.bfloat16, True, True),
}


def make_matrix(shape, dtype):
    """One without gaps if it is a row; else one with a gap behind every row, or column by column if it has flags."""
    rows, columns = shape
    if rows > 1 and dtype == torch.bool:
        return torch.empty((columns, rows), dtype=dtype, device="meta").t()
    return torch.empty((rows, columns + 8 * (rows > 1)), dtype=dtype, device="meta")[:, :columns]


def compile_moments(target, variant):
    shape, *dtypes = MOMENTS[variant]
    values, flags, result = (None if dtype is None else make_matrix(shape, dtype) for dtype in dtypes)
    task = Task(values, flags, result, Rule(1.0, 1e-8, 0.0, 0.0))
    return compile_calls(target, of_moments.list_launches(task, lambda whole: whole))


def compile_tokens(target, variant):
    num_tokens, size, dtype, masked, has_entropy = TOKENS[variant]
    mask = empty(num_tokens, dtype=torch.bool) if masked else None
    tokens = empty(num_tokens, dtype=torch.int64)
    problem = TokenProblem(empty(num_tokens, size, dtype=dtype), tokens, mask, 0.7)
    results = problem.allocate_results(has_entropy)
    upstream = empty(num_tokens), empty(num_tokens) if has_entropy else None
    last = of_tokens.make_gradient_launch(problem, results, upstream, view_rows(problem.logits))
    return compile_calls(target, [*of_tokens.list_launches(problem, results), last], **CHECKED)


KINDS = {  # what compiles a variant, the variants and that of other targets, and the registers of a thread at the most
    "losses": (
        lambda target, variant: compile_for(target, problem_of(**VARIANTS[variant])),
        VARIANTS,
        "masked gaussian",
        255,
    ),
    "moments": (compile_moments, MOMENTS, "masked", 80),
    "tokens": (compile_tokens, TOKENS, "few", 48),
}
CASES = [("sm_90", kind, variant) for kind, (_, variants, *_) in KINDS.items() for variant in variants]
CASES += [(target, kind, x[2]) for kind, x in KINDS.items() for target in TARGETS if target != "sm_90"]


@pytest.mark.parametrize(("target", "kind", "variant"), CASES)
def test_nothing_spills(target, kind, variant):
    """Moments leave registers for three programs at once on a multiprocessor, tokens for five of eight warps."""
    compile_variant, *_, most = KINDS[kind]
    launches = [*compile_variant(target, variant)]
    assert len(launches) == {"few": 3}.get(variant, 2) or kind != "tokens"
    for call, compiled, resources in launches:
        assert resources.spilled_bytes == 0 and resources.registers > 0, call.kernel
        assert resources.registers <= most or (kind == "tokens" and target != "sm_90"), call.kernel
        assert target != "sm_90" or not re.search(r"\b(atom|red)\.global", compiled.asm["ptx"])
        if (target, kind, variant) == ("sm_90", "moments", "masked") and call.kernel is not moments.merge:
            assert re.search(r"ld\.global\S*\.v4\.b32", compiled.asm["ptx"])


@pytest.mark.parametrize(("size", "wide"), [(2, 1), (6, 3), (7, 0), (18, 9)])
def test_a_thread_has_all_numbers_of_an_element(size, wide):
    problems = problem_of("categorical", size=size), problem_of("sampled")
    (_, main, needs), (_, simple, _) = ([*compile_for("sm_90", x)][-2] for x in problems)
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


def test_memory_is_read_and_written_in_wide_pieces():
    """And a logit takes one exponential each way, a thread's sixteen together one more. No thread waits for others."""
    (_, evaluate, _), (_, differentiate, _) = compile_tokens("sm_90", "all")
    for compiled in (evaluate, differentiate):
        assert re.search(r"ld\.global\S*\.v4\.b32", compiled.asm["ptx"])
    assert re.search(r"st\.global\S*\.v4\.b32", differentiate.asm["ptx"])
    assert differentiate.asm["ptx"].count("ex2.approx") == 16
    assert evaluate.asm["ptx"].count("ex2.approx") == 16 + 1 + 1
    loop = re.search(r"(\$L__BB\d+_\d+):(?:(?!\$L__BB\d+_\d+:)[\s\S])*?bra\s+\1;", evaluate.asm["ptx"])[0]
    assert loop.count("ex2.approx") == 16 + 1 and not re.search(r"bar\.sync|shfl|shared", loop)
