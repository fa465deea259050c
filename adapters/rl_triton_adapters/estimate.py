"""`rl-triton estimate`: what a training gains, and what it can gain at most, by a few of its iterations.

An iteration is a rollout and what follows it. The first one with an update does not count: it compiles and captures.
"""

import atexit
import json
import os
import subprocess
import sys
from collections import Counter
from contextlib import ExitStack
from functools import partial, wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any
from weakref import WeakSet, ref

from rl_triton_adapters import auto
from rl_triton_adapters.common.switch import Place, replace_stock
from rl_triton_core.cli.doctor import Finding, check_threads
from rl_triton_core.cli.output import Report, Table
from rl_triton_core.extending import say

HELP = "Run iterations of Stable-Baselines3 in a command, without and with adapters, and say what is gained."
PARTS = ("acting", "environments", "updates", "whole")
ITERATIONS, SECONDS = 3, 3.0  # that are timed at least: iterations of off-policy algorithms are short
add_arguments = auto.add_arguments


class Clock:
    """Seconds of the parts of iterations in this process, and how many iterations and steps these are."""

    def __init__(self) -> None:
        self.totals, self.how, self.first = Counter[str](), "", 0.0
        self.model: Any = None  # that of the iteration that goes on, as a weak reference
        self.known = WeakSet[Any]()  # those whose first iteration is over
        self.updates = self.steps = 0  # before the iteration
        self.begin = self.middle = self.in_step = 0.0

    def watch(self) -> ExitStack:
        """Let Stable-Baselines3 say what it does in this process. The end of what is returned takes that back."""
        from stable_baselines3.common.callbacks import BaseCallback
        from stable_baselines3.common.vec_env import VecEnv

        def time_calls(owner: Any, name: str, call: Any) -> Place:
            stock = vars(owner)[name]
            return owner, name, stock, wraps(stock)(lambda *args, **kwargs: call(stock, *args, **kwargs))

        moments = ("on_rollout_start", "on_rollout_end", "on_training_end")
        marks = [time_calls(BaseCallback, x, partial(self.mark, x)) for x in moments]
        undo = replace_stock([time_calls(VecEnv, "step", self.step), *marks])
        undo.callback(self.report)
        atexit.register(undo.close)
        return undo

    def step(self, stock: Any, *args: Any, **kwargs: Any) -> Any:
        """A step of the environments; a wrapper may step others."""
        before, begin = self.in_step, perf_counter()
        try:
            return stock(*args, **kwargs)
        finally:
            self.in_step = before + perf_counter() - begin

    def mark(self, name: str, stock: Any, callback: Any) -> None:
        """A rollout begins or ends, or a training ends. Callbacks that a callback calls have seen no step since."""
        model, now = getattr(callback, "model", None), perf_counter()
        if name == "on_rollout_end":
            self.middle = now
        elif model is not None and (ref(model), model.num_timesteps) != (self.model, self.steps):
            if self.model == ref(model) and model._n_updates > self.updates:
                self.count_iteration(model, now)
            self.model = None if name == "on_training_end" else ref(model)
            self.updates, self.steps = model._n_updates, model.num_timesteps
            self.begin, self.in_step = perf_counter(), 0.0
        stock(callback)

    def count_iteration(self, model: Any, now: float) -> None:
        """Count one that is over; end the program after the last one that is timed."""
        if model not in self.known:
            self.known.add(model)
            self.first = now - self.begin
            is_ours = any(x.__module__.startswith(auto.PREFIX) for x in type(model).__mro__)
            self.how = f"{type(model).__name__}, {model.describe() if is_ours else 'updates are stock'}"
            return
        times: Any = self.middle - self.begin - self.in_step, self.in_step, now - self.middle, now - self.begin
        self.totals.update(dict(zip(PARTS, times, strict=True)), iterations=1, steps=model.num_timesteps - self.steps)
        is_enough = self.totals["iterations"] >= ITERATIONS and self.totals["whole"] >= SECONDS
        if is_enough and "RL_TRITON_ESTIMATE" in os.environ:
            self.report()  # as well as at the end, which a forked process or `os._exit` leaves out
            raise SystemExit  # which leaves as little behind as any end of the program

    def report(self) -> None:
        """Write down what was found, or say it."""
        path, found = os.environ.get("RL_TRITON_ESTIMATE"), {"how": self.how, "first": self.first, **self.totals}
        if self.totals and path is not None:
            Path(path).write_text(json.dumps(found))
        elif self.totals:
            parts = ", ".join(f"{x} {self.totals[x]:.3g} s" for x in PARTS)
            say(f"rl-triton: {self.totals['iterations']} iterations, without the first: {parts}", sys.stderr)


def run(options: Any) -> Report:
    """Run a command twice, and compare."""
    if "sb3" in (*options.off, *os.environ.get("RL_TRITON_OFF", "").split(",")):
        raise ValueError("--off and RL_TRITON_OFF: got sb3, expected other frameworks: what it gains is estimated")
    command, found, threads = auto.prepare(options), {}, check_threads()
    for arm, flag in {"stock": "0", "ours": "1"}.items():
        with TemporaryDirectory() as folder, ExitStack() as last:
            path = Path(folder) / "found"
            env = {**os.environ, "RL_TRITON": flag, "RL_TRITON_ESTIMATE": str(path)}
            process = subprocess.Popen(command, env=env, stdout=2)
            last.callback(process.wait)  # at Ctrl-C, which the command gets too: it may save something
            status = process.wait()
            when = "" if path.exists() else ", before two updates of Stable-Baselines3, which alone is timed"
            if status or when:
                text = f"{arm}: the command ended with status {status}{when}"
                return Report({"error": text}, [text], 1)
            found[arm] = json.loads(path.read_text())
    return compare(found, threads)


def compare(found: dict[str, Any], threads: Finding) -> Report:
    """Say how much faster training is, and how much faster it can be."""
    stock, ours = ({part: 1e3 * x[part] / x["steps"] for part in PARTS} for x in found.values())
    gain, share = stock["whole"] / ours["whole"], stock["environments"] / stock["whole"]
    text = "{}: {iterations} iterations of {how}, after a first one of {first:.3g} s"
    lines = [text.format(arm, **x) for arm, x in found.items()]
    rows = [(part, f"{stock[part]:.3g}", f"{ours[part]:.3g}") for part in PARTS]
    known = f"environments take {share:.0%} of the time: at most {1 / share:.3g}x" if share else ""
    verdict = f"\n{gain:.3g} times as fast; " + (known or "environments have their own `step`: acting has their time")
    verdict += f"\n{threads.message}: {threads.advice}" if threads.status == "warning" else ""
    table = Table("Seconds of 1000 steps", ("", *found), rows)
    return Report({**found, "speed-up": gain, "bound": 1 / share if share else None}, [*lines, table, verdict])
