"""With RL_TRITON_CHECK, the framework's update is made beside ours, and a line says by how much they differ."""

import re

import pytest
import torch

pytest.importorskip("stable_baselines3")
from rl_triton_adapters.sb3.captured import TritonA2C, TritonPPO
from rl_triton_adapters.sb3.dqn import TritonDQN
from rl_triton_adapters.sb3.sac import TritonSAC

KINDS = {
    TritonPPO: {"n_steps": 32},
    TritonA2C: {},
    TritonSAC: {"learning_starts": 8, "policy_kwargs": {"optimizer_kwargs": {"eps": 1e-5}}},  # Adam enlarges rounding
    TritonDQN: {"learning_starts": 8},
}
LINE = r"RL_TRITON_CHECK: (\w+)\.train (\d): parameters moved by (\S+) and differ by (\S+) from"


def learn(kind):
    env = "Pendulum-v1" if kind is TritonSAC else "CartPole-v1"
    return kind("MlpPolicy", env, device="cpu", seed=0, **KINDS[kind]).learn(128)


@pytest.mark.parametrize("kind", KINDS)
def test_updates_are_compared_and_training_is_the_same(kind, monkeypatch, capsys):
    plain = learn(kind)
    monkeypatch.setenv("RL_TRITON_CHECK", "2")
    checked = learn(kind)
    lines = re.findall(LINE, capsys.readouterr().out)
    assert [line[:2] for line in lines] == [(kind.__name__, "1"), (kind.__name__, "2")]
    assert all(float(far) > 0 and float(off) < 1e-3 * float(far) for *_, far, off in lines)
    assert checked._n_updates == plain._n_updates and checked.logger.name_to_value == plain.logger.name_to_value
    torch.testing.assert_close([*checked.policy.parameters()], [*plain.policy.parameters()], rtol=0, atol=0)


def test_another_update_is_seen(monkeypatch, capsys):
    monkeypatch.setenv("RL_TRITON_CHECK", "1")
    monkeypatch.setattr(TritonPPO, "_make_updates", lambda self, update: self._log_update(n_updates=7))
    learn(TritonPPO)
    said = capsys.readouterr().out
    ((*_, far, off),) = re.findall(LINE, said)
    assert far == off and "train/n_updates 3" in said and "train/loss nan" in said


def test_the_number_of_updates_is_a_number(monkeypatch):
    monkeypatch.setenv("RL_TRITON_CHECK", "all")
    with pytest.raises(ValueError, match="RL_TRITON_CHECK: got 'all', expected a number of updates"):
        learn(TritonPPO)
