"""`rl-triton conventions`: which converter turns the record of a framework into arguments of the estimators."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable
from typing import Any

from rl_triton_core import conventions
from rl_triton_core.cli.output import Report, Table

HELP = "print the converter of a framework's flags and values"
CONVERTERS: dict[str, Callable[..., Any]] = {
    "gymnasium-same-step": conventions.from_gymnasium_same_step,
    "gymnasium-next-step": conventions.from_gymnasium_next_step,
    "gymnasium-disabled": conventions.from_gymnasium_disabled,
    "sb3": conventions.from_episode_starts,
    "cleanrl": conventions.from_cleanrl,
    "rllib": conventions.from_rllib,
    "pufferlib": conventions.from_pufferlib,
    "rsl-rl": conventions.approximate_rsl_rl,
}
ADAPTERS = {
    "sb3": 'PPO("MlpPolicy", env, rollout_buffer_class=rl_triton_adapters.sb3.TritonRolloutBuffer)',
    "cleanrl": "rl_triton_adapters.cleanrl.gae(rewards, values, dones, next_value, next_done, gamma, gae_lambda)",
    "rllib": "rl_triton_adapters.rllib.enable_triton(config)",
}
"""What takes less: the adapter's line."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the name of the framework."""
    parser.add_argument("framework", nargs="?", choices=CONVERTERS, help="without one, all are listed")


def run(options: argparse.Namespace) -> Report:
    """Describe the converter of a framework, or list them all."""
    if options.framework:
        description = describe_converter(options.framework)
        return Report(description, format_description(description))
    descriptions = [describe_converter(name) for name in CONVERTERS]
    rows = [(x["framework"], x["converter"], x["summary"]) for x in descriptions]
    return Report(descriptions, [Table("", ("framework", "converter", "what it does"), rows)])


def describe_converter(framework: str) -> dict[str, str]:
    """Collect what there is to say of a framework's converter."""
    converter = CONVERTERS[framework]
    documentation = inspect.getdoc(converter) or ""
    return {
        "framework": framework,
        "converter": f"{conventions.__name__}.{converter.__name__}",
        "summary": documentation.partition("\n")[0],
        "call": write_call(converter),
        "documentation": documentation,
        "adapter": ADAPTERS.get(framework, ""),
    }


def write_call(converter: Callable[..., Any]) -> str:
    """Write the lines of a training loop that convert and call an estimator."""
    parameters = inspect.signature(converter).parameters.values()
    names = ", ".join(x.name for x in parameters if x.kind is x.POSITIONAL_OR_KEYWORD)
    # PufferLib's rewards move by a step, so its converter returns them too.
    results = "rewards, boundaries" if next(iter(parameters)).name == "rewards" else "boundaries"
    return (
        f"from {conventions.__name__} import {converter.__name__}\n"
        "from rl_triton_core import compute_gae\n\n"
        f"{results} = {converter.__name__}({names})\n"
        "advantages, returns = compute_gae(rewards, values, **boundaries._asdict(), gamma=0.99, lambda_=0.95)"
    )


def format_description(description: dict[str, str]) -> list[str]:
    """Lay a description out as text."""
    adapter = description["adapter"]
    shorter = [f"\nThere is an adapter, which is one line:\n\n    {adapter}"] if adapter else []
    return [
        f"{description['converter']}\n",
        description["documentation"],
        f"\nIn a loop:\n\n{description['call']}",
        *shorter,
    ]
