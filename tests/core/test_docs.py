"""The examples in the README, the docs and the docstrings run."""

import doctest
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", "docs/index.md", "docs/estimators.md", "docs/normalization.md", "docs/gpu.md"]
MODULES = ["gae", "vtrace", "retrace", "returns", "traces", "linear"]


@pytest.mark.parametrize("page", PAGES)
def test_python_blocks_run(page):
    path = ROOT / page
    if not path.exists():
        pytest.skip("only the package is here")
    blocks = re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)
    assert blocks
    source = "\n".join(block for block in blocks if "stable_baselines3" not in block)
    exec(compile(source, page, "exec"), {})


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_run(name):
    module = importlib.import_module(f"rl_triton_core.estimators.{name}")
    result = doctest.testmod(module, extraglobs={"torch": importlib.import_module("torch")})
    assert result.attempted
    assert not result.failed
