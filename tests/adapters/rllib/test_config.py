"""The call, its flags and checks, and what is an error."""

import sys
from types import FunctionType

import pytest

pytest.importorskip("ray.rllib")

import ray
from ray import cloudpickle
from ray.rllib.algorithms.appo.torch import appo_torch_learner
from ray.rllib.algorithms.bc import BCConfig
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.algorithms.impala.torch import impala_torch_learner
from ray.rllib.algorithms.impala.torch.impala_torch_learner import IMPALATorchLearner
from ray.rllib.algorithms.marwil import MARWILConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.algorithms.ppo.torch.ppo_torch_learner import PPOTorchLearner
from ray.rllib.connectors.learner import general_advantage_estimation
from small import OFF, SMALL, flags_of_piece, small_impala, small_ppo, stopping, the_piece
from updates import CONFIGS, KINDS, build_learner, make_config, update_learner

from rl_triton_adapters import rllib
from rl_triton_adapters.rllib import TritonGeneralAdvantageEstimation, TritonPPOTorchLearner, check_ray, enable_triton
from rl_triton_core import BackendUnavailableError

DEFAULTS = {
    "rl_triton": True,
    "rl_triton_masked_statistics": False,
    "rl_triton_backend": None,
    "rl_triton_update": True,
}


@pytest.mark.parametrize("small_config", SMALL.values(), ids=SMALL)
def test_a_backend_that_cannot_run_is_refused_when_the_learner_is_built(small_config, monkeypatch):
    """And not in the loss: an error there would end IMPALA's learner thread, and the algorithm would wait for it."""
    with pytest.raises(ValueError, match="backend: got 'nope', expected one of triton, cpu, reference"):
        enable_triton(small_config(), backend="nope")
    monkeypatch.setattr(
        "rl_triton_core._internal.backend.why_unavailable",
        lambda name, device: f"no {name} for {device}" if name == "triton" else None,
    )
    build_learner(enable_triton(small_config(), backend="triton").learners(learner_config_dict=OFF))
    with pytest.raises(BackendUnavailableError, match="no triton for cpu"):
        build_learner(enable_triton(small_config(), backend="triton"))


FLAGS = {"rl_triton_masked_statistics": True, "rl_triton_backend": "reference", "rl_triton_update": False}


def test_the_config_is_changed_in_place_and_flags_that_were_set_before_stay():
    config = small_ppo().training(gamma=0.5, lambda_=0.25).learners(learner_config_dict={"mine": 1, **FLAGS})
    assert enable_triton(config) is config and config.learner_class is TritonPPOTorchLearner
    assert config.learner_config_dict == {"mine": 1, **DEFAULTS, **FLAGS}
    enable_triton(config, masked_statistics=False, backend="cpu")
    learner = build_learner(config)
    assert flags_of_piece(learner) == {"masked_statistics": False, "backend": "cpu"}
    assert (the_piece(learner).gamma, the_piece(learner).lambda_) == (0.5, 0.25)
    off = enable_triton(small_ppo().learners(learner_config_dict=OFF), backend="cpu")
    assert off.learner_config_dict == {**DEFAULTS, **OFF, "rl_triton_backend": "cpu"}


@pytest.mark.parametrize("small_config", SMALL.values(), ids=SMALL)
@pytest.mark.parametrize(
    ("flag", "error", "message"),
    [
        ({"rl_tritn": False}, ValueError, "got 'rl_tritn', expected one of rl_triton, rl_triton_masked_statistics"),
        ({"rl_triton_backends": "cpu"}, ValueError, "got 'rl_triton_backends', expected one of"),
        ({"rl_triton": "False"}, TypeError, "got rl_triton='False', expected True or False"),
        ({"rl_triton": None}, TypeError, "got rl_triton=None, expected True or False"),
        ({"rl_triton_masked_statistics": 1}, TypeError, "got rl_triton_masked_statistics=1, expected True or False"),
        ({"rl_triton_update": 1}, TypeError, "got rl_triton_update=1, expected True or False"),
        ({"rl_triton_fused_loss": False}, ValueError, "got 'rl_triton_fused_loss', expected .*, rl_triton_update$"),
        ({"rl_triton_captured_update": False}, ValueError, "'rl_triton_captured_update', expected .*rl_triton_update$"),
        ({"rl_triton_backend": "nope"}, ValueError, "backend: got 'nope', expected one of triton, cpu, reference"),
    ],
)
def test_a_flag_that_is_none_is_refused_whenever_it_is_set(small_config, flag, error, message):
    config = small_config().learners(learner_config_dict=flag)
    with pytest.raises(error, match=message):
        enable_triton(config)
    assert config.learner_config_dict == flag and config.learner_class is small_config().learner_class
    with pytest.raises(error, match=message):
        build_learner(enable_triton(small_config()).learners(learner_config_dict=flag))


@pytest.mark.parametrize(("flag", "who"), [(True, "rl_triton_core, backend reference"), (False, "RLlib")])
@pytest.mark.parametrize("name, what", [("PPO", "PPOTorchLearner computes advantages"), ("IMPALA", "computes V-Trace")])
def test_a_learner_says_in_one_line_what_it_computes_with(name, what, flag, who, caplog):
    """Before its first update, since a class of the user's may change it after ours has built it."""
    config = enable_triton(make_config("categorical", name), backend="reference")
    learner = build_learner(config.learners(learner_config_dict={"rl_triton": flag}))
    caplog.clear()  # perhaps updates had to be compiled, and a line says so
    with caplog.at_level("INFO", logger="ray.rllib.rl_triton"):
        update_learner(config, "categorical", learner=learner)
    assert [record.message for record in caplog.records if record.name == "ray.rllib.rl_triton"] == [learner.describe()]
    assert learner.describe().startswith("Triton") and f"{what} with {who}, on cpu" in learner.describe()


# Learners that were meant to be ours.


class Theirs(PPOTorchLearner):
    """A learner of somebody's own."""


class Forgetful(TritonPPOTorchLearner):
    """A learner that builds itself without ours."""

    def build(self):
        PPOTorchLearner.build(self)


@pytest.mark.parametrize(
    ("learner_class", "num_learners", "advice"),
    [(Theirs, 1, r".*class Mine\("), (Forgetful, 0, r"expected its build\(\) to call super")],
)
def test_a_learner_set_after_the_call_that_is_not_ours_is_an_error(learner_class, num_learners, advice, small_ray):
    config = enable_triton(small_ppo(num_learners=num_learners)).learners(learner_class=learner_class)
    message = rf"1 of 1 learners compute with RLlib's own: got {learner_class.__name__}, {advice}"
    with pytest.raises(RuntimeError, match=message):
        config.build_algo()
    enable_triton(small_ppo()).learners(learner_class=learner_class, learner_config_dict=OFF).build_algo().stop()


def test_the_check_is_one_of_the_callbacks_and_may_be_called(small_ray):
    called = []
    config = small_ppo().callbacks(on_algorithm_init=lambda **kwargs: called.append(kwargs["algorithm"]))
    with stopping(enable_triton(enable_triton(config)).build_algo()) as algorithm:
        assert called == [algorithm]
        assert len(config.callbacks_on_algorithm_init) == 2
        rllib.check_learners(algorithm)
    with (
        stopping(small_ppo().build_algo()) as stock,
        pytest.raises(RuntimeError, match="got PPOTorchLearner, .*class Mine.PPOTorchLearner, TritonPPO"),
    ):
        rllib.check_learners(stock)


def test_the_line_that_the_error_suggests_works():
    with pytest.raises(TypeError) as error:
        enable_triton(small_ppo().learners(learner_class=Theirs))
    line = str(error.value)[str(error.value).index("class ") :]
    exec(line, scope := dict(globals()))
    learner = build_learner(enable_triton(small_ppo().learners(learner_class=scope["Mine"])))
    assert type(the_piece(learner)) is TritonGeneralAdvantageEstimation


@pytest.mark.parametrize("version", ["2.55.1", "2.9.0", "1.13.0"])
def test_an_old_ray_is_an_error(version, monkeypatch):
    monkeypatch.setattr(ray, "__version__", version)
    with pytest.raises(RuntimeError, match=f"needs Ray 2.56 or newer, got {version}: pip install"):
        enable_triton(small_ppo())


@pytest.mark.parametrize("version", ["2.56.0", "2.60.0", "3.0.0.dev0"])
def test_a_new_ray_is_judged_by_what_it_does(version, monkeypatch):
    monkeypatch.setattr(ray, "__version__", version)
    check_ray()


@pytest.mark.parametrize(
    ("module", "name", "what"),
    [
        (general_advantage_estimation, "compute_value_targets", "value targets"),
        (impala_torch_learner, "vtrace_torch", "V-Trace"),
        (appo_torch_learner, "vtrace_torch", "V-Trace"),
    ],
)
def test_other_numbers_of_rllib_are_an_error(module, name, what, monkeypatch):
    stock = getattr(module, name)

    def changed(*args, **kwargs):
        result = stock(*args, **kwargs)
        return result + 1 if name == "compute_value_targets" else tuple(x + 1 for x in result)

    later = FunctionType(changed.__code__, vars(module), closure=changed.__closure__)
    monkeypatch.setattr(module, name, later)
    for call in (check_ray, lambda: enable_triton(small_ppo())):
        with pytest.raises(RuntimeError, match=f"Ray {ray.__version__} has other {what} than"):
            call()


def test_other_flags_are_an_error(monkeypatch):
    class Later(rllib.check.AddOneTsToEpisodesAndTruncate):
        def __call__(self, **kwargs):
            batch = super().__call__(**kwargs)
            for name in ("terminateds", "truncateds"):
                for flags in batch[name].values():
                    flags.insert(0, flags.pop())
            return batch

    monkeypatch.setattr(rllib.check, "AddOneTsToEpisodesAndTruncate", Later)
    with pytest.raises(RuntimeError, match="has other flags than"):
        check_ray()


def test_a_loss_without_vtrace_is_an_error(monkeypatch):
    later = FunctionType((lambda self, **kwargs: 0.0).__code__, vars(impala_torch_learner))
    monkeypatch.setattr(IMPALATorchLearner, "compute_loss_for_module", later)
    with pytest.raises(RuntimeError, match="got none in Ray .*, expected a call of vtrace_torch"):
        build_learner(enable_triton(small_impala(IMPALAConfig)))


def with_learner(config, stock):
    return config.learners(learner_class=type("Mine", (stock,), {}))


OLD_STACK = {"enable_rl_module_and_learner": False, "enable_env_runner_and_connector_v2": False}
NO_CONFIG = "expected a PPOConfig, IMPALAConfig or APPOConfig"
NOT_OURS = "learner_class: got Mine, expected it to derive from"
REFUSED = [
    *((config, TypeError, NO_CONFIG) for config in (None, {}, PPOConfig)),
    *((config, TypeError, f"which has nothing to replace, {NO_CONFIG}") for config in (DQNConfig(), BCConfig())),
    (MARWILConfig(), TypeError, "got MARWILConfig .* Leave the call out; for MARWIL, see docs/rllib.md"),
    *((with_learner(CONFIGS[x](), KINDS[x][0]), TypeError, f"{NOT_OURS} Triton{x}TorchLearner") for x in CONFIGS),
    (PPOConfig().api_stack(**OLD_STACK), ValueError, "expected the new API stack"),
]


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("config_class", [PPOConfig, IMPALAConfig, type("OwnConfig", (PPOConfig,), {})])
def test_the_old_stack_behind_the_call_is_an_error(config_class, copied):
    """That says whose; and before RLlib's, of callbacks that nobody has set. Pickles and copies are told, too."""
    config = enable_triton(config_class().environment("CartPole-v1")).api_stack(**OLD_STACK)
    kind, before = type(config), config.to_dict()
    config = cloudpickle.loads(cloudpickle.dumps(config.copy())) if copied else config
    assert config.to_dict() == before
    assert isinstance(config, PPOConfig | IMPALAConfig) and type(config).__name__ == kind.__name__
    with pytest.raises(ValueError, match="config of enable_triton: got enable_rl_module_and_learner=False"):
        config.validate()
    assert config.get_state()["class"].__mro__[1:] == config_class.__mro__[1:]


@pytest.mark.parametrize(("config", "error", "message"), REFUSED, ids=[message for _, _, message in REFUSED])
def test_what_is_no_config_to_enable_is_an_error(config, error, message):
    with pytest.raises(error, match=message):
        enable_triton(config)


def test_masked_statistics_are_of_ppo():
    with pytest.raises(ValueError, match="masked_statistics: got True for IMPALAConfig, expected it for PPO alone"):
        enable_triton(IMPALAConfig(), masked_statistics=True)


def test_without_rllib_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    for name in [name for name in sys.modules if name.startswith("rl_triton_adapters.rllib")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match=r"pip install rl-triton-core\[rllib\]"):
        __import__("rl_triton_adapters.rllib")
