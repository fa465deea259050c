"""An earlier place of `TritonMaskablePPO`."""

from rl_triton_adapters.sb3.contrib import TritonMaskablePPO

__all__ = ["TritonMaskablePPO"]
