"""Compiled gradient steps of DQN, SAC and TD3 against the same in PyTorch, in float64."""

import copy
import math
import re
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributions import Bernoulli, Categorical, Independent, Normal
from torch.nn.functional import huber_loss, mse_loss
from torch.optim import SGD, Adam, AdamW
from torch.optim.optimizer import register_optimizer_step_pre_hook

from rl_triton_core import compiled
from rl_triton_core.compiled import VALUE_STATISTICS, CompiledNetwork, CompiledValueUpdate, Transitions, draw_actions

FEATURES, ACTIONS, SIZE, STEPS = 3, 2, 150, 6  # a minibatch has more samples than a tile
CHOICES, QUANTILES, DROPPED = 4, 5, 2  # of values of actions
OPTIONS = {
    "dqn": {"huber_delta": 0.7, "max_grad_norm": 0.05},
    "squared": {"critic_coef": 2.0},
    "quantiles": {"huber_delta": 0.7, "tau": 0.3, "updates_targets": [False, True] * 3, "critic_coef": 1.5},
    "td3": {"critic_coef": 2.0, "tau": 0.3, "updates_actor": [False, True] * 3, "updates_targets": [False, True] * 3},
    "sac": {"tau": 0.1, "target_entropy": -2.0, "updates_targets": [True, False, False] * 2},
    "tqc": {"huber_delta": 0.7, "tau": 0.1, "target_entropy": -2.0, "updates_targets": [True] * 6, "critic_coef": 0.1},
    "fixed": {"entropy_coef": 0.3, "tau": 0.1, "updates_targets": [True] * 6, "max_grad_norm": 0.1, "huber_delta": 0.5},
}

WITH_ACTOR = ("td3", "sac", "tqc", "fixed")


def evaluate_errors(values, targets, delta):
    """Huber's losses of all pairs of a quantile and a target, weighted by the quantile's level."""
    errors, levels = targets[:, None] - values[..., None], (torch.arange(QUANTILES).double() + 0.5) / QUANTILES
    losses = huber_loss(errors, torch.zeros_like(errors), reduction="none", delta=delta)
    return losses * torch.where(errors < 0, 1 - levels[:, None], levels[:, None])


def make_network(inputs, outputs, *last):
    return nn.Sequential(nn.Linear(inputs, 8), nn.ReLU(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, outputs), *last)


class Agent(nn.Module):
    """Networks of a kind of agent, in float32 or float64."""

    def __init__(self, kind, make=Adam):
        super().__init__()
        self.kind, self.has_actor, self.learns_entropy = kind, kind in WITH_ACTOR, kind in ("sac", "tqc")
        inputs, count = (FEATURES + ACTIONS, 2) if self.has_actor else (FEATURES, 1)
        outputs = (1 if self.has_actor else CHOICES) * (QUANTILES if kind in ("quantiles", "tqc") else 1)
        self.critics = nn.ModuleList(make_network(inputs, outputs) for _ in range(count))
        self.targets = copy.deepcopy(self.critics)
        self.trunk = nn.Sequential(nn.Linear(FEATURES, 7), nn.ReLU()) if kind != "td3" else make_network(FEATURES, 7)
        self.means, self.log_stds = nn.Linear(7, ACTIONS), nn.Linear(7, ACTIONS)
        nn.init.constant_(self.log_stds.bias, -2.0)  # float32 has little of 1 - action² where actions saturate
        self.actor = [nn.Sequential(self.trunk, self.means, nn.Tanh() if kind == "td3" else nn.Identity())]
        self.actor += [] if kind == "td3" else [nn.Sequential(self.trunk, self.log_stds)]
        self.actor_target = copy.deepcopy(self.actor[0])
        self.log_coef = nn.Parameter(torch.tensor([-0.4]))
        self.optimizer = make(self.critics.parameters(), lr=1e-2)
        learned = [x for part in self.actor for x in part.parameters()]
        self.actor_optimizer = make(list(dict.fromkeys(learned)), lr=3e-3)
        self.coef_optimizer = make([self.log_coef], lr=1e-2)

    def compiled(self):
        own = {"actor": self.actor, "actor_optimizer": self.actor_optimizer} if self.has_actor else {}
        own |= {"actor_target": self.actor_target} if self.kind == "td3" else {}
        if self.learns_entropy:
            own |= {"log_entropy_coef": self.log_coef, "entropy_optimizer": self.coef_optimizer}
        counts = {"quantiles": QUANTILES, "dropped_quantiles": DROPPED if self.has_actor else 0}
        own |= counts if self.kind in ("quantiles", "tqc") else {}
        return CompiledValueUpdate(self.critics, self.targets, self.optimizer, **own)

    def act(self, observations, noise):
        if self.kind == "td3":
            return self.actor[0](observations), 0.0
        mean, log_std = (part(observations) for part in self.actor)
        policy = torch.distributions.Normal(mean, log_std.clamp(-20, 2).exp())
        drawn = mean + policy.scale * noise
        actions = drawn.tanh()
        return actions, (policy.log_prob(drawn) - (1 - actions**2 + 1e-6).log()).sum(1)

    def value(self, critics, observations, actions):
        inputs = torch.cat([observations, actions], 1) if self.has_actor else observations
        return [x(inputs) for x in critics]

    def step_slowly(self, optimizer, loss, bound):
        optimizer.zero_grad()
        loss.backward()
        if bound is not None:
            nn.utils.clip_grad_norm_([x for group in optimizer.param_groups for x in group["params"]], bound)
        optimizer.step()

    def evaluate_quantiles(self, batch, coef, delta):
        """The loss of QR-DQN: of each quantile the sum, of each target the mean."""
        rows, shape = torch.arange(SIZE), (SIZE, QUANTILES, CHOICES)
        with torch.no_grad():
            after = self.targets[0](batch.next_observations).view(shape)
            after = after[rows, :, after.mean(1).argmax(1)]
            targets = batch.rewards[:, None] + batch.discounts[:, None] * after
        current = self.critics[0](batch.observations).view(shape)[rows, :, batch.actions[:, 0].long()]
        return evaluate_errors(current, targets, delta).sum(1).mean()

    def evaluate_truncated(self, batch, coef, delta):
        """The loss of TQC, added up over quantiles: targets are the smallest quantiles of all critics."""
        with torch.no_grad():
            actions, log_probs = self.act(batch.next_observations, batch.next_noise)
            after = torch.cat(self.value(self.targets, batch.next_observations, actions), 1).sort()[0]
            after = after[:, : 2 * (QUANTILES - DROPPED)] - coef * log_probs[:, None]
            targets = batch.rewards[:, None] + batch.discounts[:, None] * after
        values = self.value(self.critics, batch.observations, batch.actions)
        return sum(evaluate_errors(x, targets, delta).mean(2).sum(1).mean() for x in values)

    def evaluate_critics(self, batch, coef, delta):
        with torch.no_grad():
            if self.kind == "td3":
                actions, log_probs = (self.actor_target(batch.next_observations) + batch.next_noise).clamp(-1, 1), 0.0
            else:
                actions, log_probs = self.act(batch.next_observations, batch.next_noise) if self.has_actor else (0, 0.0)
            values = self.value(self.targets, batch.next_observations, actions)
            best = torch.stack([x.max(1)[0] for x in values]).min(0)[0] - coef * log_probs
            targets = batch.rewards + batch.discounts * best
        chosen = torch.zeros(len(targets), 1, dtype=torch.int64) if self.has_actor else batch.actions.long()
        values = [x.gather(1, chosen)[:, 0] for x in self.value(self.critics, batch.observations, batch.actions)]
        return sum(mse_loss(x, targets) / 2 if delta is None else huber_loss(x, targets, delta=delta) for x in values)

    def learn_slowly(self, batch, learns=True, follows=False, **numbers):
        coef = self.log_coef.detach().exp() if self.learns_entropy else numbers.get("entropy_coef", 0.0)
        bound, tau, delta = numbers.get("max_grad_norm"), numbers.get("tau", 0), numbers.get("huber_delta")
        evaluate = {"quantiles": self.evaluate_quantiles, "tqc": self.evaluate_truncated}
        loss = evaluate.get(self.kind, self.evaluate_critics)(batch, coef, delta)
        critic_loss = numbers.get("critic_coef", 1.0) * loss
        self.step_slowly(self.optimizer, critic_loss, bound)
        statistics = [critic_loss.item(), math.nan, float(coef), math.nan]
        if self.has_actor and learns:
            actions, log_probs = self.act(batch.observations, batch.noise)
            values = torch.cat(self.value(self.critics, batch.observations, actions), 1)
            least = values[:, 0] if self.kind == "td3" else (values.mean(1) if self.kind == "tqc" else values.min(1)[0])
            loss = (coef * log_probs - least).mean()
            statistics[1] = loss.item()
            self.step_slowly(self.actor_optimizer, loss, bound)
            if self.learns_entropy:
                loss = -(self.log_coef * (log_probs + numbers["target_entropy"]).detach()).mean()
                statistics[3] = loss.item()
                self.step_slowly(self.coef_optimizer, loss, bound)
        pairs = [(self.critics, self.targets)] + [(self.actor[0], self.actor_target)] * (self.kind == "td3")
        with torch.no_grad():
            for x, y in (both for pair in pairs for both in zip(*(part.parameters() for part in pair), strict=True)):
                y.copy_((1 - tau) * y + tau * x if follows else y)
        return statistics


def make_transitions(kind, count=SIZE * STEPS):
    has_actor = kind in WITH_ACTOR
    actions = torch.rand(count, ACTIONS) * 2 - 1 if has_actor else torch.randint(4, (count, 1))
    noise, next_noise = torch.randn(2, count, ACTIONS)
    observations, after = torch.randn(2, count, FEATURES)
    rewards, discounts = torch.randn(count), torch.where(torch.rand(count) < 0.2, 0.0, 0.9)
    noises = noise if has_actor and kind != "td3" else None, next_noise if has_actor else None
    return Transitions(observations, actions, after, rewards, discounts, *noises)


def learn_both(kind, make=Adam, change=id, **options):
    torch.manual_seed(0)
    agent = Agent(kind, make)
    change(agent)
    exact, batches = copy.deepcopy(agent), make_transitions(kind)
    exact.double()
    options = OPTIONS[kind] | options
    results = agent.compiled().run(batches, SIZE, **options)
    each = {name: options.pop(f"updates_{name}", [name == "actor"] * STEPS) for name in ("actor", "targets")}
    expected = []
    for i in range(STEPS):
        rows = [None if x is None else x[i * SIZE : (i + 1) * SIZE] for x in batches]
        part = Transitions(*(None if x is None else x.double() for x in rows))
        expected.append(exact.learn_slowly(part, each["actor"][i], each["targets"][i], **options))
    return agent, exact, results, torch.tensor(expected, dtype=torch.float64)


@pytest.fixture(params=["one thread", "two threads"])
def threads(request, monkeypatch):
    """Each of two threads finds the gradients of half of each minibatch, or one does all in compiled code."""
    names, run, before = [], compiled.run_chunks, torch.get_num_threads()

    def run_and_count(work, lanes, number):
        started = threading.Barrier(2)

        def work_together(lane):
            started.wait(60)
            names.append(threading.current_thread().name)
            work(lane)

        run(work_together, lanes, number)

    monkeypatch.setattr(compiled, "SHARED_PRODUCTS", 0)
    monkeypatch.setattr(compiled, "run_chunks", run_and_count)
    torch.set_num_threads(1 if request.param == "one thread" else 2)
    yield
    torch.set_num_threads(before)
    others = sum(x.startswith("rl_triton_core") for x in names)
    assert len(names) == 2 * others and bool(names) == (request.param == "two threads")


@pytest.mark.parametrize("make", [Adam, AdamW, SGD])
@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.usefixtures("threads")
def test_gradient_steps(kind, make):
    agent, exact, results, expected = learn_both(kind, make)
    assert results.shape == (STEPS, len(VALUE_STATISTICS)) and not results[:, -1].any()
    torch.testing.assert_close(results[:, :-1], expected, rtol=1e-4, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(agent.double().state_dict(), exact.state_dict(), rtol=1e-4, atol=2e-5)


def test_quantiles_that_are_nan_are_the_largest():
    change = lambda x: x.targets[0][-1].bias.data[:1].fill_(math.nan)  # noqa: E731
    _, _, results, expected = learn_both("tqc", change=change, updates_targets=[False] * STEPS)
    torch.testing.assert_close(results[:, :-1], expected, rtol=1e-4, atol=1e-5)


def test_infinite_errors_of_quantiles_become_nan():
    """As by sb3-contrib's quantile loss."""
    agent, batches = Agent("tqc"), make_transitions("tqc")
    batches.rewards[0] = math.inf
    agent.compiled().run(batches, SIZE, huber_delta=1.0)
    assert agent.critics[0][0].weight.isnan().any()


def test_units_of_relu_that_are_off_learn_nothing_of_nan():
    """As in PyTorch, of whose gradients they get none."""

    def change(agent):
        agent.targets[0][-1].bias.data.fill_(math.nan)
        agent.critics[0][0].bias.data[0] = -9.0

    agent, exact, *_ = learn_both("squared", change=change)
    torch.testing.assert_close(agent.double().state_dict(), exact.state_dict(), rtol=1e-4, atol=1e-5, equal_nan=True)
    assert agent.critics[0][0].weight.isnan().any(1).tolist() == [False] + [True] * 7


def test_what_two_threads_run_is_compiled_beforehand(monkeypatch):
    """With minibatches that they share."""
    monkeypatch.setattr(compiled, "SHARED_PRODUCTS", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    asked, update = [], Agent("dqn").compiled()
    monkeypatch.setattr(compiled, "compile_entry", asked.append)
    for size, count in ((0, 1), (SIZE, 3)):
        asked.clear()
        assert update.compile(size) >= 0 and len(asked) == count


def test_threads_share_no_single_tile(monkeypatch):
    monkeypatch.setattr(compiled, "SHARED_PRODUCTS", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(compiled, "run_chunks", None)
    Agent("dqn").compiled().run(make_transitions("dqn"), 100)


def replace_states(optimizer):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


CHANGES = {
    "memory": lambda x: setattr(x.critics[0][0].weight, "data", x.critics[0][0].weight.data.clone()),
    "states": lambda x: replace_states(x.optimizer),
    "states of one number each, equal to the one before": lambda x: replace_states(x.coef_optimizer),
    "what is frozen": lambda x: x.critics[0][0].weight.requires_grad_(False),
    "decay": lambda x: x.optimizer.param_groups[0].update(weight_decay=0.5),
    "rate": lambda x: x.optimizer.param_groups[0].update(lr=0.03),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_between_runs_counts(change):
    """Of an update that was asked often enough to be known, as of a new one."""
    torch.manual_seed(0)
    kind = "sac" if "one number" in change else "dqn"
    agent, batches = Agent(kind), make_transitions(kind)
    update = agent.compiled()
    assert update.find_obstacle() == "" and not agent.optimizer.state, "asking makes none"
    for _ in range(4):
        update.run(batches, SIZE)
    CHANGES[change](agent)
    other = copy.deepcopy(agent)
    update.run(batches, SIZE)
    other.compiled().run(batches, SIZE)
    torch.testing.assert_close([*agent.parameters()], [*other.parameters()], rtol=0, atol=0)
    for name in ("optimizer", "coef_optimizer"):
        states = (getattr(x, name).state_dict()["state"] for x in (agent, other))
        torch.testing.assert_close(*states, rtol=0, atol=0)


def test_hooks_of_all_optimizers_are_seen_between_runs():
    agent, batches = Agent("dqn"), make_transitions("dqn")
    update = agent.compiled()
    for _ in range(4):
        update.run(batches, SIZE)
    handle = register_optimizer_step_pre_hook(lambda *_: None)
    try:
        with pytest.raises(ValueError, match="this CompiledValueUpdate is not compiled: .* has hooks"):
            update.run(batches, SIZE)
    finally:
        handle.remove()


@pytest.mark.parametrize("name", ["observations", "next_observations", "actions"])
@pytest.mark.usefixtures("threads")
def test_a_step_that_is_refused_changes_nothing(name):
    """The steps before it are made."""
    kind = "dqn" if name == "actions" else "sac"
    agent, batches = Agent(kind), make_transitions(kind)
    getattr(batches, name)[2 * SIZE + 140] = 4 if name == "actions" else math.nan
    other = copy.deepcopy(agent)
    results = agent.compiled().run(batches, SIZE, **OPTIONS[kind])
    first = Transitions(*(None if x is None else x[: 2 * SIZE] for x in batches))
    options = OPTIONS[kind] | ({"updates_targets": OPTIONS[kind]["updates_targets"][:2]} if kind == "sac" else {})
    other.compiled().run(first, SIZE, **options)
    assert results[:, -1].tolist() == [0, 0, 1]
    torch.testing.assert_close([*agent.parameters()], [*other.parameters()], rtol=0, atol=0)


@pytest.mark.parametrize("count", [1, 200])
def test_networks_act(count):
    network, features = make_network(FEATURES, 4), torch.randn(count, FEATURES)
    both = CompiledNetwork(network, network[:4])
    expected = torch.cat([network(features), network[:4](features)], 1).detach()
    for _ in range(3):
        torch.testing.assert_close(torch.from_numpy(both(features.numpy())), expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match=r"features: got shape .1, 2., expected .num_samples, 3."):
        both(features.numpy()[:1, :2])


HEADS = {
    "categorical": lambda x, _: [Categorical(logits=part) for part in x.split([3, 2], dim=1)],
    "gaussian": lambda x, log_std: [Independent(Normal(x, log_std.exp().expand(x.shape)), 1)],
    "bernoulli": lambda x, _: [Independent(Bernoulli(logits=x), 1)],
}


@pytest.mark.parametrize("count", [1, 7, 200])
@pytest.mark.parametrize("head", HEADS)
def test_actions_are_those_that_distributions_draw(head, count):
    """By the same numbers of the generator, which is left as they leave it; further outputs do not count."""
    outputs, log_std = 2 * torch.randn(count, 6), torch.tensor([0.3, -1.0, 0.7, 0.0, -0.4])
    parts = HEADS[head](outputs[:, :5], log_std)
    for seed in range(5):
        torch.manual_seed(seed)
        drawn = [x.sample() for x in parts]
        expected = torch.stack(drawn, dim=1) if head == "categorical" else drawn[0]
        state = torch.get_rng_state()
        torch.manual_seed(seed)
        sizes = [3, 2] if head == "categorical" else [5]
        actions, log_probs = draw_actions(outputs.numpy(), head, sizes, log_std if head == "gaussian" else None)
        assert torch.equal(torch.get_rng_state(), state)
        torch.testing.assert_close(actions, expected, rtol=1e-6, atol=1e-6)
        exact = HEADS[head](outputs[:, :5].double(), log_std)
        own = sum(x.log_prob(y.double()) for x, y in zip(exact, drawn, strict=True))
        torch.testing.assert_close(log_probs.double(), own, rtol=1e-5, atol=1e-4 if head == "gaussian" else 1e-6)


def test_where_nothing_is_allowed_log_probabilities_are_rounded_as_by_distributions():
    _, log_probs = draw_actions(np.full((4, 3), -1e8, np.float32), "categorical", [3])
    assert (
        log_probs.tolist() == [0.0] * 4 == Categorical(logits=torch.full((4, 3), -1e8)).log_prob(torch.ones(4)).tolist()
    )


@pytest.mark.parametrize(("sizes", "log_std"), [([2, 3], None), ([4], torch.zeros(4))])
def test_outputs_that_do_not_fit_are_refused(sizes, log_std):
    with pytest.raises(ValueError, match="sizes: got .*, expected those of 4 outputs"):
        draw_actions(np.zeros((2, 4), np.float32), "categorical", sizes, log_std)


WRONG = {
    "batch_size: got 7, expected a divisor of 900": {"batch_size": 7},
    "tau: got .*nan.*, expected finite": {"tau": math.nan},
    "expected 6 values": {"updates_actor": [True]},
    "next_noise: got None": {"next_noise": None},
    r"rewards: got shape .900, 1., expected .900,.": {"rewards": torch.zeros(SIZE * STEPS, 1)},
}


@pytest.mark.parametrize("message", WRONG)
def test_arguments_are_checked(message):
    options = dict(WRONG[message])
    fields = {name: options.pop(name) for name in list(options) if name in Transitions._fields}
    batches = make_transitions("sac")._replace(**fields)
    with pytest.raises(ValueError, match=message):
        Agent("sac").compiled().run(batches, options.pop("batch_size", SIZE), **options)


def test_networks_that_do_not_fit_are_refused():
    agent = Agent("td3")
    given = {"actor": agent.actor, "actor_optimizer": agent.actor_optimizer}
    with pytest.raises(ValueError, match="actor_optimizer: got NoneType, expected one just for what is learned"):
        CompiledValueUpdate(agent.critics, agent.targets, agent.optimizer, actor=agent.actor)
    update = CompiledValueUpdate(agent.critics, agent.targets, agent.optimizer, **given)
    assert update.find_obstacle() == "an actor that returns actions has a target, and no other has"
    other = [make_network(FEATURES, 1) for _ in range(2)]
    given["actor_target"] = agent.actor_target
    update = CompiledValueUpdate(agent.critics, other, agent.optimizer, **given)
    assert update.find_obstacle() == "targets are other networks than what they follow"
    optimizer = Adam([x for network in other for x in network.parameters()])
    update = CompiledValueUpdate(other, copy.deepcopy(other), optimizer, **given)
    assert update.find_obstacle() == "the networks take other features"
    one, given = Agent("dqn"), {"actor": agent.actor, "actor_optimizer": agent.actor_optimizer}
    given |= {"actor_target": agent.actor_target}
    for update in (
        CompiledValueUpdate(other, copy.deepcopy(other), optimizer),
        CompiledValueUpdate(one.critics, one.targets, one.optimizer, quantiles=3),
    ):
        assert re.match("critics return .*: without an actor, one returns . of each action", update.find_obstacle())
    update = CompiledValueUpdate(agent.critics, agent.targets, agent.optimizer, **given, quantiles=3)
    assert "the critics [1, 1]" in update.find_obstacle()
    with pytest.raises(ValueError, match="dropped_quantiles: got 3, expected an actor and less than 3"):
        CompiledValueUpdate(agent.critics, agent.targets, agent.optimizer, **given, quantiles=3, dropped_quantiles=3)
    with pytest.raises(ValueError, match="dropped_quantiles: got 1, expected an actor and less than 3"):
        CompiledValueUpdate(one.critics, one.targets, one.optimizer, quantiles=3, dropped_quantiles=1)
    with pytest.raises(ValueError, match="quantiles: got -1"):
        CompiledValueUpdate(one.critics, one.targets, one.optimizer, quantiles=-1)
