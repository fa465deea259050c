"""The CleanRL adapter against CleanRL's loop, against walks over episodes, and on rollouts of real environments.

The oracles are NumPy in float64 and import nothing of ours: a loop goes backward over the rollout by CleanRL's arrival
flags; walks add up, for each step, the temporal differences of the rest of its episode.
"""

import os
import re
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from cases import check_full_graph
from core import conventions_rollouts as real
from gpu_checks import assert_replays, forbid_waiting
from gymnasium.vector import AutoresetMode
from processes import run_python
from recorded_graphs import allow_captures
from torch.distributions import Distribution

from rl_triton_adapters.cleanrl import gae

GAMMA, LAMBDA = 0.97, 0.9
SHAPES = [(1, 1), (1, 4), (7, 1), (32, 3)]
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "cleanrl.md"


def run_loop(rewards, values, dones, next_value, next_done, gamma, gae_lambda, dtype=np.float64):
    """Advantages and returns by CleanRL's recursion; with float32 in CleanRL's order of operations."""
    rewards, values = (np.asarray(x, dtype) for x in (rewards, values))
    alive = 1 - np.concatenate([np.asarray(dones, dtype)[1:], np.asarray(next_done, dtype).reshape(1, -1)])
    ahead = np.concatenate([values[1:], np.asarray(next_value, dtype).reshape(1, -1)])
    decay, gamma = dtype(gamma * gae_lambda), dtype(gamma)
    advantages, carry = np.empty_like(rewards), np.zeros_like(rewards[0])
    for t in range(len(rewards) - 1, -1, -1):
        error = rewards[t] + gamma * ahead[t] * alive[t] - values[t]
        carry = error + decay * alive[t] * carry
        advantages[t] = carry
    return advantages, advantages + values


class Rollout(NamedTuple):
    """What a CleanRL script has at the end of a window, with its own names, and both departure flags."""

    rewards: torch.Tensor
    values: torch.Tensor
    dones: torch.Tensor
    next_value: torch.Tensor
    next_done: torch.Tensor
    truncations: torch.Tensor
    final_values: torch.Tensor

    @property
    def stock(self):
        return self[:5]

    @property
    def limits(self):
        return {"truncations": self.truncations, "final_values": self.final_values}


def random_rollout(num_steps=32, num_envs=3, seed=0, ends=0.25):
    generator = torch.Generator().manual_seed(seed)
    rewards, values, final_values = torch.randn(3, num_steps, num_envs, generator=generator)
    done = torch.rand(num_steps + 1, num_envs, generator=generator) < ends
    truncations = done[1:] & (torch.rand(num_steps, num_envs, generator=generator) < 0.5)
    next_value = torch.randn(1, num_envs, generator=generator)
    dones = done.float()
    return Rollout(rewards, values, dones[:-1], next_value, dones[-1], truncations, final_values)


def to_numpy(tensors):
    return [x.cpu().numpy() for x in tensors]


def assert_near(got, want, tolerance=1e-5):
    for x, y in zip(got, want, strict=True):
        assert x.dtype == torch.float32
        np.testing.assert_allclose(x.cpu().numpy(), y, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", [*SHAPES, (128, 8), (512, 1)])
def test_bit_for_bit_on_the_cpu(shape):
    rollout = random_rollout(*shape, seed=3, ends=0.05)
    want = run_loop(*to_numpy(rollout.stock), GAMMA, LAMBDA, dtype=np.float32)
    for got in (gae(*rollout.stock, GAMMA, LAMBDA, backend="cpu"), gae(*rollout.stock, GAMMA, LAMBDA)):
        assert all(torch.equal(x, torch.from_numpy(y)) for x, y in zip(got, want, strict=True))


def record_rollouts(name, mode, every=1, device="cpu"):
    """Rollouts of real environments, and by walks over what took place their advantages; some end with a time limit."""
    windows, recorders = real.record(name, mode)
    assert any(window.departed.any() for window in windows) and any(window.truncated[-1].any() for window in windows)
    for window in windows[::every]:
        dones = np.concatenate([window.departed[None], window.done[:-1]])
        values, next_value, final_values = map(real.value, (window.obs, window.next_obs[None], window.final_obs))
        cut = window.truncated & ~window.terminated
        stored = window.rewards, values, dones, next_value, window.done[-1], cut, final_values
        rollout = Rollout(*(torch.as_tensor(np.asarray(x, np.float32)).to(device) for x in stored))
        yield rollout, partial(real.advantages, recorders, window.start, len(dones))


@pytest.mark.parametrize("name", real.ENVIRONMENTS)
def test_real_environments(name):
    """Time limits as terminations, CleanRL's way, and as what they are. Final values are NaN where no episode ended."""
    for rollout, walk in record_rollouts(name, AutoresetMode.SAME_STEP):
        for limits, following in (({}, real.as_termination), (rollout.limits, real.next_value)):
            want = walk(following).T
            assert_near(gae(*rollout.stock, GAMMA, LAMBDA, **limits), (want, want + rollout.values.numpy()))


@pytest.mark.parametrize("name", real.ENVIRONMENTS)
def test_environments_that_reset_in_the_next_step(name, target):
    """Steps that only reset have advantage 0, and the flags say which they are."""
    given = {"autoreset": "next_step", "backend": target.backend}
    for rollout, walk in record_rollouts(name, AutoresetMode.NEXT_STEP, 6 if target.interpreted else 1, target.device):
        for limits, following in (({}, real.as_termination), ({"truncations": rollout.truncations}, real.next_value)):
            walked = walk(following).T
            assert np.array_equal(np.isnan(walked), rollout.dones.cpu())
            assert_near(gae(*rollout.stock, GAMMA, LAMBDA, **limits, **given)[:1], [np.nan_to_num(walked)])


def test_a_truncation_without_its_done_is_never_silent():
    """As when truncations are stored like dones, before the step: NaN in that episode and in no other."""
    rollout = random_rollout(num_steps=6, num_envs=2, ends=0.0)
    rollout.dones[3] = 1  # step 2 ended
    rollout.truncations[3, 0], rollout.truncations[2, 1] = True, True
    advantages, returns = gae(*rollout.stock, GAMMA, LAMBDA, **rollout.limits)
    assert advantages[:, 0].isnan().tolist() == returns[:, 0].isnan().tolist() == [False] * 3 + [True] + [False] * 2
    assert advantages[:, 1].isfinite().all()
    rollout.truncations[2, 1] = False
    rollout.truncations[3, 1] = True
    late = gae(*rollout.stock, GAMMA, LAMBDA, truncations=rollout.truncations, autoreset="next_step").advantages
    assert late[:, 1].isnan().tolist() == [True] * 3 + [False] * 3 and late[2, 0].isnan()


@pytest.mark.parametrize("flags", [torch.bool, torch.uint8, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(3,), (1, 3), (3, 1)])
def test_types_of_flags_and_shapes_of_what_follows(flags, shape):
    rollout = random_rollout()
    want = gae(*rollout.stock, GAMMA, LAMBDA, **rollout.limits)
    rewards, values, dones, next_value, next_done = rollout.stock
    following = next_value.reshape(shape), next_done.to(flags).reshape(shape)
    limits = {"truncations": rollout.truncations.to(flags), "final_values": rollout.final_values}
    got = gae(rewards, values, dones.to(flags), *following, GAMMA, LAMBDA, **limits)
    assert torch.equal(got.advantages, want.advantages) and torch.equal(got.returns, want.returns)


def test_inputs_are_left_alone_and_results_carry_no_graph():
    rollout = random_rollout()
    before = [x.clone() for x in rollout]
    rollout.values.requires_grad_()
    results = gae(*rollout.stock, GAMMA, LAMBDA, **rollout.limits)
    assert not any(x.requires_grad for x in results)
    assert all(torch.equal(x, y) for x, y in zip(rollout, before, strict=True))


@pytest.mark.parametrize("limits", [False, True])
def test_gae_in_one_graph(limits):
    def call(*arguments):
        *stock, truncations, final_values = [*arguments, None, None][:7]
        return gae(*stock, GAMMA, LAMBDA, truncations=truncations, final_values=final_values)

    rollout = random_rollout()
    check_full_graph(call, *(rollout if limits else rollout.stock))


BAD = {
    r"gae_lambda: got 1.1\d*, expected a number in \[0, 1\]": {"gae_lambda": torch.tensor(1.1)},
    "truncations: got None together with final_values, expected both or neither": {"truncations": None},
    "final_values: got None together with truncations, expected both or neither": {"final_values": None},
    "autoreset: got 'disabled', expected one of same_step, next_step": {"autoreset": "disabled"},
    "final_values: got Tensor, expected None with autoreset='next_step'": {"autoreset": "next_step"},
}


@pytest.mark.parametrize("message", BAD)
def test_wrong_input_is_named(message):
    kwargs = random_rollout()._asdict() | {"gamma": GAMMA, "gae_lambda": LAMBDA}
    gae(**kwargs)
    with pytest.raises(ValueError, match=f"^{message}"):
        gae(**kwargs | BAD[message])


def test_no_framework_is_imported():
    program = """
        import sys, rl_triton_adapters.cleanrl
        print(sorted({"gym", "gymnasium", "stable_baselines3", "tensordict"} & sys.modules.keys()))
    """
    assert run_python(program, PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "adapters")])).strip() == "[]"


def test_the_examples_of_the_documentation(monkeypatch):
    monkeypatch.setattr(Distribution, "_validate_args", Distribution._validate_args)  # which one of them sets
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert [name for name in ("gae(",) if not any(name in block for block in blocks)] == []
    for block in blocks:
        exec(compile(block, "docs/cleanrl.md", "exec"), {})


def update_sac(actor, qf1, qf2, qf1_target, qf2_target, log_alpha, q_optimizer, actor_optimizer, a_optimizer, data):
    """A gradient step of `sac_continuous_action.py`, of its equations: losses, and targets."""
    (o, a, r, n, d), alpha = data, log_alpha.exp().item()
    with torch.no_grad():
        b, log_pi, _ = actor.get_action(n)
        y = r + (1 - d) * 0.99 * (torch.min(qf1_target(n, b), qf2_target(n, b)) - alpha * log_pi)
    q_loss = (qf1(o, a) - y).square().mean() + (qf2(o, a) - y).square().mean()
    make_step(q_optimizer, q_loss)
    pi, log_pi, _ = actor.get_action(o)
    actor_loss = (alpha * log_pi - torch.min(qf1(o, pi), qf2(o, pi))).mean()
    make_step(actor_optimizer, actor_loss)
    with torch.no_grad():
        _, log_pi, _ = actor.get_action(o)
    alpha_loss = (-log_alpha.exp() * (log_pi - 1.0)).mean()
    make_step(a_optimizer, alpha_loss)
    own, targets = ([*a.parameters(), *b.parameters()] for a, b in ((qf1, qf2), (qf1_target, qf2_target)))
    targets = [0.005 * x + 0.995 * y for x, y in zip(own, targets, strict=True)]
    return [q_loss, actor_loss, alpha_loss, log_alpha, *targets]


def make_step(optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def read_sac(monkeypatch):
    """The block of the page. It switches the checks of distributions off, which are on again afterwards."""
    monkeypatch.setattr(Distribution, "_validate_args", Distribution._validate_args)
    (block,) = [x for x in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "update_critics" in x]
    return compile(block, "docs/cleanrl.md", "exec")


def test_a_step_of_sac_is_that_of_the_script(monkeypatch):
    names, parts = {}, ("actor", "qf1", "qf2", "qf1_target", "qf2_target", "log_alpha")
    exec(read_sac(monkeypatch), names)
    parts += ("q_optimizer", "actor_optimizer", "a_optimizer")
    stock = deepcopy([names[x] for x in parts])
    data = [*(torch.randn(16, n) for n in (3, 1, 1, 3)), (torch.rand(16, 1) < 0.3).float()]
    torch.manual_seed(2)
    want = update_sac(*stock, data)
    torch.manual_seed(2)
    got = [names["update_critics"](*data), *names["update_actor"](data[0]), names["log_alpha"]]
    names["update_targets"]()
    got += [*names["qf1_target"].parameters(), *names["qf2_target"].parameters()]
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_captured_steps_of_sac_are_those_without_graphs(monkeypatch):
    """The block of the page as it stands, and with its steps in recorded graphs."""
    block, trained = read_sac(monkeypatch), []
    for _ in range(2):
        torch.manual_seed(0)
        names = {}
        exec(block, names)
        networks = [x.state_dict() for x in names["networks"]]
        trained.append([*networks, names["log_alpha"], names["qf_loss"].clone(), names["alpha_loss"].clone()])
        assert bool(names["critic_step"].reason) == bool(names["actor_step"].reason) == (len(trained) == 1)
        allow_captures(monkeypatch)
    torch.testing.assert_close(*trained)


def copy_to_gpu(rollout):
    return Rollout(*(x.cuda() for x in rollout))


def compute_all(rollout):
    return gae(*rollout.stock, GAMMA, LAMBDA, **rollout.limits)


@pytest.mark.gpu
def test_the_numbers_of_the_cpu_without_waiting():
    given = copy_to_gpu(random_rollout())
    for _ in range(3):
        compute_all(given)  # what is compiled and recorded comes before
    with forbid_waiting():
        got = compute_all(given)
    assert all(x.device.type == "cuda" for x in got)
    assert_near(got, compute_all(random_rollout()))


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_in_a_cuda_graph(compiled):
    """As LeanRL makes it: what was captured computes from what stands in the inputs when it is replayed."""
    torch._dynamo.reset()
    given, call = copy_to_gpu(random_rollout()), torch.compile(compute_all, fullgraph=True) if compiled else compute_all

    def renew(seed):
        for x, y in zip(given, random_rollout(seed=seed), strict=True):
            x.copy_(y)

    got = assert_replays(lambda: call(given), partial(renew, 1), partial(renew, 2), warmups=3)
    assert_near(got, compute_all(random_rollout(seed=2)))
