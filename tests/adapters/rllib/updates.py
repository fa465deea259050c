"""Updates of a learner alone, and what they are compared by."""

import gymnasium as gym
import numpy as np
import ray
import torch
from ray.rllib.algorithms.appo import APPOConfig
from ray.rllib.algorithms.appo.torch.appo_torch_learner import APPOTorchLearner
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.algorithms.impala.torch.impala_torch_learner import IMPALATorchLearner
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.algorithms.ppo.torch.ppo_torch_learner import PPOTorchLearner
from ray.rllib.core.distribution.torch.torch_distribution import TorchDiagGaussian
from ray.rllib.core.learner.learner import Learner
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from rl_triton_adapters import rllib
from rl_triton_adapters.rllib import TritonAPPOTorchLearner, TritonIMPALATorchLearner, TritonPPOTorchLearner

POLICY = "default_policy"
SPACES = {
    "categorical": gym.spaces.Discrete(3),
    "gaussian": gym.spaces.Box(-1.0, 1.0, (2,)),
    "several categorical": gym.spaces.MultiDiscrete([2, 3]),
}
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}  # of float32 sums in another order, after a dozen steps of Adam
KINDS = {
    "PPO": (PPOTorchLearner, TritonPPOTorchLearner),
    "IMPALA": (IMPALATorchLearner, TritonIMPALATorchLearner),
    "APPO": (APPOTorchLearner, TritonAPPOTorchLearner),
}
WITH_VTRACE = ("IMPALA", "APPO")
CONFIGS = {"PPO": PPOConfig, "IMPALA": IMPALAConfig, "APPO": APPOConfig}
OPTIONS = {  # APPO's target network lags one or two updates
    "PPO": {
        **{"train_batch_size_per_learner": 100, "minibatch_size": 32, "num_epochs": 3, "lr": 3e-3},
        **{"vf_clip_param": 1.5, "vf_loss_coeff": 0.7, "kl_coeff": 0.3, "grad_clip": 0.5},
    },
    "IMPALA": {"train_batch_size_per_learner": 100, "grad_clip": 0.5},
    "APPO": {
        **{"train_batch_size_per_learner": 100, "lr": 3e-3, "vf_loss_coeff": 0.7, "grad_clip": 0.5, "clip_param": 0.2},
        **{"circular_buffer_num_batches": 1, "circular_buffer_iterations_per_batch": 1},
        "target_network_update_freq": 2,
    },
}
LEARNERS = []  # their threads end with the test


def make_config(space, name="PPO", model=None, **options):
    """A config of a small learner. With V-Trace, the last row of its batches is padded."""
    config = CONFIGS[name]().environment(
        observation_space=gym.spaces.Box(-np.inf, np.inf, (4,)), action_space=SPACES[space]
    )
    config.rl_module(model_config=model or DefaultModelConfig(fcnet_hiddens=[8]))
    if name in WITH_VTRACE:
        config.env_runners(rollout_fragment_length=8)
    return config.learners(num_learners=0).training(**{**OPTIONS[name], **options}).debugging(seed=0)


def build_learner(config):
    """A learner with weights that depend on nothing else."""
    if config.num_gpus_per_learner and not ray.is_initialized():  # RLlib would begin one with a process for each core
        ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    torch.manual_seed(0)
    LEARNERS.append(config.build_learner(env=gym.make(config.env) if isinstance(config.env, str) else None))
    return LEARNERS[-1]


def draw_episodes(space, lengths=(30, 40, 29), seed=0, spread=0.3):
    """Random experience: extra model outputs as an env runner sends them, those of a policy that is so far apart."""
    rng = np.random.default_rng(seed)
    num_inputs = {"categorical": 3, "gaussian": 4, "several categorical": 5}[space]
    SPACES[space].seed(seed)
    return [
        SingleAgentEpisode(
            observations=list(rng.standard_normal((length + 1, 4)).astype(np.float32)),
            actions=[SPACES[space].sample() for _ in range(length)],
            rewards=list(rng.standard_normal(length)),
            terminated=bool(i % 2),
            len_lookback_buffer=0,
            extra_model_outputs={
                "action_logp": list(rng.normal(-1.5, spread, length).astype(np.float32)),
                "action_dist_inputs": list(rng.normal(0, spread, (length, num_inputs)).astype(np.float32)),
                "weights_seq_no": [i] * length,
            },
        ).to_numpy()
        for i, length in enumerate(lengths)
    ]


def flatten_metrics(results, path=()):
    """Values of nested metrics by their paths, but for what measures time."""
    found = {}
    for name, x in results.items():
        if isinstance(x, dict):
            found |= flatten_metrics(x, (*path, name))
        elif "timer" not in name and "rl_triton" not in name and "connector" not in path:
            found[(*path, name)] = float(x.peek())
    return found


def update_learner(config, space, updates=2, learner=None, **options):
    """The metrics of each update, the last weights, and a number, on the same episodes and draws."""
    learner = learner or build_learner(config)
    np.random.seed(0)  # noqa: NPY002
    metrics = []
    for i in range(updates):
        results = Learner.update(  # that of IMPALA and APPO leaves it to a thread
            learner,
            episodes=draw_episodes(space, seed=i, **options),
            timesteps=dict.fromkeys(("num_env_steps_sampled_lifetime", "num_env_steps_trained_lifetime"), 100 * i),
            minibatch_size=config.minibatch_size,
            num_epochs=config.num_epochs,
            shuffle_batch_per_epoch=True,
        )
        metrics.append({k: v for k, v in flatten_metrics(results).items() if "learner_connector" not in k})
    return metrics, learner.module[POLICY].get_state(), np.random.random()  # noqa: NPY002


def assert_updates_of_rllib(config, space, kinds=(), says="", count=2, update=update_learner, **tolerance):
    """Updates of RLlib's learner and of ours, or of learners of these two kinds, are the same; returns ours."""
    configs = [config.copy(copy_frozen=False) for _ in range(2)]
    for chosen, kind in zip(configs, kinds, strict=False):
        chosen.learners(learner_class=kind)
    stock, ours = build_learner(configs[0]), build_learner(rllib.enable_triton(configs[1]))
    assert says in ours.describe()
    assert_same_updates(*(update(config, space, count, x) for x in (stock, ours)), **tolerance)
    return ours


def assert_same_updates(stock, ours, **tolerance):
    """The same names and values of metrics, the same weights, the same number of draws."""
    tolerance = {**TOLERANCE, **tolerance}
    for want, got in zip(stock[0], ours[0], strict=True):
        assert set(got) == set(want)
        for name, value in want.items():
            np.testing.assert_allclose(got[name], value, **tolerance, err_msg=str(name))
    for name, weight in stock[1].items():
        np.testing.assert_allclose(ours[1][name], weight, **tolerance, err_msg=str(name))
    assert ours[2] == stock[2]


class OwnGaussian(TorchDiagGaussian):
    def entropy(self):
        return 2 * super().entropy()


def own_loss(learner_class):
    """A learner class with a term of its own beside the loss."""

    class Own(learner_class):
        def compute_loss_for_module(self, *, fwd_out, **kwargs):
            loss = super().compute_loss_for_module(fwd_out=fwd_out, **kwargs)
            return loss + 0.1 * fwd_out["action_dist_inputs"].square().mean()

    return Own


def own_metrics(learner_class):
    """A learner class that reads what the last loss has logged, once an update is through."""

    class Own(learner_class):
        def after_gradient_based_update(self, **kwargs):
            self.metrics.log_value((POLICY, "entropy_seen"), float(self.metrics.peek((POLICY, "entropy"))), window=1)
            super().after_gradient_based_update(**kwargs)

    return Own


def count_calls(monkeypatch, owner, name):
    """A list that grows with every call of a method."""
    calls, method = [], getattr(owner, name)

    def counted(*args, **kwargs):
        calls.append(name)
        return method(*args, **kwargs)

    monkeypatch.setattr(owner, name, counted)
    return calls


def describe_captures(learner):
    """Why its steps are not captured, if they are not, and how many shapes of batches have graphs."""
    step = learner.triton_update.find_step()
    return {"reason": step.reason, "graphs": len(step.captured), "warned": sorted(step.warned)}
