"""TritonPPO against PPO of RSL-RL; on a CPU with recorded graphs."""

import subprocess
import sys
from copy import deepcopy
from inspect import signature
from itertools import count, pairwise
from tempfile import mkdtemp

import pytest
import torch
from gpu_checks import GPU
from torch.distributions import Normal

pytest.importorskip("rsl_rl")
import ppo_rsl_rl
from overrides import derive, list_methods
from ppo_rsl_rl import TensorEnv, evaluate_agent, main, parse_arguments, train_agent
from process_state import interrupt
from processes import join_group
from recorded_graphs import allow_captures
from rsl_rl.algorithms import PPO
from rsl_rl.runners import OnPolicyRunner
from rsl_rl.storage import RolloutStorage
from two_processes import SETUPS, TWO_GPUS, check_training

try:
    from rsl_rl.modules import EmpiricalNormalization, distribution
except ImportError:  # RSL-RL 3 and 4
    distribution = None
IS_OLDER = distribution is None
EXAMPLE = pytest.mark.skipif(IS_OLDER, reason="the example is for RSL-RL 5")
PARTS = ("actor", "critic") if "actor" in signature(PPO).parameters else ("policy",)
OURS = "rl_triton_adapters.rsl_rl:TritonPPO"
if "eval" in getattr(OnPolicyRunner, "_construct_algorithm", PPO.update).__code__.co_names:
    OURS = "__import__('rl_triton_adapters.rsl_rl').rsl_rl.TritonPPO"
NETWORK = {"class_name": "MLPModel", "hidden_dims": [16], "activation": "elu"}
VARIANTS = {  # settings of the algorithm, and of its networks
    "default": ({}, {}),
    "per minibatch": ({"normalize_advantage_per_mini_batch": True, "num_mini_batches": 3}, {}),
    "fixed rate": ({"schedule": "fixed", "use_clipped_value_loss": False, "value_loss_coef": 0.7}, {}),
    "normalized observations": ({"optimizer": "rmsprop"}, {"obs_normalization": True}),
    "state-dependent deviation": ({}, {"distribution": "HeteroscedasticGaussianDistribution"}),
    "log deviation": ({}, {"distribution_cfg": {"class_name": "GaussianDistribution", "std_type": "log"}}),
    "beta": ({}, {"distribution": "BetaDistribution"}),
}
STEEP = ("state-dependent deviation", "augmentation")
"""Where, of many seeds, rounding decides whether a divergence of about 0 is above it, and so the learning rate."""
if not hasattr(distribution, "BetaDistribution"):
    del VARIANTS["beta"]
RECURRENT = {"class_name": "RNNModel", "rnn_type": "gru", "rnn_hidden_dim": 8, "rnn_num_layers": 1}
RND = {"num_outputs": 2, "predictor_hidden_dims": [4], "target_hidden_dims": [4], "weight": 1.0}
NORMALIZED = {"state_normalization": True, "reward_normalization": True}
MIXED = {"use_mixed_precision": True, "optimizer": "sgd", "learning_rate": 1e-2}
"""Adam would make a step of what is rounded."""
SHORT = {"num_learning_epochs": 2, "num_mini_batches": 2}
MIRRORED = {"use_mirror_loss": True, "mirror_loss_coeff": 0.5}
HAS_EXTENSIONS = "use_mixed_precision" in signature(PPO).parameters


def mirror(env, obs, actions):
    """Observations and actions, and behind them those of the mirrored environment."""
    obs = None if obs is None else torch.cat([obs, obs.apply(lambda x: -x)])
    return obs, None if actions is None else torch.cat([actions, -actions])


def symmetry(**options):
    off = {"use_data_augmentation": False, "use_mirror_loss": False}  # which older versions do not assume
    return {"symmetry_cfg": {"data_augmentation_func": mirror, **off, **options}}


EXTENSIONS = {
    "gru": (SHORT, RECURRENT),
    "lstm": (
        {"num_mini_batches": 3, "normalize_advantage_per_mini_batch": True},
        RECURRENT | {"rnn_type": "lstm", "rnn_num_layers": 2, "obs_normalization": True},
    ),
    "lstm, deviation of the state": (
        {},
        RECURRENT | {"rnn_type": "lstm", "distribution": "HeteroscedasticGaussianDistribution"},
    ),
    "rnd": ({"rnd_cfg": RND}, {}),
    "normalized rnd": ({"rnd_cfg": RND | NORMALIZED}, {}),
    "symmetry for the log": (symmetry(), {}),
    "augmentation": (
        symmetry(use_data_augmentation=True) | {"normalize_advantage_per_mini_batch": True, "schedule": "fixed"},
        {"distribution": "HeteroscedasticGaussianDistribution"},
    ),
    "mirror loss": (symmetry(use_data_augmentation=True, **MIRRORED), {}),
    "mirror loss and rnd": (symmetry(**MIRRORED) | {"rnd_cfg": RND} | SHORT, {}),
    "mixed precision": (MIXED, {}),
    "mixed precision, gru": (MIXED, RECURRENT),
}
VARIANTS |= EXTENSIONS
if not HAS_EXTENSIONS:
    VARIANTS = {name: x for name, x in VARIANTS.items() if "mixed" not in name}
if IS_OLDER:
    del VARIANTS["lstm, deviation of the state"]
    VARIANTS |= {
        "normalized observations": ({}, {"obs_normalization": True}),
        "augmentation": (EXTENSIONS["augmentation"][0], {}),
        "state-dependent deviation": ({}, {"of_actor": {"state_dependent_std": True}}),
        "log deviation": ({}, {"of_actor": {"noise_std_type": "log"}}),
    }
LONG = ("gru", "mirror loss and rnd")


def make_runner(class_name, variant="default", device="cpu", network=None, seed=0, **algorithm):
    """A runner on environments that are near their time limit, most of them, when training starts."""
    changes, more = VARIANTS[variant]
    network = {**NETWORK, **more, **(network or {})}
    distribution = {"class_name": network.pop("distribution", "GaussianDistribution")}
    torch.manual_seed(seed)
    config = {
        "num_steps_per_env": 8,
        "save_interval": 1000,
        "obs_groups": {name: ["state"] for name in ("actor", "critic", "rnd_state")},
        "actor": {"distribution_cfg": distribution, **network},
        "critic": {name: x for name, x in network.items() if name != "distribution_cfg"},
        "algorithm": {"class_name": class_name, **changes, **algorithm},
    }
    if IS_OLDER:
        config |= make_older_networks(network)
    env = TensorEnv("cartpole", 12, device, seed=seed)
    env.unwrapped, env.step_dt = env, 1.0  # as environments of Isaac Lab, for random network distillation
    env.episode_length_buf = torch.arange(12) % 8 + 490.0
    folder = mkdtemp() if IS_OLDER else None  # where 3.0 to 3.3 write to without being asked
    return OnPolicyRunner(env, deepcopy(config), folder, device=device)  # which takes names out of it, up to 5.4


def make_older_networks(network):
    """Those of RSL-RL 4, and the policy of 3."""
    of_actor, network = network.get("of_actor", {}), {name: x for name, x in network.items() if name != "of_actor"}
    policy = {"class_name": "ActorCritic" + "Recurrent" * ("rnn_type" in network), "activation": "elu"} | of_actor
    policy |= {name: x for name, x in network.items() if name.startswith("rnn_")}
    for role in ("actor", "critic"):
        policy |= {f"{role}_hidden_dims": [16], f"{role}_obs_normalization": network.get("obs_normalization", False)}
    groups = {name: ["state"] for name in ("policy", "actor", "critic", "rnd_state")}
    actor = network | of_actor | {"stochastic": True}
    return {"policy": policy, "actor": actor, "critic": network, "obs_groups": groups}


def train(runner, iterations, seed=1):
    """Train from a seed, and return the losses of each update."""
    torch.manual_seed(seed)
    update, losses = runner.alg.update, []
    runner.alg.update = lambda: losses.append(update()) or losses[-1]
    runner.learn(iterations)
    runner.alg.update = update
    return losses


def compare(got, want, rtol, atol):
    for name in PARTS:
        torch.testing.assert_close(*(getattr(x.alg, name).state_dict() for x in (got, want)), rtol=rtol, atol=atol)


def fill_storage(alg, scale):
    """A rollout with episodes that end, time-outs in the rewards, values and rewards of this scale."""
    generator, storage = torch.Generator().manual_seed(1), alg.storage
    for name in ("rewards", "values"):
        getattr(storage, name).copy_(torch.randn(storage.rewards.shape, generator=generator) * scale)
    storage.dones.copy_(torch.rand(storage.dones.shape, generator=generator) < 0.2)
    time_outs = storage.dones * (torch.rand(storage.dones.shape, generator=generator) < 0.5)
    storage.rewards += alg.gamma * storage.values * time_outs
    with torch.no_grad():
        for parameter in (alg.critic if hasattr(alg, "critic") else alg.policy.critic).parameters():
            parameter.mul_(scale)


@pytest.mark.parametrize("scale", [1.0, 1e-8, 1e6])
@pytest.mark.parametrize("variant", ["default", "per minibatch"])
def test_advantages(variant, scale):
    """With a deviation of 1e-8 the place of the normalisation's epsilon shows."""
    stock, ours = (make_runner(name, variant) for name in ("PPO", OURS))
    address = ours.alg.storage.advantages.data_ptr()
    for runner in (stock, ours):
        fill_storage(runner.alg, scale)
        with torch.inference_mode():
            runner.alg.compute_returns(runner.env.get_observations())
    unit = 1.0 if variant == "default" else scale
    want, got = stock.alg.storage, ours.alg.storage
    torch.testing.assert_close(got.returns, want.returns, rtol=1e-5, atol=1e-6 * scale)
    torch.testing.assert_close(got.advantages, want.advantages, rtol=1e-5, atol=1e-5 * unit)
    assert got.advantages.data_ptr() == address  # where a graph reads them


@pytest.mark.skipif(not hasattr(RolloutStorage, "compute_returns"), reason="from RSL-RL 4 on, PPO computes them")
def test_advantages_that_a_program_replaces(monkeypatch):
    """In the storage, as programs with RSL-RL 1 and 2 do."""
    alg, calls = make_runner(OURS).alg, []
    monkeypatch.setattr(RolloutStorage, "compute_returns", lambda *args, **kwargs: calls.append(kwargs))
    alg.compute_returns(make_runner("PPO").env.get_observations())
    assert calls == [{"normalize_advantage": True}]


@pytest.mark.parametrize("variant", VARIANTS)
def test_training(variant, captured, monkeypatch):
    """Parameters, those of extensions too, learning rates and losses; whatever the number of episodes in a rollout."""
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)  # whose LSTM keeps nothing for a backward in a replay
    stock, ours = make_runner("PPO", variant), make_runner(OURS, variant)
    want, got = (train(x, 40 if variant in LONG else 3, 2 if variant in STEEP else 1) for x in (stock, ours))
    tolerance = {"rtol": 1e-3, "atol": 1e-4} if "mixed" in variant else {"rtol": 1e-4, "atol": 2e-6}
    compare(ours, stock, **tolerance)
    if stock.alg.rnd:
        torch.testing.assert_close(ours.alg.rnd.state_dict(), stock.alg.rnd.state_dict(), **tolerance)
    assert ours.alg.learning_rate == pytest.approx(stock.alg.learning_rate, rel=1e-6)
    for row, expected in zip(got, want, strict=True):
        assert row == pytest.approx(expected, rel=tolerance["rtol"], abs=1e-2 if "mixed" in variant else 1e-5)
    if captured:
        step = ours.alg._rl_triton.step
        assert step.graphs.captures == 1 and step.graphs.replays > 0 and not step.reason
        assert ours.alg.describe().startswith("updates are captured; ") == (variant == "beta")


@pytest.mark.parametrize("network", [{}, RECURRENT], ids=["perceptron", "recurrent"])
def test_methods_of_a_users_policy(network):
    """Each of its own in turn, which changes results, and counts as in RSL-RL."""
    kind = type(getattr(make_runner("PPO", network=network).alg, PARTS[0]))
    for method in list_methods(kind, "load_state_dict"):
        runners = [make_runner(x, network=network, **SHORT) for x in ("PPO", OURS)]
        for runner in runners:
            getattr(runner.alg, PARTS[0]).__class__ = derive(kind, method)
        want, got = (train(runner, 1) for runner in runners)
        compare(*runners[::-1], rtol=1e-4, atol=2e-6)
        assert got[0] == pytest.approx(want[0], rel=1e-4, abs=1e-5), method


@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize("class_name", ["PPO", OURS])
def test_each_observation_is_counted_once(class_name):
    """Whether the package counts them step by step or after the rollout; where a graph reads them."""
    runner = make_runner(class_name, "normalized observations")
    alg = runner.alg
    normalizer = alg.actor.obs_normalizer if hasattr(alg, "actor") else alg.policy.actor_obs_normalizer
    places = [x.data_ptr() for x in normalizer.buffers()]
    train(runner, 3)
    assert normalizer.count == 3 * 8 * 12
    assert class_name == "PPO" or places == [x.data_ptr() for x in normalizer.buffers()]


def anneal(alg, i):
    """As programs do it: other numbers in every update."""
    alg.entropy_coef, alg.clip_param = 0.02 * i, 0.2 - 0.04 * i
    alg.value_loss_coef, alg.desired_kl = 1.0 + 0.2 * i, 0.01 + 0.002 * i


def set_others(alg, i):
    alg.max_grad_norm, alg.use_clipped_value_loss = (1.0, True) if i < 2 else (0.05, False)


def replace_curiosity(alg, i):
    own = alg.rnd.get_rnd_state
    if i == 2:
        alg.rnd.get_rnd_state = lambda observations: 2 * own(observations) - 1


def widen_deviations(alg, i):
    """Of a Gaussian of RSL-RL's, by the state."""
    actor = getattr(alg, PARTS[0])
    known = [(actor, "distribution", x) for x in ("_update_distribution", "update_distribution") if hasattr(actor, x)]
    owner, name, method = known[0] if known else (actor.distribution, "_distribution", "update")
    make = getattr(owner, method)

    def update(*args):
        make(*args)
        normal = getattr(owner, name)
        object.__setattr__(owner, name, Normal(normal.mean, normal.stddev * (1 + normal.mean.detach().abs())))

    if i == 0:
        object.__setattr__(owner, method, update)


@pytest.mark.parametrize("variant", ["default", "gru", "mirror loss and rnd"])
def test_a_hundred_updates(variant, monkeypatch, capsys):
    """Each is compared with RSL-RL's, of the same rollout. The learning rate adapts, both ways."""
    monkeypatch.setenv("RL_TRITON_CHECK", "100")
    if variant != "gru":  # which is captured for as long above
        allow_captures(monkeypatch)
    runner, rates = make_runner(OURS, variant, **SHORT), []
    for i in range(100):
        runner.alg.desired_kl = 0.02 - 1.9e-4 * i
        train(runner, 1, seed=i)
        rates.append(runner.alg.learning_rate)
        assert rates[-1] == runner.alg.optimizer.param_groups[0]["lr"]
    lines = [x.split() for x in capsys.readouterr().out.splitlines() if x.startswith("RL_TRITON_CHECK")]
    moved, apart = zip(*((float(x[6]), float(x[10])) for x in lines), strict=True)
    assert len(moved) == 100 and min(moved) > 1e-3 and max(apart) < 5e-6
    assert len({*rates}) > 3 and {x > y for x, y in pairwise(rates) if x != y} == {True, False}


@pytest.mark.parametrize(
    ("change", "captures", "variant"),
    [
        (anneal, 1, "default"),
        (set_others, 2, "default"),
        (replace_curiosity, 2, "rnd"),
        (widen_deviations, 1, "default"),
    ],
)
def test_settings_may_change_between_updates(change, captures, variant, monkeypatch):
    """A graph is given numbers that are annealed, and keeps others: it is captured anew."""
    allow_captures(monkeypatch)
    stock, ours = make_runner("PPO", variant), make_runner(OURS, variant)
    graphs = ours.alg._rl_triton.step.graphs
    for runner in (stock, ours):
        for i in range(4):
            change(runner.alg, i)
            train(runner, 1)
    compare(ours, stock, rtol=1e-4, atol=2e-6)
    if variant == "rnd":
        torch.testing.assert_close(ours.alg.rnd.state_dict(), stock.alg.rnd.state_dict(), rtol=1e-4, atol=2e-6)
    assert graphs.captures == captures
    ours.alg.recapture()
    train(ours, 1)
    assert graphs.captures == captures and ours.alg._rl_triton.step.graphs.captures == 1


def test_an_interrupted_update_leaves_what_that_of_rsl_rl_does(captured):
    """Where a graph is captured, as the step begins; and training goes on."""
    variant, at = ("fixed rate", 1) if captured else ("default", 3)
    stock, ours = make_runner("PPO", variant), make_runner(OURS, variant)
    for runner in (stock, ours):
        train(runner, 1)
        steps = count(1)
        handle = runner.alg.optimizer.register_step_pre_hook(
            lambda *_, steps=steps: interrupt() if next(steps) == at else None
        )
        with pytest.raises(KeyboardInterrupt):
            train(runner, 1)
        handle.remove()
        runner.alg.storage.clear()
    compare(ours, stock, rtol=1e-4, atol=2e-6)
    assert ours.alg.learning_rate == pytest.approx(stock.alg.learning_rate)
    ours.alg.recapture()
    assert ours.alg.optimizer.state_dict()["param_groups"] == [
        group | {"lr": pytest.approx(group["lr"])} for group in stock.alg.optimizer.state_dict()["param_groups"]
    ]
    assert vars(ours.alg.optimizer).keys() == vars(stock.alg.optimizer).keys()
    assert {*vars(ours.alg)} - {*vars(stock.alg)} == {"enabled", "_rl_triton"}
    train(ours, 1), train(stock, 1)
    compare(ours, stock, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("device", [GPU])
@pytest.mark.parametrize("variant", ["default", *(x for x in EXTENSIONS if x in VARIANTS)])
def test_training_on_a_gpu(variant, device, recwarn):
    stock, ours = (make_runner(name, variant, device) for name in ("PPO", OURS))
    train(stock, 2), train(ours, 2)
    assert variant != "default" or not [x for x in recwarn if x.category is RuntimeWarning]  # of a step that is eager
    assert ours.alg._rl_triton.step.reason == ""
    compare(ours, stock, rtol=1e-2, atol=5e-3 if "mixed" in variant else 1e-3)


@pytest.mark.parametrize(("enabled", "reason"), [(False, "switched off"), (True, "RL_TRITON=0 in the environment")])
def test_switched_off_it_is_stock(enabled, reason, request, recwarn):
    if enabled:
        request.getfixturevalue("switched_off")
    stock, ours = make_runner("PPO"), make_runner(OURS, enabled=enabled)
    assert train(ours, 2) == train(stock, 2)
    compare(ours, stock, rtol=0, atol=0)
    assert ours.alg.obstacle == reason
    assert not [x for x in recwarn if "TritonPPO" in str(x.message)]


def test_the_switch_is_a_bool():
    with pytest.raises(TypeError, match="enabled: got str, expected a bool"):
        make_runner(OURS, enabled="false")


@pytest.mark.parametrize(("before", "after"), [("PPO", OURS), (OURS, "PPO")])
def test_checkpoints_go_both_ways(before, after, tmp_path, monkeypatch):
    """What one saved the other loads, with the optimizer and its learning rate, and trains on."""
    if before == OURS:
        allow_captures(monkeypatch)
    first, second = make_runner(before), make_runner(after)
    train(first, 2)
    first.save(str(tmp_path / "model.pt"))
    second.load(str(tmp_path / "model.pt"))
    compare(second, first, rtol=0, atol=0)
    stock = make_runner("PPO")
    stock.load(str(tmp_path / "model.pt"))  # its learning rate is the optimizer's from 5.5 on
    assert second.alg.learning_rate == pytest.approx(stock.alg.learning_rate)
    train(second, 1), train(stock, 1)
    compare(second, stock, rtol=1e-4, atol=2e-6)


@EXAMPLE
def test_the_example_trains(monkeypatch, capsys):
    """The configuration's switch and the evaluation; fifteen iterations make a better policy than one."""
    flags = ["--num-envs", "64", "--num-steps", "16", "--evaluation-episodes", "8", "--quiet"]
    untrained, trained = (parse_arguments([*flags, "--iterations", str(number)]) for number in (1, 15))
    before, after = (evaluate_agent(train_agent(args), args).mean() for args in (untrained, trained))
    assert after > before
    monkeypatch.setattr("sys.argv", ["ppo_rsl_rl.py", *flags, "--iterations", "1", "--target-return", "501"])
    assert main() == 1
    assert "evaluation: mean return" in capsys.readouterr().out


# -- two processes against PPO of RSL-RL in two ------------------------------------------------------------------------

IN_PROCESSES = {
    "default": {},
    "fixed rate": {"schedule": "fixed", "normalize_advantage_per_mini_batch": True},
    "normalized observations, gru": {"network": RECURRENT | {"obs_normalization": True}},
}
if HAS_EXTENSIONS:
    IN_PROCESSES["rnd"] = {"rnd_cfg": RND}
if "grad_reduce_bucket_mb" in signature(PPO).parameters:
    IN_PROCESSES["buckets"] = {"grad_reduce_bucket_mb": 4e-4}
OWN = ["losses"]
if IS_OLDER or "is_initialized" not in EmpiricalNormalization.update.__code__.co_names:  # up to RSL-RL 5.4
    OWN += ["normalizer._"]


def train_in_rank(rank, device, arm, _):
    """Networks and learning rates differ between processes when training starts; the first one's count."""
    OnPolicyRunner._configure_multi_gpu = join_group
    states, rates, hows = {}, [], set()
    for case, options in IN_PROCESSES.items():
        runner = make_runner("PPO" if arm == "stock" else OURS, device=device, seed=rank, **options)
        alg = runner.alg
        alg.learning_rate *= 1 + rank
        losses = train(runner, 4 if device == "cpu" else 2, seed=rank)
        models = {x: getattr(alg, x) for x in PARTS} | ({"predictor": alg.rnd.predictor} if alg.rnd else {})
        found = {f"{key}.{name}": x for key, model in models.items() for name, x in model.state_dict().items()}
        found["losses"] = torch.tensor([[*row.values()] for row in losses])
        states |= {f"{case}: {name}": x for name, x in found.items()}
        rates.append(alg.learning_rate)
        hows |= {"" if arm == "stock" else alg.describe()}
    (how,) = hows
    assert abs(rates[0] - 1e-3) > 1e-4  # it adapts
    return states, rates, how


@SETUPS
def test_training_in_two_processes(device, kind, tmp_path):
    check_training(train_in_rank, OWN, device, kind, tmp_path)


@EXAMPLE
@pytest.mark.parametrize("command", [pytest.param("torchrun", marks=TWO_GPUS)])
def test_processes_end(command):
    """With the runner's own group, which nobody destroys, and with graphs."""
    example = f"{sys.executable} {ppo_rsl_rl.__file__} --num-envs 64 --num-steps 8 --iterations 3 --quiet"
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    shell = ["sh", "-c", f"exec {example} --evaluation-episodes 2 --device cuda:$LOCAL_RANK"]
    done = subprocess.run([*run, *shell], capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "updates as PPO" not in done.stderr and "runs eagerly" not in done.stderr
