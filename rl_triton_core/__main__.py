"""``python -m rl_triton_core`` is the command ``rl-triton``."""

import sys

from rl_triton_core.cli import main

if __name__ == "__main__":
    sys.exit(main())
