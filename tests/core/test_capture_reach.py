"""What code can run is found by the names in it."""

import importlib
import json
from functools import partial, wraps

import pytest
import torch
from torch import nn
from torch.nn import functional

from rl_triton_core.reach import Reach, describe_foreign, list_read


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


def test_what_is_at_home_is_no_replacement(monkeypatch):
    """Whosever module it is; nor is what a library's function has made for a class of its own module."""
    assert describe_foreign("json", "dumps", json.dumps, set()) == ""
    assert describe_foreign("json", "dumps", json.loads, set()) and describe_foreign("toml", "dumps", json.dumps, set())
    assert describe_foreign("json", "dumps", wraps(json.dumps)(lambda x: ""), set())
    kind = torch.distributed.rpc.api.RRef
    assert kind.backward.__name__ == "method" and describe_foreign("RRef", "backward", kind.backward, {"torch"}) == ""
    assert describe_foreign("RRef", "to_there", kind.backward, {"torch"})


def test_a_partial_function_that_a_library_makes(tmp_path, monkeypatch):
    """It is known by its name in the source, and by being the one there."""
    (tmp_path / "made_here.py").write_text(
        "from functools import partial\ndef cut(x, n): ...\nhalve = partial(cut, n=2)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    made, known = importlib.import_module("made_here"), {"made_here", "functools"}
    assert describe_foreign("elsewhere", "halve", made.halve, known) == ""
    assert describe_foreign("elsewhere", "halve", partial(made.cut, n=3), known)
    made.cut = partial(made.cut, n=3)
    assert describe_foreign("made_here", "cut", made.cut, known)


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


class Closed:
    def begin(self):
        return self.go_on()

    def go_on(self):
        return self.further()


def test_methods_of_closed_classes():
    """They are known, and not followed."""
    reach, other = (
        Reach([Closed.begin], kinds, (__name__,), (), closed) for kinds, closed in (([], [Closed]), ([Closed], []))
    )
    assert {"begin", "go_on"} <= {key for _, _, own in reach.places.values() for key in own}
    assert "further" in other.names and "further" not in reach.names
