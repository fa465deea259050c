"""The page "How a call runs" names the files that a call enters, and only files that there are."""

import re
import sys
from itertools import groupby
from pathlib import Path

import pytest
import torch

import rl_triton_core
from rl_triton_core import compute_gae, losses
from rl_triton_core._internal.launch.fast_path import forget_plans
from rl_triton_core._internal.scan.problem import Problem

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


def list_entered(function, *arguments):
    """The package's functions that a call runs, in order: the module of each, its name and its arguments."""
    entered = []

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            module = Path(frame.f_code.co_filename).relative_to(PACKAGE)
            entered.append((str(module), frame.f_code.co_name, {**frame.f_locals}))

    sys.setprofile(note)
    try:
        function(*arguments)
    finally:
        sys.setprofile(None)
    return entered


def find_entered(function, *arguments):
    """The package's modules whose functions a call runs."""
    modules = {module for module, *_ in list_entered(function, *arguments)}
    return {module for module in modules if not module.endswith("__init__.py")}


@pytest.mark.parametrize("function", [call_estimator, call_loss])
def test_the_page_names_every_file_that_a_call_enters(target, function):
    function(target)  # imports what it needs
    forget_plans()
    entered = find_entered(function, target) | find_entered(function, target)
    assert len(entered) > 8
    assert entered <= list_named()


def test_a_problem_goes_through_few_files(target):
    """From the backend's `run` on: to how many files it goes, one after another, and to how many of them again."""
    call_estimator(target)
    forget_plans()
    entered = list_entered(call_estimator, target)
    names = [(module, name) for module, name, _ in entered]
    start = names.index((f"_internal/scan/{target.backend}.py", "run"))
    with_problem = [
        module for module, _, given in entered[start:] if any(isinstance(x, Problem) for x in given.values())
    ]
    stays = [module for module, _ in groupby(with_problem)]
    assert 1 <= len(stays) <= 10
    assert len(stays) - len(set(stays)) <= 4


def test_the_page_is_short_and_its_files_exist():
    assert all((PACKAGE / name).is_file() for name in list_named())
    assert len(PAGE.read_text(encoding="utf-8").splitlines()) <= MOST_LINES
