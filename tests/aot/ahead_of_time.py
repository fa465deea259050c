"""Compile the Triton kernels for GPUs that are not there, and read what the assemblers report."""

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rl_triton_core._internal.launch.kernels import FUSED, Address
from rl_triton_core._internal.launch.table import Launch
from rl_triton_core._internal.scan.kernel.scan import scan
from rl_triton_core._internal.scan.problem import Problem
from rl_triton_core._internal.scan.triton import build_launches

triton.knobs.compilation.disable_line_info = True  # nobody steps through these kernels
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}

POINTERS = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.bool: "*i1",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


class Resources(NamedTuple):
    """What one thread of a kernel needs, and its instructions that read or write memory, where they can be told."""

    registers: int
    spilled_bytes: int
    accesses: Counter[str] | None = None


def compile_for(target: str, problem: Problem, row: Launch, segments: int = 1, **more: int) -> list[Resources]:
    """Compile the launches that would solve the problem on the target."""
    found = []
    for call in build_launches(problem, row, segments):
        arguments = dict(zip(scan.arg_names, call.arguments, strict=True))
        found.append(compile_kernel(target, scan, arguments, **{**call.options, **more})[1])
    return found


def compile_kernel(target: str, kernel, arguments, **options: int):
    """Compile a kernel for arguments by name; return it and what a thread of it needs."""
    signature, constexprs, attributes = {}, {}, {}
    for name, value in arguments.items():
        index = kernel.arg_names.index(name)
        is_constant = kernel.params[index].is_constexpr
        signature[name] = describe_argument(value, (index,), is_constant, constexprs, attributes)
    source = ASTSource(kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    compiled = triton.compile(source, target=TARGETS[target], options={**FUSED, **options})
    is_amd = target.startswith("gfx")
    return compiled, read_amdgcn(compiled.asm["amdgcn"]) if is_amd else read_ptx(compiled)


def describe_argument(value, path, constant, constexprs, attributes):
    """An argument's type as a launch would specialise it: None, 1 and the capitals are constants."""
    if isinstance(value, tuple):
        return tuple(describe_argument(x, (*path, i), constant, constexprs, attributes) for i, x in enumerate(value))
    if constant or value is None or (isinstance(value, int) and value == 1):
        constexprs[path] = value
        return "constexpr"
    if isinstance(value, Address):
        return POINTERS[value.dtype]
    if isinstance(value, torch.Tensor):
        attributes[path] = [["tt.divisibility", 16]]
        return POINTERS[value.dtype]
    if isinstance(value, int):
        if value % 16 == 0:
            attributes[path] = [["tt.divisibility", 16]]
        return "i32"
    return "fp32"


def read_cubin(cubin: bytes) -> Resources:
    """Registers and local memory (where spills go) of the one kernel in a cubin."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, "--dump-resource-usage", file.name]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    stack, local = (int(re.search(rf"{name}:(\d+)", report)[1]) for name in ("STACK", "LOCAL"))
    return Resources(int(re.search(r"REG:(\d+)", report)[1]), stack + local)


def read_ptx(kernel) -> Resources:
    """The same, and loads and stores by their width: ld.v4.b32 reads four numbers of four bytes at once."""
    accesses = re.findall(r"\b(ld|st)\.global\S*?((?:\.v\d)?\.b\d+)\b", kernel.asm["ptx"])
    return read_cubin(kernel.asm["cubin"])._replace(accesses=Counter(map("".join, accesses)))


def read_amdgcn(assembly: str) -> Resources:
    """Vector registers and scratch memory (where spills go) of the one kernel in an AMD assembly file."""
    registers, scratch = (
        int(re.search(rf"\.{name}:\s+(\d+)", assembly)[1]) for name in ("vgpr_count", "private_segment_fixed_size")
    )
    return Resources(registers, scratch)
