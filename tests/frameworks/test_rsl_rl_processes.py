"""TritonPPO in two processes against PPO of RSL-RL in two."""

import subprocess
import sys
from inspect import signature

import pytest
import torch
from torch import distributed

pytest.importorskip("rsl_rl")
import ppo_rsl_rl
from rsl_rl.algorithms import PPO
from rsl_rl.modules import EmpiricalNormalization
from rsl_rl.runners import OnPolicyRunner
from test_rsl_rl import OURS, RECURRENT, make_runner, train
from two_processes import SETUPS, TWO_GPUS, check_training

RND = {"num_outputs": 2, "predictor_hidden_dims": [4], "target_hidden_dims": [4], "weight": 1.0}
CASES = {
    "default": {},
    "fixed rate": {"schedule": "fixed", "normalize_advantage_per_mini_batch": True},
    "normalized observations, gru": {"network": RECURRENT | {"obs_normalization": True}},
}
if "use_mixed_precision" in signature(PPO).parameters:  # which extensions come with
    CASES["rnd"] = {"rnd_cfg": RND}
if "grad_reduce_bucket_mb" in signature(PPO).parameters:
    CASES["buckets"] = {"grad_reduce_bucket_mb": 4e-4}
OWN = ["losses"]
if "is_initialized" not in EmpiricalNormalization.update.__code__.co_names:  # up to RSL-RL 5.4
    OWN += ["normalizer._"]


def join_group(runner):
    """As the runner does, of a group that is there already, and on a CPU too."""
    rank, size = distributed.get_rank(), distributed.get_world_size()
    runner.is_distributed, runner.gpu_world_size, runner.gpu_global_rank = True, size, rank
    runner.cfg["multi_gpu"] = {"global_rank": rank, "local_rank": rank, "world_size": size}


def train_in_rank(rank, device, arm, _):
    """Networks and learning rates differ between processes when training starts; the first one's count."""
    OnPolicyRunner._configure_multi_gpu = join_group
    states, rates, hows = {}, [], set()
    for case, options in CASES.items():
        runner = make_runner("PPO" if arm == "stock" else OURS, device=device, seed=rank, **options)
        alg = runner.alg
        alg.learning_rate *= 1 + rank
        losses = train(runner, 4 if device == "cpu" else 2, seed=rank)
        models = {"actor": alg.actor, "critic": alg.critic} | ({"predictor": alg.rnd.predictor} if alg.rnd else {})
        found = {f"{key}.{name}": x for key, model in models.items() for name, x in model.state_dict().items()}
        found["losses"] = torch.tensor([[*row.values()] for row in losses])
        states |= {f"{case}: {name}": x for name, x in found.items()}
        rates.append(alg.learning_rate)
        hows |= {"" if arm == "stock" else alg.describe()}
    (how,) = hows
    assert abs(rates[0] - 1e-3) > 1e-4  # it adapts
    return states, rates, how


@SETUPS
def test_training(device, kind, tmp_path):
    check_training(train_in_rank, OWN, device, kind, tmp_path)


@pytest.mark.parametrize("command", [pytest.param("torchrun", marks=TWO_GPUS)])
def test_processes_end(command):
    """With the runner's own group, which nobody destroys, and with graphs."""
    example = f"{sys.executable} {ppo_rsl_rl.__file__} --num-envs 64 --num-steps 8 --iterations 3 --quiet"
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    shell = ["sh", "-c", f"exec {example} --evaluation-episodes 2 --device cuda:$LOCAL_RANK"]
    done = subprocess.run([*run, *shell], capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "updates as PPO" not in done.stderr and "runs eagerly" not in done.stderr
