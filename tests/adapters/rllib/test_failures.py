"""Updates that end early: nothing of a learner stays replaced, also while the error is kept, and learning goes on."""

import numpy as np
import pytest

pytest.importorskip("ray.rllib")

from ray.rllib.algorithms.ppo.torch.ppo_torch_learner import PPOTorchLearner
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.core.learner.training_data import TrainingData
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger
from recorded_graphs import allow_captures
from updates import KINDS, WITH_VTRACE, assert_same_updates, build_learner, draw_episodes, make_config, update_learner

from rl_triton_adapters.common.optimizers import is_fused
from rl_triton_adapters.rllib import TritonPPOTorchLearner, enable_triton

WAYS = {
    "a step": ("postprocess_gradients", FloatingPointError),
    "between steps": ("_log_steps_trained_metrics", KeyboardInterrupt),
    "behind steps": ("after_gradient_based_update", FloatingPointError),
}


def fail_once(base, name, error, at=2):
    """A learner class whose method fails the second time that it is called."""

    def call(self, *args, **kwargs):
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls == at:
            raise error("a check of the user's")
        return getattr(base, name)(self, *args, **kwargs)

    return type("Mine", (base,), {name: call})


def make_data(seed):
    """Arguments of a learner's update."""
    timesteps = dict.fromkeys(("num_env_steps_sampled_lifetime", "num_env_steps_trained_lifetime"), 100)
    return {"training_data": TrainingData(episodes=draw_episodes("categorical", seed=seed)), "timesteps": timesteps}


def assert_nothing_is_replaced(learner):
    assert type(learner.metrics) is MetricsLogger
    assert not any(map(is_fused, learner._named_optimizers.values())) or learner.triton_update.captured.is_captured


@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize("way", WAYS)
def test_an_update_that_fails(way):
    config, found, kept = make_config("categorical"), [], []
    for base in (PPOTorchLearner, TritonPPOTorchLearner):
        name, error = WAYS[way]
        chosen = config.copy().learners(learner_class=fail_once(base, name, error, 2 - (way == "behind steps")))
        learner = build_learner(chosen if base is PPOTorchLearner else enable_triton(chosen))
        np.random.seed(1)  # noqa: NPY002
        with pytest.raises(error) as raised:
            learner.update(**make_data(7), minibatch_size=32, num_epochs=2)
        kept.append(raised.value)  # with its traceback, as loggers and debuggers do
        if base is TritonPPOTorchLearner:
            assert_nothing_is_replaced(learner)
        found.append(update_learner(config, "categorical", learner=learner))
    assert_same_updates(*found)


class Fails(ConnectorV2):
    def __call__(self, *args, **kwargs):
        raise KeyboardInterrupt


def test_a_pipeline_that_fails():
    learner = build_learner(enable_triton(make_config("categorical")))
    pieces = learner._learner_connector.connectors
    pieces.append(Fails())
    before = [*pieces]
    with pytest.raises(KeyboardInterrupt):
        learner.update(**make_data(7), minibatch_size=32, num_epochs=2)
    assert all(x is y for x, y in zip(pieces, before, strict=True))
    assert_nothing_is_replaced(learner)


def test_a_step_that_is_interrupted_as_it_is_captured(monkeypatch):
    allow_captures(monkeypatch)
    learner = build_learner(enable_triton(make_config("categorical")))
    before = {**vars(learner)}
    monkeypatch.setattr(learner.triton_update, "update_modules", Fails())
    with pytest.raises(KeyboardInterrupt):
        update_learner(make_config("categorical"), "categorical", 1, learner)
    for name in ("metrics", "entropy_coeff_schedulers_per_module", "curr_kl_coeffs_per_module"):
        assert vars(learner)[name] is before[name]


def test_an_iterator_that_is_closed():
    learner = build_learner(enable_triton(make_config("gaussian", use_critic=False)))
    data = TrainingData(episodes=draw_episodes("gaussian"))
    minibatches = learner._create_iterator_if_necessary(training_data=data, num_epochs=2, minibatch_size=32)
    next(minibatches)
    assert type(learner.metrics) is not MetricsLogger and any(map(is_fused, learner._named_optimizers.values()))
    minibatches.close()
    assert_nothing_is_replaced(learner)


@pytest.mark.parametrize("name", WITH_VTRACE)
def test_an_update_that_fails_in_a_thread(name, small_ray):
    """RLlib waits for its thread for good; ours raises what was raised there, and goes on with the next update."""
    kind = fail_once(KINDS[name][1], "compute_losses", FloatingPointError)
    learner = build_learner(enable_triton(make_config("categorical", name).learners(learner_class=kind)))
    learner.update(**make_data(0))
    with pytest.raises(FloatingPointError, match="a check of the user's"):
        learner.update(**make_data(1))
    assert_nothing_is_replaced(learner)
    results = learner.update(**make_data(2))
    assert np.isfinite(results["default_policy"]["total_loss"].peek()) and learner._learner_thread.is_alive()
