"""Where the mutants break the code: at one place each, whatever the layout."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import mutants
from mutation.mutant import BACKENDS, Mutant, load_mutants

ROOT = Path(__file__).resolve().parents[2]
CASES = [pytest.param(x, id=f"{backend}-{x.name}") for backend in BACKENDS for x in load_mutants(backend)]


def lay_out(text):
    return ast.unparse(ast.parse(text))


@pytest.mark.parametrize("mutant", CASES)
def test_a_mutant_breaks_one_place_and_has_tests(mutant):
    text = (ROOT / mutant.file).read_text()
    assert mutant.break_code(text) != lay_out(text)
    assert mutants.find_test_files(mutant), f"no file has {mutant.tests}"


def test_names_of_mutants_are_unique():
    for backend in BACKENDS:
        names = [(mutant.file, mutant.name) for mutant in load_mutants(backend)]
        assert len(names) == len(set(names))


ENDLESS = """
import sys, time
import mutants
from mutation.mutant import Mutant

def run_for_ever(mutant, copy, cache):
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


WITHOUT_TESTS = """
import mutants
first = mutants.load_mutants("reference")[0]
chosen = [first._replace(name=x, tests=x) for x in ("no_such_word", "test_threads and not test_threads")]
for outcome in mutants.run_mutants(chosen, jobs=2):
    print(outcome.mutant.name, mutants.name_outcome(outcome.code), sep=": ")
"""


def test_a_mutant_without_tests_is_not_killed():
    """No file has them, or a file has none of them."""
    output = subprocess.check_output([sys.executable, "-c", WITHOUT_TESTS], cwd=ROOT / "scripts", text=True)
    lines = [f"{name}: the tests did not run" for name in ("no_such_word", "test_threads and not test_threads")]
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
        ("min(a,b) + LIMIT", "max(a, b) + LIMIT", "", ("min(a, b) + LIMIT", "max(a, b) + LIMIT")),
        ("min(a, b)", "min(b, b)", "outer", ("min(a, b) +", "min(b, b) +")),
        ("return (c,\n    d)", "pass", "", ("return (c, d)", "pass")),
        ("return b", "", "", ("    return b", "")),
        ("d = [x * a for x in c]\nreturn c, d", "d", "", ("d = [x * a for x in c]\n    return (c, d)", "d")),
    ],
)
def test_a_pattern_matches_by_syntax(old, new, function, expected):
    normal = lay_out(SOURCE)
    assert normal.count(expected[0]) == 1
    assert Mutant("", "", function, old, new, "").break_code(SOURCE) == normal.replace(*expected).rstrip()


@pytest.mark.parametrize(
    "old, function, number",
    [("min(b, a)", "outer", 0), ("LIMIT + min(a, b)", "", 0), ("a", "", 5), ("min(a, b)", "missing", 0)],
)
def test_a_pattern_without_one_place_is_an_error(old, function, number):
    mutant = Mutant("name", "boundaries.py", function, old, "0", "")
    with pytest.raises(LookupError, match=rf"mutant 'name': .* is {number} times in .*boundaries\.py, expected once"):
        mutant.break_code(SOURCE)
