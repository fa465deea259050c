"""Print what to change in a script of CleanRL's for Gymnasium 1.x and this package, as a diff.

    python examples/cleanrl_diff.py cleanrl/ppo.py | patch -p0                      advantages by rl_triton_core
    python examples/cleanrl_diff.py cleanrl/ppo.py --update fused | patch -p0       and the loss in one pass
    python examples/cleanrl_diff.py cleanrl/ppo.py --update captured | patch -p0    and minibatches as a CUDA graph
    python examples/cleanrl_diff.py cleanrl/ppo.py --update compiled | patch -p0    or, on a CPU, in compiled code

It knows ppo.py, ppo_continuous_action.py and ppo_atari.py, and scripts that were made of them. A place that is not
found, or found twice, is an error.
"""

import argparse
import difflib
import re
import sys
from pathlib import Path
from textwrap import dedent, indent
from typing import NamedTuple

from command_line import run, stop


class Edit(NamedTuple):
    """A change of whole lines."""

    pattern: str
    """What they are, from the first character that is no space; a dot may be the end of a line."""
    text: str
    """What stands in their place, as far to the right; groups of the pattern by name."""
    only: str = ""
    """A pattern that has to be in the script, or nothing is changed."""
    unless: str = "$^"
    """One that may not be in it."""


TO_GYMNASIUM_1 = [
    Edit(
        r"(?P<envs>\[make_env\([^\n]*\]),?",
        """
        \\g<envs>,
        autoreset_mode=gym.vector.AutoresetMode.SAME_STEP,
        """,
        unless="AutoresetMode.SAME_STEP",
    ),
    Edit(
        r'(# Only print[^\n]*\n *)?if "final_info" (not )?in infos:.*?(?=\n\n *# bootstrap value)',
        """
        if "episode" in infos.get("final_info", {}):
            finished, over = infos["final_info"]["episode"], infos["final_info"]["_episode"]
            for episodic_return, episodic_length in zip(finished["r"][over], finished["l"][over]):
                print(f"global_step={global_step}, episodic_return={episodic_return}")
                writer.add_scalar("charts/episodic_return", episodic_return, global_step)
                writer.add_scalar("charts/episodic_length", episodic_length, global_step)
        """,
        unless=r'infos\.get\("final_info"',
    ),
    Edit(
        r"env = gym.wrappers.TransformObservation\((?P<kept>[^\n]*)\)",
        "env = gym.wrappers.TransformObservation(\\g<kept>, env.observation_space)",
        only=r"TransformObservation\(",
        unless=r"TransformObservation\([^\n]*observation_space\)",
    ),
    Edit(r"env = gym.wrappers.GrayScale(?P<kept>[^\n]*)", "env = gym.wrappers.Grayscale\\g<kept>", only="GrayScale"),
    Edit(
        r"env = gym.wrappers.FrameStack\((?P<kept>[^\n]*)",
        "env = gym.wrappers.FrameStackObservation(\\g<kept>",
        only=r"FrameStack\(",
    ),
    Edit(
        "import gymnasium as gym", "import ale_py\nimport gymnasium as gym", only="NoFrameskip", unless="import ale_py"
    ),
    Edit(
        r"args = (tyro\.cli\(Args\)|parse_args\(\))",
        "gym.register_envs(ale_py)\n\\g<0>",
        only="NoFrameskip",
        unless="register_envs",
    ),
]
ADVANTAGES = [
    Edit(
        r"advantages = torch.zeros_like\(rewards\).*returns = advantages \+ values",
        "advantages, returns = gae(rewards, values, dones, next_value, next_done, args.gamma, args.gae_lambda)",
    ),
]
LOSS = """
losses = ppo_loss(
    LogProbs(newlogprob, entropy), None, b_logprobs[mb_inds], b_advantages[mb_inds],
    values=newvalue.view(-1), old_values=b_values[mb_inds], returns=b_returns[mb_inds],
    clip=args.clip_coef, normalize_advantages=args.norm_adv, entropy_coef=args.ent_coef,
    value_coef=args.vf_coef, value_factor=0.5,
    value_clip=args.clip_coef if args.clip_vloss else None, value_clip_mode="cleanrl",
)
"""
LOGGED = """
loss, pg_loss, v_loss, entropy_loss = losses[:4]
approx_kl, old_approx_kl = losses.approx_kl, losses.approx_kl_k1
"""
FUSED = [
    Edit(
        r"logratio = newlogprob - b_logprobs\[mb_inds\].*\n *loss = pg_loss - [^\n]*",
        LOSS + LOGGED + "clipfracs += [losses.clip_fraction.item()]",
    ),
]
STEP = (
    """
# A graph finds its tensors where they are: each rollout is written into the same ones.
b_obs, b_logprobs, b_actions, b_values = (x.flatten(0, 1) for x in (obs, logprobs, actions, values))
b_advantages, b_returns = torch.zeros((2, args.batch_size), device=device)

def update_minibatch(mb_inds):
    _, newlogprob, entropy, newvalue = agent.get_action_and_value(b_obs[mb_inds], b_actions[mb_inds])
"""
    + indent(LOSS.lstrip(), "    ")
    + """\
    optimizer.zero_grad()
    losses.loss.backward()
    nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
    optimizer.step()
    return [x.detach() for x in losses]

update_minibatch = CapturedStep(update_minibatch, modules=[agent], optimizers=[optimizer])

\\g<0>
"""
)
CAPTURED = [
    Edit(r"random\.seed\(args\.seed\)", "\\g<0>\ntorch.distributions.Distribution.set_default_validate_args(False)"),
    Edit(
        r"b_obs = obs\.reshape.*\n *b_values = values\.reshape[^\n]*",
        "b_advantages.copy_(advantages.flatten())\nb_returns.copy_(returns.flatten())",
    ),
    Edit(
        r"_, newlogprob, entropy, newvalue = agent.*\n *optimizer\.step\(\)",
        "losses = PPOLoss(*update_minibatch(torch.from_numpy(mb_inds).to(device)))\n"
        + LOGGED.lstrip()
        + "clipfracs += [losses.clip_fraction.clone()]",
    ),
    Edit(
        r'writer\.add_scalar\("losses/clipfrac"[^\n]*',
        'writer.add_scalar("losses/clipfrac", torch.stack(clipfracs).mean().item(), global_step)',
    ),
    Edit(r"for (iteration|update) in range\([^\n]*", STEP),
]
COMPILED = [
    Edit(
        r"optimizer = optim\.Adam\([^\n]*",
        """
        \\g<0>
        compiled = CompiledUpdate(
            agent.actor, agent.critic, optimizer, head="categorical", value_clip_mode="cleanrl"
        )
        """,
        unless="actor_logstd",
    ),
    Edit(
        r"optimizer = optim\.Adam\([^\n]*",
        """
        \\g<0>
        networks = agent.actor_mean, agent.critic
        compiled = CompiledUpdate(
            *networks, optimizer, head="gaussian", log_std=agent.actor_logstd, value_clip_mode="cleanrl"
        )
        """,
        only="actor_logstd",
    ),
    Edit(
        r"for start in range\(0, args\.batch_size, args\.minibatch_size\):.*\n *optimizer\.step\(\)",
        """
        (steps,) = compiled.run(
            Rollout(b_obs, b_actions.reshape(len(b_obs), -1), b_advantages, b_returns, b_logprobs, b_values),
            [torch.from_numpy(b_inds)], args.minibatch_size, clip=args.clip_coef,
            normalize_advantages=args.norm_adv, entropy_coef=args.ent_coef, max_grad_norm=args.max_grad_norm,
            value_coef=0.5 * args.vf_coef, value_clip=args.clip_coef if args.clip_vloss else None,
        )
        pg_loss, v_loss, entropy_loss, _, approx_kl = steps[-1, :5] * torch.tensor([1, 0.5, 1, 1, 1])
        clipfracs += steps[:, 3].tolist()
        """,
    ),
    Edit(r'writer\.add_scalar\("losses/old_approx_kl"[^\n]*\n *(?P<kept>[^\n]*)', "\\g<kept>"),
]
LOSSES = "from rl_triton_core.losses import"
UPDATES = {
    "stock": ([], []),
    "fused": (FUSED, [f"{LOSSES} LogProbs, ppo_loss"]),
    "captured": (
        CAPTURED,
        ["from rl_triton_core.capture import CapturedStep", f"{LOSSES} LogProbs, PPOLoss, ppo_loss"],
    ),
    "compiled": (COMPILED, ["from rl_triton_core.compiled import CompiledUpdate, Rollout"]),
}


def change_script(source: str, update: str = "stock") -> str:
    """Make all changes in the text of a script."""
    edits, imports = UPDATES[update]
    lines = "\n".join(["\\g<0>", "", "from rl_triton_adapters.cleanrl import gae", *imports])
    first = Edit(r"from torch\.utils\.tensorboard import SummaryWriter", lines)
    return make_edits(source, [first, *TO_GYMNASIUM_1, *ADVANTAGES, *edits])


def make_edits(source: str, edits: list[Edit]) -> str:
    """Make those of the changes that are for such a script, one after the other."""
    for edit in edits:
        if re.search(edit.only, source) and not re.search(edit.unless, source):
            source = make_edit(source, edit)
    return source


def make_edit(source: str, edit: Edit) -> str:
    """Make a change in the one place for it."""
    found = list(re.finditer(f"^(?P<space> *)(?:{edit.pattern})$", source, re.MULTILINE | re.DOTALL))
    if len(found) != 1:
        raise LookupError(f"got {len(found)} places for {edit.pattern!r}, expected 1: is this a script of CleanRL's?")
    (match,) = found
    text = dedent(edit.text).strip("\n").replace("\\g<0>", match[0].strip())
    text = re.sub(r"\\g<(\w+)>", lambda group: match[group[1]], text)
    return source[: match.start()] + indent(text, match["space"]) + source[match.end() :]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script", type=Path)
    parser.add_argument("--update", choices=list(UPDATES), default="stock", help="who updates the agent")
    args = parser.parse_args()
    try:
        before = args.script.read_text(encoding="utf-8")
        after = change_script(before, args.update)
    except (LookupError, UnicodeError) as error:
        stop(f"{args.script}: {error}")
    lines = (text.splitlines(keepends=True) for text in (before, after))
    sys.stdout.writelines(difflib.unified_diff(*lines, str(args.script), str(args.script)))


if __name__ == "__main__":
    run(main)
