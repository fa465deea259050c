"""Where compiled code is kept between processes."""

from __future__ import annotations

import os
import tempfile
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple


class Cache(NamedTuple):
    """The cache of a compiler."""

    variable: str
    """The environment variable that moves it."""
    path: str | None
    """Its folder, None if there is none."""
    problem: str = ""
    """Why it keeps nothing, or not where it should."""

    def describe(self) -> str:
        """Say in a line where it is, and whether it works."""
        return self.problem or f"{self.path}, writable"


def find_caches() -> dict[str, Cache]:
    """Look at the caches of the compilers that are installed."""
    finders = {"numba": find_numba_cache, "triton": find_triton_cache}
    return {name: find_cache() for name, find_cache in finders.items() if find_spec(name)}


def find_numba_cache() -> Cache:
    """Ask Numba where it keeps a loop of ours. It takes the first folder of several that it can write."""
    variable = "NUMBA_CACHE_DIR"
    try:
        loop = import_module("rl_triton_core._internal.moments.serial").find_first_valid
    except ImportError as error:
        return Cache(variable, None, f"none: the import of Numba failed: {error}")
    path = loop.stats.cache_path
    wanted = os.environ.get(variable)
    if path is None:
        return Cache(variable, None, "none: Numba found no folder that it can write")
    if wanted and not Path(path).is_relative_to(Path(wanted).absolute()):
        return Cache(variable, path, f"{wanted} cannot be written; Numba uses {path} instead")
    return Cache(variable, path)


def find_triton_cache() -> Cache:
    """Find Triton's folder and try to write there."""
    variable = "TRITON_CACHE_DIR"
    home = Path(os.environ.get("TRITON_HOME") or Path.home())
    path = Path(os.environ.get(variable) or home / ".triton" / "cache")
    error = try_to_write(path)
    return Cache(variable, str(path), f"{path} cannot be written: {error}" if error else "")


def try_to_write(folder: Path) -> str | None:
    """Write a temporary file into a folder, or the folder that it would be made in; return what went wrong."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            return None
    except OSError as error:
        return error.strerror or str(error)
