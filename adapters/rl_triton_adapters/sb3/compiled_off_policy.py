"""Stable-Baselines3: gradient steps and acting of off-policy algorithms on MLPs, in compiled code on the CPU."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.distributions import SquashedDiagGaussianDistribution
from stable_baselines3.common.type_aliases import ReplayBufferSamples
from torch import nn

from rl_triton_adapters.common.overrides import find_own, has_hooks, list_modules, list_stock, make_snapshot
from rl_triton_adapters.common.switch import find_off_switch
from rl_triton_adapters.sb3.base import PACKAGES
from rl_triton_adapters.sb3.compiled import is_flat
from rl_triton_adapters.sb3.minibatches import draw_samples
from rl_triton_core.compiled import CompiledNetwork, CompiledValueUpdate, Transitions

MOST_PRODUCTS = 2**25  # of a layer and a minibatch in a thread, times PyTorch's threads; from four on, calls decide


class Networks(NamedTuple):
    """What an algorithm's gradient step calls and learns; the first of the owners acts.

    With `_list_networks`, an algorithm has `_draw_noise`; `_list_numbers`, what a compiled update takes besides samples
    for parts as `_choose_parts` chooses them; `_name_statistics`, what is logged of a step with such; and
    `_choose_actions`, those for what the acting networks return, or None where the policy has to act.
    """

    owners: list[Any]
    """The modules that it calls."""
    critics: Sequence[Any]
    targets: Sequence[Any]
    actor: list[list[Any]]
    """Of each network of the actor the modules, one behind the other."""
    options: dict[str, Any]
    """As `CompiledValueUpdate` takes them."""

    def is_like(self, other: "Networks") -> bool:
        """Whether all of it is the same."""
        known, found = ([*x.options, *map(id, x.options.values())] for x in (self, other))
        return self[:4] == other[:4] and known == found


class Compiled(NamedTuple):
    """An algorithm's gradient steps and acting in compiled code."""

    networks: Networks
    update: CompiledValueUpdate
    acting: CompiledNetwork
    takes_rows: bool  # observations are the features
    acts: bool  # nothing else is in a policy's `predict`
    is_alone: bool = False  # nothing of a user's runs between gradient steps and the next rollout


def find_compiled(algorithm: Any, asks: bool = True) -> tuple[Compiled | None, str]:
    """The compiled gradient steps of an algorithm, and why there are none; those that are known ask before they run."""
    compiled = None if asks else find_known(algorithm)
    if compiled is not None:
        return compiled, ""
    networks, compiled, policy = algorithm._list_networks(), algorithm._compiled, algorithm.policy
    if networks is None:
        algorithm._compiled = None
        return None, f"{type(algorithm).__name__} has no compiled steps for its networks"
    is_same = compiled is not None and compiled.networks.is_like(networks)
    algorithm._compiled, reason = None, find_unknown(algorithm, networks)
    if not reason and not is_same:
        actor = [nn.Sequential(*parts) for parts in networks.actor]
        update = CompiledValueUpdate(networks.critics, networks.targets, actor=actor, **networks.options)
        takes_rows = isinstance(algorithm.observation_space, spaces.Box) and len(algorithm.observation_space.shape) == 1
        compiled = Compiled(networks, update, CompiledNetwork(*(actor or networks.critics)), takes_rows, False)
        asks = True
    reason = reason or (compiled.update.find_obstacle() if asks else "")
    if not reason:
        modules = [policy, *list_called(networks.owners)]
        own = find_own(modules, list_stock(type(policy), "predict", PACKAGES), PACKAGES)
        others = [algorithm, vars(algorithm).get("_logger")]
        is_alone = not find_own(others, list_stock(type(algorithm), "learn", PACKAGES), PACKAGES)
        algorithm._compiled = compiled._replace(acts=compiled.takes_rows and not own, is_alone=is_alone)
        snapshot = make_snapshot([algorithm, *modules], PACKAGES)
        algorithm._modes.found[policy.training] = modules, list_facts(algorithm, modules), snapshot
    return algorithm._compiled, reason


def find_known(algorithm: Any) -> Compiled | None:
    """The compiled steps of an algorithm that were found, as long as nothing changes by which stock ones would run."""
    compiled, update, found = algorithm._compiled, algorithm._update, algorithm._modes.found
    known = None if compiled is None or update.step is None or update.stock else found.get(algorithm.policy.training)
    if known is None or list_facts(algorithm, known[0]) != known[1] or not known[2].holds():
        return None
    networks = algorithm._list_networks()
    return compiled if networks is not None and compiled.networks.is_like(networks) else None


def list_facts(algorithm: Any, modules: list[Any]) -> list[Any]:
    """What counts of an algorithm, whose attributes may be in the place of methods, and of the classes of modules."""
    own = [algorithm.policy, algorithm.observation_space, algorithm.device, vars(algorithm).get("_logger")]
    own += algorithm.enabled, algorithm.use_sde, find_off_switch(), algorithm._find_moment()
    settings = [type(getattr(algorithm, name)) for name in algorithm.read_settings]
    return [*own, *settings, *map(type, (algorithm, *modules)), *vars(algorithm)]


def find_unknown(algorithm: Any, networks: Networks) -> str:
    """Why an algorithm's steps are not those of MLPs on flat observations; empty if they are."""
    things = list_called(networks.owners)
    for owner in networks.owners:
        kind, extractor = type(owner), owner.features_extractor
        if kind.__module__.split(".")[0] not in PACKAGES or not is_flat(extractor):
            return f"{kind.__name__} is another module, or has a {type(extractor).__name__} for features"
    if any(map(has_hooks, things)):
        return "a module has hooks"
    space, distribution = algorithm.observation_space, getattr(networks.owners[0], "action_dist", None)
    if isinstance(space, spaces.Dict):
        return "observations are a Dict"
    if type(distribution) not in (type(None), SquashedDiagGaussianDistribution):
        return f"actions have a {type(distribution).__name__}"
    size, threads = algorithm.batch_size, torch.get_num_threads()
    weights = max(x.numel() for x in algorithm.policy.parameters())
    ours = CompiledValueUpdate.count_threads(sum(x.numel() for y in networks.critics for x in y.parameters()), size)
    if weights * size * min(threads, 4) // ours > MOST_PRODUCTS:
        return f"with {threads} threads, PyTorch is faster: a layer has {weights} weights, minibatches are of {size}"
    own = find_own(things, list_stock(type(algorithm), "train", PACKAGES), PACKAGES)
    return own or find_own_steps(algorithm)


def find_own_steps(algorithm: Any) -> str:
    """What of our gradient steps an algorithm has replaced."""
    ours = list_stock(type(algorithm), "_make_step", ("rl_triton_adapters",))
    return find_own([algorithm], ours, ("rl_triton_adapters", *PACKAGES))


def list_called(owners: list[Any]) -> list[Any]:
    """Modules of an algorithm with what extracts their features, besides the networks that are compiled."""
    return [y for x in owners for y in (x, *list_modules(x.features_extractor))]


def make_transitions(algorithm: Any, compiled: Compiled, drawn: ReplayBufferSamples) -> Transitions:
    """What the networks take of samples, which are arrays."""
    owner, observed = compiled.networks.owners[0], [drawn.observations, drawn.next_observations]
    if not compiled.takes_rows:
        with torch.no_grad():
            observed = [owner.extract_features(torch.from_numpy(x), owner.features_extractor) for x in observed]
    ends = (1 - drawn.dones) * (algorithm.gamma if drawn.discounts is None else drawn.discounts)
    return Transitions(observed[0], drawn.actions, observed[1], drawn.rewards.ravel(), ends.ravel())


def run_compiled(algorithm: Any, compiled: Compiled, count: int, size: int) -> dict[str, list[float]]:
    """Make so many gradient steps; what is logged of them, by its name."""
    history: dict[str, list[float]] = {}
    before, index = algorithm._n_updates, 0
    algorithm._n_updates += algorithm.counts_each
    for drawn, part in draw_samples(algorithm, count, size):
        choices, size = [], len(drawn.rewards) // part  # of which a buffer may give more than it is asked for
        for _ in range(part):
            choices.append(algorithm._choose_parts(index))
            index += 1
            algorithm._n_updates += algorithm.counts_each if index < count else 0
        random, width = torch.get_rng_state() if compiled.networks.actor else None, drawn.actions.shape[1]
        noise = algorithm._draw_noise(part, size, width)
        samples = make_transitions(algorithm, compiled, drawn)._replace(**noise)
        try:
            rows = compiled.update.run(samples, size, **algorithm._list_numbers(choices)).tolist()
        except ValueError:  # something has changed, by which it is not compiled
            rows, algorithm._compiled = [], None
        made = [row for row in rows if not row[-1]]
        found = [algorithm._name_statistics(row, *parts) for row, parts in zip(made, choices, strict=False)]
        if len(made) < part:  # the stock step says why
            if random is not None:
                torch.set_rng_state(random)
            algorithm._draw_noise(len(made), size, width)
        for i in range(len(made), part):
            parts: Any = (None if x is None else torch.from_numpy(x[i * size : (i + 1) * size]) for x in drawn)
            row = algorithm._make_step(ReplayBufferSamples(*parts), *choices[i]).tolist()
            found.append(dict(zip(algorithm._names[choices[i]], row, strict=False)))
        for statistics in found:
            for name, x in statistics.items():
                history.setdefault(name, []).append(x)
    algorithm._n_updates = before + count
    return history


def predict(
    algorithm: Any, observation: Any, state: Any = None, starts: Any = None, deterministic: bool = False
) -> tuple[Any, Any]:
    """Return what the policy's `predict` does."""
    policy, actions = algorithm.policy, None
    if type(observation) is np.ndarray and observation.shape == (len(observation), *algorithm.observation_space.shape):
        with suppress(ValueError):  # something has changed meanwhile
            actions = algorithm._choose_actions(algorithm._compiled.acting(observation), deterministic)
    stock: Any = type(policy).predict
    return stock(policy, observation, state, starts, deterministic) if actions is None else (actions, state)
