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
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Optional, TypedDict, Union

import cloudpickle
import numpy as np
import pytest
import torch
from recorded_graphs import allow_captures
from torch import nn

ROOT = Path(__file__).resolve().parents[2]


def read_block(section, page="recipes.md"):
    """The Python code of a section of a page."""
    text = (ROOT / "docs" / page).read_text()
    (block,) = re.findall(rf"^## {section}\n.*?```python\n(.*?)```", text, re.DOTALL | re.MULTILINE)
    assert block.count("```") == 0
    return block


def run_block(section, page="recipes.md", **names):
    names |= {"__name__": "__main__"}  # as in a script of the user's
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
        monkeypatch.setitem(sys.modules, ".".join(parts[:i]), ModuleType(".".join(parts[:i])))
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


class FastSACAgent:
    """What the recipes call, written anew: SAC with distributions of returns, n-step targets and mirrored samples."""

    device, is_multi_gpu, values = "cpu", False, torch.linspace(-5, 5, 21)
    config = SimpleNamespace(policy_frequency=4, tau=0.125)

    def __init__(self):
        torch.manual_seed(0)
        self.setup()

    def setup(self):
        self.actor, self.qnet, self.qnet_target = nn.Linear(7, 8), nn.Linear(11, 21), nn.Linear(11, 21)
        self.log_alpha = nn.Parameter(torch.zeros(1))
        optimized = self.qnet.parameters(), self.actor.parameters(), [self.log_alpha]
        optimizers = [torch.optim.AdamW(x, fused=True) for x in optimized]
        self.q_optimizer, self.actor_optimizer, self.alpha_optimizer = optimizers

    def _sample_and_prepare_batches(self, size, count, *normalize):
        data = self.rb.sample(size * count)
        return [*torch.cat([data, data.apply(lambda x: -x if x.dim() > 1 else x)]).chunk(count)]

    def act(self, data):
        mean, log_std = self.actor(data["observations"]).chunk(2, -1)
        policy = torch.distributions.Normal(mean, log_std.exp())
        actions = policy.rsample()
        return torch.cat([data["observations"], actions], -1), policy.log_prob(actions).sum(-1)

    def _update_main(self, data):
        after, alpha = data["next"], self.log_alpha.exp()
        rows, log_probs = self.act(after)
        with torch.no_grad():
            weight = (1 - after["dones"]) * 0.97 ** after["effective_n_steps"]
            returns = after["rewards"] + weight * (self.values[:, None] - alpha * log_probs)
            shares = (1 - 2 * (returns.clamp(-5, 5) - self.values[:, None, None]).abs()).clamp(min=0)
            target = torch.einsum("ijb,bj->bi", shares, self.qnet_target(rows).softmax(-1))
        own = self.qnet(torch.cat([data["observations"], data["actions"]], -1))
        losses = nn.functional.cross_entropy(own, target), -(alpha * (log_probs.detach() - 4)).mean()
        for optimizer, loss in zip((self.q_optimizer, self.alpha_optimizer), losses, strict=True):
            optimizer.zero_grad(), loss.backward(), optimizer.step()
        found = after["rewards"].mean(), torch.tensor(0.0), losses[0], target.max(), target.min(), losses[1]
        return [x.detach() for x in found]

    def _update_pol(self, data):
        rows, log_probs = self.act(data)
        loss = (self.log_alpha.exp().detach() * log_probs - self.qnet(rows).softmax(-1) @ self.values).mean()
        self.actor_optimizer.zero_grad(), loss.backward(), self.actor_optimizer.step()
        return [x.detach() for x in (torch.tensor(0.0), loss, -log_probs.mean(), rows.std())]


def make_buffer(size):
    """A replay buffer of random samples, as many as it likes."""
    generator, make_dict = torch.Generator().manual_seed(0), pytest.importorskip("tensordict").TensorDict

    def sample(_):
        x = torch.randn(size, 20, generator=generator)
        after = {"observations": x[:, :7], "critic_observations": x[:, 6:13], "rewards": x[:, 18]}
        after |= {"dones": (x[:, 19] > 1).long(), "truncations": (x[:, 19] > 2).long()}
        after["effective_n_steps"] = 1 + (x[:, 19] < 0).long()
        now = {"observations": x[:, 7:14], "critic_observations": x[:, 5:12], "actions": x[:, 14:18].tanh()}
        return make_dict({**now, "next": make_dict(after, size)}, size)

    return SimpleNamespace(sample=sample)


METRICS = ["buffer_rewards", "critic_grad_norm", "qf_loss", "qf_max", "qf_min", "alpha_loss", "alpha_value"]
METRICS += ["actor_grad_norm", "actor_loss", "policy_entropy", "action_std"]


def update_target(online, target, tau):
    for x, y in zip(online.parameters(), target.parameters(), strict=True):
        y.data.mul_(1.0 - tau).add_(x.data, alpha=tau)


def make_fast_td3():
    """What the recipe finds in `main`."""
    args = {"batch_size": 64, "num_envs": 16, "num_updates": 2, "policy_frequency": 2, "tau": 0.1}
    names = {"torch": torch, "args": SimpleNamespace(**args), "reward_normalizer": nn.Identity(), "rb": make_buffer(64)}
    names |= {x: nn.BatchNorm1d(7, affine=False) for x in ("obs_normalizer", "critic_obs_normalizer")}
    agent = FastSACAgent()
    agent.alpha_optimizer = agent.q_optimizer  # since the recipe knows of two
    agent.q_optimizer.add_param_group({"params": [agent.log_alpha]})
    names["update_main"] = lambda data, logs: {**logs, "qf_loss": agent._update_main(data)[2]}
    names["update_pol"] = lambda data, logs: {**logs, "actor_loss": agent._update_pol(data)[1]}
    return names | vars(agent) | {"soft_update": update_target}


def learn_fast_td3(names):
    """As the loop in `main`."""
    logs = {}
    for i in range(2):
        data = names["rb"].sample(4)
        for x, key in product((data, data["next"]), ("observations", "critic_observations")):
            x[key] = names["critic_obs_normalizer" if "critic" in key else "obs_normalizer"](x[key])
        for update in ("update_main", "update_pol")[: i + 1]:
            logs = names[update](data, logs)
        names["soft_update"](names["qnet"], names["qnet_target"], 0.1)
    return logs, None


def test_fast_td3(monkeypatch):
    """Its loop over 100 updates, with a schedule of learning rates."""
    allow_captures(monkeypatch)
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", False)
    results = []
    for ours in (False, True):
        torch.manual_seed(0)
        names, rate, losses = make_fast_td3(), torch.zeros(()), []
        for x in ("q_optimizer", "actor_optimizer"):
            names[x].param_groups[0]["lr"] = rate
        if ours:
            names = run_block("FastTD3", **names)
            monkeypatch.setattr(torch, "tensor", None)  # which no graph calls
        for i in range(50):
            rate.fill_(1e-3 * (1 - i / 60))
            logs, _ = names["learn"]() if ours else learn_fast_td3(names)
            losses += [logs["qf_loss"].item(), logs["actor_loss"].item()]
        parts = ("actor", "qnet", "qnet_target", "obs_normalizer", "critic_obs_normalizer")
        results.append([losses, *(names[x].state_dict() for x in parts)])
    assert (names["step"].reason, len(names["step"].captured)) == ("", 1)
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_fast_sac(monkeypatch):
    """Its loop over 104 updates, with a schedule of learning rates; every metric of every update."""
    allow_captures(monkeypatch)
    module, path = SimpleNamespace(FastSACAgent=FastSACAgent), "holosoma.agents.fast_sac.fast_sac_agent"
    put_in_place(module, path, monkeypatch)
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    run_block("FastSAC")
    results = []
    for kind in (FastSACAgent, module.FastSACAgent):
        agent = kind()
        if kind is not FastSACAgent:
            monkeypatch.setattr(torch, "tensor", None)  # which no graph calls
        normalizers = [getattr(agent, x, None) for x in ("obs_normalizer", "critic_obs_normalizer")]
        rows, of_policy = [], [torch.zeros(())] * 4
        agent.rb, agent.training_metrics = make_buffer(128), SimpleNamespace(add=rows.append)
        for i in range(13):
            for x in (agent.q_optimizer, agent.actor_optimizer, agent.alpha_optimizer):
                x.param_groups[0]["lr"] = 1e-3 * (1 - i / 16)
            for j, data in enumerate(agent._sample_and_prepare_batches(1, 8, *normalizers)):
                row = agent._update_main(data)
                of_policy = agent._update_pol(data) if j % 4 == 1 else of_policy
                row = [*row, agent.log_alpha.detach().exp(), *of_policy]
                rows.append(dict(zip(METRICS, row, strict=True)))
                update_target(agent.qnet, agent.qnet_target, 0.125)
        metrics = {name: torch.cat([x[name].reshape(-1) for x in rows]) for name in METRICS}
        parts = [x.state_dict() for x in (agent.actor, agent.qnet, agent.qnet_target)]
        results.append([metrics, *parts, agent.log_alpha.detach()])
    assert (agent.captured.reason, len(agent.captured.captured)) == ("", 1)
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


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
