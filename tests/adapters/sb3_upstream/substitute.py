"""Pytest plugin: our rollout buffers in the place of those of Stable-Baselines3 for one test run, their calls counted.

They are the defaults of its algorithms, and what its tests know by the names `RolloutBuffer` and `DictRolloutBuffer`.
"""

import json
from collections import Counter
from pathlib import Path

import pytest
from stable_baselines3.common import buffers, on_policy_algorithm

from rl_triton_adapters import sb3

running = "outside any test"
calls: Counter[str] = Counter()
substitutes: dict[type, type] = {}


class Counted(sb3.TritonGAEMixin):
    def compute_returns_and_advantage(self, last_values, dones):
        calls[running] += 1
        super().compute_returns_and_advantage(last_values, dones)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--calls", type=Path, required=True, help="where to write the calls per test, as JSON")


def pytest_configure() -> None:
    for name in ("RolloutBuffer", "DictRolloutBuffer"):
        ours = type(f"Counted{name}", (Counted, getattr(sb3, f"Triton{name}")), {})
        substitutes[getattr(buffers, name)] = ours
        setattr(on_policy_algorithm, name, ours)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    global running  # noqa: PLW0603
    running = item.name
    for names in (vars(item.module), item.callspec.params if hasattr(item, "callspec") else {}):
        names.update({name: substitutes[x] for name, x in names.items() if isinstance(x, type) and x in substitutes})


def pytest_sessionfinish(session: pytest.Session) -> None:
    session.config.getoption("--calls").write_text(json.dumps(calls))
