"""Credit assignment for reinforcement learning: exact at episode boundaries, fast on GPUs and CPUs."""

from rl_triton_core import estimators as _estimators
from rl_triton_core._internal.backend import BackendUnavailableError, available_backends, check_backend
from rl_triton_core._internal.launch.fast_path import fast_path_status, set_fast_path
from rl_triton_core._internal.launch.threads import get_num_threads, set_num_threads
from rl_triton_core._version import __version__
from rl_triton_core.boundaries import FinalValues
from rl_triton_core.estimators import *  # noqa: F403
from rl_triton_core.normalization import normalize_advantages

__all__ = [
    "BackendUnavailableError",
    "FinalValues",
    "__version__",
    "available_backends",
    "check_backend",
    "fast_path_status",
    "get_num_threads",
    "normalize_advantages",
    "set_fast_path",
    "set_num_threads",
]
__all__ += _estimators.__all__
