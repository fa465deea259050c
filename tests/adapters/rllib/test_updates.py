"""Updates of learners alone, with fused losses and optimizers and sliced minibatches: RLlib's weights and metrics."""

import types

import numpy as np
import pytest
import torch

pytest.importorskip("ray.rllib")

import ray
import updates
from overrides import derive
from ray.rllib.algorithms.ppo.torch.default_ppo_torch_rl_module import DefaultPPOTorchRLModule
from ray.rllib.core.distribution.torch.torch_distribution import TorchMultiCategorical
from ray.rllib.policy.sample_batch import MultiAgentBatch, SampleBatch
from ray.rllib.utils.minibatch_utils import MiniBatchCyclicIterator
from ray.rllib.utils.torch_utils import clip_gradients
from updates import POLICY, SPACES, OwnGaussian, build_learner, make_config, own_loss, own_metrics, update_learner

from rl_triton_adapters.common.optimizers import fuse_optimizer, is_fused
from rl_triton_adapters.rllib import TritonPPOTorchLearner, enable_triton, loss
from rl_triton_adapters.rllib.minibatches import can_slice_minibatches, slice_minibatches
from rl_triton_adapters.rllib.update import clip_gradients_at_once


class OwnModule(DefaultPPOTorchRLModule):
    def get_inference_action_dist_cls(self):
        return OwnGaussian


@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize("name", ["action_dist_cls", "get_train_action_dist_cls"])
def test_a_distribution_that_is_changed_after_an_update_counts(name):
    config, found = make_config("gaussian", entropy_coeff=0.05), []
    for chosen in (config, enable_triton(config.copy())):
        learner = build_learner(chosen)
        update_learner(config, "gaussian", 1, learner)
        setattr(learner.module[POLICY], name, OwnGaussian if name == "action_dist_cls" else lambda: OwnGaussian)
        found.append(update_learner(config, "gaussian", 2, learner))
        assert chosen is config or "; RLlib's loss of default_policy (" in learner.describe()
    updates.assert_same_updates(*found)


@pytest.mark.parametrize("make_own", [own_loss, own_metrics])
def test_methods_that_ray_wraps_are_not_a_learner_s_own(make_own):
    """In a class that it makes for a process of its own."""
    kind = ray.remote(make_own(TritonPPOTorchLearner)).__ray_metadata__.modified_class
    learner = build_learner(enable_triton(make_config("gaussian").learners(learner_class=kind)))
    assert ("Own has its own compute_loss_for_module" in learner.describe()) == (make_own is own_loss)
    assert learner.describe().endswith("updates are compiled") == (make_own is own_metrics)


def test_a_minibatch_of_padding_alone_has_the_metrics_of_rllib():
    """They are NaN; the loss is 0 in ours, so that weights are those of RLlib, which drops gradients that are NaN."""
    config, logged = make_config("gaussian"), []
    for learner in (build_learner(config), build_learner(enable_triton(config))):
        torch.manual_seed(0)
        scalars = ("action_logp", "advantages", "value_targets")
        batch = {"obs": torch.randn(5, 4), "actions": torch.randn(5, 2), "action_dist_inputs": torch.randn(5, 4)}
        batch |= {**dict(zip(scalars, torch.randn(3, 5), strict=True)), "loss_mask": torch.zeros(5, dtype=torch.bool)}
        batches = {POLICY: SampleBatch(batch)}
        losses = learner.compute_losses(fwd_out=learner.module.forward_train(batches), batch=batches)
        learner.after_gradient_based_update(timesteps={"num_env_steps_sampled_lifetime": 0})
        logged.append(updates.flatten_metrics(learner.metrics.stats))
    are_nan = [{name: np.isnan(x[name]) for name in logged[0]} for x in logged]
    assert are_nan[0] == are_nan[1]
    assert np.isnan(logged[1][POLICY, "entropy"]) and float(losses[POLICY]) == 0


OWN_LOGP = derive(TorchMultiCategorical, "logp")  # of another kind than its name says


@pytest.mark.parametrize(
    ("kind", "fused"),
    [
        (TorchMultiCategorical.get_partial_dist_cls(space=SPACES["several categorical"], input_lens=[2, 3]), True),
        (TorchMultiCategorical.get_partial_dist_cls(space=SPACES["several categorical"], input_lens=[3, 2]), False),
        (OWN_LOGP.get_partial_dist_cls(space=SPACES["several categorical"], input_lens=[2, 3]), False),
        (TorchMultiCategorical, False),
    ],
    ids=["own sizes", "other sizes", "other class", "no sizes"],
)
def test_several_categoricals_are_rllibs_own(kind, fused):
    module = types.SimpleNamespace(action_space=SPACES["several categorical"])
    module.get_inference_action_dist_cls = module.get_train_action_dist_cls = lambda: kind
    module.get_exploration_action_dist_cls = lambda: kind
    assert (loss.describe_head(module) is not None) == fused
    assert loss.name_distribution(kind) == "TorchMultiCategorical"


def draw_minibatches(iterator_class, counts, **options):
    """All minibatches of batches of so many rows, and how far the random state has gone."""
    batches = {
        name: SampleBatch({"obs": {"x": torch.arange(2 * n).view(n, 2)}, "row": torch.arange(n)})
        for name, n in counts.items()
    }
    np.random.seed(1)  # noqa: NPY002
    iterator = MiniBatchCyclicIterator(MultiAgentBatch(batches, env_steps=sum(counts.values())), **options)
    if iterator_class is slice_minibatches:
        assert can_slice_minibatches(iterator)
        iterator = slice_minibatches(iterator)
    found = [(x.env_steps(), {name: dict(batch) for name, batch in x.policy_batches.items()}) for x in iterator]
    return found, np.random.random()  # noqa: NPY002


@pytest.mark.parametrize("minibatch_size", [1, 5, 7, 10, 23])
@pytest.mark.parametrize(
    "options",
    [
        {"num_epochs": 3},
        {"num_epochs": 2, "shuffle_batch_per_epoch": False},
        {"num_epochs": 1, "num_total_minibatches": 9},
    ],
    ids=["shuffled", "in-order", "given-number"],
)
def test_minibatches_are_those_of_rllib(minibatch_size, options):
    counts, options = {"a": 10, "b": 7}, {"minibatch_size": minibatch_size, **options}
    stock = draw_minibatches(MiniBatchCyclicIterator, counts, **options)
    ours = draw_minibatches(slice_minibatches, counts, **options)
    torch.testing.assert_close(ours[0], stock[0], rtol=0, atol=0)
    assert ours[1] == stock[1]


@pytest.mark.parametrize("share", [False, True])
def test_minibatches_are_copies_unless_they_may_be_shared(share):
    batch = MultiAgentBatch({"a": SampleBatch({"row": torch.arange(6)})}, env_steps=6)
    minibatches = iter(slice_minibatches(MiniBatchCyclicIterator(batch, minibatch_size=2, num_epochs=1), lambda: share))
    before = batch.policy_batches["a"]["row"].clone()
    next(minibatches).policy_batches["a"]["row"].zero_()
    assert torch.equal(batch.policy_batches["a"]["row"].sort().values, before.sort().values) != share


@pytest.mark.parametrize("column", [np.arange(4), torch.arange(3)], ids=["array", "other-length"])
def test_other_columns_keep_the_iterator_of_rllib(column):
    batch = MultiAgentBatch({"a": SampleBatch({"row": torch.arange(4), "other": column})}, env_steps=4)
    assert not can_slice_minibatches(MiniBatchCyclicIterator(batch, minibatch_size=2))


@pytest.mark.parametrize("by", ["global_norm", "norm", "value"])
@pytest.mark.parametrize("clip", [None, 0.1, 40.0])
@pytest.mark.parametrize("value", [0.0, 0.5, np.nan, np.inf])
def test_gradients_are_clipped_as_rllib_does(by, clip, value):
    found = []
    for function in (clip_gradients, clip_gradients_at_once):
        rng = np.random.default_rng(0)
        gradients = {i: torch.from_numpy(rng.standard_normal(shape)) for i, shape in enumerate([(3,), (2, 4), (1,)])}
        gradients |= {"other": torch.tensor([value], dtype=torch.float64), "none": None}
        found.append((function(gradients, grad_clip=clip, grad_clip_by=by), gradients))
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=0, equal_nan=True)


@pytest.mark.parametrize("choice", [{"foreach": True}, {"fused": True}, {"differentiable": True}])
def test_an_optimizer_that_was_told_how_to_step_is_left_alone(choice):
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(2))], **choice)
    fuse_optimizer(optimizer)
    assert not is_fused(optimizer)
    assert [optimizer.param_groups[0][name] for name in choice] == [True]
