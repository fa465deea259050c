"""`python -m benchmarks.end_to_end`: by name and not by path, for a path would hide frameworks behind files here."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "adapters"))

from benchmarks.end_to_end.run import main

if __name__ == "__main__":
    sys.exit(main())
