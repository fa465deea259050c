"""The blocks of docs/recipes.md, and for older versions of RSL-RL, against the frameworks' source, as it is installed.

None of them can be imported whole without much that a test does not need. What the blocks touch is taken from the
installed files; RLinf's registry is imported.
"""

import ast
import copy
import enum
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Optional, TypedDict, Union

import cloudpickle
import numpy as np
import pytest
import torch
from recorded_graphs import allow_captures

ROOT = Path(__file__).resolve().parents[2]


def read_block(section, page="recipes.md"):
    """The Python code of a section of a page."""
    text = (ROOT / "docs" / page).read_text()
    (block,) = re.findall(rf"^## {section}\n.*?```python\n(.*?)```", text, re.DOTALL | re.MULTILINE)
    assert block.count("```") == 0
    return block


def run_block(section, page="recipes.md"):
    names = {"__name__": "__main__"}  # as in a script of the user's
    exec(compile(read_block(section, page), f"docs/{page}, {section}", "exec"), names)
    return names


def find_source(package, path):
    """A file of an installed package, which is not imported."""
    spec = find_spec(package)
    if spec is None:
        pytest.skip(f"{package} is not installed")
    return Path(spec.submodule_search_locations[0]) / path


def extract(source, wanted, names):
    """A module with some of the definitions of a file, and with `names` in the place of its imports."""
    tree = ast.parse(source.read_text())
    tree.body = [x for x in tree.body if isinstance(x, ast.ClassDef | ast.FunctionDef) and x.name in wanted]
    assert {x.name for x in tree.body} == set(wanted)
    module = ModuleType(source.stem)
    vars(module).update(names)
    exec(compile(tree, str(source), "exec"), vars(module))
    return module


def put_in_place(module, name, monkeypatch):
    """Let `from name import ...` find this module."""
    parts = name.split(".")
    for i in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:i]), ModuleType(parts[i - 1]))
    monkeypatch.setitem(sys.modules, name, module)


def make_rollout(shape, scale=1.0):
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, *shape, generator=generator, dtype=torch.float64) * scale
    return rewards, values, torch.randint(0, 2, shape, generator=generator)


SCALES = [1e-6, 1.0, 1e3]  # of which the first shows where an epsilon goes
SHAPE = (5, 30)


@pytest.fixture
def skyrl(monkeypatch):
    """SkyRL's registry and its own estimator."""
    source = find_source("skyrl", "backends/skyrl_train/utils/ppo_utils.py")
    utilities = extract(source.with_name("torch_utils.py"), ["masked_mean"], {"torch": torch})
    wanted = [
        "BaseFunctionRegistry", "AdvantageEstimator", "AdvantageEstimatorRegistry", "register_advantage_estimator",
        "masked_var", "masked_whiten", "compute_gae_advantage_return", "compute_advantages_and_returns",
    ]  # fmt: skip
    names = {"AlgorithmConfig": object, "Float": {(torch.Tensor, "batch_size response_len"): torch.Tensor}}
    names |= {"Callable": Callable, "List": list, "Optional": Optional, "Tuple": tuple, "Union": Union, "np": np}
    names |= {"StrEnum": enum.StrEnum, "masked_mean": utilities.masked_mean, "torch": torch, "wraps": wraps}
    module = extract(source, wanted, names | {"ray": SimpleNamespace(is_initialized=lambda: False)})
    put_in_place(module, "skyrl.backends.skyrl_train.utils.ppo_utils", monkeypatch)
    return module


@pytest.mark.parametrize("scale", SCALES)
def test_skyrl(skyrl, scale):
    run_block("SkyRL")
    rewards, values, mask = make_rollout(SHAPE, scale)

    def compute(estimator):
        return skyrl.compute_advantages_and_returns(
            rewards, mask.double(), np.arange(5), estimator, None, values, gamma=0.97, lambd=0.9
        )

    (advantages, returns), ours = compute("gae"), compute("gae_triton")
    torch.testing.assert_close(ours[0], advantages * mask, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(ours[1], returns, rtol=1e-11, atol=1e-13 * scale)


def test_skyrl_can_send_the_function_to_other_processes(skyrl):
    run_block("SkyRL")
    rewards, values, mask = make_rollout(SHAPE)
    function = skyrl.AdvantageEstimatorRegistry.get("gae_triton")
    sent = cloudpickle.loads(cloudpickle.dumps(function))
    for got, expected in zip(
        sent(rewards, values, mask, 0.97, 0.9), function(rewards, values, mask, 0.97, 0.9), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.fixture
def rlinf():
    """RLinf's registry, with its own estimators in it again afterwards."""
    pytest.importorskip("rlinf")
    from rlinf.algorithms import registry

    own = dict(registry.ADV_REGISTRY)
    torch.set_default_dtype(torch.float64)  # which it takes for γ where an episode goes on
    yield registry
    torch.set_default_dtype(torch.float32)
    registry.ADV_REGISTRY.clear()
    registry.ADV_REGISTRY.update(own)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("critic", [False, True])
@pytest.mark.parametrize("scale", SCALES)
def test_rlinf(rlinf, scale, critic, masked):
    stock = rlinf.get_adv_and_returns("gae")
    run_block("RLinf")["register"]()
    ours = rlinf.get_adv_and_returns("gae")
    assert ours is not stock
    rewards, values, mask = make_rollout((31, 5), scale)
    arguments = {"rewards": rewards[:-1], "gamma": 0.97, "gae_lambda": 0.9, "adv_type": "gae"}
    arguments |= {"values": values if critic else None, "loss_mask": mask[:-1].bool() if masked else None}
    arguments["dones"] = torch.rand(31, 5, generator=torch.Generator().manual_seed(1)) < 0.2
    valid = mask[:-1] if masked else 1
    for normalize in (False, True):
        expected = stock(**arguments, normalize_advantages=normalize, normalize_returns=normalize)
        got = ours(**arguments, normalize_advantages=normalize, normalize_returns=normalize)
        for x, wanted in zip(got, expected, strict=True):
            shape = rewards[:-1].shape
            torch.testing.assert_close(x * valid, wanted.reshape(shape) * valid, rtol=1e-9, atol=1e-11 * min(scale, 1))


@pytest.fixture
def openrlhf(monkeypatch):
    """The class with the two methods that the block replaces."""
    source = find_source("openrlhf", "trainer/ppo_utils/experience_maker.py")
    names = dict.fromkeys(("RayActorGroup", "Experience"), object)
    names |= {"torch": torch, "List": list, "Tuple": tuple}
    module = extract(source, ["RemoteExperienceMaker"], names)
    put_in_place(module, "openrlhf.trainer.ppo_utils.experience_maker", monkeypatch)
    return module.RemoteExperienceMaker


@pytest.mark.parametrize("kind", ["bool", "long", None])
def test_openrlhf(openrlhf, kind):
    rewards, values, mask = make_rollout(SHAPE)
    mask = None if kind is None else getattr(mask, kind)()

    def compute(maker):
        both = maker.get_advantages_and_returns(None, values, rewards, mask, 0.97, 0.9)
        return *both, maker.get_cumulative_returns(None, rewards, mask, 0.97)

    expected, stock = compute(openrlhf), openrlhf.get_cumulative_returns
    run_block("OpenRLHF")
    assert openrlhf.get_cumulative_returns is not stock
    torch.testing.assert_close(compute(openrlhf), expected, rtol=1e-11, atol=1e-13)
    if mask is not None:
        rewards, values = (x.masked_fill(mask == 0, torch.nan) for x in (rewards, values))
        torch.testing.assert_close(compute(openrlhf), expected, rtol=1e-11, atol=1e-13)


@pytest.fixture
def prime_rl(monkeypatch):
    """prime-rl's last layer; where it is not installed, and no package index has it, one with the same arguments."""

    class FusedOutputLinear(torch.nn.Linear):
        def __init__(self, *sizes, chunk_size):
            super().__init__(*sizes, bias=False)

        def forward(self, hidden_states, labels=None, temperature=None):
            log_p = (super().forward(hidden_states) / temperature[..., None]).log_softmax(-1)
            return {"logprobs": log_p.gather(-1, labels[..., None])[..., 0], "entropy": -(log_p.exp() * log_p).sum(-1)}

    head, loss, config = (ModuleType(name) for name in ("lm_head", "loss", "trainer"))
    head.FusedOutputLinear, head.PrimeLmOutput = FusedOutputLinear, dict
    loss.default_loss_fn, config.DefaultLossConfig = lambda *given: given, dict
    if find_spec("prime_rl"):
        wanted = ["_SequenceChunkedLogProbEntropyFn", "_online_logsumexp_and_weighted_update"]
        wanted += ["FusedOutputLinear", "PrimeLmOutput"]
        names = {"torch": torch, "Tensor": torch.Tensor, "TypedDict": TypedDict}
        head = extract(find_source("prime_rl", "trainer/models/layers/lm_head.py"), wanted, names)
    for name, x in {"trainer.models.layers.lm_head": head, "trainer.rl.loss": loss, "configs.trainer": config}.items():
        put_in_place(x, f"prime_rl.{name}", monkeypatch)
    return head.FusedOutputLinear


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_prime_rl(prime_rl, dtype, tolerance):
    torch.manual_seed(0)
    hidden, temperature, labels = torch.randn(1, 30, 16), 0.5 + torch.rand(1, 30), torch.randint(50, (1, 30))
    layer, results = prime_rl(16, 50, chunk_size=7).to(dtype), []
    for ours in (False, True):
        names = run_block("prime-rl") if ours else {}
        leaf = hidden.to(dtype).requires_grad_()
        layer.zero_grad()
        found = layer(leaf, labels=labels, temperature=temperature)
        found["logprobs"].square().sum().backward()
        results.append([found["logprobs"].detach(), found["entropy"].detach(), leaf.grad, layer.weight.grad])
    assert layer.forward.__func__ is names["forward"]
    assert names["compute_loss"]("inputs", kl_tau=0.1) == ("inputs", {"kl_tau": 0.1})
    for got, want in zip(*reversed(results), strict=True):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance * want.abs().max().item())


def make_holosoma(kind, folder, device, **settings):
    """An agent of holosoma for a made-up robot of four joints, ready to learn."""
    from holosoma.config_values.algo import ppo

    terms = {"actor_obs": {"base_ang_vel": 3, "dof_pos": 4}, "critic_obs": {"base_lin_vel": 3, "dof_pos": 4}}
    groups = {name: SimpleNamespace(history_length=1, terms=x) for name, x in terms.items()}
    manager = SimpleNamespace(cfg=SimpleNamespace(groups=groups), get_obs_dims=lambda: dict.fromkeys(terms, 7))
    manager._compute_term = lambda group, name, size: torch.zeros(2, size, device=device)
    robot = SimpleNamespace(actions_dim=4, dof_names=["la", "lb", "ra", "rb"], flip_sign_joint_names=["la", "ra"])
    robot.symmetry_joint_names = {"la": "ra", "lb": "rb", "ra": "la", "rb": "lb"}
    env = SimpleNamespace(num_envs=16, observation_manager=manager, robot_config=robot, device=device, reset_all=dict)
    env.history_length = dict.fromkeys(terms, 1)
    torch.manual_seed(0)
    settings |= {"num_steps_per_env": 8, "num_learning_epochs": 5, "actor_learning_rate": 1e-3, "desired_kl": 0.05}
    agent = kind(env, replace(copy.deepcopy(ppo.config), **settings), folder, device)
    agent.setup()
    return agent


def learn(agent):
    """Five rollouts of random numbers, and 20 steps with each; losses and learning rates."""
    actor, critic, storage, found = agent.actor, agent.critic, agent.storage, []
    for _ in range(5):
        for observations in torch.randn(8, 16, 7, device=agent.device):
            states = dict.fromkeys(("actor_obs", "critic_obs"), observations)
            with torch.no_grad():
                actions, values = actor.act(states), critic.evaluate(states)
                parameters = {"action_mean": actor.action_mean, "action_sigma": actor.action_std}
                log_probs = actor.get_actions_log_prob(actions)[:, None]
            storage.add(**states, **parameters, actions=actions, values=values, actions_log_prob=log_probs)
        last, data = torch.randn(16, 1).to(agent.device), [storage[x] for x in ("values", "dones", "rewards")]
        data[1].copy_(torch.rand(8, 16, 1) < 0.1), data[2].normal_()
        storage["returns"], storage["advantages"] = agent._compute_returns_and_advantages(last, *data)
        found.append({**agent._training_step(), "rates": [agent.actor_learning_rate, agent.critic_learning_rate]})
    return found


@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize("symmetry", [False, True])
def test_holosoma(symmetry, capture, tmp_path, monkeypatch):
    """Its own step, parameter by parameter; captured in recorded graphs, or on a GPU."""
    ppo = pytest.importorskip("holosoma.agents.ppo.ppo")
    device = "cuda" if capture and torch.cuda.is_available() else "cpu"
    if capture:
        allow_captures(monkeypatch, device)
    monkeypatch.setattr(ppo, "PPO", stock := ppo.PPO)
    run_block("holosoma")
    settings, results = {"use_symmetry": symmetry, "symmetry_critic_coef": 0.3}, []
    agents = [make_holosoma(x, tmp_path, device, **settings) for x in (stock, ppo.PPO)]
    for agent in agents:
        torch.manual_seed(1)
        results.append(learn(agent))
    for wanted, got in zip(*results, strict=True):
        assert got.pop("rates") == wanted.pop("rates") and got == pytest.approx(wanted, rel=1e-4, abs=1e-4)
    assert agents[1].captured.describe().startswith("updates are captured" if capture else "updates are eager")
    for wanted, got in zip(*([*x.actor.parameters(), *x.critic.parameters()] for x in agents), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def fill_storage(kind):
    storage, generator = kind.__new__(kind), torch.Generator().manual_seed(0)
    storage.rewards, storage.values = torch.randn(2, 24, 7, 1, generator=generator).unbind()
    storage.dones = (torch.rand(24, 7, 1, generator=generator) < 0.1).byte()
    storage.returns, storage.advantages = torch.zeros(2, 24, 7, 1).unbind()
    storage.num_transitions_per_env = 24
    return storage, torch.randn(7, 1, generator=generator)


def test_rsl_rl(monkeypatch):
    """Of RSL-RL 1 and 2, on their storage."""
    kind = pytest.importorskip("rsl_rl.storage").RolloutStorage
    if not hasattr(kind, "compute_returns"):
        pytest.skip("a newer RSL-RL")
    stock, last_values = fill_storage(kind)
    stock.compute_returns(last_values, 0.98, 0.9)
    monkeypatch.setattr(kind, "compute_returns", kind.compute_returns)
    run_block("Versions 1 and 2", "rsl_rl.md")
    ours, last_values = fill_storage(kind)
    assert kind.compute_returns.__code__.co_filename.startswith("docs/rsl_rl.md")
    ours.compute_returns(last_values, 0.98, 0.9)
    torch.testing.assert_close(ours.returns, stock.returns, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.advantages, stock.advantages, rtol=1e-5, atol=1e-5)
    assert ours.advantages.shape == stock.advantages.shape
