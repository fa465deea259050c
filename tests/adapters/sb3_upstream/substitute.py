"""Pytest plugin: our rollout buffers as the default of Stable-Baselines3 for one test run, their calls counted."""

import json
from collections import Counter
from pathlib import Path

import pytest
from stable_baselines3.common import on_policy_algorithm

from rl_triton_adapters.sb3 import TritonDictRolloutBuffer, TritonGAEMixin, TritonRolloutBuffer

running = "outside any test"
calls: Counter[str] = Counter()


class Counted(TritonGAEMixin):
    def compute_returns_and_advantage(self, last_values, dones):
        calls[running] += 1
        super().compute_returns_and_advantage(last_values, dones)


class CountedRolloutBuffer(Counted, TritonRolloutBuffer):
    pass


class CountedDictRolloutBuffer(Counted, TritonDictRolloutBuffer):
    pass


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--calls", type=Path, required=True, help="where to write the calls per test, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    on_policy_algorithm.RolloutBuffer = CountedRolloutBuffer
    on_policy_algorithm.DictRolloutBuffer = CountedDictRolloutBuffer


def pytest_runtest_setup(item: pytest.Item) -> None:
    global running  # noqa: PLW0603
    running = item.name


def pytest_sessionfinish(session: pytest.Session) -> None:
    session.config.getoption("--calls").write_text(json.dumps(calls))
