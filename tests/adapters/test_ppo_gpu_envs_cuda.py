"""examples/ppo_gpu_envs.py on a GPU: neither a rollout nor an update waits for it."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
pytest.importorskip("benchmarks.end_to_end.ppo", reason="only the package is here", exc_type=ModuleNotFoundError)

from benchmarks.end_to_end import ppo

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

DEVICE = "cuda"


@pytest.mark.parametrize("env", ["cartpole", "pendulum"])
def test_nothing_waits_for_the_device(env):
    example = ppo.load_example()
    args = example.parse_arguments(["--device", DEVICE, "--num-steps", "8"])
    envs = example.ENVIRONMENTS[env](args.num_envs, args.device)
    agent = example.Agent(envs, args.hidden).to(args.device)
    optimizer = torch.optim.Adam(agent.parameters())

    def iteration():
        rollout = example.collect_rollout(envs, agent, args)
        with torch.no_grad():
            next_value = agent.predict_value(envs.observe_state(envs.state))
        advantages, returns = example.compute_triton_advantages(rollout, next_value, args)
        data = rollout._asdict() | {"advantages": advantages, "returns": returns}
        example.update_agent(agent, optimizer, {name: x.flatten(0, 1) for name, x in data.items()}, args)

    for _ in range(2):
        iteration()  # what is compiled, or written for a kind of call, comes before
    torch.cuda.set_sync_debug_mode("error")
    try:
        iteration()
    finally:
        torch.cuda.set_sync_debug_mode("default")
