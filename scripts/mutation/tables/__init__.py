"""All mutants, by the backend on which the tests run: one table for each file that is broken.

A table names its FILE within rl_triton_core and lists its MUTANTS.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from mutation.mutant import Mutant

BACKENDS = ("reference", "cpu", "triton")


def load_mutants(backend: str) -> list[Mutant]:
    """The mutants of all tables of a backend."""
    names = sorted(path.stem for path in (Path(__file__).parent / backend).glob("[!_]*.py"))
    tables = [import_module(f"{__name__}.{backend}.{name}") for name in names]
    return [mutant._replace(file=table.FILE) for table in tables for mutant in table.MUTANTS]
