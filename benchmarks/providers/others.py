"""What takes a few lines: ours, floors, a compiled scan, a NumPy loop, and GAE by Numba and by frameworks.

Frameworks are imported where they are called: each may be missing.
"""

import itertools
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

import rl_triton_core
from benchmarks.equations import scan_by_doubling, scan_serially
from benchmarks.harness import Call
from benchmarks.workloads import ESTIMATORS, GAMMA, Inputs, Workload, solve_equations

PAIRS = {spec.function for spec in ESTIMATORS.values() if len(spec.outputs) == 2}  # the functions that have two results
COMPILER = "inductor"


def make_call(workload: Workload, inputs: Inputs) -> partial[Any]:
    """Ours, as a user calls it; the results are allocated by the call."""
    spec = workload.spec
    options: dict[str, Any] = {"time_dim": workload.time_dim, **inputs}
    if spec.function == "compute_gae" and spec.outputs == ("advantages",):
        options["compute_returns"] = False
    if spec.discounts:
        options["gamma"] = GAMMA
    if spec.lambda_ is not None:
        options["lambda_"] = spec.lambda_
    return partial(getattr(rl_triton_core, spec.function), **options)


def make_call_with_out(workload: Workload, inputs: Inputs) -> Call:
    """Ours, with results that go into tensors that are there."""
    like = inputs[workload.spec.inputs[0]]
    results = [torch.empty_like(like, dtype=torch.float32) for _ in workload.spec.outputs]
    out = (*results, None)[:2] if workload.spec.function in PAIRS else results[0]
    return partial(make_call(workload, inputs), out=out)


def make_annealed_call(workload: Workload, inputs: Inputs) -> Call | None:
    """Ours, with discounts that are other numbers in every call, but for rounding to float32."""
    call, numbers = make_call(workload, inputs), itertools.count()
    names = [name for name in ("gamma", "lambda_") if name in call.keywords]

    def call_with_others() -> Any:
        factor = 1 - 1e-12 * next(numbers)
        return call(**{name: factor * call.keywords[name] for name in names})

    return call_with_others if names else None


def make_null_call(workload: Workload, inputs: Inputs) -> Call:
    """Nothing: what the protocol itself costs."""
    return lambda: None


def make_torch_add(workload: Workload, inputs: Inputs) -> Call:
    """a + b in float32: what PyTorch asks for one elementwise operation on the same shape."""
    a, b = torch.ones(2, workload.num_envs, workload.num_steps, device=next(iter(inputs.values())).device)
    return lambda: torch.add(a, b)


def make_compiled_call(workload: Workload, inputs: Inputs) -> Call:
    """torch.compile of a doubling scan, for the shape of the inputs."""
    solve = partial(solve_equations, workload.spec, workload.time_dim, scan=scan_by_doubling)
    torch._dynamo.reset()
    return partial(torch.compile(solve, dynamic=False, fullgraph=True, backend=COMPILER), inputs)


def make_numpy_call(workload: Workload, inputs: Inputs) -> Call:
    """The paper's equation by PyTorch, around a NumPy loop over time on all environments in float32."""
    return lambda: solve_equations(workload.spec, workload.time_dim, inputs, scan_serially)


def make_numba_call(workload: Workload, inputs: Inputs) -> Call:
    """A serial loop over each environment's row, on one thread, over arrays with time last."""
    dim, rates = workload.time_dim, (np.float32(GAMMA), np.float32(workload.spec.lambda_))
    arrays = [inputs[name].movedim(dim, 1).numpy() for name in ("rewards", "values", "terminated")]
    arrays.append(inputs["bootstrap_values"].numpy())
    return lambda: [torch.from_numpy(x).movedim(1, dim) for x in compile_rows()(*arrays, *rates)]


@cache
def compile_rows() -> Any:
    import numba

    return numba.njit(run_rows)


def run_rows(rewards: Any, values: Any, terminated: Any, bootstrap: Any, gamma: Any, lambda_: Any) -> Any:
    advantages, returns = np.empty(rewards.shape, np.float32), np.empty(rewards.shape, np.float32)
    for n in range(rewards.shape[0]):
        advantage, following = np.float32(0), bootstrap[n]
        for t in range(rewards.shape[1] - 1, -1, -1):
            nonterminal = np.float32(0 if terminated[n, t] else 1)
            delta = rewards[n, t] + gamma * following * nonterminal - values[n, t]
            advantage = delta + gamma * lambda_ * nonterminal * advantage
            advantages[n, t], returns[n, t], following = advantage, advantage + values[n, t], values[n, t]
    return advantages, returns


def make_sb3_call(workload: Workload, inputs: Inputs) -> Call:
    from gymnasium import spaces
    from stable_baselines3.common.buffers import RolloutBuffer

    chosen = {"gamma": GAMMA, "gae_lambda": workload.spec.lambda_, "n_envs": workload.num_envs}
    buffer = RolloutBuffer(workload.num_steps, spaces.Box(-1, 1, (1,)), spaces.Discrete(2), **chosen)
    buffer.rewards[:], buffer.values[:] = inputs["rewards"].numpy(), inputs["values"].numpy()
    dones = inputs["terminated"].numpy()
    buffer.episode_starts[1:] = dones[:-1]

    def call() -> list[Tensor]:
        buffer.compute_returns_and_advantage(inputs["bootstrap_values"], dones[-1])
        return [torch.from_numpy(buffer.advantages), torch.from_numpy(buffer.returns)]

    return call


def make_torchrl_call(workload: Workload, inputs: Inputs) -> Call:
    from torchrl.objectives.value.functional import vec_generalized_advantage_estimate as compute

    values, terminated, lambda_ = inputs["values"], inputs["terminated"], workload.spec.lambda_
    following = torch.cat([values[:, 1:], inputs["bootstrap_values"][:, None]], 1)
    tensors = [x.unsqueeze(-1) for x in (values, following, inputs["rewards"], terminated, terminated)]
    return lambda: [x.squeeze(-1) for x in compute(GAMMA, lambda_, *tensors)]
