"""The captured update that adapters have in common, in a framework of a few lines."""

import warnings
from contextlib import nullcontext
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from process_state import interrupt
from processes import GLOO
from recorded_graphs import allow_captures
from torch import distributed, nn

from rl_triton_adapters.common.optimizers import fuse_optimizer, is_fused, release_optimizer
from rl_triton_adapters.common.overrides import find_override, find_own, find_settings
from rl_triton_adapters.common.update import CapturedUpdate, DeferredChecks, find_pointers, find_reason


class Algorithm:
    """Moves a network's output towards a target, which the rollout holds, by `scale`."""

    def __init__(self, is_custom=False):
        torch.manual_seed(0)
        self.network, self.scale, self.is_custom = nn.Linear(2, 1), 1.0, is_custom
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=0.1)
        self.rollout = {"inputs": torch.randn(8, 2), "targets": torch.randn(8, 1)}
        self.captured_update = CapturedUpdate(self.update_minibatch)
        self.num_calls = 0

    def find_step(self, **reasons):
        stock = find_reason({"no reason": False, "a loss of its own": self.is_custom})
        return self.captured_update.find_step([self.network], [self.optimizer], stock=stock, **reasons)

    def update_minibatch(self, indices):
        self.num_calls += 1
        error = self.network(self.rollout["inputs"][indices]) - self.rollout["targets"][indices]
        loss = self.scale * error.square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return torch.stack([loss, error.abs().mean()]).detach()

    def update(self, epochs=2):
        self.find_step()
        self.captured_update.keep_settings([self.scale, *find_pointers(self.rollout)])
        return self.captured_update.run([*torch.arange(8).split(4)] * epochs)


CHANGES = {
    "none": lambda x: None,
    "set_scale": lambda x: setattr(x, "scale", 0.5),
    "move_rollout": lambda x: setattr(x, "rollout", {name: 2 * tensor for name, tensor in x.rollout.items()}),
    "replace_optimizer": lambda x: setattr(x, "optimizer", torch.optim.Adam(x.network.parameters(), lr=0.3)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_updates_are_those_without_graphs(change, monkeypatch):
    """A row of statistics per step; what changes is captured anew, and nothing else."""
    eager, ours = Algorithm(), Algorithm()
    want = [eager.update()]
    allow_captures(monkeypatch)
    got, before = [ours.update()], ours.num_calls
    for algorithm, found in ((eager, want), (ours, got)):
        CHANGES[change](algorithm)
        found.append(algorithm.update())
    assert got[0].shape == (4, 2) and ours.captured_update.is_captured
    assert (ours.num_calls > before) == (change != "none")
    assert ours.captured_update.step.optimizers == [ours.optimizer]
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(ours.network.state_dict(), eager.network.state_dict())


KINDS = [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD]
KINDS += [partial(torch.optim.SGD, momentum=0.9), torch.optim.RMSprop]


def transpose(x):
    return x.t().contiguous().t()


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("lay_out", "lay_out_gradient"),
    [(torch.clone, transpose), (torch.clone, lambda x: x.mean().expand_as(x)), (transpose, torch.clone)],
    ids=["transposed gradients", "gradients of one number", "transposed weights"],
)
def test_tensors_of_any_strides_are_stepped_with(lay_out, lay_out_gradient, kind, rate):
    """One kernel for all parameters reads no strides, nor rates that are tensors but for Adam's."""
    found = []
    for fuse in (fuse_optimizer, lambda x: None):
        torch.manual_seed(0)
        weight = lay_out(torch.randn(3, 5)).requires_grad_()
        optimizer = kind([weight], lr=rate)
        fuse(optimizer)
        for _ in range(3):
            weight.grad = lay_out_gradient(torch.randn(3, 5))
            optimizer.step()
        found.append(weight.detach())
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("kind", KINDS)
def test_a_parameter_that_is_there_twice_is_stepped_alone(kind):
    """As PyTorch does it one by one: all at once, it is stepped as it happens. That is said once."""
    found = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for choice in ({"foreach": False}, {}):
            weight = nn.Parameter(torch.ones(3))
            others = [weight, nn.Parameter(torch.ones(2))]
            optimizer = kind([weight, *others], lr=0.1, weight_decay=0.1, **choice)
            for gradient in (1.0, 0.0, -1.0):
                fuse_optimizer(optimizer)
                for x in (weight, *others):
                    x.grad = torch.full_like(x, gradient)
                optimizer.step()
                release_optimizer(optimizer)
            found.append((weight.detach(), optimizer.param_groups[0]["foreach"]))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=0, atol=0)
    assert found[1][1] is None and [x.message.args[0] for x in caught if "stepped alone" in str(x.message)] == [
        f"{type(optimizer).__name__} has a parameter twice: each is stepped alone"
    ]


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.RMSprop])
def test_an_interrupted_step_leaves_an_optimizer_as_it_was(kind):
    """Hooks and settings of before, whatever comes out of the step."""
    optimizer = kind([nn.Parameter(torch.ones(2))], lr=0.1)
    before = {**optimizer.param_groups[0]}
    fuse_optimizer(optimizer)
    handle = optimizer.register_step_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    handle.remove()
    release_optimizer(optimizer)
    assert optimizer.param_groups[0] == before and not is_fused(optimizer)
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks


def test_reasons(monkeypatch):
    """Whose updates these are, and why; they are found anew where they change."""
    allow_captures(monkeypatch)
    algorithm = Algorithm()
    update, step = algorithm.captured_update, algorithm.find_step()
    assert algorithm.find_step() is step and update.describe() == "updates are captured"
    update.recapture()
    assert algorithm.find_step() is not step  # which may have failed
    assert algorithm.find_step(obstacle="a state of several shapes").reason == "a state of several shapes"
    assert not update.stock
    assert update.describe() == "updates are eager: a state of several shapes"
    algorithm.is_custom = True
    assert algorithm.find_step().reason == update.stock == "a loss of its own" and not update.is_captured
    assert update.describe("those of the framework") == "updates are those of the framework: a loss of its own"


def measure(thing, x):
    return thing.scale * nn.functional.mse_loss(x, compute_target(x)) + thing.offset


def compute_target(x):
    return torch.stack([nn.functional.relu(row) for row in x])


def compute_other(x):
    return 2 * compute_target(x)


class Thing:
    offset = property(lambda self: self.scale if self.scale > 1 else "")

    def __init__(self, scale=1.0):
        self.scale, self.kind, self.unread = scale, "a name", 2.0


def find(thing, packages=(__name__, "torch"), inputs=()):
    return find_settings(thing, [measure], packages, inputs)


def test_what_a_function_reads_and_calls(monkeypatch):
    """Functions of functions and of PyTorch, and plain attributes; what is a user's is said."""
    known = find(Thing())
    assert known == find(Thing()) and known[0] == "" and known[1][0] == {"scale": 1.0}
    assert find(Thing(0.5))[1] != known[1] and find(Thing(0.5), inputs=["scale"]) == find(Thing(), inputs=["scale"])
    assert find(Thing(2.0))[0] == "Thing computes offset"
    assert find(Thing(), packages=("torch",))[0] == ""  # it is where it was written
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "compute_target", compute_other)
        assert find(Thing())[0].startswith(f"{__name__}.compute_target is {__name__}.compute_other (")
    for own in (partial(torch.clamp, min=0.0), partial(nn.functional.relu, inplace=True), Mock()):
        monkeypatch.setattr(nn.functional, "relu", own)
        assert find(Thing())[0].startswith("torch.nn.functional.relu is ")
    monkeypatch.setattr(nn.functional, "relu", nn.functional.relu6)
    assert "relu is torch.nn.functional.relu6 (" in find(Thing())[0]


@pytest.mark.parametrize("probability", [0.5, torch.nan])
def test_a_draw_from_nan_is_a_failed_check(probability):
    with DeferredChecks() as checks:
        torch.multinomial(torch.tensor([0.5, probability]), 1)
    assert checks.has_failed() == (probability != 0.5)


@GLOO
@pytest.mark.parametrize("fails", [False, True])
def test_graphs_are_released_before_their_group_ends(fails, tmp_path, monkeypatch):
    """Whatever happens meanwhile, the group ends, and its end is PyTorch's own again."""
    stock, algorithm = distributed.destroy_process_group, Algorithm()
    allow_captures(monkeypatch)
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    algorithm.update()
    captured = algorithm.captured_update.step.captured
    distributed.destroy_process_group(distributed.new_group())
    was_captured = bool(captured)  # another group is none of theirs
    if fails:
        monkeypatch.setattr(algorithm.captured_update, "reset", interrupt)
    with pytest.raises(KeyboardInterrupt) if fails else nullcontext():
        distributed.destroy_process_group()
    assert not distributed.is_initialized() and was_captured and bool(captured) == fails
    assert distributed.destroy_process_group is stock


class Kind:
    scale = property(lambda self: 1.0)

    def run(self):
        return self.compute() * self.scale + max({}.values(), default=0.0)

    def __call__(self):
        return 1.0

    def compute(self):
        return 1.0

    def unread(self):
        return 2.0


OWN = {
    "run": (lambda self: 3.0, True),
    "compute": (lambda self: 3.0, True),
    "scale": (property(lambda self: 3.0), True),
    "__call__": (lambda self: 4.0, True),
    "unread": (lambda self: 3.0, False),
    "further": (lambda self: 3.0, False),
    "values": (lambda self: 3.0, False),
    "__init__": (lambda self: None, False),
    "__eq__": (lambda self, other: True, False),
}


@pytest.mark.parametrize("name", OWN)
def test_which_methods_of_a_users_class_are_gone_around(name):
    own, counts = OWN[name]
    thing = type("Own", (Kind,), {"__module__": "users", name: own, "__hash__": Kind.__hash__})()
    found = find_own([Kind(), thing], [Kind.run], (__name__,))
    where = f" ({__file__}:{own.__code__.co_firstlineno})" if name != "scale" else ""
    assert found.startswith(f"Own has its own {name}{where}" if counts else "") and bool(found) == counts
    assert not find_own([thing], [Kind.run], (__name__,), compute_and_scale) or name in ("run", "__call__")


def compute_and_scale(thing):
    return thing.compute() * thing.scale


def test_which_methods_of_an_object_are_gone_around():
    thing, other = Kind(), type("Other", (), {"__module__": "users"})()
    thing.unread, thing.further = (lambda: 3.0), (lambda: 3.0)
    assert not find_own([thing], [Kind.run], (__name__,))
    thing.compute = lambda: 3.0
    assert find_own([thing], [Kind.run], (__name__,)).startswith("this Kind has its own compute (")
    assert not find_own([thing], [Kind.run], (__name__,), compute_and_scale)
    thing.compute = find_own  # of ours, which stands there while it runs
    assert not find_own([thing], [Kind.run], (__name__,))
    assert find_own([other], [Kind.run], (__name__,)) == f"Other derives from no class of {__name__}"
    unhashable = type("Own", (Kind,), {"__module__": "users", "scale": [2.0]})
    assert find_override(unhashable, ["scale"], (__name__,)) == "Own has its own scale"
