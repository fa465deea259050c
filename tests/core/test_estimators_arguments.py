"""What arguments may be, and what is refused although it would compute something."""

import numpy as np
import pytest
import torch
from cases import BACKWARD, ESTIMATORS, FORWARD, LINEAR, Call, get_name, random_case
from gpu_checks import forbid_waiting

import rl_triton_core as ours
from rl_triton_core import FinalValues


def make_arguments(estimator, **changes):
    case = random_case(estimator, 3, 5, **({} if estimator is LINEAR else {"valid": 0.8}), **changes)
    return {name: x for name, x in Call(case).kwargs.items() if not name.startswith("compute_")}


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


@pytest.mark.parametrize("value", [0.5, -1.0, 2.0, float("nan")])
@pytest.mark.parametrize("estimator", [*BACKWARD, *FORWARD], ids=get_name)
def test_floating_point_flags_are_zero_or_one(target, estimator, value):
    """Where they are read: what stands in masked cells does not matter. Calls on the fast path are not validated."""
    if target.device == "cuda":
        pytest.skip("a GPU checks once for each kind of call")
    good = make_arguments(estimator)
    names = [name for name, x in good.items() if isinstance(x, torch.Tensor) and x.dtype == torch.bool]
    good = {name: x.float() if name in names else x for name, x in good.items()}
    row, column = good["mask"].nonzero()[0].tolist()
    with ours.set_fast_path(False):
        for name in names:
            bad = good[name].clone()
            bad[row, column] = value
            with pytest.raises(ValueError, match=f"^{name}: got {value:g} among its values, expected flags: 0 or 1"):
                estimator.function(**{**good, name: bad}, backend=target.backend)
            if name != "mask":
                bad = torch.where(good["mask"] == 0, value, good[name])
                estimator.function(**{**good, name: bad}, backend=target.backend)


@pytest.mark.parametrize("estimator", BACKWARD, ids=get_name)
def test_negative_discounts(estimator):
    good = make_arguments(estimator)
    row, column = good["mask"].nonzero()[0].tolist()
    gamma = torch.ones(3, 5)
    gamma[row, column] = -0.1
    with pytest.raises(ValueError, match="^gamma: got -0.1 among its values, expected discounts >= 0"):
        estimator.function(**{**good, "gamma": gamma})
    estimator.function(**{**good, "gamma": torch.where(good["mask"], 0.9, -1.0)})


@pytest.mark.gpu
def test_a_gpu_looks_at_values_once(monkeypatch):
    from rl_triton_core._internal.arguments import validation

    seen = set()
    monkeypatch.setattr(validation, "SEEN_ON_GPU", seen)
    rewards, flags = torch.ones(2, 3, device="cuda"), torch.zeros(2, 3, device="cuda")
    ours.compute_discounted_returns(rewards, flags, bootstrap_values=0.0)
    assert len(seen) == 1
    with forbid_waiting():
        ours.compute_discounted_returns(rewards[:, :2], flags[:, :2], bootstrap_values=0.0)


@pytest.mark.parametrize("duplicate", [3.0, torch.nan])
def test_final_values_have_one_value_for_each_step(duplicate):
    rewards, values = torch.ones(2, 3), torch.zeros(2, 3)
    for same in (duplicate, torch.tensor(duplicate)):
        final = FinalValues([0, 0], [2, 2], torch.tensor([duplicate, float(same)]), 0.0)
        ours.compute_gae(rewards, values, bootstrap_values=final)
    with pytest.raises(ValueError, match="^bootstrap_values: got FinalValues with two values for the same step"):
        ours.compute_gae(rewards, values, bootstrap_values=FinalValues([0, 0], [2, 2], [duplicate, 4.0], 0.0))


def test_a_discount_that_does_not_fit_is_named_before_its_values_are_looked_at():
    x, mask = torch.ones(3, 4), torch.ones(3, 4, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"^gamma: got shape \(3,\), expected \(3, 4\)"):
        ours.compute_gae(x, x, bootstrap_values=0.0, mask=mask, gamma=torch.ones(3))


def test_bootstrap_values_of_one_step(target):
    x, offsets = torch.ones(1, device=target.device), torch.tensor([0, 1], device=target.device)
    options = {"bootstrap_values": x[None], "truncated": x > 0, "cu_seqlens": offsets, "gamma": 0.5}
    assert ours.compute_discounted_returns(x, **options, backend=target.backend).tolist() == [1.5]


def test_bootstrap_values_of_as_many_sequences_as_steps(target):
    """Per sequence or per step: with an empty sequence these differ."""
    rewards, cu_seqlens = torch.zeros(2, device=target.device), torch.tensor([0, 0, 2], device=target.device)
    bootstrap = torch.tensor([1.0, 2.0], device=target.device)

    def call(bootstrap, **changes):
        given = {"bootstrap_values": bootstrap, "cu_seqlens": cu_seqlens, "gamma": 1.0, "backend": target.backend}
        return ours.compute_discounted_returns(rewards, **{**given, **changes}).tolist()

    with pytest.raises(ValueError, match=r"^bootstrap_values: got shape \(2,\), of as many sequences as steps"):
        call(bootstrap)
    assert call(bootstrap[:, None]) == [2, 2]
    assert call(bootstrap[None]) == [2, 2]
    assert call(bootstrap.flip(0)[:, None]) == call(bootstrap.flip(0)[None]) == [1, 1]
    first = torch.tensor([True, False], device=target.device)
    assert call(bootstrap, truncated=first) == call(bootstrap[None], truncated=first) == [1, 2]


def test_a_decay_per_step_or_per_feature(target):
    """Where both have one shape it has to be said which is meant."""
    x, decay = torch.ones(2, 3, 2, 3, device=target.device), torch.rand(2, 3, device=target.device)
    with pytest.raises(ValueError, match=r"^decay: got shape \(2, 3\), that of the steps and that of the features"):
        ours.compute_eligibility_traces(x, decay=decay, backend=target.backend)
    for explicit in (decay[None, None], decay[:, :, None, None]):
        got = ours.compute_eligibility_traces(x, decay=explicit, backend=target.backend)
        want = ours.compute_eligibility_traces(x, decay=explicit.expand(x.shape).clone(), backend=target.backend)
        assert torch.equal(got, want)


def test_tensors_that_are_no_plain_memory():
    good = torch.ones(2, 3)
    with pytest.raises(TypeError, match="^values: got layout torch.sparse_coo"):
        ours.compute_gae(good, good.to_sparse(), bootstrap_values=0.0)
    negative = torch.ones(2, 3, dtype=torch.complex64).conj().imag
    assert negative.is_neg()
    with pytest.raises(ValueError, match="^values: got a view with its negative bit set"):
        ours.compute_gae(good, negative, bootstrap_values=0.0)
    with pytest.raises(ValueError, match="^mask: got a view with its negative bit set"):
        ours.normalize_advantages(good, negative)


def test_float64_on_the_triton_backend_names_the_argument(target):
    if target.backend != "triton":
        pytest.skip("the others compute in float64")
    one = torch.ones(2, 3, device=target.device)
    final = FinalValues([0], [2], np.array([1.0]), 0.0)
    with pytest.raises(TypeError, match="^bootstrap_values: got dtype torch.float64 on the triton backend"):
        ours.compute_gae(one, one, bootstrap_values=final, backend="triton")


def test_lists_in_final_values_do_not_depend_on_defaults(target):
    """Neither on the default device nor on the default dtype, which would also turn results float64."""
    one = torch.ones(2, 3, device=target.device)
    final = FinalValues([0], [1], [2.0], 3.0)
    want = ours.compute_gae(one, one, bootstrap_values=final, backend=target.backend)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            got = ours.compute_gae(one, one, bootstrap_values=final, backend=target.backend)
            with pytest.raises(ValueError, match="^bootstrap_values.env: got index 7"):
                ours.compute_gae(one, one, bootstrap_values=FinalValues([7], [1], [2.0], 3.0), backend=target.backend)
    finally:
        torch.set_default_dtype(torch.float32)
    assert got.returns.dtype == torch.float32 and torch.equal(got.returns, want.returns)
    wide = ours.compute_gae(one.cpu().double(), one.cpu().double(), bootstrap_values=final)
    assert wide.returns.dtype == torch.float64
