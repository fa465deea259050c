"""Algorithms by name, from dicts and files, with Ray Tune; and the switch of all adapters."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("ray.rllib")

from ray.rllib.algorithms.impala.torch.vtrace_torch_v2 import vtrace_torch
from ray.rllib.algorithms.ppo import PPO, PPOConfig
from ray.rllib.algorithms.ppo.torch.ppo_torch_learner import PPOTorchLearner
from ray.rllib.connectors.learner import GeneralAdvantageEstimation
from ray.tune.registry import get_trainable_cls, register_trainable
from small import OFF, small_ppo, stopping, train_algorithm
from updates import KINDS, build_learner, make_config

from rl_triton_adapters import rllib
from rl_triton_adapters.rllib import TritonGeneralAdvantageEstimation, TritonPPO, TritonPPOTorchLearner, enable_triton
from rl_triton_adapters.rllib.config import FlaggedPPO, add_names

SMALL = {"env": "CartPole-v1", "num_env_runners": 0, "num_learners": 0, "_model_config": {"fcnet_hiddens": [16]}}


def find_learner(name, config):
    with stopping(get_trainable_cls(name)(config=config)) as algorithm:
        learner = algorithm.learner_group._learner
        return type(learner), getattr(learner, "uses_triton", False)


@pytest.mark.parametrize("name", KINDS)
def test_a_dict_has_names_of_ours_and_a_flag_under_rllibs(name, small_ray):
    stock, ours = KINDS[name]
    assert find_learner(f"Triton{name}", {**SMALL}) == (ours, True)
    assert find_learner(name, {**SMALL, "learner_config_dict": {"rl_triton": True}}) == (ours, True)
    if name == "PPO":
        assert find_learner("TritonPPO", {**SMALL, "learner_config_dict": {**OFF}}) == (ours, False)
        assert find_learner("PPO", {**SMALL, "learner_config_dict": {"mine": 1}}) == (stock, False)


def test_a_dict_may_be_that_of_a_config_or_a_config(small_ray):
    """What RLlib's own algorithms take; with a learner class and callbacks that are None in it."""
    config = small_ppo()
    assert find_learner("TritonPPO", config.to_dict()) == (TritonPPOTorchLearner, True)
    assert find_learner("TritonPPO", config) == (TritonPPOTorchLearner, True)
    config.learners(learner_config_dict={"rl_triton": True})
    assert find_learner("PPO", config) == (TritonPPOTorchLearner, True)
    assert config.learner_class is PPOTorchLearner
    assert find_learner("TritonPPO", {**SMALL, **enable_triton(PPOConfig()).to_dict(), "env": "CartPole-v1"})[1]
    with pytest.raises(TypeError, match="got rl_triton='yes', expected True or False"):
        TritonPPO(config={**SMALL, "learner_config_dict": {"rl_triton": "yes"}})
    with pytest.raises(ValueError, match="expected the new API stack"):
        TritonPPO(config={**SMALL, "enable_rl_module_and_learner": False})


def test_a_name_that_was_looked_up_before(small_ray):
    """Tune keeps what it has found under a name; what a user has put there stays."""
    register_trainable("PPO", PPO)
    add_names()
    assert get_trainable_cls("PPO") is FlaggedPPO
    register_trainable("PPO", TritonPPO)
    add_names()
    assert get_trainable_cls("PPO") is TritonPPO
    register_trainable("PPO", FlaggedPPO)


def test_the_page_in_the_docs_runs(small_ray, tmp_path, monkeypatch):
    """Of the search that trial which is switched off; the one of the file is not."""
    page = (Path(__file__).parents[3] / "docs" / "rllib.md").read_text()
    section = page.partition("## From dicts, Ray Tune and YAML")[2].partition("\n## ")[0]
    monkeypatch.chdir(tmp_path)
    (text,) = re.findall(r"```yaml\n(.*?)```", section, re.DOTALL)
    (tmp_path / "cartpole.yaml").write_text(text)
    names = {}
    for block in re.findall(r"```python\n(.*?)```", section, re.DOTALL):
        exec(compile(block.replace("[True, False]", "[False]"), "docs/rllib.md", "exec"), names)
    assert [count(x.metrics) for x in names["results"]] == [0.0]
    assert [count(trial.last_result) for trial in names["trials"]] == [1.0]


def count(result):
    return result["learners"]["__all_modules__"]["rl_triton"]


# --- RL_TRITON=0 in the environment -----------------------------------------------------------------------------------


def test_ppo_switched_off_is_stock(small_ray, switched_off):
    """Bit for bit; a learner elsewhere learns of it by its config."""
    ours = train_algorithm(enable_triton(small_ppo()), lambda learner: (learner.describe(), learner.uses_triton))
    stock = train_algorithm(small_ppo())
    for module, weights in stock[1].items():
        for name, weight in weights.items():
            np.testing.assert_array_equal(ours[1][module][name], weight)
    ((text, uses_triton),) = ours[2]
    assert not uses_triton and "with RLlib" in text
    assert text.endswith("updates are those of RLlib: RL_TRITON=0 in the environment")
    assert enable_triton(small_ppo()).learner_config_dict["rl_triton"] is False


def test_vtrace_switched_off_is_rllibs(switched_off):
    learner = build_learner(enable_triton(make_config("categorical", "IMPALA")))
    assert not learner.uses_triton and "computes V-Trace with RLlib" in learner.describe()
    arguments = {**rllib.check.PER_STEP, "bootstrap_values": torch.tensor([7.0])}
    torch.testing.assert_close(rllib.vtrace(**arguments, backend="cpu"), vtrace_torch(**arguments), rtol=0, atol=0)


def test_a_connector_switched_off_is_rllibs(switched_off, monkeypatch):
    """One that a user has put into a pipeline."""
    called = []
    monkeypatch.setattr(GeneralAdvantageEstimation, "__call__", lambda self, **kwargs: called.append(kwargs) or {})
    given = {"rl_module": None, "episodes": [], "batch": {}, "shared_data": {}}
    TritonGeneralAdvantageEstimation(gamma=0.9, lambda_=0.8)(**given)
    assert called == [given]
