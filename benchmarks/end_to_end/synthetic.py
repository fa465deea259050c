"""The synthetic PPO update: epochs of minibatches over random experience, env-major, without environments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor

from benchmarks.end_to_end import ppo
from benchmarks.end_to_end.frameworks import Arm, Setting
from benchmarks.end_to_end.stopwatch import ADVANTAGES, Stopwatch
from benchmarks.providers import loop
from benchmarks.providers.compiled_scan import compile_scan
from benchmarks.workloads import GAMMA, Inputs, Workload, draw_inputs
from rl_triton_core import compute_gae

TITLE = "The synthetic PPO update"
ITERATION = """\
Random experience of a Gaussian policy, in tensors [num_envs, num_steps] that are contiguous in time. An iteration
computes advantages and returns and runs the epochs of minibatches. No environment is stepped. *Recomputed*: values
and advantages are computed again in every epoch. The advantage step computes advantages and returns from rewards,
values and flags. The network that computes the values is not a part of it."""
ARMS = {
    "stock": "a Python loop over the steps",
    "compiled": "`torch.compile` of a doubling scan",
    "ours": "`compute_gae`",
}
OURS = ("ours",)
MORE: tuple[str, ...] = ()
SETTINGS = {
    "cuda": (
        Setting(16384, 128, 128),
        Setting(4096, 128, 1024),
        Setting(8192, 128, 256),
        Setting(8192, 128, 512),
        Setting(4096, 512, 128),
        Setting(1024, 1024, 128),
        Setting(512, 4096, 128),
        Setting(16384, 128, 128, recompute=True),
        Setting(512, 4096, 128, recompute=True),
    ),
    "cpu": (
        Setting(64, 128, 64, device="cpu"),
        Setting(128, 128, 128, device="cpu"),
        Setting(8, 2048, 64, device="cpu"),
        Setting(64, 128, 64, recompute=True, device="cpu"),
    ),
    "quick": (Setting(4, 16, 8, 2, 2), Setting(4, 8, 8, 2, 2, recompute=True)),
}
OBSERVATIONS, ACTIONS = 48, 12
"""As of a robot with legs."""


class Update:
    """A policy, its optimizer, and experience."""

    def __init__(self, setting: Setting) -> None:
        torch.manual_seed(0)
        self.setting, self.args = setting, ppo.make_arguments(setting)
        self.passes, self.args.update_epochs = (setting.epochs, 1) if setting.recompute else (1, setting.epochs)
        spaces = SimpleNamespace(observations=OBSERVATIONS, actions=ACTIONS, discrete=False)
        self.agent = ppo.load_example().Agent(spaces, setting.hidden).to(setting.device)
        self.optimizer = torch.optim.Adam(self.agent.parameters(), lr=self.args.learning_rate, eps=1e-5)
        self.workload = Workload("gae", setting.num_envs, setting.num_steps)
        self.inputs = draw_inputs(self.workload, setting.device)
        self.data = self.draw_experience()

    @torch.no_grad()
    def draw_experience(self) -> Inputs:
        """Observations, actions and their log-probabilities."""
        shape = (self.setting.num_envs * self.setting.num_steps, OBSERVATIONS)
        obs = torch.randn(shape, device=self.setting.device)
        policy = self.agent.predict_policy(obs)
        actions = policy.sample()
        return {"obs": obs, "actions": actions, "logprobs": policy.log_prob(actions)}

    def run_iteration(self, watch: Stopwatch, advantages: Callable[[Inputs], Sequence[Tensor]]) -> None:
        """One update."""
        for _ in range(self.passes):
            inputs = self.recompute_values() if self.setting.recompute else self.inputs
            with watch.part(ADVANTAGES):
                results = advantages(inputs)
            named = dict(zip(("advantages", "returns"), (x.flatten() for x in results), strict=True))
            ppo.load_example().update_agent(partial(self.update_rows, self.data | named), results[0].numel(), self.args)

    def update_rows(self, data: Inputs, rows: Tensor) -> None:
        """One minibatch."""
        batch = {name: x[rows] for name, x in data.items()}
        ppo.load_example().update_minibatch(self.agent, self.optimizer, batch, self.args)

    @torch.no_grad()
    def recompute_values(self) -> Inputs:
        """The inputs with the values of the present weights."""
        values = self.agent.predict_value(self.data["obs"]).view_as(self.inputs["rewards"])
        return self.inputs | {"values": values}


def run_loop(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """The loop, over views with time first."""
    views = {name: x.T if x.ndim > 1 else x for name, x in inputs.items()}
    advantages, returns = loop.run_gae(views, ppo.LAMBDA)
    return advantages.T, returns.T


def make_arm(name: str, setting: Setting, watch: Stopwatch) -> Arm:
    """One arm in one setting, as it is before training."""
    update = Update(setting)
    ways = {"stock": run_loop, "ours": lambda inputs: compute_gae(**inputs, gamma=GAMMA, lambda_=ppo.LAMBDA)}
    advantages = compile_scan(update.workload) if name == "compiled" else ways[name]
    return Arm(lambda: update.run_iteration(watch, advantages), lambda: advantages(update.inputs))
