"""Names that PyTorch, Triton and Numba do not document: those that are used are listed, and those listed are there."""

import ast
import importlib
import inspect
import re
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from rl_triton_core._internal.launch.launcher import PRIVATE_NAMES

ROOT = Path(__file__).parents[2]
PRIVATE = {
    "torch": re.compile(r"\._[a-zA-Z]"),
    "numba": re.compile(r"\._[a-zA-Z]"),
    "triton": re.compile(r"triton\.(?!(jit|cdiv|next_power_of_2|language|__version__)\b)"),
}
"""What marks a path as private, by package. Triton documents its language and little else."""
NAMED_TUPLES = {"_asdict", "_fields", "_replace"}


def list_owners():
    """Objects of the packages whose attributes are used."""
    yield from (torch.nn.Module(), torch.optim.SGD([torch.zeros(1)]), torch.zeros(1))
    yield from (torch.distributions.Distribution, torch.autograd.Function)
    with suppress(ImportError):
        yield importlib.import_module("numba").njit(lambda: None)
    with suppress(ImportError):
        yield importlib.import_module("triton.compiler.compiler").CompiledKernel


def list_names(source):
    """Private names of the packages: paths, and attributes of objects whose class the source does not say."""
    tree = ast.parse(source)
    imported = [x for node in ast.walk(tree) for x in list_imports(node)]
    imports = {name: path for name, path, _ in imported}
    yield from (whole for *_, whole in imported)
    for node in ast.walk(tree):
        attributes = [(ast.unparse(node.value), node.attr)] if isinstance(node, ast.Attribute) else []
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr"):
            attributes += [(ast.unparse(node.args[0]), str(getattr(node.args[1], "value", "")))]
        if isinstance(node, ast.keyword) and node.arg is not None:
            attributes += [("", node.arg)]
        for owner, name in attributes:
            root, *parts = owner.split(".")
            if root in imports and all(map(str.isidentifier, parts)):
                yield ".".join([imports[root], *parts, name])
            elif root not in ("self", "cls", "super()") and re.match("_[a-z]", name) and name not in NAMED_TUPLES:
                yield from [name] * any(hasattr(x, name) for x in OWNERS)


def list_imports(node):
    """What a statement imports from the packages: the names that it binds, what they are, and the whole paths."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        within = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        for alias in node.names:
            root, path = alias.name.partition(".")[0], within + alias.name
            if path.partition(".")[0] in PRIVATE:
                yield alias.asname or root, path if alias.asname or within else root, path


def is_private(name):
    """Whether a path, or the name of an attribute, is private."""
    package = name.partition(".")[0]
    return package not in PRIVATE or bool(PRIVATE[package].search(name))


def is_listed(name):
    """Whether a name is listed, or one that it is a part of, or one that is a part of it."""
    return any(f"{x}.".startswith(f"{name}.") or name.startswith(f"{x}.") or x.endswith(f".{name}") for x in LISTED)


OWNERS, LISTED = list(list_owners()), [private.name for private in PRIVATE_NAMES]
TABLE = re.compile(r"PRIVATE_NAMES = \(.*?\n\)", re.DOTALL)


def read_sources():
    """The modules of the core, and of the adapters where they are."""
    paths = [path for name in ("rl_triton_core", "adapters") for path in (ROOT / name).rglob("*.py")]
    return {str(path.relative_to(ROOT)): TABLE.sub("", path.read_text(encoding="utf-8")) for path in paths}


def test_every_private_name_is_listed():
    found = {name: path for path, source in read_sources().items() for name in filter(is_private, list_names(source))}
    assert len(found) > 20
    assert {name: path for name, path in found.items() if not is_listed(name)} == {}


@pytest.mark.skipif(not (ROOT / "adapters").exists(), reason="some names are the adapters'")
def test_every_name_that_is_listed_is_used():
    words = set(re.findall(r"\w+", " ".join(read_sources().values())))
    assert {name.rpartition(".")[2] for name in LISTED} - words == set()


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch\ntorch._C._new()", {"torch._C", "torch._C._new"}),
        ("import torch\nask = getattr(torch._C, '_new', None)", {"torch._C", "torch._C._new"}),
        ("from torch import nn\nnn.modules._new", {"torch.nn.modules._new"}),
        ("from torch.utils import _new as new\nnew.f", {"torch.utils._new", "torch.utils._new.f"}),
        ("import torch.utils._new", {"torch.utils._new"}),
        ("def f(part): return part._backward_hooks, part._mine", {"_backward_hooks"}),
        ("hasattr(optimizer, '_optimizer_step_post_hooks')", {"_optimizer_step_post_hooks"}),
        ("self._buffers, batch._replace(x=1), torch._C", set()),
        ("import triton.language as tl\nimport triton\ntl.load, triton.jit", set()),
        ("from triton import knobs\nknobs.f", {"triton.knobs", "triton.knobs.f"}),
    ],
)
def test_private_names_are_found(source, found):
    assert {name for name in list_names(source) if is_private(name)} == found


@pytest.mark.parametrize("name", PRIVATE_NAMES, ids=lambda private: private.name)
def test_private_names(name):
    """Each is there, in the version that is installed; the page shows the table."""
    package, *rest = name.name.split(".")
    pytest.importorskip(package)
    found, path = importlib.import_module(package), package
    for part in rest:
        path += "." + part
        with suppress(ImportError):
            module = importlib.import_module(path)
            found = getattr(found, part, module)
            continue
        if package == "torch" and part.startswith("_cuda") and not torch.cuda.is_available():
            pytest.skip("PyTorch is built without CUDA")
        if "stream_mismatch" in part and not hasattr(torch.autograd.graph, f"set{part}"):
            pytest.skip("this PyTorch has no such advice")
        if path == "triton.runtime.driver.active" and not torch.cuda.is_available():
            assert hasattr(type(found), part) or part in vars(found)
            break
        if isinstance(found, type) and not hasattr(found, part):  # an attribute of instances
            assert re.search(rf'self\.{part}\b|"{part}"', inspect.getsource(found))
            break
        found = getattr(found, part)
    assert f"| `{name.name}` | {name.purpose} |\n" in (ROOT / "docs/gpu.md").read_text()
