"""The kernels of log-probabilities of tokens compile for every target, none spills registers, and none is atomic."""

import re

import pytest
import torch
from ahead_of_time import compile_kernel

from rl_triton_core._internal.launch.kernels import CHECKED
from rl_triton_core._internal.tokens.problem import TokenProblem, view_rows
from rl_triton_core._internal.tokens.triton import list_launches, make_gradient_launch

VARIANTS = {  # tokens, vocabulary, dtype, whether there are a mask and an entropy
    "plain": (4096, 151_936, torch.bfloat16, False, False),
    "all": (4096, 151_936, torch.bfloat16, True, True),
    "float32": (4096, 128_256, torch.float32, True, True),
    "odd": (4096, 50_257, torch.float16, False, True),
    "few": (16, 151_936, torch.bfloat16, True, True),
    "small": (4096, 100, torch.float32, False, True),
    "huge": (40_000, 1 << 18, torch.bfloat16, True, True),
}


def compile_for(target, variant):
    """Each launch's kernel, and what a thread of it needs."""
    num_tokens, size, dtype, masked, has_entropy = VARIANTS[variant]

    def empty(*shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device="meta")

    tokens = empty(num_tokens, dtype=torch.int64)
    mask = empty(num_tokens, dtype=torch.bool) if masked else None
    problem = TokenProblem(empty(num_tokens, size, dtype=dtype), tokens, mask, 0.7)
    results = problem.allocate_results(has_entropy)
    upstream = empty(num_tokens), empty(num_tokens) if has_entropy else None
    last = make_gradient_launch(problem, results, upstream, view_rows(problem.logits))
    for call in (*list_launches(problem, results), last):
        arguments = dict(zip(call.kernel.arg_names, (*call.arguments, *call.options.values()), strict=True))
        yield call, *compile_kernel(target, call.kernel, arguments, num_warps=call.num_warps, **CHECKED)


@pytest.mark.parametrize(
    ("target", "variant"), [*(("sm_90", x) for x in VARIANTS), *((x, "few") for x in ("sm_80", "sm_100", "gfx942"))]
)
def test_nothing_spills(target, variant):
    """And a multiprocessor has registers for five programs of eight warps at once."""
    launches = [*compile_for(target, variant)]
    assert len(launches) == (3 if variant == "few" else 2)
    for call, compiled, resources in launches:
        assert resources.spilled_bytes == 0, call.kernel
        if target == "sm_90":
            assert 0 < resources.registers <= 48, call.kernel
            assert not re.search(r"\b(atom|red)\.global", compiled.asm["ptx"])


def test_memory_is_read_and_written_in_wide_pieces():
    """And a logit takes one exponential each way, a thread's sixteen together one more. No thread waits for others."""
    (_, evaluate, _), (_, differentiate, _) = compile_for("sm_90", "all")
    for compiled in (evaluate, differentiate):
        assert re.search(r"ld\.global\S*\.v4\.b32", compiled.asm["ptx"])
    assert re.search(r"st\.global\S*\.v4\.b32", differentiate.asm["ptx"])
    assert differentiate.asm["ptx"].count("ex2.approx") == 16
    assert evaluate.asm["ptx"].count("ex2.approx") == 16 + 1 + 1
    loop = re.search(r"(\$L__BB\d+_\d+):(?:(?!\$L__BB\d+_\d+:)[\s\S])*?bra\s+\1;", evaluate.asm["ptx"])[0]
    assert loop.count("ex2.approx") == 16 + 1 and not re.search(r"bar\.sync|shfl|shared", loop)
