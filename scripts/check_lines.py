"""Fail where a part of the repository has more lines of Python than its limit, which may only be lowered."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMITS = {
    "rl_triton_core": 17_919,
    "adapters": 8_497,
    "tests benchmarks scripts": 40_944,
}
"""By the folders of a part."""


def count_lines(folders: str) -> int:
    """Lines of all modules in some folders."""
    return sum(len(path.read_text().splitlines()) for name in folders.split() for path in ROOT.glob(f"{name}/**/*.py"))


if __name__ == "__main__":
    counts = {folders: count_lines(folders) for folders in LIMITS}
    print(*(f"{folders}: {count} of {LIMITS[folders]} lines" for folders, count in counts.items()), sep="\n")
    sys.exit(any(count > LIMITS[folders] for folders, count in counts.items()))
