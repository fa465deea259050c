"""What users attach to a model or an optimizer after a capture, or put around a step: all is as in eager steps."""

import warnings
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from test_capture import OPTIMIZERS, Training, assert_same_parameters, draw_batches, make_captured, make_pair
from test_capture_faults import run_steps
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = pytest.mark.covering

STEPS = 4  # before a hook comes, with it, and after it has gone


def halve(x):
    return 0.5 * x


def halve_accumulated(parameter):
    parameter.grad.mul_(0.5)


def halve_gradients(optimizer, *_):
    for group in optimizer.param_groups:
        for x in group["params"]:
            x.grad.mul_(0.5)


def shrink_parameters(optimizer, *_):
    with torch.no_grad():
        for group in optimizer.param_groups:
            for x in group["params"]:
                x.mul_(0.9)


def replace_forward(module):
    forward = module.forward
    module.forward = lambda x: halve(forward(x))
    return lambda: delattr(module, "forward")


def replace_step(optimizer):
    step = optimizer.step
    optimizer.step = lambda: (halve_gradients(optimizer), step())[1]
    return lambda: delattr(optimizer, "step")


modules = nn.modules.module
HOOKS = {  # what comes in the middle of training: each returns its handle, or a function that takes it away
    "forward pre-hook": lambda x: x.model[0].register_forward_pre_hook(lambda _, args: halve(args[0])),
    "forward hook": lambda x: x.model[0].register_forward_hook(lambda _, args, output: halve(output)),
    "backward pre-hook": lambda x: x.model[3].register_full_backward_pre_hook(lambda _, out: (halve(out[0]),)),
    "backward hook": lambda x: x.model[3].register_full_backward_hook(lambda _, into, out: (halve(into[0]),)),
    "parameter hook": lambda x: x.model[0].weight.register_hook(halve),
    "hook after accumulation": lambda x: x.model[0].weight.register_post_accumulate_grad_hook(halve_accumulated),
    "pre-hook of the optimizer": lambda x: x.optimizer.register_step_pre_hook(halve_gradients),
    "post-hook of the optimizer": lambda x: x.optimizer.register_step_post_hook(shrink_parameters),
    "forward pre-hook of all": lambda x: modules.register_module_forward_pre_hook(lambda _, args: halve(args[0])),
    "forward hook of all": lambda x: modules.register_module_forward_hook(lambda _, args, output: halve(output)),
    "backward pre-hook of all": lambda x: modules.register_module_full_backward_pre_hook(
        lambda module, out: (halve(out[0]),) if isinstance(module, nn.Tanh) else None
    ),
    "backward hook of all": lambda x: modules.register_module_full_backward_hook(
        lambda module, into, out: (halve(into[0]),) if isinstance(module, nn.Tanh) else None
    ),
    "pre-hook of all optimizers": lambda x: register_optimizer_step_pre_hook(halve_gradients),
    "post-hook of all optimizers": lambda x: register_optimizer_step_post_hook(shrink_parameters),
    "forward of an instance": lambda x: replace_forward(x.model[0]),
    "step of an instance": lambda x: replace_step(x.optimizer),
}


def train_with(training, attach, device):
    attached = []

    def detach(_):
        for handle in attached:
            (getattr(handle, "remove", handle))()
        attached.clear()

    try:
        return run_steps(training, [lambda x: attached.append(attach(x)), detach], device, each=STEPS)
    finally:
        detach(training)


@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.filterwarnings(
    "ignore:Full backward hook is firing when gradients are computed with respect to module outputs"
)
def test_hooks_that_come_and_go(name, device, monkeypatch):
    """Each makes another graph, and the first one is used again when it has gone."""
    plain, eager = (Training("sgd", device, enabled=False) for _ in range(2))
    captured = make_captured(monkeypatch, device, optimizer="sgd")
    train_with(plain, lambda _: lambda: None, device)
    assert_same_parameters([train_with(x, HOOKS[name], device) for x in (captured, eager)], graphs=2)
    assert not torch.allclose(plain.model[0].weight, eager.model[0].weight, rtol=1e-3)  # the hook does something


def test_a_hook_beside_another(device, monkeypatch):
    """One more is another graph, also where it comes first: halving and clamping do not commute."""
    trainings = make_pair(monkeypatch, device, optimizer="sgd")

    def clamp_first(training):
        training.model[0].register_forward_hook(lambda _, args, output: output.clamp(-0.1, 0.1), prepend=True)

    def halve_last(training):
        training.model[0].register_forward_hook(lambda _, args, output: halve(output))

    assert_same_parameters([run_steps(x, [halve_last, clamp_first], device) for x in trainings], graphs=3)


@pytest.mark.parametrize("name", ["pre-hook of the optimizer", "post-hook of the optimizer"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_hooks_of_an_optimizer_while_a_step_is_stopped(optimizer, name, device, monkeypatch):
    """They run, as in an eager step."""
    captured = make_captured(monkeypatch, device, optimizer=optimizer)
    trainings = captured, Training(optimizer, device, enabled=False)
    for training in trainings:
        HOOKS[name](training)
        training.step(torch.ones(4, 4, device=device), torch.ones(4, device=device), 1.0, 1e9)
        run_steps(training, [], device)
        training.step.resume()
        run_steps(training, [], device)
    assert_same_parameters(trainings, captured=True)


class Halved(nn.Module):
    def forward(self, x):
        return halve(x)


ATTACHED = {
    "parametrization": (
        lambda x: parametrize.register_parametrization(x, "weight", Halved()),
        lambda x: parametrize.remove_parametrizations(x, "weight"),
    ),
    "weight norm": (parametrizations.weight_norm, lambda x: parametrize.remove_parametrizations(x, "weight")),
    "weight norm by a hook": (nn.utils.weight_norm, nn.utils.remove_weight_norm),
    "spectral norm": (nn.utils.spectral_norm, nn.utils.remove_spectral_norm),
    "pruning": (lambda x: prune.l1_unstructured(x, "weight", amount=0.5), lambda x: prune.remove(x, "weight")),
}


@pytest.mark.parametrize("name", ATTACHED)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_reparametrizations_that_come_and_go(name, device, monkeypatch):
    """Parameters that they make are the optimizer's from then on."""

    def change(training, attach_or_detach):
        attach_or_detach(training.model[0])
        known = {id(x) for group in training.optimizer.param_groups for x in group["params"]}
        late = [x for x in training.model.parameters() if id(x) not in known]
        if late:
            training.optimizer.add_param_group({"params": late, "lr": 0.1})

    trainings = make_pair(monkeypatch, device, optimizer="sgd")
    for training in trainings:
        run_steps(training, [partial(change, attach_or_detach=x) for x in ATTACHED[name]], device)
    assert_same_parameters(trainings)
    step = trainings[0].step
    if device == "cuda" and name in ("weight norm by a hook", "pruning"):  # which keep a graph of the stream before
        assert "stream" in step.reason and not step.captured
    else:
        assert step.reason == "" and step.captured


def count_operations(base, method):
    """A mode that counts them, as profilers and counters of floating-point operations do."""

    def count(self, function, types, args=(), kwargs=None):
        self.number += 1
        return function(*args, **(kwargs or {}))

    return type("Counting", (base,), {"number": 0, method: count})


CONTEXTS = {
    "hooks of saved tensors": lambda: saved_tensors_hooks(halve, lambda x: x),
    "a TorchDispatchMode": count_operations(TorchDispatchMode, "__torch_dispatch__"),
    "a TorchFunctionMode": count_operations(TorchFunctionMode, "__torch_function__"),
    "anomaly detection": lambda: torch.autograd.detect_anomaly(check_nan=False),
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_contexts_around_a_step(name, device, monkeypatch):
    """In them the step runs eagerly, and says so once; after them it is replayed."""
    trainings = make_pair(monkeypatch, device, optimizer="sgd")
    said = []
    for training in trainings:
        for make_context in (nullcontext, CONTEXTS[name], nullcontext):
            with warnings.catch_warnings(record=True) as told, make_context() as context:
                warnings.simplefilter("always")
                run_steps(training, [], device)
            said += [text for x in told if (text := str(x.message)).startswith("CapturedStep")]
            assert getattr(context, "number", STEPS) >= STEPS
    assert_same_parameters(trainings)
    (message,) = said
    assert name in message and message.startswith("CapturedStep runs eagerly: ")
    assert trainings[0].step.reason == "" and len(trainings[0].step.captured) == 1


def test_a_default_device_stands_against_nothing(device, monkeypatch):
    training = make_captured(monkeypatch, device)
    for batch in draw_batches(3, device=device):
        with torch.device(device):
            training.step(*batch, 1.0)
    assert training.step.captured and training.step.reason == ""


def test_autocast_is_another_graph(monkeypatch):
    """Switched on, and to another type."""
    training = make_captured(monkeypatch)
    batch = torch.ones(4, 4), torch.ones(4)
    state = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    try:
        for enabled, dtype in ((False, torch.float16), (True, torch.float16), (True, torch.bfloat16), state):
            torch.set_autocast_enabled("cuda", enabled)
            torch.set_autocast_dtype("cuda", dtype)
            training.step(*batch, 1.0)
    finally:
        torch.set_autocast_enabled("cuda", state[0])
        torch.set_autocast_dtype("cuda", state[1])
    assert training.step.graphs.captures == 3 and training.step.reason == ""
