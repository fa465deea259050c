"""An earlier place of `rl_triton_adapters.sb3.captured`."""

from rl_triton_adapters.sb3.captured import *  # noqa: F403
from rl_triton_adapters.sb3.captured import __all__ as __all__  # noqa: PLC0414
