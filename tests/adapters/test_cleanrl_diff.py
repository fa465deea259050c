"""examples/cleanrl_diff.py: scripts of the shape of CleanRL's run under Gymnasium 1.x, log, and learn the same."""

import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import cleanrl_diff
import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from recorded_graphs import allow_captures

pytest.importorskip("tensorboard")

SCRIPT = '''
"""PPO in one file, with the names of CleanRL's scripts and in their order; the text is our own."""
import random
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import torch
from torch import nn, optim
from torch.distributions import Categorical, Normal
from torch.utils.tensorboard import SummaryWriter


def parse_args():
    return SimpleNamespace(
        env_id="ENV_ID", seed=1, num_envs=2, num_steps=48, minibatch_size=32, batch_size=96, update_epochs=2, gamma=0.9,
        gae_lambda=0.8, norm_adv=True, clip_coef=0.1, clip_vloss=True, ent_coef=0.02, vf_coef=0.5,
        max_grad_norm=0.5, target_kl=None,
    )


def make_env(env_id):
    def thunk():
        env = gym.make(env_id)
        env = gym.wrappers.RecordEpisodeStatistics(env)
        WRAPPERS
        return env

    return thunk


class Agent(nn.Module):
AGENT


if __name__ == "__main__":
    args = parse_args()
    writer = SummaryWriter("runs")
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    device = torch.device("cpu")
    envs = gym.vector.SyncVectorEnv(
        [make_env(args.env_id) for i in range(args.num_envs)]
    )
    agent = Agent(envs).to(device)
    optimizer = optim.Adam(agent.parameters(), lr=1e-3, eps=1e-5)
    shape = args.num_steps, args.num_envs
    obs = torch.zeros(shape + envs.single_observation_space.shape)
    actions = torch.zeros(shape + envs.single_action_space.shape)
    logprobs, rewards, dones, values = (torch.zeros(shape) for _ in range(4))
    global_step = 0
    next_obs = torch.Tensor(envs.reset(seed=args.seed)[0])
    next_done = torch.zeros(args.num_envs)

    for iteration in range(3):
        for step in range(args.num_steps):
            global_step += args.num_envs
            obs[step], dones[step] = next_obs, next_done
            with torch.no_grad():
                actions[step], logprobs[step], _, value = agent.get_action_and_value(next_obs)
                values[step] = value.flatten()
            chosen = actions[step].numpy() if envs.single_action_space.shape else actions[step].long().numpy()
            next_obs, reward, terminations, truncations, infos = envs.step(chosen)
            rewards[step] = torch.tensor(reward)
            next_obs, next_done = torch.Tensor(next_obs), torch.Tensor(terminations | truncations)

            if "final_info" in infos:
                for info in infos["final_info"]:
                    if info:
                        print("episodic_return", info["episode"]["r"])

        # bootstrap value if not done
        with torch.no_grad():
            next_value = agent.get_value(next_obs).reshape(1, -1)
            advantages = torch.zeros_like(rewards)
            carry = 0.0
            for t in range(args.num_steps - 1, -1, -1):
                is_last = t == args.num_steps - 1
                goes_on = 1.0 - (next_done if is_last else dones[t + 1])
                following = next_value[0] if is_last else values[t + 1]
                delta = rewards[t] + args.gamma * following * goes_on - values[t]
                advantages[t] = carry = delta + args.gamma * args.gae_lambda * goes_on * carry
            returns = advantages + values

        b_obs = obs.reshape((-1,) + envs.single_observation_space.shape)
        b_actions = actions.reshape((-1,) + envs.single_action_space.shape)
        b_logprobs, b_advantages, b_returns = (x.reshape(-1) for x in (logprobs, advantages, returns))
        b_values = values.reshape(-1)

        b_inds, clipfracs = np.arange(args.batch_size), []
        for epoch in range(args.update_epochs):
            np.random.shuffle(b_inds)
            for start in range(0, args.batch_size, args.minibatch_size):
                mb_inds = b_inds[start : start + args.minibatch_size]
                _, newlogprob, entropy, newvalue = agent.get_action_and_value(b_obs[mb_inds], b_actions[mb_inds])
                logratio = newlogprob - b_logprobs[mb_inds]
                approx_kl, old_approx_kl = (logratio.exp() - 1 - logratio).mean(), -logratio.mean()
                clipfracs += [((logratio.exp() - 1).abs() > args.clip_coef).float().mean().item()]
                gains = b_advantages[mb_inds]
                gains = (gains - gains.mean()) / (gains.std() + 1e-8)
                clipped = logratio.exp().clamp(1 - args.clip_coef, 1 + args.clip_coef)
                pg_loss = -torch.minimum(gains * logratio.exp(), gains * clipped).mean()
                newvalue = newvalue.view(-1)
                error = (newvalue - b_returns[mb_inds]) ** 2
                if args.clip_vloss:
                    near = b_values[mb_inds] + (newvalue - b_values[mb_inds]).clamp(-args.clip_coef, args.clip_coef)
                    error = torch.maximum(error, (near - b_returns[mb_inds]) ** 2)
                v_loss, entropy_loss = 0.5 * error.mean(), entropy.mean()
                loss = pg_loss - args.ent_coef * entropy_loss + v_loss * args.vf_coef

                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()
            if args.target_kl is not None and approx_kl > args.target_kl:
                break
        writer.add_scalar("losses/value_loss", v_loss.item(), global_step)
        writer.add_scalar("losses/old_approx_kl", old_approx_kl.item(), global_step)
        writer.add_scalar("losses/approx_kl", approx_kl.item(), global_step)
        writer.add_scalar("losses/clipfrac", np.mean(clipfracs), global_step)
    envs.close()
    writer.close()
'''
AGENT = """
    def __init__(self, envs):
        super().__init__()
        inputs, space = np.prod(envs.single_observation_space.shape), envs.single_action_space
        self.critic = nn.Sequential(FLATTENnn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, 1))
        POLICY = nn.Sequential(FLATTENnn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, OUTPUTS))
        LOGSTD

    def get_value(self, x):
        return self.critic(x)

    def get_action_and_value(self, x, action=None):
        probs = PROBS
        action = probs.sample() if action is None else action
        log_prob, entropy = probs.log_prob(action), probs.entropy()
        return action, log_probSUM, entropySUM, self.critic(x)
""".strip("\n")
DISCRETE = {
    "ENV_ID": "Lamp-v0",
    "WRAPPERS": "",
    "POLICY": "self.actor",
    "OUTPUTS": "space.n",
    "LOGSTD": "",
    "PROBS": "Categorical(logits=self.actor(x))",
    "SUM": "",
    "FLATTEN": "",
}
FAMILIES = {
    "ppo": DISCRETE,
    "ppo_continuous_action": {
        **DISCRETE,
        "ENV_ID": "Dimmer-v0",
        "WRAPPERS": "env = gym.wrappers.TransformObservation(env, lambda obs: np.clip(obs, -10, 10))",
        "POLICY": "self.actor_mean",
        "OUTPUTS": "np.prod(space.shape)",
        "LOGSTD": "self.actor_logstd = nn.Parameter(torch.zeros(1, np.prod(space.shape)))",
        "PROBS": "Normal(self.actor_mean(x), self.actor_logstd.exp().expand(len(x), -1))",
        "SUM": ".sum(1)",
    },
    "ppo_atari": {
        **DISCRETE,
        "ENV_ID": "LampNoFrameskip-v4",
        "WRAPPERS": "env = gym.wrappers.GrayScaleObservation(env)\n        env = gym.wrappers.FrameStack(env, 2)",
        "FLATTEN": "nn.Flatten(), ",
    },
}
MATCHING = [
    ("ppo", "captured"),
    ("ppo", "compiled"),
    ("ppo_continuous_action", "fused"),
    ("ppo_continuous_action", "compiled"),
    ("ppo_atari", "stock"),
    ("ppo_atari", "fused"),
]


class Lamp(gym.Env):
    """Rewards the action that says whether the light is on; a step in eight is the last, by termination or not."""

    def __init__(self, kind="discrete"):
        self.frames = kind == "frames"
        self.action_space = spaces.Box(-1, 1, (2,)) if kind == "continuous" else spaces.Discrete(2)
        image = spaces.Box(0, 255, (4, 4, 3), np.uint8)
        self.observation_space = image if self.frames else spaces.Box(-np.inf, np.inf, (3,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observe(), {}

    def observe(self):
        self.light = int(self.np_random.integers(2))
        if self.frames:
            return np.full((4, 4, 3), 200 * self.light, np.uint8)
        return self.np_random.normal(self.light, 0.1, 3).astype(np.float32)

    def step(self, action):
        reward = float(np.mean(action == self.light))
        terminated, truncated = self.np_random.random(2) < 1 / 16
        return self.observe(), reward, bool(terminated), bool(truncated), {}


@pytest.fixture(autouse=True)
def environments(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "ale_py", ModuleType("ale_py"))
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    kinds = {"Lamp-v0": "discrete", "Dimmer-v0": "continuous", "LampNoFrameskip-v4": "frames"}
    for name, kind in kinds.items():
        gym.register(name, Lamp, kwargs={"kind": kind})
    yield
    for name in kinds:
        del gym.registry[name]


def write_script(family):
    text = SCRIPT.replace("AGENT", AGENT)
    for name, part in FAMILIES[family].items():
        text = text.replace(name, part)
    return text


def run_script(text, capsys):
    """The parameters of the agent that it trains, the episodes that it prints, and what its names stand for."""
    Path("script.py").write_text(text)
    names = runpy.run_path("script.py", run_name="__main__")
    assert list(Path("runs").glob("events*"))
    printed = [line for line in capsys.readouterr().out.splitlines() if "episodic_return" in line]
    return torch.cat([x.detach().flatten() for x in names["agent"].parameters()]), printed, names


@pytest.mark.parametrize(("family", "update"), MATCHING)
def test_scripts_learn_the_same(family, update, capsys, monkeypatch):
    """With every update; with advantages alone, every bit. Each episode that ended is printed once."""
    allow_captures(monkeypatch)
    want, printed, _ = run_script(cleanrl_diff.make_edits(write_script(family), cleanrl_diff.TO_GYMNASIUM_1), capsys)
    got, also_printed, names = run_script(cleanrl_diff.change_script(write_script(family), update), capsys)
    tolerance = 0 if update == "stock" else 1e-5
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    assert also_printed == printed and len(printed) > 10
    assert update != "captured" or names["update_minibatch"].graphs.replays == 3 * 2 * 3


@pytest.mark.parametrize("family", FAMILIES)
def test_the_diff_applies(family, capsys):
    """By git, as by patch; the script says so if there is no loop to replace any more."""
    script, program = Path("script.py"), Path(cleanrl_diff.__file__)
    script.write_text(write_script(family))
    command = [sys.executable, program, "script.py", "--update", "fused"]
    diff = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    subprocess.run(["git", "apply", "-p0"], input=diff, check=True, text=True)
    assert script.read_text() == cleanrl_diff.change_script(write_script(family), "fused")
    again = subprocess.run(command, check=False, capture_output=True, text=True)
    assert again.returncode and "got 0 places for" in again.stderr and not again.stdout


def test_a_script_that_gymnasium_runs_is_left_alone():
    changed = cleanrl_diff.make_edits(write_script("ppo_continuous_action"), cleanrl_diff.TO_GYMNASIUM_1)
    assert cleanrl_diff.make_edits(changed, cleanrl_diff.TO_GYMNASIUM_1) == changed
