"""Captured updates of RL-Games' agents against eager ones and against its own; on a CPU with recorded graphs."""

import re
from functools import partial
from importlib.metadata import version

import pytest
import torch
from gpu_checks import GPU

pytest.importorskip("rl_games")
from gymnasium import spaces
from overrides import derive, override
from ppo_rl_games import TensorEnv
from process_state import interrupt
from recorded_graphs import allow_captures
from rl_games.algos_torch.a2c_continuous import A2CAgent
from rl_games.common import env_configurations, vecenv
from rl_games.common.a2c_common import A2CBase
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_rl_games import CLASSES, compare, get_state, list_trainers, make_agent, make_both, train
from torch.distributions import Distribution
from two_processes import SETUPS, check_training

NORMALIZED = {"normalize_input": True, "normalize_value": True}
LSTM = {"network": {"rnn": {"name": "lstm", "units": 8, "layers": 1}}, "zero_rnn_on_done": False, "seq_length": 4}
GRU = LSTM | {"network": {"rnn": LSTM["network"]["rnn"] | {"name": "gru"}}}
ZEROED = GRU | {"zero_rnn_on_done": True}
MLP = {"units": [32], "activation": "tanh", "initializer": {"name": "default"}}
CENTRAL_VALUE = {
    "minibatch_size": 16,
    "mini_epochs": 2,
    "learning_rate": 2**-8,
    "lr_schedule": "linear",
    "clip_value": True,
    "truncate_grads": True,
    "grad_norm": 0.5,
    "normalize_input": True,
    "network": {"name": "actor_critic", "central_value": True, "mlp": MLP},
}
RECURRENT = CENTRAL_VALUE["network"] | {"rnn": LSTM["network"]["rnn"]}


def with_central_value(**changes):
    return {"env_name": "states", "central_value_config": CENTRAL_VALUE | changes}


OTHER = "of the central value network, "
CAPTURED = "updates are captured", f"updates are captured; {OTHER}updates are captured"
CASES = {
    "discrete": ("cartpole", {}),
    "normalized": ("pendulum", NORMALIZED | {"max_epochs": 40, "mini_epochs": 2}),
    "normalized discrete": ("cartpole", NORMALIZED | {"max_epochs": 40, "mini_epochs": 2}),
    "bounds": ("pendulum", {"bounds_loss_coef": 0.125, "entropy_coef": 2**-7, "clip_value": False}),
    "standard schedule": ("pendulum", {"schedule_type": "standard", "truncate_grads": False}),
    "linear schedule": ("pendulum", {"lr_schedule": "linear", "schedule_entropy": True, "entropy_coef": 0.01}),
    "smooth clamp": ("pendulum", {"use_smooth_clamp": True, "weight_decay": 0.01, "entropy_coef": 0}),
    "LSTM": ("pendulum", LSTM | NORMALIZED),
    "LSTM shared, discrete": ("cartpole", LSTM | {"network": LSTM["network"] | {"separate": False}}),
    "GRU": ("pendulum", GRU),
    "LSTM, zeroed": ("pendulum", LSTM | NORMALIZED | {"zero_rnn_on_done": True, "mini_epochs": 2}),
    "GRU, zeroed in minibatches of one sequence": ("cartpole", ZEROED | {"minibatch_size": 4, "max_epochs": 1}),
    "central value": ("pendulum", with_central_value() | NORMALIZED | {"max_epochs": 4}),
    "central value discrete": ("cartpole", with_central_value(normalize_input=False, truncate_grads=False)),
    "central value of a recurrent agent": (
        "pendulum",
        with_central_value(clip_value=False, lr_schedule=None) | LSTM | {"use_experimental_cv": False},
    ),
    "recurrent central value, zeroed": (
        "pendulum",  # on a GPU, rounding crosses a threshold of an adaptive rate
        with_central_value(network=RECURRENT) | ZEROED | {"lr_schedule": None},
    ),
}


class StatesEnv(TensorEnv):
    """Adds to the states how much of the time is over."""

    def reset(self):
        return self.add_states(super().reset())

    def step(self, actions):
        observations, *rest = super().step(actions)
        return self.add_states(observations), *rest

    def add_states(self, observations):
        time = self.envs.elapsed[:, None] / self.envs.time_limit
        return {"obs": observations, "states": torch.cat([observations, time], dim=1)}

    def get_env_info(self):
        return super().get_env_info() | {
            "state_space": spaces.Box(-float("inf"), float("inf"), (self.envs.observations + 1,))
        }


vecenv.register("STATES", lambda _, num_envs, **options: StatesEnv(num_envs, **options))
env_configurations.register("states", {"vecenv_type": "STATES"})


@pytest.fixture(autouse=True)
def no_mkldnn(monkeypatch):
    """Whose LSTM keeps nothing for a backward in a replay."""
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)


def round_rates(agent):
    """Let learning rates be those that a graph keeps, which are float32."""
    for trainer in list_trainers(agent):
        trainer.scheduler.update = partial(round_update, trainer.scheduler.update)
    return agent


def round_update(update, *arguments):
    return tuple(torch.tensor(x).item() for x in update(*arguments))


def read_losses(agent):
    """Those of the central value network, as they were logged."""
    agent.writer.flush()
    events = EventAccumulator(agent.summaries_dir).Reload()
    return [x.value for x in events.Scalars("losses/cval_loss")] if agent.has_central_value else []


def compare_all(ours, other, **tolerance):
    compare(ours, other, **tolerance)
    assert ours.last_lr == pytest.approx(other.last_lr, rel=tolerance["rtol"] or 1e-12)
    assert ours.entropy_coef == other.entropy_coef and ours.frame == other.frame
    for x, y in zip(list_trainers(ours), list_trainers(other), strict=True):
        states = [trainer.optimizer.state_dict()["state"] for trainer in (x, y)]
        torch.testing.assert_close(*states, **tolerance)
    assert read_losses(ours) == pytest.approx(read_losses(other), rel=tolerance["rtol"] or 1e-12)


@pytest.mark.parametrize("case", CASES)
def test_a_captured_update_is_the_eager_one(case, tmp_path, monkeypatch):
    """Bit for bit, unless states are zeroed: RL-Games tells its optimizer how to step. Buffers stay where they are."""
    env, changes = CASES[case]
    changes = {"learning_rate": 2**-10, "e_clip": 0.25} | changes
    eager = train(round_rates(make_agent("triton", env, tmp_path, changes)))
    assert eager.describe().startswith("updates are eager: graphs need tensors on a GPU")
    allow_captures(monkeypatch)
    ours = round_rates(make_agent("triton", env, tmp_path, changes))
    trainers = list_trainers(ours)
    places = [x.data_ptr() for trainer in trainers for x in trainer.model.buffers()]
    train(ours)
    assert ours.describe() == CAPTURED[len(trainers) - 1]
    updates = [ours._rl_triton, ours._rl_triton.central_value][: len(trainers)]
    assert [x.step.graphs.captures for x in updates] == [1] * len(trainers)
    assert places == [x.data_ptr() for trainer in trainers for x in trainer.model.buffers()]
    rounding = "zeroed" in case  # of parts of sequences and of single steps
    compare_all(ours, eager, rtol=1e-4 * rounding, atol=1e-5 * rounding)


@pytest.mark.parametrize("case", CASES)
def test_training_is_that_of_rl_games_up_to_rounding(case, device, tmp_path):
    """Of two epochs, with time limits; the runner's names stand for our agents."""
    env, changes = CASES[case]
    changes = changes | {"max_epochs": 2, "device": device, "env_config": {"env": env, "device": device, "seed": 1}}
    stock, ours = map(train, make_both(env, tmp_path, changes))
    assert type(ours) is type(stock) is CLASSES[env] and ours.last_lr == pytest.approx(stock.last_lr)
    if device == "cuda":
        assert ours.describe() in CAPTURED
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if device == "cpu" else {"rtol": 1e-2, "atol": 1e-3}
    compare(ours, stock, **tolerance)
    assert read_losses(ours) == pytest.approx(read_losses(stock), rel=tolerance["rtol"])


@pytest.mark.parametrize("device", [GPU])
@pytest.mark.parametrize("env", CLASSES)
@pytest.mark.parametrize("central", [{}, with_central_value(mixed_precision=True)], ids=["alone", "central value"])
def test_mixed_precision_on_a_gpu(central, env, device, tmp_path):
    """Which RL-Games has on a GPU alone."""
    changes = central | {
        "mixed_precision": True,
        "device": device,
        "env_config": {"env": env, "device": device, "seed": 1},
    }
    stock, ours = map(train, make_both(env, tmp_path, changes))
    assert ours.describe() == CAPTURED[bool(central)]
    compare(ours, stock, rtol=5e-2, atol=5e-3)


def anneal(agent, i):
    """As programs do it: other numbers in every epoch."""
    agent.e_clip, agent.critic_coef, agent.bounds_loss_coef = 0.2 - 0.04 * i, 1.0 + i, 1e-3 * i
    agent.central_value_net.e_clip = 0.2 - 0.05 * i


def set_others(agent, i):
    for x in list_trainers(agent):
        x.grad_norm = 1.0 if i < 2 else 0.05
    agent.central_value_net.clip_value = agent.central_value_net.truncate_grads = i < 2


@pytest.mark.parametrize(("change", "captures"), [(anneal, 1), (set_others, 2)])
def test_settings_that_change_are_followed(change, captures, tmp_path, monkeypatch):
    """A graph is given numbers that are annealed, and keeps others: it is captured anew."""
    allow_captures(monkeypatch)
    agents = make_both("pendulum", tmp_path, with_central_value() | {"normalize_input": True})
    for agent in agents:
        for i in range(4):
            change(agent, i)
            agent.max_epochs = i + 1
            train(agent, seed=2)
    compare(*agents[::-1], rtol=1e-4, atol=1e-5)
    updates = agents[1]._rl_triton, agents[1]._rl_triton.central_value
    modes = 2 if version("rl-games") == "1.6.1" else 1  # of running means while a step is made
    assert [x.step.graphs.captures for x in updates] == [modes * captures, captures]
    agents[1].recapture()
    agents[1].max_epochs += 1
    train(agents[1])
    assert [x.step.graphs.captures for x in updates] == [modes, 1]


@pytest.mark.usefixtures("captured")
def test_an_interrupted_update_leaves_what_that_of_rl_games_does(tmp_path):
    """Where a graph is captured, as the step begins; and training goes on."""
    changes = with_central_value(normalize_input=False) | {"max_epochs": 1, "learning_rate": 1e-4}
    stock, ours = make_both("pendulum", tmp_path, changes)
    for agent in (stock, ours):
        train(agent)
        for trainer in list_trainers(agent):
            agent.max_epochs += 1
            handle = trainer.optimizer.register_step_pre_hook(interrupt)
            with pytest.raises(KeyboardInterrupt):
                train(agent)
            handle.remove()
        agent.max_epochs += 1
        train(agent)
    ours.recapture()
    compare_all(ours, stock, rtol=1e-4, atol=1e-5)
    for x, y in zip(list_trainers(ours), list_trainers(stock), strict=True):
        assert vars(x.optimizer).keys() == vars(y.optimizer).keys()
        groups = [trainer.optimizer.state_dict()["param_groups"] for trainer in (x, y)]
        assert [group | {"lr": 0} for group in groups[0]] == [group | {"lr": 0} for group in groups[1]]
        assert {*vars(x)} - {*vars(y)} <= {"enabled", "_rl_triton", "use_fused_kernel"}


def test_no_step_of_a_central_value_network_waits_for_its_loss(tmp_path, monkeypatch):
    """The host reads one number, the average."""
    allow_captures(monkeypatch)
    agent, item = make_agent("triton", "pendulum", tmp_path, with_central_value()), torch.Tensor.item
    reads, results = [], []
    train_network = agent.train_central_value

    def count_reads():
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "item", lambda x: reads.append(x) or item(x))
            return results.append(train_network())

    agent.train_central_value = count_reads
    train(agent)
    assert len(reads) == agent.max_epochs and all(type(x) is float for x in results)


def refuse_gradients(graph, _):
    """A compiler whose code cannot be trained."""

    def run(*arguments):
        assert not torch.is_grad_enabled()
        return graph(*arguments)

    return run


def test_compiled_models_are_captured_uncompiled(tmp_path, monkeypatch):
    """RL-Games' runner compiles them after the agent is made."""
    allow_captures(monkeypatch)
    agents = make_both("pendulum", tmp_path, with_central_value(normalize_input=False))
    for trainer in list_trainers(agents[1]):
        trainer.model = torch.compile(trainer.model, backend=refuse_gradients)
    for agent in agents:
        train(agent)
    assert agents[1].describe() == CAPTURED[1]
    assert all(hasattr(trainer.model, "_orig_mod") for trainer in list_trainers(agents[1]))
    compare(*agents[::-1], rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("captured")
def test_an_observation_that_is_nan_is_an_error_before_that_step(tmp_path, monkeypatch):
    monkeypatch.setattr(Distribution, "_validate_args", True)  # which torch.compile switches off
    agents, errors = make_both("cartpole", tmp_path), []
    for agent in agents:
        train(agent).max_epochs += 1
        prepare = agent.prepare_dataset

        def spoil(batch, prepare=prepare):
            batch["obses"][20] = torch.nan
            prepare(batch)

        agent.prepare_dataset = spoil
        with pytest.raises(ValueError, match="Expected parameter logits") as caught:
            train(agent, seed=2)
        errors.append(str(caught.value)[:60])
    assert errors[0] == errors[1]
    torch.testing.assert_close(*map(list, (agent.model.parameters() for agent in agents)), rtol=1e-4, atol=2e-6)


AGENT, OF_VALUES = "TritonA2CAgent updates as the agent", "the central value network updates as that"
REASONS = [
    (AGENT, "use_diagnostics reads from the device in every minibatch", {"use_diagnostics": True}),
    (AGENT, "torch_compile=reduce-overhead", {"torch_compile": "reduce-overhead"}),
    (OF_VALUES, "torch_compile=reduce-overhead", {"torch_compile": {"mode": "reduce-overhead"}}),
    (OF_VALUES, "torch_compile=max-autotune", {"torch_compile": {"mode": "default", "critic_mode": "max-autotune"}}),
]


@pytest.mark.parametrize(("who", "reason", "changes"), REASONS)
def test_what_is_not_captured(who, reason, changes, tmp_path, monkeypatch):
    allow_captures(monkeypatch)
    changes = changes | (with_central_value() if who == OF_VALUES else {})
    reason += " captures graphs of its own" * reason.startswith("torch_compile")
    with pytest.warns(RuntimeWarning, match=f"{who} of RL-Games does: {reason}"):
        ours = train(make_agent("triton", "pendulum", tmp_path, changes))
    assert ours.describe().split(OTHER)[-1] == f"updates are those of RL-Games: {reason}"
    compare_all(ours, train(make_agent("stock", "pendulum", tmp_path, changes)), rtol=1e-4, atol=2e-6)


def test_a_central_value_network_of_users(tmp_path, monkeypatch):
    """Switched off, bit for bit; with a method of users around its training; one that takes the place of another."""
    allow_captures(monkeypatch)
    agents = [make_agent("stock", "pendulum", tmp_path, with_central_value(), x) for x in (True, False)]
    compare_all(*map(train, agents), rtol=0, atol=0)
    assert agents[0].describe().endswith(f"{OTHER}updates are those of RL-Games: switched off")
    behind = type("Ours", (CLASSES["pendulum"], Watching), {})
    agent = train(make_agent("triton", "pendulum", tmp_path, with_central_value(), kind=behind))
    assert not agent.central_value_loss.requires_grad
    assert read_losses(agent)[-1] == pytest.approx(agent.central_value_loss.item())
    agent = make_agent("triton", "pendulum", tmp_path, with_central_value())
    agent.central_value_net = make_agent("stock", "pendulum", tmp_path, with_central_value()).central_value_net
    assert train(agent).describe() == CAPTURED[1]
    assert agent._rl_triton.central_value.step.graphs.captures == 1


class Watching(A2CAgent):
    def train_central_value(self):
        self.central_value_loss = super().train_central_value()


@pytest.mark.parametrize("env", CLASSES)
def test_the_fused_loss_of_rl_games_2_is_for_its_own_updates(env, tmp_path, monkeypatch):
    """It takes numbers, which a graph would keep; and ours would not be called."""
    monkeypatch.setattr(A2CBase, "use_fused_kernel", True, raising=False)
    for changes, expected in (({}, False), ({"use_diagnostics": True}, True), ({"rl_triton": False}, True)):
        assert make_agent("triton", env, tmp_path, changes).use_fused_kernel == expected


def test_methods_of_users_are_not_captured(tmp_path, monkeypatch):
    allow_captures(monkeypatch)
    agent = make_agent("triton", "pendulum", tmp_path)
    assert agent.describe() == "updates are captured"
    agent.actor_loss_func = lambda *arguments: arguments[1]
    assert agent.describe() == "updates are those of RL-Games: actor_loss_func is not RL-Games'"
    for name in ("bound_loss", "calc_gradients"):
        agent = make_agent("triton", "pendulum", tmp_path)
        override(agent, name)
        assert f"those of RL-Games: this TritonA2CAgent has its own {name}" in agent.describe()
    behind = type("Ours", (CLASSES["pendulum"], derive(A2CAgent, "calc_gradients")), {})
    agent = make_agent("triton", "pendulum", tmp_path, kind=behind)
    assert agent.describe().startswith("updates are those of RL-Games: A2CAgent has its own calc_gradients (")


def train_in_rank(rank, device, arm, folder):
    changes = NORMALIZED | {"device": device, "env_config": {"env": "pendulum", "device": device, "seed": 1 + rank}}
    changes |= with_central_value() | {"max_epochs": 3}  # so few that no rounding grows
    agent = make_agent("stock" if arm == "stock" else "triton", "pendulum", folder, changes)
    torch.cuda.set_device = lambda _: None  # the device and the group are there already
    for trainer in list_trainers(agent):
        trainer.multi_gpu, trainer.world_size, trainer.global_rank = True, 2, rank
    agent.central_value_net.device_name = device  # as RL-Games 1.6.1 calls it
    agent.last_lr *= 1 + rank
    train(agent, seed=rank)
    return (get_state(agent), [agent.last_lr, agent.central_value_net.lr], "" if arm == "stock" else agent.describe())


@SETUPS
def test_training_in_two_processes(device, kind, tmp_path):
    check_training(
        train_in_rank, ["running_mean_std.running_", "running_mean 1", "running_var 1"], device, kind, tmp_path
    )


@pytest.mark.parametrize("env", ["cartpole", "pendulum"])
def test_steps_are_compared_when_asked(env, tmp_path, monkeypatch, capsys):
    """The first ones, with those of RL-Games; training is what it is without."""
    agents = []
    for count in ("0", "3"):
        monkeypatch.setenv("RL_TRITON_CHECK", count)
        allow_captures(monkeypatch)
        agents.append(train(make_agent("triton", env, tmp_path, {"max_epochs": 1})))
    lines = re.findall(
        r"RL_TRITON_CHECK: \w+\.calc_gradients (\d): .* by (\S+) and differ by (\S+) from", capsys.readouterr().out
    )
    assert [int(x) for x, *_ in lines] == [1, 2, 3] and all(float(moved) > 1e3 * float(off) for _, moved, off in lines)
    compare(*agents, rtol=0, atol=0)
