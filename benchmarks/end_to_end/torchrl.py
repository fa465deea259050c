"""TorchRL: epochs of `ClipPPOLoss` over a random tensordict, advantages by its value estimator or ours."""

from itertools import pairwise
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import CudaGraphModule, NormalParamExtractor, TensorDictModule
from torch import Tensor, nn
from torchrl.modules import IndependentNormal, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from benchmarks.end_to_end import LAMBDA, Arm, Setting
from benchmarks.end_to_end.stopwatch import ADVANTAGES, REST, Stopwatch
from benchmarks.workloads import GAMMA, Workload, draw_inputs
from rl_triton_adapters.torchrl import TritonGAE
from rl_triton_adapters.torchrl.losses import TritonClipPPOLoss
from rl_triton_core.compiled import CompiledUpdate, Rollout

OBSERVATIONS, ACTIONS = 17, 6  # as of HalfCheetah


class Training:
    """A loss with its networks and estimator, an optimizer, and experience."""

    def __init__(self, setting: Setting, name: str, watch: Stopwatch) -> None:
        torch.manual_seed(0)
        self.setting, self.watch = setting, watch
        self.actor, critic = make_networks(setting)
        captured, compiles = ((name, setting.device) == ("captured", x) for x in ("cuda", "cpu"))
        kind = "l2" if setting.device == "cpu" else "smooth_l1"
        self.loss = (TritonClipPPOLoss if captured else ClipPPOLoss)(self.actor, critic, loss_critic_type=kind)
        options = {"fused": True, "capturable": True} if captured else {}
        self.optimizer = torch.optim.Adam(self.loss.parameters(), lr=3e-4, **options)
        self.update = CudaGraphModule(self.take_step, in_keys=[], out_keys=[]) if captured else self.take_step
        networks = self.loss.actor_network.module[0].module[0], self.loss.critic_network.module
        self.compiled = CompiledUpdate(*networks, self.optimizer, head="gaussian") if compiles else None
        self.data = self.draw_experience()
        estimator = GAE if name == "stock" else TritonGAE
        self.estimator = estimator(gamma=GAMMA, lmbda=LAMBDA, value_network=critic).to(setting.device)
        self.estimator._call_value_nets = watch.around(REST, self.estimator._call_value_nets)

    @torch.no_grad()
    def draw_experience(self) -> Any:
        """Steps of the policy in no environment in particular."""
        shape, device = (self.setting.num_envs, self.setting.num_steps), self.setting.device
        inputs = draw_inputs(Workload("gae", *shape, truncated=True), device)
        done = inputs["terminated"] | inputs["truncated"]
        flags = {"done": done, "terminated": inputs["terminated"], "truncated": inputs["truncated"]}
        following = {name: x.unsqueeze(-1) for name, x in flags.items()} | {"reward": inputs["rewards"].unsqueeze(-1)}
        following["observation"], observation = torch.randn(2, *shape, OBSERVATIONS, device=device)
        return self.actor(TensorDict({"observation": observation, "next": following}, shape, device=device))

    @torch.no_grad()
    def estimate_advantages(self) -> None:
        with self.watch.part(ADVANTAGES):
            self.estimator(self.data)

    def run_iteration(self) -> None:
        for epoch in range(self.setting.epochs):
            if epoch == 0 or self.setting.recompute:
                self.estimate_advantages()
            samples = self.data.reshape(-1)
            order = torch.randperm(len(samples), device=self.setting.device)
            if self.compiled is not None:
                options = {"clip": 0.2, "entropy_coef": 0.01, "value_coef": 1.0, "max_grad_norm": 1.0}
                self.compiled.run(view_rollout(samples), [order], self.setting.batch_size, **options)
                continue
            for chosen in order.split(self.setting.batch_size):
                self.update(samples[chosen])

    def take_step(self, minibatch: Any) -> Any:
        losses = self.loss(minibatch)
        self.optimizer.zero_grad()
        sum(losses[name] for name in ("loss_objective", "loss_critic", "loss_entropy")).backward()
        nn.utils.clip_grad_norm_(self.loss.parameters(), 1.0)
        self.optimizer.step()
        return losses.detach()

    def compute_results(self) -> list[Tensor]:
        """Those of the experience, before any training."""
        self.estimate_advantages()
        return [self.data["advantage"].clone(), self.data["value_target"].clone()]


def make_networks(setting: Setting) -> tuple[Any, Any]:
    def make_layers(outputs: int) -> nn.Sequential:
        sizes = (OBSERVATIONS, setting.hidden, setting.hidden)
        hidden = [part for pair in pairwise(sizes) for part in (nn.Linear(*pair), nn.Tanh())]
        return nn.Sequential(*hidden, nn.Linear(setting.hidden, outputs)).to(setting.device)

    extractor = NormalParamExtractor(scale_mapping="exp") if setting.device == "cpu" else NormalParamExtractor()
    parameters = TensorDictModule(nn.Sequential(make_layers(2 * ACTIONS), extractor), ["observation"], ["loc", "scale"])
    actor = ProbabilisticActor(
        parameters, in_keys=["loc", "scale"], distribution_class=IndependentNormal, return_log_prob=True
    )
    return actor, ValueOperator(make_layers(1), in_keys=["observation"])


def view_rollout(samples: Any) -> Rollout:
    """Samples as a compiled update takes them."""
    names = ("observation", "action", "advantage", "value_target", "action_log_prob")
    features, actions, *others = (samples[name] for name in names)
    return Rollout(features, actions, *(x.reshape(-1) for x in others))


def make_arm(name: str, setting: Setting, watch: Stopwatch) -> Arm:
    training = Training(setting, name, watch)
    return Arm(training.run_iteration, training.compute_results)
