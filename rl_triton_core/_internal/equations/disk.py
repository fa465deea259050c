"""Compiled code on disk between processes, in the place of Numba's own cache.

Each signature of a function has, for each processor, a file of its own: a pickle behind its hash. It gets its name when
it is complete; where it is damaged, code is compiled again. A pickle is code itself, so it is read only where no other
user can have written it. Nothing here ends a call: what cannot be kept is compiled in every process.

Numba prefers the folder beside the source, where `pip uninstall` leaves what it finds: the package could be imported
still. Code of ours goes to the user's cache folder, that of other functions of the process where Numba puts it.
"""

from __future__ import annotations

import pickle
import sys
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numba
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps
from numba.misc.appdirs import AppDirs

from rl_triton_core._internal.arguments.side_effects import read_kept, warn, write_kept
from rl_triton_core._version import __version__

SUFFIX = ".rl_triton.nbc"
PACKAGE = Path(__file__).parents[2]


def hash_text(parts: Any) -> str:
    """A short name for what has a repr."""
    return sha256(repr(parts).encode()).hexdigest()[:16]


def find_folder() -> Path:
    """Where compiled code is kept: in NUMBA_CACHE_DIR, or in the user's cache folder."""
    root = numba.config.CACHE_DIR or AppDirs("numba", appauthor=False).user_cache_dir
    return Path(root).absolute() / f"rl_triton_core_{hash_text(str(PACKAGE))}"


@cache
def hash_file(path: str) -> str:
    """The hash of a source file of ours; of others, which may be no files, code alone counts."""
    return sha256(Path(path).read_bytes()).hexdigest() if Path(path).is_relative_to(PACKAGE) else ""


@cache
def warn_once(text: str) -> None:
    """Say that code is not kept."""
    warn(text, RuntimeWarning)


class DiskCache:
    """What Numba asks for the compiled code of a function, and gives it to."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def find_file(self, signature: Any, codegen: Any) -> Path:
        """The file for a signature and a processor."""
        code = self.function.__code__
        key = __version__, numba.__version__, sys.version, hash_file(code.co_filename), code.co_code
        name = f"{Path(code.co_filename).stem}.{self.function.__qualname__}"
        return find_folder() / f"{name}.{hash_text((key, signature, codegen.magic_tuple()))}{SUFFIX}"

    def load_overload(self, signature: Any, context: Any) -> Any:
        """Code that was compiled before; None if there is none that can be read."""
        context.refresh()
        with suppress(Exception):  # whatever is in a file, its code can be compiled
            data = read_kept(self.find_file(signature, context.codegen()))
            return CompileResult._rebuild(context, *pickle.loads(data))
        return None

    def save_overload(self, signature: Any, result: Any) -> None:
        """Keep compiled code, but for addresses of this process."""
        try:
            if not result.library.has_dynamic_globals:
                write_kept(self.find_file(signature, result.codegen), dumps(result._reduce()))
        except Exception as error:
            reason = getattr(error, "strerror", None) or error  # without the name of a file
            warn_once(f"compiled code is not kept, and every process compiles it again: {find_folder()}: {reason}")
