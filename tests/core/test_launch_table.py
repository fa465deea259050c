"""The table of launches, narrowed for few lanes."""

import pytest

from rl_triton_core._internal.launch.table import TABLE, narrow_launch


@pytest.mark.parametrize("steps", [1, 7, 64, 4096])
@pytest.mark.parametrize("lanes", [1, 2, 3, 7, 33])
def test_every_thread_has_a_chunk_of_its_own(steps, lanes):
    """Also where lanes are few; and what is narrowed has no more threads than before, and few without a step."""
    for launch in {launch for rows in TABLE.values() for _, launch in rows}:
        narrow = narrow_launch(launch, steps, lanes)
        assert narrow.block_lanes * narrow.chunks == 32 * narrow.num_warps <= 32 * launch.num_warps
        assert narrow == launch or narrow.steps < 2 * max(steps, launch.unroll)
