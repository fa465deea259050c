"""Credit assignment for reinforcement learning: exact at episode boundaries, fast on GPUs and CPUs."""

from rl_triton_core._version import __version__ as __version__
from rl_triton_core.backends import BackendUnavailableError as BackendUnavailableError
from rl_triton_core.backends import available_backends as available_backends
from rl_triton_core.boundaries import FinalValues as FinalValues
from rl_triton_core.estimators.gae import GAEOutput as GAEOutput
from rl_triton_core.estimators.gae import compute_gae as compute_gae

__all__ = [
    "BackendUnavailableError",
    "FinalValues",
    "GAEOutput",
    "__version__",
    "available_backends",
    "compute_gae",
]
