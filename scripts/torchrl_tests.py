"""Run TorchRL's own tests of value estimators and PPO with our classes and functions in the place of TorchRL's.

    git clone --branch v0.14.1 https://github.com/pytorch/rl
    python scripts/torchrl_tests.py rl                        options of pytest may follow: -k gae -x

The tests are not part of TorchRL's distributions, so a checkout of the version that is installed is needed. The last
lines say in how many tests the package computed something; where that is none, nothing was tested.
"""

import importlib
import sys
from collections import Counter
from functools import wraps
from pathlib import Path

import pytest
from torchrl.objectives.value import functional

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "adapters")]

from rl_triton_adapters import torchrl, torchrl_losses  # noqa: E402

FILES = ("test_values.py", "test_ppo.py")
MODULES = ("torchrl.objectives", "torchrl.objectives.ppo")
MODULES += tuple(f"torchrl.objectives.value{name}" for name in ("", ".advantages", ".functional"))
OURS = {
    "GAE": torchrl.TritonGAE,
    "TDLambdaEstimator": torchrl.TritonTDLambdaEstimator,
    "VTrace": torchrl.TritonVTrace,
    "ClipPPOLoss": torchrl_losses.TritonClipPPOLoss,
}
for stock in ("generalized_advantage_estimate", "td_lambda_return_estimate", "vtrace_advantage_estimate"):
    for name in {stock, f"vec_{stock}"} & vars(functional).keys():
        OURS[name] = torchrl.with_stock(getattr(functional, name))(getattr(torchrl, stock))
COMPUTED = {torchrl: ("compute_gae", "compute_lambda_returns", "compute_vtrace"), torchrl_losses: ("ppo_loss",)}


class Substitute:
    """A plugin of pytest: test modules that are imported find ours by TorchRL's names, and calls are counted."""

    def __init__(self) -> None:
        self.running, self.calls = "", Counter[str]()
        for module, names in COMPUTED.items():
            for name in names:
                setattr(module, name, self.count_calls(getattr(module, name)))
        torchrl.use_triton_estimators()
        for module in map(importlib.import_module, MODULES):
            for name in OURS.keys() & vars(module).keys():
                setattr(module, name, OURS[name])

    def count_calls(self, function):
        """The function, whose calls are counted by test."""

        @wraps(function)
        def counting(*args, **kwargs):
            self.calls[self.running] += 1
            return function(*args, **kwargs)

        return counting

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self.running = item.nodeid

    def pytest_terminal_summary(self, terminalreporter) -> None:
        number = len(self.calls)
        terminalreporter.write_line(f"rl_triton_core computed in {number} tests, {self.calls.total()} times")


def find_files(checkout: Path) -> list[str]:
    """The tests, wherever in the checkout they are."""
    found = [path for name in FILES for path in sorted(checkout.glob(f"test*/**/{name}"))]
    if len(found) != len(FILES):
        raise SystemExit(f"{checkout}: got {len(found)} files, expected {' and '.join(FILES)} of a checkout of TorchRL")
    return list(map(str, found))


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    sys.exit(pytest.main([*find_files(Path(sys.argv[1])), "-p", "no:cacheprovider", *sys.argv[2:]], [Substitute()]))
