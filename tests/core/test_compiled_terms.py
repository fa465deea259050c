"""Compiled updates with the terms of RLlib's PPO against PyTorch: divergence, bounded errors, clips of gradients."""

import math
from functools import partial

import pytest
import torch
from test_compiled_update import HEADS, NUM_FEATURES, NUM_SAMPLES, make_rollout
from torch import nn
from torch.distributions import Bernoulli, Categorical, Normal, kl_divergence
from torch.optim import SGD, Adam

from rl_triton_core.compiled import STATISTICS, CompiledUpdate

BOUND = 0.1  # of log-deviations: some lie behind it
NVEC = [2, 3]
NUMBERS = {"clip": 0.2, "value_clip": 0.9, "value_coef": 0.7, "entropy_coef": 0.02, "kl_coef": 0.4}


class Agent(nn.Module):
    """An actor and a critic on one trunk; log-deviations are parameters, or the actor returns them."""

    def __init__(self, head, is_wide):
        super().__init__()
        self.head, self.is_wide = head, is_wide
        self.trunk, width = nn.Sequential(nn.Linear(NUM_FEATURES, 6), nn.Tanh()), HEADS[head]
        self.actor = nn.Linear(6, 2 * width if is_wide else width)
        self.critic = nn.Linear(6, 1)
        has_own = head == "gaussian" and not is_wide
        self.log_std = nn.Parameter(torch.tensor([0.5, -0.01])) if has_own else None

    def compiled(self, optimizer):
        networks = nn.Sequential(self.trunk, self.actor), nn.Sequential(self.trunk, self.critic)
        kind = {"head": self.head, "nvec": NVEC if self.head == "categorical" else None, "log_std": self.log_std}
        kind |= {"log_std_bound": BOUND, "value_clip_mode": "rllib", "has_kl": True}
        return CompiledUpdate(*networks, optimizer, **kind)

    def list_policies(self, x):
        if self.head == "categorical":
            return [Categorical(logits=y) for y in x.split(NVEC, 1)]
        if self.head == "bernoulli":
            return [Bernoulli(logits=x)]
        mean, log_std = x.chunk(2, 1) if x.shape[1] == 2 * HEADS["gaussian"] else (x, self.log_std)
        return [Normal(mean, log_std.clamp(-BOUND, BOUND).exp().expand_as(mean))]

    def compute_loss(self, part, bound=NUMBERS["value_clip"]):
        hidden = self.trunk(part.features)
        policies, values = self.list_policies(self.actor(hidden)), self.critic(hidden).flatten()
        old = self.list_policies(part.old_outputs)
        actions = part.actions.unbind(1) if self.head == "categorical" else [part.actions]
        log_probs = sum(sum_rows(x.log_prob(y)) for x, y in zip(policies, actions, strict=True))
        ratio = (log_probs - part.old_log_probs).exp()
        clipped = ratio.clamp(1 - NUMBERS["clip"], 1 + NUMBERS["clip"])
        kl = sum(sum_rows(kl_divergence(x, y)) for x, y in zip(old, policies, strict=True)).mean()
        errors = (values - part.returns).square().clamp(max=bound)
        entropy = sum(sum_rows(x.entropy()) for x in policies).mean()
        loss = -torch.min(part.advantages * ratio, part.advantages * clipped).mean() + NUMBERS["kl_coef"] * kl
        return loss + NUMBERS["value_coef"] * errors.mean() - NUMBERS["entropy_coef"] * entropy, kl


def sum_rows(x):
    return x.sum(1) if x.ndim > 1 else x


CLIPS = {"global_norm": nn.utils.clip_grad_norm_, "value": nn.utils.clip_grad_value_}
CLIPS["norm"] = lambda parameters, most: [nn.utils.clip_grad_norm_([x], most) for x in parameters]


def make_terms(head, is_wide):
    torch.manual_seed(0)
    rollout = make_rollout(head, NVEC if head == "categorical" else None)
    old = torch.randn(NUM_SAMPLES, HEADS[head] * (2 if head == "gaussian" else 1))
    if head == "gaussian":
        old[:, HEADS[head] :] *= BOUND / 4
    return Agent(head, is_wide), rollout._replace(old_outputs=old)


@pytest.mark.parametrize(
    ("head", "is_wide", "mode"),
    [("categorical", False, "global_norm"), ("bernoulli", False, "value")]
    + [("gaussian", is_wide, mode) for is_wide, mode in ((False, "norm"), (True, "global_norm"), (True, "norm"))],
)
def test_terms_and_clips_are_those_of_pytorch(head, is_wide, mode):
    """Minibatches have sizes of their own, and samples come more than once."""
    (compiled, rollout), (plain, _) = make_terms(head, is_wide), make_terms(head, is_wide)
    optimizers = [Adam(x.parameters(), lr=1e-2) for x in (compiled, plain)]
    minibatches = [torch.randint(NUM_SAMPLES, (size,)) for size in (20, 3, 1, 40) * 5]
    (epoch,) = compiled.compiled(optimizers[0]).run(
        rollout, [minibatches], max_grad_norm=0.05, grad_clip_mode=mode, **NUMBERS
    )
    seen = {name: [] for name in ("loss", "kl", "grad_norm")}
    for indices in minibatches:
        part = type(rollout)(*(None if x is None else x[indices] for x in rollout))
        loss, kl = plain.compute_loss(part)
        optimizers[1].zero_grad()
        loss.backward()
        norm = nn.utils.get_total_norm([x.grad for x in plain.parameters()])
        CLIPS[mode]([*plain.parameters()], 0.05)
        optimizers[1].step()
        for name, x in zip(seen, (loss, kl, norm), strict=True):
            seen[name].append(x.item())
    for name, want in seen.items():
        got = epoch[:, STATISTICS.index(name)]
        torch.testing.assert_close(got, torch.tensor(want).double(), rtol=2e-3, atol=2e-5, msg=lambda x, n=name: n + x)
    torch.testing.assert_close([*compiled.parameters()], [*plain.parameters()], rtol=2e-3, atol=2e-5)


@pytest.mark.parametrize(("field", "name"), [("returns", "value_coef"), ("old_outputs", "kl_coef")])
def test_a_term_with_the_coefficient_0_does_not_enter_the_loss(field, name):
    """Be it infinite, or NaN."""
    results = []
    for number in (None, math.inf):
        agent, rollout = make_terms("categorical", False)
        if number is not None:
            getattr(rollout, field)[:3] = number
        run = agent.compiled(SGD(agent.parameters(), lr=0.1)).run
        (epoch,) = run(rollout, [[torch.arange(20)] * 2], **NUMBERS | {name: 0.0, "value_clip": math.inf})
        results.append([epoch[:, STATISTICS.index("loss")], *agent.parameters()])
    torch.testing.assert_close(*results[::-1], rtol=0, atol=0)


@pytest.mark.parametrize("mode", CLIPS)
@pytest.mark.parametrize("field", ["advantages", "returns"])
def test_gradients_that_are_not_finite_are_replaced(field, mode):
    """An advantage that is NaN reaches actor and trunk, an infinite return critic and trunk."""
    numbers = {**NUMBERS, "value_clip": None}
    (compiled, rollout), (plain, _) = make_terms("bernoulli", False), make_terms("bernoulli", False)
    getattr(rollout, field)[7] = math.nan if field == "advantages" else math.inf
    optimizers = [SGD(x.parameters(), lr=1.0) for x in (compiled, plain)]
    options = {"max_grad_norm": 0.5, "grad_clip_mode": mode, "replace_nan": True}
    (epoch,) = compiled.compiled(optimizers[0]).run(rollout, [torch.arange(NUM_SAMPLES)], 50, **options, **numbers)
    assert not epoch[0, STATISTICS.index("grad_norm")].isfinite() and epoch[0, -1] == 0
    plain.compute_loss(rollout, math.inf)[0].backward()
    gradients = [x.grad for x in plain.parameters()]
    norms = [x.norm().nan_to_num(posinf=1e9) for x in gradients]
    total = torch.stack(norms).norm()
    for x, norm in zip(gradients, norms, strict=True):
        if mode == "value":
            x.clamp_(-0.5, 0.5)
        else:
            x.mul_((0.5 / (total if mode == "global_norm" else norm)).clamp(max=1))
        x.nan_to_num_()
    optimizers[1].step()
    torch.testing.assert_close([*compiled.parameters()], [*plain.parameters()], rtol=2e-3, atol=2e-5)


def test_what_is_asked_for_is_checked():
    agent, rollout = make_terms("categorical", False)
    run = partial(agent.compiled(Adam(agent.parameters())).run, orders=[torch.arange(NUM_SAMPLES)], clip=0.2)
    for message, arguments in {
        r"old_outputs: got None": {"rollout": rollout._replace(old_outputs=None), "minibatch_size": 10},
        r"old_outputs: got shape \(50, 4\)": {"rollout": rollout._replace(old_outputs=torch.zeros(50, 4))},
        "minibatch_size: got 0": {"rollout": rollout},
        "minibatch_size: got 2.5, expected an int": {"rollout": rollout, "minibatch_size": 2.5},
        "grad_clip_mode: got 'all', expected one of": {"rollout": rollout, "grad_clip_mode": "all"},
    }.items():
        with pytest.raises((TypeError, ValueError), match=message):
            run(**arguments)
    with pytest.raises(ValueError, match="value_clip_mode: got 'none', expected one of"):
        CompiledUpdate(agent.actor, agent.critic, None, head="categorical", value_clip_mode="none")
