"""toyrl: advantages as a scan."""

from rl_triton_core import compute_gae


def estimate_advantages(agent, last_value):
    """As `Agent.compute_advantages`; toyrl counts truncated episodes as terminated."""
    rewards, values, dones = (agent.rollout[name].unsqueeze(1) for name in ("rewards", "values", "dones"))
    last = last_value.reshape(1)
    options = {"gamma": agent.gamma, "lambda_": agent.lam, "time_dim": 0, "compute_returns": False}
    return compute_gae(rewards, values, terminated=dones, bootstrap_values=last, **options).advantages.squeeze(1)
