"""Programs that tests run in an interpreter of their own."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import rl_triton_core


def run_python(program, *arguments, **environment):
    """Run a program without Triton's interpreter, unless the environment says so, and return what it printed."""
    root = str(Path(rl_triton_core.__file__).parents[1])
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": os.pathsep.join([root, env.get("PYTHONPATH", "")]), **environment}
    command = [sys.executable, "-c", textwrap.dedent(program), *arguments]
    result = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout
