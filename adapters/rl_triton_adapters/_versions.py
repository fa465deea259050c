"""What an adapter says of a framework that is missing, or of another version than it needs."""

from importlib.metadata import PackageNotFoundError, version


def find_version(distribution: str) -> str:
    """A package with its installed version, or with "no" before it."""
    try:
        return f"{distribution} {version(distribution)}"
    except PackageNotFoundError:
        return f"no {distribution}"


def explain_version(problem: str, distribution: str, needed: str) -> ImportError:
    """The error of a framework that has other functions than those an adapter was written for.

    Args:
        problem: What was found in it.
        distribution: Its name on the package index.
        needed: The oldest version that the adapter works with.
    """
    return ImportError(f"{problem}: found {find_version(distribution)}, needs another version ({needed} or newer)")


def explain_import(module: str, error: ImportError, distribution: str, needed: str, extra: str = "") -> ImportError:
    """The error of an adapter whose framework cannot be imported.

    Args:
        module: The adapter.
        error: What the import of its framework raised.
        distribution: The framework's name on the package index.
        needed: The oldest version that the adapter works with.
        extra: That of this package which installs the framework; by default of the framework's name.
    """
    return ImportError(
        f"{module} needs {distribution} {needed} or newer, found {find_version(distribution)}, could not import it "
        f"({error}): pip install rl-triton-core[{extra or distribution}]"
    )
