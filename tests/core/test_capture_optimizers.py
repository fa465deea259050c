"""Captured steps with gradient scalers and with schedulers, and what an optimizer is between them."""

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from test_capture import OPTIMIZERS, Training, assert_same_parameters, draw_batches, make_captured, make_pair, step_all
from test_capture_faults import run_steps
from torch import nn
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR

from rl_triton_core._internal.capture import optimizers
from rl_triton_core.capture import CapturedStep

pytestmark = pytest.mark.covering

FUSED = {
    "fused adam": lambda p: torch.optim.Adam(p, lr=3e-3, fused=True),
    "fused adamw": lambda p: torch.optim.AdamW(p, lr=3e-3, fused=True),
    "fused sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True),
}


class ScaledTraining(Training):
    """Gradients are scaled; the first layer has an optimizer of its own, if there are two."""

    def __init__(self, optimizer="adam", device="cpu", enabled=None, unscales=False, number=1):
        super().__init__("sgd", device, enabled=enabled)
        self.scaler = torch.amp.GradScaler(device, init_scale=64.0, growth_interval=2)
        self.unscales = unscales
        parts = [self.model] if number == 1 else [self.model[0], self.model[3]]
        self.optimizers = [(OPTIMIZERS | FUSED)[optimizer](x.parameters()) for x in parts]
        self.step = CapturedStep(self.update, modules=[self.model], optimizers=self.optimizers, enabled=enabled)

    def update(self, x, target, weight):
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss = (weight * (self.model(x).squeeze(-1) - target) ** 2).mean()
        self.scaler.scale(loss).backward()
        for optimizer in self.optimizers if self.unscales else ():
            self.scaler.unscale_(optimizer)
        if self.unscales:
            self.clip()
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()
        return loss.detach()

    def clip(self):
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)


def train_scaled(training, steps, change=lambda training, i: None):
    """Some steps, of which the third and the fourth have infinite gradients. Returns scales and how long they grow."""
    known = []
    for i, (x, target) in enumerate(draw_batches(steps, device=training.step.device)):
        change(training, i)
        training.step(x[:4] / (0 if i in (2, 3) else 1), target[:4], 1.0)
        known.append(training.scaler.state_dict())
    return known


def find_marks(optimizer):
    """Attributes by which a scaler and an optimizer know each other."""
    return vars(optimizer).keys() & {"found_inf", "grad_scale", "_step_supports_amp_scaling"}


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS | FUSED)
def test_scaled_gradients(optimizer, unscales, number, device, monkeypatch):
    """Parameters, scales, and the steps that are skipped, are those of eager steps, from the first one on."""
    options = {"optimizer": optimizer, "unscales": unscales, "number": number}
    captured, eager = make_pair(monkeypatch, device, **options, kind=ScaledTraining)
    marks = [find_marks(x) for x in captured.optimizers]
    assert train_scaled(captured, 12) == train_scaled(eager, 12)
    assert_same_parameters([captured, eager])
    for x, y in zip(captured.model.parameters(), eager.model.parameters(), strict=True):
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-3, atol=1e-6)
    assert captured.step.reason == "" and len(captured.step.captured) == 1
    assert [find_marks(x) for x in captured.optimizers] == marks


def test_a_scaler_with_other_settings_is_captured_anew(device, monkeypatch):
    """Set between steps, as is another scale."""

    def change(training, i):
        if i == 5:
            training.scaler.set_growth_factor(3.0)
        if i == 8:
            training.scaler.update(new_scale=7.0)
        if i == 10:
            training.scaler.load_state_dict({**training.scaler.state_dict(), "scale": 5.0, "growth_interval": 1})

    trainings = make_pair(monkeypatch, device, kind=ScaledTraining)
    known = [train_scaled(x, 14, change) for x in trainings]
    assert known[0] == known[1]
    assert_same_parameters(trainings, graphs=1)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_scaled_steps_that_are_stopped(optimizer, device, monkeypatch):
    """They change no parameter, whether gradients are finite or not; the scale is that of eager steps."""
    captured, eager = make_pair(monkeypatch, device, optimizer=optimizer, kind=ScaledTraining)
    known = []
    for training in (eager, captured):
        plain = training.update

        def update(*args, plain=plain, training=training):
            training.step.stop_if(args[0].sum() > 100)
            return plain(*args)

        training.step.function = update
        train_scaled(training, 2)
        before = training.parameters()
        training.step(torch.full((4, 4), 100.0, device=device), torch.ones(4, device=device), 1.0)
        known.append(train_scaled(training, 5))
        assert all(map(torch.equal, training.parameters(), before))
        training.step.resume()
        train_scaled(training, 2)
    assert known[0] == known[1]
    assert_same_parameters([captured, eager], captured=True)


def test_a_scaler_that_is_disabled(device, monkeypatch):
    trainings = make_pair(monkeypatch, device, kind=ScaledTraining)
    for training in trainings:
        training.scaler = torch.amp.GradScaler(device, enabled=False)
        run_steps(training, [], device)
    assert_same_parameters(trainings, captured=True)


@pytest.mark.parametrize("optimizer", ["adam", "fused adam"])
def test_hooks_that_a_scaler_skips(optimizer, device, monkeypatch):
    """A fused optimizer's run in every step, those of another where gradients are finite: that is no graph's."""
    trainings = [ScaledTraining(optimizer, device, enabled=False)]
    trainings.append(make_captured(monkeypatch, device, kind=ScaledTraining, optimizer=optimizer))
    counts = []
    for training in trainings:
        counts.append(torch.zeros((), device=device))
        training.optimizers[0].register_step_post_hook(lambda *_, count=counts[-1]: count.add_(1))
    trainings[1].step.extra.append(counts[1])
    known = [train_scaled(trainings[0], 6)]
    is_refused = optimizer == "adam"
    with pytest.warns(RuntimeWarning, match="may skip hooks of an optimizer's step") if is_refused else nullcontext():
        known.append(train_scaled(trainings[1], 6))
    assert known[0] == known[1]
    assert counts[0] == counts[1] == (4 if is_refused else 6)
    assert_same_parameters(trainings)
    assert bool(trainings[1].step.captured) != is_refused


@pytest.mark.parametrize(("place", "fails_at"), [("clip", 2), ("clip", 5), ("step", 1), ("step", 2), ("step", 5)])
def test_a_capture_that_fails_leaves_the_scaler_as_it_was(place, fails_at, device, monkeypatch):
    """After gradients have been looked at, or after the optimizer's step: the scale has not been updated then."""
    options = {"optimizer": "fused adam", "unscales": place == "clip"}
    captured, eager = make_pair(monkeypatch, device, **options, kind=ScaledTraining)
    calls, clip = [], captured.clip

    def fail(*_):
        calls.append(place)
        if len(calls) == fails_at:
            raise AttributeError("no such thing")

    if place == "clip":
        captured.clip = lambda: (fail(), clip())
    else:
        captured.optimizers[0].register_step_post_hook(fail)
    with pytest.warns(RuntimeWarning, match="runs eagerly: AttributeError: no such thing"):
        known = train_scaled(captured, 6)
    assert known == train_scaled(eager, 6)
    assert_same_parameters([captured, eager])


CYCLES = {
    "OneCycleLR": partial(OneCycleLR, max_lr=0.02, total_steps=40),
    "CyclicLR": partial(CyclicLR, base_lr=1e-4, max_lr=0.01, step_size_up=3),
}


def train_with_schedule(training, make_scheduler, device, starts_at=0):
    """Steps of which each is followed by one of a scheduler."""
    scheduler = None
    for i, batch in enumerate(draw_batches(12, device=device)):
        if i == starts_at:
            scheduler = make_scheduler(training.optimizer)
        training.step(*(x[:4] for x in batch), 1.0)
        if scheduler is not None:
            scheduler.step()
    return training


@pytest.mark.parametrize("starts_at", [0, 5])
@pytest.mark.parametrize("cycle", CYCLES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_schedulers_of_betas_and_momentum(optimizer, cycle, starts_at, device, monkeypatch):
    """No optimizer takes them as tensors: that is said before a capture, as is what lets steps be captured."""
    captured, eager = make_pair(monkeypatch, device, optimizer=optimizer)
    for training in (eager, captured) if optimizer == "rmsprop" else ():
        training.optimizer.param_groups[0]["momentum"] = 0.9  # its steps fail where it comes later
    setting = "betas" if "adam" in optimizer else "momentum"
    with pytest.warns(RuntimeWarning, match=f"sets {setting} of {type(eager.optimizer).__name__} at every step"):
        trainings = [train_with_schedule(x, CYCLES[cycle], device, starts_at) for x in (captured, eager)]
    assert_same_parameters(trainings)
    assert "cycle_momentum=False" in captured.step.reason and not captured.step.captured
    assert device == "cuda" or captured.step.graphs.captures == (starts_at > 0)


@pytest.mark.parametrize("cycle", CYCLES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_schedulers_of_learning_rates(optimizer, cycle, device, trainings):
    """The same ones, told to leave the rest alone: one graph."""
    for training in trainings:
        train_with_schedule(training, partial(CYCLES[cycle], cycle_momentum=False), device)
    assert_same_parameters(trainings, graphs=1)


def test_an_optimizer_whose_schedule_has_ended(device, trainings):
    """A checkpoint has the scheduler's marks; where nothing sets betas, steps are captured."""
    trained = train_with_schedule(Training(device=device, enabled=False), CYCLES["OneCycleLR"], device)
    for training in trainings:
        training.optimizer.load_state_dict(copy.deepcopy(trained.optimizer.state_dict()))
        run_steps(training, [], device)
    assert_same_parameters(trainings, captured=True)


@pytest.mark.parametrize("name", ["betas", "weight_decay"])
def test_settings_that_are_tensors_are_refused(name, monkeypatch):
    """A graph would keep the values of those in host memory, whatever they become."""
    training = make_captured(monkeypatch, optimizer="adam")
    setting = {"betas": (torch.tensor(0.9), torch.tensor(0.99)), "weight_decay": torch.tensor(0.1)}[name]
    training.optimizer.param_groups[0][name] = setting
    with pytest.warns(RuntimeWarning, match=f"Adam with a tensor as {name} cannot be captured"):
        run_steps(training, [], "cpu")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_parameter_that_is_there_twice_is_not_captured(optimizer, device, monkeypatch):
    """Steps of all at once are others, on a GPU even from run to run. It may come between two steps."""

    def repeat(training):
        group = training.optimizer.param_groups[0]
        group.update(params=[*group["params"], group["params"][0]], foreach=False)

    captured, eager = make_pair(monkeypatch, device, optimizer=optimizer)
    with pytest.warns(RuntimeWarning, match=f"{type(eager.optimizer).__name__} has a parameter twice"):
        for training in (captured, eager):
            run_steps(training, [repeat], device)
    assert_same_parameters([captured, eager])
    assert not captured.step.captured


def test_a_parameter_that_goes_to_another_group_is_captured_anew(device, trainings):
    """With that group's settings, in the same order of all parameters."""

    def move(training):
        first, second = training.optimizer.param_groups
        second["params"].insert(0, first["params"].pop())

    for training in trainings:
        training.optimizer.add_param_group({"params": [training.optimizer.param_groups[0]["params"].pop()], "eps": 0.1})
        run_steps(training, [move], device)
    assert_same_parameters(trainings, graphs=2)


class DecayingTraining(Training):
    """The step itself changes the learning rate."""

    def update(self, *args):
        results = super().update(*args)
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.5
        return results


def test_learning_rates_that_the_step_changes(device, monkeypatch):
    """Checkpoints and copies have numbers, those of an eager step, and another step goes on from there."""
    captured, eager = make_pair(monkeypatch, device, kind=DecayingTraining)
    for _ in range(2):
        run_steps(eager, [], device), run_steps(captured, [], device)
        rate = pytest.approx(eager.optimizer.param_groups[0]["lr"], rel=1e-6)
        (saved,) = captured.optimizer.state_dict()["param_groups"]
        captured.step.reset()
        for group in (saved, *captured.optimizer.param_groups):
            assert type(group["lr"]) is float and group["lr"] == rate
    assert_same_parameters([captured, eager])
    assert captured.step.reason == ""


def test_a_step_that_loses_its_optimizer_captures_again(monkeypatch):
    """Where two take turns, each does when its turn begins, and has no graph meanwhile."""
    first = make_captured(monkeypatch)
    second = CapturedStep(first.update, modules=[first.model], optimizers=[first.optimizer])
    batch = torch.ones(4, 4), torch.ones(4)
    for step in (first.step, first.step, second, second, first.step):
        step(*batch, 1.0)
    assert (first.step.graphs.captures, second.graphs.captures) == (2, 1)


def test_step_counts_of_another_type(device, monkeypatch):
    """An optimizer that began when the default type was float64: the fused step of a GPU counts in float32."""
    captured, eager = make_pair(monkeypatch, device)
    first, second = draw_batches(2, device=device)
    for training in (captured, eager):
        torch.set_default_dtype(torch.float64)
        try:
            training.update(*first, 1.0)
        finally:
            torch.set_default_dtype(torch.float32)
        training.step(*second, 1.0)
    assert_same_parameters([captured, eager], captured=True)
    types = [{state["step"].dtype for state in x.optimizer.state.values()} for x in (captured, eager)]
    assert types == [{torch.float32}, {torch.float64}]


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd"])
def test_large_tensors_are_stepped_in_parts(optimizer, device, monkeypatch):
    """Each element as otherwise; what has gaps in memory stays as it is."""
    trainings, counts = make_pair(monkeypatch, device, optimizer=optimizer), []
    split = optimizers.split_tensors
    monkeypatch.setattr(optimizers, "LEAST", 3)
    monkeypatch.setattr(optimizers, "split_tensors", lambda x: [counts.append((len(x[0]), split(x))), split(x)][1])
    for each in trainings:
        weight = next(each.model.parameters())
        weight.data = weight.data.t().contiguous().t()
    step_all(trainings, draw_batches(6, device=device))
    assert_same_parameters(trainings)
    assert all(len({*map(len, parts)}) == 1 for _, parts in counts)
    assert any(len(parts[0]) > count for count, parts in counts)


def test_parts_are_views_of_their_tensors_in_order():
    steps, gaps = [torch.zeros(()), torch.ones(())], torch.zeros(70_000, 2)[:, 0]
    large = [torch.arange(600_000.0), torch.arange(70_000.0)]
    first, second, counts = optimizers.split_tensors([large, [large[0] + 1, gaps], steps])
    assert [x.numel() for x in first] == [27_916] * 21 + [13_764, 70_000]
    assert torch.equal(torch.cat(first), torch.cat(large)) and first[1].data_ptr() == large[0][27_916:].data_ptr()
    assert torch.equal(torch.cat(second[:-1]), large[0] + 1) and second[-1] is gaps
    assert [x is steps[0] for x in counts] == [True] * 22 + [False]
    assert [len(x) for x in optimizers.split_tensors([[torch.zeros(3), torch.zeros(4096)]])] == [3]
    assert [len(x) for x in optimizers.split_tensors([[torch.zeros(1 << 21)]])] == [1]
    assert [len(x) for x in optimizers.split_tensors([[torch.zeros(0)], [torch.zeros(0)]])] == [1, 1]
