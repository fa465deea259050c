"""Generated pages are what their script makes of the result files, and single benchmarks describe what they measure."""

import pytest

pytest.importorskip("benchmarks", reason="only the package is here", exc_type=ModuleNotFoundError)

from benchmarks import learning, report
from benchmarks.results import ROOT, make_row
from benchmarks.settings import TABLE, Setting


@pytest.mark.parametrize("page", report.list_pages())
def test_a_generated_page_is_what_its_script_makes(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert text.count("written by make report") == len(report.MARKED.findall(text))
    assert text == report.fill_page(page), "make report writes it"


def test_every_part_is_on_a_page_and_every_benchmark_in_a_part():
    pages = "".join((ROOT / name).read_text(encoding="utf-8") for name in report.list_pages())
    assert {name for _, name, _ in report.MARKED.findall(pages)} == set(report.PARTS)
    assert set(TABLE) <= set(report.PARTS)


def test_figures_are_drawn_from_the_result_files():
    pytest.importorskip("matplotlib")
    shown = {path.stem for path in report.FIGURES.iterdir()}
    assert set(report.draw_figures()) == shown


def test_a_table_has_what_differs():
    rows = [
        make_row("ours", "full", "µs", [1, 2, 3], n=1, kind="a"),
        make_row("loop", "full", "µs", 500.0, n=1, kind="a"),
        make_row("loop", "over ours", "×", 250.1, n=1, kind="a"),
        make_row("ours", "full", "µs", 1234.5, n=2, kind="a"),
        make_row("loop", "full", "µs", [], "wrong", n=2, kind="a"),
    ]
    assert report.list_rows(rows).splitlines() == [
        "| n | ours, full (µs) | loop, full (µs) | times as fast as loop |",
        "| --- | ---: | ---: | ---: |",
        "| 1 | 2 [1.50, 2.50] | 500 | 250 |",
        "| 2 | 1,234 | – | – |",
        "",
        "Not measured: loop, full: wrong.",
    ]
    assert report.list_rows(rows, [["loop", "full"], ["absent", "full"]]).splitlines()[0] == "| n | full (µs) |"
    assert report.list_arms(rows[:2]).splitlines()[0] == "| variant | full (µs) |"
    wide = [make_row(f"{i}", "full", "µs", 1, n=n) for n in (1, 2) for i in range(9 - n // 2)]
    first, second = report.list_rows(wide).split("\n\n")
    assert first.splitlines()[0].count("µs") == 7 and len(first.splitlines()) == 4
    assert second.splitlines()[0] == "| n | 7 (µs) | 8 (µs) |" and second.splitlines()[-1] == "| 2 | 1 | – |"
    assert "details" not in report.fold("\n\n".join([first] * 6)) and "14 lines" in report.fold(
        "\n\n".join([first] * 7)
    )


def test_learning_curves_of_several_seeds():
    """Points that all have; the target is that of the runs which reach it."""
    setting = Setting(target_return=5.0, total_steps=30)
    curves = [
        [(10, 1.0, 2.0), (20, 2.0, 6.0), (30, 3.0, 4.0)],
        [(10, 3.0, 4.0), (20, 5.0, 4.5)],
    ]
    rows = {row.setting + row.metric: row.median for row in learning.describe_curves("ours", curves, setting)}
    assert rows == {
        "last return": 4.25, "runs to the end": 1, "runs to the target": 1, "steps to the target": 20,
        "time to the target": 2, "steps=10return": 3, "steps=10time": 2, "steps=20return": 5.25, "steps=20time": 3.5,
    }  # fmt: skip
