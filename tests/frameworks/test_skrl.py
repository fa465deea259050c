"""Agents of skrl, stock against ours: returns, advantages, updates; in code and by the runner."""

import pickle
from importlib.metadata import version

import pytest
import torch

pytest.importorskip("skrl")
from gpu_envs import ENVIRONMENTS
from overrides import derive
from ppo_skrl import TensorEnv, evaluate_agent, make_config, parse_arguments, train_agent
from skrl.agents.torch.a2c import A2C
from skrl.agents.torch.amp import AMP
from skrl.agents.torch.ppo import PPO, PPO_RNN
from skrl.agents.torch.ppo import ppo as stock_ppo
from skrl.agents.torch.rpo import RPO, RPO_RNN
from skrl.agents.torch.sac import SAC
from skrl.agents.torch.trpo import TRPO
from skrl.multi_agents.torch.ippo import IPPO
from skrl.multi_agents.torch.mappo import MAPPO
from skrl.utils.runner.torch import Runner

from rl_triton_adapters import skrl as adapter
from rl_triton_adapters.skrl import TritonA2C, TritonPPO, TritonRunner, estimate_advantages, make_triton_class
from rl_triton_core.reach import copy_function

FLAGS = ["--num-envs", "6", "--num-steps", "8", "--iterations", "3", "--evaluation-episodes", "2", "--quiet"]


def parse(advantages, folder, *flags):
    return parse_arguments([*FLAGS, "--advantages", advantages, "--log-dir", str(folder), *flags])


@pytest.mark.parametrize("scale", [1.0, 1e-8, 1e6])
@pytest.mark.parametrize("time_limit_bootstrap", [False, True])
def test_advantages(time_limit_bootstrap, scale):
    """At a deviation of 1e-8 the place of the normalisation's epsilon shows."""
    generator = torch.Generator().manual_seed(0)
    rewards, values = (torch.randn(16, 5, 1, generator=generator) * scale for _ in range(2))
    terminated, truncated = (torch.rand(16, 5, 1, generator=generator) < 0.2 for _ in range(2))
    arguments = {"rewards": rewards, "values": values, "terminated": terminated, "truncated": truncated}
    arguments |= {"last_values": torch.randn(5, 1, generator=generator) * scale, "discount_factor": 0.98}
    arguments |= {"lambda_coefficient": 0.9, "time_limit_bootstrap": time_limit_bootstrap}
    (want_returns, want), (returns, got) = (f(**arguments) for f in (stock_ppo.compute_gae, estimate_advantages))
    torch.testing.assert_close(returns, want_returns, rtol=1e-5, atol=1e-6 * scale)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("agent_class", [PPO, A2C, RPO, TRPO, AMP, IPPO, MAPPO], ids=lambda x: x.__name__)
def test_every_agent_without_memory_has_a_class(agent_class):
    derived = make_triton_class(agent_class)
    assert issubclass(derived, agent_class) and derived.__name__ == f"Triton{agent_class.__name__}"
    is_captured = agent_class in (PPO, A2C, IPPO, MAPPO)
    assert is_captured == hasattr(derived, "recapture")
    update = derived.update.__wrapped__.__wrapped__ if is_captured else derived.update
    assert update.__globals__["compute_gae"].__wrapped__ is estimate_advantages
    assert update.__code__ is agent_class.update.__code__
    assert type(pickle.loads(pickle.dumps(object.__new__(derived)))) is derived  # as ParallelTrainer sends agents


def test_an_update_with_advantages_of_its_own_is_refused():
    """A user's function of that name."""
    calls_own = copy_function(PPO.update, {"compute_gae": lambda **kwargs: None})
    with pytest.raises(TypeError, match="calls the compute_gae of test_skrl, expected one that calls skrl's"):
        make_triton_class(type("Own", (PPO,), {"update": calls_own}))


def test_an_update_behind_ours_is_refused():
    own = derive(PPO, "update")
    with pytest.raises(TypeError, match="Ours: PPO has its own update .*, and got TritonPPO in front of it"):
        type("Ours", (TritonPPO, own), {})
    assert type("Ours", (own, TritonPPO), {}).update is own.update


@pytest.mark.parametrize("agent_class", [PPO, RPO])
def test_names_of_users_are_free(agent_class):
    """In front of theirs we have names of skrl's alone; what they call the same is theirs."""
    own = type("Own", (agent_class,), {"describe": lambda self: "own", "recapture": None})
    kind = make_triton_class(own)
    assert {name for name in vars(kind) if not name.startswith(("_abc_", "__", "_rl_triton"))} == {"update"}
    assert kind.describe is own.describe and kind.recapture is None


METHODS = ["act", "record_transition", "pre_interaction", "post_interaction", "_empty_preprocessor"]


@pytest.mark.parametrize("name", [*METHODS, "enable_training_mode"])
def test_methods_of_users(name, tmp_path, monkeypatch):
    """An update is skrl's code, which calls them; so is that of an agent that the runner derives from a user's."""
    find_component, own = Runner._component, derive(PPO, name)
    monkeypatch.setattr(Runner, "_component", lambda *args: own if (x := find_component(*args)) is PPO else x)
    stock, ours = (train_agent(parse(advantages, tmp_path)) for advantages in ("stock", "triton"))
    assert type(stock) is own and isinstance(ours, own) and type(ours).update is not own.update
    for part in ("policy", "value"):
        states = (getattr(x, part).state_dict() for x in (ours, stock))
        torch.testing.assert_close(*states, rtol=1e-4, atol=2e-6)


AGENT = object.__new__(type("Agent", (PPO,), {"__str__": lambda self: "an agent"}))
RECURRENT, OTHER = "count the value after a time limit twice", "expected an agent of skrl that computes advantages"


@pytest.mark.parametrize(
    ("agent_class", "message"),
    [(PPO_RNN, RECURRENT), (RPO_RNN, RECURRENT), *((x, OTHER) for x in (SAC, int, "PPO", AGENT))],
)
def test_recurrent_and_other_agents_are_refused(agent_class, message):
    with pytest.raises(TypeError, match=message):
        make_triton_class(agent_class)


def test_an_update_without_the_call_is_refused():
    with pytest.raises(ImportError, match=f"calls no compute_gae: found skrl {version('skrl')}, needs another version"):
        adapter.replace_gae(SAC.update)


def test_an_older_version_is_refused():
    """Up to 2.0 no agent of skrl has the values of all steps end with `last_values`."""
    older = copy_function(RPO_RNN.update, {"compute_gae": copy_function(RPO_RNN.update.__globals__["compute_gae"], {})})
    older.__globals__["compute_gae"].__module__ = stock_ppo.__name__
    with pytest.raises(ImportError, match=r"next_values.*: found skrl .*, needs another version \(2.1 or newer\)"):
        adapter.replace_gae(older)


def test_the_runner_leaves_other_components_alone(tmp_path):
    runner = TritonRunner(TensorEnv(ENVIRONMENTS["cartpole"](2)), make_config(parse("triton", tmp_path)))
    assert runner._component("sac") is SAC
    assert runner._component("a2c") is TritonA2C and issubclass(TritonA2C, A2C)


@pytest.mark.parametrize(("before", "after"), [("stock", "triton"), ("triton", "stock")])
def test_checkpoints_go_both_ways(before, after, tmp_path):
    first, second = train_agent(parse(before, tmp_path)), train_agent(parse(after, tmp_path, "--seed", "2"))
    first.save(str(tmp_path / "agent.pt"))
    second.load(str(tmp_path / "agent.pt"))
    torch.testing.assert_close(second.policy.state_dict(), first.policy.state_dict(), rtol=0, atol=0)


def test_switched_off_in_the_environment_it_is_stock(tmp_path, switched_off):
    stock, ours = (train_agent(parse(name, tmp_path)) for name in ("stock", "triton"))
    torch.testing.assert_close(ours.policy.state_dict(), stock.policy.state_dict(), rtol=0, atol=0)


def test_the_example_evaluates(tmp_path):
    args = parse("triton", tmp_path, "--env", "pendulum")
    assert evaluate_agent(train_agent(args), args).isfinite().all()
