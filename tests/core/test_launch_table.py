"""The table of launches: what it is asked for, and its rows narrowed for few lanes."""

import pytest
import torch

import rl_triton_core as ours
from rl_triton_core._internal.launch.kernels import VARIANTS
from rl_triton_core._internal.launch.table import TABLE, narrow_launch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("steps", [1, 7, 64, 4096])
@pytest.mark.parametrize("lanes", [1, 2, 3, 7, 33])
def test_every_thread_has_a_chunk_of_its_own(steps, lanes):
    """Also where lanes are few; and what is narrowed has no more threads than before, and few without a step."""
    for launch in {launch for rows in TABLE.values() for _, launch in rows}:
        narrow = narrow_launch(launch, steps, lanes)
        assert narrow.block_lanes * narrow.chunks == 32 * narrow.num_warps <= 32 * launch.num_warps
        assert narrow == launch or narrow.steps < 2 * max(steps, launch.unroll)


@pytest.mark.parametrize("flags", [torch.bool, torch.float32])
@pytest.mark.parametrize(("compute_returns", "streams"), [(False, 3), (True, 4)])
def test_a_step_counts_inputs_results_and_flags(compute_returns, streams, flags, monkeypatch):
    """In bytes that a thread holds: float32 but for the flags, which are held as they are."""
    backend = pytest.importorskip("rl_triton_core._internal.scan.triton", reason="Triton is not installed")
    if reason := backend.unavailable(DEVICE):
        pytest.skip(reason)
    VARIANTS.clear()
    found, find = [], backend.table.find_launch
    monkeypatch.setattr(backend.table, "find_launch", lambda *size: found.append(size) or find(*size))
    x, ended = torch.zeros(4, 8, device=DEVICE), torch.zeros(4, 8, device=DEVICE, dtype=flags)
    ours.compute_gae(x, x, ended, bootstrap_values=0.0, compute_returns=compute_returns, backend="triton")
    assert found[-1] == (8, 4, 4 * streams + flags.itemsize, "env-major")
