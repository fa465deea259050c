"""RL-Games: the training of a central value network with steps that are replays of a CUDA graph on a GPU."""

# mypy: allow-untyped-calls

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from rl_triton_adapters._overrides import (
    find_override,
    find_property,
    find_replaced,
    is_written_in,
    list_called,
    read_plain,
)
from rl_triton_adapters.updates import CapturedUpdate, find_reason

METHODS = ("calc_gradients", "calc_loss", "_preproc_obs")
"""What a graph calls at its capture alone."""
CALLERS = ("train_net", "train_critic")
"""What calls a step, and what one stands in the place of."""
PACKAGES = ("rl_games", "torch")
"""Where functions are written that are no user's."""
INPUTS = ("entropy_coef", "e_clip", "critic_coef", "bounds_loss_coef")
"""Numbers that may be annealed: graphs keep others."""


class CentralValueUpdate(CapturedUpdate):
    """Steps in the place of those of an agent's `central_value_net`, whose `train_net` stays RL-Games' own."""

    def __init__(self) -> None:
        super().__init__(self.make_step)
        self.net: Any = None

    def prepare(self, net: Any, stock: str) -> None:
        """Find out how the steps of the moment are made.

        Args:
            net: The agent's `central_value_net`.
            stock: Why they are to be RL-Games' own; empty if nothing is known that stands against ours.
        """
        self.net = net
        stock = stock or find_reason({"its recurrent networks read from the device where episodes end": net.is_rnn})
        stock = stock or find_override(net, (*CALLERS, *METHODS), PACKAGES)
        replaced, settings = find_settings(net, [getattr(net, name) for name in METHODS if hasattr(net, name)])
        stock = stock or replaced
        self.find_step([net.model], [net.optimizer], stock=stock, is_averaged=net.multi_gpu)
        self.keep_settings(settings)

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


def find_settings(trainer: Any, methods: list[Any]) -> tuple[str, list[Any]]:
    """What these methods of RL-Games read of their object, and call, besides methods.

    Returns:
        Which of it is a user's, empty if nothing is, and what of it a graph keeps.
    """
    methods = [x for x in methods if is_written_in(PACKAGES, x)]
    called, plain = list_called(*methods, package="rl_games"), read_plain(trainer, *methods)
    settings = [called, {name: x for name, x in plain.items() if name not in (*INPUTS, "last_lr")}]
    return find_replaced(called, PACKAGES) or find_property(trainer, *methods), settings


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
