"""The settings of benchmarks, of which settings.json is the table.

A benchmark has lines for each device, or for both, and for a quick run; a list in a line stands for each of its values.
It may say how many seconds a setting is measured, and in how many rounds.
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
MUJOCO = ("HalfCheetah", "Hopper", "InvertedPendulum")  # tasks that need it


class Setting(SimpleNamespace):
    """What the names in the table are in one of its lines."""

    def _asdict(self) -> dict[str, Any]:
        return vars(self)

    def is_possible(self) -> bool:
        """Whether this machine has the GPUs of all processes, and the package of the task."""
        values = vars(self)
        tasks = str(values.get("task", values.get("env", "")))
        enough = values.get("processes", 1) <= max(1, torch.cuda.device_count())
        return enough and bool(importlib.util.find_spec("mujoco") or not tasks.startswith(MUJOCO))


def read_settings(benchmark: str, where: str, kind: type[Setting] = Setting, **more: Any) -> list[Any]:
    """Those of "cpu", "cuda" or "quick", and whatever else each is to have."""
    table = TABLE[benchmark]
    lines = [line for devices, lines in table.items() if where in devices.split() for line in lines]
    found = [kind(**values, **more) for values in combine(table["names"], lines)]
    return [x for x in found if where == "quick" or x.is_possible()]


def combine(names: Sequence[str], lines: Iterable[Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """All combinations of the values in each line, by name; where a column has several names, a value is a list."""
    for line in lines:
        for values in product(*(x if isinstance(x, list) else [x] for x in line)):
            columns = zip(names, values, strict=True)
            pairs = (zip(x.split(), value if " " in x else [value], strict=True) for x, value in columns)
            yield dict(chain.from_iterable(pairs))


def complete_options(benchmark: str, options: Namespace) -> Namespace:
    """Options with the seconds and rounds of a benchmark, where there are none."""
    table, given = TABLE.get(benchmark, {}), vars(options)
    rounds = 2 if options.quick else table.get("rounds")
    return Namespace(**given | {"seconds": options.seconds or table.get("seconds"), "rounds": rounds})
