"""Captured updates of PPO and A2C against skrl's own code on the same advantages; on a CPU with recorded graphs."""

import pytest
import torch

pytest.importorskip("skrl")
from gpu_envs import ENVIRONMENTS
from ppo_skrl import TensorEnv, make_config, parse_arguments
from process_state import interrupt
from recorded_graphs import allow_captures
from skrl.agents.torch.a2c import A2C
from skrl.agents.torch.ppo import PPO
from skrl.memories.torch import RandomMemory
from skrl.resources.preprocessors.torch import RunningStandardScaler
from skrl.utils.runner.torch import Runner
from two_processes import SETUPS, check_training

from rl_triton_adapters.skrl import TritonRunner, replace_gae, step

SCALED = {"observation_preprocessor": "RunningStandardScaler", "value_preprocessor": "RunningStandardScaler"}
RATES = {"kl_threshold": 0.002, "lr_factor": 2.0, "min_lr": 2**-20, "max_lr": 2**-7}
"""Those that a graph keeps, which are float32."""
ADAPTIVE = {"learning_rate_scheduler": "KLAdaptiveLR", "learning_rate_scheduler_kwargs": RATES}
SHARED = {"separate": False}
CASES = {
    "continuous": ("pendulum", "ppo", {}, {}),
    "discrete": ("cartpole", "ppo", {"entropy_loss_scale": 0.01}, {}),
    "a2c": ("pendulum", "a2c", {"entropy_loss_scale": 0.01} | SCALED, {}),
    "adaptive a2c": ("cartpole", "a2c", ADAPTIVE, {}),
    "adaptive": ("pendulum", "ppo", ADAPTIVE | SCALED, {}),
    "shared": ("pendulum", "ppo", SCALED, SHARED),
    "other scheduler": (
        "pendulum",
        "ppo",
        {"learning_rate_scheduler": torch.optim.lr_scheduler.ExponentialLR}
        | {"learning_rate_scheduler_kwargs": {"gamma": 0.5}, "value_clip": 0, "grad_norm_clip": 0},
        {},
    ),
    "early stop": ("pendulum", "ppo", {"kl_threshold": 0.0005, "mini_batches": 5} | ADAPTIVE | SCALED, {}),
    "mixed precision": ("pendulum", "ppo", {"mixed_precision": True} | SCALED, {}),
}
LONG = ("adaptive",)


class AdvantagesRunner(Runner):
    """Agents whose update is skrl's code on our advantages; `fused` tells the optimizer how to step."""

    def _component(self, name):
        component = super()._component(name)
        return (
            type("Own", (component,), {"update": replace_gae(component.update)})
            if component in (PPO, A2C)
            else component
        )


def make_runner(runner_class, folder, case, iterations, device="cpu"):
    name, agent, changes, models = CASES[case]
    flags = {"--env": name, "--agent": agent, "--num-envs": 6, "--num-steps": 8, "--iterations": iterations}
    flags |= {"--log-dir": folder, "--device": device}
    config = make_config(parse_arguments(["--quiet", *(str(x) for flag in flags.items() for x in flag)]))
    config["agent"] |= {"learning_rate": 2**-10} | changes
    config["models"] |= models
    envs = ENVIRONMENTS[name](6, device, 1)
    envs.elapsed.copy_(torch.arange(6) + envs.time_limit - 6)
    runner = runner_class(TensorEnv(envs), config)
    for group in runner.agent.optimizer.param_groups:
        group["fused"] = True
    return runner


def train(*about):
    runner = make_runner(*about)
    runner.run("train")
    return runner.agent


def train_both(folder, case, iterations=1):
    """An agent whose update is skrl's code, and ours."""
    return [train(x, folder, case, iterations) for x in (AdvantagesRunner, TritonRunner)]


def list_state(agent):
    modules = {name: x for name, x in agent.checkpoint_modules.items() if hasattr(x, "state_dict")}
    states = {f"{key} {name}": x for key, module in modules.items() for name, x in module.state_dict().items()}
    return {name: x for name, x in states.items() if isinstance(x, torch.Tensor)} | {
        f"state {i} {name}": x
        for i, state in agent.optimizer.state_dict()["state"].items()
        for name, x in state.items()
    }


def compare(ours, stock, **tolerance):
    expected = list_state(stock)
    for name, x in list_state(ours).items():
        torch.testing.assert_close(x, expected[name], msg=lambda text, name=name: f"{name}: {text}", **tolerance)
    for name in ("Loss / Policy loss", "Loss / Value loss", "Loss / Entropy loss", "Policy / Standard deviation"):
        got, want = (torch.tensor(x.tracking_data.get(name, [])) for x in (ours, stock))
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6, equal_nan=True)
    rates = [x.optimizer.param_groups[0]["lr"] for x in (ours, stock)]
    assert rates[0] == rates[1]


@pytest.mark.parametrize("case", CASES)
def test_an_update_is_that_of_skrl(case, captured, tmp_path):
    """Bit for bit, where the optimizer was told how to step: statistics, learning rates, the optimizer's state too."""
    iterations = 40 if case in LONG else 3
    stock, ours = train_both(tmp_path, case, iterations)
    kind = "captured" if captured else "eager"
    assert ours.describe().startswith(f"updates are {kind}")
    compare(ours, stock, rtol=0, atol=0)
    if captured:
        assert ours._rl_triton.step.graphs.replays > 10


@pytest.mark.parametrize("case", CASES)
def test_training_is_that_of_skrl_up_to_rounding(case, device, tmp_path):
    stock, ours = (train(x, tmp_path, case, 3, device) for x in (Runner, TritonRunner))
    assert type(ours).__name__ == f"Triton{CASES[case][1].upper()}"
    if device == "cuda":
        assert ours.describe() == "updates are captured"
    expected = list_state(stock)
    for name, x in list_state(ours).items():
        tolerance = {"rtol": 1e-4, "atol": 1e-5} if device == "cpu" else {"rtol": 1e-2, "atol": 1e-3}
        tolerance = {"rtol": 1e-2, "atol": 1e-3} if case == "mixed precision" else tolerance
        torch.testing.assert_close(x, expected[name], **tolerance)


def anneal(agent, i):
    """As programs do it: other numbers in every update."""
    cfg, numbers = agent.cfg, {"ratio_clip": 0.2 - 0.04 * i, "entropy_loss_scale": 0.01 + 0.02 * i}
    vars(cfg).update(numbers | {"value_loss_scale": 1.0 + i, "value_clip": 0.2 + 0.1 * i, "kl_threshold": 1.0 + i})


def set_others(agent, i):
    agent.cfg.grad_norm_clip, agent.cfg.value_clip = (0.5, 0.2) if i < 2 else (0.1, 0)


@pytest.mark.parametrize("change", [anneal, set_others])
def test_settings_that_change_are_followed(change, tmp_path, monkeypatch):
    """Two graphs, of first and other epochs, are captured anew where another term counts, or for other settings.

    They are given numbers that are annealed.
    """
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
    agent.update(timestep=0, timesteps=1)


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


class Scaler(RunningStandardScaler):
    pass


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda agent: setattr(agent.memory, "__class__", Newest), "Newest has its own sample"),
        (lambda agent: setattr(agent, "_observation_preprocessor", Scaler(4)), "a preprocessor is not skrl's"),
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


def test_an_agent_without_a_memory_says_so(tmp_path):
    agent = make_runner(TritonRunner, tmp_path, "discrete", 2).agent
    agent.memory = None
    assert agent.describe() == "updates are those of skrl: the agent has no memory to learn from"


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


def test_an_early_stop_of_several_processes_is_that_of_skrl(tmp_path, monkeypatch):
    agent = make_runner(TritonRunner, tmp_path, "early stop", 1).agent
    monkeypatch.setattr(step.config.torch, "_is_distributed", True)
    reason = "with kl_threshold, one of several processes stops alone"
    assert agent.describe() == f"updates are those of skrl: {reason}"


def test_an_early_stop_in_mixed_precision_has_no_graph(tmp_path, monkeypatch):
    """What a scaler counts would go on after it."""
    allow_captures(monkeypatch)
    agent = make_runner(TritonRunner, tmp_path, "mixed precision", 1).agent
    agent.cfg.kl_threshold = 0.01
    assert agent.describe() == "updates are eager: kl_threshold with mixed precision"
