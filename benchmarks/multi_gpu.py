"""Iterations of examples/ppo_multi_gpu.py, eager and captured in turns, in one process and in one per GPU.

Every process has the same number of environments, so that two learn from twice as many steps. Before, both make the
same updates of the same rollout, and weights must agree. Times are those of the first process. On CPUs, over gloo,
nothing is captured.
"""

from functools import partial

import torch
from ppo_multi_gpu import DistributedTraining
from torch import distributed

from benchmarks import harness
from benchmarks.end_to_end.cleanrl import make_arguments
from benchmarks.harness import Options, Rows, Setting

WARM_UPS = 2


def measure(setting: Setting, options: Options) -> Rows:
    """The lines of both arms; where nothing was captured, the reason."""
    times, reason = harness.run_in_group(time_updates, setting.processes, options.device, setting, options.rounds)
    for row in harness.list_times(times, "captured", "iteration", "ms"):
        yield row._replace(note=reason if row.arm == "captured" else "")


def time_updates(device: str, setting: Setting, turns: int) -> tuple[harness.Times, str]:
    """Microseconds of iterations, a turn each, and why nothing was captured."""
    trainings = {}
    for update in ("eager", "captured"):
        args = make_arguments(setting, update, device)
        args.seed = 1 + distributed.get_rank()
        trainings[update] = DistributedTraining(args)
    compare_updates(*trainings.values())
    calls = {name: partial(x.run_iteration, x.args.learning_rate) for name, x in trainings.items()}
    times = harness.time_in_turns(calls, device, turns=turns + WARM_UPS, burst=1)
    reason = trainings["captured"].update.reason
    for training in trainings.values():
        training.collect.reset()
        training.update.reset()
    return {name: found[WARM_UPS:] for name, found in times.items()}, reason


def compare_updates(eager: DistributedTraining, captured: DistributedTraining) -> None:
    """Both update the same weights by the same minibatches, to the same weights within rounding."""
    eager.data = {name: x.flatten(0, 1).clone() for name, x in eager.collect().items()}
    captured.data = {name: x.clone() for name, x in eager.data.items()}
    for rows in torch.randperm(len(eager.data["obs"]), device=eager.args.device).chunk(eager.args.num_minibatches):
        eager.update(rows)
        captured.update(rows)
    harness.compare_parameters("captured", captured.agent, eager.agent)
