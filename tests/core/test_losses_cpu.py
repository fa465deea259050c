"""What only the cpu backend has: compiled losses that are kept on disk."""

import pytest
from test_backends import python

from rl_triton_core._internal.loss_equations import Choices

pytest.importorskip("numba")

COMPUTE_VALUE_LOSS = """
    import torch
    from rl_triton_core.losses import ppo_loss, value_loss

    one, two = torch.tensor([1.0, 1.0]), torch.tensor([1.0, 2.0])
    {before}
    print(float(value_loss(two, one * 0, backend="cpu")))
"""


def test_a_loss_from_disk_calls_none_of_another_loss_s_functions(tmp_path):
    """Compiled code is linked by names: in the second process, another loss has been compiled in the same order."""
    environment = {"NUMBA_CACHE_DIR": str(tmp_path), "NUMBA_OPT": "3"}
    for before in ("", 'ppo_loss(two, one, one, backend="cpu")'):
        assert python(COMPUTE_VALUE_LOSS.format(before=before), **environment) == "2.5\n"
    assert list(tmp_path.rglob("*.nbc")), "nothing was kept"


def test_functions_of_different_losses_have_different_names():
    from rl_triton_core._internal.backends.cpu_losses import compile_equations

    variants = [(Choices("none", clipped_value=name), wide) for name in ("none", "sb3") for wide in (False, True)]
    names = [{x.py_func.__qualname__ for x in compile_equations(*variant).values()} for variant in variants]
    assert len(set().union(*names)) == sum(map(len, names))
