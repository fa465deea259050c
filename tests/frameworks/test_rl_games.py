"""Agents of RL-Games, stock against ours: advantages and training."""

from copy import deepcopy
from functools import partial
from tempfile import mkdtemp

import pytest
import torch

pytest.importorskip("rl_games")
from overrides import derive, list_names_in_front, override
from ppo_rl_games import evaluate_agent, make_config, parse_arguments, train_agent
from rl_games.algos_torch.a2c_continuous import A2CAgent
from rl_games.common import common_losses
from rl_games.torch_runner import Runner

from rl_triton_adapters.rl_games import TritonA2CAgent, TritonAdvantagesMixin, TritonDiscreteA2CAgent, register_agents

FLAGS = ["--num-envs", "6", "--num-steps", "8", "--epochs", "2", "--evaluation-episodes", "2", "--quiet"]
CLASSES = {"cartpole": TritonDiscreteA2CAgent, "pendulum": TritonA2CAgent}


def make_agent(advantages, env, folder, changes=(), registered=True, kind=None):
    """An agent as a runner makes it, with changes of the network too; most environments end an episode soon."""
    logs = mkdtemp(dir=folder)  # RL-Games names folders by the second
    flags = [*FLAGS, "--advantages", advantages, "--env", env, "--log-dir", logs]
    config = make_config(parse_arguments(flags))
    changes = deepcopy(dict(changes))  # in which RL-Games puts objects
    config["params"]["network"] |= changes.pop("network", {})
    config["params"]["config"] |= changes
    if not registered:
        del config["params"]["config"]["rl_triton"]
    runner = Runner()
    torch.set_float32_matmul_precision("highest")  # which the runner lowers: the next rounding would show
    torch.backends.cudnn.allow_tf32 = False
    if registered:
        register_agents(runner)
    if kind is not None:
        runner.algo_factory.register_builder(config["params"]["algo"]["name"], kind)
    runner.load(config)
    agent = runner.algo_factory.create(runner.algo_name, base_name="run", params=runner.params)
    envs = agent.vec_env.envs
    envs.elapsed.copy_(torch.arange(6) + envs.time_limit - 6)
    return agent


def make_both(env, folder, changes=(), **more):
    """RL-Games' agent and ours."""
    return [make_agent(advantages, env, folder, changes, **more) for advantages in ("stock", "triton")]


def train(agent, seed=1):
    torch.manual_seed(seed)
    agent.train()
    return agent


def list_trainers(agent):
    """The agent and, where it has one, its central value network: each has a `model` and an `optimizer`."""
    return [agent, agent.central_value_net] if agent.has_central_value else [agent]


def get_state(agent):
    states = [x.model.state_dict() for x in list_trainers(agent)]
    return {f"{name} {i}": x for i, state in enumerate(states) for name, x in state.items()}


def compare(got, want, **tolerance):
    for (name, x), y in zip(get_state(got).items(), get_state(want).values(), strict=True):
        torch.testing.assert_close(x, y, msg=lambda text, name=name: f"{name}: {text}", **tolerance)


@pytest.mark.parametrize("scale", [1.0, 1e-8, 1e6])
@pytest.mark.parametrize("value_size", [1, 2])
def test_advantages(value_size, scale, tmp_path):
    """And what RL-Games makes of them: at a deviation of 1e-8 the place of the normalisation's epsilon shows."""
    generator = torch.Generator().manual_seed(0)
    rewards, values = (torch.randn(8, 6, value_size, generator=generator) * scale for _ in range(2))
    flags = (torch.rand(9, 6, generator=generator) < 0.3).float()
    rewards += 0.99 * values * (flags[1:, :, None] * (torch.rand(8, 6, 1, generator=generator) < 0.5))
    last_values = torch.randn(6, value_size, generator=generator) * scale
    stock, ours = make_both("pendulum", tmp_path)
    want, got = (x.discount_values(flags[-1], last_values, flags[:-1], values, rewards) for x in (stock, ours))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6 * scale)
    normalize = getattr(common_losses, "normalize_advantage", lambda x: (x - x.mean()) / (x.std() + 1e-8))
    want, got = (normalize(x) for x in (want, got))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


class MotionPriors(A2CAgent):
    """With the advantages of agents of adversarial motion priors, in float64."""

    calls = 0

    def discount_values(self, mb_fdones, mb_values, mb_rewards, mb_next_values):
        self.calls += 1
        advantages, advantage = torch.zeros_like(mb_rewards), 0.0
        flags, values, rewards, next_values = (x.double() for x in (mb_fdones, mb_values, mb_rewards, mb_next_values))
        for t in reversed(range(self.horizon_length)):
            delta = rewards[t] + self.gamma * next_values[t] - values[t]
            advantage = delta + self.gamma * self.tau * (1.0 - flags[t]).unsqueeze(1) * advantage
            advantages[t] = advantage
        return advantages


@pytest.mark.parametrize("scale", [1.0, 1e-8, 1e6])
@pytest.mark.parametrize("value_size", [1, 2])
def test_advantages_with_values_of_next_states(value_size, scale, tmp_path):
    """They are 0 where an episode terminated, and not at a time limit. An agent keeps its own method, or says so."""
    generator = torch.Generator().manual_seed(0)
    streams = [torch.randn(8, 6, value_size, generator=generator) * scale for _ in range(3)]
    flags = (torch.rand(8, 6, generator=generator) < 0.4).float()
    streams[2] *= 1 - flags[..., None] * (torch.rand(8, 6, 1, generator=generator) < 0.5)
    ours, plain = {"discount_values": TritonAdvantagesMixin.discount_values}, (TritonAdvantagesMixin, A2CAgent)
    front = (TritonAdvantagesMixin, MotionPriors)
    cases = [(front, {}, {}, 1), (front, ours, {}, 0), (front, ours, {"rl_triton": False}, 1), (plain, {}, {}, 0)]
    found = []
    for bases, attributes, changes, calls in cases:
        agent = make_agent("triton", "pendulum", tmp_path, changes, kind=type("Own", bases, attributes))
        found.append(agent.discount_values(flags, *streams))
        assert getattr(agent, "calls", 0) == calls
    for got in found[1:]:
        torch.testing.assert_close(got, found[0], rtol=1e-5, atol=1e-6 * scale)


METHODS = ["discount_values", "calc_losses", "calc_gradients", "prepare_dataset", "train_actor_critic"]
METHODS += ["get_action_values", "get_values", "play_steps"]


@pytest.mark.parametrize("of", ["class before", "class behind", "object"])
@pytest.mark.parametrize("name", METHODS)
def test_methods_of_users(name, of, tmp_path):
    """In a class that derives from ours, in one that ours stands in front of, and on an agent."""
    own = derive(A2CAgent, name)
    ours = derive(TritonA2CAgent, name) if of == "class before" else type("Ours", (TritonA2CAgent, own), {})
    pair = (A2CAgent, TritonA2CAgent) if of == "object" else (own, ours)
    agents = [
        make_agent(mode, "pendulum", tmp_path, kind=kind) for mode, kind in zip(("stock", "triton"), pair, strict=True)
    ]
    for agent in agents:
        if of == "object":
            override(agent, name)
        train(agent)
    compare(*agents[::-1], rtol=1e-4, atol=2e-6)


def test_names_of_users_are_free(tmp_path):
    make = partial(make_agent, "triton", "pendulum", tmp_path)
    assert list_names_in_front(TritonA2CAgent, A2CAgent, lambda x: make(kind=x), 1, 2, 3, 4) <= {*dir(A2CAgent)}


@pytest.mark.parametrize("env", CLASSES)
def test_switched_off_in_the_environment_it_is_stock(env, tmp_path, switched_off):
    compare(*map(train, make_both(env, tmp_path)), rtol=0, atol=0)


def test_the_switch_is_a_bool(tmp_path):
    with pytest.raises(TypeError, match="rl_triton: got str, expected a bool"):
        make_agent("triton", "pendulum", tmp_path, {"rl_triton": "no"})


def test_checkpoints_go_both_ways(tmp_path):
    ours, stock = (make_agent(name, "pendulum", tmp_path) for name in ("triton", "stock"))
    ours.train()
    stock.set_full_state_weights(ours.get_full_state_weights())
    compare(stock, ours, rtol=0, atol=0)
    ours.set_full_state_weights(stock.get_full_state_weights())


def test_the_example_trains(tmp_path):
    args = parse_arguments([*FLAGS, "--log-dir", str(tmp_path), "--env", "pendulum"])
    assert evaluate_agent(train_agent(args), args).isfinite().all()
