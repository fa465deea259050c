"""One file per family of estimators: the equation, its description, and the public function.

All of them are listed here; the package exports and warms up what stands in `__all__`.
"""

from rl_triton_core.estimators.gae import GAEOutput, compute_gae
from rl_triton_core.estimators.linear import linear_recurrence
from rl_triton_core.estimators.retrace import RetraceOutput, compute_retrace
from rl_triton_core.estimators.returns import compute_discounted_returns, compute_lambda_returns
from rl_triton_core.estimators.traces import ScanState, compute_eligibility_traces, compute_episodic_prefix_sum
from rl_triton_core.estimators.vtrace import VTraceOutput, compute_vtrace

__all__ = [
    "GAEOutput",
    "RetraceOutput",
    "ScanState",
    "VTraceOutput",
    "compute_discounted_returns",
    "compute_eligibility_traces",
    "compute_episodic_prefix_sum",
    "compute_gae",
    "compute_lambda_returns",
    "compute_retrace",
    "compute_vtrace",
    "linear_recurrence",
]
