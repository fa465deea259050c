"""skrl: agents that compute advantages with `rl_triton_core`; updates of most are captured on a GPU.

The class turns them on, or the runner, for configurations in YAML:

    agent = TritonPPO(models=models, memory=memory, cfg=cfg, ...)
    runner = TritonRunner(env, cfg)

An agent's update is skrl's own code, which finds our function where it looks for skrl's, or, for PPO, A2C, IPPO and
MAPPO, the same operations in a CUDA graph of a minibatch: nothing of skrl is patched.
"""

# mypy: allow-subclassing-any, allow-untyped-calls

import sys
from functools import cache, cached_property, wraps
from inspect import signature
from typing import Any

from torch import Tensor

from rl_triton_adapters.common.check import with_check
from rl_triton_adapters.common.overrides import CopiedMethodsMixin
from rl_triton_adapters.common.switch import find_off_switch
from rl_triton_adapters.common.update import Described
from rl_triton_adapters.common.versions import explain_version, explained_import
from rl_triton_core import compute_gae, normalize_advantages
from rl_triton_core.reach import copy_function

NEEDED = "2.1"  # up to 2.0, time_limit_bootstrap makes skrl count values after a time limit twice

with explained_import(__name__, "skrl", NEEDED):
    from skrl.agents.torch.a2c import A2C
    from skrl.agents.torch.ppo import PPO
    from skrl.multi_agents.torch import ippo, mappo
    from skrl.utils.runner.torch import Runner

    from rl_triton_adapters.skrl.step import A2CUpdate, AgentUpdates, PPOUpdate, capture_update

__all__ = [
    "TritonA2C",
    "TritonIPPO",
    "TritonMAPPO",
    "TritonPPO",
    "TritonRunner",
    "estimate_advantages",
    "make_triton_class",
]


def estimate_advantages(
    *,
    rewards: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    values: Tensor,
    last_values: Tensor,
    discount_factor: float = 0.99,
    lambda_coefficient: float = 0.95,
    time_limit_bootstrap: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute returns and normalised advantages, in the place of skrl's `compute_gae`.

    Arguments are skrl's, [num_steps, num_envs, 1] each, `last_values` [num_envs, 1], flags bool. With
    `time_limit_bootstrap`, γ·V of the state after a truncated step is in the rewards already, and the step ends the
    recurrence; without, it runs on there, as skrl's does.
    """
    done = terminated | truncated if time_limit_bootstrap else terminated
    rewards, values, done, last_values = (x.squeeze(-1) for x in (rewards, values, done, last_values))
    numbers: dict[str, Any] = {"gamma": discount_factor, "lambda_": lambda_coefficient, "time_dim": 0}
    advantages, returns = compute_gae(rewards, values, terminated=done, bootstrap_values=last_values, **numbers)
    return returns.unsqueeze(-1), normalize_advantages(advantages, out=advantages).unsqueeze(-1)


def replace_gae(update: Any) -> Any:
    """Copy the `update` of an agent of skrl so that it calls `estimate_advantages` where it called `compute_gae`.

    Raises:
        TypeError: The method is of a recurrent agent, or calls another `compute_gae` than skrl's.
        ImportError: The method calls no `compute_gae`, or one with other arguments: skrl has changed.
    """
    name = getattr(update, "__qualname__", "agent")
    stock = getattr(update, "__globals__", {}).get("compute_gae")
    if stock is None or "compute_gae" not in update.__code__.co_names:
        raise explain_version(f"skrl's {name} calls no compute_gae", "skrl", NEEDED)
    if not stock.__module__.startswith("skrl."):
        text = f"{name}: got one that calls the compute_gae of {stock.__module__}, expected one that calls skrl's"
        raise TypeError(text)
    parameters = set(signature(stock).parameters)
    if "next_values" in parameters and stock.__module__.endswith("_rnn"):
        raise TypeError(
            f"{name}: got a recurrent agent, expected one without memory: with time_limit_bootstrap, skrl's recurrent "
            "agents count the value after a time limit twice, in the reward and in the recurrence, which goes on there"
        )
    if parameters != set(signature(estimate_advantages).parameters):
        problem = f"skrl's {name} calls a compute_gae of {', '.join(sorted(parameters))}"
        raise explain_version(problem, "skrl", NEEDED)

    @wraps(estimate_advantages)
    def compute(**inputs: Any) -> tuple[Tensor, Tensor]:
        found = update.__globals__["compute_gae"]  # which somebody may have replaced since
        return (found if found is not stock or find_off_switch() else estimate_advantages)(**inputs)

    return copy_function(update, {"compute_gae": compute})


KINDS: dict[Any, Any] = {PPO: PPOUpdate, A2C: A2CUpdate, ippo.IPPO: AgentUpdates, mappo.MAPPO: AgentUpdates}
CAPTURED = {getattr(x, "update", None): kind for x, kind in KINDS.items()}  # updates of skrl


class MadeAgentMixin(CopiedMethodsMixin):
    """Lets an agent be pickled, as by skrl's `ParallelTrainer`, though no module has its class."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced, made_of = super().__reduce_ex__(protocol), vars(type(self)).get("_rl_triton_class")
        return (create_agent, (made_of,), *reduced[2:]) if made_of else reduced


def create_agent(agent_class: type) -> Any:
    """An agent of the class that is made of this one, without attributes yet."""
    return object.__new__(derive_class(agent_class))


@cache
def derive_class(agent_class: type) -> type:
    """As `make_triton_class`, of an agent that computes advantages."""
    update: Any = getattr(agent_class, "update", None)
    name = agent_class.__name__
    kind, replaced = CAPTURED.get(update), replace_gae(update)
    document = f"`{name}` of skrl with the advantages of `rl_triton_core`{' and a captured update' if kind else ''}."
    attributes = {"__doc__": document, "__module__": __name__, "_rl_triton_class": agent_class, "update": replaced}
    if kind is None:
        return type(f"Triton{name}", (agent_class, MadeAgentMixin), attributes)
    attributes |= {"_rl_triton": cached_property(kind), "_rl_triton_stock": staticmethod(update)}
    attributes["update"] = with_check(capture_update(replaced))
    return type(f"Triton{name}", (agent_class, MadeAgentMixin, Described), attributes)


def computes_advantages(component: Any) -> bool:
    """Whether this is the class of an agent that does."""
    update = getattr(component, "update", None)
    return isinstance(component, type) and hasattr(sys.modules.get(getattr(update, "__module__", "")), "compute_gae")


def make_triton_class(agent_class: type) -> type:
    """Derive from an agent's class, of PPO, A2C, RPO, TRPO, AMP, IPPO or MAPPO, one that computes advantages here.

    It has the same constructor, and the agent's name with "Triton" before it. It is the same one each time, also for
    what this function has made.

    Raises:
        TypeError: The class is recurrent, or no class of an agent that computes advantages.
        ImportError: skrl is of a version that is not known.
    """
    if "_rl_triton_class" in getattr(agent_class, "__dict__", ()):
        return agent_class
    if not computes_advantages(agent_class):
        raise TypeError(f"agent_class: got {agent_class}, expected an agent of skrl that computes advantages")
    return derive_class(agent_class)


TritonPPO = derive_class(PPO)
TritonA2C = derive_class(A2C)
TritonIPPO = derive_class(ippo.IPPO)
TritonMAPPO = derive_class(mappo.MAPPO)


class TritonRunner(Runner):
    """`Runner` of skrl whose agents compute advantages with `rl_triton_core`; configurations keep skrl's names.

    Agents that compute none, such as SAC, are skrl's own.
    """

    def _component(self, name: str) -> Any:
        component = super()._component(name)
        return make_triton_class(component) if computes_advantages(component) else component
