"""Adapters stand on what any user may import: public names of public modules of the core."""

import ast
import importlib
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from rl_triton_adapters.common.versions import explained_import

FOLDER = Path(__file__).resolve().parents[2] / "adapters" / "rl_triton_adapters"
ADAPTERS = {".".join(path.relative_to(FOLDER).with_suffix("").parts): path for path in sorted(FOLDER.rglob("*.py"))}


def imported_from_core(path):
    """Module and name of each import of the core; the name is None where the module is imported as a whole."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names if alias.name.startswith("rl_triton_core"))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rl_triton_core"):
            yield from ((node.module, alias.name) for alias in node.names)


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_an_adapter_imports_only_public_names_of_the_core(adapter):
    for module, name in imported_from_core(ADAPTERS[adapter]):
        assert not any(part.startswith("_") for part in (*module.split("."), name or "")), f"{module}: {name}"
        found = importlib.import_module(module)
        assert name is None or name in getattr(found, "__all__", dir(found))


@pytest.mark.parametrize(
    ("module", "package", "extra"),
    [
        ("sb3", "stable_baselines3", "sb3"),
        ("sb3.contrib", "sb3_contrib", "sb3-contrib"),
        ("torchrl", "torchrl", "torchrl"),
        ("torchrl.losses", "torchrl", "torchrl"),
    ],
)
def test_import_without_a_framework_says_what_to_install(module, package, extra, monkeypatch):
    for name in [package, *(x for x in sys.modules if x.startswith(f"{package}."))]:
        monkeypatch.setitem(sys.modules, name, None)
    module = f"rl_triton_adapters.{module}"
    for name in [x for x in sys.modules if f"{x}.".startswith(f"{module}.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match=rf"pip install rl-triton-core\[{extra}\]"):
        importlib.import_module(module)


def test_a_framework_that_is_too_old_is_told_from_one_that_is_not_there():
    errors = ImportError("no name"), ModuleNotFoundError("no part", name="torch.a"), ModuleNotFoundError("no", name="a")
    texts = []
    for error in errors:
        with pytest.raises(ImportError) as found, explained_import("ours", "torch", "99", "extra"):
            raise error
        texts.append(str(found.value))
    assert [", which lacks what the adapter calls (" in x for x in texts] == [True, True, False]
    start, end = (
        f"ours needs torch 99 or newer, found torch {version('torch')}, ",
        ": pip install rl-triton-core[extra]",
    )
    assert all(x.startswith(start) and x.endswith(end) for x in texts)
