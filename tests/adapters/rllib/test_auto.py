"""RLlib is switched on where a program, or a worker of Ray, builds an algorithm, without a line of it."""

import pytest

pytest.importorskip("ray.rllib")

from processes import run_program

PROGRAM = """
import ray, sys
from ray.rllib.algorithms.dqn import DQNConfig
from rl_triton_adapters.rllib import enable_triton
from small import small_ppo

def train(enable=lambda config: config):
    algorithm = enable(small_ppo()).build_algo()
    used = algorithm.train()["learners"]["__all_modules__"]["rl_triton"]
    weights = algorithm.learner_group.get_weights()["default_policy"]
    return used, type(algorithm), sum(float(x.sum()) for x in weights.values())

print("result", *(train(enable_triton) if sys.argv[1:] else ray.get(ray.remote(num_cpus=0)(train).remote())))
if not sys.argv[1:]:
    DQNConfig().environment("CartPole-v1").env_runners(num_env_runners=0).build_algo().stop()
"""


def test_ppo_trains_as_with_a_line(private_ray, tmp_path):
    """To the last bit, in a worker of Ray; what `enable_triton` refuses stays as it is."""
    text, results, status = run_program(tmp_path, "-c", PROGRAM, run=[])
    _, wanted, _ = run_program(tmp_path, "-c", PROGRAM, "line")
    assert status == 0 and results[:1] == wanted and wanted[0].startswith("result 1.0 <class 'ray.rllib"), text
    assert "rl-triton: DQN stays as it is: config: got DQNConfig with" in text
    assert text.count("rl-triton: rllib is switched on\n") == 1
