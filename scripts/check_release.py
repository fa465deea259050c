"""Build the source distribution and the wheel, and use each in a fresh environment: make release-check.

Checks the metadata (twine), what the archives hold, and that CHANGELOG.md and CITATION.cff state the version. Each of
them has to install without extras, and to run the README's functions, the command line and its self-test. All extras
have to resolve.
Slow: it installs PyTorch twice.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "release"
PIP = ("-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--quiet")
IN_WHEEL = (
    "rl_triton_core/py.typed",
    "rl_triton_adapters/py.typed",
    "rl_triton_core/cli/__init__.py",
    "rl_triton_auto.pth",
    "entry_points.txt",
)
IN_SDIST = ("README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "pyproject.toml", "tests/conftest.py", "Makefile")
NOT_IN_WHEEL = re.compile(r"(^|/)(tests|benchmarks|scripts|docs|__pycache__)/|\.pyc$|\.nb[ci]$")
NOT_IN_SDIST = re.compile(r"/(\.git|\.venv[^/]*|build|site|__pycache__|\.hypothesis)/|\.pyc$")


def main() -> None:
    """Do all checks; stop at the first that fails."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    version = check_version()
    tools = make_environment(FOLDER / "tools", "build", "twine")
    archives = build_archives(tools, FOLDER / "dist")
    check_archives(*archives, version)
    for archive in archives:
        check_installation(FOLDER / archive.suffix.strip("."), archive, version)
    check_extras(tools, archives[0])
    print(f"release {version} holds:", *archives, sep="\n  ")


def check_version() -> str:
    """Compare the version in its only place with the pages that state it, and with the tag that a workflow runs for."""
    version, tag = (ROOT / "rl_triton_core" / "_version.py").read_text(), os.environ.get("GITHUB_REF_NAME")
    version = re.findall(r'__version__ = "(.*)"', version)[0]  # without an import of the package
    stated = {
        "CHANGELOG.md": re.search(r"^## (\d[\w.]*)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE),
        "CITATION.cff": re.search(r"^version: (\S+)", (ROOT / "CITATION.cff").read_text(), re.MULTILINE),
    }
    for name, match in stated.items():
        if match is None or match[1] != version:
            sys.exit(f"{name}: got version {match and match[1]}, expected {version}")
    if os.environ.get("GITHUB_REF_TYPE") == "tag" and tag != f"v{version}":
        sys.exit(f"tag: got {tag}, expected v{version}")
    return version


def make_environment(folder: Path, *packages: str) -> Path:
    """Make a virtual environment with these packages, and return its interpreter."""
    run_command(sys.executable, "-m", "venv", folder)
    interpreter = folder / "bin" / "python"
    run_command(interpreter, *PIP, "--upgrade", "pip>=23.1")
    run_command(interpreter, *PIP, *packages)
    return interpreter


def build_archives(tools: Path, folder: Path) -> tuple[Path, Path]:
    """Build the wheel (from the source distribution) and the source distribution, and check their metadata."""
    run_command(tools, "-m", "build", "--outdir", folder, ROOT)
    wheel, sdist = next(folder.glob("*.whl")), next(folder.glob("*.tar.gz"))
    run_command(tools, "-m", "twine", "check", "--strict", wheel, sdist)
    return wheel, sdist


def check_archives(wheel: Path, sdist: Path, version: str) -> None:
    """Check what is in the archives, and what is not."""
    with zipfile.ZipFile(wheel) as archive:
        check_names(wheel, archive.namelist(), IN_WHEEL, NOT_IN_WHEEL)
        name = next(x for x in archive.namelist() if x.endswith(".dist-info/METADATA"))
        if links := re.findall(r"\]\((?!https?://).*?\)", archive.read(name).decode()):
            sys.exit(f"{wheel.name}: got links that lead nowhere on a package index: {links[:5]}")
    with tarfile.open(sdist) as archive:
        check_names(sdist, archive.getnames(), IN_SDIST, NOT_IN_SDIST)
    for path in (wheel, sdist):
        if f"-{version}" not in path.name:
            sys.exit(f"{path.name}: expected version {version}")


def check_names(path: Path, names: Sequence[str], wanted: Sequence[str], unwanted: re.Pattern[str]) -> None:
    """Stop if a file is missing from an archive, or should not be there."""
    missing = [x for x in wanted if not any(name.endswith(x) for name in names)]
    extra = [name for name in names if unwanted.search(name)]
    if missing or extra:
        sys.exit(f"{path.name}: missing {missing}, unexpected {extra[:10]}")


def check_installation(folder: Path, archive: Path, version: str) -> None:
    """Install an archive without extras, and use it from outside of the checkout."""
    torch = re.findall(r"^torch==\S+", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[0]
    interpreter = make_environment(folder, torch)
    run_command(interpreter, *PIP, "-c", ROOT / "constraints.txt", archive)
    run_command(interpreter, "-m", "pip", "check")
    program = folder / "readme.py"
    program.write_text(read_readme(version))
    run_command(interpreter, program, cwd=folder)
    command = folder / "bin" / "rl-triton"
    for arguments in (["env"], ["doctor"], ["selftest", "--cases", "96"], ["run", "--", "true"]):
        run_command(command, *arguments, cwd=folder)


def read_readme(version: str) -> str:
    """The README's examples of the functions as one program; those of the frameworks need extras."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    own = [x for x in blocks if "adapters" not in x]
    start = f'import rl_triton_core\nassert rl_triton_core.__version__ == "{version}"\n'
    return start + "\n".join(own)


def check_extras(tools: Path, wheel: Path) -> None:
    """Let pip resolve every extra as users do, without our pins and without installing anything."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(x for x in archive.namelist() if x.endswith(".dist-info/METADATA"))
        extras = re.findall(r"^Provides-Extra: (.*)$", archive.read(name).decode(), re.MULTILINE)
    for extra in extras:
        run_command(tools, *PIP, "--dry-run", f"{wheel}[{extra}]")


def run_command(*command: str | Path, cwd: Path = ROOT) -> None:
    """Run a command; stop where it fails. Nothing of this checkout is on its path."""
    print("+", *command, flush=True)
    environment = {name: x for name, x in os.environ.items() if name not in ("PYTHONPATH", "TRITON_INTERPRET")}
    result = subprocess.run(command, check=False, cwd=cwd, env=environment)
    if result.returncode:
        sys.exit(f"{command[0]}: exit status {result.returncode}")


if __name__ == "__main__":
    main()
