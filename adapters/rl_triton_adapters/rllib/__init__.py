"""RLlib: learners of PPO, IMPALA and APPO that compute advantages and value targets with `rl_triton_core`.

One call turns them on, before the algorithm is built, and one flag off again:

    config = enable_triton(PPOConfig().environment("CartPole-v1"))
    config.learners(learner_config_dict={"rl_triton": False})

Dicts, Ray Tune and YAML have the names "TritonPPO", "TritonIMPALA" and "TritonAPPO", see `config`.
An update takes less time than RLlib's, see `Update`. Tensors stay where they are. All else is RLlib's own.
A learner compiles what it needs when it is built, logs one line that says what it computes with, and says in the metric
"rl_triton" of every update whether its advantages or V-Trace were ours.
"""

from rl_triton_adapters.common.versions import explained_import

with explained_import(__name__, "ray", "2.56", "rllib"):
    from rl_triton_adapters.rllib.check import check_ray
    from rl_triton_adapters.rllib.config import TritonAPPO, TritonIMPALA, TritonPPO, check_learners, enable_triton
    from rl_triton_adapters.rllib.gae import TritonGeneralAdvantageEstimation
    from rl_triton_adapters.rllib.learners import (
        TritonAPPOTorchLearner,
        TritonIMPALATorchLearner,
        TritonPPOTorchLearner,
    )
    from rl_triton_adapters.rllib.v_trace import vtrace

__all__ = [
    "TritonAPPO",
    "TritonAPPOTorchLearner",
    "TritonGeneralAdvantageEstimation",
    "TritonIMPALA",
    "TritonIMPALATorchLearner",
    "TritonPPO",
    "TritonPPOTorchLearner",
    "check_learners",
    "check_ray",
    "enable_triton",
    "vtrace",
]
