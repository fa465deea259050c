"""A framework's training and ours in two processes, each with data of its own; on CPUs with recorded graphs, too."""

import sys

import gymnasium
import pytest
import torch
from processes import GLOO, run_ranks
from recorded_graphs import allow_captures

from rl_triton_adapters.common.update import release_graphs

sys.modules.setdefault("gym", gymnasium)  # as in conftest.py, which is not imported in these processes
TWO_GPUS = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no two GPUs")]
SETUPS = pytest.mark.parametrize(
    ("device", "kind"),
    [pytest.param("cpu", "gloo", marks=GLOO)] + [pytest.param("cuda", x, marks=TWO_GPUS) for x in ("nccl", "gloo")],
)
EAGER = "eager: "


def train_arms(rank, train, device, arms, folder):
    """What each arm comes to in one process."""
    results, device = {}, f"cuda:{rank}" if device == "cuda" else device
    for arm in arms:
        with pytest.MonkeyPatch.context() as patch:
            if arm == "recorded":
                allow_captures(patch)
            results[arm] = train(rank, device, arm, folder)
    release_graphs()
    return results


def check_training(train, own, device, kind, folder):
    """The tensors that `train` returns by names, and the learning rates, are those of the framework in both processes.

    They are equal in both, except those with a name of `own`: they come from data, which differ.
    """
    arms = {"eager": EAGER + "graphs need tensors on a GPU", "recorded": "captured"}
    if device == "cuda":
        arms = {"ours": "captured" if kind == "nccl" else EAGER + "gradients are averaged over"}
    ranks = run_ranks(train_arms, folder, train, device, ["stock", *arms], str(folder), kind=kind)
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if device == "cpu" else {"rtol": 1e-2, "atol": 1e-3}
    for arm, how in arms.items():
        for rank in ranks:
            assert rank[arm][2].startswith(f"updates are {how}")
            assert rank[arm][1] == pytest.approx(rank["stock"][1], rel=1e-9)
            torch.testing.assert_close(rank[arm][0], rank["stock"][0], **tolerance)
        for name, x in ranks[0][arm][0].items():
            assert torch.equal(x, ranks[1][arm][0][name]) != any(part in name for part in own), name
