"""Updates of APPO's learner with the fused loss: RLlib's weights and metrics."""

import pytest
import torch

pytest.importorskip("ray.rllib")

import updates
from ray.rllib.algorithms.appo import APPOConfig
from ray.rllib.core.learner.learner import Learner
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.policy.sample_batch import MultiAgentBatch, SampleBatch
from updates import POLICY, assert_same_updates, build_learner, draw_episodes, make_config, update_learner

from rl_triton_adapters.rllib import enable_triton
from rl_triton_adapters.rllib.loss import compute_masked_mean, restore_layout

FAR = {"updates": 5, "spread": 1.0}
"""Some updates on the experience of a policy so far away that importance ratios are clipped, above and below."""
LSTM = DefaultModelConfig(fcnet_hiddens=[8], use_lstm=True, lstm_cell_size=4, max_seq_len=7)


@pytest.mark.parametrize(
    ("space", "options"),
    [
        ("categorical", {"entropy_coeff": [[0, 0.1], [100, 0.01]], "lr": [[0, 1e-2], [100, 1e-3]]}),
        ("gaussian", {"use_kl_loss": True, "kl_coeff": 1.0, "kl_target": 1e-4, "tau": 0.5}),
        ("several categorical", {"use_kl_loss": True, "num_epochs": 2, "minibatch_size": 40}),
        ("categorical", {"use_kl_loss": True, "model": LSTM, "grad_clip": None}),
        ("gaussian", {"vtrace_clip_rho_threshold": 2.0, "vtrace_clip_pg_rho_threshold": None, "grad_clip_by": "norm"}),
    ],
    ids=["categorical-schedules", "gaussian-kl", "several-categorical-minibatches", "lstm", "gaussian-thresholds"],
)
def test_updates_are_those_of_rllib(space, options):
    config = make_config(space, "APPO", **options)
    stock = update_learner(config, space, learner=build_learner(config), **FAR)
    learner = build_learner(enable_triton(config))
    assert "; the fused loss of default_policy; " in learner.describe()
    assert_same_updates(stock, update_learner(config, space, learner=learner, **FAR))
    ratios = [metrics[POLICY, "mean_IS"] for metrics in stock[0]]
    assert 0.1 < min(ratios) < max(ratios) < 1.9  # some are clipped, others are not
    assert stock[0][-1][POLICY, "num_target_updates"] > 0
    assert (max(x[POLICY, "mean_kl_loss"] for x in stock[0]) > 1e-5) == bool(options.get("use_kl_loss"))


def test_modules_have_losses_and_coefficients_of_their_own():
    config = make_config("gaussian", "APPO", use_kl_loss=True, kl_target=1e-4)
    single = build_learner(config)
    batches = {}
    for seed, name in enumerate("ab"):
        episodes = draw_episodes("gaussian", seed=seed)
        columns = single._learner_connector(rl_module=single.module, batch={}, episodes=episodes, shared_data={})
        batches[name] = SampleBatch(columns[POLICY])
    overrides = {"b": APPOConfig.overrides(use_kl_loss=False, clip_param=0.05, entropy_coeff=0.3)}
    config.multi_agent(policies={"a", "b"}, algorithm_config_overrides_per_module=overrides)

    def update_both(config):
        learner = build_learner(config)
        found = [Learner.update(learner, batch=MultiAgentBatch(batches, 99), timesteps={}) for _ in range(3)]
        weights = {(name, key): x for name, state in learner.module.get_state().items() for key, x in state.items()}
        return [updates.flatten_metrics(results) for results in found], weights, None

    stock = update_both(config)
    assert stock[0][-1]["a", "mean_kl_loss"] > 0 == stock[0][-1]["b", "mean_kl_loss"]
    assert_same_updates(stock, update_both(enable_triton(config)))


def test_what_stands_in_masked_slots_is_not_read():
    x = torch.tensor([1.0, torch.nan, 3.0])
    assert compute_masked_mean(x, torch.tensor([True, False, True])) == 2


def test_the_layout_is_restored_without_the_padding():
    rows = torch.arange(6.0).view(2, 3)
    assert restore_layout(rows.T, torch.Size([5])).tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(restore_layout(rows.T, rows.shape), rows)
