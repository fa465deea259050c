"""What the script that measures the code counts, and what it lets pass."""

import json
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import code_metrics

FILE = '''
import pytest

def load_file(a,
              b):
    """Has a docstring
    of two lines."""
    c = a  # a comment beside code counts as code

    # a line with nothing else does not
    def inner(x):
        return x
    return inner(c)

class Row:
    @property
    def length(self):
        return 1

    def read(self): return 2

    def __len__(self):
        return 3

@pytest.fixture(scope="module")
def rollout():
    return 4

async def exp():
    return 5
'''


@pytest.fixture
def functions(tmp_path):
    path = tmp_path / "file.py"
    path.write_text(FILE)
    return {x.name: x for x in code_metrics.read_functions(path, Path("file.py"))}


def test_lengths_are_lines_with_code_of_the_function_itself(functions):
    lengths = {name: function.length for name, function in functions.items()}
    assert lengths == {
        **{"load_file": 4, "inner": 2, "length": 2, "read": 1, "__len__": 2, "rollout": 2, "exp": 2},
    }


def test_names_of_one_word(functions):
    """But for properties, fixtures, Python's own names and primitives."""
    assert {name for name, function in functions.items() if function.is_one_word} == {"inner", "read"}


def test_what_exceeds_a_limit_is_named(functions, monkeypatch):
    by_part = {part: [] for part in code_metrics.PARTS} | {"tests": list(functions.values())}
    parts = {part: dict.fromkeys(("lines", "longest", "one_word"), 3) for part in code_metrics.PARTS}
    measured = {"parts": parts, "places_per_estimator": ["a.py", "b.py"]}
    monkeypatch.setattr(code_metrics, "LIMITS", {"lines": {"scripts": 2}, "longest": {"tests": 3}})
    monkeypatch.setattr(code_metrics, "MAX_PLACES", 1)
    assert list(code_metrics.find_excesses(measured, by_part)) == [
        "scripts: lines is 3, the limit is 2",
        "too long: file.py:4 load_file (4 lines)",
        "2 files name every estimator, the limit is 1: a.py, b.py",
    ]
    monkeypatch.setattr(code_metrics, "LIMITS", {"lines": {"scripts": 3}, "longest": {"tests": 4}})
    monkeypatch.setattr(code_metrics, "MAX_PLACES", 2)
    assert not list(code_metrics.find_excesses(measured, by_part))


def test_the_page_has_the_table_of_the_recorded_numbers():
    page = (code_metrics.ROOT / code_metrics.PAGE).read_text()
    recorded = json.loads((code_metrics.ROOT / code_metrics.RESULTS).read_text())
    assert recorded["before"]["commit"] in page
    assert code_metrics.write_table(page, recorded) == page


def test_contributing_lists_every_place_that_a_new_estimator_touches():
    """Those are the files that name every estimator, and the two that one has of its own."""
    text = (code_metrics.ROOT / "CONTRIBUTING.md").read_text()
    section = text.partition("**An estimator.**")[2].partition("**An adapter.**")[0]
    items = "".join(re.findall(r"^\d\. .*(?:\n   .*)*\n", section, re.MULTILINE))
    listed = [path for path in re.findall(r"`([^`]+)`", items) if Path(path).suffix]
    own = {"rl_triton_core/estimators/NAME.py", "scripts/mutation/reference.tsv"}
    assert len(listed) == len(set(listed))
    assert set(listed) == own | {str(path) for path in code_metrics.find_estimator_places(code_metrics.ROOT)}
    for path in own:
        assert "retrace" in (code_metrics.ROOT / path.replace("NAME", "retrace")).read_text().lower()
