"""Time iterations of examples/ppo_multi_gpu.py, eager and captured, in one process and in one per GPU.

    python -m benchmarks.multi_gpu FOLDER [--commit HASH] [--seconds S] [--quick]

Every process has the same number of environments, so that two learn from twice as many steps. Eager and captured
iterations take turns; before, both make the same updates of the same rollout, and weights must agree. Writes
multi_gpu.json: quartiles in milliseconds, of the first process. On CPUs, over gloo, nothing is captured.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import distributed, multiprocessing

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import ppo_multi_gpu

from benchmarks import files
from benchmarks.end_to_end.frameworks import Setting
from benchmarks.end_to_end.ppo import make_arguments
from benchmarks.quartiles import compare_turns, find_quartiles

SETTINGS = (Setting(4096, 128), Setting(16384, 128, 128))
QUICK = (Setting(4, 16, 8, 2, 2, device="cpu"),)
UPDATES = ("eager", "captured")
WARM_UPS = 2
Trainings = dict[str, ppo_multi_gpu.DistributedTraining]


def main(arguments: list[str] | None = None) -> None:
    """Measure one process, and one per GPU."""
    parser = files.make_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=8, help="how long the arms of a row take turns")
    parser.add_argument("--quick", action="store_true", help="two processes on the CPU, to see that it runs")
    options = parser.parse_args(arguments)
    settings = QUICK if options.quick else SETTINGS
    rows = []
    for processes in (1, 2) if options.quick else dict.fromkeys((1, torch.cuda.device_count())):
        with tempfile.TemporaryDirectory() as folder:
            multiprocessing.spawn(measure_share, (folder, processes, settings, options.seconds), nprocs=processes)
            rows += torch.load(Path(folder) / "rows")
    files.save_rows(options, "multi_gpu.json", rows)


def measure_share(rank: int, folder: str, processes: int, settings: tuple[Setting, ...], seconds: float) -> None:
    """All settings in one of the processes; the first keeps the times."""
    device = settings[0].device if settings[0].device == "cpu" else f"cuda:{rank}"
    if device != "cpu":
        torch.cuda.set_device(device)
    kind = "gloo" if device == "cpu" else "nccl"
    distributed.init_process_group(kind, init_method=f"file://{folder}/meet", rank=rank, world_size=processes)
    rows = [measure_setting(setting._replace(device=device), rank, seconds) for setting in settings]
    if rank == 0:
        torch.save([{"processes": processes, **row} for row in rows], f"{folder}/rows")
    distributed.barrier()  # one that parts earlier breaks off what others have not received
    distributed.destroy_process_group()


def measure_setting(setting: Setting, rank: int, seconds: float) -> files.Row:
    """One setting; how many turns there are is the first process's choice."""
    trainings = {update: make_training(setting, update, rank) for update in UPDATES}
    compare_updates(trainings)
    times: dict[str, list[float]] = {update: [] for update in UPDATES}
    turns = torch.ones(1, dtype=torch.int64, device=setting.device)
    for turn in itertools.count():
        for update, training in trainings.items():
            started = time.perf_counter()
            training.run_iteration(training.args.learning_rate)
            wait_for(setting.device)
            times[update] += [1e3 * (time.perf_counter() - started)] * (turn >= WARM_UPS)
        if turn == WARM_UPS:
            turns.fill_(int(seconds * 1e3 / sum(map(sum, times.values()))))
            distributed.broadcast(turns, 0)
        if turn >= WARM_UPS + turns.item():
            break
    reason = trainings["captured"].update.reason
    for training in trainings.values():
        training.collect.reset()
        training.update.reset()
    milliseconds = {update: find_quartiles(x) for update, x in times.items()}
    about = {"setting": str(setting), "reason": reason, "iterations": len(times["eager"])}
    return {**about, "milliseconds": milliseconds, "speedup": compare_turns(*times.values())}


def make_training(setting: Setting, update: str, rank: int) -> ppo_multi_gpu.DistributedTraining:
    """The example's training, with environments of its own in every process."""
    args = make_arguments(setting)
    args.env, args.update, args.seed = "cartpole", update, 1 + rank
    return ppo_multi_gpu.DistributedTraining(args)


def compare_updates(trainings: Trainings) -> None:
    """Both update the same weights by the same minibatches, to the same weights within rounding."""
    eager, captured = trainings.values()
    eager.data = {name: x.flatten(0, 1).clone() for name, x in eager.collect().items()}
    captured.data = {name: x.clone() for name, x in eager.data.items()}
    for rows in torch.randperm(len(eager.data["obs"]), device=eager.args.device).chunk(eager.args.num_minibatches):
        for training in trainings.values():
            training.update(rows)
    for name, want in eager.agent.state_dict().items():
        torch.testing.assert_close(captured.agent.state_dict()[name], want, rtol=1e-3, atol=1e-5)


def wait_for(device: str) -> None:
    """Until the device is done."""
    if device != "cpu":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
