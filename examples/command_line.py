"""What the programs beside this file share: numbers with limits, curves, missing packages, and errors of one line."""

import argparse
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn


def stop(message: object) -> NoReturn:
    """End the program as `argparse` does where an argument is wrong."""
    with suppress(OSError):
        print(f"{Path(sys.argv[0]).name}: error: {message}", file=sys.stderr)
    sys.exit(2)


@contextmanager
def needing(extra: str, module: str) -> Iterator[None]:
    """Within, a program whose import fails ends and says what to install. Other modules get the error."""
    try:
        yield
    except ImportError as error:
        if module != "__main__":
            raise
        stop(f'{error}. In the folder of the project: pip install -e ".[{extra}]"')


def within(least: float, most: float = math.inf) -> Callable[[str], float]:
    """Read a number, of the type of the smallest that is allowed, up to the largest."""
    kind = type(least)

    def read(text: str) -> float:
        number = kind(text)
        if not least <= number <= most:
            limits = f"at least {least}" if most == math.inf else f"{least} to {most}"
            raise argparse.ArgumentTypeError(f"got {text}, expected {limits}")
        return number

    read.__name__ = kind.__name__  # for the message about what is no number
    return read


COUNT, FACTOR, SHARE, SEED = within(1), within(0.0, 1e9), within(0.0, 1.0), within(0, 2**31 - 1)


def device(text: str) -> str:
    """Read the name of a device that there is; "auto" is a GPU if there is one."""
    import torch

    name = ("cuda" if torch.cuda.is_available() else "cpu") if text == "auto" else text
    try:
        torch.zeros((), device=name).item()
    except (AssertionError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise argparse.ArgumentTypeError(f"got {text}, expected a device that there is here: {reason}") from None
    return name


def environment(text: str) -> str:
    """Read the name of one of Gymnasium's environments that can be made."""
    import gymnasium as gym

    try:
        gym.make(text).close()
    except (gym.error.Error, ImportError) as error:
        raise argparse.ArgumentTypeError(f"got {text}, expected an environment of Gymnasium: {error}") from None
    return text


def check_rollout(parser: argparse.ArgumentParser, args: argparse.Namespace) -> argparse.Namespace:
    """The arguments, if there is a rollout, and two samples in each minibatch, whose advantages can be normalised."""
    samples = args.num_envs * args.num_steps
    if args.total_timesteps < samples:
        parser.error(f"--total-timesteps: got {args.total_timesteps}, expected at least one rollout of {samples}")
    if samples < 2 * args.num_minibatches:
        parser.error(f"--num-minibatches: got {args.num_minibatches}, expected at most half of {samples} samples")
    return args


class Curves:
    """TensorBoard's curves of a run. Training goes on without them: why they are not written is said once."""

    def __init__(self, folder: str) -> None:
        self.writer: Any = None
        with self.saying_why():
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(folder)

    def add_scalar(self, name: str, number: float, step: int) -> None:
        """Write a point of a curve."""
        with self.saying_why():
            if self.writer is not None:
                self.writer.add_scalar(name, number, step)

    def close(self) -> None:
        """Write what is left."""
        with self.saying_why():
            if self.writer is not None:
                self.writer.close()

    @contextmanager
    def saying_why(self) -> Iterator[None]:
        """Within, what fails is the last that is written."""
        try:
            yield
        except Exception as error:
            self.writer = None
            with suppress(OSError):
                print(f"No curves for TensorBoard, training goes on: {error}", file=sys.stderr)


def judge(returns: Any, target: float | None) -> int:
    """Say what episodes of an evaluation returned; the exit status is 1 if their mean is below a target."""
    mean, deviation = returns.mean(), ((returns - returns.mean()) ** 2).mean() ** 0.5
    print(f"evaluation: mean return {mean:.1f} +- {deviation:.1f} over {len(returns)} episodes")
    return int(target is not None and bool(mean < target))


def run(main: Callable[[], int | None]) -> NoReturn:
    """End the program with the status that a function returns, or a line about what cannot be read or written."""
    try:
        status = main()
        sys.stdout.flush()
    except argparse.ArgumentTypeError as error:
        stop(error)
    except OSError as error:
        with suppress(OSError):  # or Python would write there as it ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):  # whoever reads has read enough
            sys.exit(0)
        stop(error)
    sys.exit(status)
