"""What happens in the middle of a training of Stable-Baselines3."""

from stable_baselines3.common.callbacks import BaseCallback


class At(BaseCallback):
    """Calls a function of the model at a step or at every one, or in another moment, such as "rollout_start"."""

    def __init__(self, call, step=None, moment="step"):
        super().__init__()

        def call_and_go_on():
            if step in (None, self.num_timesteps):
                call(self.model)
            return True

        setattr(self, f"_on_{moment}", call_and_go_on)

    def _on_step(self):
        return True
