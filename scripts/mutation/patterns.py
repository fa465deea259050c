"""Find code by its syntax tree, whatever its layout, and replace it.

A pattern is a piece of Python as the code has it: an expression, or statements one after another.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any, NamedTuple

DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class NoUniquePlace(LookupError):
    """A pattern that does not match where it should, or matches more often."""


class Place(NamedTuple):
    """Where a pattern matches: a field of a node, and from which of its items on, if it is a list."""

    parent: ast.AST
    field: str
    first: int


def replace_code(source: str, old: str, new: str, function: str = "") -> str:
    """Replace the code that a pattern matches.

    Args:
        source: A module's text.
        old: The pattern.
        new: What replaces it; nothing, if it is empty.
        function: The function or class to search, by its qualified name; the whole module, if it is empty.

    Returns:
        The module's new text.

    Raises:
        NoUniquePlace: The pattern does not match exactly once.
    """
    tree = ast.parse(source)
    pattern, replacement = parse_pair(old, new)
    places = list(find_places(find_scope(tree, function), pattern))
    if len(places) != 1:
        raise NoUniquePlace(f"{count_places(len(places))} for {old!r}, expected 1")
    parent, field, first = places[0]
    items = getattr(parent, field)
    if isinstance(items, list):
        items[first : first + len(pattern)] = replacement
        setattr(parent, field, items or [ast.Pass()])
    else:
        setattr(parent, field, replacement[0])
    return ast.unparse(tree)


def count_places(number: int) -> str:
    """'no place', '1 place' or 'n places'."""
    return f"{number or 'no'} place{'s' * (number > 1)}"


def parse_pair(old: str, new: str) -> list[list[Any]]:
    """A pattern and its replacement: as expressions, unless one of them is none."""
    try:
        return [[ast.parse(code.strip(), mode="eval").body] for code in (old, new)]
    except SyntaxError:
        return [list(ast.parse(code).body) for code in (old, new)]


def find_places(scope: ast.AST, pattern: list[Any]) -> Iterator[Place]:
    """Every place where a pattern matches."""
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


def find_scope(tree: ast.Module, function: str) -> ast.AST:
    """A function or class of a module by its qualified name; the module itself, if that is empty."""
    scope: ast.AST = tree
    for name in filter(None, function.split(".")):
        named = [x for x in walk_definitions(scope) if x.name == name]
        if len(named) != 1:
            raise NoUniquePlace(f"{count_places(len(named))} for a definition of {function!r}, expected 1")
        scope = named[0]
    return scope


def walk_definitions(scope: ast.AST) -> Iterator[Any]:
    """The functions and classes of a scope, without those inside of them."""
    for child in ast.iter_child_nodes(scope):
        if isinstance(child, DEFINITIONS):
            yield child
        else:
            yield from walk_definitions(child)
