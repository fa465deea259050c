"""The settings of benchmarks, of which settings.json is the table.

A benchmark has lines for each device, or for both, and for a quick run; a list in a line stands for each of its values.
It may say how many seconds a setting is measured, and in how many rounds; the packages that it needs; the module and
its function that measure a setting, if not `measure` of the module with its name; and arguments of `report.list_rows`.
"""

import importlib.util
import json
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

TABLE: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
SIMULATORS = {"mujoco": ("HalfCheetah", "Hopper", "Walker2d", "Inverted"), "Box2D": ("LunarLander", "BipedalWalker")}


class Setting(SimpleNamespace):
    """What the names in the table are in one of its lines."""

    def _asdict(self) -> dict[str, Any]:
        return vars(self)


def read_settings(benchmark: str, where: str, kind: Any = Setting) -> list[Any]:
    """Those of "cpu", "cuda" or "quick"."""
    table = TABLE[benchmark]
    lines = [line for devices, lines in table.items() if where in devices.split() for line in lines]
    return [kind(**x) for x in combine(table["names"], lines) if where == "quick" or is_possible(x)]


def is_possible(values: dict[str, Any]) -> bool:
    """Whether this machine has the GPUs of all processes, and the simulator of the task."""
    task = str(values.get("task", values.get("env", "")))
    enough = values.get("processes", 1) <= max(1, torch.cuda.device_count())
    return enough and not find_missing(name for name, tasks in SIMULATORS.items() if task.startswith(tasks))


def find_missing(packages: Iterable[str]) -> list[str]:
    return [name for name in packages if importlib.util.find_spec(name) is None]


def combine(names: Sequence[str], lines: Iterable[Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """All combinations of the values in each line, by name; where a column has several names, a value is a list."""
    for line in lines:
        for values in product(*(x if isinstance(x, list) else [x] for x in line)):
            columns = zip(names, values, strict=True)
            pairs = (zip(x.split(), value if " " in x else [value], strict=True) for x, value in columns)
            yield dict(chain.from_iterable(pairs))


def complete_options(benchmark: str, options: Namespace) -> Namespace:
    """Options with what the table has of a benchmark, and its seconds and rounds where there are none."""
    table, given = TABLE[benchmark], vars(options)
    rounds = 2 if options.quick else table.get("rounds")
    return Namespace(**given | {"seconds": options.seconds or table.get("seconds"), "rounds": rounds, "table": table})
