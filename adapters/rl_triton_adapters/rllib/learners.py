"""The learners: RLlib's, whose methods leave advantages, V-Trace and updates to ours."""

# mypy: allow-subclassing-any

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, ClassVar

from ray.rllib.algorithms.appo.torch.appo_torch_learner import APPOTorchLearner
from ray.rllib.algorithms.impala.torch.impala_torch_learner import IMPALATorchLearner
from ray.rllib.algorithms.impala.torch.vtrace_torch_v2 import vtrace_torch
from ray.rllib.algorithms.ppo.torch.ppo_torch_learner import PPOTorchLearner
from ray.rllib.connectors.learner import GeneralAdvantageEstimation
from ray.rllib.core import COMPONENT_METRICS_LOGGER
from ray.rllib.core.learner.learner import Learner
from ray.rllib.core.learner.torch.torch_learner import TorchLearner
from ray.rllib.utils.metrics import ALL_MODULES
from ray.rllib.utils.torch_utils import clip_gradients
from torch import Tensor

from rl_triton_adapters.common.overrides import find_override
from rl_triton_adapters.rllib.check import check_ray, read_flags
from rl_triton_adapters.rllib.gae import TritonGeneralAdvantageEstimation as Ours
from rl_triton_adapters.rllib.gae import find_own_estimator
from rl_triton_adapters.rllib.loss import FusedLoss
from rl_triton_adapters.rllib.update import Update, clip_gradients_at_once, find_own_of, find_replaced_of, logger
from rl_triton_adapters.rllib.v_trace import replace_vtrace, vtrace
from rl_triton_core import check_backend
from rl_triton_core.capture import hold_captures, use_capture_stream

METRIC = ALL_MODULES, "rl_triton"
"""1 in the results of an update if all learners computed advantages or V-Trace with ours."""


def hold_captures_in(name: str) -> Callable[..., Any]:
    """A method of `TritonLearner` that is that of the learner behind it, while no step is captured.

    A capture makes steps and takes them back, and other threads than the learner's read and set its state.
    """

    @wraps(getattr(TorchLearner, name))
    def call_method(self: Any, *args: Any, **kwargs: Any) -> Any:
        with hold_captures():
            return getattr(super(TritonLearner, self), name)(*args, **kwargs)

    return call_method


class TritonLearner(TorchLearner):
    """What our learners have in common: put it in front of one of RLlib's.

    Attributes:
        triton_update: Makes the steps of an update.
        uses_triton: Whether it computes with `rl_triton_core` what is not its own: it is switched on, and was built.
    """

    has_varying_batches: ClassVar[bool] = False
    """Whether batches have as many slots as their episodes make them, so that each learner has shapes of its own."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._flags = flags = read_flags(self.config.learner_config_dict)
        self.uses_triton = self._is_described = self._used_estimator = False
        is_wanted = flags.rl_triton and flags.rl_triton_update
        loss = FusedLoss(self, flags.rl_triton_backend) if is_wanted and isinstance(self, PPOTorchLearner) else None
        self.triton_update = Update(self, is_wanted, loss)

    def build(self) -> None:
        """Build the learner, and compile its updates on a CPU.

        Raises:
            RuntimeError: The installed Ray is not one that `check_ray` accepts.
            BackendUnavailableError: The backend asked for cannot run on the learner's device.
        """
        if self._flags.rl_triton:
            check_ray()
        super().build()
        if self._flags.rl_triton:  # an error in a loss ends IMPALA's learner thread, and the algorithm waits for it
            check_backend(self._flags.rl_triton_backend, self._device)
            self.uses_triton = True
            updates = self.triton_update.find_compiled()[0] if self._device.type == "cpu" else {}
            if (seconds := sum(update.compile() for update in updates.values())) > 1:
                logger.warning("Compiled the updates in %.1f s; other processes load them from disk", seconds)

    def describe(self) -> str:
        """What this learner, which is built, computes with, in words."""
        what = f"{self.config.learner_class.__name__} computes {self._describe_estimator()}, on {self._device}"
        return f"{what}; {self.triton_update.describe()}"

    def recapture(self) -> None:
        """Capture the next updates again, also where that has failed: after a change that no graph can see."""
        self.triton_update.captured.recapture()

    def log_description(self) -> None:
        """Log it, once."""
        if not self._is_described:
            logger.info("%s", self.describe())
            self._is_described = True

    @property
    def _stock_loss(self) -> Any:
        """The loss behind ours."""
        return super().compute_loss_for_module

    def _find_own_loss(self) -> str:
        """Whether the loss behind ours is somebody's own, and where; else nothing."""
        return find_override(self, ["compute_loss_for_module"], ("ray.rllib.algorithms",), behind=TritonLearner)

    def _name_backend(self) -> str:
        return f"rl_triton_core, backend {self._flags.rl_triton_backend or 'that of the device'}"

    # -- methods of RLlib's learner ------------------------------------------------------------------------------------

    def compute_loss_for_module(self, *, module_id: str, **kwargs: Any) -> Tensor:
        """The loss of one module, with arguments and numbers of RLlib's."""
        fused = self.triton_update.loss
        compute = self._stock_loss if fused is None or fused.find_head(module_id) is None else fused.compute
        return compute(module_id=module_id, **kwargs)

    def _create_iterator_if_necessary(self, **kwargs: Any) -> Any:
        iterator = super()._create_iterator_if_necessary(**kwargs)
        self.log_description()  # not in `build`, since a class in front of this one may still change the pipeline
        yield from self.triton_update.iterate(iterator, super()._update)
        self.metrics.log_value(METRIC, float(self._used_estimator), window=1)

    def _update(self, batch: dict[str, Any]) -> Any:
        with self.triton_update.putting_back():
            return self.triton_update.make_step(batch, super()._update)

    def _get_clip_function(self) -> Any:
        clip, is_ours = super()._get_clip_function(), self.triton_update.is_wanted and not self.triton_update.replaced
        return clip_gradients_at_once if is_ours and clip is clip_gradients else clip

    def _use_capture_stream(self) -> AbstractContextManager[None]:
        """Where the modules of several learners are made, so that their gradients can be averaged in a graph."""
        is_averaged = self.config.num_learners > 1 and not self.has_varying_batches
        return use_capture_stream(self._device if self.triton_update.is_wanted and is_averaged else "cpu")

    def _make_modules_ddp_if_necessary(self) -> None:
        with self._use_capture_stream():
            super()._make_modules_ddp_if_necessary()

    def add_module(self, **kwargs: Any) -> Any:
        """Add a module, with arguments and results of RLlib's, whose gradients can be averaged in a graph."""
        with self._use_capture_stream():  # which holds captures
            return super().add_module(**kwargs)

    def get_state(self, *args: Any, **kwargs: Any) -> Any:
        """The learner's state, with arguments of RLlib's, without our metric: who takes it may be RLlib's learner."""
        with hold_captures():
            state = super().get_state(*args, **kwargs)
        state.get(COMPONENT_METRICS_LOGGER, {"stats": {}})["stats"].pop("--".join(METRIC), None)
        return state

    remove_module, set_state = hold_captures_in("remove_module"), hold_captures_in("set_state")
    save_to_path, restore_from_path = hold_captures_in("save_to_path"), hold_captures_in("restore_from_path")


class TritonPPOTorchLearner(TritonLearner, PPOTorchLearner):
    """`PPOTorchLearner` with our advantages in the place of RLlib's, and with updates that cost less.

    Its pipeline is RLlib's, and may be changed like RLlib's: a `GeneralAdvantageEstimation` that is in it is replaced
    while the pipeline runs. Derive from it to have a learner of your own. Its flags are entries of
    `learner_config_dict`, see `enable_triton`.
    """

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """RLlib's update."""
        with self.triton_update.putting_back():
            return super().update(*args, **kwargs)

    def find_estimator(self) -> Any:
        """The piece of the pipeline that has the last word on advantages; None if none is known."""
        pieces = [x for x in self._list_pieces() if isinstance(x, GeneralAdvantageEstimation)]
        return self._choose_piece(pieces[-1]) if pieces else None

    def _list_pieces(self) -> list[Any]:
        return [] if self._learner_connector is None else self._learner_connector.connectors

    def _choose_piece(self, piece: Any) -> Any:
        """Ours in the place of one that is RLlib's, any other as it is: a class derived from it is the user's."""
        if not self.uses_triton or type(piece) is not GeneralAdvantageEstimation or find_own_estimator():
            return piece
        masked, backend = self._flags.rl_triton_masked_statistics, self._flags.rl_triton_backend
        return Ours(gamma=piece.gamma, lambda_=piece.lambda_, masked_statistics=masked, backend=backend)

    def _describe_estimator(self) -> str:
        piece = self.find_estimator()
        if piece is None:
            return "advantages without GeneralAdvantageEstimation"
        is_stock, own = type(piece) is GeneralAdvantageEstimation, find_own_estimator()
        who = "RLlib" + f", where {own}" * bool(own) if is_stock else type(piece).__name__
        return f"advantages with {self._name_backend() if isinstance(piece, Ours) else who}"

    def _make_batch_if_necessary(self, training_data: Any) -> Any:
        """Run the pipeline with our piece where RLlib's stands, if there are episodes."""
        self._used_estimator = training_data.episodes is not None and isinstance(self.find_estimator(), Ours)
        pieces = self._list_pieces()
        chosen = [*map(self._choose_piece, pieces)]
        replaced = dict(zip(map(id, chosen), pieces, strict=True))
        pieces[:] = chosen
        try:
            return super()._make_batch_if_necessary(training_data=training_data)
        finally:  # other changes stay
            pieces[:] = [replaced.get(id(x), x) for x in pieces]


class TritonVTraceLearner(TritonLearner):
    """The loss of the learner behind it, with our V-Trace."""

    has_varying_batches = True
    _error: BaseException | None = None

    def build(self) -> None:
        """Build the learner, with arguments and errors of ours. Its thread outlives an error in an update."""
        assert self._stock_loss is not None  # it has a V-Trace to replace
        super().build()
        if self.uses_triton:
            self._learner_thread._update_method = TritonVTraceLearner._update_in_thread

    def _update_in_thread(self, **kwargs: Any) -> None:
        """RLlib's update. An error would end the thread, and `update` would wait for it for good."""
        try:
            with self.triton_update.putting_back():
                Learner.update(self, **kwargs)
        except BaseException as error:
            self._error = error

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """RLlib's update, which leaves the work to a thread, whose error is raised here."""
        results = super().update(*args, **kwargs)
        error, self._error = self._error, None
        if error is not None:
            raise error
        return results

    @property
    def _stock_loss(self) -> Any:
        """The loss behind ours, with our V-Trace in the place of RLlib's."""
        own = self._find_own_loss() or find_replaced_of(self, "compute_loss_for_module")[1]
        is_ours, stock = self._flags.rl_triton and not own, super()._stock_loss
        return replace_vtrace(stock, self.compute_vtrace) if is_ours else stock

    def _describe_estimator(self) -> str:
        own, replaced = find_own_of(self, "compute_losses"), find_replaced_of(self, "compute_loss_for_module")[1]
        who = replaced or (self._name_backend() if self.uses_triton else "RLlib")
        return f"V-Trace with {who}" + f", where it is asked for: {own}" * bool(own)

    def compute_vtrace(self, **arguments: Any) -> tuple[Tensor, Tensor]:
        """Compute V-Trace as the flags say, in a loss of your own: call it in the place of `vtrace_torch`."""
        if not self._flags.rl_triton:
            return vtrace_torch(**arguments)  # type: ignore[no-any-return]
        self._used_estimator = True  # and in later updates, whose graphs call nothing
        return vtrace(**arguments, backend=self._flags.rl_triton_backend)


class TritonIMPALATorchLearner(TritonVTraceLearner, IMPALATorchLearner):
    """`IMPALATorchLearner` with our V-Trace. Derive from it to have a learner of your own."""


class TritonAPPOTorchLearner(TritonVTraceLearner, APPOTorchLearner):
    """`APPOTorchLearner` with our V-Trace. Derive from it to have a learner of your own."""


LEARNERS = {
    PPOTorchLearner: TritonPPOTorchLearner,
    IMPALATorchLearner: TritonIMPALATorchLearner,
    APPOTorchLearner: TritonAPPOTorchLearner,
}
