"""The ways to break the code: one row each in a table of each backend on which the tests run."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import NamedTuple

from mutation.patterns import replace_code

BACKENDS = ("reference", "cpu", "triton")


class Mutant(NamedTuple):
    """A piece of code, and the wrong one that takes its place: a row of a table, whose columns these are."""

    name: str
    file: str
    """The broken file, from the root of the repository."""
    function: str
    """Where the code is looked for: a function or class, by its qualified name; in the whole file, if empty."""
    before: str
    """A pattern that matches once, see `mutation.patterns`."""
    after: str
    tests: str
    """Those that should notice, as pytest's -k selects them."""

    def break_file(self, root: Path) -> None:
        """Break the code of a copy of the repository."""
        path = root / self.file
        path.write_text(self.break_code(path.read_text()))

    def break_code(self, source: str) -> str:
        """Text of the file with the wrong code.

        Raises:
            LookupError: The pattern does not match exactly once.
        """
        try:
            return replace_code(source, self.before, self.after, self.function)
        except LookupError as error:
            where = f"{self.file}, {self.function}" if self.function else self.file
            raise LookupError(f"mutant {self.name!r}: {error}, in {where}") from None


def load_mutants(backend: str) -> list[Mutant]:
    """The mutants of a backend's table: tab-separated values, in quotes where they have several lines."""
    with (Path(__file__).parent / f"{backend}.tsv").open(newline="") as table:
        header, *rows = csv.reader(table, "excel-tab", strict=True)
    if tuple(header) != Mutant._fields:
        raise ValueError(f"{backend}.tsv: got columns {header}, expected {list(Mutant._fields)}")
    return [Mutant(*row) for row in rows]
