"""What is checked before anything is replaced: the flags, and that the installed Ray computes what it is known for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import ray
import torch
from ray.rllib.algorithms.appo.torch import appo_torch_learner
from ray.rllib.algorithms.impala.torch import impala_torch_learner
from ray.rllib.connectors.learner import AddOneTsToEpisodesAndTruncate, general_advantage_estimation
from ray.rllib.core.columns import Columns
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from rl_triton_adapters.common.switch import find_off_switch
from rl_triton_adapters.rllib.gae import compute_gae_of_slots
from rl_triton_adapters.rllib.v_trace import vtrace
from rl_triton_core import check_backend
from rl_triton_core.reach import is_written_in

OLDEST_RAY = (2, 56)
SLOTS = {
    Columns.REWARDS: torch.tensor([1.0, 2.0, 0.0, 3.0, 4.0, 0.0]),
    Columns.TERMINATEDS: torch.tensor([False, True, False, False, False, False]),
    Columns.TRUNCATEDS: torch.tensor([False, False, False, False, True, False]),
}
"""Two episodes of two steps, each with its extra slot: one terminated, one went on when sampling stopped."""
PER_STEP = {
    "target_action_log_probs": torch.tensor([[0.5], [-0.5], [0.1]]),
    "behaviour_action_log_probs": torch.tensor([[0.0], [0.2], [-0.4]]),
    "discounts": torch.tensor([[0.9], [0.0], [0.9]]),
    "rewards": torch.tensor([[1.0], [2.0], [3.0]]),
    "values": torch.tensor([[4.0], [5.0], [6.0]]),
}


class Flags(NamedTuple):
    """Our entries of `learner_config_dict`, and their defaults."""

    rl_triton: bool = True
    rl_triton_masked_statistics: bool = False
    rl_triton_backend: str | None = None
    rl_triton_update: bool = True


def read_flags(learner_config_dict: Mapping[Any, Any]) -> Flags:
    """Read our flags among the entries of `learner_config_dict`; "rl_triton" is False with RL_TRITON=0.

    Entries that begin with "rl_tri" and are none of the flags, flags that are no bool, and unknown backends are errors.
    """
    given = {name: x for name, x in learner_config_dict.items() if str(name).startswith("rl_tri")}
    for name, x in given.items():
        if name not in Flags._fields:
            raise ValueError(f"learner_config_dict: got {name!r}, expected one of {', '.join(Flags._fields)}")
        if not isinstance(x, bool) and name != "rl_triton_backend":
            raise TypeError(f"learner_config_dict: got {name}={x!r}, expected True or False")
    flags = Flags(**given)
    check_backend(flags.rl_triton_backend)
    return flags._replace(rl_triton=flags.rl_triton and not find_off_switch())


def check_ray() -> None:
    """Check that the installed Ray is one that this adapter was written for: its version, and what it computes.

    Raises:
        RuntimeError: It is older than 2.56, or its flags, value targets or V-Trace differ on a small example.
    """
    version = tuple(int(part) for part in ray.__version__.split(".")[:2])
    if version < OLDEST_RAY:
        raise RuntimeError(
            f"rl_triton_adapters.rllib needs Ray 2.56 or newer, got {ray.__version__}: "
            'pip install "ray[rllib]>=2.56" (before that, flags stood one slot later)'
        )
    for what, theirs, ours in compare_results():
        if not np.allclose(theirs, ours, rtol=1e-5, atol=1e-5):
            raise RuntimeError(
                f"Ray {ray.__version__} has other {what} than the releases that rl_triton_adapters.rllib was written "
                f"for: got {np.asarray(theirs).tolist()}, expected {np.asarray(ours).tolist()}"
            )


def compare_results() -> Iterator[tuple[str, Any, Any]]:
    """Yield what RLlib's pieces compute, each with what is expected."""
    make = partial(SingleAgentEpisode, len_lookback_buffer=0)
    episodes = [make(observations=[0] * 3, actions=[0] * 2, rewards=[0.0] * 2, terminated=x) for x in (True, False)]
    batch = AddOneTsToEpisodesAndTruncate()(rl_module=None, batch={}, episodes=episodes, shared_data={})
    names = (Columns.TERMINATEDS, Columns.TRUNCATEDS)
    yield "flags", [np.concatenate([*batch[name].values()]) for name in names], [SLOTS[name] for name in names]
    values, columns = torch.tensor([5.0, 6.0, 7.0, 8.0, 9.0, 10.0]), {name: x.numpy() for name, x in SLOTS.items()}
    _, targets = compute_gae_of_slots(SLOTS, values, gamma=0.9, lambda_=0.8, backend="reference")
    compute = general_advantage_estimation.compute_value_targets
    if is_written_in(("ray",), compute):  # else it is left to compute
        yield "value targets", compute(values.numpy(), **columns, gamma=0.9, lambda_=0.8), targets
    arguments: dict[str, Any] = {**PER_STEP, "bootstrap_values": torch.tensor([7.0])}
    expected = torch.stack(vtrace(**arguments, backend="reference"))
    for compute in (impala_torch_learner.vtrace_torch, appo_torch_learner.vtrace_torch):
        if is_written_in(("ray",), compute):
            yield "V-Trace", torch.stack(compute(**arguments)), expected
