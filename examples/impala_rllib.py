"""IMPALA of RLlib on CartPole-v1, its V-Trace computed by rl_triton_core.

    python examples/impala_rllib.py                        --advantages triton is the default
    python examples/impala_rllib.py --advantages stock     RLlib's own
    python examples/impala_rllib.py --num-env-runners 2 --num-learners 1

`enable_triton(config)` is all that differs. The last command has actors and a learner in processes of their own: actors
go on while the learner learns, V-Trace weighs the steps of their older policies, and runs of one seed differ.
"""

import argparse
import time

from command_line import COUNT, FACTOR, SEED, SHARE, Curves, environment, needing, run, within

with needing("rllib", __name__):
    import ray
    from ray.rllib.algorithms.impala import IMPALAConfig
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
    from tqdm import tqdm

    from rl_triton_adapters.rllib import enable_triton


def algorithm_config(args: argparse.Namespace) -> IMPALAConfig:
    """RLlib's configuration; one line of it is ours."""
    config = (
        IMPALAConfig()
        .environment(args.env)
        .env_runners(
            num_env_runners=args.num_env_runners,
            num_envs_per_env_runner=8,
            rollout_fragment_length=args.rollout_length,
        )
        .learners(num_learners=args.num_learners)
        .rl_module(model_config=DefaultModelConfig(vf_share_layers=False))
        .training(
            lr=[[0, args.learning_rate], [args.iterations * args.steps_per_iteration, 0.0]],
            gamma=args.gamma,
            train_batch_size_per_learner=args.batch_size,
            grad_clip=args.grad_clip,
            vf_loss_coeff=args.vf_coef,
            entropy_coeff=args.ent_coef,
        )
        .reporting(min_time_s_per_iteration=0, min_sample_timesteps_per_iteration=args.steps_per_iteration)
        .evaluation(
            evaluation_interval=args.iterations,
            evaluation_duration=args.evaluation_episodes,
            evaluation_config={"explore": False},
        )
        .debugging(seed=args.seed)
    )
    return enable_triton(config) if args.advantages == "triton" else config


def train_agent(args: argparse.Namespace) -> float:
    """Returns the mean return of the evaluation that ends it."""
    algorithm = algorithm_config(args).build_algo()
    curves = Curves(f"{args.log_dir}/{args.env}__impala_rllib__{args.advantages}__{args.seed}")
    for iteration in (bar := tqdm(range(args.iterations), unit="iteration", disable=args.quiet)):
        started = time.perf_counter()
        results = algorithm.train()
        episodic_return = results["env_runners"].get("episode_return_mean", float("nan"))
        bar.set_postfix_str(f"return {episodic_return:.1f}")
        curves.add_scalar("charts/episodic_return", episodic_return, iteration)
        curves.add_scalar("charts/seconds", time.perf_counter() - started, iteration)
    curves.close()
    algorithm.stop()
    return results["evaluation"]["env_runners"]["episode_return_mean"]


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--advantages", choices=["stock", "triton"], default="triton", help="who computes them")
    parser.add_argument("--env", type=environment, default="CartPole-v1")
    parser.add_argument("--seed", type=SEED, default=1)
    parser.add_argument("--iterations", type=COUNT, default=15)
    parser.add_argument("--steps-per-iteration", type=COUNT, default=10_000, help="environment steps, at least")
    parser.add_argument("--num-env-runners", type=within(0), default=0, help="processes that step environments")
    parser.add_argument("--num-learners", type=within(0), default=0, help="processes that learn")
    parser.add_argument("--learning-rate", type=FACTOR, default=1e-3, help="at first; falls to 0")
    parser.add_argument("--gamma", type=SHARE, default=0.98)
    parser.add_argument("--rollout-length", type=COUNT, default=50, help="steps of an environment between two updates")
    parser.add_argument("--batch-size", type=COUNT, default=400, help="steps per learner and update")
    parser.add_argument("--grad-clip", type=FACTOR, default=1.0, help="largest norm of the gradient")
    parser.add_argument("--vf-coef", type=FACTOR, default=0.5)
    parser.add_argument("--ent-coef", type=FACTOR, default=0.0)
    parser.add_argument("--evaluation-episodes", type=COUNT, default=20)
    parser.add_argument("--target-return", type=float, help="exit with status 1 if the evaluation stays below")
    parser.add_argument("--log-dir", default="runs", help="where the TensorBoard logs go")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    return parser.parse_args(arguments)


def main() -> int:
    args = parse_arguments()
    cpus = 1 + args.num_env_runners + args.num_learners
    ray.init(num_cpus=cpus, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    evaluation = train_agent(args)
    ray.shutdown()
    print(f"evaluation: mean return {evaluation:.1f} over {args.evaluation_episodes} episodes")
    return 1 if args.target_return is not None and evaluation < args.target_return else 0


if __name__ == "__main__":
    run(main)
