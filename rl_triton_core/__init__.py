"""Credit assignment for reinforcement learning: exact at episode boundaries, fast on GPUs and CPUs."""

from rl_triton_core._internal.backends import BackendUnavailableError as BackendUnavailableError
from rl_triton_core._internal.backends import available_backends as available_backends
from rl_triton_core._internal.backends import check_backend as check_backend
from rl_triton_core._internal.fast_path import fast_path_status as fast_path_status
from rl_triton_core._internal.fast_path import set_fast_path as set_fast_path
from rl_triton_core._internal.threads import get_num_threads as get_num_threads
from rl_triton_core._internal.threads import set_num_threads as set_num_threads
from rl_triton_core._internal.tuning import tune as tune
from rl_triton_core._version import __version__ as __version__
from rl_triton_core.boundaries import FinalValues as FinalValues
from rl_triton_core.estimators.gae import GAEOutput as GAEOutput
from rl_triton_core.estimators.gae import compute_gae as compute_gae
from rl_triton_core.estimators.linear import linear_recurrence as linear_recurrence
from rl_triton_core.estimators.nstep import compute_nstep_returns as compute_nstep_returns
from rl_triton_core.estimators.retrace import RetraceOutput as RetraceOutput
from rl_triton_core.estimators.retrace import compute_retrace as compute_retrace
from rl_triton_core.estimators.returns import compute_discounted_returns as compute_discounted_returns
from rl_triton_core.estimators.returns import compute_lambda_returns as compute_lambda_returns
from rl_triton_core.estimators.traces import ScanState as ScanState
from rl_triton_core.estimators.traces import compute_eligibility_traces as compute_eligibility_traces
from rl_triton_core.estimators.traces import compute_episodic_prefix_sum as compute_episodic_prefix_sum
from rl_triton_core.estimators.vtrace import VTraceOutput as VTraceOutput
from rl_triton_core.estimators.vtrace import compute_vtrace as compute_vtrace
from rl_triton_core.normalization import normalize_advantages as normalize_advantages
from rl_triton_core.warmup import warm_up as warm_up

__all__ = [
    "BackendUnavailableError",
    "FinalValues",
    "GAEOutput",
    "RetraceOutput",
    "ScanState",
    "VTraceOutput",
    "__version__",
    "available_backends",
    "check_backend",
    "compute_discounted_returns",
    "compute_eligibility_traces",
    "compute_episodic_prefix_sum",
    "compute_gae",
    "compute_lambda_returns",
    "compute_nstep_returns",
    "compute_retrace",
    "compute_vtrace",
    "fast_path_status",
    "get_num_threads",
    "linear_recurrence",
    "normalize_advantages",
    "set_fast_path",
    "set_num_threads",
    "tune",
    "warm_up",
]
