"""What stands against a capture, or changes after one: the step runs eagerly or is captured anew."""

import copy
import pickle
import threading
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from process_state import assert_same, read_from_another_thread, read_state, run_in_threads
from recorded_graphs import allow_captures
from test_capture import OPTIMIZERS, Training, assert_same_parameters, draw_batches, make_captured, make_pair, step_all
from torch import nn

from rl_triton_core import capture
from rl_triton_core._internal.capture.graphs import without_advice
from rl_triton_core.capture import CapturedStep

pytestmark = pytest.mark.covering


def run_steps(training, changes, device, each=4):
    """A few steps before each change and after the last, from the same random state."""
    torch.manual_seed(3)
    batches = draw_batches(each * (len(changes) + 1), device=device)
    for i, batch in enumerate(batches):
        if i and i % each == 0:
            changes[i // each - 1](training)
        training.step(*(x[:4] for x in batch), 1.0)
    return training


def set_option(name, value):
    return lambda training: training.optimizer.param_groups[0].update({name: value})


def swap_activation(training):
    training.model[1], training.kept = getattr(training, "kept", nn.ReLU()), training.model[1]


CHANGES = {
    "activation": (swap_activation, swap_activation),
    "frozen layer": (lambda x: x.model[0].requires_grad_(False), lambda x: x.model[0].requires_grad_(True)),
    "layer's mode": (lambda x: x.model[2].eval(), lambda x: x.model[2].train()),
    "layer's number": (lambda x: setattr(x.model[2], "p", 0.1), lambda x: setattr(x.model[2], "p", 0.5)),
    "weight decay": (set_option("weight_decay", 0.5), set_option("weight_decay", 0)),
    "decoupled decay": (set_option("decoupled_weight_decay", True), set_option("decoupled_weight_decay", False)),
    "betas": (set_option("betas", [0.1, 0.2]), set_option("betas", (0.9, 0.999))),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_between_steps_is_another_graph(change, device, monkeypatch):
    """And what changes back is the graph from before."""
    captured, eager = make_pair(monkeypatch, device, dropout=0.5)
    assert_same_parameters([run_steps(x, CHANGES[change], device) for x in (captured, eager)], graphs=2)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_parameters_that_are_released_later(optimizer, device, trainings):
    """Momentum of some begins after that of others."""
    for training in trainings:
        training.model[0].requires_grad_(False)
        run_steps(training, [lambda x: x.model[0].requires_grad_(True)], device)
    assert_same_parameters(trainings, graphs=2)


def restore_rate(training):
    """Steps of no size, and the rate from before again."""
    group = training.optimizer.param_groups[0]
    group["lr"], training.kept = getattr(training, "kept", 0.0), group["lr"]


def halve_rate(training):
    """A rate that is made of the one from before."""
    training.first = getattr(training, "first", training.optimizer.param_groups[0]["lr"])
    training.optimizer.param_groups[0]["lr"] = training.first * 0.5


def set_tensor(training):
    """A rate in another form, which changes in place later."""
    training.rate = getattr(training, "rate", torch.tensor(1e-3)).mul_(2)
    training.optimizer.param_groups[0]["lr"] = training.rate


@pytest.mark.parametrize("change", [restore_rate, halve_rate, set_tensor])
@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
def test_learning_rates_between_steps(change, optimizer, device, trainings):
    """They are the numbers that were set, and whoever keeps one has a number."""
    rates = [run_steps(x, [change] * 4, device).optimizer.param_groups[0]["lr"] for x in trainings]
    assert_same_parameters(trainings)
    assert type(rates[0]) is type(rates[1]) and rates[0] == rates[1]
    assert len(trainings[0].step.captured) == 1


def test_copies_of_an_optimizer_are_plain(device, monkeypatch):
    """Between steps it is that itself, and copies step as it would; those of within a step are plain too."""
    captured, eager = make_pair(monkeypatch, device)
    update, within = captured.step.function, []

    def save_and_update(*args):
        within.append(captured.optimizer.state_dict()["param_groups"])
        return update(*args)

    captured.step.function = save_and_update
    run_steps(eager, [], device), run_steps(captured, [], device)
    settings = eager.optimizer.state_dict()["param_groups"]
    assert within and all(groups == settings for groups in within)
    gradients = [x.grad.clone() for x in eager.model.parameters()]
    eager.optimizer.step()
    for optimizer in (copy.deepcopy(captured.optimizer), pickle.loads(pickle.dumps(captured.optimizer))):
        for own in (optimizer, captured.optimizer):
            groups = [{**group, "params": [*range(4)]} for group in own.param_groups]
            assert own.state_dict()["param_groups"] == settings == groups
        parameters = optimizer.param_groups[0]["params"]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
        torch.testing.assert_close([*parameters], [*eager.model.parameters()], rtol=1e-4, atol=1e-6)


def test_copies_of_a_step_leave_its_graphs_alone(device, monkeypatch):
    """They begin without any, and go on from where it is."""
    captured = make_captured(monkeypatch, device)
    run_steps(captured, [], device)
    other, graphs = copy.deepcopy(captured), [*captured.step.captured.values()]
    assert other.step.captured == {} and other.step.optimizers == [other.optimizer]
    for training in (captured, other):
        run_steps(training, [], device)
    assert_same_parameters([captured, other])
    assert [*captured.step.captured.values()] == graphs and len(other.step.captured) == 1


def test_a_step_beside_a_graph_has_inputs_of_its_own(monkeypatch):
    """As those of a graph are: a function that changes them changes nothing of the caller's."""
    allow_captures(monkeypatch)
    step = CapturedStep(lambda x: x.zero_(), modules=[nn.Linear(1, 1)], max_graphs=1)
    x = torch.ones(3)
    step(x)
    with pytest.warns(RuntimeWarning, match="more than 1"):
        step(x[:2])
    assert torch.equal(x, torch.ones(3))


def test_a_step_that_changes_the_lists_it_is_given(device, trainings):
    """Each of its warm-ups and the capture are given those of the call."""
    for training in trainings:
        plain = training.update
        training.step.function = lambda *x, plain=plain: plain(*x[:1], *x[1].pop("more").values())
        for x, y in draw_batches(6, device=device):
            training.step(x, given := {"more": {"target": y, "weight": 1.0}})
            assert [*given] == ["more"]
    assert_same_parameters(trainings, graphs=2)


def test_a_compiled_step(device, trainings):
    """`torch.compile` reads what is done around the optimizer's step, too; no mode stays in force."""
    for training in trainings:
        training.step.function = torch.compile(training.update, backend="eager")
        step_all([training], draw_batches(4, device=device))
    assert_same_parameters(trainings, graphs=2)
    assert torch._C._len_torch_function_stack() == 0


def test_a_model_without_a_parameter_that_learns(device, trainings):
    """Its step has no gradients, and changes nothing until something is released."""
    for training in trainings:
        training.model.requires_grad_(False)
        last, plain = training.model[3].weight, training.update
        training.step.function = lambda *x, plain=plain, last=last: plain(*x) if last.requires_grad else {}
        before = training.parameters()
        (batch,) = draw_batches(1, device=device)
        training.step(*batch, 1.0)
        assert all(map(torch.equal, training.parameters(), before))
        training.model[3].requires_grad_(True)
        training.step(*batch, 1.0)
    assert_same_parameters(trainings, captured=True)


def test_parameters_that_an_optimizer_gets_later(device, trainings):
    for training in trainings:
        late = nn.Parameter(torch.full((), 0.5, device=device))
        plain = training.update
        training.step.function = lambda x, *rest, plain=plain, late=late: plain(x * late, *rest)
        group = {"params": [late], "lr": 0.1}
        run_steps(training, [lambda x, group=group: x.optimizer.add_param_group(group)], device, each=3)
        assert late.item() != 0.5
    assert_same_parameters(trainings, captured=True)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_optimizer_that_forgets(optimizer, device, trainings):
    """Moments that are dropped begin at zero again."""
    for training in trainings:
        run_steps(training, [lambda x: x.optimizer.state.clear()], device)
    assert_same_parameters(trainings, graphs=1)
    assert device == "cuda" or trainings[0].step.graphs.captures == 2


def test_an_optimizer_of_two_steps(device, trainings):
    """In turns, one of them stopped; the last to capture has it, and its checkpoints are plain."""
    for training in trainings:
        given = {"modules": [training.model], "optimizers": [training.optimizer]}
        other = CapturedStep(training.update, **given, enabled=False if training.step.reason else None)
        other.graphs = training.step.graphs
        for i, batch in enumerate(draw_batches(12, device=device)):
            step, limit = (other, []) if i // 3 % 2 else (training.step, [1e9 if i % 3 == 2 else 0.0])
            step(*(x[:4] for x in batch), 1.0, *limit)
            training.step.resume()
        assert (other.reason == "") == (training.step.reason == "")
    assert_same_parameters(trainings)
    groups = [x.optimizer.state_dict()["param_groups"] for x in trainings]
    assert groups[0] == groups[1]


class Accumulation(Training):
    """A step that adds to the gradients of those before it, until it is the last of its group."""

    def update(self, x, target, weight, last):
        (weight * (self.model(x).squeeze(-1) - target) ** 2).mean().backward()
        if last:
            self.optimizer.step()
            self.optimizer.zero_grad()


def test_gradients_that_several_steps_accumulate(device, monkeypatch):
    captured, eager = make_pair(monkeypatch, device, kind=Accumulation)
    with pytest.warns(RuntimeWarning, match="adds to gradients of the step before"):
        for i, batch in enumerate(draw_batches(9, device=device)):
            for training in (eager, captured):
                training.step(*batch, 1 / 3, i % 3 == 2)
    assert_same_parameters([captured, eager])


@pytest.mark.parametrize("place", ["end", "in place"])
def test_gradients_that_a_step_drops_itself(place, device, trainings):
    """At its end, or at its beginning without freeing them: it carries nothing over."""

    def update(training, x, target, weight):
        if place == "in place":
            training.optimizer.zero_grad(set_to_none=False)
        for half in (slice(None, 2), slice(2, None)):  # accumulated within the step
            (weight * (training.model(x[half]).squeeze(-1) - target[half]) ** 2).mean().backward()
        training.optimizer.step()
        if place == "end":
            training.optimizer.zero_grad()

    for training in trainings:
        training.step.function = lambda *x, training=training: update(training, *x)
        step_all([training], draw_batches(12, device=device), weight=0.5)
    assert_same_parameters(trainings, captured=True)


def test_a_mixed_precision_context_around_the_call(monkeypatch, batch):
    """A graph casts the parameters itself: casts stay cached until the context ends, those of the warm-up too."""
    training, losses = make_captured(monkeypatch), []
    plain = training.update
    training.step.function = lambda *x: losses.append(plain(*x)["loss"].clone())
    training.optimizer.param_groups[0]["lr"] = 0.1
    with torch.autocast("cpu", torch.bfloat16):
        training.step(*batch, 1.0)
    losses = {x.item() for x in losses[: capture.WARM_UPS]}
    assert len(losses) == capture.WARM_UPS  # each saw the parameters of the one before


def test_an_obstacle_on_another_device_than_the_cpu_is_said_at_once(recwarn):
    model = nn.Linear(1, 1, device="meta")
    with pytest.warns(RuntimeWarning, match="graphs need tensors on a GPU, got meta"):
        CapturedStep(lambda: None, modules=[model])
    CapturedStep(lambda: None, modules=[model], enabled=False)
    assert not recwarn.list


def test_a_model_that_moves_to_a_device_without_graphs(device, monkeypatch, batch):
    """It goes on there, and says why steps are not captured any more."""
    trainings = make_pair(monkeypatch, device, optimizer="sgd")
    for training in trainings:
        training.step(*batch, 1.0)
        training.model.double().cpu()  # another place in memory on a CPU, too
        training.optimizer.state.clear()  # as is the optimizer's, which nobody moves
    monkeypatch.setattr(capture, "find_obstacle", lambda *_: "graphs need tensors on a GPU, got cpu")
    batch = [x.double().cpu() for x in batch]
    with pytest.warns(RuntimeWarning, match="graphs need tensors on a GPU, got cpu"):
        trainings[0].step(*batch, 1.0)
    trainings[1].step(*batch, 1.0)
    assert_same_parameters(trainings)
    assert trainings[0].optimizer.param_groups[0]["lr"] == 1e-2


PLACES = pytest.mark.parametrize("fails_at", [1, 2, 3, 4, 5])
"""Three warm-ups, one that looks at gradients, the capture."""


class Failing(Training):
    """A step that fails once, or always, when the optimizer has stepped."""

    error, fails_at, calls = RuntimeError("no memory"), (), 0

    def update(self, *args):
        self.calls += 1
        results = super().update(*args)
        if self.calls in self.fails_at:
            raise self.error
        return results


def describe_training(training):
    gradients = [None if x.grad is None else x.grad.clone() for x in training.model.parameters()]
    group, *_ = copy.deepcopy(training.optimizer.state_dict()["param_groups"])
    state = copy.deepcopy(training.optimizer.state_dict()["state"])
    return training.parameters(), gradients, state, group, torch.get_rng_state()


@PLACES
@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError, AttributeError, AssertionError, KeyError])
def test_a_capture_that_fails_at_any_place(error, fails_at, device, monkeypatch):
    """Whatever it raises, the step is made once."""
    eager = Training(device=device, enabled=False)
    captured = make_captured(monkeypatch, device, kind=Failing)
    captured.error, captured.fails_at = error("no memory"), {fails_at}
    first, second = draw_batches(2, device=device)
    eager.step(*first, 1.0)
    with pytest.warns(RuntimeWarning, match=f"runs eagerly: {error.__name__}: .*no memory") as told:
        captured.step(*first, 1.0)
    assert told[0].filename == __file__
    assert_same_parameters([captured, eager], rtol=1e-6, atol=1e-8)
    assert captured.calls == fails_at + 1
    step_all((captured, eager), [second])
    assert_same_parameters([captured, eager], rtol=1e-6, atol=1e-8)
    assert captured.calls == fails_at + 2


def test_an_error_of_the_step_itself(device, monkeypatch, recwarn, batch):
    """It is what the user sees, once and after the one step that an eager call makes; then steps are captured."""
    captured, eager = make_pair(monkeypatch, device, kind=Failing)
    found = []
    for training in (eager, captured):
        training.error, training.fails_at = ValueError("no such action"), range(100)
        torch.manual_seed(3)
        with pytest.raises(ValueError, match="no such action"):
            training.step(*batch, 1.0)
        assert not recwarn.list
        found.append(describe_training(training))
        training.fails_at = ()
        training.step(*batch, 1.0)
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-7)
    assert_same_parameters([captured, eager], captured=True)


@PLACES
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_at_any_place_of_a_capture(error, optimizer, fails_at, device, monkeypatch, batch):
    """It passes, and all is as before the call."""
    eager = Training(optimizer, device, dropout=0.5, enabled=False)
    captured = make_captured(monkeypatch, device, kind=Failing, optimizer=optimizer, dropout=0.5)
    captured.error, captured.fails_at = error(), {fails_at}
    for parameter in captured.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.manual_seed(3)
    before, attributes = describe_training(captured), {*vars(captured.optimizer)}
    with pytest.raises(error):
        captured.step(*batch, 1.0)
    torch.testing.assert_close(describe_training(captured), before, rtol=0, atol=0)
    assert captured.calls == fails_at and captured.step.reason == ""
    assert {*vars(captured.optimizer)} - {"_need_device_dtype_check_for_fused"} == attributes  # which SGD sets itself
    for training in (captured, eager):
        torch.manual_seed(3)
        training.step(*batch, 1.0)
    assert_same_parameters([captured, eager], captured=True)


def take_all_memory(results):
    torch.empty(1 << 45, dtype=torch.uint8, device="cuda")


def leave_work(error, results):
    """Of another stream, with which no capture can end."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        results["loss"].mul(2)
    raise error("stop")


FAILURES = {
    "OutOfMemoryError": take_all_memory,
    "ValueError: stop": partial(leave_work, ValueError),
    "KeyboardInterrupt": partial(leave_work, KeyboardInterrupt),
}


@pytest.mark.gpu
@pytest.mark.parametrize("error", FAILURES)
def test_an_error_for_which_a_capture_cannot_end(error):
    """It is the step's own that counts; afterwards the device works, and so do steps."""
    training, eager = Training(device="cuda"), Training(device="cuda", enabled=False)
    plain = training.update

    def update(*x):
        results = plain(*x)
        if torch.cuda.is_current_stream_capturing():
            FAILURES[error](results)
        return results

    training.step.function = update
    before, (batch,) = training.parameters(), draw_batches(1, device="cuda")
    if error == "KeyboardInterrupt":
        with pytest.raises(KeyboardInterrupt):
            training.step(*batch, 1.0)
        assert all(map(torch.equal, training.parameters(), before))
        training.step.function = plain
        training.step(*batch, 1.0)
        assert training.step.captured
    else:
        with pytest.warns(RuntimeWarning, match=f"runs eagerly: {error}"):
            training.step(*batch, 1.0)
    eager.step(*batch, 1.0)
    assert_same_parameters([training, eager])
    other = Training(device="cuda")
    other.step(*batch, 1.0)
    assert other.step.reason == ""


def test_models_in_several_threads(device, monkeypatch, batch):
    """One is captured at a time."""
    trainings = [make_captured(monkeypatch, device, enabled=True) for _ in range(3)]
    eager, busy, together = Training(device=device, enabled=False), [], []

    def watch(own, *args):
        busy.append(args)
        together.append(len(busy))
        try:
            return own(*args)
        finally:
            busy.pop()

    for graphs in [x.step.graphs for x in trainings]:
        graphs.warm_up, graphs.capture = partial(watch, graphs.warm_up), partial(watch, graphs.capture)
    run_in_threads(*(lambda x=x: [x.step(*batch, 1.0) for _ in range(5)] for x in trainings))
    for _ in range(5):
        eager.step(*batch, 1.0)
    assert set(together) == {1}
    for training in trainings:
        assert_same_parameters([training, eager])


def test_a_wait_in_a_capture_is_named_by_its_line(device, monkeypatch):
    """By what CUDA answers to it; everything is put back, and the step runs eagerly."""
    training, eager = make_pair(monkeypatch, device)
    (batch,), plain = draw_batches(1, device=device), training.step.function
    capture_call = training.step.graphs.capture

    def wait():
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nCompile with ...")

    training.step.graphs.capture = lambda call, generators: capture_call(lambda: (call(), wait()), generators)
    line = wait.__code__.co_firstlineno + 1
    message = rf"CapturedStep runs eagerly: the step waits for the device in .*faults.py, line {line}$"
    with pytest.warns(RuntimeWarning, match=message) as told:
        training.step(*batch, 1.0)
        training.step(*batch, 1.0)  # without another warning
    eager.step(*batch, 1.0), eager.step(*batch, 1.0)
    assert len(told) == 1 and told[0].filename == __file__ and training.step.function is plain
    assert_same_parameters([training, eager])


def test_a_capture_changes_nothing_that_other_threads_see(device, monkeypatch):
    """Neither how Python warns nor whether PyTorch tells of waits; within the step and after it."""
    training, found = make_captured(monkeypatch, device), []
    (batch,), before = draw_batches(1, device=device), read_state()
    training.model[0].register_forward_hook(lambda *_: found.append(read_from_another_thread()))
    training.model[0].weight.register_hook(lambda _: found.append(read_from_another_thread()))
    training.step(*batch, 1.0)
    assert training.step.captured and len(found) > 6
    for state in (*found, read_state()):
        assert_same(state, before)


@pytest.mark.parametrize("before", [True, False])
def test_advice_of_pytorch_is_as_it_was(before):
    """After warm-ups, which are on another stream than a module's gradients may be."""
    graph = pytest.importorskip("torch.autograd.graph")
    if not hasattr(graph, "set_warn_on_accumulate_grad_stream_mismatch"):
        pytest.skip("this PyTorch gives no such advice")
    read = torch._C._warn_on_accumulate_grad_stream_mismatch
    try:
        graph.set_warn_on_accumulate_grad_stream_mismatch(before)
        with pytest.raises(KeyboardInterrupt), without_advice():
            assert not read()
            raise KeyboardInterrupt
        assert read() == before
    finally:
        graph.set_warn_on_accumulate_grad_stream_mismatch(True)


def set_weights(training):
    with torch.no_grad():
        training.model[0].weight.fill_(7.0)


def move_weights(training):
    for parameter in training.model.parameters():
        parameter.data = parameter.data + 1.0


def set_rate(training):
    training.optimizer.param_groups[0]["lr"] = 0.5


@pytest.mark.parametrize("change", [set_weights, move_weights, set_rate])
def test_what_a_thread_sets_while_it_holds_captures_stays(change, device, trainings):
    """The step that waits for it needs another graph than the one that there is."""
    first, second = draw_batches(2, device=device)
    step_all(trainings, [first])
    with capture.hold_captures():
        thread = threading.Thread(target=lambda: trainings[0].step(*second, 1.0))
        thread.start()
        thread.join(0.3)
        assert thread.is_alive()
        for training in trainings:
            change(training)
    thread.join()
    trainings[1].step(*second, 1.0)
    step_all(trainings, (first, second))
    assert len(trainings[0].step.captured) == 2
    assert_same_parameters(trainings)


def test_steps_of_other_threads_wait_for_a_capture(device, monkeypatch):
    """PyTorch lets nobody draw random numbers on the device meanwhile, which a replay may do."""
    random, training = (make_captured(monkeypatch, device, dropout=dropout) for dropout in (0.5, 0.0))
    (batch,), plain = draw_batches(1, device=device), training.update
    random.step(*batch, 1.0)
    before, threads = random.parameters(), []

    def update(*x):
        if not threads:
            threads.append(threading.Thread(target=lambda: random.step(*batch, 1.0)))
            threads[0].start()
        threads[0].join(0.1)
        assert threads[0].is_alive()
        return plain(*x)

    training.step.function = update
    training.step(*batch, 1.0)
    threads[0].join()
    assert random.step.reason == training.step.reason == ""
    assert not torch.equal(before[0], random.parameters()[0])


@pytest.mark.gpu
def test_captures_that_fail_at_their_end_leave_nothing_behind():
    """Neither memory that the allocator keeps back, nor a generator that takes the next numbers for a graph's."""
    found, number = [], torch.zeros((), device="cuda")
    for enabled in (None, False):
        generator = torch.Generator("cuda").manual_seed(5)

        def draw(generator=generator):
            number.copy_(torch.rand((), device="cuda", generator=generator))
            torch.cuda.synchronize()  # which PyTorch's check for waiting does not see
            return number.clone()

        step = CapturedStep(draw, state=[number], generators=[generator], enabled=enabled)
        with pytest.warns(RuntimeWarning, match="runs eagerly") if enabled is None else nullcontext():
            drawn = [step() for _ in range(3)]
        found.append([*drawn, torch.rand((), device="cuda", generator=generator)])
    assert found[0] == found[1]
    torch.cuda.empty_cache()
    before, other = torch.cuda.memory_reserved(), torch.cuda.Stream()
    for _ in range(10):
        block = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
        block.record_stream(other)
        del block
        torch.cuda.synchronize()
    assert torch.cuda.memory_reserved() - before <= 3 * (64 << 20)
