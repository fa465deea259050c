"""The page "How a call runs" names the files that a call enters, and only files that there are."""

import re
import sys
from pathlib import Path

import pytest
import torch

import rl_triton_core
from rl_triton_core import compute_gae, losses
from rl_triton_core._internal.launch.fast_path import forget_plans

PACKAGE = Path(rl_triton_core.__file__).parent
PAGE = PACKAGE.parent / "docs" / "how-a-call-runs.md"
MOST_LINES = 60
STEPS, LOGITS = torch.zeros(4, 9), torch.zeros(8, 3)


def call_estimator(target):
    x = STEPS.to(target.device)
    return compute_gae(x, x, x == 1, bootstrap_values=0.0, backend=target.backend)


def call_loss(target):
    logits = LOGITS.to(target.device).requires_grad_()
    x, actions = logits[:, 0].detach(), logits[:, 0].long()
    options = {"normalize_advantages": True, "backend": target.backend}
    return losses.ppo_loss(losses.Categorical(logits), actions, x, x, **options)


def list_named():
    return set(re.findall(r"`([\w/]+\.py)`", PAGE.read_text(encoding="utf-8")))


def find_entered(function, *arguments):
    """The package's modules whose functions a call runs."""
    entered = set()

    def note(frame, event, _):
        if event == "call":
            entered.add(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        function(*arguments)
    finally:
        sys.setprofile(None)
    own = (Path(name).relative_to(PACKAGE) for name in entered if name.startswith(str(PACKAGE)))
    return {str(path) for path in own if path.name != "__init__.py"}


@pytest.mark.parametrize("function", [call_estimator, call_loss])
def test_the_page_names_every_file_that_a_call_enters(target, function):
    forget_plans()
    entered = find_entered(function, target) | find_entered(function, target)
    assert len(entered) > 8
    assert entered <= list_named()


def test_the_page_is_short_and_its_files_exist():
    assert all((PACKAGE / name).is_file() for name in list_named())
    assert len(PAGE.read_text(encoding="utf-8").splitlines()) <= MOST_LINES
