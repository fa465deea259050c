"""What users do to a learner's pipeline, coefficients and methods has the effect that it has in RLlib."""

import logging
import re
from functools import partial

import numpy as np
import pytest
import torch

pytest.importorskip("ray.rllib")

import updates
from ray.rllib.algorithms.ppo.torch.ppo_torch_learner import PPOTorchLearner
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.connectors.learner import GeneralAdvantageEstimation
from ray.rllib.core.learner.learner import Learner
from ray.rllib.core.learner.training_data import TrainingData
from ray.rllib.examples.learners.classes.custom_ppo_loss_fn_learner import PPOTorchLearnerWithWeightRegularizerLoss
from recorded_graphs import allow_captures
from small import small_ppo, stopping
from updates import KINDS, assert_same_updates, assert_updates_of_rllib, build_learner, draw_episodes, make_config

from rl_triton_adapters.rllib import TritonGeneralAdvantageEstimation, TritonPPOTorchLearner, enable_triton

NAME = "GeneralAdvantageEstimation"


class OwnGAE(GeneralAdvantageEstimation):
    def __call__(self, **kwargs):
        batch = super().__call__(**kwargs)
        for columns in batch.values():
            columns["advantages"] = columns["advantages"].clamp(-0.5, 0.5)
        return batch


class Scaled(ConnectorV2):
    """Changes a column, as NumPy's array where that is asked for."""

    def __init__(self, column="rewards", as_array=False):
        super().__init__()
        self.column, self.as_array = column, as_array

    def __call__(self, *, batch, **kwargs):
        for columns in batch.values():
            scaled = 2 * columns[self.column]
            columns[self.column] = scaled.numpy() if self.as_array else scaled
        return batch


def remove(key, pipeline, own):
    pipeline.remove(key)
    pipeline.append(own)


def replace_instances(pipeline, own):
    pipeline.connectors = [own if isinstance(x, GeneralAdvantageEstimation) else x for x in pipeline.connectors]


def clear(pipeline, own):
    (piece,) = pipeline[GeneralAdvantageEstimation]
    pipeline.connectors.remove(piece)
    pipeline.append(own)


OWN = {
    "removed by name": partial(remove, NAME),
    "removed by class": partial(remove, GeneralAdvantageEstimation),
    "replaced by isinstance": replace_instances,
    "removed by itself": clear,
    "added behind": lambda pipeline, own: pipeline.append(own),
}
BESIDE = {
    "before, by name": lambda pipeline: pipeline.insert_before(NAME, Scaled()),
    "before, by class": lambda pipeline: pipeline.insert_before(GeneralAdvantageEstimation, Scaled()),
    "before, as an array": lambda pipeline: pipeline.insert_before(NAME, Scaled(as_array=True)),
    "after, by name": lambda pipeline: pipeline.insert_after(NAME, Scaled("advantages")),
    "after, by class": lambda pipeline: pipeline.insert_after(GeneralAdvantageEstimation, Scaled("advantages")),
    "discount": lambda pipeline: setattr(pipeline[GeneralAdvantageEstimation][0], "gamma", 0.3),
    "nothing": lambda pipeline: None,
}
CHANGES = {
    **{
        name: (lambda learner, f=f: f(learner._learner_connector, OwnGAE(gamma=0.9, lambda_=0.5)))
        for name, f in OWN.items()
    },
    **{name: (lambda learner, f=f: f(learner._learner_connector)) for name, f in BESIDE.items()},
}


def change_pipeline(name, learner_class, *mixed):
    """A learner class that changes the pipeline once it is built, mixed with another one as the page says."""

    class Theirs(learner_class):
        def build(self):
            super().build()
            CHANGES[name](self)

    return type("Mine", (Theirs, *mixed), {}) if mixed else Theirs


def list_pieces(learner):
    return [type(piece) for piece in learner._learner_connector.connectors]


def list_metrics(metrics, path=()):
    for name, x in metrics.items():
        yield from list_metrics(x, (*path, name)) if isinstance(x, dict) else [(*path, name)]


def update_once(learner):
    steps = {"num_env_steps_sampled_lifetime": 0}
    return Learner.update(learner, episodes=draw_episodes("categorical"), timesteps=steps, minibatch_size=50)


def read_metric(results):
    return results["__all_modules__"]["rl_triton"].peek()


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_pipeline_is_that_of_rllib(name):
    config = make_config("categorical")
    stock = build_learner(config.copy().learners(learner_class=change_pipeline(name, PPOTorchLearner)))
    mine = change_pipeline(name, PPOTorchLearner, TritonPPOTorchLearner)
    ours = build_learner(enable_triton(config.copy().learners(learner_class=mine)))
    assert list_pieces(ours) == list_pieces(stock)
    assert_same_updates(*(updates.update_learner(config, "categorical", learner=x) for x in (stock, ours)))
    assert list_pieces(ours) == list_pieces(stock)
    assert "; the fused loss of default_policy; " in ours.describe()
    assert f"computes advantages with {'OwnGAE' if name in OWN else 'rl_triton_core'}" in ours.describe()
    assert read_metric(update_once(ours)) == float(name not in OWN)


def test_a_pipeline_that_is_changed_while_training_is_that_of_rllib():
    config = make_config("categorical")
    stock, ours = build_learner(config), build_learner(enable_triton(config.copy()))
    for name in ("nothing", "before, by class", "removed by name"):
        for learner in (stock, ours):
            CHANGES[name](learner)
        assert_same_updates(*(updates.update_learner(config, "categorical", learner=x) for x in (stock, ours)))
        assert list_pieces(ours) == list_pieces(stock)


def test_metrics_have_the_names_of_rllib():
    config = make_config("categorical")
    stock, ours = (set(list_metrics(update_once(build_learner(x)))) for x in (config, enable_triton(config.copy())))
    assert ours == stock | {("__all_modules__", "rl_triton")}
    assert any("general_advantage_estimation" in name for name in stock)


def test_a_piece_of_ours_is_found_by_the_name_of_the_one_that_it_replaces():
    learner = build_learner(make_config("categorical"))
    pipeline = learner._learner_connector
    pipeline.remove(NAME)
    pipeline.append(TritonGeneralAdvantageEstimation(gamma=0.9, lambda_=0.5))
    assert any("general_advantage_estimation" in name for name in list_metrics(update_once(learner)))
    pipeline.remove(NAME)
    assert not pipeline[GeneralAdvantageEstimation]


def test_advantages_that_are_given_with_the_batch_are_none_of_ours():
    learner = build_learner(enable_triton(make_config("categorical")))
    assert read_metric(update_once(learner)) == 1
    batch = learner._make_batch_if_necessary(TrainingData(episodes=draw_episodes("categorical")))
    assert read_metric(learner.update(batch=batch, timesteps={})) == 0


def test_a_pipeline_without_advantages_is_described():
    config = enable_triton(make_config("categorical")).learners(
        learner_connector=lambda *spaces: [], add_default_connectors_to_learner_pipeline=False
    )
    learner = build_learner(config)
    assert "computes advantages without GeneralAdvantageEstimation, on cpu; the fused loss" in learner.describe()


def test_a_learner_with_advantages_of_its_own_may_train(small_ray, caplog):
    """Its algorithm is checked when it is built, and the line is logged then, once."""
    mine = change_pipeline("removed by name", PPOTorchLearner, TritonPPOTorchLearner)
    config = enable_triton(small_ppo().learners(learner_class=mine))
    with caplog.at_level(logging.INFO, logger="ray.rllib.rl_triton"), stopping(config.build_algo()) as algorithm:
        results = algorithm.train()["learners"]
    line, sampling = [record.message for record in caplog.records if record.name == "ray.rllib.rl_triton"]
    assert line.startswith("Mine computes advantages with OwnGAE, on cpu; the fused loss") and "connectors" in sampling
    assert results["__all_modules__"]["rl_triton"] == 0


PLAIN = {"float": 0.3, "int": 2, "NumPy's float": np.float32(0.3), "tensor of an int": torch.tensor(2)}


def set_coefficients(learner_class, value):
    """A learner class with a schedule of its own for the coefficients of KL divergence and entropy."""

    class Constant:
        def get_current_value(self):
            return value

        def update(self, timestep):
            return value

    class Theirs(learner_class):
        def build(self):
            super().build()
            self.entropy_coeff_schedulers_per_module[updates.POLICY] = Constant()

        def _update_module_kl_coeff(self, *, module_id, **kwargs):
            self.curr_kl_coeffs_per_module[module_id] = value

    return Theirs


@pytest.mark.parametrize("value", PLAIN.values(), ids=PLAIN)
@pytest.mark.parametrize("name", ["PPO", "APPO"])
def test_coefficients_may_be_plain_numbers(name, value, captured):
    theirs = set_coefficients(KINDS[name][0], value)
    kinds = theirs, type("Mine", (theirs, KINDS[name][1]), {})
    ours = assert_updates_of_rllib(make_config("categorical", name, use_kl_loss=True), "categorical", kinds, count=3)
    assert bool(ours.triton_update.find_step().captured) == captured


class PushedUp:
    """Gradients are changed where they are applied."""

    def apply_gradients(self, gradients_dict):
        super().apply_gradients({key: None if x is None else x + 0.1 for key, x in gradients_dict.items()})


@pytest.mark.parametrize("in_front", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_gradients_are_applied_as_a_mixed_class_does(name, in_front, monkeypatch):
    """Wherever it stands."""
    allow_captures(monkeypatch)
    stock, ours = KINDS[name]
    theirs, behind = (type(x, (PushedUp, stock), {}) for x in ("Theirs", "Behind"))
    mine = type("Mine", (PushedUp, ours) if in_front else (ours, behind), {})
    assert_updates_of_rllib(make_config("categorical", name), "categorical", (theirs, mine))


@pytest.mark.parametrize("in_front", [False, True])
@pytest.mark.parametrize("theirs", [updates.own_loss(PPOTorchLearner), PPOTorchLearnerWithWeightRegularizerLoss])
def test_a_loss_of_a_mixed_class_is_computed(theirs, in_front):
    """Wherever it stands, and be it one of RLlib's examples."""
    config = make_config("gaussian").learners(learner_config_dict={"regularizer_coeff": 0.1})
    mine = type("Mine", (theirs, TritonPPOTorchLearner) if in_front else (TritonPPOTorchLearner, theirs), {})
    ours = assert_updates_of_rllib(config, "gaussian", (theirs, mine))
    own = rf"; {theirs.__name__} has its own compute_loss_for_module \(.*?\), which may call "
    assert re.search(own, ours.describe())
