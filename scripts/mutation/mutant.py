"""The ways to break the code: one row each in a table of each backend on which the tests run.

Code is found by its syntax tree, whatever its layout. A pattern is a piece of Python as the code has it: an expression,
or statements one after another.
"""

import ast
import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

BACKENDS = ("reference", "cpu", "triton", "rllib")  # the last is no backend, but what has an environment of its own
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class Mutant(NamedTuple):
    """A piece of code, and the wrong one that takes its place: a row of a table, whose columns these are."""

    name: str
    file: str  # the broken file, from the root of the repository
    function: str
    """Where the code is looked for: a function or class, by its qualified name; in the whole file, if empty."""
    before: str  # a pattern that matches once
    after: str  # what replaces it; nothing, if it is empty
    tests: str  # those that should notice, as pytest's -k selects them

    def break_file(self, root: Path) -> None:
        path = root / self.file
        path.write_text(self.break_code(path.read_text()))

    def break_code(self, source: str) -> str:
        """Text of the file with the wrong code, for a pattern that matches exactly once."""
        tree = ast.parse(source)
        pattern, replacement = parse_pair(self.before, self.after)
        places = [place for scope in find_scopes(tree, self.function) for place in find_places(scope, pattern)]
        if len(places) != 1:
            where = " of ".join(filter(None, (self.function, self.file)))
            raise LookupError(f"mutant {self.name!r}: {self.before!r} is {len(places)} times in {where}, expected once")
        parent, field, first = places[0]
        items = getattr(parent, field)
        if isinstance(items, list):
            items[first : first + len(pattern)] = replacement
            setattr(parent, field, items or [ast.Pass()])
        else:
            setattr(parent, field, replacement[0])
        return ast.unparse(tree)


class Place(NamedTuple):
    """Where a pattern matches: a field of a node, and from which of its items on, if it is a list."""

    parent: ast.AST
    field: str
    first: int


def load_mutants(backend: str) -> list[Mutant]:
    """The mutants of a backend's table: tab-separated values, in quotes where they have several lines."""
    with (Path(__file__).parent / f"{backend}.tsv").open(newline="") as table:
        header, *rows = csv.reader(table, "excel-tab", strict=True)
    if tuple(header) != Mutant._fields:
        raise ValueError(f"{backend}.tsv: got columns {header}, expected {list(Mutant._fields)}")
    return [Mutant(*row) for row in rows]


def parse_pair(old: str, new: str) -> list[list[Any]]:
    """A pattern and its replacement: as expressions, unless one of them is none."""
    try:
        return [[ast.parse(code.strip(), mode="eval").body] for code in (old, new)]
    except SyntaxError:
        return [list(ast.parse(code).body) for code in (old, new)]


def find_scopes(tree: ast.Module, function: str) -> list[ast.AST]:
    """The functions or classes of a module with a qualified name; the module itself, if that is empty."""
    scopes: list[ast.AST] = [tree]
    for name in filter(None, function.split(".")):
        scopes = [x for scope in scopes for x in walk_definitions(scope) if x.name == name]
    return scopes


def walk_definitions(scope: ast.AST) -> Iterator[Any]:
    for child in ast.iter_child_nodes(scope):
        if isinstance(child, DEFINITIONS):
            yield child
        else:
            yield from walk_definitions(child)


def find_places(scope: ast.AST, pattern: list[Any]) -> Iterator[Place]:
    for parent in ast.walk(scope):
        for field, value in ast.iter_fields(parent):
            items = value if isinstance(value, list) else [value]
            for first in range(len(items)):
                if is_same(items[first : first + len(pattern)], pattern):
                    yield Place(parent, field, first)


def is_same(nodes: list[Any], pattern: list[Any]) -> bool:
    """Whether nodes are what a pattern describes."""
    pairs = list(zip(nodes, pattern, strict=False))
    same_types = len(nodes) == len(pattern) and all(type(x) is type(y) for x, y in pairs)
    return same_types and all(ast.dump(x) == ast.dump(y) for x, y in pairs)
