"""PPO as in examples/ppo_gpu_envs.py."""

from __future__ import annotations

import sys
from argparse import Namespace
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType
from unittest.mock import MagicMock

from benchmarks.end_to_end.frameworks import Setting
from benchmarks.results import ROOT
from benchmarks.workloads import GAMMA

LAMBDA = 0.95
LOGGING = ("torch.utils.tensorboard", "tqdm")


@cache
def load_example() -> ModuleType:
    """The example as a module of our own; what it logs with is not needed."""
    sys.path.append(str(ROOT / "examples"))  # for the environments
    spec = spec_from_file_location("end_to_end_example", ROOT / "examples" / "ppo_gpu_envs.py")
    assert spec is not None and spec.loader is not None
    module, known = module_from_spec(spec), {name: sys.modules.get(name) for name in LOGGING}
    sys.modules.update(dict.fromkeys(LOGGING, MagicMock()))
    try:
        spec.loader.exec_module(module)
    finally:
        for name, found in known.items():
            del sys.modules[name]
            sys.modules.update({name: found} if found else {})
    return module


def make_arguments(setting: Setting) -> Namespace:
    """The example's arguments."""
    known: Namespace = load_example().parse_arguments([])
    known.device, known.num_envs, known.num_steps = setting.device, setting.num_envs, setting.num_steps
    known.hidden, known.update_epochs, known.num_minibatches = setting.hidden, setting.epochs, setting.minibatches
    known.gamma, known.gae_lambda, known.learning_rate = GAMMA, LAMBDA, 3e-4
    return known
