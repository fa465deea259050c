"""What an adapter says of a framework that is missing, or of another version than it needs."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version


def find_version(distribution: str) -> str:
    """A package with its installed version, or with "no" before it."""
    try:
        return f"{distribution} {version(distribution)}"
    except PackageNotFoundError:
        return f"no {distribution}"


def explain_version(problem: str, distribution: str, needed: str) -> ImportError:
    """The error of a framework, by its name on the package index, that has other functions than an adapter needs."""
    return ImportError(f"{problem}: found {find_version(distribution)}, needs another version ({needed} or newer)")


@contextmanager
def explained_import(module: str, distribution: str, needed: str, extra: str = "") -> Iterator[None]:
    """Inside, an adapter imports its framework: the error says if it is absent or too old, and which `extra` has it."""
    try:
        yield
    except ImportError as error:
        is_absent = isinstance(error, ModuleNotFoundError) and "." not in str(error.name)
        problem = "could not import it" if is_absent else "which lacks what the adapter calls"
        raise ImportError(
            f"{module} needs {distribution} {needed} or newer, found {find_version(distribution)}, {problem} "
            f"({error}): pip install rl-triton-core[{extra or distribution}]"
        ) from error
