"""The mix-in for CleanRL's rollout buffer, a copy of that of Stable-Baselines3, in front of the original."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer
from test_cleanrl import GAMMA, LAMBDA, SHAPES, assert_near, random_rollout, run_loop, to_numpy

from rl_triton_adapters.cleanrl import RolloutBufferMixin


class Buffer(RolloutBufferMixin, RolloutBuffer):
    pass


def fill_buffer(buffer_class, rollout, **kwargs):
    """A buffer that went through `add` and computed its advantages."""
    num_steps, num_envs = rollout.rewards.shape
    box = spaces.Box(-1.0, 1.0, (2,), np.float32)
    kwargs = {"device": "cpu", "gae_lambda": LAMBDA, "gamma": GAMMA, "n_envs": num_envs} | kwargs
    buffer = buffer_class(num_steps, box, spaces.Discrete(2), **kwargs)
    nothing = np.zeros((num_envs, 2), np.float32), np.zeros((num_envs, 1))
    for t in range(num_steps):
        rewards, values, dones = rollout.rewards[t], rollout.values[t], rollout.dones[t]
        buffer.add(*nothing, rewards.numpy(), dones.numpy(), values, torch.zeros(num_envs))
    buffer.compute_returns_and_advantage(rollout.next_value.reshape(-1, 1), rollout.next_done.bool().numpy())
    return buffer


@pytest.mark.parametrize("shape", SHAPES)
def test_the_buffer_bit_for_bit(shape):
    rollout = random_rollout(*shape)
    got, want = fill_buffer(Buffer, rollout), fill_buffer(RolloutBuffer, rollout)
    np.testing.assert_array_equal(got.advantages, want.advantages)
    np.testing.assert_array_equal(got.returns, want.returns)
    assert_near(map(torch.from_numpy, (got.advantages, got.returns)), run_loop(*to_numpy(rollout.stock), GAMMA, LAMBDA))
    batches = zip(got.get(), want.get(), strict=True)
    assert all(x.advantages.shape == y.advantages.shape for x, y in batches)


def test_the_buffers_backend_can_be_named():
    class Reference(Buffer):
        backend = "reference"

    class Nowhere(Buffer):
        backend = "no-such-backend"

    rollout = random_rollout()
    np.testing.assert_allclose(fill_buffer(Reference, rollout).returns, fill_buffer(Buffer, rollout).returns, atol=1e-5)
    with pytest.raises(ValueError, match="no-such-backend"):
        fill_buffer(Nowhere, rollout)


def test_a_mixin_behind_the_buffer_is_refused():
    with pytest.raises(TypeError, match="Behind: got RolloutBuffer before RolloutBufferMixin, expected it after"):

        class Behind(RolloutBuffer, RolloutBufferMixin):
            pass

    class Further(Buffer):
        def compute_returns_and_advantage(self, last_values, dones):
            super().compute_returns_and_advantage(last_values, dones)
            self.computed = True

    assert fill_buffer(Further, random_rollout()).computed


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"last_values": np.zeros(3)}, TypeError, "last_values: got ndarray, expected a torch.Tensor"),
        ({"last_values": torch.zeros(2)}, ValueError, r"last_values: got shape \(2,\), expected one value .*\(3\)"),
        ({"dones": np.zeros((3, 1), bool)}, ValueError, r"dones: got shape \(3, 1\), expected \(3,\)"),
        ({"dones": np.zeros(2, bool)}, ValueError, r"dones: got shape \(2,\), expected \(3,\)"),
        (
            {"values": np.zeros((96, 1), np.float32)},
            ValueError,
            r"values: got shape \(96, 1\), expected \(32, 3\): .*get",
        ),
        ({"episode_starts": [0.0]}, TypeError, r"Buffer.episode_starts: got list, expected the array of a"),
        ({"gae_lambda": 1.5}, ValueError, r"gae_lambda: got 1.5, expected a number in \[0, 1\]"),
        ({"gae_lambda": "1"}, TypeError, "gae_lambda: got str"),
        ({"gamma": float("nan")}, ValueError, "gamma: got nan"),
    ],
)
def test_the_buffer_names_what_is_wrong_and_writes_nothing(change, error, message):
    buffer = fill_buffer(Buffer, random_rollout())
    buffer.advantages[:] = buffer.returns[:] = 7.0
    arguments = {"last_values": torch.zeros(3, 1), "dones": np.zeros(3, bool)}
    arguments |= {name: x for name, x in change.items() if name in arguments}
    vars(buffer).update({name: x for name, x in change.items() if name not in arguments})
    with pytest.raises(error, match=message):
        buffer.compute_returns_and_advantage(**arguments)
    assert (buffer.advantages == 7.0).all() and (buffer.returns == 7.0).all()
