"""What a release has to hold, as far as it can be told without building one."""

import re
from pathlib import Path

import pytest

import check_release
import package_readme
import rl_triton_core

ROOT = Path(__file__).resolve().parents[2]


def test_the_pages_state_the_version():
    assert check_release.check_version() == rl_triton_core.__version__


def test_another_version_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "rl_triton_core").mkdir()
    (tmp_path / "rl_triton_core" / "_version.py").write_text('__version__ = "1.2.3"\n')
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 1.2.3 (2030-01-01)\n\n## 1.2.2\n")
    (tmp_path / "CITATION.cff").write_text("version: 1.2.2\n")
    monkeypatch.setattr(check_release, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match=r"CITATION\.cff: got version 1\.2\.2, expected 1\.2\.3"):
        check_release.check_version()
    (tmp_path / "CITATION.cff").write_text("version: 1.2.3\n")
    monkeypatch.setenv("GITHUB_REF_TYPE", "tag")
    monkeypatch.setenv("GITHUB_REF_NAME", "v1.2.3")
    assert check_release.check_version() == "1.2.3"
    monkeypatch.setenv("GITHUB_REF_NAME", "v1.2.4")
    with pytest.raises(SystemExit, match=r"tag: got v1\.2\.4, expected v1\.2\.3"):
        check_release.check_version()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a/py.typed"], r"missing \['METADATA'\], unexpected \[\]"),
        (["a/py.typed", "b/METADATA", "tests/conftest.py"], r"missing \[\], unexpected \['tests/conftest\.py'\]"),
    ],
)
def test_files_of_an_archive(names, message):
    with pytest.raises(SystemExit, match=message):
        check_release.check_names(Path("a.whl"), names, ("py.typed", "METADATA"), check_release.NOT_IN_WHEEL)
    check_release.check_names(Path("a.whl"), ["x/py.typed", "y/METADATA"], ("METADATA",), check_release.NOT_IN_WHEEL)


def test_the_readme_uses_the_functions():
    program = check_release.read_readme("1.0")
    compile(program, "README.md", "exec")
    assert "compute_gae(" in program and "rl_triton_adapters" not in program


def test_workflows_call_verbs_of_the_makefile():
    verbs = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        lines = re.findall(r"\brun: (.*)", path.read_text())
        assert lines
        for line in lines:
            program, *words = line.split()
            assert program == "make"
            called = [word for word in words if "=" not in word and not word.endswith("}}")]
            assert set(called) - {"${{", "github.run_number"} <= verbs


@pytest.mark.parametrize("repository", [None, "https://example.org/x"])
def test_links_of_the_readme_on_a_package_index(repository):
    """They lead somewhere, or are plain words; the picture of the boundary rule has its text."""
    metadata = {"urls": {"Repository": repository} if repository else {}}
    package_readme.ReadmeHook(str(ROOT), {}).update(metadata)
    text = metadata["readme"]["text"]
    assert re.findall(r"\]\((?!https://)", text) == [] and "A rollout of three episodes" in text
    assert (f"[Installation]({repository}/blob/HEAD/docs/install.md)" in text) is bool(repository)


def test_every_framework_with_an_adapter_has_an_extra():
    """With a line on the page of the installation."""
    folder = ROOT / "adapters" / "rl_triton_adapters"
    frameworks = {x.name for x in folder.iterdir() if (x / "__init__.py").exists()} - {"common"} | {"trl", "sb3_zoo"}
    for name in (x.replace("_", "-") for x in frameworks):
        assert re.search(rf"^{name} = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE), name
        assert f'`pip install ".[{name}]"`' in (ROOT / "docs" / "install.md").read_text(), name
