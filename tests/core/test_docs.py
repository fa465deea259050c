"""The examples in the README, the docs and the docstrings run."""

import ast
import contextlib
import doctest
import importlib.util
import inspect
import io
import json
import math
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import torch

import rl_triton_core

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = ["boundaries", "captured_ppo", "speed"]
PAGES = [
    "README.md",
    *(f"docs/{name}.md" for name in ("boundaries", "install", "quickstart", "idea", "estimators", "gpu", "faq")),
    *(f"docs/{name}.md" for name in ("capture", "losses", "cleanrl", "tokens")),
]
MODULES = ["normalization"]
MODULES += [f"estimators.{name}" for name in ("gae", "vtrace", "retrace", "returns", "traces", "linear")]
MODULES += [f"losses.{name}" for name in ("ppo", "grpo", "group")]


@pytest.mark.parametrize("name", PAGES)
def test_python_blocks_run(name):
    blocks = re.findall(r"```python\n(.*?)```", page(name), re.DOTALL)
    assert blocks
    source = "\n".join(block for block in blocks if "rl_triton_adapters" not in block)
    exec(compile(source, name, "exec"), {})


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebooks_run(name):
    """Cell after cell; what a cell prints is what the notebook shows, where it shows something."""
    namespace = {}
    for cell in json.loads(page(f"examples/notebooks/{name}.ipynb"))["cells"]:
        if cell["cell_type"] == "code":
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(compile("".join(cell["source"]), f"{name}, {cell['id']}", "exec"), namespace)
            shown = ["".join(output["text"]) for output in cell["outputs"]]
            assert shown in ([], [printed.getvalue()]), "jupyter nbconvert --execute --inplace shows it anew"
    assert f"`{name}.ipynb`" in page("docs/quickstart.md")


ERRORS = {  # what an error says, and the arguments that raise it
    "bootstrap_values: got None": {"bootstrap_values": None},
    "together with truncated, expected a value for every truncated step": {
        "truncated": torch.zeros(2, 4, dtype=torch.bool),
        "bootstrap_values": torch.zeros(2),
    },
    "expected flags: 0 or 1 if floating point": {"terminated": torch.full((2, 4), 0.5)},
    "that of rewards": {"values": torch.zeros(4, 2)},
    "expected one of torch.float32": {"values": torch.zeros(2, 4, dtype=torch.int64)},
    "which is not available": {"backend": "triton"},
}


@pytest.mark.parametrize("says", ERRORS)
def test_errors_are_explained(says):
    """The page of questions quotes what the errors really say."""
    if ERRORS[says].get("backend") in rl_triton_core.available_backends("cpu"):
        pytest.skip("Triton is interpreted, so it is available")
    arguments = {"values": torch.zeros(2, 4), "bootstrap_values": 0.0, **ERRORS[says]}
    with pytest.raises((TypeError, ValueError, rl_triton_core.BackendUnavailableError)) as raised:
        rl_triton_core.compute_gae(torch.zeros(2, 4), **arguments)
    assert says in str(raised.value)
    assert f"| `{says}` |" in page("docs/faq.md")


LINKED = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "adapters/README.md"]
LINKED += [f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("name", LINKED)
def test_links_lead_somewhere(name):
    """To a file of the project and a title in it; addresses elsewhere are not looked at."""
    text = re.sub(r"^```.*?^```", "", page(name), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\((?!https?:|mailto:)([^)\s]+)\)", text):
        file, _, anchor = target.partition("#")
        path = (ROOT / name).parent / file if file else ROOT / name
        assert path.exists(), target
        assert not anchor or anchor in find_anchors(path), target


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "docs/design.md", "docs/gpu.md"])
def test_named_files_are_there(name):
    """Under the end of their path; a name in capitals stands for any."""
    folders = (".github", "rl_triton_core", "adapters", "benchmarks", "docs", "examples", "scripts", "tests")
    known = [path.as_posix() for folder in folders for path in (ROOT / folder).rglob("*.*")]
    named = re.findall(r"`([a-z_.]+/[a-z_./-]+\.[a-z]+)`", page(name))
    assert named and [x for x in named if not any(path.endswith(f"/{x}") for path in known)] == []


def find_anchors(path):
    titles = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", re.sub(r"\[(.*?)\]\(.*?\)", r"\1", x.lower())).replace(" ", "-") for x in titles]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_run(name):
    module = importlib.import_module(f"rl_triton_core.{name}")
    result = doctest.testmod(module, extraglobs={"torch": importlib.import_module("torch")})
    assert result.attempted
    assert not result.failed


def page(name):
    path = ROOT / name
    if not path.exists():
        pytest.skip("only the package is here")
    return path.read_text(encoding="utf-8")


ALIKE = {"time_dim": -1, "out": None, "backend": None}  # what the page says once for all
ESTIMATORS = sorted(name for name in rl_triton_core.__all__ if name.startswith(("compute_", "linear_")))


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_table_of_estimators_has_every_argument(name):
    """In the order of the signature, with its defaults."""
    text = page("docs/estimators.md")
    ((section, row),) = re.findall(rf"^\| \[`{name}`\]\(#(.*?)\) \| (.*?) \| .+ \|$", text, re.MULTILINE)
    titles = re.findall("^## (.*)$", text.lower(), re.MULTILINE)
    assert section in [title.replace(",", "").replace(" ", "-") for title in titles]
    written = [x.partition("=") for x in re.findall(r"`(.*?)`", row)]
    found = {name: ast.literal_eval(default) if sign else inspect.Parameter.empty for name, sign, default in written}
    signature = inspect.signature(getattr(rl_triton_core, name))
    defaults = {key: parameter.default for key, parameter in signature.parameters.items()}
    assert found | ALIKE == defaults
    assert list(found) == [name for name in defaults if name not in ALIKE]


def test_every_estimator_is_named():
    """In the README, and on the page with its equation."""
    for name in ESTIMATORS:
        assert f"`{name}`" in page("README.md")
        assert re.search(rf"^\| `{name}` \| .* = .* \|$", page("docs/estimators.md"), re.MULTILINE)


def test_rooms_import_from_below():
    """In the order that CONTRIBUTING.md states, imports within functions included."""
    (order,) = re.findall(r"`(arguments ← [^`]*)`", page("CONTRIBUTING.md"))
    level = {name: i for i, group in enumerate(order.split("←")) for name in map(str.strip, group.split(","))}
    above = {"_version", "__main__", "cli", "system_info", "testing"}
    rooms = {find_room(name) for name in MODULE_IMPORTS}
    assert rooms - above == set(level)
    for name, others in MODULE_IMPORTS.items():
        for other in {find_room(x) for x in others} - {find_room(name)} - above:
            assert level[other] < level.get(find_room(name), math.inf), f"{name} imports {other}"


def test_modules_have_no_import_circle():
    """Neither within a room."""
    own = {name: set(others) - {name} for name, others in MODULE_IMPORTS.items() if not name.endswith("__init__")}
    TopologicalSorter(own).prepare()


def test_the_worked_example_imports_the_public_module_alone():
    lines = [x for x in page("examples/upgo.py").splitlines() if "import" in x and "rl_triton_core" in x]
    assert [x.split()[:2] for x in lines] == [["from", "rl_triton_core.extending"]]
    assert f"```python\n{page('examples/upgo.py')}```" in page("docs/adding-an-estimator.md"), "the page shows it"


def test_the_reference_has_every_public_module():
    """The overview has a row for each of them, and all that pages import is public."""
    site_pages = pytest.importorskip("site_pages")
    modules = site_pages.find_public_names()
    assert re.findall(r"^\| `(\S+)` \|", page("docs/reference.md"), re.MULTILINE) == list(modules)
    modules["rl_triton_core"] += modules["rl_triton_core.estimators"]
    assert set(rl_triton_core.__all__) - {"__version__"} == set(modules["rl_triton_core"])
    for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for module, names in re.findall(
            r"^from (rl_triton_\S+) import (\w+(?:, \w+)*)$", path.read_text(), re.MULTILINE
        ):
            assert set(names.split(", ")) <= set(modules.get(module, ())), f"{path.name}: {module}"


def test_links_to_copied_files_become_links_to_their_pages():
    site_pages = pytest.importorskip("site_pages")
    assert site_pages.on_page_markdown("[x](../CONTRIBUTING.md#house-rules)") == "[x](contributing.md#house-rules)"
    assert "](docs/" not in "".join(map(site_pages.copy_page, map(ROOT.joinpath, site_pages.COPIED.values())))
    notebook = site_pages.copy_page(ROOT / "examples" / "notebooks" / "boundaries.ipynb")
    assert "](../boundaries.md)" in notebook and "```python\nimport torch" in notebook
    assert "```text" in notebook and " 33    32    31" in notebook


def find_imports(path):
    """The modules of the package that a file imports, wherever it does."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.ImportFrom)]
    names = [(node.module, f"{node.module}.{x.name}") for node in nodes for x in node.names]
    own = [(module, name) for module, name in names if module.split(".")[0] == "rl_triton_core"]
    return {name if name in MODULES_BY_NAME else module for module, name in own}


def find_room(name):
    """The module or folder of the package, or of `_internal`, in which a module lies."""
    parts = [*name.split(".")[1:], "__init__"]
    return parts[parts[0] == "_internal"]


MODULES_BY_NAME = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in (ROOT / "rl_triton_core").rglob("*.py")
}
MODULE_IMPORTS = {x: find_imports(path) for x, path in MODULES_BY_NAME.items() if x != "rl_triton_core._internal"}
