"""Frameworks that a program imports are switched on without a line of it; this file is also that program."""

import sys
from importlib import import_module
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path

import gymnasium
import pytest
import torch
from processes import run_program

PARTS = {"rsl_rl": attrgetter("alg.actor"), "rl_games": attrgetter("model"), "skrl": attrgetter("policy")}
INSTALLED = [name for name in (*PARTS, "verl", "trl") if find_spec(name)]
STOCK = "uni_rl.algos.rsl_rl_ppo:FinalObservationAwarePPO" if find_spec("uni_rl") else "PPO"  # which derives from it


def train(name, has_line, folder):
    if name == "verl":
        [import_module(f"rl_triton_adapters.{name}").install() for _ in range(has_line)]
        return import_module("verl.trainer.ppo.core_algos").compute_gae_advantage_return.__module__
    if name == "trl":
        module, trainer = ("rl_triton_adapters.trl", "TritonGRPOTrainer") if has_line else ("trl", "GRPOTrainer")
        return getattr(import_module(module), trainer).__module__
    example = import_module(f"ppo_{name}")
    flags = ["--num-envs", "4", "--num-steps", "8", "--quiet", "--log-dir", folder]
    args = example.parse_arguments([*flags, "--epochs" if name == "rl_games" else "--iterations", "2"])
    config = example.make_config(args)
    if name == "rsl_rl" and not has_line:
        config["algorithm"]["class_name"] = STOCK if config["algorithm"].pop("enabled") else ""
    elif not has_line:
        example.register_agents, example.TritonRunner = print, example.Runner
    example.make_config = lambda args: config
    return [x.double().sum().item() for x in PARTS[name](example.train_agent(args)).parameters()]


def test_frameworks_train_as_with_a_line_of_the_program(tmp_path):
    """To the last bit, with as many updates of ours, and with no other import."""
    text, results, _ = run_program(tmp_path, __file__, "no line", tmp_path, *INSTALLED, run=[])
    _, wanted, _ = run_program(tmp_path, __file__, "line", tmp_path, *INSTALLED, RL_TRITON_REPORT="1")
    derived = STOCK.replace(":", ".")
    results = [x.replace(f" of {derived}:", " of rl_triton_adapters.rsl_rl.TritonPPO:") for x in results]
    assert results == wanted and str(results).count(" of rl_triton_adapters.") == len({*INSTALLED} & {*PARTS}), text
    assert all(f"rl-triton: {name.replace('_', '-')} is switched on\n" in text for name in INSTALLED)


@pytest.mark.skipif("skrl" not in INSTALLED, reason="no skrl")
def test_agents_that_learn_together_are_switched_on(tmp_path):
    """Where a program imports nothing else of skrl."""
    imports = [f"from skrl.multi_agents.torch.{x} import {x.upper()}" for x in ("mappo", "ippo")]
    program = "; ".join([*imports, "print(IPPO.__name__, MAPPO.__name__)"])
    text, _, status = run_program(tmp_path, "-c", program, RL_TRITON_AUTO="1")
    assert status == 0 and "TritonIPPO TritonMAPPO\n" in text and text.count("rl-triton: ") == 1, text


if __name__ == "__main__":
    sys.modules.setdefault("gym", gymnasium)  # RL-Games 1.6.1 imports the older name
    sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))
    for name in sys.argv[3:]:
        torch.manual_seed(0)
        print("result", name, train(name, sys.argv[1] == "line", sys.argv[2]))
        print("result", sorted({"rsl_rl", "rl_games", "skrl", "verl", "trl", "torchrl"} & {*sys.modules}))
