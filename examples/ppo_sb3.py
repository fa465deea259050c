"""PPO on CartPole-v1 with Stable-Baselines3, the advantages computed by rl_triton_core.

    python examples/ppo_sb3.py                                 --advantages triton is the default
    python examples/ppo_sb3.py --advantages stock              Stable-Baselines3's own; new_agent() has the swap
    python examples/ppo_sb3.py --accelerate                    TritonPPO: acting and updates with less work, too
    python examples/ppo_sb3.py --compare --output build/demo   train all three from one seed in turns, and compare

On the CPU the first two must end up equal in every bit, and TritonPPO's parameters follow theirs within rounding, until
an action differs; --device cuda trains their networks on a GPU.
"""

import argparse
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from command_line import COUNT, SEED, Curves, device, needing, run

with needing("examples", __name__):
    import numpy as np
    import torch
    from ppo_sb3_report import LABELS, PHASES, compare, draw_figure, print_comparison
    from stable_baselines3 import PPO
    from stable_baselines3.common.buffers import RolloutBuffer
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.logger import KVWriter, Logger
    from stable_baselines3.common.utils import safe_mean

    from rl_triton_adapters.sb3 import TritonPPO, TritonRolloutBuffer
    from rl_triton_core.system_info import system_info

ENV_ID = "CartPole-v1"
N_STEPS = 256


def falling(start: float) -> Callable[[float], float]:
    """A schedule that falls linearly to zero, so that training ends settled."""
    return lambda progress_remaining: progress_remaining * start


def timed(buffer_class: type[RolloutBuffer]) -> type[RolloutBuffer]:
    """The same buffer, with a clock around the advantage step."""

    class Timed(buffer_class):  # type: ignore[valid-type, misc]
        seconds = 0.0

        def compute_returns_and_advantage(self, last_values: torch.Tensor, dones: np.ndarray) -> None:
            start = perf_counter()
            super().compute_returns_and_advantage(last_values, dones)
            self.seconds += perf_counter() - start

    return Timed


class TimedPhases(PPO):
    """A clock around each of PPO's two phases; one entry per iteration."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.collecting: list[float] = []
        self.updating: list[float] = []
        super().__init__(*args, **kwargs)

    def collect_rollouts(self, *args: Any, **kwargs: Any) -> bool:
        start = perf_counter()
        go_on = super().collect_rollouts(*args, **kwargs)
        self.collecting.append(perf_counter() - start)
        return go_on

    def train(self) -> None:
        start = perf_counter()
        super().train()
        self.updating.append(perf_counter() - start)


class TimedPPO(TimedPhases, PPO):
    """PPO with clocks."""


class TimedTritonPPO(TimedPhases, TritonPPO):
    """TritonPPO with clocks."""


AGENTS: dict[str, tuple[type[TimedPhases], type[RolloutBuffer]]] = {
    "stock": (TimedPPO, RolloutBuffer),
    "triton": (TimedPPO, TritonRolloutBuffer),
    "accelerated": (TimedTritonPPO, TritonRolloutBuffer),
}


class LearningCurve(BaseCallback):
    """Steps taken, seconds, and mean return of the last 100 training episodes, once per iteration."""

    def __init__(self) -> None:
        super().__init__()
        self.points: list[tuple[int, float, float]] = []

    def _on_training_start(self) -> None:
        self.start = perf_counter()

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        returns = [episode["r"] for episode in self.model.ep_info_buffer or []]
        self.points.append((self.num_timesteps, perf_counter() - self.start, float(safe_mean(returns))))


@dataclass
class Run:
    """What one training run leaves behind."""

    evaluation: float
    digest: str
    curve: list[tuple[int, float, float]]
    total: float
    seconds: dict[str, float]
    iterations: list[float]  # rollout and update of each iteration, without the advantage step

    @property
    def share(self) -> dict[str, float]:
        return {phase: self.seconds[phase] / self.total for phase in PHASES}

    @property
    def milliseconds_per_call(self) -> float:
        return 1e3 * self.seconds["advantages"] / len(self.iterations)


def new_agent(name: str, args: argparse.Namespace) -> TimedPhases:
    algorithm, buffer_class = AGENTS[name]
    return algorithm(
        "MlpPolicy",
        make_vec_env(ENV_ID, args.num_envs, seed=args.seed),
        rollout_buffer_class=timed(buffer_class),  # in your own code: rollout_buffer_class=TritonRolloutBuffer
        n_steps=N_STEPS,
        batch_size=256,
        learning_rate=falling(1e-3),
        clip_range=falling(0.2),
        seed=args.seed,
        device=args.device,
    )


class CurvesOfLogger(KVWriter):
    """Writes what a logger has into curves."""

    def __init__(self, curves: Curves) -> None:
        self.curves = curves

    def write(self, key_values: dict[str, Any], key_excluded: dict[str, tuple[str, ...]], step: int = 0) -> None:
        for name, number in key_values.items():
            if "tensorboard" not in (key_excluded[name] or ()):
                self.curves.add_scalar(name, number, step)

    def close(self) -> None:
        self.curves.close()


def parameter_digest(agent: PPO) -> str:
    """A fingerprint of every bit of every parameter."""
    parameters = agent.policy.state_dict().items()
    data = b"".join(name.encode() + tensor.cpu().numpy().tobytes() for name, tensor in parameters)
    return hashlib.sha256(data).hexdigest()


def train(name: str, args: argparse.Namespace) -> Run:
    what = LABELS[name] if name == "accelerated" else f"the advantages of {LABELS[name]}"
    print(f"\nTraining with {what}, seed {args.seed}, {args.total_timesteps} steps")
    agent, curve = new_agent(name, args), LearningCurve()
    curves = Curves(f"{args.log_dir}/{ENV_ID}__ppo_sb3__{name}__{args.seed}")
    agent.set_logger(Logger(None, [CurvesOfLogger(curves)]))
    start = perf_counter()
    agent.learn(args.total_timesteps, callback=curve, progress_bar=not args.quiet)
    total = perf_counter() - start
    evaluation_env = make_vec_env(ENV_ID, 1, seed=args.seed + 1000)
    evaluation, spread = evaluate_policy(agent, evaluation_env, args.evaluation_episodes, deterministic=True)
    print(f"evaluation: mean return {evaluation:.1f} +- {spread:.1f} over {args.evaluation_episodes} episodes")
    seconds = {"advantages": agent.rollout_buffer.seconds, "update": sum(agent.updating)}
    seconds["rollout"] = sum(agent.collecting) - seconds["advantages"]
    seconds["rest"] = total - sum(seconds.values())
    per_call = seconds["advantages"] / len(agent.collecting)
    iterations = [sum(pair) - per_call for pair in zip(agent.collecting, agent.updating, strict=True)]
    return Run(float(evaluation), parameter_digest(agent), curve.points, total, seconds, iterations)


def warm_up(args: argparse.Namespace) -> dict[str, float]:
    """Train each agent for an iteration before the clocks start; return the seconds that compiling takes once."""
    env = make_vec_env(ENV_ID, args.num_envs, seed=args.seed)
    start = perf_counter()
    buffer = TritonRolloutBuffer(N_STEPS, env.observation_space, env.action_space, "cpu", n_envs=args.num_envs)
    buffer.compute_returns_and_advantage(torch.zeros(args.num_envs, 1), np.zeros(args.num_envs, dtype=bool))
    seconds = {"advantages": perf_counter() - start}
    start = perf_counter()
    agent = new_agent("accelerated", args)  # which compiles its updates as it is made
    seconds["updates"] = perf_counter() - start
    for other in (agent, *(new_agent(name, args) for name in ("stock", "triton"))):
        other.learn(1)
    return seconds


def say_what_is_used(device: str) -> None:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    print(f"torch {torch.__version__}, GPU: {gpu}, the networks train on: {device}")
    print("The rollout buffer of Stable-Baselines3 is NumPy: the advantages are computed on the CPU in any case.")
    if gpu != "none" and device == "cpu":
        print("The GPU stays idle: on the CPU the two agents can be compared bit for bit (--device cuda uses it).")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--advantages", choices=["stock", "triton"], default="triton", help="who computes them")
    what.add_argument("--accelerate", action="store_true", help="train with TritonPPO")
    what.add_argument("--compare", action="store_true", help="train with each of the three, and compare")
    parser.add_argument("--output", type=Path, default=Path("build/demo"), help="where --compare writes its figure")
    parser.add_argument("--turns", type=COUNT, default=3, help="how often --compare trains with TritonPPO and without")
    parser.add_argument("--seed", type=SEED, default=1)
    parser.add_argument("--total-timesteps", type=COUNT, default=100_000)
    parser.add_argument("--num-envs", type=COUNT, default=8)
    parser.add_argument("--device", type=device, default="cpu", help="of the networks; bitwise equality needs cpu")
    parser.add_argument("--evaluation-episodes", type=COUNT, default=20)
    parser.add_argument("--target-return", type=float, default=475.0, help="exit with status 1 if below")
    parser.add_argument("--log-dir", default="runs", help="where the TensorBoard logs go")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    return parser.parse_args(arguments)


def main() -> int:
    args = parse_arguments()
    torch.set_num_threads(1)  # networks this small lose time to more
    say_what_is_used(args.device)
    if not args.compare:
        name = "accelerated" if args.accelerate else args.advantages
        return 0 if train(name, args).evaluation >= args.target_return else 1

    compiling = warm_up(args)
    runs = {name: [train(name, args)] for name in AGENTS}
    for _ in range(1, args.turns):
        for name in ("stock", "accelerated"):
            runs[name].append(train(name, args))
    result = {"compile_seconds": compiling} | compare(runs)
    print_comparison(runs, result)
    args.output.mkdir(parents=True, exist_ok=True)
    draw_figure(runs, result, args.target_return, args.output / "ppo_sb3.png")
    record = {"result": result, "runs": {name: list(map(vars, turns)) for name, turns in runs.items()}}
    record |= {"arguments": vars(args) | {"output": str(args.output)}, "system": system_info()}
    (args.output / "ppo_sb3.json").write_text(json.dumps(record, indent=2) + "\n")
    solved = all(run.evaluation >= args.target_return for turns in runs.values() for run in turns)
    equal = result["bitwise_equal"]
    print(f"\nfigure and numbers: {args.output}/ppo_sb3.png, {args.output}/ppo_sb3.json")
    print(f"all agents solved: {'yes' if solved else 'no'}")
    print(f"bitwise equal: {'yes' if equal else 'no'}")
    if args.device != "cpu":
        print("(off the CPU expect equality up to rounding at best: not every kernel there is deterministic)")
    return 0 if solved and (equal or args.device != "cpu") else 1


if __name__ == "__main__":
    run(main)
