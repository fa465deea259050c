"""Medians and quartiles: of one definition in every result, and beside every number of a page."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
pytest.importorskip("benchmarks", reason="only the package is here", exc_type=ModuleNotFoundError)

from benchmarks import measured, pages, quartiles
from benchmarks.files import RESULTS
from benchmarks.suites import HEADLINE
from benchmarks.workloads import Workload


def test_quartiles_are_linear_between_numbers():
    assert quartiles.find_quartiles([4.0, 1.0, 2.0, 3.0]) == [1.75, 2.5, 3.25]
    assert quartiles.find_quartiles([3.0], 1) == [3.0] * 3
    assert quartiles.compare_turns([4.0, 9.0, 8.0], [2.0, 3.0, 8.0]) == [1.5, 2.0, 2.5], "turn by turn"


@pytest.mark.parametrize(
    ("found", "median", "text"),
    [
        ([1.0, 2.0, 4.0], 2.0, "2.0 [1.0, 4.0]"),
        ({"median": 2.0, "low": 1.0, "high": 4.0, "device": 0.5}, 2.0, "2.0 [1.0, 4.0]"),
        (200.4, 200.4, "200"),
    ],
)
def test_what_result_files_have(found, median, text):
    assert quartiles.take_median(found) == median
    assert pages.format_time(found) == text


def test_what_is_missing():
    assert pages.format_time(None) == pages.format_time(np.nan) == pages.format_times(None, None) == "–"
    assert pages.format_times([1.0, 2.0, 3.0], None) == "2.0 [1.0, 3.0] / –"
    assert (
        pages.fill_cell("{microseconds[stock]:.1f}", {"microseconds": {"stock": [1.0, 2.0, 3.0]}}) == "2.0 [1.0, 3.0]"
    )
    assert pages.fill_cell("{speedup:.1f}", {"speedup": 2.04}) == "2.0" and pages.fill_cell("{speedup:.1f}", {}) == "–"


def test_the_headline_is_typical_of_its_turns():
    """Of the times and ratios of each turn, as many lie above what the pages say as below."""
    for gpu in measured.read_gpus(RESULTS):
        text, workload = " ".join(pages.describe_gpu_speed(gpu).split()), Workload("gae", *HEADLINE)
        turns = {arm: np.array(gpu.find_turns("headline", arm)[workload]) for arm in ("ours", *pages.HEADLINE_ARMS)}
        assert f"{np.median(turns['ours']):.1f} [" in text
        for arm, name in pages.HEADLINE_ARMS.items():
            ratio = np.median(turns[arm] / turns["ours"])
            assert pages.format_ratio(ratio) + f" faster than {name} [" in text
