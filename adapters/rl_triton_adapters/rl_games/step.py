"""RL-Games: steps of agents and central value networks that are replays of CUDA graphs on a GPU."""

# mypy: allow-subclassing-any, allow-untyped-calls, disable-error-code="attr-defined, misc, call-arg"

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from rl_triton_adapters.common.check import with_check
from rl_triton_adapters.common.overrides import find_override, find_own, find_settings, list_modules, reach
from rl_triton_adapters.common.update import CapturedUpdate, DeferredChecks, find_reason
from rl_triton_core.capture import keep_buffers
from rl_triton_core.reach import is_written_in

PACKAGES = ("rl_games",)
INPUTS = ("entropy_coef", "e_clip", "critic_coef", "bounds_loss_coef")
"""Numbers that may be annealed: graphs keep others."""
CAPTURING_MODES = ("reduce-overhead", "max-autotune")
"""Modes in which `torch.compile` captures graphs of its own."""
RATE = 4
"""Where the learning rate is in what a step leaves."""


class CentralValueUpdate(CapturedUpdate):
    """Steps in the place of those of an agent's `central_value_net`, whose `train_net` stays RL-Games' own."""

    def __init__(self) -> None:
        super().__init__(self.make_step)
        self.net: Any = None

    def find(self, net: Any, stock: str) -> None:
        """Find out how the steps of an agent's `central_value_net` are made; `stock` says why as RL-Games does."""
        self.net = net
        stock = stock or find_reason({"its recurrent networks read from the device where episodes end": net.is_rnn})
        stock = stock or find_override(net, ["train_net"], PACKAGES)
        called = find_method(net, "train_critic")
        replaced, settings = find_settings(net, [called], PACKAGES, INPUTS)
        stock = stock or find_own([net], [called], PACKAGES, CentralValueUpdate.train_critic) or replaced
        self.find_step([net.model], [net.optimizer], stock=stock, is_averaged=net.multi_gpu)
        self.keep_settings([*settings, reach([called], [*list_modules(net.model), net.optimizer], PACKAGES)])

    @contextmanager
    def training(self) -> Iterator[None]:
        """Inside, `train_net` makes these steps, unless they are RL-Games' own."""
        if self.net is None or self.stock:
            yield
            return
        net = self.net
        net.train_critic = self.train_critic
        try:
            yield
        finally:
            del net.train_critic

    def train_critic(self, batch: dict[str, Any]) -> Tensor:
        """Make a step with a minibatch; its loss, which the host would wait for, stays on the device."""
        assert self.step is not None
        self.net.train()
        loss: Tensor = self.step(batch, self.net.e_clip)
        return loss.double()  # RL-Games adds numbers

    def make_step(self, batch: dict[str, Any], e_clip: Any) -> Tensor:
        """One step; its loss."""
        with replace_model(self.net, self.is_captured, {"e_clip": e_clip}):
            loss: Tensor = self.net.calc_gradients(batch).detach()
        return loss


def find_method(trainer: Any, name: str) -> Any:
    """RL-Games' own method of this name."""
    kinds = (x for x in type(trainer).__mro__ if x.__module__.startswith("rl_games."))
    return next(vars(x)[name] for x in kinds if name in vars(x))


@contextmanager
def replace_model(trainer: Any, is_captured: bool, numbers: dict[str, Any]) -> Iterator[None]:
    """Inside, a trainer has a model as a graph can have it, and these numbers."""
    model, kept = trainer.model, {name: getattr(trainer, name) for name in numbers}
    trainer.model = getattr(model, "_orig_mod", model) if is_captured else model  # graphs need no compiler
    try:
        vars(trainer).update(numbers)
        yield
    finally:
        vars(trainer).update(kept)
        trainer.model = model


class AgentUpdate(CapturedUpdate):
    """The steps of an agent, and of its central value network.

    Methods behind `kind`, our class, are RL-Games' or the user's.
    """

    def __init__(self, agent: Any, kind: Any) -> None:
        super().__init__(self.make_step)
        self.agent, self.kind, self.central_value = agent, kind, CentralValueUpdate()
        self.is_prepared, self.replaced = False, ""  # what RL-Games' methods call or read that is a user's
        self.checks: DeferredChecks | None = None
        self.refusals: list[Tensor] = []  # of each step of an epoch, whether a check has failed
        self.has_fused_kernel = getattr(agent, "use_fused_kernel", False)  # RL-Games 2's, which takes numbers

    def prepare(self) -> None:
        """Find out how the steps of the moment are made."""
        agent, compiled = self.agent, self.agent.config.get("torch_compile")
        modes = compiled if isinstance(compiled, dict) else {"mode": compiled}
        mode = modes.get("mode")
        if agent.has_central_value:
            self.central_value.find(agent.central_value_net, self.find_refusal(modes.get("critic_mode", mode)))
        called = find_method(agent, "calc_gradients")
        own = find_own([agent], [called], PACKAGES)
        self.replaced, settings = find_settings(agent, [called], PACKAGES, (*INPUTS, "last_lr"))
        reasons = {
            "use_diagnostics reads from the device in every minibatch": getattr(agent, "use_diagnostics", False),
            "zero_rnn_on_done reads from the device where episodes end": agent.is_rnn and agent.zero_rnn_on_done,
            "actor_loss_func is not RL-Games'": not is_written_in(PACKAGES, agent.actor_loss_func),
        }
        stock = self.find_refusal(mode) or find_reason(reasons) or own or self.replaced
        self.find_step([agent.model], [agent.optimizer], stock=stock, is_averaged=agent.multi_gpu)
        self.keep_settings(
            [agent.scaler, *settings, reach([called], [*list_modules(agent.model), agent.optimizer], PACKAGES)]
        )
        agent.use_fused_kernel = self.has_fused_kernel and bool(self.stock)

    def find_refusal(self, mode: Any) -> str:
        """Why steps are not captured with this mode of `torch.compile`; empty if they may be."""
        captures = f"torch_compile={mode} captures graphs of its own"
        return find_reason({"switched off": not self.agent.enabled, captures: mode in CAPTURING_MODES})

    def describe(self, whose: str = "those of RL-Games") -> str:
        """Say how the steps of the moment are made, and why."""
        updates = [super().describe(whose)] + [self.central_value.describe(whose)] * self.agent.has_central_value
        return "; of the central value network, ".join(updates)

    def recapture(self) -> None:
        """Forget the graphs, and why there are none."""
        super().recapture()
        self.central_value.recapture()

    def run_step(self, input_dict: dict[str, Any]) -> None:
        """Make a step with a minibatch, and leave what the agent's own does."""
        assert self.step is not None
        results = self.step(input_dict, {name: x for name, x in vars(self.agent).items() if name in INPUTS})
        copies = pytree.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, results)
        result, self.agent.aux_loss_dict, refusals = copies
        self.agent.train_result = (*result[:RATE], self.agent.last_lr, *result[RATE + 1 :])
        self.refusals += refusals

    def make_step(self, input_dict: dict[str, Any], numbers: dict[str, Any]) -> tuple[Any, Any, list[Tensor]]:
        """One step; what it leaves, and whether a distribution has refused its arguments, if there was a check."""
        agent, defers = self.agent, DeferredChecks() if self.is_captured else nullcontext()
        try:
            with replace_model(agent, self.is_captured, numbers), defers as self.checks:
                super(self.kind, agent).calc_gradients(input_dict)
                checks = self.checks
        finally:
            self.checks = None
        refusals = [checks.has_failed()] if checks is not None and checks.results else []
        return agent.train_result, agent.aux_loss_dict, refusals


class CapturedUpdateMixin:
    """Capture an agent's `calc_gradients`, and the steps of its central value network. Put it in front of an agent.

    What surrounds a step stays RL-Games' own: minibatches, schedules of the learning rate, which the host reads the
    divergence for. All methods here are some of RL-Games': an agent's own names stay free.
    """

    def __init__(self, base_name: str, params: dict[str, Any]) -> None:
        self.aux_loss_dict: dict[str, Any] = {}  # agents of RL-Games 1.6.1 have none
        super().__init__(base_name, params)
        self._rl_triton = AgentUpdate(self, CapturedUpdateMixin)
        self._rl_triton.prepare()
        if self.enabled:
            self._rl_triton.warn_of_stock(type(self).__name__, "the agent of RL-Games")
            self._rl_triton.central_value.warn_of_stock("the central value network", "that of RL-Games")

    def prepare_dataset(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare the minibatches of an update, as the agent does, and keep statistics where graphs read them."""
        update = self._rl_triton
        update.prepare()
        assert update.step is not None
        update.step.resume()  # if it was stopped in the epoch before
        update.is_prepared, update.refusals = False, []
        models = [self.model, self.central_value_net.model] if self.has_central_value else [self.model]
        with keep_buffers(models):
            return super().prepare_dataset(*args, **kwargs)

    def train_central_value(self, *args: Any, **kwargs: Any) -> Any:
        """Train the central value network, as the agent does."""
        with self._rl_triton.central_value.training():
            loss = super().train_central_value(*args, **kwargs)
        return loss.item() if isinstance(loss, Tensor) else loss

    @with_check
    def calc_gradients(self, *args: Any, **kwargs: Any) -> Any:
        """Make a step with a minibatch, as the agent does."""
        update = self._rl_triton
        if not update.is_prepared:  # again: what is called as an epoch begins may have changed something
            update.prepare()
            update.is_prepared = True
        if not update.is_captured:
            return super().calc_gradients(*args, **kwargs)
        return update.run_step(*args, **kwargs)

    def trancate_gradients_and_step(self, *args: Any, **kwargs: Any) -> Any:
        """Make a step of the optimizer, unless a distribution of this update has refused its arguments."""
        update = self._rl_triton
        if update.checks is not None and update.checks.results:
            assert update.step is not None
            update.step.stop_if(update.checks.has_failed())
        return super().trancate_gradients_and_step(*args, **kwargs)

    def train_epoch(self, *args: Any, **kwargs: Any) -> Any:
        """Play and update, as the agent does; a minibatch that a distribution has refused raises its error."""
        results = super().train_epoch(*args, **kwargs)
        refused = torch.stack(self._rl_triton.refusals).tolist() if self._rl_triton.refusals else []
        if any(refused):
            super().calc_gradients(self.dataset[refused.index(True) % len(self.dataset)])
        return results
