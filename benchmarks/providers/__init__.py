"""Who computes it: ours, and what others run. A function each, and a line in REGISTRY."""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from benchmarks.harness import Call
from benchmarks.settings import find_missing
from benchmarks.workloads import Inputs, Workload, compute_oracle

Expected = Callable[[Workload, Inputs, Tensor | None], tuple[Tensor, ...]]


class Provider(NamedTuple):
    """An arm of the comparison."""

    module: str  # the module whose function makes the call for a workload and its inputs, or None where it cannot
    needs: tuple[str, ...] = ()
    devices: tuple[str, ...] = ("cpu", "cuda")
    function: str = "make_call"
    compiles: bool = False  # whether it does so for seconds on a GPU
    captured: bool = True  # whether its device time means anything
    verified: bool = True
    gae_layouts: tuple[str, ...] = ()  # where there are any, it takes GAE without truncations alone, in these layouts

    def is_available(self, device: str) -> bool:
        return device in self.devices and not find_missing(self.needs)

    def make_call(self, workload: Workload, inputs: Inputs) -> Call | None:
        """The call to time, if there is one; its results are tensors in the workload's layout."""
        plain_gae = workload.estimator == "gae" and not workload.truncated
        if self.gae_layouts and not (plain_gae and workload.layout in self.gae_layouts):
            return None
        return getattr(self.load(), self.function)(workload, inputs)

    def find_oracle(self) -> Expected:
        """The oracle: that of the equations, unless the provider has conventions of its own."""
        return getattr(self.load(), "compute_oracle", compute_oracle)

    def select_written(self, result: Tensor) -> Tensor:
        return getattr(self.load(), "select_written", lambda x: x)(result)

    def load(self) -> Any:
        return importlib.import_module(f"benchmarks.providers.{self.module}")


REGISTRY = {
    "null": Provider("others", function="make_null_call", captured=False, verified=False),
    "torch_add": Provider("others", function="make_torch_add", verified=False),
    "ours": Provider("others", compiles=True),
    "ours_out": Provider("others", function="make_call_with_out", compiles=True),
    "ours_annealed": Provider("others", function="make_annealed_call", captured=False),
    "loop": Provider("loop"),
    "compiled_scan": Provider("others", function="make_compiled_call", compiles=True),
    "flat_triton": Provider("flat_triton", ("triton",), ("cuda",), compiles=True),
    "blocks_triton": Provider("flat_triton", ("triton",), ("cuda",), function="make_block_call", compiles=True),
    "cuda_rows": Provider("cuda_rows", devices=("cuda",), compiles=True),
    "cuda_rows_by_four": Provider("cuda_rows", devices=("cuda",), function="make_call_by_four", compiles=True),
    "numpy": Provider("others", devices=("cpu",), function="make_numpy_call"),
    "numba": Provider("others", ("numba",), ("cpu",), "make_numba_call", gae_layouts=("env-major", "time-major")),
    "sb3": Provider("others", ("stable_baselines3",), ("cpu",), "make_sb3_call", gae_layouts=("time-major",)),
    "torchrl": Provider("others", ("torchrl",), function="make_torchrl_call", gae_layouts=("env-major",)),
}
