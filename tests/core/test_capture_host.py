"""What modules keep on the host, and draw there: a graph follows it, or the step runs eagerly and says why."""

import itertools
import random
import re
import warnings
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gpu_checks import GPU
from recorded_graphs import allow_captures
from test_capture import assert_same_parameters, draw_batches, make_captured, make_pair
from test_capture_faults import run_steps
from torch import nn

from rl_triton_core.capture import CapturedStep

pytestmark = pytest.mark.covering


class Settings:
    """What is no module, and holds numbers."""

    def __init__(self, inner=None):
        self.scale, self.inner = 1.0, inner

    def apply(self, x):
        return x


class Scaled(nn.Module):
    """Has a number and a list, as scripted modules do."""

    def __init__(self):
        super().__init__()
        self.scale, self.sizes = 1.0, [1.0]

    def forward(self, x):
        return x * self.scale * self.sizes[0]


class Part(nn.Module):
    """Reads numbers, functions and a network from wherever a module can keep them."""

    by_default, of_class = 1.0, 1.0

    def __init__(self, device="cpu"):
        super().__init__()
        self.settings = Settings(Settings())
        self.table, self.array, self.bounds, self.kind = {"scales": [1.0]}, np.ones(1), (1.0, 2.0), "tanh"
        self.scripted = torch.jit.script(Scaled())
        self.networks = [{"first": nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.0)).to(device).requires_grad_(False)}]

    def weigh(self, x):
        return x

    def forward(self, x):
        x = self.weigh(x) * self.by_default * type(self).of_class * self.settings.scale * self.settings.inner.scale
        x = self.settings.apply(self.scripted(x)) * self.table["scales"][0] * self.bounds[0] * float(self.array[0])
        return getattr(torch, self.kind)(x + self.networks[0]["first"](x))


def halve(x):
    return 0.5 * x


KEPT = {  # where something is that a step reads, its name there, and what it is to be for some steps
    "a number that was that of the class": (vars, "by_default", 0.5),
    "a number of the class": (type, "of_class", 0.5),
    "a number of an object": (lambda part: vars(part.settings), "scale", 0.5),
    "a number of an object in it": (lambda part: vars(part.settings.inner), "scale", 0.5),
    "an object": (lambda part: vars(part.settings), "inner", SimpleNamespace(scale=0.5)),
    "a number in a list in a dictionary": (lambda part: part.table["scales"], 0, 0.5),
    "a tuple": (vars, "bounds", (0.5, 2.0)),
    "an array": (vars, "array", np.full(1, 0.5)),
    "a name": (vars, "kind", "relu"),
    "a method of the instance": (vars, "weigh", halve),
    "a method of the class": (type, "weigh", lambda self, x: 0.5 * x),
    "a method of an object's class": (lambda part: type(part.settings), "apply", lambda self, x: 0.5 * x),
    "a method of a layer's class": (lambda part: nn.Linear, "forward", lambda self, x: 0.5 * x @ self.weight.T),
    "the number of a layer in a list": (lambda part: vars(part.networks[0]["first"][1]), "p", 1.0),
    "the mode of a layer in a list": (lambda part: vars(part.networks[0]["first"][1]), "training", False),
    "a number of a scripted module": (lambda part: part.scripted, "scale", 0.5),
    "a list of a scripted module": (lambda part: part.scripted, "sizes", [0.5]),
    "a network in a list": (lambda part: part.networks[0], "first", nn.Tanh()),
    "a parameter in a list": (lambda part: part.networks[0]["first"][0]._parameters, "bias", None),
}


def put(items, key, value):
    """Set an item, or an attribute of a class or a scripted module; return what puts it back."""
    if isinstance(items, type | torch.jit.ScriptModule):
        before = getattr(items, key)
        setattr(items, key, value)
        return lambda: setattr(items, key, before)
    was_there = isinstance(items, list) or key in items
    before = items[key] if was_there else None
    items[key] = value
    return lambda: items.__setitem__(key, before) if was_there else items.pop(key)


@pytest.mark.parametrize("name", KEPT)
def test_what_modules_keep_is_followed(name, device, monkeypatch):
    """Another number or function is another graph, and that of before is used again; memory of before is not read."""
    trainings = make_pair(monkeypatch, device, optimizer="sgd", dropout=0.5)
    find, key, value = KEPT[name]
    for training in trainings:
        torch.manual_seed(1)
        part, x, undo = Part(device), torch.randn(2, 16, device=device), []
        training.model[1], before = part, part(x)
        changes = [
            lambda _, part=part, undo=undo: undo.append(put(find(part), key, value)),
            lambda _, undo=undo: undo.pop()(),
        ]
        changes[0](part)
        assert not torch.equal(part(x), before) or "mode" in name
        changes[1](part)
        assert torch.equal(part(x), before)
        run_steps(training, changes, device, each=3)
    assert_same_parameters(trainings)
    step = trainings[0].step
    assert step.reason == "" and len(step.captured) == (1 if "parameter" in name or "network" in name else 2)


class Drawing(nn.Module):
    """Draws a number on the host in every call, from one of its places."""

    def __init__(self, draw):
        super().__init__()
        self.draw, self.numpy, self.python = draw, np.random.default_rng(3), random.Random(3)
        self.legacy, self.torch = np.random.RandomState(3), torch.Generator().manual_seed(3)

    def forward(self, x):
        return x * self.draw(self)


DRAWS = {
    "numpy.random": lambda part: np.random.rand(),  # noqa: NPY002
    "random": lambda part: random.random(),
    "Generator": lambda part: part.numpy.random(),
    "RandomState": lambda part: part.legacy.rand(),
    "Random": lambda part: part.python.random(),
}


def read_states(part):
    states = random.getstate(), np.random.get_state()[1].tolist(), part.python.getstate()  # noqa: NPY002
    return *states, part.numpy.bit_generator.state, part.legacy.get_state()[1].tolist()


@pytest.fixture
def other_thread():
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        yield pool


@pytest.mark.parametrize("draw", [lambda part: torch.rand(()), lambda part: torch.rand((), generator=part.torch)])
@pytest.mark.parametrize("thread", [None, "other_thread"])
def test_draws_of_pytorch_on_the_host(draw, thread, monkeypatch, request):
    """Beside a device; on a CPU they are the device's, and graphs repeat them."""
    _ = thread and request.getfixturevalue(thread)
    allow_captures(monkeypatch)
    for device, reason in (("meta", "draws from"), ("cpu", "")):
        part = Drawing(lambda part: draw(part).item())
        part.register_buffer("place", torch.zeros(1, device=device))
        if device == "cpu":
            part.draw = draw
        states = part.torch.get_state(), torch.get_rng_state()
        step = CapturedStep(lambda x, part=part: part(x), modules=[part])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            results = [step(torch.ones(1, device=device)).clone() for _ in range(3)]
        assert reason in step.reason and bool(step.captured) == (step.reason == "") == (not reason)
        part.torch.set_state(states[0]), torch.set_rng_state(states[1])
        expected = [part(torch.ones(1, device=device)) for _ in range(3)]
        assert device == "meta" or torch.equal(torch.stack(results), torch.stack(expected))


@pytest.mark.parametrize("device", ["meta", GPU])
@pytest.mark.parametrize("name, when", [("of torch", [1, 2, 3, 4, 5, 6]), ("Generator", [4, 6]), ("Random", [4, 6])])
def test_draws_of_other_threads_are_not_the_step_s(name, when, device, monkeypatch, other_thread):
    """Its warm-ups do not take them back; PyTorch's may be drawn in each of them."""
    draw = DRAWS.get(name, lambda part: torch.rand((), generator=part.torch).item())
    calls, parts = itertools.count(1), [Drawing(draw), Drawing(draw)]

    def draw_elsewhere(part):
        if next(calls) in when:
            other_thread.submit(draw, part).result()
        return 1.0

    if device != "cuda":
        allow_captures(monkeypatch)
    parts[0].draw = draw_elsewhere
    parts[0].register_buffer("place", torch.zeros(1, device=device))
    step = CapturedStep(parts[0], modules=[parts[0]])
    step(torch.ones(1, device=device))
    assert step.reason == "" and len(step.captured) == 1 and next(calls) == 7
    for _ in when:
        draw(parts[1])
    assert read_states(parts[0])[2:] == read_states(parts[1])[2:]
    assert torch.equal(parts[0].torch.get_state(), parts[1].torch.get_state())


class Counting(nn.Module):
    """Changes what it keeps on the host in every call."""

    total = 0

    def __init__(self, count):
        super().__init__()
        self.count, self.calls, self.log, self.settings = count, 0, [], Settings()

    def forward(self, x):
        self.count(self)
        return x * (self.calls + len(self.log) + self.settings.scale + Counting.total)


COUNTS = {
    "Counting.calls": lambda part: setattr(part, "calls", part.calls + 1),
    "Counting.log": lambda part: part.log.append(len(part.log)),
    "Settings.scale": lambda part: setattr(part.settings, "scale", part.settings.scale + 1),
    "Counting.total": lambda part: setattr(Counting, "total", Counting.total + 1),
}


@pytest.mark.parametrize("name", [*DRAWS, *COUNTS])
def test_draws_and_counts_on_the_host_run_eagerly(name, device, monkeypatch, other_thread):
    """They are those of eager steps, one for each call, and so is what is drawn later."""
    trainings, kept = make_pair(monkeypatch, device, optimizer="sgd"), []
    reason = f"draws from {name} on" if name in DRAWS else rf"changes {name}(\.3)? on"
    for training in trainings:
        np.random.seed(3)  # noqa: NPY002
        random.seed(3)
        monkeypatch.setattr(Counting, "total", 0)
        part = training.model[1] = Drawing(DRAWS[name]) if name in DRAWS else Counting(COUNTS[name])
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            run_steps(training, [], device)
        kept.append(read_states(part) if name in DRAWS else (part.calls, part.log, part.settings.scale, Counting.total))
        told = [str(x.message) for x in said if "CapturedStep" in str(x.message)]
        assert len(told) == (training is trainings[0]) and all(re.search(f"{reason} the host", x) for x in told)
    assert kept[0] == kept[1] != (0, [], 1.0, 0)
    assert_same_parameters(trainings)


@pytest.mark.parametrize("fails_at", [1, 3, 5])
def test_an_interrupt_puts_the_host_back(fails_at, monkeypatch):
    """Counts, lists, and random states."""
    training, calls = make_captured(monkeypatch), []

    def count(part):
        calls.append(np.random.rand())  # noqa: NPY002
        if len(calls) >= fails_at:
            part.calls, part.new = part.calls + 1, 3
            part.log.append(1)
            raise KeyboardInterrupt

    part = training.model[1] = Counting(count)
    np.random.seed(3)  # noqa: NPY002
    (batch,), state = draw_batches(1), np.random.get_state()[1].tolist()  # noqa: NPY002
    if fails_at == 5:  # a capture, which no draw precedes
        monkeypatch.setattr(np.random, "rand", lambda: 0.0)
    with pytest.raises(KeyboardInterrupt):
        training.step(*batch, 1.0)
    assert len(calls) == fails_at and state == np.random.get_state()[1].tolist()  # noqa: NPY002
    assert (part.calls, part.log, hasattr(part, "new")) == (0, [], False)


class Lazy(nn.Module):
    """Makes a scale in its first call, and another attribute in each."""

    scale, is_known = None, False

    def forward(self, x):
        if not self.is_known:
            self.is_known, self.scales = True, [x.detach().abs().mean()]
        self.seen = SimpleNamespace(x=x, size=len(x))
        return x / self.scales[0]


def test_what_the_first_call_sets(device, monkeypatch):
    """It is set once, and later steps have a graph without it; what each call sets is that of the last one."""
    trainings = make_pair(monkeypatch, device, optimizer="sgd")
    for training in trainings:
        training.model[1] = Lazy()
        run_steps(training, [], device)
    assert_same_parameters(trainings)
    got, want = (training.model[1] for training in trainings)
    torch.testing.assert_close([*got.scales, got.seen.x], [*want.scales, want.seen.x], rtol=1e-5, atol=1e-6)
    assert got.is_known and trainings[0].step.reason == "" and len(trainings[0].step.captured) == 2


def test_numbers_that_change_in_every_call_are_named(monkeypatch, batch):
    """There are as many graphs as may be, then steps run eagerly."""
    trainings = make_pair(monkeypatch, "cpu", optimizer="sgd", max_graphs=2)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for i in range(6):
            for training in trainings:
                training.model[2].p = i / 10
                torch.manual_seed(i)
                training.step(*batch, 1.0)
    assert_same_parameters(trainings)
    (text,) = {str(x.message) for x in said}
    assert text.endswith("more than 2 combinations of shapes and settings: Dropout.p has changed")


def test_modules_elsewhere_do_not_count(device, monkeypatch):
    """A list may hold what a step does not call, on another device."""
    training = make_captured(monkeypatch, device)
    training.model[1].teachers = [nn.Linear(2, 2, device="meta")]
    for batch in draw_batches(2, device=device):
        training.step(*batch, 1.0)
    assert training.step.reason == "" and training.step.captured
    assert {x.device.type for x in training.step.tensors()} == {device}


def test_guards_are_held_for_a_block(device, monkeypatch):
    """Inside, numbers are looked at once for each form of the inputs; after it, always, whatever has ended it."""
    allow_captures(monkeypatch, device)
    part, one, two = Scaled(), torch.ones(1, device=device), torch.ones(2, device=device)
    part.register_buffer("place", torch.zeros(1, device=device))
    step = CapturedStep(part, modules=[part])

    def read(x, scale):
        part.scale = scale
        return step(x)[0].item()

    with step.held():
        assert [read(one, 1.0), read(one, 2.0), read(two, 3.0)] == [1.0, 1.0, 3.0]
        with step.held():
            assert read(one, 4.0) == 1.0
        assert read(one, 5.0) == 1.0
        step.recapture()
        assert read(one, 6.0) == 6.0
    assert read(one, 2.0) == 2.0
    with pytest.raises(KeyboardInterrupt), step.held():
        assert [read(one, 3.0), read(one, 4.0)] == [3.0, 3.0]
        raise KeyboardInterrupt
    assert read(one, 5.0) == 5.0 and step.reason == ""


def test_what_may_change_while_guards_are_held(device, trainings):
    """Learning rates, the optimizer's state, a stop, and what a first call sets."""
    changes = {2: set_rate, 4: set_rate, 6: halve_state}
    for training in trainings:
        training.model[1] = Lazy()
        with training.step.held():
            for i, batch in enumerate(draw_batches(10, device=device)):
                changes.get(i, lambda _: None)(training)
                training.step(*batch, 1.0, 1e9 if i == 7 else 0.0)
                if i == 8:
                    training.step.resume()
    assert_same_parameters(trainings, captured=True)


def set_rate(training):
    training.optimizer.param_groups[0]["lr"] *= 0.5


def halve_state(training):
    state = training.optimizer.state_dict()
    halves = {i: {name: x / 2 for name, x in own.items()} for i, own in state["state"].items()}
    training.optimizer.load_state_dict(state | {"state": halves})


def test_a_step_that_has_failed_is_captured_again_when_asked(monkeypatch, batch):
    training = make_captured(monkeypatch)
    training.model[1] = Counting(COUNTS["Counting.calls"])
    with pytest.warns(RuntimeWarning, match="on the host"):
        training.step(*batch, 1.0)
    training.model[1].count = lambda _: None
    training.step(*batch, 1.0)
    assert training.step.reason and not training.step.captured
    training.step.recapture()
    training.step(*batch, 1.0)
    assert training.step.reason == "" and training.step.captured
