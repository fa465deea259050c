"""What work does not depend on, and what therefore never ends it: warnings, and files between processes."""

from __future__ import annotations

import os
import sys
import warnings
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import TextIO
from uuid import uuid4


def warn(text: str, category: type[Warning] = UserWarning, stacklevel: int = 1) -> None:
    """Warn as `warnings.warn` does; where a filter makes an error of it, or nothing can show it, print it at most."""
    try:
        warnings.warn(text, category, stacklevel=stacklevel + 1)
    except Exception:
        say(f"{category.__name__}: {text}", sys.stderr)


def say(text: str, file: TextIO | None = None) -> None:
    """Print a line; nothing where what it would be printed on is full, closed or gone."""
    with suppress(Exception):
        print(text, file=file, flush=True)


def find_distrust(status: os.stat_result, writable: int = 0o022) -> str:
    """Why another user may have written a file, or what is in a folder; empty where no bit of these lets others."""
    if not hasattr(os, "geteuid"):  # on Windows, modes do not tell
        return ""
    if status.st_uid not in (0, os.geteuid()):
        return f"it belongs to user {status.st_uid}, neither to user {os.geteuid()} nor to root"
    return f"others can write to it (mode {status.st_mode & 0o777:o})" if status.st_mode & writable else ""


def read_kept(path: Path) -> bytes:
    """What `write_kept` has put into a file; an OSError or ValueError if that cannot be read, or others may have."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NOFOLLOW", 0))) as file:
        distrust = find_distrust(os.lstat(path.parent)) or find_distrust(os.fstat(file.fileno()))
        if distrust:
            raise PermissionError(distrust)
        digest, data = file.read(32), file.read()
    if sha256(data).digest() != digest:
        raise ValueError("it is damaged")
    return data


def write_kept(path: Path, data: bytes) -> None:
    """Write a file that has its name when it is complete on disk; an OSError if it cannot be, or would not be read."""
    os.makedirs(path.parent, 0o755, exist_ok=True)
    distrust = find_distrust(os.lstat(path.parent))
    if distrust:
        raise PermissionError(distrust)
    unfinished = path.with_name(f"{path.name}.{uuid4().hex}")
    try:
        with open(unfinished, "xb", opener=lambda name, flags: os.open(name, flags, 0o644)) as file:
            file.write(sha256(data).digest() + data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink()
        raise
