"""Where compiled code is kept between processes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from rl_triton_core._internal.arguments.side_effects import find_distrust, read_kept

ENOUGH = 1 << 18
"""Bytes: more than a file of compiled code has."""


class Cache(NamedTuple):
    """The cache of a compiler."""

    path: str | None
    """Its folder, None if there is none."""
    problem: str = ""
    """Why it keeps nothing, or not where it should."""
    advice: str = ""
    """What to do about it."""


def find_caches() -> dict[str, Cache]:
    """Look at the caches of the compilers that are installed."""
    finders = {"numba": find_numba_cache, "triton": find_triton_cache}
    return {name: find_cache() for name, find_cache in finders.items() if find_spec(name)}


def find_numba_cache() -> Cache:
    """Look at the folder of our loops, and at what is in it."""
    variable = "NUMBA_CACHE_DIR"
    try:
        disk = import_module("rl_triton_core._internal.equations.disk")
    except ImportError as error:
        return Cache(None, f"none: the import of Numba failed: {error}", "pip install --upgrade numba")
    folder = disk.find_folder()
    found, broken = judge_folder(variable, folder, os.lstat, 0o022), []
    for path in folder.glob(f"*{disk.SUFFIX}"):
        try:
            read_kept(path)
        except (OSError, ValueError) as error:
            broken.append(f"{path.name}: {error}")
    if broken and not found.problem:
        return Cache(str(folder), f"{len(broken)} files in {folder} are broken: {broken[0]}", f"delete {folder}")
    return found


def find_triton_cache() -> Cache:
    """Find Triton's folder, which may be a link or a group's: Triton runs what is in it, no matter who wrote it."""
    variable, home = "TRITON_CACHE_DIR", Path(os.environ.get("TRITON_HOME") or Path.home())
    return judge_folder(variable, Path(os.environ.get(variable) or home / ".triton" / "cache"), os.stat, 0o002)


def judge_folder(variable: str, folder: Path, status: Callable[[Path], os.stat_result], writable: int) -> Cache:
    """Try to write into a folder, or into the folder that it would be made in, and look who else can."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        distrust = find_distrust(status(folder), writable) if existing == folder else ""
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(bytes(ENOUGH))
    except OSError as error:
        problem = f"{folder} cannot be written: {error.strerror or error}"
        return Cache(str(folder), problem, f"set {variable} to a folder that can be written, and has space")
    advice = f"set {variable} to a folder that you or root own and nobody else can write to, or delete this one"
    return Cache(str(folder), f"{folder} is not safe: {distrust}" if distrust else "", advice)
