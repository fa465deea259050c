"""What is kept on disk, and warnings: their failure ends no call, and no file of others is run."""

import io
import os
import pickle
import re
import sys
import tempfile
import threading
import warnings
from contextlib import suppress

import numba
import pytest
from numba.core import event
from processes import run_python

from rl_triton_core._internal.arguments.side_effects import read_kept, warn, write_kept
from rl_triton_core._internal.equations import disk
from rl_triton_core._internal.equations.numba import compile_and_keep
from rl_triton_core.cli import caches, doctor

NOBODY = 65534
ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away and become another user")


def double(x):
    return 2.0 * x


def compile_double(kind=numba.float64):
    """Compile a function as a process does that has not; return whether its code was not on disk."""
    with event.install_recorder("numba:compile") as recorder:
        compiled = compile_and_keep(double, kind(kind))
    assert compiled(2.0) == 4.0
    return len(recorder.buffer) > 0


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """In a process whose new files all may write to."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "cache"))
    before = os.umask(0)
    yield disk.find_folder()
    os.umask(before)


@pytest.fixture
def kept(folder):
    """A file of compiled code."""
    assert compile_double() and not compile_double()
    (path,) = folder.iterdir()
    assert caches.find_numba_cache().problem == ""
    return path


DAMAGE = {
    "empty": lambda data: b"",
    "ten bytes": lambda data: data[:10],
    "a half": lambda data: data[: len(data) // 2],
    "one byte less": lambda data: data[:-1],
    "another byte": lambda data: data[:3000] + bytes([255 - data[3000]]) + data[3001:],
    "zeros": lambda data: bytes(len(data)),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_file_that_is_damaged_is_compiled_again(kept, damage):
    kept.write_bytes(DAMAGE[damage](kept.read_bytes()))
    kept.with_name("function_of_others.1.nbc").touch()
    found = caches.find_numba_cache()
    assert found.problem == f"1 files in {kept.parent} are broken: {kept.name}: it is damaged"
    assert found.advice == f"delete {kept.parent}" and doctor.check_caches().status == "problem"
    assert compile_double() and not compile_double()
    read_kept(kept)


def test_what_is_no_code_is_compiled_again(kept):
    write_kept(kept, pickle.dumps(("of", "something")))
    assert compile_double() and not compile_double()


def put_link(path):
    """In the place of a file or folder of this user."""
    path.rename(path.with_suffix(".own"))
    path.symlink_to(path.with_suffix(".own"))


DISTRUST = {
    "a file that all can write": lambda path: path.chmod(0o646),
    "a file that a group can write": lambda path: path.chmod(0o664),
    "a link": put_link,
    "a folder that all can write": lambda path: path.parent.chmod(0o757),
    "a folder that a group can write": lambda path: path.parent.chmod(0o775),
    "a link to a folder": lambda path: put_link(path.parent),
    "a file of another user": lambda path: os.chown(path, NOBODY, NOBODY),
    "a folder of another user": lambda path: os.chown(path.parent, NOBODY, NOBODY),
}


@pytest.mark.filterwarnings("ignore:compiled code is not kept")
@pytest.mark.parametrize("place", [pytest.param(x, marks=ROOT_ONLY if "user" in x else ()) for x in DISTRUST])
def test_what_others_may_have_written_is_not_read(kept, place):
    DISTRUST[place](kept)
    assert compile_double()
    if "folder" in place:
        assert caches.find_numba_cache().problem.startswith(f"{kept.parent} is not safe: ")


@ROOT_ONLY
def test_what_root_has_compiled_serves_all(monkeypatch):
    """In a folder that nobody else can write to: whatever they need besides is one warning."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        monkeypatch.setattr(numba.config, "CACHE_DIR", folder)
        assert compile_double()
        child = os.fork()
        if child == 0:
            os.setresuid(NOBODY, NOBODY, NOBODY)
            with warnings.catch_warnings(record=True) as told:
                found = [*map(compile_double, (numba.float64, numba.float32, numba.complex64))]
            os._exit(found != [False, True, True] or len(told) != 1)
        assert os.waitpid(child, 0)[1] == 0


def test_code_that_cannot_be_kept_is_one_warning(folder):
    folder.parent.touch()
    with pytest.warns(RuntimeWarning, match="compiled code is not kept, .* it again: .*Not a directory") as found:
        assert compile_double() and compile_double()
    assert len(found) == 1 and caches.find_numba_cache().problem.endswith("cannot be written: Not a directory")


PROGRAM = """
    import resource, torch
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    from rl_triton_core import normalize_advantages
    from rl_triton_core.cli import caches
    print(round(float(normalize_advantages(torch.ones(1, 3)).sum()), 5), caches.find_numba_cache().problem)
"""


def test_a_disk_that_is_full_ends_no_call(tmp_path):
    """Also where warnings are errors; no unfinished file is left."""
    environment = {"NUMBA_CACHE_DIR": str(tmp_path), "NUMBA_OPT": "0", "PYTHONWARNINGS": "error::RuntimeWarning"}
    said = run_python(PROGRAM, **environment)
    assert re.fullmatch(r"-?0.0 .* cannot be written: File too large\n", said)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_file_is_complete_when_it_has_its_name(tmp_path):
    path, sizes = tmp_path / "file", set()
    writer = threading.Thread(target=lambda: [write_kept(path, bytes(1000 + i % 2 * 500_000)) for i in range(100)])
    writer.start()
    while writer.is_alive():
        with suppress(FileNotFoundError):
            sizes.add(len(read_kept(path)))
    assert sizes <= {1000, 501_000} and len(read_kept(path)) == 501_000 and [*tmp_path.iterdir()] == [path]


def fail(*_, **__):
    raise OSError("the terminal is gone")


@pytest.mark.parametrize("is_shown", [True, False])
def test_a_warning_ends_nothing(monkeypatch, capsys, is_shown):
    """Neither as an error nor where it cannot be shown, and it points at the caller."""
    with pytest.warns(RuntimeWarning, match="slow") as found:
        warn("all is slow", RuntimeWarning)
    assert found[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error" if is_shown else "always")
        if not is_shown:
            monkeypatch.setattr(warnings, "showwarning", fail)
            monkeypatch.setattr(sys, "stderr", io.StringIO())
            sys.stderr.close()
        warn("all is slow", RuntimeWarning)
    assert ("RuntimeWarning: all is slow" in capsys.readouterr().err) == is_shown
