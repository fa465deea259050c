"""`rl-triton env`: the machine and the installation, for bug reports."""

from __future__ import annotations

import os
from typing import Any

import torch

from rl_triton_core._internal.backend import BACKENDS, why_unavailable
from rl_triton_core._internal.launch.threads import get_num_threads
from rl_triton_core.cli.caches import find_caches
from rl_triton_core.cli.output import Report, Table
from rl_triton_core.system_info import system_info

HELP = "Describe the machine and the installation, for a bug report."
VARIABLE_PREFIXES = ("RL_TRITON", "TRITON_", "NUMBA_", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "VERL_USE_EXTERNAL")


def run(options: Any) -> Report:
    """Collect what a bug report needs."""
    devices = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    backends: dict[str, dict[str, str]] = {}
    for device in devices:
        reasons = {name: why_unavailable(name, torch.device(device)) for name in BACKENDS}
        backends[device] = {name: f"not available: {x}" if x else "available" for name, x in reasons.items()}
    try:
        threads = str(get_num_threads())
    except (TypeError, ValueError) as error:
        threads = str(error)
    sections: dict[str, dict[str, str]] = {
        "system": system_info(),
        "caches": {name: x.problem or f"{x.path}, writable" for name, x in find_caches().items()},
        "threads": {"rl_triton_core": threads, "torch": str(torch.get_num_threads())},
        "variables": {name: x for name, x in sorted(os.environ.items()) if name.startswith(VARIABLE_PREFIXES)},
    }
    tables = [
        Table("" if title == "system" else title.capitalize(), (), list(section.items()))
        for title, section in sections.items()
        if section
    ]
    rows = [(device, name, state) for device, states in backends.items() for name, state in states.items()]
    tables.insert(1, Table("Backends", ("device", "backend", "state"), rows))
    return Report({**sections, "backends": backends}, tables)
