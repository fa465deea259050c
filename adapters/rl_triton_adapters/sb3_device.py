"""An earlier place of `rl_triton_adapters.sb3.device`."""

from rl_triton_adapters.sb3.device import *  # noqa: F403
from rl_triton_adapters.sb3.device import __all__ as __all__  # noqa: PLC0414
