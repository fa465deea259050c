"""PPO of ppo_gpu_envs.py in several processes, one per GPU: DistributedDataParallel, advantages normalised over all.

    torchrun --standalone --nproc-per-node 2 examples/ppo_multi_gpu.py --device cuda --update captured \\
        --num-envs 4096 --num-steps 128 --num-minibatches 4 --update-epochs 4 --learning-rate 3e-3 \\
        --total-timesteps 42000000 --target-return 475
    torchrun --standalone --nproc-per-node 2 examples/ppo_multi_gpu.py --target-return 475      on CPUs

Flags are those of ppo_gpu_envs.py; `--num-envs` and `--total-timesteps` count those of one process. Each process steps
its own environments and computes their advantages. Minibatches are as in one process with the environments of all:
statistics of their advantages are taken over the processes, and gradients are averaged. With `--update captured` NCCL
does both inside the graph of a minibatch.
"""

import argparse
import os

from command_line import judge, needing, run, stop

with needing("cleanrl", __name__):
    import torch
    from ppo_gpu_envs import Agent, Training, compute_loss, evaluate_agent, parse_arguments, train_agent
    from torch import Tensor, distributed, nn
    from torch.nn.parallel import DistributedDataParallel

    from rl_triton_core import normalize_advantages
    from rl_triton_core.capture import CapturedStep, use_capture_stream


class MinibatchLoss(nn.Module):
    """An agent's loss as a module's forward pass, which is where DistributedDataParallel averages gradients."""

    def __init__(self, agent: Agent, args: argparse.Namespace):
        super().__init__()
        self.agent, self.args = agent, args

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return compute_loss(self.agent, batch, self.args)


class DistributedTraining(Training):
    """Training whose minibatches have a share in every process. All begin with the weights of the first."""

    def make_update(self) -> CapturedStep:
        if self.args.update == "compiled":
            raise ValueError("--update: got compiled, which averages no gradients, expected eager or captured")
        with use_capture_stream(self.args.device if self.args.update == "captured" else "cpu"):
            self.loss = DistributedDataParallel(MinibatchLoss(self.agent, self.args))
        return CapturedStep(self.update_rows, modules=[self.loss], optimizers=[self.optimizer], enabled=self.enabled)

    def update_rows(self, rows: Tensor) -> None:
        batch = {name: x.index_select(0, rows) for name, x in self.data.items()}
        batch["advantages"] = normalize_advantages(batch["advantages"], group="world")
        self.optimizer.zero_grad()
        self.loss(batch).backward()
        nn.utils.clip_grad_norm_(self.agent.parameters(), self.args.max_grad_norm)
        self.optimizer.step()


def main() -> int:
    args = parse_arguments(description=__doc__)
    if "RANK" not in os.environ:
        stop("got no RANK in the environment, expected to be started by torchrun")
    if args.update == "compiled":
        stop("--update: got compiled, which averages no gradients, expected eager or captured")
    rank = int(os.environ["RANK"])
    if args.device == "cuda":
        if int(os.environ["LOCAL_RANK"]) >= torch.cuda.device_count():
            stop(f"--nproc-per-node: got more processes than the {torch.cuda.device_count()} GPUs of this machine")
        args.device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(args.device)
    distributed.init_process_group("nccl" if args.device.startswith("cuda") else "gloo")
    args.seed += 1000 * rank  # other environments, actions and minibatches in every process
    args.quiet |= rank > 0
    agent = train_agent(args, DistributedTraining)
    distributed.barrier()  # one that parts earlier breaks off what others have not received
    distributed.destroy_process_group()
    if rank > 0:
        return 0
    return judge(evaluate_agent(agent, args), args.target_return)


if __name__ == "__main__":
    run(main)
