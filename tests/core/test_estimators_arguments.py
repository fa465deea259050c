"""What arguments may be, and what is refused although it would compute something."""

from dataclasses import replace

import pytest
import torch
from cases import BACKWARD, ESTIMATORS, FORWARD, LINEAR, Call, get_name, random_case

import rl_triton_core as ours
from rl_triton_core import FinalValues

INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


def make_arguments(estimator, **changes):
    """A good call's."""
    case = random_case(estimator, 3, 5, **({} if estimator is LINEAR else {"valid": 0.8}), **changes)
    return {name: x for name, x in Call(case).kwargs.items() if not name.startswith("compute_")}


# --- FinalValues ------------------------------------------------------------------------------------------------------


def test_the_former_name_of_the_last_value_warns():
    with pytest.warns(DeprecationWarning, match="edge has become last_value"):
        final = FinalValues([0], [1], [2.0], edge=3.0)
    assert final == FinalValues([0], [1], [2.0], 3.0) and replace(final, last_value=4.0).last_value == 4.0
    with pytest.warns(DeprecationWarning, match="edge has become last_value"):
        assert final.edge == 3.0


# --- switches ---------------------------------------------------------------------------------------------------------

SWITCHES = {
    "compute_gae": "compute_returns",
    "compute_vtrace": "compute_advantages",
    "compute_retrace": "compute_advantages",
    "compute_eligibility_traces": "return_state",
    "compute_episodic_prefix_sum": "return_state",
    "linear_recurrence": "reverse",
}


@pytest.mark.parametrize("value", ["no", 1, None])
@pytest.mark.parametrize("estimator", [e for e in ESTIMATORS if e.function.__name__ in SWITCHES], ids=get_name)
def test_switches_are_true_or_false(estimator, value):
    switch = SWITCHES[estimator.function.__name__]
    with pytest.raises(TypeError, match=f"^{switch}: got {value!r}, expected a bool"):
        estimator.function(**{**make_arguments(estimator), switch: value})


def test_the_direction_of_a_recurrence_has_no_default():
    with pytest.raises(TypeError, match="reverse"):
        ours.linear_recurrence(torch.ones(1, 3), torch.ones(1, 3))


# --- flags ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("estimator", (*BACKWARD, *FORWARD), ids=get_name)
def test_integer_flags_are_bool_flags(target, estimator, dtype):
    good = make_arguments(estimator)
    good = {name: x.to(target.device) if isinstance(x, torch.Tensor) else x for name, x in good.items()}
    flags = {name: x.to(dtype) for name, x in good.items() if isinstance(x, torch.Tensor) and x.dtype == torch.bool}
    assert len(flags) >= 2
    want = estimator.function(**good, backend=target.backend)
    got = estimator.function(**{**good, **flags}, backend=target.backend)
    pairs = [(got, want)] if isinstance(want, torch.Tensor) else zip(got, want, strict=True)
    assert all(torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integer_masks_normalise(target, dtype):
    advantages = torch.randn(3, 5, device=target.device)
    mask = torch.tensor([1, 1, 0, 1, 0], device=target.device).expand(3, 5)
    want = ours.normalize_advantages(advantages, mask.bool(), backend=target.backend)
    assert torch.equal(ours.normalize_advantages(advantages, mask.to(dtype), backend=target.backend), want)
