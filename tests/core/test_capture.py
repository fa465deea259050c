"""Captured steps: on a CPU in recorded graphs, on a GPU in those of CUDA."""

import copy
import gc
import pickle
import warnings
import weakref
from itertools import pairwise

import numpy as np
import pytest
import torch
from recorded_graphs import allow_captures
from torch import distributed, nn

from rl_triton_core import capture
from rl_triton_core._internal.capture.optimizers import name_unsupported
from rl_triton_core.capture import CapturedStep

pytestmark = pytest.mark.covering

OPTIMIZERS = {
    "adam": lambda p: torch.optim.Adam(p, lr=3e-3, eps=1e-5),
    "adamw": lambda p: torch.optim.AdamW(p, lr=3e-3),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
}


NUM_STEPS = {"cpu": 60, "cuda": 300}


class Training:
    """A policy, its optimizer and its step."""

    def __init__(self, optimizer="adam", device="cpu", dropout=0.0, enabled=None, **options):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 1)).to(device)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.step = CapturedStep(
            self.update, modules=[self.model], optimizers=[self.optimizer], enabled=enabled, **options
        )

    def update(self, x, target, weight, limit=None):
        self.optimizer.zero_grad(set_to_none=True)
        loss = (weight * (self.model(x).squeeze(-1) - target) ** 2).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        if limit is not None:
            self.step.stop_if(loss.detach() < limit)
        self.optimizer.step()
        return {"loss": loss.detach()}

    def parameters(self):
        return [x.detach().clone() for x in self.model.parameters()]


def make_captured(monkeypatch, device="cpu", kind=Training, **options):
    allow_captures(monkeypatch, device)
    return kind(device=device, **options)


def make_pair(monkeypatch, device, **options):
    """The same training twice, whose steps are captured, and eager."""
    return make_captured(monkeypatch, device, **options), make_captured(monkeypatch, device, enabled=False, **options)


def draw_batches(number, size=8, device="cpu"):
    g = torch.Generator().manual_seed(1)
    for i in range(number):
        rows = size if i % 5 else size // 2
        yield [x.to(device) for x in (torch.randn(rows, 4, generator=g), torch.randn(rows, generator=g))]


def step_all(trainings, batches, *more, weight=1.0):
    """Each training makes a step with every batch."""
    for batch in batches:
        for training in trainings:
            training.step(*batch, weight, *more)


def assert_same_parameters(trainings, graphs=None, captured=False, **tolerance):
    """Of two trainings, within the rounding of another order. The first may have to have graphs, or so many."""
    torch.testing.assert_close(*([*x.parameters()] for x in trainings), **{"rtol": 1e-4, "atol": 1e-6, **tolerance})
    step = trainings[0].step
    assert graphs is None or (step.reason, len(step.captured)) == ("", graphs)
    assert not captured or (step.reason == "" and step.captured)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_many_steps_equal_eager_ones(optimizer, device, monkeypatch):
    """With schedules, and a short minibatch in every five: graphs of both shapes have gradients of their own."""
    captured, eager = make_pair(monkeypatch, device, optimizer=optimizer)
    number = NUM_STEPS[device]
    for i, batch in enumerate(draw_batches(number, device=device)):
        for training in (eager, captured):
            for group in training.optimizer.param_groups:
                group["lr"] = 3e-3 * (1 - i / number)
        want, got = (training.step(*batch, 1.0 - i / 400) for training in (eager, captured))
        torch.testing.assert_close(got["loss"], want["loss"], rtol=1e-4, atol=1e-6)
        if i < 10:
            gradients = ([x.grad for x in training.model.parameters()] for training in (captured, eager))
            torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-6)
    assert_same_parameters([captured, eager], graphs=2, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no second device")
def test_steps_of_two_devices():
    """Whichever is the current one."""
    for device in ("cuda:0", "cuda:1", "cuda:0"):
        captured, eager = Training(device=device), Training(device=device, enabled=False)
        step_all((captured, eager), draw_batches(3, device=device))
        assert captured.step.captured
        assert_same_parameters([captured, eager], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [float, np.float32, np.float64, torch.tensor])
def test_numbers_of_every_kind_need_one_graph(kind, device, trainings, batch):
    """A tensor in host memory is an input as any other, and the same one as on the device."""
    for i in range(6):
        weight = kind(1.0 - i / 10)
        weight = weight.to(device) if i % 2 and kind is torch.tensor else weight
        got, want = (training.step(*batch, weight)["loss"].clone() for training in trainings)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    assert len(trainings[0].step.captured) == 1


@pytest.mark.parametrize("kind", [int, np.int32, np.int64])
def test_numbers_that_count_are_integers(kind, device, monkeypatch):
    """A step indexes by them, and beyond 2 ** 24 none is another."""
    table = torch.arange(4, device=device)
    for enabled in (None, False):
        step = make_captured(monkeypatch, device, enabled=enabled).step
        step.function = lambda i: (table.index_select(0, i.reshape(1) % 4), i)
        for i in range(4):
            assert [x.item() for x in step(kind(2**24 + i))] == [i, 2**24 + i]
        assert len(step.captured) == (enabled is None)


def test_inputs_laid_out_in_another_way(device, monkeypatch):
    """A step that reads memory as it lies is captured for each layout."""
    training = make_captured(monkeypatch, device)
    training.step.function = lambda x: x.as_strided((6,), (1,))
    rows = torch.arange(6.0, device=device).reshape(2, 3)
    for x in (rows, rows.t().contiguous().t(), rows):
        assert torch.equal(training.step(x), x.as_strided((6,), (1,)))
    assert len(training.step.captured) == 2


def test_sums_and_random_numbers_of_the_step(device, monkeypatch):
    """What it adds to tensors of its own, and draws from a generator of its own, is that of eager steps."""
    found = []
    for enabled in (None, False):
        total, generator = torch.zeros(2, device=device), torch.Generator(device).manual_seed(5)
        training = make_captured(monkeypatch, device, enabled=enabled, state=[total], generators=[generator])

        def update(x, target, weight, training=training, total=total, generator=generator):
            noise = torch.rand(x.shape, device=device, generator=generator)
            loss = training.update(x + 0.1 * noise, target, weight)["loss"]
            total.add_(torch.stack([loss, noise.sum()]))

        training.step.function = update
        step_all([training], draw_batches(20, device=device))
        found.append([total, *training.parameters()])
        assert (training.step.reason == "") == (enabled is None)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_graphs_go_with_the_model(device, monkeypatch):
    """Nothing that outlives it holds them, nor does an optimizer; what libraries keep, they take in the first turn."""
    taken = []
    for _ in range(2):
        training = make_captured(monkeypatch, device)
        step_all([training], draw_batches(2, device=device))
        graphs, model, optimizer = weakref.ref(training.step), weakref.ref(training.model), training.optimizer
        del training
        gc.collect()
        assert graphs() is None and model() is None
        optimizer.load_state_dict(optimizer.state_dict())
        assert optimizer.param_groups[0]["lr"] == 3e-3
        taken.append(torch.cuda.memory_allocated() if device == "cuda" else 0)
    assert taken[1] - taken[0] < 1 << 20


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_capture_leaves_no_trace(optimizer, device, monkeypatch, batch):
    """Parameters, what the optimizer knows and random numbers are those of one eager step after the first call."""
    captured, eager = make_pair(monkeypatch, device, optimizer=optimizer, dropout=0.5)
    for training in (eager, captured):
        torch.manual_seed(3)
        training.step(*batch, 1.0)
    assert_same_parameters([captured, eager], rtol=1e-5, atol=1e-7)
    if device == "cpu":
        assert torch.rand(()).isfinite() and captured.step.graphs.captures == 1


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_early_stop_changes_nothing_more(optimizer, device, monkeypatch, batch):
    """From the step on in which the condition holds, eagerly and captured alike; until it is resumed."""
    trainings = Training(optimizer, device, enabled=False), make_captured(monkeypatch, device, optimizer=optimizer)
    for training in trainings:
        for _ in range(20):
            training.step(*batch, 1.0, 0.0)
        at_stop = training.parameters()
        for _ in range(3):
            training.step(*batch, 1.0, 1e9)
        assert all(map(torch.equal, training.parameters(), at_stop)) and training.step.stop.item() == 1
        training.step.resume()
        training.step(*batch, 1.0, 0.0)
        assert not all(map(torch.equal, training.parameters(), at_stop))
    assert_same_parameters(trainings, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("enabled", [None, False])
def test_an_early_stop_keeps_the_statistics_of_a_normalisation(enabled, device, monkeypatch):
    """From the next step on: the one in which the condition holds has made its forward pass."""
    training = make_captured(monkeypatch, device, enabled=enabled)
    training.model[2] = nn.BatchNorm1d(16).to(device)
    training.optimizer.add_param_group({"params": training.model[2].parameters()})
    means = [training.model[2].running_mean.clone()]
    for limit, batch in zip((0.0, 1e9, 1e9, 1e9), draw_batches(4, device=device), strict=True):
        training.step(*(x[:4] for x in batch), 1.0, limit)
        means.append(training.model[2].running_mean.clone())
    assert [torch.equal(x, y) for x, y in pairwise(means)] == [False, False, True, True]
    assert training.model[2].num_batches_tracked.item() == 2 and bool(training.step.reason) == (enabled is False)


def test_graphs_of_before_the_first_limit_keep_buffers_too(device, trainings, batch):
    """A step that was captured without one is captured anew."""
    for training in trainings:
        training.model[2] = nn.BatchNorm1d(16, affine=False, device=device)
        for limit in ((), (1e9,), ()):
            training.step(*batch, 1.0, *limit)
    got, want = (training.model[2].running_mean for training in trainings)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    assert trainings[0].step.stop.item() == 1 and trainings[0].step.reason == ""


class Counter(nn.Module):
    """Replaces a buffer by the sum of its inputs' means, or by all of them."""

    def __init__(self, keeps_all=False):
        super().__init__()
        self.keeps_all = keeps_all
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x):
        mean = x.detach().mean().reshape(1)
        self.count = torch.cat([self.count, mean]) if self.keeps_all else self.count + mean
        return x


@pytest.mark.parametrize("wrap", [lambda x: x, torch.jit.script])
def test_buffers_that_are_replaced_stay_in_place(wrap):
    counter = wrap(Counter())
    place = counter.count.data_ptr()
    with capture.keep_buffers([nn.Sequential(counter)]):
        counter(torch.ones(2))
        counter(torch.ones(2))
    assert counter.count.data_ptr() == place and counter.count.tolist() == [2]


@pytest.mark.parametrize("wrap", [lambda x: x, torch.jit.script])
@pytest.mark.parametrize("keeps_all", [False, True])
def test_steps_follow_buffers_that_are_replaced(keeps_all, wrap, device, trainings):
    """Those of another shape eagerly."""
    for training in trainings:
        training.model[2] = wrap(Counter(keeps_all).to(device))
        with warnings.catch_warnings(record=True) as warned:
            step_all([training], draw_batches(8, device=device))
        text = "of another shape or dtype: count" if keeps_all and training is trainings[0] else ""
        assert all(text in str(x.message) for x in warned) and len(warned) == bool(text)
    got, want = (training.model[2].count for training in trainings)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_reasons_are_known_beforehand(monkeypatch):
    assert "tensors on a GPU, got cpu" in Training().step.reason
    assert Training(enabled=False).step.reason == "switched off"
    monkeypatch.setenv("RL_TRITON_CAPTURE", "0")
    assert Training().step.reason == "switched off"
    parameters = [nn.Parameter(torch.zeros(1))]
    assert "Adagrad cannot be captured" in name_unsupported(torch.optim.Adagrad(parameters))
    sgd = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.1)
    assert "dampening" in name_unsupported(sgd)
    doubled = torch.optim.Adam(parameters, lr=torch.tensor(0.1, dtype=torch.float64))
    assert "a learning rate that is a tensor of another device or dtype" in name_unsupported(doubled)
    with pytest.raises(TypeError, match="enabled: got str, expected a bool or None"):
        CapturedStep(lambda: None, enabled="yes")
    wanted = Training(enabled=True)
    wanted.step.reset()
    assert "got cpu" in wanted.step.reason  # True goes before the environment, after a reset too


ARGUMENTS = {
    "function: got int, expected a function": lambda: CapturedStep(3),
    "modules: got a Linear, expected several": lambda: CapturedStep(print, modules=nn.Linear(1, 1)),
    "optimizers: got a SGD": lambda: CapturedStep(print, optimizers=torch.optim.SGD([torch.zeros(1)])),
    "max_graphs: got 0, expected at least 1": lambda: CapturedStep(print, max_graphs=0),
}


@pytest.mark.parametrize("message", ARGUMENTS)
def test_arguments_are_checked(message):
    with pytest.raises((TypeError, ValueError), match=message):
        ARGUMENTS[message]()


@pytest.mark.parametrize("enabled", [None, False])
def test_inputs_that_no_graph_can_take(enabled, monkeypatch):
    step = make_captured(monkeypatch, enabled=enabled).step
    with pytest.raises(ValueError, match=r"inputs: got a tensor of shape \(8, 4\) that requires grad, expected one"):
        step(torch.randn(8, 4, requires_grad=True), torch.randn(8), 1.0)
    with pytest.raises(TypeError, match="inputs: got ndarray, expected tensors, numbers"):
        step(np.zeros((8, 4)), torch.randn(8), 1.0)


def test_results_come_in_containers_of_their_own(monkeypatch, batch):
    training = make_captured(monkeypatch)
    training.step(*batch, 1.0).clear()
    assert list(training.step(*batch, 1.0)) == ["loss"] and training.step.captured


def test_a_replaced_state_of_the_optimizer_is_captured_anew(device, monkeypatch):
    captured, eager = make_pair(monkeypatch, device)
    graphs = {}
    for batch in draw_batches(4, device=device):
        for training in (captured, eager):
            training.step(*batch, 1.0)
            state = training.optimizer.state[training.model[0].weight]
            state["exp_avg"] = torch.zeros_like(state["exp_avg"])
        graphs |= {id(x): x for x in captured.step.captured.values()}
    assert_same_parameters([captured, eager], rtol=1e-5, atol=1e-7)
    assert len(graphs) == 4


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
def test_the_optimizer_steps_elsewhere_while_the_step_is_stopped(optimizer, device, monkeypatch, batch):
    captured, eager = make_pair(monkeypatch, device, optimizer=optimizer)
    for training in (captured, eager):
        for limit in (0.0, torch.inf):
            training.step(*batch, 1.0, limit)
        before = training.parameters()
        training.optimizer.zero_grad()
        training.model(batch[0]).mean().backward()
        training.optimizer.step()
        assert not any(map(torch.equal, training.parameters(), before))
    assert_same_parameters([captured, eager], rtol=1e-5, atol=1e-7)


def test_learning_rates_that_are_tensors_stay_in_use(device, monkeypatch):
    """Changed in place, and replaced by a number; a reset and a checkpoint leave them where they are."""
    captured, eager = make_pair(monkeypatch, device)
    eager.optimizer.param_groups[0].update(capturable=device != "cpu", foreach=False)
    rates = [torch.tensor(3e-3, device=device) for _ in range(2)]
    for i, batch in enumerate(draw_batches(5, device=device)):
        for training, rate in zip((captured, eager), rates, strict=True):
            (group,) = training.optimizer.param_groups
            group["lr"] = 0.01 if i == 4 else rate
            rate.fill_(1e-3 * i)
            training.step(*batch, 1.0)
            assert i == 4 or training.optimizer.state_dict()["param_groups"][0]["lr"] is rate
    assert_same_parameters([captured, eager], rtol=1e-5, atol=1e-7)
    assert float(rates[0]) == float(rates[1]) and captured.step.captured


def test_views_of_one_memory_are_put_back(monkeypatch):
    allow_captures(monkeypatch)
    model = nn.Module()
    model.register_buffer("sums", torch.zeros(4))
    model.register_buffer("first", model.sums[:1])
    step = CapturedStep(model.sums.add_, modules=[model])
    step(1.0)
    assert torch.equal(model.sums, torch.ones(4)) and step.captured


def test_modes_without_gradients_have_graphs_of_their_own(monkeypatch):
    allow_captures(monkeypatch)
    model = nn.Linear(2, 1)
    step = CapturedStep(model, modules=[model])
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(step(torch.ones(3, 2)), model(torch.ones(3, 2)))
    assert step.graphs.captures == 2


def test_a_model_that_moves_is_looked_at_again(monkeypatch):
    model = nn.Linear(2, 1)
    step = CapturedStep(model, modules=[model])
    assert "got cpu" in step.reason
    model.to("meta")
    allow_captures(monkeypatch)
    assert step(torch.ones(3, 2, device="meta")).is_meta and step.captured and not step.reason


@pytest.mark.parametrize("max_graphs", [1, 2])
def test_a_graph_that_is_not_used_makes_room(max_graphs, device, monkeypatch):
    """It is said once that there may be no more."""
    monkeypatch.setattr(capture, "UNUSED_CALLS", 3)
    trainings = make_pair(monkeypatch, device, max_graphs=max_graphs)
    with pytest.warns(RuntimeWarning, match=f"more than {max_graphs} combinations of shapes and settings") as told:
        for rows in (8, 4, 4, 4, 8, 4, 3, 3, 3, 3, 3, 4, 8):
            step_all(trainings, [(torch.randn(rows, 4, device=device), torch.randn(rows, device=device))])
    step = trainings[0].step
    assert step.reason == "" and len(step.captured) == max_graphs and len(told) == 1
    assert sum(1 for graph in step.captured.values() if graph.inputs[0].shape == (3, 4)) == 1
    assert_same_parameters(trainings, rtol=1e-4, atol=1e-5)


def test_how_long_a_graph_is_kept(device, monkeypatch):
    """For as many calls without it as there may be, and not for one more."""
    monkeypatch.setattr(capture, "UNUSED_CALLS", 3)
    step, held = make_captured(monkeypatch, device, max_graphs=1).step, []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "CapturedStep runs eagerly: more than")
        for rows in (8, 4, 4, 4, 4, 4):
            step(torch.zeros(rows, 4, device=device), torch.zeros(rows, device=device), 1.0)
            held += [graph.inputs[0].shape[0] for graph in step.captured.values()]
    assert held == [8, 8, 8, 8, 4, 4]


def test_a_replaced_parameter_is_captured_anew(device, monkeypatch, batch):
    """In other memory, for the gradients are alive in the first graph's."""
    training = make_captured(monkeypatch, device)
    training.step(*batch, 1.0)
    (before,), pool = training.step.captured.values(), training.step.graphs.pool
    training.model[0].weight.data = training.model[0].weight.data.clone()
    training.step(*batch, 1.0)
    (after,) = training.step.captured.values()
    assert after is not before and training.step.graphs.pool is not pool


def test_a_step_is_pickled_without_its_graphs(monkeypatch):
    step = CapturedStep(torch.sum, modules=[nn.Linear(2, 2)])
    loaded = pickle.loads(pickle.dumps(step))
    assert loaded.reason == step.reason and loaded(torch.ones(3)) == 3
    assert copy.deepcopy(step)(torch.ones(2)) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["step", "hook of a layer", "hook of a gradient"])
def test_a_step_that_waits_for_the_device_falls_back(place):
    training = Training(device="cuda")
    plain = training.step.function
    if place == "step":
        training.step.function = lambda *args: (plain(*args), training.model[0].weight.sum().item())[0]
    elif place == "hook of a layer":
        training.model[0].register_forward_hook(lambda module, inputs, output: print(output.sum().item()))
    else:
        training.model[0].weight.register_hook(lambda gradient: print(gradient.sum().item()))
    (batch,) = draw_batches(1, device="cuda")
    before, stream = training.parameters(), torch.cuda.current_stream()
    with pytest.warns(RuntimeWarning, match=r"the step waits for the device in .*test_capture.py, line"):
        training.step(*batch, 1.0)
    eager = Training(device="cuda", enabled=False)
    assert all(map(torch.equal, before, eager.parameters()))
    eager.step(*batch, 1.0)
    assert_same_parameters([training, eager], rtol=1e-6, atol=1e-7)
    assert torch.cuda.current_stream() == stream  # and the device is well
    torch.rand(3, device="cuda").sum().item()
    other = Training(device="cuda")
    other.step(*batch, 1.0)
    assert other.step.reason == ""


NETWORKS = {  # what a step trains, and the shape of its minibatches
    "lstm": (lambda: nn.LSTM(4, 8, batch_first=True), (6, 5, 4)),
    "cnn": (lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(196, 2)), (6, 1, 9, 9)),
    "bfloat16": (lambda: nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2)), (32, 4)),
    "batch norm": (lambda: nn.Sequential(nn.Linear(4, 9, bias=False), nn.BatchNorm1d(9), nn.Linear(9, 2)), (32, 4)),
    "scripted": (lambda: torch.jit.script(nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 2))), (32, 4)),
}


@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_networks_of_every_kind(kind, optimizer, device, monkeypatch):
    """Parameters and buffers after many steps with a schedule."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    if device == "cpu":
        allow_captures(monkeypatch)
        monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)  # whose LSTM cannot be recorded
    make_model, shape = NETWORKS[kind]

    def train(enabled):
        torch.manual_seed(0)
        model = make_model().to(device)
        own = OPTIMIZERS[optimizer](model.parameters())

        def update(x, weight):
            own.zero_grad()
            with torch.autocast(device, torch.bfloat16, enabled=kind == "bfloat16"):
                out = model(x)
                out = out[0] if isinstance(out, tuple) else out
            (weight * (out.float() - 1.0).square().mean()).backward()
            own.step()
            return out.detach()

        step = CapturedStep(update, modules=[model], optimizers=[own], enabled=enabled)
        generator = torch.Generator().manual_seed(1)
        for i in range(NUM_STEPS[device]):
            own.param_groups[0]["lr"] = 1e-3 * (1 - i / NUM_STEPS[device])
            step(torch.randn(shape, generator=generator).to(device), 1.0 - i / 600)
        assert (step.reason == "") == (enabled is None)
        return model.state_dict()

    torch.testing.assert_close(train(None), train(False), rtol=1e-3, atol=1e-4)


def test_gradients_averaged_over_processes_take_more_warm_ups(monkeypatch, tmp_path):
    """`DistributedDataParallel` times its first ten steps, which no graph can. Over gloo there is none."""
    if not distributed.is_available() or not distributed.is_gloo_available():
        pytest.skip("torch has no gloo")
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        number, reason = count_averaged_steps(monkeypatch)
        assert "gloo, expected NCCL" in capture.find_group_obstacle()
    finally:
        distributed.destroy_process_group()  # after the module, which would wait for gloo's threads with Python's lock
    assert number == 13  # eleven, one that looks for accumulation, and the capture
    assert "on a GPU" in reason


def test_a_second_shape_takes_fewer_warm_ups(monkeypatch):
    allow_captures(monkeypatch)
    model, calls = nn.Linear(4, 1), []
    step = CapturedStep(lambda x: calls.append(len(x)) or model(x) * 1, modules=[model])
    for size in (2, 3, 3):
        step(torch.ones(size, 4))
    assert (calls.count(2), calls.count(3)) == (5, 3) and len(step.captured) == 2


def count_averaged_steps(monkeypatch):
    """How many steps the first call of a captured one makes, and why another is not captured on a CPU."""
    model = nn.Linear(4, 1)
    with capture.use_capture_stream("cpu"):
        averaged = nn.parallel.DistributedDataParallel(model)
    optimizer, calls = torch.optim.Adam(model.parameters()), []

    def update(x):
        calls.append(x)
        optimizer.zero_grad()
        averaged(x).square().mean().backward()
        optimizer.step()

    allow_captures(monkeypatch)
    step = CapturedStep(update, modules=[averaged], optimizers=[optimizer])
    step(torch.ones(2, 4))
    step.reset()
    monkeypatch.undo()
    return len(calls), CapturedStep(update, modules=[averaged]).reason
