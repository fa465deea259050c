"""Metrics of an update, logged once."""

from __future__ import annotations

import threading
from typing import Any

import tree
from ray.rllib.utils import force_tuple
from torch import Tensor

LAST = ({"window": 1}, {"window": 1, "reduce": "mean"})  # options of metrics of which RLlib keeps the last value alone
KEPT: dict[str, tuple[type, ...]] = {"sum": (int, float), "lifetime_sum": (int, float), "mean": (int,)}
"""Which numbers are kept, by how RLlib reduces them; and the options that they may have."""
NAMES = {"reduce", "with_throughput"}


class LateMetrics:
    """A learner's metrics while it makes steps: what RLlib reduces is logged at their end, with the same result.

    Of a metric with ``window=1`` the last value is logged, of numbers that are summed up their sum, of equal integers
    that are averaged one. Others are logged at once. Who looks at metrics finds all of them. Threads other than the
    one that made this object log as before. Those of a step that is captured can have last values alone. What is summed
    up is logged as often as `times` says.
    """

    def __init__(self, metrics: Any, is_captured: bool = False) -> None:
        self.metrics, self.is_captured, self.thread, self.times = metrics, is_captured, threading.get_ident(), 1
        self.last: dict[Any, Any] = {}
        self.numbers: dict[tuple[Any, ...], list[Any]] = {}

    def keep(self, key: Any, value: Any) -> None:
        """Keep a value in the place of the one before; of a module, what its loss's metrics are built from."""
        self.last.pop(key, None)
        self.last[key] = value

    def log_value(self, key: Any, value: Any, **options: Any) -> None:
        """Log a value, at once or later."""
        key, is_plain = tuple(key) if isinstance(key, list) else key, options.keys() <= NAMES
        known = self.numbers.get((key, *options.items())) if type(value) is int and is_plain else None
        if threading.get_ident() != self.thread:
            self.metrics.log_value(key, value, **options)
        elif known is not None:  # most calls: those that RLlib makes for every minibatch
            known.append(value)
        elif options in LAST and (isinstance(value, Tensor | float) or not self.is_captured):  # settings set numbers
            self.keep(key, value)
        elif self.is_captured:
            raise RuntimeError(f"metric {key!r}: got {type(value).__name__} with {options}, expected a last tensor")
        elif isinstance(value, KEPT.get(options.get("reduce", ""), ())) and is_plain:
            self.numbers.setdefault((key, *options.items()), []).append(value)
        else:
            self.metrics.log_value(key, value, **options)

    def log_dict(self, value_dict: dict[Any, Any], *, key: Any = None, **options: Any) -> None:
        """Log all values of a possibly nested dict."""
        for path, value in tree.flatten_with_path(value_dict):
            self.log_value((*force_tuple(key), *tree.flatten(path)), value, **{"reduce": "mean", **options})

    def flush(self) -> None:
        """Log what was kept."""
        last, numbers, self.last, self.numbers = self.last, self.numbers, {}, {}
        for key, value in last.items():
            for name, x in value.build_metrics().items() if hasattr(value, "build_metrics") else [((), value)]:
                own = x.clone() if isinstance(x, Tensor) else x  # replays overwrite the memory of a graph
                self.metrics.log_value((*force_tuple(key), *force_tuple(name)), own, window=1)
        for (key, *options), found in numbers.items():
            is_mean, is_one = dict(options)["reduce"] == "mean", len(set(found)) == 1
            for x in [sum(found) * self.times] if not is_mean else found[:1] if is_one else found:
                self.metrics.log_value(key, x, **dict(options))

    def __contains__(self, key: Any) -> bool:
        self.flush()
        return key in self.metrics

    def __getattr__(self, name: str) -> Any:
        if threading.get_ident() == self.thread and not self.is_captured:
            self.flush()
        return getattr(self.metrics, name)
