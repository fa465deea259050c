"""Rollouts recorded from real environments, and advantages computed episode by episode from what happened in them.

A `Recorder` sits inside the vector environment, around each single one, and keeps every transition as it took place:
with the observation before any reset, and with the tick of the vector environment at which it did. `advantages` knows
nothing else: no flags of a window, no autoreset, no layout.
"""

from collections.abc import Callable
from typing import NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

GAMMA, LAMBDA = 0.97, 0.9


class Transition(NamedTuple):
    tick: int
    obs: np.ndarray
    reward: float
    next_obs: np.ndarray
    terminated: bool
    truncated: bool


class Recorder(gym.Wrapper):
    """Keeps the transitions of one environment, by episode. Each step is a tick; so is a reset, where it costs one."""

    def __init__(self, env, resets_cost_a_tick=False):
        super().__init__(env)
        self.episodes, self.tick, self.resets_cost_a_tick = [], 0, resets_cost_a_tick

    def reset(self, **kwargs):
        self.tick += self.resets_cost_a_tick and len(self.episodes) > 0
        self.episodes.append([])
        self.obs, info = self.env.reset(**kwargs)
        return self.obs, info

    def step(self, action):
        next_obs, reward, terminated, truncated, info = self.env.step(action)
        self.episodes[-1].append(
            Transition(self.tick, self.obs.copy(), float(reward), next_obs.copy(), bool(terminated), bool(truncated))
        )
        self.tick, self.obs = self.tick + 1, next_obs
        return next_obs, reward, terminated, truncated, info

    @property
    def transitions(self):
        return [transition for episode in self.episodes for transition in episode]


class BothAtOnce(gym.Env):
    """Ends in either way or in both at once, after a few steps."""

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._observe(), {}

    def step(self, action):
        terminated, truncated = self.np_random.random(2) < 0.2
        return self._observe(), self.np_random.normal(), bool(terminated), bool(truncated), {}

    def _observe(self):
        return self.np_random.normal(size=3).astype(np.float32)


def cartpole():
    return gym.make("CartPole-v1", max_episode_steps=14)


def pendulum():
    return gym.make("Pendulum-v1", max_episode_steps=6)


ENVIRONMENTS = {"cartpole": cartpole, "pendulum": pendulum, "both": BothAtOnce}


def value(obs):
    obs = np.asarray(obs, np.float64)
    return obs @ np.cos(1.0 + np.arange(obs.shape[-1])) + 0.5


def next_value(x: Transition) -> float:
    """What follows a transition: nothing after a termination, the critic's value of the observation otherwise."""
    return 0.0 if x.terminated else value(x.next_obs)


def as_termination(x):
    """What follows a transition, for those who count truncations as terminations."""
    return 0.0 if x.truncated else next_value(x)


def advantages(recorders, start, num_steps, following: Callable[[Transition], float] = next_value, value=value):
    """GAE of the window [start, start + num_steps), [num_envs, num_steps]; NaN at ticks that hold no transition."""
    result = np.full((len(recorders), num_steps), np.nan)
    for row, recorder in zip(result, recorders, strict=True):
        for episode in recorder.episodes:
            advantage = 0.0
            for x in reversed([x for x in episode if start <= x.tick < start + num_steps]):
                advantage = x.reward + GAMMA * following(x) - value(x.obs) + GAMMA * LAMBDA * advantage
                row[x.tick - start] = advantage
    return result


class Window(NamedTuple):
    """What a training loop sees of a vector environment, [num_steps, num_envs, ...]."""

    start: int
    obs: np.ndarray
    rewards: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    final_obs: np.ndarray
    """The final observations at done steps, NaN elsewhere; the observation after the step in mode NEXT_STEP."""
    next_obs: np.ndarray  # after the window
    departed: np.ndarray  # before the window

    @property
    def done(self):
        return self.terminated | self.truncated


def record(name, mode, num_envs=5, num_steps=13, num_windows=12):
    """Windows of one continuing rollout, and the recorders within."""
    next_step = mode == AutoresetMode.NEXT_STEP
    makers = [lambda: Recorder(ENVIRONMENTS[name](), next_step)] * num_envs
    envs = SyncVectorEnv(makers, autoreset_mode=mode)
    envs.action_space.seed(0)
    obs, _ = envs.reset(seed=0)
    done, windows = np.zeros(num_envs, bool), []
    for i in range(num_windows):
        before, steps = done, []
        for _ in range(num_steps):
            last = obs
            obs, rewards, terminated, truncated, infos = envs.step(envs.action_space.sample())
            done, final = terminated | truncated, obs
            if mode == AutoresetMode.SAME_STEP:
                final = np.full_like(obs, np.nan)
                if done.any():
                    assert (infos["_final_obs"] == done).all()
                    final[done] = np.stack(infos["final_obs"][done])
            if mode == AutoresetMode.DISABLED and done.any():
                obs, _ = envs.reset(options={"reset_mask": done})
            steps.append((last, rewards, terminated, truncated, final))
        windows.append(Window(i * num_steps, *map(np.stack, zip(*steps, strict=True)), obs, before))
    seen = {(x.terminated, x.truncated) for recorder in envs.envs for x in recorder.transitions}
    ends = {"cartpole": {(1, 0), (0, 1)}, "pendulum": {(0, 1)}, "both": {(1, 0), (0, 1), (1, 1)}}[name]
    assert ends <= seen <= ends | {(0, 0), (1, 1)}, seen
    return windows, envs.envs
