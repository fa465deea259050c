"""What the stock algorithms free, ours free: peaks of NumPy's memory, which holds rollouts, and what outlives one."""

import gc
import tracemalloc
import weakref
from functools import partial

import gymnasium as gym
import numpy as np
import pytest

pytest.importorskip("sb3_contrib")
import sb3_kinds
from gymnasium import spaces
from sb3_callbacks import At
from sb3_kinds import A2C, PPO, MaskablePPO, RecurrentPPO, TritonA2C, TritonDQN, TritonMaskablePPO, TritonPPO, TritonSAC
from stable_baselines3.common.vec_env import DummyVecEnv

from rl_triton_adapters import estimate

IMAGE = spaces.Box(0, 255, (3, 84, 84), np.uint8)  # of a rollout 1.4 MB; one of Python's own tables may grow by 0.1
ARRAY = spaces.Box(-1, 1, (5000,))


class Watching(gym.Env):
    """Nothing happens in front of large observations."""

    action_space = spaces.Discrete(2)

    def __init__(self, observation_space):
        self.observation_space = observation_space

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), 1.0, False, False, {}

    def action_masks(self):
        return np.ones(2, bool)


CASES = {
    "array": (PPO, TritonPPO, "MlpPolicy", ARRAY),
    "image": (PPO, TritonPPO, "CnnPolicy", IMAGE),
    "dictionary": (PPO, TritonPPO, "MultiInputPolicy", spaces.Dict(dict.fromkeys("abcd", ARRAY))),
    "a2c": (A2C, TritonA2C, "MlpPolicy", ARRAY),
    "maskable": (MaskablePPO, TritonMaskablePPO, "MlpPolicy", ARRAY),
    "recurrent": (RecurrentPPO, partial(sb3_kinds.TritonRecurrentPPO, enabled=True), "MlpLstmPolicy", ARRAY),
}
N_STEPS = 64  # of both environments


def make_model(case, is_stock):
    stock, ours, policy, space = CASES[case]
    options = {} if stock is A2C else {"batch_size": 8, "n_epochs": 1}
    options |= {"policy_kwargs": {"lstm_hidden_size": 8}} if stock is RecurrentPPO else {}
    envs = DummyVecEnv([partial(Watching, space)] * 2)  # of a single one, flat arrays are views
    return (stock if is_stock else ours)(policy, envs, n_steps=N_STEPS // 2, seed=0, device="cpu", **options)


def measure_peaks(case, is_stock):
    """Peaks above what there is before, in rollouts: of making the model, then of three rollouts and updates."""
    peaks = []

    def read_peak(_):
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.reset_peak()

    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        model = make_model(case, is_stock)
        read_peak(model)
        moments = ("rollout_start", "rollout_end", "training_end")
        model.learn(3 * N_STEPS, callback=[At(read_peak, moment=x) for x in moments])
    finally:
        tracemalloc.stop()
    space = model.observation_space
    parts = space.spaces.values() if isinstance(space, spaces.Dict) else [space]
    return (np.array(peaks) - before) / (N_STEPS * sum(x.dtype.itemsize * np.prod(x.shape) for x in parts))


@pytest.mark.parametrize("case", CASES)
def test_peaks_are_those_of_stock(case):
    for is_stock in (True, False, False):  # whatever is imported, compiled or asked once
        make_model(case, is_stock).learn(N_STEPS)
    stock, ours = measure_peaks(case, is_stock=True), measure_peaks(case, is_stock=False)
    assert len(stock) == len(ours) == 8 and (stock > 0.9).all()
    assert (ours < stock + 0.2).all(), (stock, ours)


@pytest.mark.parametrize("case", CASES)
def test_a_rollout_is_gone_while_the_next_is_collected(case):
    model, last, is_alive = make_model(case, is_stock=False), [], []
    train = model.train

    def train_and_note():
        train()
        stored = model.rollout_buffer.observations
        last.append(weakref.ref(stored["a"] if isinstance(stored, dict) else stored))

    model.train = train_and_note
    watch = At(lambda _: is_alive.extend(x() is not None for x in last))
    model.learn(3 * N_STEPS, callback=[watch, At(lambda _: last.clear(), moment="rollout_end")])
    assert is_alive == [False] * N_STEPS


OFF_POLICY = {"env": "Pendulum-v1", "buffer_size": 500, "learning_starts": 20, "train_freq": 1}
FREED = {
    TritonPPO: {"n_steps": 32},
    TritonA2C: {"n_steps": 32},
    TritonDQN: OFF_POLICY | {"env": "CartPole-v1"},
    TritonSAC: OFF_POLICY,
}


@pytest.mark.parametrize("kind", FREED)
def test_a_model_that_is_forgotten_is_freed(kind):
    """Also by what times it, as a report asks for."""
    with estimate.Clock().watch():
        model = kind("MlpPolicy", device="cpu", **{"env": "CartPole-v1", **FREED[kind]}).learn(64)
    optimizer = model.actor.optimizer if kind is TritonSAC else model.policy.optimizer
    kept = [weakref.ref(x) for x in (model, model.policy, optimizer)]
    del model, optimizer
    gc.collect()
    assert [x() for x in kept] == [None] * 3
