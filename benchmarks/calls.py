"""Calls of the estimators: workloads, and the arms that meet on them, each verified against an oracle."""

from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from benchmarks import harness
from benchmarks.providers import REGISTRY, Expected, Provider
from benchmarks.results import Row, describe_failure, make_row
from benchmarks.workloads import Inputs, Workload, draw_inputs

Setting = Workload
LARGEST_COMPILED = 1 << 27
MAX_CELLS_VERIFIED, ENVS_SAMPLED = 1 << 26, 64  # of a rollout with more cells only some environments are verified
LOOP_LONGEST = 1024
HEADLINE = (4096, 128)


def prepare(settings: Sequence[Workload], options: Namespace) -> None:
    """Compile what will be timed, but for rollouts that need all of the memory."""
    chosen = [workload for workload in settings if workload.cells <= LARGEST_COMPILED]
    jobs = [(arm, x, options.device) for x in chosen for arm in list_arms(x, options) if REGISTRY[arm].compiles]
    harness.compile_ahead(compile_arm, jobs, options)


def list_arms(workload: Workload, options: Namespace) -> list[str]:
    """The arms of a workload, without those that would take too long.

    The compiled scan compiles for seconds: it is where the paper's table has it. The loop runs for as long: away from
    the headline and the CPU it is there for plain GAE on rows that are not long.
    """
    plain = workload.layout == "env-major" and not workload.truncated
    headline = (workload.num_envs, workload.num_steps) == HEADLINE
    short_gae = plain and workload.estimator == "gae" and workload.num_steps <= LOOP_LONGEST
    kept = {"compiled_scan": plain or headline, "loop": options.device == "cpu" or headline or short_gae}
    return [name for name in options.table["arms"] if kept.get(name, True)]


def measure(workload: Workload, options: Namespace) -> Iterator[Row]:
    """The lines of every arm that there is, and on a GPU the time in which a copy moves as many bytes."""
    oracle, calls = Oracle(workload, draw_inputs(workload, options.device)), {}
    for name in ("null", "torch_add", *list_arms(workload, options)):
        call, note = prepare_arm(name, oracle, options.device)
        if note:
            yield make_row(name, "full", "µs", [], note)
        elif call is not None:
            calls[name] = call
    host_only = [name for name in calls if not REGISTRY[name].captured]
    moved = sum(x.nbytes for x in oracle.inputs.values()) + 4 * workload.cells * len(workload.spec.outputs)
    reference = options.table["arms"][0]
    yield from harness.measure_arms(calls, options.device, options.seconds, reference, host_only, moved)


def compile_arm(name: str, workload: Workload, device: str) -> None:
    call = REGISTRY[name].make_call(workload, draw_inputs(workload, device))
    if call is not None:
        call()
    harness.wait_for(device)


class Oracle:
    """A workload's inputs, and its results in float64: of all environments, or of some where they are many."""

    def __init__(self, workload: Workload, inputs: Inputs) -> None:
        self.workload, self.inputs = workload, inputs
        self.envs: torch.Tensor | None = None
        if workload.cells > MAX_CELLS_VERIFIED:
            count = min(ENVS_SAMPLED, workload.num_envs)
            places = torch.arange(count, device=next(iter(inputs.values())).device)
            self.envs = places * (workload.num_envs - 1) // max(1, count - 1)
        self.known: dict[Expected, tuple[torch.Tensor, ...]] = {}

    def find_error(self, provider: Provider, found: Any) -> float:
        expected = provider.find_oracle()
        if expected not in self.known:
            self.known[expected] = expected(self.workload, self.inputs, self.envs)
        chosen = list_tensors(found)
        if self.envs is not None:
            chosen = [x.index_select(1 - self.workload.time_dim, self.envs) for x in chosen]
        return harness.find_error(map(provider.select_written, chosen), self.known[expected])


def prepare_arm(name: str, oracle: Oracle, device: str) -> tuple[harness.Call | None, str]:
    """The call of a provider, if it has one and its results are right; and why there is none, if it should have one."""
    provider, call = REGISTRY[name], None
    if not provider.is_available(device):
        return None, ""
    try:
        call = provider.make_call(oracle.workload, oracle.inputs)
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):  # TorchRL's convolution: timed as it comes
            error = oracle.find_error(provider, call()) if call is not None and provider.verified else 0.0
    except Exception as failure:  # an arm that fails must not end the run
        return None, describe_failure(failure)
    note = harness.describe_error(error)
    return None if note else call, note


def list_tensors(found: Any) -> list[torch.Tensor]:
    return [found] if isinstance(found, torch.Tensor) else [x for x in found if x is not None]
