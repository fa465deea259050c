"""PPO of RLlib on CartPole-v1, the advantages computed by rl_triton_core.

    python examples/ppo_rllib.py                           --advantages triton is the default
    python examples/ppo_rllib.py --advantages stock        RLlib's own
    python examples/ppo_rllib.py --num-learners 2          learners in processes of their own

`enable_triton(config)` is all that differs.
"""

import argparse
import time

from command_line import COUNT, FACTOR, SEED, SHARE, Curves, environment, needing, run, within

with needing("rllib", __name__):
    import ray
    from ray.rllib.algorithms.ppo import PPOConfig
    from tqdm import tqdm

    from rl_triton_adapters.rllib import enable_triton


def algorithm_config(args: argparse.Namespace) -> PPOConfig:
    """RLlib's configuration; one line of it is ours."""
    config = (
        PPOConfig()
        .environment(args.env)
        .env_runners(num_env_runners=args.num_env_runners, num_envs_per_env_runner=8)
        .learners(num_learners=args.num_learners)
        .training(
            lr=args.learning_rate,
            gamma=args.gamma,
            lambda_=args.gae_lambda,
            train_batch_size_per_learner=args.batch_size,
            minibatch_size=args.minibatch_size,
            num_epochs=args.num_epochs,
            vf_clip_param=1e9,
            use_kl_loss=False,
        )
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
    curves = Curves(f"{args.log_dir}/{args.env}__ppo_rllib__{args.advantages}__{args.seed}")
    for iteration in (bar := tqdm(range(args.iterations), unit="update", disable=args.quiet)):
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
    parser.add_argument("--iterations", type=COUNT, default=20)
    parser.add_argument("--num-env-runners", type=within(0), default=0, help="processes that step environments")
    parser.add_argument("--num-learners", type=within(0), default=0, help="processes that learn")
    parser.add_argument("--learning-rate", type=FACTOR, default=1e-3)
    parser.add_argument("--gamma", type=SHARE, default=0.99)
    parser.add_argument("--gae-lambda", type=SHARE, default=0.95)
    parser.add_argument("--batch-size", type=COUNT, default=2048, help="steps per learner and iteration")
    parser.add_argument("--minibatch-size", type=COUNT, default=256)
    parser.add_argument("--num-epochs", type=COUNT, default=10)
    parser.add_argument("--evaluation-episodes", type=COUNT, default=20)
    parser.add_argument("--target-return", type=float, help="exit with status 1 if the evaluation stays below")
    parser.add_argument("--log-dir", default="runs", help="where the TensorBoard logs go")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    args = parser.parse_args(arguments)
    if args.minibatch_size > args.batch_size:
        parser.error(f"--minibatch-size: got {args.minibatch_size}, expected at most the batch size, {args.batch_size}")
    return args


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
