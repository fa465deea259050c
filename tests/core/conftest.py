"""What the tests of captured steps have in common."""

import pytest


def get_params(request, *names):
    params = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    return {name: params[name] for name in names if name in params}


@pytest.fixture
def batch(request):
    from test_capture import draw_batches

    return next(draw_batches(1, **get_params(request, "device")))


@pytest.fixture
def trainings(request, monkeypatch):
    """The same training twice, whose steps are captured, and eager: on the test's device, with its optimizer."""
    from test_capture import make_pair

    return make_pair(monkeypatch, **get_params(request, "device", "optimizer"))
