"""What only the cpu backend has: compiled losses that are kept on disk."""

import math
from itertools import product

import numpy as np
import pytest
import torch
from losses_cases import check, make
from processes import run_python

from rl_triton_core._internal.loss.equations import Choices
from rl_triton_core.losses import Categorical, LogProbs, ppo_loss

pytest.importorskip("numba")

COMPUTE_VALUE_LOSS = """
    import torch
    from rl_triton_core.losses import LogProbs, ppo_loss

    one, two = torch.tensor([1.0, 1.0]), torch.tensor([1.0, 2.0])
    {before}
    print(float(ppo_loss(LogProbs(one), None, one, one, values=two, returns=one * 0, backend="cpu").value_loss))
"""


def test_a_loss_from_disk_calls_none_of_another_loss_s_functions(tmp_path):
    """Compiled code is linked by names: in the second process, another loss has been compiled in the same order."""
    environment = {"NUMBA_CACHE_DIR": str(tmp_path), "NUMBA_OPT": "3"}
    for before in ("", 'ppo_loss(LogProbs(two), None, one, one, backend="cpu")'):
        assert run_python(COMPUTE_VALUE_LOSS.format(before=before), **environment) == "2.5\n"
    assert list(tmp_path.rglob("*.nbc")), "nothing was kept"


def test_functions_of_different_losses_have_different_names():
    from rl_triton_core._internal.equations.numba import numba_language
    from rl_triton_core._internal.loss.equations import compile_equations, compute_terms

    choices = [Choices("sampled", clipped_value=name) for name in ("none", "sb3")]
    languages = [numba_language(kind, contracts) for kind in (np.float32, np.float64) for contracts in (False, True)]
    terms = [compile_equations(*x, (compute_terms,))["compute_terms"] for x in product(choices, languages)]
    assert len({x.py_func.__qualname__ for x in terms}) == 8


def test_spans(target):
    """More elements than one span has; the least and the largest ratio are in the last."""
    if target.interpreted:
        pytest.skip("too many for the interpreter")
    case = make("gaussian", n=(1 << 13) + 5, size=1)
    case.data["old_log_probs"][-2:] += torch.tensor([4.0, -4.0])
    check(case, target, rtol=1e-5, entropy_coef=0.1)


def test_tiles(target):
    """More elements than a tile has, of several distributions side by side and an old network."""
    for _ in range(1 if target.interpreted else 2):  # the second finds what the first left in its memory
        check(make("multi", n=300 if target.interpreted else 600), target, exact_kl=True, kl_coef=0.3, entropy_coef=0.1)


def test_exp():
    """In float32, over its range and beyond."""
    zero = torch.zeros(1)
    for x in [*torch.linspace(-87, 88.7, 60).tolist(), 100.0, -200.0, math.nan]:
        got = ppo_loss(LogProbs(zero + x), None, zero, zero, backend="cpu").ratio_mean
        want = (zero + x).double().exp().float()
        assert float(got) == pytest.approx(float(want), rel=3e-7, nan_ok=True)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_log(size):
    """In float32: the entropy of a uniform distribution."""
    zero = torch.zeros(1)
    got = ppo_loss(Categorical(torch.zeros(1, size)), zero.long(), zero, zero, backend="cpu")
    assert float(got.entropy) == pytest.approx(math.log(size), rel=3e-7)
