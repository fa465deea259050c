"""Compiled updates of perceptrons against PyTorch's own: autograd, distributions, clipping and optimizers."""

import copy
import gc
import os
import re
import signal
import threading
import weakref
from functools import partial
from itertools import pairwise

import numba
import pytest
import torch
from process_state import run_in_threads
from torch import nn
from torch.optim import SGD, Adam, AdamW, RMSprop
from torch.optim.lr_scheduler import LinearLR

from rl_triton_core._internal.mlp import serial
from rl_triton_core._internal.mlp.compile import Loss, compile_helpers
from rl_triton_core.compiled import STATISTICS, CompiledUpdate, Rollout

NUM_FEATURES, NUM_SAMPLES = 3, 50
HEADS = {"categorical": 5, "gaussian": 2, "bernoulli": 3}  # outputs of the actor
PPO = {"clip": 0.1, "value_clip": 0.2, "entropy_coef": 0.02, "normalize_advantages": True, "max_grad_norm": 0.4}
A2C = {"entropy_coef": 0.02, "max_grad_norm": 0.4}
ACTIVATIONS = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "leaky_relu": partial(nn.LeakyReLU, 0.2),
    "elu": partial(nn.ELU, 0.7),
    "silu": nn.SiLU,
    "gelu": nn.GELU,
}
OPTIMIZERS = {
    "adam": partial(Adam, lr=torch.tensor(1e-2), eps=1e-5, weight_decay=0.01),
    "adamw": partial(AdamW, lr=1e-2, eps=1e-5, weight_decay=0.1),
    "rmsprop": partial(RMSprop, lr=1e-3, eps=1e-4, weight_decay=0.01),
    "rmsprop_centered": partial(RMSprop, lr=1e-3, eps=1e-4, centered=True, momentum=0.5),
    "sgd": partial(SGD, lr=0.05, weight_decay=0.01),
    "sgd_momentum": partial(SGD, lr=0.02, momentum=0.9),
    "sgd_nesterov": partial(SGD, lr=0.02, momentum=0.9, nesterov=True),
}


class Agent(nn.Module):
    def __init__(self, head="categorical", activation=nn.Tanh, sizes=(8, 6), nvec=None, trunk=False, bias=True):
        super().__init__()
        self.head, self.nvec = head, nvec
        widths = [NUM_FEATURES, *sizes]
        hidden = [self.make_hidden(widths, activation, bias) for _ in range(2)]
        hidden = [hidden[0], hidden[0]] if trunk else hidden
        self.actor = nn.Sequential(*hidden[0], nn.Linear(widths[-1], HEADS[head]))
        self.critic = nn.Sequential(nn.Sequential(*hidden[1]), nn.Linear(widths[-1], 1))
        self.log_std = nn.Parameter(torch.full((HEADS[head],), -0.3)) if head == "gaussian" else None

    @staticmethod
    def make_hidden(widths, activation, bias):
        pairs = pairwise(widths)
        return [x for pair in pairs for x in (nn.Linear(*pair, bias=bias), activation())]

    def compiled(self, optimizer):
        return CompiledUpdate(self.actor, self.critic, optimizer, head=self.head, nvec=self.nvec, log_std=self.log_std)

    def evaluate(self, features, actions, masks):
        outputs, values = self.actor(features), self.critic(features).flatten()
        if masks is not None:
            outputs = torch.where(masks, outputs, -1e8)
        if self.head == "gaussian":
            policy = torch.distributions.Normal(outputs, self.log_std.exp().expand_as(outputs))
        elif self.head == "bernoulli":
            policy = torch.distributions.Bernoulli(logits=outputs)
        else:
            parts = outputs.split(self.nvec or [outputs.shape[1]], dim=1)
            policies = [torch.distributions.Categorical(logits=x) for x in parts]
            pairs = zip(policies, actions.unbind(1), strict=True)
            return sum(x.log_prob(y) for x, y in pairs), sum(x.entropy() for x in policies), values
        return policy.log_prob(actions).sum(1), policy.entropy().sum(1), values


def make_rollout(head="categorical", nvec=None, masked=False, count=NUM_SAMPLES):
    width = HEADS[head]
    if head == "categorical":
        actions = torch.stack([torch.randint(size, (count,)) for size in nvec or [width]], dim=1)
    else:
        actions = torch.randn(count, width) if head == "gaussian" else torch.randint(2, (count, width)).float()
    masks = torch.rand(count, width) < 0.7
    for i, (low, size) in enumerate(zip([0, *(nvec or [])], nvec or [width], strict=False)):
        masks[torch.arange(count), low + actions[:, i].long() % size] = True
    returns, old_values, advantages = torch.randn(3, count)
    features, old_log_probs = torch.randn(count, NUM_FEATURES), -torch.rand(count)
    numbers = {"advantages": advantages, "returns": returns, "old_log_probs": old_log_probs, "old_values": old_values}
    return Rollout(features, actions, **numbers, action_masks=masks if masked else None)


def update_slowly(agent, optimizer, rollout, orders, size, **numbers):
    """The same in PyTorch; the loss of each minibatch, up to that at which the update stops."""
    clip, value_clip = numbers.get("clip"), numbers.get("value_clip")
    losses = []
    for order in orders:
        for indices in order.split(size):
            part = Rollout(*(None if x is None else x[indices] for x in rollout))
            log_probs, entropy, values = agent.evaluate(part.features, part.actions, part.action_masks)
            advantages = part.advantages
            if numbers.get("normalize_advantages") and len(indices) > 1:
                advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
            policy_loss = -(advantages * log_probs).mean()
            log_ratio = log_probs - part.old_log_probs if clip else torch.zeros(())
            if clip:
                ratio = log_ratio.exp()
                clipped = ratio.clamp(1 - clip, 1 + clip)
                policy_loss = -torch.min(advantages * ratio, advantages * clipped).mean()
            if value_clip:
                values = part.old_values + (values - part.old_values).clamp(-value_clip, value_clip)
            value_loss = (part.returns - values).square().mean()
            loss = policy_loss + 0.5 * value_loss - numbers["entropy_coef"] * entropy.mean()
            losses.append(loss.item())
            if (log_ratio.exp() - 1 - log_ratio).mean() > numbers.get("max_kl", torch.inf):
                return losses
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), numbers["max_grad_norm"])
            optimizer.step()
    return losses


def draw_orders(count, num_epochs):
    return [torch.randperm(count) for _ in range(num_epochs)]


def draw_and_change(orders, change, *objects):
    """The orders; before the second one, something changes objects."""
    for i, order in enumerate(orders):
        if i == 1 and change is not None:
            change(*objects)
        yield order


def assert_same_update(agent, make_optimizer, rollout, *, size=16, num_epochs=3, times=1, change=None, **numbers):
    """Parameters, their gradients, states of optimizers and losses."""
    agents = agent, copy.deepcopy(agent)
    optimizers = [make_optimizer(x.parameters()) for x in agents]
    for _ in range(times):
        orders = draw_orders(len(rollout.features), num_epochs)
        drawn = [draw_and_change(orders, change, *pair) for pair in zip(agents, optimizers, strict=True)]
        epochs = agents[0].compiled(optimizers[0]).run(rollout, drawn[0], size, **numbers)
        losses = update_slowly(agents[1], optimizers[1], rollout, drawn[1], size, **numbers)
        got = torch.cat(epochs)[:, STATISTICS.index("loss")]
        torch.testing.assert_close(got, torch.tensor(losses).double(), rtol=2e-4, atol=2e-5)
    for x, y in zip(*(model.parameters() for model in agents), strict=True):
        torch.testing.assert_close(x, y, rtol=2e-4, atol=2e-5)
        torch.testing.assert_close(x.grad, y.grad, rtol=2e-3, atol=2e-5)
        states = [optimizer.state[z] for optimizer, z in zip(optimizers, (x, y), strict=True)]
        assert list(states[0]) == list(states[1])
        torch.testing.assert_close(*states, rtol=2e-3, atol=2e-5)
    return epochs


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("numbers", [PPO, A2C], ids=["ppo", "a2c"])
@pytest.mark.parametrize("head", HEADS)
def test_an_update_is_that_of_pytorch(head, numbers):
    assert_same_update(Agent(head), OPTIMIZERS["adam"], make_rollout(head), **numbers)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation):
    agent = Agent("gaussian", ACTIVATIONS[activation])
    assert_same_update(agent, OPTIMIZERS["sgd"], make_rollout("gaussian"), **PPO)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers(optimizer):
    assert_same_update(Agent(), OPTIMIZERS[optimizer], make_rollout(), num_epochs=5, **PPO)


SHAPES = {
    "no hidden layer": {"sizes": ()},
    "no bias": {"bias": False},
    "a trunk": {"trunk": True, "sizes": (7,)},
    "layers of many sizes": {"sizes": (1, 9, 4, 5)},
    "blocks of all kinds": {"sizes": (71, 130, 21)},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_networks_of_any_shape(shape):
    agent = Agent(**SHAPES[shape])
    if SHAPES[shape].get("trunk"):
        assert agent.actor[0] is agent.critic[0][0]
    assert_same_update(agent, OPTIMIZERS["adam"], make_rollout(), **PPO)


@pytest.mark.parametrize("nvec", [None, [2, 3]])
def test_actions_that_are_masked(nvec):
    assert_same_update(Agent(nvec=nvec), OPTIMIZERS["adam"], make_rollout(nvec=nvec, masked=True), **PPO)


@pytest.mark.parametrize("size", [1, serial.TILE, serial.TILE + 1, 2 * serial.TILE + 7])
def test_minibatches_of_several_tiles_and_a_remainder_of_one(size):
    rollout = make_rollout(count=2 * size + 1)
    assert_same_update(Agent(), OPTIMIZERS["sgd"], rollout, size=size, num_epochs=1, **PPO)


def test_three_hundred_updates_with_groups_and_a_schedule():
    """Differences stay within rounding: they do not grow with the number of steps."""
    agent = Agent("gaussian")

    def make_optimizer(parameters):
        first, *others = parameters
        groups = [{"params": [first], "lr": 1e-3, "weight_decay": 0.1}, {"params": others}]
        return Adam(groups, lr=3e-4, eps=1e-5)

    assert_same_update(agent, make_optimizer, make_rollout("gaussian"), num_epochs=1, times=300, **PPO)


def test_it_stops_at_the_same_minibatch_and_leaves_the_gradients_of_the_step_before():
    agent, rollout = Agent(), make_rollout()
    log_probs, *_ = agent.evaluate(rollout.features, rollout.actions, None)
    rollout = rollout._replace(old_log_probs=log_probs.detach())
    epochs = assert_same_update(agent, OPTIMIZERS["adam"], rollout, num_epochs=9, max_kl=0.01, **PPO)
    seen = torch.cat(epochs)[:, -1]
    assert seen[-1] == 1 and not seen[:-1].any() and 1 < len(seen) < 9 * 4


def test_a_logit_that_is_nan_stops_before_any_step():
    agent = Agent()
    nn.init.constant_(agent.actor[-1].weight, torch.nan)
    optimizer = Adam(agent.parameters())
    before = copy.deepcopy(agent.state_dict())
    (epoch,) = agent.compiled(optimizer).run(make_rollout(), draw_orders(NUM_SAMPLES, 2), 16, **PPO)
    assert len(epoch) == 1 and epoch[0, -1] == 1 and all(x.grad is None for x in agent.parameters())
    assert all(torch.equal(x, before[name]) for name, x in agent.critic.state_dict(prefix="critic.").items())


@pytest.mark.parametrize(("head", "action"), [("categorical", HEADS["categorical"]), ("bernoulli", 2)])
def test_an_action_that_there_is_not_stops_the_update(head, action):
    rollout = make_rollout(head)
    rollout.actions[3, -1] = action
    agent = Agent(head)
    epochs = agent.compiled(Adam(agent.parameters())).run(rollout, draw_orders(NUM_SAMPLES, 1), NUM_SAMPLES, **PPO)
    assert torch.cat(epochs)[-1, -1] == 1


def test_tanh_is_that_of_pytorch_within_rounding():
    tanh = numba.vectorize(["float32(float32)"])(compile_helpers(Loss())["tanh"].py_func)
    x = torch.linspace(-12, 12, 200_001)
    x = torch.cat([x, torch.tensor([0.0, 1e-30, -1e-10, 1e-4, torch.inf, -torch.inf, torch.nan])])
    got = torch.from_numpy(tanh(x.numpy()))
    torch.testing.assert_close(got, x.double().tanh().float(), rtol=5e-7, atol=0, equal_nan=True)
    assert torch.equal(got[x.abs() > 9], x[x.abs() > 9].sign())  # or large inputs would get a gradient


OBSTACLES = {
    "Dropout is none": lambda agent: agent.actor.insert(1, nn.Dropout()),
    "GELU.approximate='tanh'. is not": lambda agent: agent.actor.__setitem__(1, nn.GELU("tanh")),
    "this Tanh has its own forward": lambda agent: setattr(agent.actor[1], "forward", torch.sin),
    "has hooks": lambda agent: agent.actor[0].register_forward_hook(lambda *_: None),
    "a module, parameter or optimizer has hooks": lambda agent: agent.critic.register_forward_hook(lambda *_: None),
    "or optimizer has hooks": lambda agent: agent.actor[0].weight.register_hook(lambda x: x),
    "torch.float64": lambda agent: agent.critic.double(),
    "not contiguous": lambda agent: setattr(agent.actor[0].weight, "data", torch.zeros(3, 8).T),
    "is used twice": lambda agent: setattr(agent.critic[0][0], "weight", agent.actor[0].weight),
    "a layer has 128400 weights": lambda agent: setattr(agent.actor[0].weight, "data", torch.zeros(400, 321)),
    "weight of shape .7, 3. does not fit": lambda agent: setattr(agent.actor[0].weight, "data", torch.zeros(7, 3)),
    "weight of shape .6, 9. does not fit": lambda agent: setattr(agent.actor[2].weight, "data", torch.zeros(6, 9)),
    "weight of shape .8, 3. does not fit its bias": lambda agent: setattr(agent.actor[0].bias, "data", torch.ones(1)),
    "lost its memory": lambda agent: agent.actor[0].weight.untyped_storage().resize_(40),
    "all parameters are frozen": lambda agent: agent.requires_grad_(False),
}


STATES = {
    "the state of Adam is not float32": {"exp_avg": torch.zeros(8, 3, dtype=torch.float64)},
    "the state of Adam is not .* of its parameter's shape": {"exp_avg_sq": torch.zeros(3, 3)},
    "state of Adam is not float32": {"step": torch.zeros(0)},
    "the state of Adam is not complete": {"exp_avg": None},
    "Adam counts steps in numbers of Python": {"step": 3},
}


@pytest.mark.parametrize("reason", [*OBSTACLES, *STATES])
def test_what_is_not_compiled_is_said(reason):
    agent = Agent()
    update = agent.compiled(optimizer := Adam(agent.parameters()))
    assert update.find_obstacle() == "" and not optimizer.state, "asking makes none"
    if reason in OBSTACLES:
        OBSTACLES[reason](agent)
    else:
        update.run(make_rollout(), draw_orders(NUM_SAMPLES, 1), 16, **PPO)
        optimizer.state[agent.actor[0].weight].update(STATES[reason])
        assert re.search(reason, update.find_obstacle())
    with pytest.raises(ValueError, match=f"this CompiledUpdate is not compiled: .*{reason}"):
        update.run(make_rollout(), draw_orders(NUM_SAMPLES, 1), 16, **PPO)


OPTIMIZER_OBSTACLES = {
    "Adagrad is none": torch.optim.Adagrad,
    "Adam with amsgrad": partial(Adam, amsgrad=True),
    "SGD with dampening": partial(SGD, lr=0.1, momentum=0.9, dampening=0.5),
    "Adam with settings that are tensors": partial(Adam, betas=(torch.tensor(0.9), torch.tensor(0.99))),
    "SGD has a parameter twice": lambda parameters: SGD(2 * [*parameters], lr=0.1),
    "does not have all parameters": lambda parameters: Adam([*parameters][1:]),
    "this Adam has its own step": lambda parameters: LinearLR(Adam(parameters)).optimizer,
}


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
@pytest.mark.parametrize("reason", OPTIMIZER_OBSTACLES)
def test_which_optimizers_are_not_compiled_is_said(reason):
    agent = Agent()
    assert reason in agent.compiled(OPTIMIZER_OBSTACLES[reason](agent.parameters())).find_obstacle()


def replace_memory(agent, optimizer):
    for x in agent.parameters():
        x.data = x.data.flip(0).contiguous()


def replace_states(agent, optimizer):
    for state in optimizer.state.values():
        state["exp_avg"] = torch.full_like(state["exp_avg"], 0.1)


def replace_module(agent, optimizer):
    """A layer of another width, and what is behind it."""
    torch.manual_seed(3)
    agent.critic[1], agent.critic[0][2] = nn.Linear(9, 1), nn.Linear(8, 9)
    optimizer.add_param_group({"params": [*agent.critic[1].parameters(), *agent.critic[0][2].parameters()], "lr": 0.1})


CHANGES = {
    "the learning rate": lambda agent, optimizer: optimizer.param_groups[0].update(lr=0.0),
    "further settings": lambda agent, optimizer: optimizer.param_groups[0].update(betas=(0.5, 0.6), weight_decay=0.3),
    "what is frozen": lambda agent, optimizer: agent.actor[0].weight.requires_grad_(False),
    "what is not": lambda agent, optimizer: agent.requires_grad_(True),
    "memory of parameters": replace_memory,
    "a state that is cleared": lambda agent, optimizer: optimizer.state.clear(),
    "states that are replaced": replace_states,
    "states that are loaded": lambda agent, optimizer: optimizer.load_state_dict(optimizer.state_dict()),
    "modules": replace_module,
    "an activation": lambda agent, optimizer: agent.actor.__setitem__(1, nn.SiLU()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_generator_changes_counts(change):
    """Also the second time: an update knows the tables of the one before."""
    agent = Agent()
    agent.actor[2].bias.requires_grad_(change != "what is not")
    times = 1 if change == "modules" else 2
    assert_same_update(agent, OPTIMIZERS["adam"], make_rollout(), times=times, change=CHANGES[change], **PPO)


def test_sizes_are_those_of_weights():
    agent = Agent()
    agent.actor[0].out_features = agent.actor[2].in_features = 1
    assert_same_update(agent, OPTIMIZERS["adam"], make_rollout(), **PPO)


def fail(*_):
    raise EOFError("nothing is left")


REFUSED = {
    "nothing is left": fail,
    "has hooks": lambda agent, optimizer: agent.actor[0].register_forward_hook(lambda *_: None),
    "does not fit": lambda agent, optimizer: setattr(agent.actor[0].weight, "data", torch.zeros(99, 3)),
    "Adam with amsgrad": lambda agent, optimizer: optimizer.param_groups[0].update(amsgrad=True),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_ends_an_update_leaves_the_state_after_the_epoch_before(reason):
    agents = Agent(), Agent()
    agents[1].load_state_dict(agents[0].state_dict())
    optimizers = [Adam(x.parameters()) for x in agents]
    rollout, (order, *others) = make_rollout(), draw_orders(NUM_SAMPLES, 3)
    agents[1].compiled(optimizers[1]).run(rollout, [order], 16, **PPO)
    wanted = [x.clone() for x in agents[1].parameters()]

    def keep_and_change(*objects):
        got.extend(x.detach().clone() for x in agents[0].parameters())
        REFUSED[reason](*objects)

    got = []
    drawn = draw_and_change([order, *others], keep_and_change, agents[0], optimizers[0])
    with pytest.raises((EOFError, ValueError), match=reason):
        agents[0].compiled(optimizers[0]).run(rollout, drawn, 16, **PPO)
    assert all(map(torch.equal, got, wanted))
    pairs = zip(agents[0].parameters(), agents[1].parameters(), strict=True)
    assert all(torch.equal(x.grad, y.grad) for x, y in pairs)
    assert {float(x["step"]) for x in optimizers[0].state.values()} == {4.0}


def test_an_update_of_another_kind_has_tables_of_its_own():
    agent = Agent()
    optimizer = Adam(agent.parameters())
    others = copy.deepcopy((agent, optimizer))
    for nvec in (None, [2, 3]):
        agent.nvec = others[0].nvec = nvec
        rollout, orders = make_rollout(nvec=nvec), draw_orders(NUM_SAMPLES, 2)
        agent.compiled(optimizer).run(rollout, orders, 16, **PPO)
        update_slowly(*others, rollout, orders, 16, **PPO)
    torch.testing.assert_close([*agent.parameters()], [*others[0].parameters()], rtol=2e-4, atol=2e-5)


def test_gradients_that_others_keep_stay():
    agent, kept = Agent(), []

    def draw():
        for order in draw_orders(NUM_SAMPLES, 3):
            yield order
            kept.append((agent.actor[0].weight.grad, agent.actor[0].weight.grad.clone()))

    agent.compiled(Adam(agent.parameters())).run(make_rollout(), draw(), 16, **PPO)
    assert len(kept) == 3 and all(torch.equal(*pair) for pair in kept)


BAD_ARGUMENTS = {
    r"features: got shape \(50, 4\), expected \(50, 3\)": {"features": torch.zeros(NUM_SAMPLES, 4)},
    r"returns: got shape \(50, 1\), expected \(50,\)": {"returns": torch.zeros(NUM_SAMPLES, 1)},
    "old_values: got None": {"old_values": None},
    "advantages: got None": {"advantages": None},
    "features: got cpu and requires_grad=True": {"features": torch.zeros(NUM_SAMPLES, 3, requires_grad=True)},
    "orders: got numbers from 0 to 50": {"orders": [torch.tensor([0, NUM_SAMPLES])]},
    "orders: got numbers from -1 to": {"orders": [torch.tensor([-1])]},
    "orders: got torch.float32": {"orders": [torch.tensor([0.0])]},
    "kl_coef: got 5.0, expected 0 without has_kl": {"kl_coef": 5.0},
    "value_coef: got nan": {"value_coef": float("nan")},
    "value_coef: got NoneType": {"value_coef": None},
    "entropy_coef: got str": {"entropy_coef": "1"},
    "clip: got bool": {"clip": True},
}


@pytest.mark.parametrize("message", BAD_ARGUMENTS)
def test_arguments_are_checked(message):
    agent, rollout = Agent(), make_rollout()._asdict()
    run = agent.compiled(Adam(agent.parameters())).run
    given = {"orders": draw_orders(NUM_SAMPLES, 1), **PPO, **BAD_ARGUMENTS[message]}
    rollout |= {name: given.pop(name) for name in [*given] if name in rollout}
    with pytest.raises((TypeError, ValueError), match=message):
        run(Rollout(**rollout), minibatch_size=16, **given)


def test_deviations_and_heads_are_checked():
    agent = Agent()
    for options, name in (
        ({"head": "beta"}, "head"),
        ({"head": "categorical", "log_std": agent.critic[1].bias}, "log_std"),
        ({"head": "categorical", "nvec": [7, -2]}, "nvec"),
    ):
        with pytest.raises(ValueError, match=f"{name}: got"):
            CompiledUpdate(agent.actor, agent.critic, Adam(agent.parameters()), **options)


def test_an_optimizer_that_is_forgotten_is_freed():
    agent, rollout = Agent(), make_rollout()
    optimizer = Adam(agent.parameters())
    for _ in range(2):
        agent.compiled(optimizer).run(rollout, draw_orders(NUM_SAMPLES, 1), 16, **PPO)
    kept = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert kept() is None


def make_task():
    torch.manual_seed(1)
    agent, rollout = Agent("gaussian", sizes=(64, 64)), make_rollout("gaussian", count=4000)
    optimizer = Adam(agent.parameters())
    return agent, optimizer, partial(agent.compiled(optimizer).run, rollout, draw_orders(4000, 3), 50, **PPO)


def test_several_in_several_threads():
    (alone, _, run), *others = [make_task() for _ in range(4)]
    run()
    run_in_threads(*(other for *_, other in others))
    for agent, *_ in others:
        assert all(map(torch.equal, agent.parameters(), alone.parameters()))


def test_an_interrupt_ends_it_after_an_epoch():
    """Parameters, gradients and counts of steps are those of whole epochs, and the next update is as ever."""
    agent, optimizer, run = make_task()
    run()
    agent.zero_grad()

    def draw_endlessly():
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
        while True:
            yield torch.arange(4000).repeat(20)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            run.func(run.args[0], draw_endlessly(), 50, **run.keywords)
    finally:
        signal.signal(signal.SIGINT, before)
    (steps,) = {state["step"].item() for state in optimizer.state.values()}
    assert steps > 0 and steps % 80 == 0 and all(x.grad is not None for x in agent.parameters())
    run()
    assert all(x.isfinite().all() for x in agent.parameters())
