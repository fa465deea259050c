"""The one table of launch settings."""

from __future__ import annotations

from typing import NamedTuple


class Launch(NamedTuple):
    """Settings of one launch."""

    block_time: int
    block_lanes: int
    num_warps: int


TABLE = {
    # steps up to -> settings, for memory in which steps lie side by side, and for memory in which lanes do
    "env-major": (
        (16, Launch(16, 8, 4)),
        (64, Launch(64, 4, 4)),
        (None, Launch(256, 1, 4)),
    ),
    "time-major": ((None, Launch(8, 32, 4)),),
}


def settings(steps: int, lanes: int, lanes_adjacent: bool) -> Launch:
    """The table's row for a shape, with tiles no larger than the window needs."""
    rows = TABLE["time-major" if lanes_adjacent else "env-major"]
    row = next(launch for limit, launch in rows if limit is None or steps <= limit)
    return row._replace(
        block_time=min(row.block_time, next_power_of_2(steps)), block_lanes=min(row.block_lanes, next_power_of_2(lanes))
    )


def next_power_of_2(n: int) -> int:
    """The smallest power of two >= n."""
    return 1 << max(0, n - 1).bit_length()
