"""RL-Games: the training of a central value network with steps that are replays of a CUDA graph on a GPU."""

# mypy: allow-untyped-calls

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from rl_triton_adapters._overrides import find_override
from rl_triton_adapters.updates import CapturedUpdate, find_reason

METHODS = ("train_net", "train_critic", "calc_gradients", "calc_loss", "_preproc_obs")
"""What a step stands in the place of, what calls it, and what a graph calls at its capture alone."""
SETTINGS = ("e_clip", "clip_value", "truncate_grads", "grad_norm")
"""Attributes of the network's trainer that a step reads; where one changes, steps are captured again."""


class CapturedCentralValue:
    """Steps in the place of those of an agent's `central_value_net`, whose `train_net` stays RL-Games' own.

    Attributes:
        captured: The update that its steps are of.
    """

    def __init__(self) -> None:
        self.captured = CapturedUpdate(self._make_step)
        self._net: Any = None

    def find_step(self, net: Any, stock: str) -> None:
        """Find out how the steps of the moment are made.

        Args:
            net: The agent's `central_value_net`.
            stock: Why they are to be RL-Games' own; empty if nothing is known that stands against ours.
        """
        self._net = net
        stock = stock or find_reason({"its recurrent networks read from the device where episodes end": net.is_rnn})
        stock = stock or find_override(net, METHODS, ("rl_games",))
        self.captured.find_step([net.model], [net.optimizer], stock=stock, is_averaged=net.multi_gpu)

    @contextmanager
    def training(self) -> Iterator[None]:
        """Inside, `train_net` makes these steps, unless they are RL-Games' own."""
        if self.captured.step is None or self.captured.stock:
            yield
            return
        net = self._net
        net.train_critic = self._train_critic
        try:
            yield
        finally:
            del net.train_critic

    def _train_critic(self, batch: dict[str, Any]) -> Tensor:
        """Make a step with a minibatch; its loss, which the host would wait for, stays on the device."""
        net, step = self._net, self.captured.step
        assert step is not None
        net.train()
        self.captured.keep_settings([getattr(net, name, None) for name in SETTINGS])
        loss: Tensor = step(batch)
        return loss.double()  # RL-Games adds numbers

    def _make_step(self, batch: dict[str, Any]) -> Tensor:
        """One step; its loss."""
        with prepare_model(self._net, self.captured):
            loss: Tensor = self._net.calc_gradients(batch).detach()
        return loss


@contextmanager
def prepare_model(trainer: Any, captured: CapturedUpdate) -> Iterator[None]:
    """Inside, a model is as a graph can have it."""
    model = trainer.model
    trainer.model = getattr(model, "_orig_mod", model) if captured.is_captured else model  # graphs need no compiler
    try:
        yield
    finally:
        trainer.model = model
