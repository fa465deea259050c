"""Measure how large and how readable the code is, by part of the repository, and hold it to limits.

    python scripts/code_metrics.py            print the table
    python scripts/code_metrics.py --check    and fail where a limit is exceeded
    python scripts/code_metrics.py --list     and list the functions with a name of one word
    python scripts/code_metrics.py --record after      and write the numbers, and the table of docs/design.md
    python scripts/code_metrics.py --root CHECKOUT --record before     the numbers with which those are compared

A function's length is its lines with code, from `def` to its end, without its docstring, comments, blank lines and the
functions inside of it, which count on their own. A place that every estimator touches is a file that names all of them.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path("benchmarks/results/code_metrics.json")
PAGE = Path("docs/design.md")
MARKS = "<!-- from scripts/code_metrics.py -->\n", "<!-- end of what comes from there -->\n"

GENERATED = re.compile(r"<!-- (\w+): written by make report -->.*?<!-- /\1 -->", re.DOTALL)
"""The parts of a page that nobody writes by hand."""

PARTS = ("rl_triton_core", "adapters", "benchmarks", "tests", "scripts", "examples")
LIMITS: dict[str, dict[str, int]] = {
    "lines": {"benchmarks": 6400, "tests": 23100},
    "longest": dict.fromkeys(PARTS, 80) | {"rl_triton_core": 80},
    "one_word": {"rl_triton_core": 90, "adapters": 24, "benchmarks": 30, "tests": 200, "scripts": 0, "examples": 9},
}
"""The most that a part may have."""
MAX_PLACES = 8
"""The most files that name every estimator."""

PRIMITIVES = frozenset(["exp", "main", "minimum", "scan", "select", "tune"])
"""Names that are one word, because everybody calls it that."""
INTERFACES = frozenset(
    ["coefficients", "readout", "run", "unavailable", "normalize", "backward", "forward", "reset", "step", "visit"]
)
"""Names that an interface sets: ours of a recurrence and of a backend, PyTorch's, Gymnasium's, Python's."""
OPTIONAL = (
    "benchmarks/providers/", "tests/core/test_benchmarks.py", "tests/core/test_fast_path.py", "scripts/code_metrics.py",
)  # fmt: skip
"""Where some estimators stand for all, and a new one may be left out."""
ESTIMATORS = ["gae", "vtrace", "retrace", "lambda_returns", "discounted_returns", "eligibility_traces", "prefix_sum"]


class Function(NamedTuple):
    """A function, and where it is."""

    name: str
    path: Path
    line: int
    length: int
    is_one_word: bool

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.name} ({self.length} lines)"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail where a limit is exceeded")
    parser.add_argument("--list", action="store_true", help="list the functions with a name of one word")
    parser.add_argument("--record", choices=("before", "after"), help=f"write {RESULTS} and the table of {PAGE}")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout to measure")
    options = parser.parse_args()
    functions = {part: find_functions(options.root, part) for part in PARTS}
    measured = measure_parts(options.root, functions)
    print(format_table(measured))
    if options.list:
        print(*(f for part in PARTS for f in functions[part] if f.is_one_word), sep="\n")
    if options.record:
        record_numbers(options.record, {"commit": read_commit(options.root), **measured})
    excesses = list(find_excesses(measured, functions)) if options.check else []
    print(*excesses, sep="\n", end="\n" * bool(excesses))
    return 1 if excesses else 0


def find_functions(root: Path, part: str) -> list[Function]:
    """All functions of a part."""
    return [x for path in list_files(root, part) for x in read_functions(path, path.relative_to(root))]


def list_files(root: Path, part: str) -> list[Path]:
    """The modules of a part."""
    return sorted(path for path in (root / part).rglob("*.py") if "__pycache__" not in path.parts)


def read_functions(path: Path, name: Path) -> Iterator[Function]:
    """The functions of a file."""
    text = path.read_text()
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            one_word = is_one_word(node.name) and not any(map(is_noun, node.decorator_list))
            yield Function(node.name, name, node.lineno, count_lines(node, lines), one_word)


def count_lines(function: ast.FunctionDef | ast.AsyncFunctionDef, lines: Sequence[str]) -> int:
    """A function's lines with code that are its own."""
    own = set(range(function.lineno, end_of(function) + 1))
    if ast.get_docstring(function, clean=False) is not None:
        own -= set(range(function.body[0].lineno, end_of(function.body[0]) + 1))
    for node in ast.walk(function):
        if node is not function and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            own -= set(range(node.lineno, end_of(node) + 1))
    return sum(bool(lines[i - 1].strip()) and not lines[i - 1].lstrip().startswith("#") for i in own)


def end_of(node: ast.stmt) -> int:
    """The last line of a statement."""
    return node.end_lineno or node.lineno


def is_one_word(name: str) -> bool:
    """Whether a name is one word, and neither a primitive's nor set by an interface."""
    return "_" not in name.strip("_") and not name.startswith("__") and name not in PRIMITIVES | INTERFACES


def is_noun(decorator: ast.expr) -> bool:
    """Whether what is decorated is used like a variable: a property, a fixture."""
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return ast.unparse(called) in {"property", "cached_property", "functools.cached_property", "pytest.fixture"}


def measure_parts(root: Path, functions: dict[str, list[Function]]) -> dict[str, Any]:
    """The numbers of every part, and the places that an estimator touches."""
    parts = {part: measure_part(root, part, functions[part]) for part in PARTS}
    return {"parts": parts, "places_per_estimator": [str(x) for x in find_estimator_places(root)]}


def measure_part(root: Path, part: str, functions: list[Function]) -> dict[str, int]:
    """Lines, functions, the distribution of their lengths, and names of one word."""
    lengths = sorted(f.length for f in functions) or [0]
    return {
        "lines": sum(len(path.read_text().splitlines()) for path in list_files(root, part)),
        "functions": len(functions),
        "median": round(statistics.median(lengths)),
        "ninth_decile": lengths[min(len(lengths) * 9 // 10, len(lengths) - 1)],
        "longest": lengths[-1],
        "one_word": sum(f.is_one_word for f in functions),
    }


def find_estimator_places(root: Path) -> list[Path]:
    """Files written by hand that name every estimator, and so have to name a new one."""
    files = [*root.glob("*.md"), *root.glob("docs/*.md"), *(path for part in PARTS for path in list_files(root, part))]
    texts = {path.relative_to(root): GENERATED.sub("", path.read_text()) for path in sorted(files)}
    return [
        path
        for path, text in texts.items()
        if all(name in text.lower() for name in ESTIMATORS) and not str(path).startswith(OPTIONAL)
    ]


def find_excesses(measured: dict[str, Any], functions: dict[str, list[Function]]) -> Iterator[str]:
    """What exceeds its limit, and by how much."""
    for name, limits in LIMITS.items():
        for part, limit in limits.items():
            value = measured["parts"][part][name]
            if value > limit:
                yield f"{part}: {name} is {value}, the limit is {limit}"
    for part, limit in LIMITS["longest"].items():
        yield from (f"too long: {x}" for x in functions[part] if x.length > limit)
    places = measured["places_per_estimator"]
    if len(places) > MAX_PLACES:
        yield f"{len(places)} files name every estimator, the limit is {MAX_PLACES}: {', '.join(places)}"


def format_table(measured: dict[str, Any], before: dict[str, Any] | None = None) -> str:
    """A table in Markdown; with what was before, every cell has both numbers."""
    names = ("lines", "functions", "median", "ninth_decile", "longest", "one_word")
    titles = ("lines", "functions", "median length", "90th percentile", "longest", "names of one word")
    rows = [f"| part | {' | '.join(titles)} |", f"|---|{'---:|' * len(titles)}"]
    for part, values in measured["parts"].items():
        cells = [str(values[name]) for name in names]
        if before is not None:
            cells = [f"{before['parts'][part][name]} → {cell}" for name, cell in zip(names, cells, strict=True)]
        rows.append(f"| `{part}` | {' | '.join(cells)} |")
    places = str(len(measured["places_per_estimator"]))
    if before is not None:
        places = f"{len(before['places_per_estimator'])} → {places}"
    return "\n".join([*rows, "", f"Files that name every estimator: {places}."])


def read_commit(root: Path) -> str:
    """The commit of a checkout.

    Raises:
        SystemExit: There is code that it does not hold.
    """
    status, commit = (
        subprocess.run(["git", *command], cwd=root, check=True, capture_output=True, text=True).stdout.strip()
        for command in (["status", "--porcelain", "--", "*.py"], ["rev-parse", "--short=7", "HEAD"])
    )
    if status:
        raise SystemExit(f"commit first:\n{status}")
    return commit


def record_numbers(when: str, measured: dict[str, Any]) -> None:
    """Write the numbers to the file of results, and the table to its page."""
    path = ROOT / RESULTS
    recorded = json.loads(path.read_text()) if path.exists() else {}
    recorded[when] = measured
    path.write_text(json.dumps(recorded, indent=2) + "\n")
    page = ROOT / PAGE
    page.write_text(write_table(page.read_text(), recorded))


def write_table(page: str, recorded: dict[str, Any]) -> str:
    """The page with the table that the recorded numbers make."""
    before, after = recorded["before"], recorded.get("after", recorded["before"])
    table = format_table(after, before)
    text = f"{MARKS[0]}At commits {before['commit']} → {after['commit']}:\n\n{table}\n{MARKS[1]}"
    return re.sub(f"{re.escape(MARKS[0])}.*{re.escape(MARKS[1])}", lambda _: text, page, flags=re.DOTALL)


if __name__ == "__main__":
    sys.exit(main())
