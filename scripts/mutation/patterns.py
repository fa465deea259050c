"""Find code by its syntax tree, whatever its layout and its local variables' names, and replace it.

A pattern is a piece of Python: an expression, or statements one after another. Where the code has a local variable, the
pattern has any name, the same one wherever that variable occurs and another one for every other variable. Names of the
module, built-in names, attributes, keywords and constants are as they are. Three dots stand for an expression; in a
list, of arguments or of statements, they stand for any number of its items. The replacement takes over what the names
and the dots stood for.
"""

from __future__ import annotations

import ast
import builtins
import copy
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DEFINITIONS = (*FUNCTIONS, ast.ClassDef)
BUILTINS = frozenset(dir(builtins))
IDENTIFIERS = {ast.Name: "id", ast.arg: "arg", ast.FunctionDef: "name", ast.ExceptHandler: "name"}
"""Where a node holds a name that may be that of a local variable."""
IGNORED = frozenset({"kind", "type_comment"})


class NoUniquePlace(LookupError):
    """A pattern that does not match where it should, or matches more often."""


class Fragment(NamedTuple):
    """A parsed pattern or replacement: one expression, or statements."""

    nodes: list[ast.AST]
    is_expression: bool


class Match(NamedTuple):
    """What the names of a pattern and its dots stand for."""

    names: dict[str, str]
    gaps: tuple[Any, ...] = ()


class Place(NamedTuple):
    """Where a pattern matches: a field of a node, and for a list the part of it."""

    parent: ast.AST
    field: str
    first: int | None
    end: int | None
    outermost: ast.AST | None
    match: Match


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
        NoUniquePlace: The pattern does not match exactly once, or the replacement reads a variable that it has not.
    """
    tree = ast.parse(source)
    pattern, replacement = parse_pair(old, new)
    places = find_places(tree, pattern, function)
    if len(places) != 1:
        raise NoUniquePlace(f"{count_places(len(places))} for {old!r}, expected 1")
    replace_place(places[0], replacement, find_module_names(tree) | BUILTINS)
    return ast.unparse(tree)


def count_places(number: int) -> str:
    """'no place', '1 place' or 'n places'."""
    return f"{number or 'no'} place{'s' * (number > 1)}"


def parse_pair(old: str, new: str) -> tuple[Fragment, Fragment]:
    """Parse a pattern and its replacement: as expressions, unless one of them is none."""
    expressions = [parse_expression(old), parse_expression(new)]
    if all(expressions):
        pair = Fragment([expressions[0]], True), Fragment([expressions[1]], True)
    else:
        pair = parse_statements(old), parse_statements(new)
    gaps = [count_gaps(part) for part in pair]
    if gaps[1] not in (0, gaps[0]):
        raise ValueError(f"got {gaps[1]} times three dots in {new!r}, expected {gaps[0]} as in {old!r}, or none")
    return pair


def count_gaps(fragment: Fragment) -> int:
    """How often there are three dots."""
    return sum(isinstance(x, ast.expr) and is_gap(x) for node in fragment.nodes for x in ast.walk(node))


def parse_expression(code: str) -> ast.expr | None:
    """Parse an expression; None where it is none."""
    if not code.strip():
        return None
    try:
        return ast.parse(f"({code.strip()}\n)", mode="eval").body
    except SyntaxError:
        return None


def parse_statements(code: str) -> Fragment:
    """Parse statements, those of a function's end among them."""
    indented = "".join(f"    {line}\n" for line in code.splitlines())
    wrapper: Any = ast.parse(f"for _ in _:\n{indented or '    pass'}").body[0]
    return Fragment(wrapper.body if code.strip() else [], False)


def find_places(tree: ast.Module, pattern: Fragment, function: str = "") -> list[Place]:
    """Every place in a module, or in one of its functions, where a pattern matches."""
    scope = find_scope(tree, function)
    outermost = next((x for x in walk_outermost_functions(tree) if function and scope in ast.walk(x)), None)
    find = find_expressions if pattern.is_expression else find_statements
    return [place for field in walk_fields(scope, outermost) for place in find(pattern, *field)]


def find_expressions(
    pattern: Fragment, outermost: ast.AST | None, parent: ast.AST, field: str, value: Any
) -> Iterator[Place]:
    """Every place in a field where a pattern of one expression matches."""
    for i, child in enumerate(value if isinstance(value, list) else [value]):
        for match in Matcher(outermost).match_node(pattern.nodes[0], child, Match({})):
            yield Place(parent, field, i if isinstance(value, list) else None, None, outermost, match)


def find_statements(
    pattern: Fragment, outermost: ast.AST | None, parent: ast.AST, field: str, value: Any
) -> Iterator[Place]:
    """Every place in a field where a pattern of statements matches."""
    if not isinstance(value, list) or not isinstance(value[0], ast.stmt):
        return
    for first in range(len(value)):
        for match, end in Matcher(outermost).match_items(pattern.nodes, value, first, Match({})):
            yield Place(parent, field, first, end, outermost, match)


class Matcher:
    """Compares patterns with code of a module, or of one of its outermost functions."""

    def __init__(self, outermost: ast.AST | None) -> None:
        self.outermost = outermost

    def match_node(self, pattern: Any, node: Any, match: Match) -> Iterator[Match]:
        """Every way in which a node is what a pattern describes, given what names stand for already."""
        if isinstance(pattern, list):
            if isinstance(node, list):
                yield from (one for one, end in self.match_items(pattern, node, 0, match) if end == len(node))
        elif is_gap(pattern) and isinstance(node, ast.AST):
            yield match._replace(gaps=(*match.gaps, node))
        elif type(pattern) is type(node):
            if isinstance(pattern, ast.AST):
                yield from self.match_fields(pattern, node, list(pattern._fields), match)
            elif pattern == node:
                yield match

    def match_fields(self, pattern: ast.AST, node: ast.AST, fields: Sequence[str], match: Match) -> Iterator[Match]:
        """Match the fields of two nodes of one type, one after another."""
        if not fields:
            yield match
            return
        if isinstance(node, FUNCTIONS) and self.outermost is None:
            yield from Matcher(node).match_fields(pattern, node, fields, match)
            return
        field, *rest = fields
        parts = getattr(pattern, field, None), getattr(node, field, None)
        if field in IGNORED:
            found = iter([match])
        elif IDENTIFIERS.get(type(pattern)) == field:
            found = self.match_name(*parts, match)
        else:
            found = self.match_node(*parts, match)
        for one in found:
            yield from self.match_fields(pattern, node, rest, one)

    def match_name(self, pattern: Any, name: Any, match: Match) -> Iterator[Match]:
        """Match a module's name with itself, and a local variable with the one for which it stands."""
        if self.outermost is None or name not in find_local_names(self.outermost):
            if pattern == name:
                yield match
        elif match.names.get(pattern) == name:
            yield match
        elif pattern not in match.names and name not in match.names.values():
            yield match._replace(names={**match.names, pattern: name})

    def match_items(
        self, patterns: Sequence[Any], nodes: list[Any], first: int, match: Match
    ) -> Iterator[tuple[Match, int]]:
        """Match items of a list from one on; with every way comes where it ends."""
        if not patterns:
            yield match, first
        elif is_gap(patterns[0]):
            for end in range(first, len(nodes) + 1):
                one = match._replace(gaps=(*match.gaps, nodes[first:end]))
                yield from self.match_items(patterns[1:], nodes, end, one)
        elif first < len(nodes):
            for one in self.match_node(patterns[0], nodes[first], match):
                yield from self.match_items(patterns[1:], nodes, first + 1, one)


def is_gap(node: Any) -> bool:
    """Whether an expression or a statement is three dots."""
    value = node.value if isinstance(node, ast.Expr) else node
    return isinstance(value, ast.Constant) and value.value is ...


def replace_place(place: Place, replacement: Fragment, module_names: frozenset[str]) -> None:
    """Put a replacement where a pattern matched."""
    fill_in = FillIn(place, module_names)
    filled = [fill_in.visit(copy.deepcopy(node)) for node in replacement.nodes]
    flat = [x for one in filled for x in (one if isinstance(one, list) else [one])]
    if place.first is None:
        setattr(place.parent, place.field, flat[0])
        return
    items = getattr(place.parent, place.field)
    items[place.first : place.first + 1 if place.end is None else place.end] = flat
    if not items:
        items.append(ast.Pass())


class FillIn(ast.NodeTransformer):
    """Puts what a match found in the place of the names and dots of a replacement."""

    def __init__(self, place: Place, module_names: frozenset[str]) -> None:
        self.names, self.gaps = place.match.names, iter(place.match.gaps)
        self.local_names = find_local_names(place.outermost) if place.outermost else frozenset()
        self.module_names = module_names

    def visit(self, node: ast.AST) -> Any:
        """Fill in a node and what it holds."""
        if is_gap(node):
            return next(self.gaps)
        field = IDENTIFIERS.get(type(node))
        if field is not None:
            name = getattr(node, field)
            self.check_name(node, name)
            setattr(node, field, self.names.get(name, name))
        return self.generic_visit(node)

    def check_name(self, node: ast.AST, name: str) -> None:
        """Refuse a name that the replacement uses as if it were there."""
        is_read = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
        if is_read and name not in self.names and (name in self.local_names or name not in self.module_names):
            raise NoUniquePlace(f"the replacement reads {name!r}, which the pattern has to have too")


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


def walk_outermost_functions(scope: ast.AST) -> Iterator[ast.AST]:
    """The functions of a module and of its classes, without those inside of them."""
    for child in ast.iter_child_nodes(scope):
        if isinstance(child, FUNCTIONS):
            yield child
        else:
            yield from walk_outermost_functions(child)


def walk_fields(node: ast.AST, outermost: ast.AST | None) -> Iterator[tuple[ast.AST | None, ast.AST, str, Any]]:
    """Every field of every node that holds nodes, after the outermost function where it is."""
    for field, value in ast.iter_fields(node):
        children = [x for x in value if isinstance(x, ast.AST)] if isinstance(value, list) else [value]
        if children and isinstance(children[0], ast.AST):
            yield outermost, node, field, value
            for child in children:
                yield from walk_fields(
                    child, child if outermost is None and isinstance(child, FUNCTIONS) else outermost
                )


def find_module_names(tree: ast.Module) -> frozenset[str]:
    """Names that a module binds outside its functions."""
    return frozenset(walk_bound_names(tree, enter_functions=False))


@lru_cache
def find_local_names(function: ast.AST) -> frozenset[str]:
    """Names that a function and those inside of it bind."""
    return frozenset(walk_bound_names(function, enter_functions=True))


def walk_bound_names(scope: ast.AST, *, enter_functions: bool) -> Iterator[str]:
    """Names bound in a scope: those of variables, arguments, imports, functions and classes."""
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).partition(".")[0]
        elif isinstance(node, (*DEFINITIONS, ast.ExceptHandler)) and node.name:
            yield node.name
        if enter_functions or not isinstance(node, (*FUNCTIONS, ast.Lambda)):
            yield from walk_bound_names(node, enter_functions=enter_functions)
