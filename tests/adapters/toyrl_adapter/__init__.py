"""toyrl: PPO with advantages and loss of `rl_triton_core`, its update captured in a CUDA graph on a GPU."""

from toyrl import Agent

from rl_triton_adapters.common.check import with_check
from rl_triton_adapters.common.overrides import find_override
from rl_triton_adapters.common.switch import check_enabled
from rl_triton_adapters.common.update import Described
from toyrl_adapter.advantages import estimate_advantages
from toyrl_adapter.step import PACKAGES, Update


class TritonAgent(Agent, Described):
    """`Agent` of toyrl; with `enabled=False` nothing else.

    Raises:
        TypeError: `enabled` is no bool.
    """

    def __init__(self, *args, enabled=True, **kwargs):
        super().__init__(*args, **kwargs)
        self.enabled, self._rl_triton = check_enabled(enabled), Update(self, TritonAgent)
        self._rl_triton.prepare()

    def compute_advantages(self, last_value):
        if not self.enabled or find_override(self, ["compute_advantages"], PACKAGES, behind=TritonAgent):
            return super().compute_advantages(last_value)
        return estimate_advantages(self, last_value)

    @with_check
    def update(self):
        self._rl_triton.prepare()
        return super().update() if self._rl_triton.stock else self._rl_triton.make_steps()
