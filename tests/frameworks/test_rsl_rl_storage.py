"""The recipe of docs/rsl_rl.md for RSL-RL 1 and 2, on their storage or on one of the same shape."""

import re
from pathlib import Path

import pytest
import torch

storage_module = pytest.importorskip("rsl_rl.storage")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "rsl_rl.md"


class LoopStorage:
    """Storage with the loop that RSL-RL 1 has, for a newer RSL-RL."""

    def compute_returns(self, last_values, gamma, lam):
        advantage, next_values = 0, last_values
        for step in reversed(range(len(self.rewards))):
            going_on = 1.0 - self.dones[step].float()
            delta = self.rewards[step] + going_on * gamma * next_values - self.values[step]
            advantage = delta + going_on * gamma * lam * advantage
            self.returns[step] = advantage + self.values[step]
            next_values = self.values[step]
        self.advantages = self.returns - self.values
        self.advantages = (self.advantages - self.advantages.mean()) / (self.advantages.std() + 1e-8)


def make_storage(kind):
    storage, generator = kind.__new__(kind), torch.Generator().manual_seed(0)
    storage.rewards, storage.values = torch.randn(2, 24, 7, 1, generator=generator).unbind()
    storage.dones = (torch.rand(24, 7, 1, generator=generator) < 0.1).byte()
    storage.returns, storage.advantages = torch.zeros(2, 24, 7, 1).unbind()
    storage.num_transitions_per_env = 24
    return storage, torch.randn(7, 1, generator=generator)


def test_the_recipe(monkeypatch):
    found = storage_module.RolloutStorage
    kind = found if hasattr(found, "compute_returns") else LoopStorage
    stock, last_values = make_storage(kind)
    stock.compute_returns(last_values, 0.98, 0.9)
    (block,) = re.findall(r"^## Versions 1 and 2\n.*?```python\n(.*?)```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    monkeypatch.setattr(storage_module, "RolloutStorage", kind)
    monkeypatch.setattr(kind, "compute_returns", kind.compute_returns)
    exec(compile(block, "docs/rsl_rl.md", "exec"), {})
    ours, last_values = make_storage(kind)
    assert kind.compute_returns.__code__.co_filename == "docs/rsl_rl.md"
    ours.compute_returns(last_values, 0.98, 0.9)
    torch.testing.assert_close(ours.returns, stock.returns, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.advantages, stock.advantages, rtol=1e-5, atol=1e-5)
    assert ours.advantages.shape == stock.advantages.shape
