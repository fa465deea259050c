"""TritonPPO in two processes against PPO of RSL-RL in two: each has environments and random numbers of its own."""

import subprocess
import sys
from inspect import signature

import pytest
from torch import distributed

pytest.importorskip("rsl_rl")
import ppo_rsl_rl
from processes import GLOO, TWO_GPUS, compare_ranks, run_ranks
from recorded_graphs import allow_captures
from rsl_rl.algorithms import PPO
from rsl_rl.modules import EmpiricalNormalization
from rsl_rl.runners import OnPolicyRunner
from test_rsl_rl import OURS, RECURRENT, make_runner, train, use_graphs

from rl_triton_adapters.updates import release_graphs

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
ITERATIONS = {"cpu": 4, "cuda": 2}
OWN = "none" if "is_initialized" in EmpiricalNormalization.update.__code__.co_names else "normalizer"
"""What each process has of its own: up to RSL-RL 5.4, statistics of observations."""
pytestmark = GLOO


def join_group(runner):
    """As the runner does, of a group that is there already, and on a CPU too."""
    rank, size = distributed.get_rank(), distributed.get_world_size()
    runner.is_distributed, runner.gpu_world_size = size > 1, size
    runner.gpu_global_rank = runner.gpu_local_rank = rank
    runner.cfg["multi_gpu"] = {"global_rank": rank, "local_rank": rank, "world_size": size}


def train_in_rank(rank, device, case, arm):
    """Networks and learning rates differ between processes when training starts; the first one's count."""
    iterations, device = ITERATIONS[device], f"cuda:{rank}" if device == "cuda" else device
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OnPolicyRunner, "_configure_multi_gpu", join_group)
        runner = make_runner("PPO" if arm == "stock" else OURS, device=device, seed=rank, **CASES[case])
        if arm == "recorded":
            allow_captures(patch)
            use_graphs(patch, runner)
        runner.alg.learning_rate *= 1 + rank
        losses = train(runner, iterations, seed=rank)
    alg, kind = runner.alg, "" if arm == "stock" else runner.alg.describe_step()
    models = {"actor": alg.actor, "critic": alg.critic} | ({"predictor": alg.rnd.predictor} if alg.rnd else {})
    states = {f"{key}.{name}": x for key, model in models.items() for name, x in model.state_dict().items()}
    return states, [alg.learning_rate, *(x["lr"] for x in alg.optimizer.param_groups)], losses, kind


def train_all(rank, device, cases, arms):
    results = {(case, arm): train_in_rank(rank, device, case, arm) for case in cases for arm in arms}
    release_graphs()
    return results


def check_ranks(ranks, case, arm, rtol, atol):
    """Parameters, losses and learning rates are those of RSL-RL; losses are of each process's own data."""
    got, want = ([rank[case, name] for rank in ranks] for name in (arm, "stock"))
    compare_ranks(got, want, OWN, rtol=rtol, atol=atol)
    for (_, rates, losses, _), (_, expected_rates, expected, _) in zip(got, want, strict=True):
        assert rates[0] == expected_rates[0]  # float32, as it is sent
        for row, wanted in zip(losses, expected, strict=True):
            assert row == pytest.approx(wanted, rel=rtol, abs=10 * atol)
    assert got[0][2] != got[1][2]


@pytest.fixture(scope="module")
def gloo(tmp_path_factory):
    """What two processes came to, by rank."""
    return run_ranks(train_all, tmp_path_factory.mktemp("gloo"), "cpu", list(CASES), ("stock", "eager", "recorded"))


@pytest.mark.parametrize("arm", ["eager", "recorded"])
@pytest.mark.parametrize("case", CASES)
def test_training(gloo, case, arm):
    kind = "updates are captured" if arm == "recorded" else "updates are accelerated without a graph: graphs need"
    assert all(rank[case, arm][3].startswith(kind) for rank in gloo)
    check_ranks(gloo, case, arm, rtol=1e-4, atol=2e-6)


def test_rates_are_those_of_the_first_process(gloo):
    """They have changed, and the ones of the second process, twice as high, have no part in it."""
    rates = {rate for rank in gloo for rate in rank["default", "stock"][1]}
    assert len(rates) == 1 and rates != {1e-3}
    assert [rank["fixed rate", "eager"][1][0] for rank in gloo] == [1e-3, 2e-3]


@pytest.mark.parametrize("kind", [pytest.param(x, marks=TWO_GPUS) for x in ("nccl", "gloo")])
def test_training_on_two_gpus(kind, tmp_path):
    """NCCL's operations are in the graph; over gloo, steps are made without one."""
    ranks = run_ranks(train_all, tmp_path, "cuda", list(CASES), ("stock", "ours"), kind=kind)
    for case in CASES:
        for rank in ranks:
            how = rank[case, "ours"][3]
            assert how == "updates are captured" if kind == "nccl" else "expected NCCL" in how, how
        check_ranks(ranks, case, "ours", rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("command", [pytest.param("torchrun", marks=TWO_GPUS)])
def test_processes_end(command):
    """With the runner's own group, which nobody destroys, and with graphs."""
    example = f"{sys.executable} {ppo_rsl_rl.__file__} --num-envs 64 --num-steps 8 --iterations 3 --quiet"
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    shell = ["sh", "-c", f"exec {example} --evaluation-episodes 2 --device cuda:$LOCAL_RANK"]
    done = subprocess.run([*run, *shell], capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "updates as PPO" not in done.stderr and "runs eagerly" not in done.stderr
