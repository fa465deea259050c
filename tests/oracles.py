"""The oracles, which ship with the package: `rl-triton selftest` compares with them too."""

from rl_triton_core._internal.selftest.oracles import *  # noqa: F403
