"""Fail where a part of the repository has more lines of Python than its limit in line_limits.txt, which only falls."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


if __name__ == "__main__":
    too_many = False
    for line in (ROOT / "scripts" / "line_limits.txt").read_text().splitlines():
        limit, *folders = line.split()
        paths = (path for name in folders for path in ROOT.glob(f"{name}/**/*.py"))
        count = sum(len(path.read_text().splitlines()) for path in paths)
        print(f"{' '.join(folders)}: {count} of {limit} lines")
        too_many |= count > int(limit)
    sys.exit(too_many)
