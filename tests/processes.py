"""What tests run in other processes: programs, and functions in processes that share a group."""

import os
import subprocess
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import distributed, multiprocessing

import rl_triton_core

GLOO = pytest.mark.skipif(not distributed.is_available() or not distributed.is_gloo_available(), reason="no gloo")


def run_command(*words, **options):
    """What a command prints, which must not fail."""
    done = subprocess.run(words, capture_output=True, text=True, check=False, **{"timeout": 300, **options})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


BLOCK = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Block())
"""


def run_python(program, *arguments, without=(), **environment):
    """What a program prints, in which some packages are absent; without Triton's interpreter unless told otherwise."""
    root = str(Path(rl_triton_core.__file__).parents[1])
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": os.pathsep.join([root, env.get("PYTHONPATH", "")]), **environment}
    program = (BLOCK.format(without) if without else "") + textwrap.dedent(program)
    return run_command(sys.executable, "-c", program, *arguments, env=env)


def run_program(folder, *arguments, run=None, command="run --report", **environment):
    """Run Python as if this were installed, perhaps by `rl-triton`; all it prints, results, and its exit status."""
    folders = [str(Path(find_spec(x).origin).parents[1]) for x in ("rl_triton_core", "rl_triton_adapters")]
    lines = "import signal, site", "signal.signal(signal.SIGINT, signal.default_int_handler)"  # jobs may ignore it
    lines += f"site.addsitedir({folders[1]!r})", "site.of_user = True"
    (folder / "sitecustomize.py").write_text("\n".join(lines))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *folders, *filter(None, sys.path)])}
    options = {"env": {**env, "OMP_NUM_THREADS": "1", **environment}, "input": "in", "timeout": 600, "cwd": folder}
    before = [] if run is None else ["-m", "rl_triton_core", *command.split(), *run, "--", sys.executable]
    words = [sys.executable, *before, *map(str, arguments)]
    done = subprocess.run(words, check=False, capture_output=True, text=True, **options)
    lines = [x for x in (done.stdout + done.stderr).splitlines() if x.startswith(("result", "rl-triton: "))]
    return done.stdout + done.stderr, [x for x in lines if not x.endswith("on")], done.returncode


def run_ranks(function, folder, *arguments, ranks=2, kind="gloo"):
    """Call a function in processes that share a group, with their ranks first; return what each of them returned."""
    multiprocessing.spawn(call_in_rank, (function, str(folder), ranks, kind, *arguments), nprocs=ranks)
    return [torch.load(Path(folder) / str(rank), map_location="cpu", weights_only=False) for rank in range(ranks)]


def call_in_rank(rank, function, folder, ranks, kind, *arguments):
    torch.set_num_threads(1)
    if rank < torch.cuda.device_count():
        torch.cuda.set_device(rank)
    distributed.init_process_group(kind, init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    torch.save(function(rank, *arguments), f"{folder}/{rank}")
    distributed.barrier()
    distributed.destroy_process_group()


def join_group(runner):
    """As a runner of RSL-RL does, of a group that is there already, and on a CPU too."""
    rank, size = distributed.get_rank(), distributed.get_world_size()
    runner.is_distributed, runner.gpu_world_size, runner.gpu_global_rank = True, size, rank
    runner.cfg["multi_gpu"] = runner.multi_gpu_cfg = {"global_rank": rank, "local_rank": rank, "world_size": size}
