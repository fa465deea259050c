"""One way to break the code."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from mutation.patterns import replace_code


class Mutant(NamedTuple):
    """A piece of code, and the wrong one that takes its place."""

    name: str
    old: str
    """A pattern that matches once in the file, see `mutation.patterns`."""
    new: str
    tests: str
    """Those that should notice, as pytest's -k selects them from tests/core."""
    function: str = ""
    """Where the pattern is looked for: a function or class, by its qualified name; in the whole file, if empty."""
    file: str = ""
    """The broken file within rl_triton_core, which its table names."""

    def break_file(self, package: Path) -> None:
        """Break the code of a copy of the package."""
        path = package / self.file
        path.write_text(self.break_code(path.read_text()))

    def break_code(self, source: str) -> str:
        """Text of the file with the wrong code.

        Raises:
            LookupError: The pattern does not match exactly once.
        """
        try:
            return replace_code(source, self.old, self.new, self.function)
        except LookupError as error:
            where = f"{self.file}, {self.function}" if self.function else self.file
            raise LookupError(f"mutant {self.name!r}: {error}, in {where}") from None
