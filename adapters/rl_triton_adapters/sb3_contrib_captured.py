"""An earlier place of `rl_triton_adapters.sb3.contrib`."""

from rl_triton_adapters.sb3.contrib import *  # noqa: F403
from rl_triton_adapters.sb3.contrib import __all__ as __all__  # noqa: PLC0414
