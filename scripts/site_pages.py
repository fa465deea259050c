"""Pages of the site that have no file in docs/: the reference, made of docstrings, and copies of files elsewhere.

MkDocs calls the functions `on_...` when it builds the site (`hooks` in mkdocs.yml).
"""

import ast
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"rl_triton_core": ROOT / "rl_triton_core", "rl_triton_adapters": ROOT / "adapters" / "rl_triton_adapters"}
WITHOUT_ALL = {"rl_triton_core.system_info": ["system_info"]}
"""Public modules that have no `__all__`, and what a user imports from them."""
FOUND_FIRST = {"sb3.md": 4, "install.md": 2}  # for "PPO" and "uninstall", which other pages name, too
COPIED = {
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "notebooks/boundaries.md": "examples/notebooks/boundaries.ipynb",
    "notebooks/captured_ppo.md": "examples/notebooks/captured_ppo.ipynb",
    "notebooks/speed.md": "examples/notebooks/speed.ipynb",
}


def on_config(config: Any) -> Any:
    """Put a page per public module after the overview of the reference."""
    (section,) = (entry["Reference"] for entry in config.nav if "Reference" in entry)
    modules = list(find_public_names())
    section[:] = section[:1] + [
        {package: [{x.partition(".")[2] or x: f"reference/{x}.md"} for x in modules if x.startswith(package)]}
        for package in PACKAGES
    ]
    return config


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    pages = {f"reference/{module}.md": write_reference(module, x) for module, x in find_public_names().items()}
    pages |= {page: copy_page(ROOT / path) for page, path in COPIED.items()}
    for page, text in pages.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any = None, **_: Any) -> str:
    """Links to files that are copied become links to their pages. The search puts some pages before others."""
    if page and page.file.src_uri in FOUND_FIRST:
        page.meta["search"] = {"boost": FOUND_FIRST[page.file.src_uri]}
    for name, path in COPIED.items():
        markdown = markdown.replace(f"](../{path}", f"]({name}")
    return markdown


def find_public_names() -> dict[str, list[str]]:
    """The public names of every public module, by what the modules say in `__all__`; the core's modules come first."""
    found = {}
    for package, folder in PACKAGES.items():
        depth = len(folder.parts) + 2
        for path in sorted(folder.rglob("*.py"), key=lambda path, depth=depth: (len(path.parts) > depth, path)):
            parts = path.relative_to(folder).with_suffix("").parts
            if any(part.startswith("_") and part != "__init__" for part in parts):
                continue
            module = ".".join([package, *(part for part in parts if part != "__init__")])
            names = [name for name in read_all(path) if not name.startswith("__")] or WITHOUT_ALL.get(module, [])
            if names:
                found[module] = names
    return found


def read_all(path: Path) -> list[str]:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and [ast.unparse(x) for x in node.targets] == ["__all__"]:
            return list(ast.literal_eval(node.value))
    return []


def write_reference(module: str, names: list[str]) -> str:
    """A module's page: what the module is for, and its names with signature and docstring."""
    options = "members: false, show_root_heading: false, show_root_toc_entry: false"
    about = f"# {module}\n\n::: {module}\n    options: {{ {options} }}\n"
    functions_first = sorted(names, key=lambda name: (name[0].isupper(), name))
    return "\n".join([about, *(f"::: {module}.{name}\n" for name in functions_first)])


def copy_page(path: Path) -> str:
    """A file of the repository as a page: links into docs/ become links from where the page is."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        return "\n".join(map(write_cell, json.loads(text)["cells"])).replace("](../../docs/", "](../")
    return text.replace("](docs/", "](")


def write_cell(cell: dict[str, Any]) -> str:
    """A cell of a notebook as Markdown, with what it printed."""
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return f"{source}\n"
    printed = "".join(line for output in cell["outputs"] for line in output["text"])
    return f"```python\n{source}\n```\n" + f"\n```text\n{printed.rstrip()}\n```\n" * bool(printed)
