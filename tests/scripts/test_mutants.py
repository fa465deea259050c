"""Where the mutants break the code: at one place each, whatever the layout and the names of local variables."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import mutants
from mutation.mutant import BACKENDS, Mutant, load_mutants
from mutation.patterns import (
    FUNCTIONS,
    IDENTIFIERS,
    NoUniquePlace,
    find_local_names,
    replace_code,
    walk_outermost_functions,
)

ROOT = Path(__file__).resolve().parents[2]
CASES = [pytest.param(x, id=f"{backend}-{x.name}") for backend in BACKENDS for x in load_mutants(backend)]


def lay_out(text):
    return ast.unparse(ast.parse(text))


@cache
def read_renamed(file):
    """A module's code with another name for every local variable, laid out anew."""
    tree = ast.parse((ROOT / file).read_text())
    for function in walk_outermost_functions(tree):
        functions = {x.name for x in ast.walk(function) if isinstance(x, FUNCTIONS)}
        names = find_local_names(function) - functions - {"_"}
        for node in ast.walk(function):
            field = IDENTIFIERS.get(type(node))
            if node is not function and field and getattr(node, field) in names:
                setattr(node, field, getattr(node, field) + "_renamed")
    return ast.unparse(tree)


@pytest.mark.parametrize("mutant", CASES)
def test_a_mutant_breaks_one_place_whatever_the_local_names(mutant):
    for text in ((ROOT / mutant.file).read_text(), read_renamed(mutant.file)):
        assert mutant.break_code(text) != text


@pytest.mark.parametrize("mutant", CASES)
def test_a_mutant_has_tests(mutant):
    assert mutants.find_test_files(mutant), f"no file has {mutant.tests}"


def test_names_of_mutants_are_unique():
    for backend in BACKENDS:
        names = [(mutant.file, mutant.name) for mutant in load_mutants(backend)]
        assert len(names) == len(set(names))


ENDLESS = """
import sys, time
import mutants
from mutation.mutant import Mutant

def run_for_ever(mutant, copy):
    copy.mkdir()
    (copy / "log").write_text(mutant.name)
    time.sleep(1000 if mutant.name == "endless" else 0)
    sys.exit(mutants.FAILED)

mutants.test_mutant, mutants.LIMIT = run_for_ever, 3
chosen = [Mutant(name, "boundaries.py", "", "x", "", "") for name in ("endless", "quick")]
for outcome in mutants.run_mutants(chosen, jobs=2):
    print(outcome.mutant.name, outcome.output, mutants.name_outcome(outcome.code), sep=": ")
"""


def test_a_mutant_that_does_not_end_is_not_killed():
    output = subprocess.check_output([sys.executable, "-c", ENDLESS], cwd=ROOT / "scripts", text=True)
    lines = ["endless: endless: the tests did not end in 3 s", "quick: quick: killed"]
    assert sorted(output.splitlines()) == lines


SOURCE = """
LIMIT = 3

def outer(a, b):
    c = min(a, b) + LIMIT
    d = [x * a for x in c]
    return c, d

def other(a, b):
    if a:
        return min(b, a), outer(a, b)
    return b
"""


@pytest.mark.parametrize(
    "old, new, function, expected",
    [
        ("min(p, q) + LIMIT", "max(p, q) + LIMIT", "", ("min(a, b) + LIMIT", "max(a, b) + LIMIT")),
        ("min(p, q)", "min(q, q)", "outer", ("min(a, b) +", "min(b, b) +")),
        ("min(..., y)", "y", "other", ("min(b, a)", "a")),
        ("x * p", "x", "", ("x * a", "x")),
        ("return p, q", "pass", "", ("return (c, d)", "pass")),
        ("if p:\n    ...", "if not p:\n    ...", "", ("if a:", "if not a:")),
        ("if p:\n    ...\nreturn q", "return q", "", ("    if a:\n        return (min(b, a), outer(a, b))\n", "")),
        (
            "d = ...\nreturn c, d",
            "return c, c",
            "",
            ("    d = [x * a for x in c]\n    return (c, d)", "    return (c, c)"),
        ),
    ],
)
def test_a_pattern_matches_by_syntax(old, new, function, expected):
    normal = lay_out(SOURCE)
    assert normal.count(expected[0]) == 1
    assert replace_code(SOURCE, old, new, function) == normal.replace(*expected)


@pytest.mark.parametrize(
    "old, new, function, message",
    [
        ("min(p, q)", "0", "", "2 places"),
        ("min(p, p)", "0", "", "no place"),
        ("max(p, q)", "0", "", "no place"),
        ("min(p, q) + p", "0", "", "no place"),
        ("min(p, q)", "0", "missing", "no place for a definition of 'missing'"),
        ("x * p", "x * z", "", "reads 'z'"),
        ("x * p", "x * b", "", "reads 'b'"),
        ("LIMITS + p", "0", "", "no place"),
    ],
)
def test_a_pattern_without_one_place_is_an_error(old, new, function, message):
    with pytest.raises(NoUniquePlace, match=message):
        replace_code(SOURCE, old, new, function)


def test_an_error_names_the_mutant_and_its_file():
    mutant = Mutant("name", "boundaries.py", "outer", "no_such_name()", "0", "")
    with pytest.raises(LookupError, match=r"mutant 'name': no place for .*, in boundaries\.py, outer"):
        mutant.break_code(SOURCE)


def test_dots_of_the_replacement_are_those_of_the_pattern():
    with pytest.raises(ValueError, match="got 1 times three dots"):
        replace_code(SOURCE, "min(..., ...)", "min(...)")
