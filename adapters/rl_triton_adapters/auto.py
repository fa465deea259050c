"""Adapters without a line in the program: where it imports a framework, that framework's adapter is switched on.

`rl-triton run` sets RL_TRITON_AUTO=1, and Python reads `rl_triton_auto.pth` as it starts, which calls `install` then.
Nothing is imported that the program does not import, and no error of an adapter ends it.
"""

import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from copy import copy
from importlib import import_module
from typing import Any, NoReturn

from rl_triton_adapters.common.switch import find_off_switch, find_places, replace_stock

HELP = "Run a command, and switch on the adapter of every framework that its Python programs import."
PREFIX = "rl_triton_adapters."
MODULES = {
    "stable_baselines3": ("sb3", "sb3.enabling", ""),
    "sb3_contrib": ("sb3-contrib", "sb3.enabling", "list_contrib_places"),
    "ray.rllib.algorithms": ("rllib", "rllib.config", "list_places"),
    "rsl_rl.algorithms": ("rsl-rl", "rsl_rl", ""),
    "rl_games.algos_torch.a2c_continuous": ("rl-games", "rl_games", ""),
    "rl_games.algos_torch.a2c_discrete": ("rl-games", "rl_games", ""),
    "skrl.agents.torch.a2c": ("skrl", "skrl", ""),
    "skrl.agents.torch.ppo": ("skrl", "skrl", ""),
    "skrl.multi_agents.torch.ippo": ("skrl", "skrl", ""),
    "skrl.multi_agents.torch.mappo": ("skrl", "skrl", ""),
    "skrl.utils.runner.torch": ("skrl", "skrl", ""),
    "torchrl.objectives": ("torchrl", "torchrl", "use_triton_estimators"),
    "trl.trainer.grpo_trainer": ("trl", "trl", ""),
    "verl": ("verl", "verl", "install"),
}
"""By modules of frameworks: the extra, the adapter, and a function of it; without its answer, its classes serve."""
WAITING: dict[str, tuple[str, str, str]] = {}  # for an import
LOADING: set[str] = set()  # modules of frameworks and adapters, and packages around them, whose code runs


class Finder:
    """Finds modules as all others do, and looks again for adapters to switch on where one of these is complete."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Find a module of a framework or adapter, or a package around one."""
        if not (name.startswith(PREFIX) or any(f"{x}.".startswith(f"{name}.") for x in list(WAITING))):
            return None
        others = [x.find_spec for x in sys.meta_path if x is not self and hasattr(x, "find_spec")]
        spec = next(filter(None, (find_spec(name, path, target) for find_spec in others)), None)
        if spec is not None and spec.loader is not None and hasattr(spec.loader, "exec_module"):
            execute, spec.loader = spec.loader.exec_module, copy(spec.loader)  # an archive has one for all modules

            def execute_module(module: Any) -> None:
                LOADING.add(name)
                try:
                    execute(module)
                finally:
                    LOADING.discard(name)
                switch_on()

            setattr(spec.loader, "exec_module", execute_module)  # noqa: B010 (mypy refuses an assignment)
        return spec


def switch_on() -> None:
    """Switch on what waits for modules that are complete, as the packages around them and all adapters are.

    Without a lock: another thread may wait for it in an import that this one waits for.
    """
    is_timed = "RL_TRITON_ESTIMATE" in os.environ or os.environ.get("RL_TRITON_REPORT") == "1"
    for name, (framework, adapter, function) in list(WAITING.items()):
        is_loading = any(f"{name}.".startswith(f"{x}.") or x.startswith(PREFIX) for x in set(LOADING))
        if name not in sys.modules or is_loading or WAITING.pop(name, None) is None:
            continue
        try:
            if framework == "sb3" and is_timed:
                import_module(f"{PREFIX}estimate").Clock().watch()
            if find_off_switch():
                continue
            ours = import_module(PREFIX + adapter)
            replace_stock((function and getattr(ours, function)()) or find_places(name, vars(ours).values()))
            text = f"rl-triton: {framework} is switched on"
        except Exception as error:  # which must not end the program
            text = f"rl-triton: {framework} stays as it is: {type(error).__name__}: {error}"
        said = os.environ.get("RL_TRITON_SAID", "")  # by this process, or one that has started it
        if text not in said:
            os.environ["RL_TRITON_SAID"] = said + text
            with suppress(Exception):
                sys.stderr.write(f"{text}\n")


def install() -> None:
    """Switch adapters on where frameworks are imported, or have been; but for those that RL_TRITON_OFF names."""
    is_asked = os.environ.get("RL_TRITON") != "0" or "RL_TRITON_ESTIMATE" in os.environ
    if is_asked and not any(isinstance(x, Finder) for x in sys.meta_path):
        off = os.environ.get("RL_TRITON_OFF", "").split(",")
        WAITING.update({name: x for name, x in MODULES.items() if x[0] not in off})
        sys.meta_path.insert(0, Finder())
        switch_on()


def add_arguments(parser: Any) -> None:
    """Add the arguments of `rl-triton run`."""
    off = "Leave this framework as it is. May be given several times."
    parser.add_argument("--off", action="append", default=[], metavar="FRAMEWORK", help=off)
    report = "Say at the end, on standard error, how updates were made, and why."
    parser.add_argument("--report", action="store_true", help=report)
    parser.add_argument("words", nargs="...", metavar="-- COMMAND", help="The command and its arguments.")


def prepare(options: Any) -> list[str]:
    """The command, in whose Python programs all adapters but those of some frameworks will be switched on."""
    off, command = options.off, options.words[options.words[:1] == ["--"] :]
    known = dict.fromkeys(x for x, _, _ in MODULES.values())
    if not command or {*off} - {*known}:
        raise ValueError(f"got --off {off} and {command}, expected a command, and for --off one of {', '.join(known)}")
    asked = {"RL_TRITON_AUTO": "1", "RL_TRITON_OFF": ",".join(off), "RL_TRITON_REPORT": "1" * options.report}
    os.environ |= {name: x for name, x in asked.items() if x}
    test = [sys.executable, "-c", f"import sys; sys.modules['{__name__}']"]
    if subprocess.run(test, capture_output=True, check=False).returncode:
        raise ImportError(f"{sys.executable} does not read rl_triton_auto.pth: install rl-triton-core again")
    return command  # type: ignore[no-any-return]


def run(options: Any) -> NoReturn:
    """Become the command."""
    command = prepare(options)
    if reason := find_off_switch():
        sys.stderr.write(f"rl-triton: nothing is switched on: {reason}\n")
    for name in {"SIGPIPE", "SIGXFSZ"} & {*signal.Signals.__members__}:  # which Python ignores, and commands do not
        signal.signal(signal.Signals[name], signal.SIG_DFL)
    os.execve(shutil.which(command[0]) or command[0], command, os.environ)
