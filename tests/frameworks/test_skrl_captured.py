"""Captured updates of agents against skrl's own code on the same advantages; on a CPU with recorded graphs."""

import re
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("skrl")
from gpu_envs import ENVIRONMENTS
from ppo_skrl import TensorEnv, make_config, parse_arguments
from process_state import interrupt
from recorded_graphs import allow_captures
from skrl.agents.torch.a2c import A2C
from skrl.agents.torch.ppo import PPO
from skrl.envs.wrappers.torch import MultiAgentEnvWrapper
from skrl.memories.torch import RandomMemory
from skrl.multi_agents.torch.ippo import IPPO
from skrl.multi_agents.torch.mappo import MAPPO
from skrl.resources.preprocessors.torch import RunningStandardScaler
from skrl.utils.runner.torch import Runner
from torch.utils import _pytree as pytree
from two_processes import SETUPS, check_training

from rl_triton_adapters.skrl import TritonRunner, replace_gae, step

SCALED = {"observation_preprocessor": "RunningStandardScaler", "value_preprocessor": "RunningStandardScaler"}
SCALER = type("Own", (RunningStandardScaler,), {})
RATES = {"kl_threshold": 0.002, "lr_factor": 2.0, "min_lr": 2**-20, "max_lr": 2**-7}  # float32, as in a graph
ADAPTIVE = {"learning_rate_scheduler": "KLAdaptiveLR", "learning_rate_scheduler_kwargs": RATES}
FALLING = {"learning_rate_scheduler": torch.optim.lr_scheduler.ExponentialLR}
FALLING |= {"learning_rate_scheduler_kwargs": {"gamma": 0.5}}
SHARED = {"separate": False}
EACH = {"mini_batches": {"a": 2, "b": 3}, "learning_rate_scheduler_kwargs": {"a": {}, "b": {}}}
CASES = {
    "continuous": ("pendulum", "ppo", {}, {}),
    "discrete": ("cartpole", "ppo", {"entropy_loss_scale": 0.01}, {}),
    "a2c": ("pendulum", "a2c", {"entropy_loss_scale": 0.01} | SCALED, {}),
    "adaptive a2c": ("cartpole", "a2c", ADAPTIVE, {}),
    "adaptive": ("pendulum", "ppo", ADAPTIVE | SCALED, {}),
    "shared": ("pendulum", "ppo", SCALED, SHARED),
    "other scheduler": ("pendulum", "ppo", FALLING | {"value_clip": 0, "grad_norm_clip": 0}, {}),
    "early stop": ("pendulum", "ppo", {"kl_threshold": 0.0005, "mini_batches": 5} | ADAPTIVE | SCALED, {}),
    "mixed precision": ("pendulum", "ppo", {"mixed_precision": True} | SCALED, {}),
    "ippo": ("pendulum", "ippo", ADAPTIVE, {}),
    "mappo": ("cartpole", "mappo", EACH | {"entropy_loss_scale": 0.01} | SCALED, SHARED),
}


class AdvantagesRunner(Runner):
    """Agents whose update is skrl's code on our advantages; `fused` tells the optimizer how to step."""

    def _component(self, name):
        component = super()._component(name)
        if component not in (PPO, A2C, IPPO, MAPPO):
            return component
        return type("Own", (component,), {"update": replace_gae(component.update)})


class TwoAgents(MultiAgentEnvWrapper):
    """Each with environments of its own."""

    def __init__(self, **envs):
        spaces = {f"{x}s": {k: getattr(y, x) for k, y in envs.items()} for x in ("observation_space", "action_space")}
        super().__init__(SimpleNamespace(possible_agents=[*envs], num_envs=6, device=envs["a"].device, **spaces))
        self.envs = envs

    def reset(self):
        return {uid: env.reset()[0] for uid, env in self.envs.items()}, {}

    def step(self, actions):
        found = {uid: env.step(actions[uid]) for uid, env in self.envs.items()}
        return *({uid: x[i] for uid, x in found.items()} for i in range(4)), {}

    def state(self):
        return dict.fromkeys(self.envs)

    render = close = state


def make_runner(runner_class, folder, case, iterations, device="cpu"):
    name, agent, changes, models = CASES[case]
    flags = {"--env": name, "--agent": agent[-3:], "--num-envs": 6, "--num-steps": 8, "--iterations": iterations}
    flags |= {"--log-dir": folder, "--device": device}
    config = make_config(parse_arguments(["--quiet", *(str(x) for flag in flags.items() for x in flag)]))
    config["agent"] |= {"learning_rate": 2**-10, "class": agent.upper()} | changes
    config["models"] |= models
    several = [ENVIRONMENTS[name](6, device, seed) for seed in (1, 2)]
    for envs in several:
        envs.elapsed.copy_(torch.arange(6) + envs.time_limit - 6)
    first, second = map(TensorEnv, several)
    runner = runner_class(first if len(agent) == 3 else TwoAgents(a=first, b=second), config)
    for group in (group for optimizer in list_optimizers(runner.agent) for group in optimizer.param_groups):
        group["fused"] = True
    return runner


def list_optimizers(agent):
    return [*agent.optimizers.values()] if hasattr(agent, "optimizers") else [agent.optimizer]


def list_updates(agent):
    return [*agent._rl_triton.values()] if isinstance(agent._rl_triton, dict) else [agent._rl_triton]


def train(*about):
    runner = make_runner(*about)
    runner.run("train")
    return runner.agent


def train_both(folder, case, iterations=1):
    """An agent whose update is skrl's code, and ours."""
    return [train(x, folder, case, iterations) for x in (AdvantagesRunner, TritonRunner)]


def list_state(agent):
    found = pytree.tree_map(lambda x: getattr(x, "state_dict", dict)(), agent.checkpoint_modules)
    return {str(path): x for path, x in pytree.tree_flatten_with_path(found)[0] if isinstance(x, torch.Tensor)}


def compare(ours, stock, **tolerance):
    torch.testing.assert_close(list_state(ours), list_state(stock), **tolerance)
    for name in (x for x in stock.tracking_data if x.startswith(("Loss", "Policy"))):
        got, want = (torch.tensor(x.tracking_data.get(name, [])) for x in (ours, stock))
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6, equal_nan=True)
    rates = [[y.param_groups[0]["lr"] for y in list_optimizers(x)] for x in (ours, stock)]
    assert rates[0] == rates[1]


@pytest.mark.parametrize("case", CASES)
def test_an_update_is_that_of_skrl(case, captured, tmp_path):
    """Bit for bit, where the optimizer was told how to step: statistics, learning rates, the optimizer's state too."""
    iterations = 40 if case == "adaptive" else 3
    stock, ours = train_both(tmp_path, case, iterations)
    kind = "captured" if captured else "eager"
    assert ours.describe().startswith(f"updates are {kind}")
    compare(ours, stock, rtol=0, atol=0)
    if captured:
        assert all(x.step.graphs.replays > 10 for x in list_updates(ours))


@pytest.mark.parametrize("case", CASES)
def test_training_is_that_of_skrl_up_to_rounding(case, device, tmp_path):
    stock, ours = (train(x, tmp_path, case, 3, device) for x in (Runner, TritonRunner))
    assert type(ours).__name__ == f"Triton{CASES[case][1].upper()}"
    if device == "cuda":
        assert ours.describe() == "updates are captured"
    expected = list_state(stock)
    for name, x in list_state(ours).items():
        rtol = 1e-4 if device == "cpu" and case != "mixed precision" else 1e-2
        torch.testing.assert_close(x, expected[name], rtol=rtol, atol=rtol / 10)


def anneal(agent, i):
    """As programs do it: other numbers in every update."""
    cfg, numbers = agent.cfg, {"ratio_clip": 0.2 - 0.04 * i, "entropy_loss_scale": 0.01 + 0.02 * i}
    vars(cfg).update(numbers | {"value_loss_scale": 1.0 + i, "value_clip": 0.2 + 0.1 * i, "kl_threshold": 1.0 + i})


def set_others(agent, i):
    agent.cfg.grad_norm_clip, agent.cfg.value_clip = (0.5, 0.2) if i < 2 else (0.1, 0)


@pytest.mark.parametrize("change", [anneal, set_others])
def test_settings_that_change_are_followed(change, tmp_path, monkeypatch):
    """Graphs of first and other epochs are given numbers that are annealed; other settings need new ones."""
    allow_captures(monkeypatch)
    agents = train_both(tmp_path, "continuous" if change is set_others else "adaptive")
    for agent in agents:
        for i in range(4):
            change(agent, i)
            update(agent)
    compare(*agents[::-1], rtol=0, atol=0)
    assert agents[1]._rl_triton.step.graphs.captures == 4
    agents[1].recapture()
    update(agents[1])
    assert agents[1]._rl_triton.step.graphs.captures == 2


def test_settings_of_one_of_several_agents(tmp_path, monkeypatch):
    allow_captures(monkeypatch)
    agents = train_both(tmp_path, "mappo")
    for agent in agents:
        agent.cfg.grad_norm_clip["b"], agent.cfg.entropy_loss_scale["a"] = 0.1, 0.02
        update(agent)
    compare(*agents[::-1], rtol=0, atol=0)
    assert [x.step.graphs.captures for x in list_updates(agents[1])] == [2, 4]
    agents[1]._observation_preprocessor["b"] = SCALER(4)
    reason = "updates are those of skrl: a preprocessor is not skrl's"
    assert agents[1].describe() == f"updates are captured; {reason}" and agents[1].obstacle in reason
    with pytest.warns(RuntimeWarning, match="TritonMAPPO updates as skrl does: a preprocessor is not skrl's"):
        update(agents[1])
    agents[1].recapture()
    assert not any(x.step for x in list_updates(agents[1]))


def test_updates_of_several_agents_are_checked(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RL_TRITON_CHECK", "2")
    train(TritonRunner, tmp_path, "ippo", 1)
    found = re.findall(r"IPPO\.update (\d): .* by (\S+) and differ by (\S+) ", capsys.readouterr().out)
    assert [x for x, *_ in found] == ["1", "2"] and all(0 <= float(y) < 1e-3 * float(x) for _, x, y in found)


def test_an_update_that_a_program_replaces_runs(tmp_path, monkeypatch):
    agent, calls = train(TritonRunner, tmp_path, "continuous", 1), []
    monkeypatch.setattr(PPO, "update", lambda self, **kwargs: calls.append(kwargs))
    update(agent)
    assert calls and agent.describe().startswith("updates are those of skrl: PPO has its own update")


@pytest.mark.usefixtures("captured")
def test_an_interrupted_update_leaves_what_that_of_skrl_does(tmp_path):
    """Where a graph is captured, as the step begins; and training goes on."""
    stock, ours = train_both(tmp_path, "continuous")
    for agent in (stock, ours):
        handle = agent.optimizer.register_step_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            update(agent)
        handle.remove()
        update(agent)
    ours.recapture()
    compare(ours, stock, rtol=0, atol=0)
    assert ours.optimizer.state_dict()["param_groups"] == stock.optimizer.state_dict()["param_groups"]
    assert vars(ours.optimizer).keys() == vars(stock.optimizer).keys()
    assert {*vars(ours)} - {*vars(stock)} == {"_rl_triton"}


def update(agent, seed=3):
    torch.manual_seed(seed)
    agent.enable_models_training_mode(True)
    for of in [{"uid": x} for x in getattr(agent, "possible_agents", [])] or [{}]:
        agent.update(timestep=0, timesteps=1, **of)


@pytest.mark.usefixtures("captured")
def test_an_observation_that_is_nan_is_an_error_at_the_same_minibatch(tmp_path):
    errors, agents = [], train_both(tmp_path, "discrete", 2)
    for agent in agents:
        agent.memory.get_tensor_by_name("observations")[3, 2] = torch.nan
        with pytest.raises(RuntimeError) as caught:
            update(agent)
        errors.append(str(caught.value))
    assert errors[0] == errors[1] and "probability tensor" in errors[0]
    for x, y in zip(*(agent.policy.parameters() for agent in agents), strict=True):
        assert torch.equal(x, y)


class Newest(RandomMemory):
    def sample(self, names, *, batch_size, mini_batches=1, sequence_length=1):
        return self.sample_by_index(names, indexes=torch.arange(batch_size // 2), mini_batches=mini_batches)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda agent: setattr(agent.memory, "__class__", Newest), "Newest has its own sample"),
        (lambda agent: setattr(agent, "_observation_preprocessor", SCALER(4)), "a preprocessor is not skrl's"),
        (lambda agent: agent.memory.tensors.update(x=torch.zeros(1, device="meta")), "the memory lies on another"),
    ],
)
def test_what_is_not_served_is_the_update_of_skrl(change, reason, tmp_path):
    stock = make_runner(AdvantagesRunner, tmp_path, "discrete", 2)
    change(stock.agent)
    stock.run("train")
    ours = make_runner(TritonRunner, tmp_path, "discrete", 2)
    change(ours.agent)
    assert ours.agent.describe().startswith(f"updates are those of skrl: {reason}")
    with pytest.warns(RuntimeWarning, match=f"TritonPPO updates as skrl does: {reason}"):
        ours.run("train")
    compare(ours.agent, stock.agent, rtol=0, atol=0)


ALONE = "those of skrl: with kl_threshold, one of several processes stops alone"
SAID = {
    "those of skrl: the agent has no memory to learn from": ("discrete", lambda x, _: setattr(x, "memory", None)),
    ALONE: ("early stop", lambda _, patch: patch.setattr(step.config.torch, "_is_distributed", True)),
    "eager: kl_threshold with mixed precision": ("mixed precision", lambda x, _: setattr(x.cfg, "kl_threshold", 0.01)),
}


@pytest.mark.parametrize("said", SAID)
def test_what_is_said_before_an_update(said, tmp_path, monkeypatch):
    """What a scaler counts would go on after an early stop."""
    allow_captures(monkeypatch)
    agent = make_runner(TritonRunner, tmp_path, SAID[said][0], 1).agent
    SAID[said][1](agent, monkeypatch)
    assert agent.describe() == f"updates are {said}"


def train_in_rank(rank, device, arm, folder):
    vars(step.config.torch).update(_is_distributed=True, _world_size=2, _rank=rank, _device=f"cuda:{rank}")
    runner = make_runner(Runner if arm == "stock" else TritonRunner, folder, "adaptive", 3, device)
    runner.agent.scheduler.kl_threshold = 1e-5  # which all steps but the first exceed
    torch.manual_seed(rank)
    runner.run("train")
    rates = runner.agent.tracking_data["Learning / Learning rate"]
    assert len(set(rates)) > 1
    return list_state(runner.agent), rates, "" if arm == "stock" else runner.agent.describe()


@SETUPS
def test_training_in_two_processes(device, kind, tmp_path):
    check_training(train_in_rank, ["running"], device, kind, tmp_path)
