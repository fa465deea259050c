"""Captured updates of RL-Games' agents against eager ones and against its own; on a CPU with recorded graphs."""

import pytest
import torch
from gpu_checks import GPU

pytest.importorskip("rl_games")
from overrides import override
from recorded_graphs import allow_captures
from rl_games.algos_torch.a2c_continuous import A2CAgent
from rl_games.common.a2c_common import A2CBase
from test_rl_games import CLASSES, compare, make_agent
from torch.distributions import Distribution
from two_processes import SETUPS, check_training

NORMALIZED = {"normalize_input": True, "normalize_value": True}
CASES = {
    "discrete": ("cartpole", {}),
    "normalized": ("pendulum", NORMALIZED | {"max_epochs": 40, "mini_epochs": 2}),
    "normalized discrete": ("cartpole", NORMALIZED | {"max_epochs": 40, "mini_epochs": 2}),
    "bounds": ("pendulum", {"bounds_loss_coef": 0.1, "entropy_coef": 0.01, "clip_value": False}),
    "standard schedule": ("pendulum", {"schedule_type": "standard", "truncate_grads": False}),
    "linear schedule": ("pendulum", {"lr_schedule": "linear", "schedule_entropy": True, "entropy_coef": 0.01}),
    "smooth clamp": ("pendulum", {"use_smooth_clamp": True, "weight_decay": 0.01}),
}


def train(agent, seed=1):
    torch.manual_seed(seed)
    agent.train()
    return agent


def round_rates(agent):
    """Let learning rates be those that a graph keeps, which are float32."""
    update = agent.scheduler.update
    agent.scheduler.update = lambda *arguments: (
        torch.tensor((result := update(*arguments))[0]).item(),
        torch.tensor(result[1]).item(),
    )
    return agent


def compare_all(ours, other, **tolerance):
    compare(ours, other, **tolerance)
    assert ours.last_lr == pytest.approx(other.last_lr, rel=tolerance["rtol"] or 1e-12)
    assert ours.entropy_coef == other.entropy_coef and ours.frame == other.frame
    states = [x.optimizer.state_dict()["state"] for x in (ours, other)]
    for i in states[0]:
        torch.testing.assert_close(states[0][i], states[1][i], **tolerance)


@pytest.mark.parametrize("case", CASES)
def test_a_captured_update_is_the_eager_one(case, tmp_path, monkeypatch):
    """Bit for bit: RL-Games tells its optimizer how to step. Buffers of normalisations stay where graphs read them."""
    env, changes = CASES[case]
    changes = {"learning_rate": 2**-10} | changes
    eager = train(round_rates(make_agent("triton", env, tmp_path, changes)))
    assert eager.describe_step().startswith("updates are accelerated without a graph: graphs need tensors on a GPU")
    allow_captures(monkeypatch)
    ours = round_rates(make_agent("triton", env, tmp_path, changes))
    places = [x.data_ptr() for x in ours.model.buffers()]
    train(ours)
    assert ours.describe_step() == "updates are captured"
    assert ours._captured.step.graphs.captures == 1 and places == [x.data_ptr() for x in ours.model.buffers()]
    compare_all(ours, eager, rtol=0, atol=0)


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("case", CASES)
def test_training_is_that_of_rl_games_up_to_rounding(case, device, tmp_path):
    env, changes = CASES[case]
    changes = changes | {"max_epochs": 2, "device": device, "env_config": {"env": env, "device": device, "seed": 1}}
    stock, ours = (train(make_agent(name, env, tmp_path, changes)) for name in ("stock", "triton"))
    if device == "cuda":
        assert ours.describe_step() == "updates are captured"
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if device == "cpu" else {"rtol": 1e-2, "atol": 1e-3}
    compare(ours, stock, **tolerance)


@pytest.mark.parametrize("device", [GPU])
@pytest.mark.parametrize("env", CLASSES)
def test_mixed_precision_on_a_gpu(env, device, tmp_path):
    """Which RL-Games has on a GPU alone."""
    changes = {"mixed_precision": True, "device": device, "env_config": {"env": env, "device": device, "seed": 1}}
    stock, ours = (train(make_agent(name, env, tmp_path, changes)) for name in ("stock", "triton"))
    assert ours.describe_step() == "updates are captured"
    compare(ours, stock, rtol=5e-2, atol=5e-3)


def test_settings_that_change_are_followed(tmp_path, monkeypatch):
    agents = []
    for mode in ("stock", "triton", "triton"):
        if mode == "triton":
            allow_captures(monkeypatch)
        agent = train(make_agent(mode, "pendulum", tmp_path))
        if len(agents) < 2:
            agent.e_clip, agent.grad_norm, agent.critic_coef = 0.01, 0.1, 3.0
        agent.max_epochs += 2
        agents.append(train(agent, seed=2))
    compare(*agents[1::-1], rtol=1e-4, atol=1e-5)
    assert not torch.equal(*(next(x.model.parameters()) for x in agents[1:]))


@pytest.mark.parametrize("captured", [False, True])
def test_an_observation_that_is_nan_is_an_error_before_that_step(captured, tmp_path, monkeypatch):
    monkeypatch.setattr(Distribution, "_validate_args", True)  # which torch.compile switches off
    agents, errors = [], []
    for mode in ("stock", "triton"):
        if mode == "triton" and captured:
            allow_captures(monkeypatch)
        agent = train(make_agent(mode, "cartpole", tmp_path))
        agent.max_epochs += 1
        prepare = agent.prepare_dataset

        def spoil(batch, prepare=prepare):
            batch["obses"][20] = torch.nan
            prepare(batch)

        agent.prepare_dataset = spoil
        with pytest.raises(ValueError, match="Expected parameter logits") as caught:
            train(agent, seed=2)
        errors.append(str(caught.value)[:60])
        agents.append(agent)
    assert errors[0] == errors[1]
    for x, y in zip(*(agent.model.parameters() for agent in agents), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=2e-6)


class Own(A2CAgent):
    def calc_gradients(self, input_dict):
        super().calc_gradients(input_dict)


def own_loss(*arguments):
    return arguments[1]


REASONS = {
    "use_diagnostics reads from the device in every minibatch": {"use_diagnostics": True},
    "torch_compile=reduce-overhead captures graphs of its own": {"torch_compile": "reduce-overhead"},
}


@pytest.mark.parametrize("reason", REASONS)
def test_what_is_not_captured(reason, tmp_path, monkeypatch):
    allow_captures(monkeypatch)
    with pytest.warns(RuntimeWarning, match=f"TritonA2CAgent updates as the agent of RL-Games does: {reason}"):
        ours = train(make_agent("triton", "pendulum", tmp_path, REASONS[reason]))
    assert ours.describe_step() == f"updates are those of RL-Games: {reason}"
    compare(ours, train(make_agent("stock", "pendulum", tmp_path, REASONS[reason])), rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("env", CLASSES)
def test_the_fused_loss_of_rl_games_2_is_for_its_own_updates(env, tmp_path, monkeypatch):
    """It takes numbers, which a graph would keep; and ours would not be called."""
    monkeypatch.setattr(A2CBase, "use_fused_kernel", True, raising=False)
    for changes, expected in (({}, False), ({"use_diagnostics": True}, True), ({"triton": False}, True)):
        assert make_agent("triton", env, tmp_path, changes).use_fused_kernel == expected


def test_methods_of_users_are_not_captured(tmp_path, monkeypatch):
    allow_captures(monkeypatch)
    agent = make_agent("triton", "pendulum", tmp_path)
    assert agent.describe_step() == "updates are captured"
    agent.actor_loss_func = own_loss
    assert agent.describe_step() == "updates are those of RL-Games: actor_loss_func is not RL-Games'"
    for name in ("bound_loss", "calc_gradients"):
        agent = make_agent("triton", "pendulum", tmp_path)
        override(agent, name)
        assert agent.describe_step() == f"updates are those of RL-Games: this TritonA2CAgent has its own {name}"
    behind = type("Ours", (CLASSES["pendulum"], Own), {})
    agent = make_agent("triton", "pendulum", tmp_path, kind=behind)
    assert agent.describe_step() == "updates are those of RL-Games: Own has its own calc_gradients"


def train_in_rank(rank, device, arm, folder):
    changes = NORMALIZED | {"device": device, "env_config": {"env": "pendulum", "device": device, "seed": 1 + rank}}
    changes["max_epochs"] = 3  # so few that no rounding grows
    agent = make_agent("stock" if arm == "stock" else "triton", "pendulum", folder, changes)
    torch.cuda.set_device = lambda _: None  # the device and the group are there already
    agent.multi_gpu, agent.world_size, agent.global_rank = True, 2, rank
    agent.last_lr *= 1 + rank
    train(agent, seed=rank)
    return agent.model.state_dict(), [agent.last_lr], "" if arm == "stock" else agent.describe_step()


@SETUPS
def test_training_in_two_processes(device, kind, tmp_path):
    check_training(train_in_rank, [".running_"], device, kind, tmp_path)
