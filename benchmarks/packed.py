"""Sequences end to end (cu_seqlens) against the same ones as padded rows, with a mask or all of one length."""

from functools import partial
from typing import Any

import numpy as np
import torch

import rl_triton_core as ours
from benchmarks import harness
from benchmarks.calls import list_tensors
from benchmarks.harness import Options, Rows, Setting
from benchmarks.workloads import ESTIMATORS, draw_sequences
from rl_triton_core.testing import assert_close


def measure(setting: Setting, options: Options) -> Rows:
    """All arms have the same real steps, and their results agree."""
    lengths = np.random.default_rng(0).integers(setting.shortest, setting.longest + 1, setting.sequences)
    mask = torch.arange(int(lengths.max())) < torch.as_tensor(lengths)[:, None]
    arms = make_calls(setting.estimator, lengths, mask.to(options.device))
    got, *others = (list_tensors(call())[0] for call in arms.values())
    for want in others:
        assert_close(got.cpu(), want.cpu()[mask].double())
    about = {"steps": int(lengths.sum()), "padded_steps": mask.numel()}
    return harness.measure_arms(arms, options.device, options.seconds, "packed", **about)


def make_calls(estimator: str, lengths: Any, mask: torch.Tensor) -> dict[str, harness.Call]:
    packed = draw_sequences(estimator, lengths, mask.device.type)
    per_step = {name: x for name, x in packed.items() if name not in ("bootstrap_values", "cu_seqlens")}
    rows = {name: x for name, x in packed.items() if name == "bootstrap_values"}
    for name, x in per_step.items():
        rows[name] = x.new_zeros((*mask.shape, *x.shape[1:]))
        rows[name][mask] = x
    function = getattr(ours, ESTIMATORS[estimator].function)
    arms = {"packed": partial(function, **packed), "masked": partial(function, **rows, mask=mask)}
    return arms | ({"without a mask": partial(function, **rows)} if mask.all() else {})
