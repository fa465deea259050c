"""A device that has no backend, and calls on its tensors. It needs a process of its own, since it stays for good.

A tensor there holds one in host memory. As on MPS, there is no float64.
"""

import warnings

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils import backend_registration

import rl_triton_core as ours
from rl_triton_core import losses

NAME, DEVICE = "other", "other:0"


class OtherTensor(torch.Tensor):
    @staticmethod
    def __new__(cls, held):
        if held.dtype == torch.float64:
            raise TypeError(f"there is no float64 on {NAME}")
        sizes = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype}
        found = torch.Tensor._make_wrapper_subclass(cls, held.shape, **sizes, device=DEVICE)
        found.held = held
        return found

    def __repr__(self):
        return f"OtherTensor({self.held})"

    def data_ptr(self):
        return self.held.data_ptr()

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return compute(function, args, dict(kwargs or {}))


def compute(function, args, kwargs):
    """Compute what is held; results stay on the device unless they are asked for elsewhere."""
    target = kwargs.get("device")
    if target is not None and torch.device(target).type == NAME:
        kwargs["device"] = "cpu"
    results = function(*pytree.tree_map(take_held, args), **pytree.tree_map(take_held, kwargs))
    return results if target is not None and torch.device(target).type == "cpu" else pytree.tree_map(put_back, results)


def take_held(x):
    return x.held if isinstance(x, OtherTensor) else x


def put_back(x):
    return OtherTensor(x) if isinstance(x, torch.Tensor) else x


def fall_back(function, *args, **kwargs):
    """What PyTorch calls for tensors that are made on the device."""
    return compute(function, args, kwargs)


def provide_device():
    backend_registration._setup_privateuseone_for_python_backend(NAME)
    library = torch.library.Library("_", "IMPL")
    library.fallback(fall_back, "PrivateUse1")
    return library


X = torch.randn(6, 5, 9, generator=torch.Generator().manual_seed(0))
ENDS = torch.randn(3, 5, 9, generator=torch.Generator().manual_seed(1)) > 0.8
VALUES = X[2, :, 0].clone()
ROLLOUT = {"rewards": X[0], "values": X[1]}
FLAGS = {"terminated": ENDS[0], "truncated": ENDS[1], "mask": ENDS[2]}
OFFSETS = torch.tensor([0, 3, 3, 20, 45])
FINAL = {"env": torch.tensor([0, 2]), "time": torch.tensor([3, 4]), "value": torch.ones(2), "last_value": VALUES}
ROW, OLD, ADVANTAGES = X[:3, 0].clone()
MINIBATCH = {"old_log_probs": OLD[:5], "advantages": ADVANTAGES[:5]}
NETWORK = X[0, :, :4].clone()
MORE = {"values": X[4, 0], "returns": X[5, 0], "normalize_advantages": True}


def compute_gae_from_final_values(env, time, value, last_value, **options):
    return ours.compute_gae(bootstrap_values=ours.FinalValues(env, time, value, last_value), **options)


def compute_ppo(first, policy, log_std=None, actions=None, **options):
    return losses.ppo_loss(policy(first) if log_std is None else policy(first, log_std), actions, **options)


CALLS = {  # functions and their arguments, first the one by which a gradient is taken
    "GAE": (ours.compute_gae, {**ROLLOUT, **FLAGS, "bootstrap_values": X[2]}),
    "GAE of bfloat16": (ours.compute_gae, {**ROLLOUT, "rewards": X[0].bfloat16(), "bootstrap_values": 0.0}),
    "GAE, discounts": (ours.compute_gae, {**ROLLOUT, "gamma": 0.9 * ENDS[0], "bootstrap_values": 0.0}),
    "GAE, time-major": (ours.compute_gae, {**ROLLOUT, "bootstrap_values": 0.0, "time_dim": 0}),
    "GAE, final values": (compute_gae_from_final_values, {**ROLLOUT, **FINAL, "terminated": ENDS[0]}),
    "GAE, packed": (
        ours.compute_gae,
        {**{k: x.flatten() for k, x in ROLLOUT.items()}, "bootstrap_values": VALUES[:4], "cu_seqlens": OFFSETS},
    ),
    "V-Trace": (ours.compute_vtrace, {**ROLLOUT, "log_ratios": X[3], "bootstrap_values": VALUES}),
    "traces": (ours.compute_eligibility_traces, {"x": X[0], "terminated": ENDS[0], "return_state": True}),
    "sums of integers": (ours.compute_episodic_prefix_sum, {"x": (10 * X[0]).long(), "dones": ENDS[0]}),
    "linear recurrence": (ours.linear_recurrence, {"alpha": X[:3], "beta": X[3:], "reverse": False}),
    "normalised": (ours.normalize_advantages, {"advantages": X[0], "mask": ENDS[0]}),
    "normalised by group": (losses.group_normalize, {"rewards": ROW, "groups": torch.arange(9) % 4}),
    "PPO": (
        compute_ppo,
        {"first": ROW, "policy": losses.LogProbs, "old_log_probs": OLD, "advantages": ADVANTAGES, **MORE},
    ),
    "categorical PPO": (
        compute_ppo,
        {"first": NETWORK, "policy": losses.Categorical, "actions": torch.tensor([0, 1, 2, 3, 1]), **MINIBATCH},
    ),
    "GRPO": (losses.grpo_loss, {"log_probs": X[0], "old_log_probs": X[1], "advantages": VALUES, "mask": ENDS[0]}),
    "GRPO, sequences": (
        losses.grpo_loss,
        {
            **{"log_probs": X[0], "old_log_probs": X[1], "advantages": VALUES, "mask": 2 * ENDS[0].long()},
            **{"aggregation": "sequence-mean", "normalizer": torch.tensor(3)},
        },
    ),
    "tokens": (losses.token_log_probs, {"logits": X[0], "tokens": (2 * X[1, :, 0].abs()).long(), "entropy": True}),
}


def move(tree, device):
    return pytree.tree_map_only(torch.Tensor, lambda x: x.to(device), tree)


def compute_call(name, device, with_gradient):
    """The tensors that a call returns, and the gradient of a weighted sum of them; each in host memory."""
    function, arguments = CALLS[name]
    arguments = move(arguments, device)
    first = next(iter(arguments.values()))
    if with_gradient:
        first.requires_grad_()
    found = [x for x in pytree.tree_leaves(function(**arguments)) if isinstance(x, torch.Tensor)]
    assert {x.device for x in found} == {torch.device(device)}
    if with_gradient:
        sums = [(x * torch.arange(1.0, x.numel() + 1, device=device).view(x.shape)).sum() for x in found]
        found += torch.autograd.grad(sum(x for x in sums if x.requires_grad), first)
        first.requires_grad_(False)
    return [x.detach().cpu() for x in found]


def compare_calls():
    """What differs between each call on the other device and on the CPU, and what was warned of."""
    found = {}
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for name, (_, arguments) in CALLS.items():
            kinds = [False, True] if next(iter(arguments.values())).dtype == torch.float32 else [False]
            try:
                for kind in kinds if name != "normalised by group" else kinds[:1]:
                    got, want = (compute_call(name, device, kind) for device in (DEVICE, "cpu"))
                    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
                found[name] = ""
            except Exception as error:
                found[name] = repr(error)
    return {"calls": found, "warned": [str(x.message) for x in warned]}


def check_other_promises():
    """Errors are those of tensors in host memory, results go where they are asked for, backends are as named."""
    rewards, values, final = move([X[0], X[1], VALUES], DEVICE)
    wrong = [
        ("cu_seqlens", {"rewards": X[0].flatten(), "values": X[1].flatten(), "cu_seqlens": OFFSETS.flip(0)}),
        ("terminated", {**ROLLOUT, "terminated": 0.5 * ENDS[0], "bootstrap_values": 0.0}),
    ]
    for name, arguments in wrong:
        with pytest.raises(ValueError, match=f"{name}: got"):
            ours.compute_gae(**move(arguments, DEVICE))
    for changes in ({"time": torch.tensor([3, 9])}, {"env": torch.tensor([2, 2]), "time": torch.tensor([4, 4])}):
        with pytest.raises(ValueError, match="bootstrap_values"):
            compute_gae_from_final_values(**move({**ROLLOUT, **FINAL, "value": X[0, 0, :2], **changes}, DEVICE))
    for name in ("cpu", "triton"):
        with pytest.raises(ours.BackendUnavailableError, match=f"got '{name}'"):
            ours.compute_gae(rewards, values, bootstrap_values=final, backend=name)
    want = ours.compute_gae(X[0], X[1], bootstrap_values=VALUES, backend="reference")
    out = torch.zeros_like(rewards), torch.zeros_like(rewards)
    got = ours.compute_gae(rewards, values, bootstrap_values=final, backend="reference", out=out)
    assert all(x is y and torch.equal(x.cpu(), z) for x, y, z in zip(got, out, want, strict=True))
    ours.normalize_advantages(rewards, out=rewards)
    assert torch.equal(rewards.cpu(), ours.normalize_advantages(X[0]))
    log_probs = ROW.to(DEVICE).requires_grad_()
    loss = losses.ppo_loss(losses.LogProbs(log_probs), None, *move([OLD, ADVANTAGES], DEVICE)).loss
    (ready,) = losses.get_gradients(loss)
    ready = ready.cpu()
    (2 * loss).backward()
    assert torch.equal(log_probs.grad.cpu(), 2 * ready) and ready.any()
