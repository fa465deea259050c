"""Stable-Baselines3: what on-policy and off-policy algorithms of ours have in common."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from numbers import Number
from types import MethodType, NoneType
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from stable_baselines3.common.base_class import BaseAlgorithm
from torch import nn
from torch.optim import Optimizer

from rl_triton_adapters.common.overrides import find_override, find_replaced, list_modules, list_stock
from rl_triton_adapters.common.switch import check_enabled, find_off_switch
from rl_triton_adapters.common.update import CapturedUpdate, describe_update
from rl_triton_core.capture import CapturedStep
from rl_triton_core.extending import warn

DEVICES = ("cpu", "cuda")
PACKAGES = ("stable_baselines3", "sb3_contrib")
HELD = (*PACKAGES, "torch.optim")
NUMBERS = (float, int, NoneType, Number)
REPLACED: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()
"""Of a policy, the functions that were last put in the place of its methods."""


class AcceleratedAlgorithm(BaseAlgorithm):
    """An algorithm whose gradient steps and acting are captured on a GPU, and compiled or eager elsewhere.

    Where `is_accelerated` is False, the stock algorithm's own methods run, and `describe` says why.
    """

    read_settings: ClassVar[tuple[str, ...]] = ()
    """The attributes of the algorithm that a step reads; where one changes, steps are captured again."""
    transient: ClassVar[tuple[str, ...]] = ("_update", "_acting", "_asked", "_modes", "acts_exactly")
    """Attributes of a model that no checkpoint has."""
    max_graphs: ClassVar[int] = 4
    """As of `CapturedStep`."""
    sde_devices: ClassVar[tuple[str, ...]] = ()
    """Where steps are ours if exploration is state-dependent. Acting is stock then: noise is drawn outside."""
    eager_devices: ClassVar[tuple[str, ...]] = DEVICES
    """Where steps that are neither captured nor compiled are ours; those of a subclass are so everywhere."""

    acts_exactly = False
    """Whether what the policy returns while it acts on a CPU is the stock algorithm's, bit for bit; else rounded."""
    _asked: tuple[Any, str, str] = (), "", ""
    _find_compiled: Any
    _find_own_steps: Any
    _modes: Any
    _forget_inputs: Any
    """Drop what the graphs of a step have read that is replaced."""
    _make_step: Any
    """Make one gradient step. Returns its statistics."""
    _compute_actions: Any
    """Act, as a captured step does."""

    def __init__(self, *args: Any, enabled: bool = True, **kwargs: Any) -> None:
        self.enabled = check_enabled(enabled)
        self._update = CapturedUpdate(self._make_step, max_graphs=self.max_graphs)
        self._acting: CapturedStep = None  # type: ignore[assignment]  # until it is found
        super().__init__(*args, **kwargs)

    def _excluded_save_params(self) -> list[str]:
        """What belongs to this process."""
        return [*super()._excluded_save_params(), *self.transient]

    def recapture(self) -> None:
        """Capture again what graphs repeat, also where that has failed: after a change that none of them can see."""
        self._update.recapture()

    @property
    def is_captured(self) -> bool:
        """Whether updates are captured, as far as is known."""
        return self._find_update().reason == ""

    @property
    def is_accelerated(self) -> bool:
        """Whether updates and acting are other than stock."""
        return not self._find_stock()

    def describe(self) -> str:
        """Say whether updates are compiled, captured, eager, or stock, and why."""
        stock, reason = self._find_stock(), self._update.step.reason
        if stock or not reason or self.device.type != "cpu":
            return describe_update(stock or reason, bool(stock))
        _, refusal = self._find_compiled()
        compiled = "updates are compiled" + ", acting is exact" * self.acts_exactly
        return f"{describe_update(reason, False)}; not compiled: {refusal}" if refusal else compiled

    def _find_stock(self, asks: bool = True) -> str:
        """Why the stock algorithm's methods run; empty if ours do. Without `asks`, what was not compiled is not yet."""
        step = self._find_update()
        if self._update.stock or not step.reason or self.device.type in self.eager_devices:
            return self._update.stock
        if asks or not self._asked[2]:
            refusal = self._find_compiled(asks)[1]
            self._asked = (*self._asked[:2], "" if refusal and self._find_own_steps() else refusal)
        return self._asked[2] and f"not compiled: {self._asked[2]}"

    def find_obstacle(self) -> str:
        """Why the stock algorithm's methods run, besides what `CapturedStep` says; empty if nothing asks for them."""
        device, settings = self.device.type, [(name, getattr(self, name)) for name in self.read_settings]
        others = [f"{name} is a {type(x).__name__}" for name, x in settings if not isinstance(x, NUMBERS)]
        reasons: tuple[Any, ...] = (
            not self.enabled and "switched off",
            device not in DEVICES and f"{device} is neither a CPU nor a GPU that is used as cuda",
            self.use_sde and device not in self.sde_devices and "use_sde: exploration is state-dependent",
        )
        reason: str = find_off_switch() or next(filter(None, (*reasons, *others)), "")
        own = reason or find_override(self, ["train"], PACKAGES, behind=AcceleratedAlgorithm)
        return own or find_override(type(self), self.read_settings, PACKAGES) or self._find_replaced()

    def _find_replaced(self) -> str:
        """Which function that the stock update can call was replaced; while it learns, as asked every 256 steps."""
        moment = self._find_moment()
        if self._asked[0] != moment:
            modules = list_modules(vars(self)["policy"]) if "policy" in vars(self) else []
            things = [self, *modules]  # and what they hold of the framework
            for x in things:
                parts = (y for y in getattr(x, "__dict__", {}).values() if list_stock(type(y), "__module__", HELD))
                things += [y for y in parts if all(y is not z for z in things)]
            self._asked = moment, find_replaced(list_stock(type(self), "train", PACKAGES), things, PACKAGES), ""
        return self._asked[1]

    def _find_moment(self) -> Any:
        """Equal as long as it is not asked again which functions were replaced: never before it learns."""
        return self.start_time, self.num_timesteps // 256 if self.num_timesteps else object()

    def _list_optimizers(self) -> list[Optimizer]:
        """The optimizers that a step calls."""
        return [self.policy.optimizer]

    def _list_modules(self) -> list[nn.Module]:
        """What a step learns or calls."""
        return [self.policy]

    def _list_actors(self) -> list[nn.Module]:
        """What acts: parts of the policy that are all that acting reads."""
        return [self.policy]

    def _list_settings(self) -> list[Any]:
        """What a step reads besides its inputs, as it is compared."""
        return [getattr(self, name) for name in self.read_settings]

    def _find_update(self) -> CapturedStep:
        """The step of the policy and optimizers as they are now; it says why it is not captured."""
        self.enabled = check_enabled(self.enabled)  # it may have been set since
        known, stock = self._update.step, self.find_obstacle()
        step = self._update.find_step(self._list_modules(), self._list_optimizers(), stock=stock)
        actors = self._list_actors()
        if step is not known or self._acting is None or self._acting.modules != actors:
            self._forget_inputs()
            enabled = False if stock or self.use_sde else None
            self._acting = CapturedStep(self._compute_actions, modules=actors, enabled=enabled)
            if stock and self.enabled and not find_off_switch() and self.device.type != "cpu":  # it takes much longer
                warn(f"{type(self).__name__} trains as the stock algorithm: {stock}", RuntimeWarning, stacklevel=3)
        return step


@contextmanager
def replace_methods(policy: Any, **functions: Callable[..., Any]) -> Iterator[None]:
    """Let a policy or the like call these functions, not its methods. Its copies and pickles have the methods alone."""
    outside = REPLACED.get(policy)
    ours = REPLACED[policy] = {**functions, "__getstate__": MethodType(list_state, policy)}  # equal to that of before
    before = {key: x for key, x in vars(policy).items() if key in ours}
    vars(policy).update(ours)
    try:
        yield
    finally:
        for key, x in ours.items():
            if vars(policy).get(key) is x:  # else somebody has put another in its place meanwhile
                vars(policy).pop(key)  # `torch.compile` wraps one whose attributes are deleted elsewhere
        vars(policy).update({key: x for key, x in before.items() if key not in vars(policy)})
        del REPLACED[policy]  # whose functions may hold it
        REPLACED.update({} if outside is None else {policy: outside})


def list_state(policy: Any) -> Any:
    """List what a copy or a pickle of a policy has, without the functions that `replace_methods` has put there."""
    own = getattr(type(policy), "__getstate__", None)  # every class has it from Python 3.11 on
    state = vars(policy) if own is None else own(policy)
    if not isinstance(state, dict):
        return state
    without = REPLACED[policy]
    return {name: x for name, x in state.items() if name not in without or without[name] is not x}
