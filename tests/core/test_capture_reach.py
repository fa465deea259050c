"""What code can run is found by the names in it."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from rl_triton_core.capture import Reach, describe_foreign, list_read


class Meta(type):
    def __instancecheck__(cls, x):
        return True


class Kind(metaclass=Meta):
    def __neg__(self):
        return self


class Named:
    scale = staticmethod(abs)
    unread = abs


def measure(x):
    return [*(compute(-y) for y in x)]


def compute(x):
    return Named().scale(nn.functional.relu(x))


def test_what_code_can_run(monkeypatch):
    reach = Reach([measure], [Kind], (__name__,), ("torch",))
    found = {f"{name}.{key}" for name, _, own in reach.places.values() for key in own}
    expected = {
        f"{__name__}.compute",
        "Kind.__neg__",
        "Meta.__instancecheck__",
        "Named.scale",
        "torch.nn.functional.relu",
    }
    assert expected <= found and not {"Named.unread", "torch.nn.functional.elu"} & found and reach.holds()
    for owner, name in ((Kind, "__neg__"), (Kind, "__call__"), (nn.functional, "relu"), (Named, "scale")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, lambda x: x, raising=False)
            assert not reach.holds()
        assert reach.holds()


@pytest.mark.parametrize("own", [functional.relu6, partial(torch.clamp, min=0.0), lambda x: x])
def test_a_foreign_function_is_said(own):
    assert describe_foreign("torch.nn.functional", "relu", functional.relu, {"torch"}) == ""
    assert describe_foreign("torch.nn.functional", "relu", own, {"torch", "functools"}).startswith("torch.nn.")


class Learner:
    def step(self):
        return self.measure() + self.offset

    def measure(self):
        return self.scale * torch.ones(())


def test_what_methods_read():
    """Of the methods that they call, too, but for those of some names and of other packages."""
    read = [list_read(Learner, (Learner.step,), (__name__,), without) for without in ((), ("measure",))]
    assert "scale" in read[0] and "scale" not in read[1] and {"measure", "offset"} <= {*read[1]}
    assert "scale" not in list_read(Learner, (Learner.step,), ("torch",))
