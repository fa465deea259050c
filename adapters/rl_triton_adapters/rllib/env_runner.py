"""RLlib's env runner for one agent, with what its default connectors do to every step in a few lines."""

# mypy: allow-subclassing-any

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from itertools import chain
from types import MethodType
from typing import Any

import numpy as np
import torch
import tree
from gymnasium.spaces import Box
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.connectors.env_to_module import EnvToModulePipeline
from ray.rllib.connectors.module_to_env import ModuleToEnvPipeline, NormalizeAndClipActions
from ray.rllib.core.columns import Columns
from ray.rllib.core.distribution.torch.torch_distribution import TorchCategorical, TorchDeterministic, TorchDiagGaussian
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModule
from ray.rllib.env import single_agent_env_runner
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
from ray.rllib.utils.metrics import ENV_TO_MODULE_SUM_EPISODES_LENGTH_IN, ENV_TO_MODULE_SUM_EPISODES_LENGTH_OUT
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger
from ray.rllib.utils.metrics.stats import EmaStats
from ray.rllib.utils.spaces.space_utils import clip_action, unbatch, unsquash_action
from torch import Tensor
from torch.distributions import Categorical, Normal

from rl_triton_adapters.common.overrides import HOOKS, HOOKS_OF_ALL, find_own, find_replaced, list_modules
from rl_triton_adapters.common.update import find_reason
from rl_triton_adapters.rllib.check import read_flags
from rl_triton_adapters.rllib.compiled import PACKAGES, find_unlike, list_networks
from rl_triton_adapters.rllib.update import logger
from rl_triton_core.capture import Snapshot
from rl_triton_core.reach import copy_function, find_override

PIPELINES = EnvToModulePipeline, ModuleToEnvPipeline
DISTRIBUTIONS = TorchCategorical, TorchDiagGaussian
LENGTHS = ENV_TO_MODULE_SUM_EPISODES_LENGTH_IN, ENV_TO_MODULE_SUM_EPISODES_LENGTH_OUT  # averages of every step
BEHIND = "_sample", "_try_env_step", "_log_env_steps"  # what does less than RLlib's
MANY, SERIAL = 2**22, 2**15  # products in the largest layer, numbers summed: above, PyTorch's threads work


def call_own(self: Any, **given: Any) -> Any:
    """The call of a pipeline while a sample is made: ours, of RLlib's call and what this is given."""
    return vars(self)["own_call"](super(type(self), self).__call__, given)


SHORT = [type(x.__name__, (x,), {"__call__": call_own, "__module__": x.__module__}) for x in PIPELINES]


class TritonSingleAgentEnvRunner(SingleAgentEnvRunner):
    """Samples what RLlib's env runner samples: the same actions and log-probabilities from the same random numbers.

    Both RLlib's connectors and ours make the first step of each sample, of which RLlib's counts, and logs its metrics;
    if they agree, ours make the others.
    """

    reason = "nothing is sampled yet"
    """Why RLlib's connectors make all steps; empty if they do not."""
    _num_tried: int | None = None  # steps that Ray's counter is told of at the end of a sample; None outside of one

    def __init__(self, *, config: Any, **kwargs: Any) -> None:
        super().__init__(config=config, **kwargs)
        flags = read_flags(config.learner_config_dict)
        self._is_wanted, self._said = flags.rl_triton and flags.rl_triton_update, ""
        self._default, plain, given = list[Any](), AlgorithmConfig(), {"env": self.env, "spaces": self.spaces}
        with suppress(Exception):  # of spaces that only a user's connectors take
            default = plain.build_env_to_module_connector(**given), plain.build_module_to_env_connector(**given)
            self._default += [(type(x), *map(type, x.connectors)) for x in default]

    def describe(self) -> str:
        """Say by whose connectors steps are made, and why."""
        return "connectors are " + (f"RLlib's own: {self.reason}" if self.reason else "those of rl_triton_adapters")

    def _sample(self, *, explore: bool, random_actions: bool = False, **options: Any) -> Any:
        """Sample, as RLlib does."""
        pipelines, module = (self._env_to_module, self._module_to_env), self.module
        self._explores, self._kind, parts = explore, self._find_kind(explore), list[Any]()
        self._is_small, self._is_fresh, make_sample = True, False, super()._sample
        self.reason = "actions are random" if random_actions else self._find_obstacle()
        self._untried, own = {self.forward, self.observe, self.choose_actions}, getattr(module, "__dict__", {})
        name = "forward_exploration" if explore else "forward_inference"
        if not (self.reason or name in own or find_unlike(module, name, "_forward")):
            (encoder, pi), parts = list_networks(module)[:2], list_modules(module)
            head = [pi] if pi.clip_log_std or hasattr(pi, "log_std") else pi.net.mlp
            self._layers, self._stock_forward = [x.forward for x in (*encoder.net.mlp, *head)], getattr(module, name)
            weights = max(x.numel() for x in chain(*(x.parameters() for x in (encoder, pi))))
            self._is_small, own[name] = weights * self.num_envs <= MANY, self._forward
        places = [HOOKS_OF_ALL, *((x._modules, *map(vars(x).get, HOOKS)) for x in parts)]
        try:
            for pipeline, kind, call in zip(pipelines, SHORT, (self._observe, self._act), strict=True):
                if not self.reason:
                    vars(pipeline)["own_call"] = call
                    pipeline.__class__ = kind
            if not self.reason:
                self._num_tried = 0
                make_sample = MethodType(copy_function(make_sample.__func__, {"unbatch": list_rows}), self)
            pieces = [y for x in pipelines for y in (vars(x), x.connectors)]
            self._snapshot = Snapshot([*pieces, *chain(*places)], [], [])
            return make_sample(explore=explore, random_actions=random_actions, **options)
        finally:
            tried, self._num_tried = self._num_tried, None
            if own.get(name) == self._forward:
                del own[name]
            for pipeline, short, kind in zip(pipelines, SHORT, PIPELINES, strict=True):
                pipeline.__class__ = kind if type(pipeline) is short else type(pipeline)
                vars(pipeline).pop("own_call", None)
            if tried:
                super()._log_env_steps(self._metrics_num_try_env_step, tried)
            if self.describe() != self._said:
                self._said = self.describe()
                logger.info("%s", self._said)

    def _find_kind(self, explore: bool) -> Any:
        """The module's distribution of actions; None if it has none."""
        with suppress(Exception):  # modules raise any that have none
            module: Any = self.module
            return (module.get_exploration_action_dist_cls if explore else module.get_inference_action_dist_cls)()

    def _find_obstacle(self) -> str:
        """Why RLlib's connectors make all steps, as far as can be told before the first; empty if none is known."""
        pipelines, module = (self._env_to_module, self._module_to_env), self.module
        kinds = [(type(x), *map(type, x.connectors)) for x in pipelines]
        reasons = {
            "switched off": not self._is_wanted,
            "these are not RLlib's default connectors": kinds != self._default,
            "there are several modules, or one with states": isinstance(module, MultiRLModule) or module.is_stateful(),
            f"modules are on {self._device}": str(self._device) != "cpu",
            f"metrics are logged by {type(self.metrics).__name__}": type(self.metrics) is not MetricsLogger
            or "log_value" in vars(self.metrics),
            "unbatch is not RLlib's": getattr(single_agent_env_runner, "unbatch", None) is not unbatch,
            f"actions have a {getattr(self._kind, '__name__', self._kind)}": self._kind not in DISTRIBUTIONS,
        }
        pieces = [y for x in pipelines for y in x.connectors]
        functions = [*(type(x).__call__ for x in pieces), *(x.from_logits for x in DISTRIBUTIONS)]
        reason = find_reason(reasons) or find_own([*pipelines, *pieces], functions, PACKAGES)
        reason = reason or find_override(self, BEHIND, PACKAGES, behind=TritonSingleAgentEnvRunner)
        things = *pipelines, *pieces, *DISTRIBUTIONS, TorchDeterministic, Categorical, Normal, MetricsLogger, EmaStats
        return reason or find_replaced([*functions, MetricsLogger.log_value], things, PACKAGES)

    # -- what takes less time at every step ----------------------------------------------------------------------------

    def _log_env_steps(self, metric: Any, num_steps: int) -> None:
        """RLlib's; of steps that were tried, Ray's counter is told once."""
        if self._num_tried is None or metric is not self._metrics_num_try_env_step:
            super()._log_env_steps(metric, num_steps)
        else:
            self._num_tried += num_steps

    # -- what the module and connectors do -----------------------------------------------------------------------------

    def _forward(self, batch: dict[str, Tensor], **kwargs: Any) -> Any:
        """What the module returns."""
        return self._call(self.forward, self._stock_forward, {"batch": batch, **kwargs}, batch[Columns.OBS])

    @torch.no_grad()
    def forward(self, features: Tensor) -> dict[str, Tensor]:
        """What a module returns whose layers are known."""
        for layer in self._layers:
            features = layer(features)
        return {Columns.ACTION_DIST_INPUTS: features}

    def _observe(self, stock: Callable[..., Any], given: dict[str, Any]) -> Any:
        """What a module takes, and what RLlib logs and keeps of it."""
        episodes, is_tried = given["episodes"], self.observe not in self._untried
        results = self._call(self.observe, stock, given, episodes)
        if is_tried and not self.reason:
            length = sum(map(len, episodes))
            for name in LENGTHS:
                average = self.metrics.stats.get(name)
                old: Any = average._value if type(average) is EmaStats else math.nan
                if math.isnan(old):  # a callback has reset them
                    self.metrics.log_value(name, length)
                else:
                    average._value = average._ema_coeff * length + (1.0 - average._ema_coeff) * old
            given["shared_data"]["memorized_map_structure"] = [x.id_ for x in episodes]
        return results

    def observe(self, episodes: list[Any]) -> dict[str, Tensor]:
        """What a module takes: the last observations of episodes, [num_envs, ...]."""
        batch = torch.from_numpy(np.array([x.observations.data[-1] for x in episodes]))
        return {Columns.OBS: batch.float() if batch.is_floating_point() and batch.dtype != torch.float16 else batch}

    def _act(self, stock: Callable[..., Any], given: dict[str, Any]) -> Any:
        """What episodes keep of a step, and what the environments take."""
        inputs = given["batch"].get(Columns.ACTION_DIST_INPUTS)
        is_known = len(given["batch"]) == 1 and self._find_kind(self._explores) is self._kind
        if not (is_known and isinstance(inputs, Tensor) and math.isfinite(inputs.sum())):
            return stock(**given)
        return self._call(self.choose_actions, stock, given, inputs)

    def choose_actions(self, inputs: Tensor) -> dict[str, Any]:
        """Actions [num_envs, ...] and rows of what belongs to each, drawn as torch.distributions draws them."""
        inputs = inputs.detach()
        if self._kind is TorchCategorical:
            largest = inputs.amax(-1, True)  # `logsumexp` and `multinomial` also look for what is not finite
            logits = inputs - (inputs - largest).exp_().sum(-1, True).log_().add_(largest)
            probs, numbers = logits.softmax(-1), torch.empty_like(logits)
            actions = (probs.numpy() / numbers.exponential_().numpy() if self._explores else inputs.numpy()).argmax(-1)
            log_probs = logits.numpy()[np.arange(len(actions)), actions]
        else:
            mean, log_std = inputs.chunk(2, dim=-1)
            distribution = Normal(mean, log_std.exp())
            drawn = distribution.sample() if self._explores else mean  # type: ignore[no-untyped-call]
            actions, log_probs = drawn.numpy(), distribution.log_prob(drawn).sum(-1).numpy()  # type: ignore[no-untyped-call]
        actions = actions.astype(np.float32 if actions.dtype.kind == "f" else np.int32)  # a copy, as those below
        results = {
            Columns.ACTIONS: actions,
            Columns.ACTION_LOGP: [*(log_probs.astype(np.float32) if self._explores else np.zeros_like(actions))],
            Columns.ACTION_DIST_INPUTS: [*inputs.numpy().astype(np.float32)],
        }
        piece: Any = next(x for x in self._module_to_env.connectors if isinstance(x, NormalizeAndClipActions))
        if piece.normalize_actions or piece.clip_actions:
            change, space = unsquash_action if piece.normalize_actions else clip_action, piece._action_space_struct
            results[Columns.ACTIONS_FOR_ENV] = change(actions.copy(), space) if isinstance(space, Box) else actions
        return results

    def _call(self, ours: Callable[[Any], Any], stock: Callable[..., Any], given: Any, taken: Any) -> Any:
        """What one of ours returns, if it has agreed with RLlib's connectors, and no callback has changed any since.

        Else what those return; whether ours return the same, from the same random numbers, counts later.
        """
        is_fresh = self._is_fresh and ours == self.choose_actions  # nothing of a user's runs since the forward pass
        if not (self.reason or is_fresh or self._snapshot.holds()):
            self.reason = "connectors or the module have changed while a sample was made"
        if not self.reason and ours not in self._untried:
            self._is_fresh = ours == self.forward
            return self._run(ours, taken)
        before, results, drawn = torch.get_rng_state(), stock(**given), torch.get_rng_state()
        if not self.reason:
            self._untried.discard(ours)
            agrees = False
            torch.set_rng_state(before)
            with suppress(Exception):  # what ours cannot do is RLlib's
                agrees = is_same(results, self._run(ours, taken)) and torch.equal(torch.get_rng_state(), drawn)
            torch.set_rng_state(drawn)
            self.reason = "" if agrees else f"RLlib's connectors return something else than {ours.__name__}"
        return results

    def _run(self, ours: Callable[[Any], Any], taken: Any) -> Any:
        """What one of ours returns, small ones by one thread: others take longer to wake, also for `softmax`."""
        threads, numbers = torch.get_num_threads(), taken.numel() if isinstance(taken, Tensor) else 0
        torch.set_num_threads(1 if self._is_small and numbers < SERIAL else threads)
        try:
            return ours(taken)
        finally:
            torch.set_num_threads(threads)


def list_rows(batch: Any) -> Any:
    """The rows of an array, as RLlib's `unbatch` lists them; what that lists of anything else."""
    return [*batch] if type(batch) is np.ndarray else unbatch(batch)


def is_same(x: Any, y: Any) -> bool:
    """Whether two results are the same to the last bit; an error if they have other containers."""
    tree.assert_same_structure(x, y)
    pairs = [[(z, np.asarray(z)) for z in tree.flatten(results)] for results in (x, y)]
    described = [[(type(z), array.dtype, array.shape, array.tobytes()) for z, array in own] for own in pairs]
    return described[0] == described[1]
