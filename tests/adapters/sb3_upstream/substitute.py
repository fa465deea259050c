"""Pytest plugin: our rollout buffers as the default of Stable-Baselines3 for one test run, their calls counted."""

import json
from collections import Counter
from pathlib import Path

import pytest
from stable_baselines3.common import on_policy_algorithm

from rl_triton_adapters import sb3, sb3_device

running = "outside any test"
calls: Counter[str] = Counter()
MODULES = {"Triton": sb3, "Device": sb3_device}


class Counted(sb3.TritonGAEMixin):
    def compute_returns_and_advantage(self, last_values, dones):
        calls[running] += 1
        super().compute_returns_and_advantage(last_values, dones)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--calls", type=Path, required=True, help="where to write the calls per test, as JSON")
    parser.addoption("--kind", choices=MODULES, required=True, help="which buffers, by the beginning of their names")


def pytest_configure(config: pytest.Config) -> None:
    kind = config.getoption("--kind")
    for name in ("RolloutBuffer", "DictRolloutBuffer"):
        ours = getattr(MODULES[kind], kind + name)
        setattr(on_policy_algorithm, name, type(f"Counted{name}", (Counted, ours), {}))


def pytest_runtest_setup(item: pytest.Item) -> None:
    global running  # noqa: PLW0603
    running = item.name


def pytest_sessionfinish(session: pytest.Session) -> None:
    session.config.getoption("--calls").write_text(json.dumps(calls))
