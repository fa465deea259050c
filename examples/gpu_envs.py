"""CartPole-v1 and Pendulum-v1 of Gymnasium as tensors on one device, all environments stepped at once."""

from math import pi
from typing import ClassVar

import torch
from torch import Tensor


class Envs:
    """Environments whose states are the rows of one tensor. An episode that ends starts anew in the same step."""

    observations: ClassVar[int]
    actions: ClassVar[int]
    discrete: ClassVar[bool]
    time_limit: ClassVar[int]
    start: ClassVar[tuple[float, ...]]  # episodes start within ± these

    def __init__(self, num_envs: int, device: str = "cpu", seed: int = 0, dtype: torch.dtype = torch.float32):
        self.bounds = torch.tensor(self.start, device=device, dtype=dtype).repeat(num_envs, 1)
        self.generator = torch.Generator(device).manual_seed(seed)
        self.state, self.elapsed = self.draw_initial_states(), torch.zeros(num_envs, device=device)

    def draw_initial_states(self) -> Tensor:
        """States in which episodes start, [num_envs, ...]."""
        draws = torch.rand(self.bounds.shape, generator=self.generator, device=self.bounds.device)
        return (2 * draws - 1) * self.bounds

    def compute_transition(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The next states, rewards, and whether those states are terminal."""
        raise NotImplementedError

    def observe_state(self, state: Tensor) -> Tensor:
        """What a policy sees of states, which change in place."""
        return state.clone()

    def step(self, action: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Observations after a reset where an episode ended, rewards, terminated, truncated, final observations."""
        state, reward, terminated = self.compute_transition(self.state, action)
        self.elapsed += 1
        truncated = (self.elapsed >= self.time_limit) & ~terminated
        done = terminated | truncated
        final = self.observe_state(state)
        self.state.copy_(torch.where(done[:, None], self.draw_initial_states(), state))
        self.elapsed.masked_fill_(done, 0)
        return self.observe_state(self.state), reward, terminated, truncated, final


class CartPole(Envs):
    """CartPole-v1: (x, ẋ, θ, θ̇), pushed left or right."""

    observations, actions, discrete, time_limit = 4, 2, True, 500
    start = (0.05, 0.05, 0.05, 0.05)

    def compute_transition(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, x_dot, theta, theta_dot = state.unbind(-1)
        sine, cosine = theta.sin(), theta.cos()
        push = (20.0 * action - 10.0 + 0.05 * theta_dot.square() * sine) / 1.1
        turn = (9.8 * sine - cosine * push) / (0.5 * (4 / 3 - 0.1 * cosine.square() / 1.1))
        speed = push - 0.05 * turn * cosine / 1.1
        state = state + 0.02 * torch.stack([x_dot, speed, theta_dot, turn], dim=-1)
        terminated = (state[:, 0].abs() > 2.4) | (state[:, 2].abs() > 12 * 2 * pi / 360)
        return state, torch.ones_like(x), terminated


class Pendulum(Envs):
    """Pendulum-v1: (θ, θ̇), turned by a torque."""

    observations, actions, discrete, time_limit = 3, 1, False, 200
    start = (pi, 1.0)

    def compute_transition(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        theta, theta_dot = state.unbind(-1)
        torque = action[:, 0].clamp(-2, 2)
        angle = (theta + pi) % (2 * pi) - pi
        cost = angle.square() + 0.1 * theta_dot.square() + 0.001 * torque.square()
        theta_dot = (theta_dot + 0.05 * (15 * theta.sin() + 3 * torque)).clamp(-8, 8)
        state = torch.stack([theta + 0.05 * theta_dot, theta_dot], dim=-1)
        return state, -cost, torch.zeros_like(cost, dtype=torch.bool)

    def observe_state(self, state: Tensor) -> Tensor:
        theta, theta_dot = state.unbind(-1)
        return torch.stack([theta.cos(), theta.sin(), theta_dot], dim=-1)


ENVIRONMENTS: dict[str, type[Envs]] = {"cartpole": CartPole, "pendulum": Pendulum}
