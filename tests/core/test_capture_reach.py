"""What code can run is found by the names in it."""

from torch import nn

from rl_triton_core.capture import Reach


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
