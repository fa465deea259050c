"""Measurements: what is computed, by whom, how it is timed, and the pages and figures made from the results.

* `settings.json`: all benchmarks by name, and what they measure; `__main__`: the runner.
* `harness`: how calls are timed; `results`: the files.
* `equations`, `workloads`: what is computed; `providers`: by whom, ours among them; `calls`: both.
* Every other module is a benchmark of its own; `end_to_end`: training loops of frameworks.
* `report`: parts of pages, and figures.

What is installed of adapters and examples comes first, then that of this checkout, with what tests share.
"""

import sys
from pathlib import Path

sys.path += [str(Path(__file__).resolve().parents[1] / name) for name in ("adapters", "examples", "tests")]
