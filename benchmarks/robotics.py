"""Whole updates of RSL-RL, RL-Games and skrl against ours, of the same rollout."""

import tempfile
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from typing import Any

import ppo_rl_games
import ppo_rsl_rl
import ppo_skrl
import torch
from gpu_envs import ENVIRONMENTS
from processes import join_group
from rl_games.torch_runner import Runner
from rsl_rl.runners import OnPolicyRunner
from skrl import config as skrl_config
from skrl.utils.runner.torch import Runner as SkrlRunner
from torch import Tensor, distributed

from benchmarks import harness
from benchmarks.harness import Options, Rows, Setting, Times
from rl_triton_adapters.common.update import release_graphs
from rl_triton_adapters.rl_games import register_agents
from rl_triton_adapters.skrl import TritonRunner

BF16, TF32, LSTM, SYMMETRY, RND = "bf16", "tf32", "lstm", "symmetry", "random network distillation"
ZEROED = "lstm, zero_rnn_on_done"
EPOCHS, MINIBATCHES, HIDDEN = 5, 4, [256, 256, 256]  # of an update, as in Isaac Lab's configurations


def measure(setting: Setting, options: Options) -> Rows:
    """A package's own code and ours in turn."""
    run = time_updates if setting.processes == 1 else partial(harness.run_in_group, time_share, setting.processes)
    return harness.list_times(run(options.device, setting, options.rounds), unit="ms", step="update")


def time_updates(device: str, setting: Setting, rounds: int) -> Times:
    """The times of both arms. RL-Games always allows TF32 in matrix products."""
    torch._dynamo.reset()  # after some variants of RL-Games' model it would compile no more
    torch.backends.cuda.matmul.allow_tf32 = setting.variant == TF32
    with redirect_stdout(StringIO()):
        arms = {name: UPDATES[setting.package](provider, setting, device) for name, provider in PROVIDERS.items()}
    for name in ("stock", "ours", "ours"):
        arms[name]()
    return harness.time_in_turns(arms, device, turns=rounds, burst=1)


def time_share(device: str, setting: Setting, rounds: int) -> Times:
    """The same in one of several processes, each with a GPU and as many environments, which are a group already."""
    OnPolicyRunner._configure_multi_gpu = join_group
    about = {"_rank": distributed.get_rank(), "_world_size": setting.processes}
    vars(skrl_config.torch).update(_is_distributed=True, _device=device, **about)
    times = time_updates(device, setting, rounds)
    release_graphs()
    return times


# --- RSL-RL -----------------------------------------------------------------------------------------------------------


def make_rsl_rl_update(provider: str, setting: Setting, device: str) -> harness.Call:
    args = ppo_rsl_rl.parse_arguments(list_arguments(setting, device, advantages=provider))
    config = ppo_rsl_rl.make_config(args)
    config["obs_groups"]["rnd_state"] = ["state"]
    for network in ("actor", "critic"):
        config[network] |= {"hidden_dims": HIDDEN, "activation": "elu"}
        config[network] |= {"class_name": "RNNModel"} if setting.variant == LSTM else {}
    config["algorithm"] |= RSL_RL.get(setting.variant, {})
    torch.manual_seed(0)
    env = ppo_rsl_rl.TensorEnv(args.env, args.num_envs, args.device, seed=0)
    env.unwrapped, env.step_dt = env, 1.0  # as environments of Isaac Lab have them
    alg = OnPolicyRunner(env, config, device=args.device).alg
    with torch.inference_mode():
        for _ in range(args.num_steps):
            observations, *outcome = env.step(alg.act(env.get_observations()))
            alg.process_env_step(observations, *outcome)
        alg.compute_returns(observations)
    return alg.update


def mirror(env: Any, obs: Any, actions: Tensor | None) -> tuple[Any, Tensor | None]:
    """Observations and actions, and behind them those of the mirrored environment."""
    obs = None if obs is None else torch.cat([obs, obs.apply(torch.neg)])
    return obs, None if actions is None else torch.cat([actions, -actions])


MIRROR_LOSS = {"use_data_augmentation": True, "use_mirror_loss": True, "mirror_loss_coeff": 0.5}
PREDICTOR = {"num_outputs": 1, "predictor_hidden_dims": [64], "target_hidden_dims": [64], "weight": 1.0}
RSL_RL: dict[str, dict[str, Any]] = {  # more arguments of the algorithm
    BF16: {"use_mixed_precision": True},
    SYMMETRY: {"symmetry_cfg": {"data_augmentation_func": mirror, **MIRROR_LOSS}},
    RND: {"rnd_cfg": PREDICTOR},
}


# --- RL-Games ---------------------------------------------------------------------------------------------------------


def make_rl_games_update(provider: str, setting: Setting, device: str) -> harness.Call:
    agent = make_rl_games_agent(provider, setting, device)
    if setting.processes > 1:
        agent.multi_gpu, agent.world_size, agent.global_rank = True, setting.processes, distributed.get_rank()
    if setting.variant == ZEROED:  # episodes end at every step, as where they have begun at different times
        envs = agent.vec_env.envs
        envs.elapsed.copy_(envs.time_limit - 1 - torch.arange(setting.num_envs, device=device) % envs.time_limit)
    agent.init_tensors()
    agent.obs = agent.env_reset()
    play = agent.play_steps_rnn if agent.is_rnn else agent.play_steps
    with torch.no_grad():
        rollout = play()
    if device != "cpu":
        agent.model = torch.compile(agent.model)  # as the runner does
    agent.play_steps = agent.play_steps_rnn = lambda: dict(rollout)
    return agent.train_epoch


def make_rl_games_agent(provider: str, setting: Setting, device: str) -> Any:
    arguments = list_arguments(setting, device, advantages=provider, env="pendulum")
    config = ppo_rl_games.make_config(ppo_rl_games.parse_arguments(arguments))
    config["params"]["network"]["mlp"] |= {"units": HIDDEN, "activation": "elu"}
    if setting.variant in (LSTM, ZEROED):
        config["params"]["network"]["rnn"] = {"name": "lstm", "units": 256, "layers": 1}
    changes = {"mini_epochs": EPOCHS, "normalize_input": True, "normalize_value": True}
    changes |= {"mixed_precision": setting.variant == BF16, "seq_length": 4}
    changes |= {"zero_rnn_on_done": setting.variant == ZEROED}
    config["params"]["config"] |= changes
    runner = Runner()
    register_agents(runner)
    with tempfile.TemporaryDirectory() as folder:
        config["params"]["config"]["train_dir"] = folder
        runner.load(config)
        return runner.algo_factory.create(runner.algo_name, base_name="run", params=runner.params)


# --- skrl -------------------------------------------------------------------------------------------------------------

OUTCOME = ("next_observations", "rewards", "terminated", "truncated", "infos")


def make_skrl_update(provider: str, setting: Setting, device: str) -> harness.Call:
    with tempfile.TemporaryDirectory() as folder:
        arguments = list_arguments(setting, device, mini_batches=MINIBATCHES, env="pendulum", log_dir=folder)
        config = ppo_skrl.make_config(ppo_skrl.parse_arguments(arguments))
        config["agent"] |= {"learning_epochs": EPOCHS, "learning_rate_scheduler": "KLAdaptiveLR"}
        config["agent"] |= dict.fromkeys(("observation_preprocessor", "value_preprocessor"), "RunningStandardScaler")
        config["agent"]["mixed_precision"] = setting.variant == BF16
        for part in ("policy", "value"):
            config["models"][part]["network"] = [
                {"name": "net", "input": "OBSERVATIONS", "layers": HIDDEN, "activations": "elu"}
            ]
        env = ppo_skrl.TensorEnv(ENVIRONMENTS["pendulum"](setting.num_envs, device, 0))
        agent = (TritonRunner if provider == "triton" else SkrlRunner)(env, config).agent
        agent.init()
    agent.enable_training_mode(True)
    observations, about = env.reset()[0], {"timestep": 0, "timesteps": setting.num_steps}
    for _ in range(setting.num_steps):
        with torch.no_grad():
            actions, _ = agent.act(observations, None, **about)
            outcome = dict(zip(OUTCOME, env.step(actions), strict=True))
            given = {"observations": observations, "actions": actions, "states": None, "next_states": None}
            agent.record_transition(**given, **outcome, **about)
        observations = outcome["next_observations"]
    agent.enable_models_training_mode(True)
    return lambda: agent.update(**about)


# --- all --------------------------------------------------------------------------------------------------------------


def list_arguments(setting: Setting, device: str, **more: Any) -> list[str]:
    flags = {"num_envs": setting.num_envs, "num_steps": setting.num_steps, "device": device, **more}
    return [str(x) for name, value in flags.items() for x in (f"--{name.replace('_', '-')}", value)]


UPDATES = {"rsl_rl": make_rsl_rl_update, "rl_games": make_rl_games_update, "skrl": make_skrl_update}
PROVIDERS = {"stock": "stock", "ours": "triton"}  # what examples call the arms
