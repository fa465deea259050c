"""Captured updates: RLlib's weights and metrics; on a CPU with recorded graphs."""

import logging
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import torch

pytest.importorskip("ray.rllib")

import updates
from overrides import derive
from processes import run_ranks
from ray.rllib.algorithms.ppo.ppo_catalog import PPOCatalog
from ray.rllib.algorithms.ppo.torch.default_ppo_torch_rl_module import DefaultPPOTorchRLModule
from ray.rllib.algorithms.ppo.torch.ppo_torch_learner import PPOTorchLearner
from ray.rllib.core.rl_module.apis import SelfSupervisedLossAPI
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModuleSpec
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.core.rl_module.torch.torch_rl_module import TorchRLModule
from ray.rllib.examples.learners.classes.custom_ppo_loss_fn_learner import PPOTorchLearnerWithWeightRegularizerLoss
from ray.rllib.examples.rl_modules.classes.random_rlm import RandomRLModule
from recorded_graphs import allow_captures
from small import assert_same_training, running_ray, small_ppo, train_algorithm
from test_updates import OwnModule
from updates import POLICY, assert_same_updates, assert_updates_of_rllib, build_learner, make_config, update_learner

from rl_triton_adapters.rllib import TritonPPOTorchLearner, enable_triton
from rl_triton_adapters.rllib.learners import TritonLearner
from rl_triton_core.capture import hold_captures


def build_ours(config):
    """A learner whose updates are captured, or compiled where they can be."""
    return build_learner(enable_triton(config.copy(copy_frozen=False)))


def build_captured(config, device, monkeypatch):
    allow_captures(monkeypatch, device)
    learner = build_ours(config)
    step = learner.triton_update.find_step()
    assert step.reason == ""
    return learner


@pytest.mark.parametrize(
    ("space", "options"),
    [
        ("categorical", {"entropy_coeff": [[0, 0.1], [400, 0.01]], "lr": [[0, 1e-2], [400, 1e-3]]}),
        ("gaussian", {"entropy_coeff": 0.02, "kl_coeff": 1.0, "kl_target": 1e-4, "grad_clip_by": "norm"}),
        ("several categorical", {"use_kl_loss": False, "vf_clip_param": 1e9, "grad_clip": None}),
        ("gaussian", {"use_critic": False, "minibatch_size": 250, "grad_clip": None}),
    ],
    ids=["categorical-schedules", "gaussian-kl", "several-categorical", "no-critic-large-minibatch"],
)
def test_updates_are_those_of_rllib(space, options, device, monkeypatch):
    config = make_config(space, **options).learners(num_gpus_per_learner=int(device == "cuda"))
    count = 3 if device == "cpu" else 32  # of ten steps each
    stock = update_learner(config, space, count)
    learner = build_captured(config, device, monkeypatch)
    assert "; the fused loss of default_policy; " in learner.describe()
    tolerance = {} if device == "cpu" else {"rtol": 1e-2, "atol": 1e-3}
    assert_same_updates(stock, update_learner(config, space, count, learner=learner), **tolerance)
    assert len(learner.triton_update.find_step().captured) == 1 and learner.triton_update.find_step().reason == ""


OPTIMIZERS = {
    "sgd": torch.optim.SGD,
    "momentum": partial(torch.optim.SGD, momentum=0.9),
    "rmsprop": torch.optim.RMSprop,
    "adamw": torch.optim.AdamW,
}


def own_optimizer(learner_class, kind, **named):
    """A learner class with another optimizer, which may have a name."""

    class Own(learner_class):
        def configure_optimizers_for_module(self, module_id, config=None):
            parameters = self.get_parameters(self._module[module_id])
            optimizer = OPTIMIZERS[kind](parameters, lr=1e-3)
            self.register_optimizer(
                module_id=module_id, optimizer=optimizer, params=parameters, lr_or_lr_schedule=config.lr, **named
            )

    return Own


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizers_of_ones_own_are_captured(kind, monkeypatch):
    allow_captures(monkeypatch)
    kinds = own_optimizer(PPOTorchLearner, kind), own_optimizer(TritonPPOTorchLearner, kind)
    learner = assert_updates_of_rllib(make_config("categorical", lr=1e-3), "categorical", kinds)
    assert learner.triton_update.find_step().captured and not learner.triton_update.find_step().reason


def add_method(name, change):
    """A function that makes learner classes with this method of their own, which does something beside RLlib's."""

    def own_method(base):
        method = getattr(base, name)
        return type("Own", (base,), {name: lambda self, *args, **kwargs: change(self, *args, method=method, **kwargs)})

    return own_method


def anneal_clip(self, *, method, **kwargs):
    self.config = self.config.copy(copy_frozen=False).training(clip_param=self.config.clip_param * 0.3)
    method(self, **kwargs)


def drop_critic(self, *, method, **kwargs):
    method(self, **kwargs)
    self.config = self.config.copy(copy_frozen=False).training(use_critic=False)


def scale_gradients(self, *args, method, **kwargs):
    return {name: 0.1 * x for name, x in method(self, *args, **kwargs).items()}


def anneal_learning_rate(self, *args, method):
    optimizer = method(self, *args)
    optimizer.param_groups[0]["lr"] *= 0.9
    return optimizer


def scale_advantages(self, *, method, **kwargs):
    for minibatch in method(self, **kwargs):
        minibatch.policy_batches[POLICY]["advantages"] *= 0.1
        yield minibatch


def count_minibatches(self, batch, method):
    method(self, batch)
    self.metrics.log_value((POLICY, "minibatches"), len(batch), reduce="sum")


@pytest.mark.parametrize(
    ("change", "is_capturable"),
    [
        (partial(own_optimizer, kind="adamw", optimizer_name="own"), True),
        (add_method("before_gradient_based_update", anneal_clip), True),
        (add_method("after_gradient_based_update", drop_critic), True),
        (add_method("filter_param_dict_for_optimizer", scale_gradients), False),
        (add_method("get_optimizers_for_module", lambda *_, **__: []), False),
        (add_method("get_optimizer", anneal_learning_rate), False),
        (add_method("_create_iterator_if_necessary", scale_advantages), True),
        (add_method("_compute_off_policyness", count_minibatches), True),
    ],
    ids=["optimizer", "clip", "critic", "gradients", "no optimizers", "learning rate", "minibatches", "off-policyness"],
)
def test_what_a_learner_of_ones_own_does_is_followed(change, is_capturable, captured):
    config = make_config("categorical", clip_param=0.1, lr=1e-2)
    kinds = change(PPOTorchLearner), change(TritonPPOTorchLearner)
    learner = assert_updates_of_rllib(config, "categorical", kinds, count=4, rtol=1e-3, atol=1e-4)
    assert bool(learner.triton_update.find_step().captured) == (captured and is_capturable)


@pytest.mark.parametrize("space, dtype", [("several categorical", np.float32), ("gaussian", np.int64)])
def test_actions_may_have_another_dtype(space, dtype, monkeypatch):
    def draw(*args, draw=updates.draw_episodes, **kwargs):
        episodes = draw(*args, **kwargs)
        for episode in episodes:
            episode.actions.data = np.asarray(episode.actions.data).astype(dtype)
        return episodes

    monkeypatch.setattr(updates, "draw_episodes", draw)
    assert_updates_of_rllib(make_config(space), space)


OF_THE_PROCESS = {"scale": 1.0}


class Scaled(DefaultPPOTorchRLModule):
    """A module that keeps a number, and reads one that no graph sees."""

    scale = 1.0

    def _forward_train(self, batch, **kwargs):
        found = super()._forward_train(batch, **kwargs)
        return found | {"action_dist_inputs": found["action_dist_inputs"] * self.scale * OF_THE_PROCESS["scale"]}


def test_numbers_that_change_between_updates_are_followed(monkeypatch):
    config, updated = make_config("categorical").rl_module(rl_module_spec=RLModuleSpec(module_class=Scaled)), []
    for learner in (build_learner(config), build_captured(config, "cpu", monkeypatch)):
        for scale, of_the_process in ((1.0, 1.0), (0.5, 1.0), (0.5, 0.3)):
            learner.module[POLICY].scale = scale
            monkeypatch.setitem(OF_THE_PROCESS, "scale", of_the_process)
            if of_the_process != 1 and isinstance(learner, TritonLearner):
                learner.recapture()
            found = update_learner(config, "categorical", 1, learner)
        updated.append(found)
    assert_same_updates(*updated)
    assert learner.triton_update.find_step().captured and not learner.triton_update.find_step().reason


@pytest.mark.parametrize("skip", [False, True])
def test_gradients_that_are_not_finite_are_treated_as_rllib_does(skip, captured, caplog):
    """All of them, after a reward that is none."""
    config, updated = make_config("categorical"), []
    config.torch_skip_nan_gradients = skip
    for learner in (build_learner(config), build_ours(config)):
        episodes = updates.draw_episodes("categorical")
        episodes[0].rewards.data[3] = np.nan
        with caplog.at_level(logging.WARNING, logger="ray.rllib.rl_triton"):
            learner.update(episodes=episodes, minibatch_size=50, num_epochs=2)
        updated.append(({}, learner.module[POLICY].get_state(), learner._weights_seq_no))
    assert_same_updates(*updated)
    number = 5 if captured else 4  # compiled are all but the last, of which RLlib warns itself
    assert (f"gradients of {number} minibatches were not finite" in caplog.text) == (not skip)


def test_frozen_parameters_are_treated_as_rllib_does(captured):
    """The encoder's, then all, then none; without a gradient nothing is stepped, and nothing raises."""
    config = make_config("gaussian")
    ours = build_ours(config)
    learners = build_learner(make_config("gaussian")), ours
    for frozen in ("encoder", "", "none"):
        for learner in learners:
            for name, parameter in learner.module[POLICY].named_parameters():
                parameter.requires_grad_(frozen not in name)
        assert_same_updates(*(update_learner(config, "gaussian", 1, learner) for learner in learners))
    step = ours.triton_update.find_step()
    assert not captured or (step.reason == "" and len(step.captured) == 3)


def make_agents_config(modules, **options):
    """A config of a learner with these modules, by agents of the same names."""
    spaces = {"observation_space": gym.spaces.Box(-np.inf, np.inf, (4,)), "action_space": updates.SPACES["gaussian"]}
    model = {"model_config": DefaultModelConfig(fcnet_hiddens=[8]), "catalog_class": PPOCatalog}
    specs = {
        name: RLModuleSpec(module_class=kind, **spaces, **(model if kind is DefaultPPOTorchRLModule else {}))
        for name, kind in modules.items()
    }
    config = make_config("gaussian").multi_agent(policies=set(modules), policy_mapping_fn=lambda x, *_, **__: x)
    return config.multi_agent(**options).rl_module(rl_module_spec=MultiRLModuleSpec(rl_module_specs=specs)), specs


def build_both(modules, **options):
    """RLlib's learner of these modules, and ours."""
    stock, ours = (make_agents_config(modules, **options)[0] for _ in range(2))
    return build_learner(stock), build_ours(ours)


def update_agents(learner, names, seed):
    episodes = updates.draw_episodes("gaussian", [29 + 7 * i for i in range(len(names))], seed=seed)
    for episode, name in zip(episodes, names, strict=True):
        episode.agent_id = episode.module_id = name
        episode.multi_agent_episode_id = episode.id_
    np.random.seed(seed)  # noqa: NPY002
    timesteps = dict.fromkeys(("num_env_steps_sampled_lifetime", "num_env_steps_trained_lifetime"), 100 * seed)
    learner.update(
        episodes=episodes, timesteps=timesteps, minibatch_size=16, num_epochs=2, shuffle_batch_per_epoch=True
    )


def test_a_module_that_acts_at_random_is_left_alone(captured):
    """It has no parameters, and no distribution of actions."""
    modules = {"trained": DefaultPPOTorchRLModule, "random": RandomRLModule}
    stock, ours = build_both(modules, policies_to_train=["trained"])
    for learner in (stock, ours):
        update_agents(learner, ["trained", "random"], 0)
    assert "; the fused loss of trained; " in ours.describe()
    assert bool(ours.triton_update.find_step().captured) == captured
    assert_same_states(stock, ours, "trained")


def assert_same_states(stock, ours, name):
    torch.testing.assert_close(*([*x.module[name].parameters()] for x in (ours, stock)), **updates.TOLERANCE)
    groups = [x.get_state()["optimizer"][f"{name}_default_optimizer"]["state"]["param_groups"] for x in (stock, ours)]
    assert groups[0] == groups[1]


def test_modules_that_come_and_go(monkeypatch):
    """Steps are captured anew, and checkpoints stay plain."""
    first, config = {"a": DefaultPPOTorchRLModule}, make_agents_config({"a": DefaultPPOTorchRLModule})[0]
    stock, ours = build_learner(make_agents_config(first)[0]), build_captured(config, "cpu", monkeypatch)
    spec = make_agents_config({"b": DefaultPPOTorchRLModule})[1]["b"]
    for learner in (stock, ours):
        update_agents(learner, ["a"], 0)
        torch.manual_seed(1)
        learner.add_module(module_id="b", module_spec=spec)
        update_agents(learner, ["a", "b"], 1)
    assert len(ours.triton_update.find_step().captured) == 1
    for name in ("a", "b"):
        assert_same_states(stock, ours, name)


def test_checkpoints_are_those_of_rllib(captured):
    """Both ways, in the middle of training; settings and learning rates are plain ones."""
    config = make_config("gaussian")
    learners = {"stock": build_learner(config), "ours": build_ours(config)}
    for learner in learners.values():
        update_learner(config, "gaussian", 1, learner)
    states = {name: learner.get_state() for name, learner in learners.items()}
    groups = [x["optimizer"]["default_policy_default_optimizer"]["state"]["param_groups"] for x in states.values()]
    assert groups[0] == groups[1]
    for name, state in states.items():
        learners["ours" if name == "stock" else "stock"].set_state({**state, "weights_seq_no": 9})
    continued = [update_learner(config, "gaussian", 1, learner) for learner in learners.values()]
    assert_same_updates(*continued)
    assert not captured or learners["ours"].triton_update.find_step().graphs.captures == 2  # of another state
    assert captured or learners["ours"].describe().endswith("updates are compiled")


class ReadsItsOutputs(DefaultPPOTorchRLModule):
    """No graph can hold it, which shows while its step is captured."""

    def _forward_train(self, batch, **kwargs):
        outputs = super()._forward_train(batch, **kwargs)
        assert outputs["action_dist_inputs"].sum().item() < np.inf
        return outputs


def test_metrics_of_an_update_whose_capture_fails(monkeypatch):
    """They are those of its last minibatch, and so is what RLlib computes the next KL coefficient from."""
    config = make_config("gaussian", entropy_coeff=0.02, kl_coeff=1.0, kl_target=0.25, lr=1e-2)
    config.rl_module(rl_module_spec=RLModuleSpec(module_class=ReadsItsOutputs))
    allow_captures(monkeypatch)
    with pytest.warns(RuntimeWarning, match="runs eagerly"):
        assert_updates_of_rllib(config, "gaussian")


class World(TorchRLModule, SelfSupervisedLossAPI):
    """A model of the environment: it has no distribution of actions, and its metric is a mean over minibatches."""

    def setup(self):
        self.net = torch.nn.Linear(4, 4)

    def get_train_action_dist_cls(self):
        raise NotImplementedError

    get_exploration_action_dist_cls = get_inference_action_dist_cls = get_train_action_dist_cls

    def _forward(self, batch, **kwargs):
        return {"predicted": self.net(batch["obs"])}

    def compute_self_supervised_loss(self, *, learner, module_id, config, batch, fwd_out):
        loss = (fwd_out["predicted"] - batch["obs"]).square().mean()
        learner.metrics.log_value((module_id, "error"), loss.item(), reduce="mean")
        return loss


def test_a_module_with_a_loss_of_its_own_and_no_actions(monkeypatch):
    modules = {"trained": DefaultPPOTorchRLModule, "world": World}
    allow_captures(monkeypatch)
    stock, ours = build_both(modules)
    assert ours.describe().endswith("updates are eager: a module has a loss of its own")
    assert "the loss of the module world (World)" in ours.describe()
    for learner in (stock, ours):
        update_agents(learner, ["trained", "world"], 0)
    for name in modules:
        assert_same_states(stock, ours, name)


def test_a_learner_s_state_is_read_and_set_while_nothing_is_captured(monkeypatch, tmp_path):
    """By RLlib's main thread, beside the learner's."""
    config, specs = make_agents_config({"a": DefaultPPOTorchRLModule})
    learner, saved = build_captured(config, "cpu", monkeypatch), str(tmp_path / "saved")
    state = learner.get_state()
    calls = [
        learner.get_state,
        partial(learner.set_state, state),
        partial(learner.save_to_path, saved),
        partial(learner.restore_from_path, saved),
        partial(learner.add_module, module_id="b", module_spec=specs["a"]),
        partial(learner.remove_module, "b"),
    ]
    weight = next(learner.module["a"].parameters())
    with ThreadPoolExecutor(1) as pool:
        for i, call in enumerate(calls):
            torch.nn.init.constant_(weight, i)
            with hold_captures():
                answer = pool.submit(call)
                assert not wait([answer], 0.3).done and (weight == i).all(), call
            answer.result(60)


class OwnLossOfRay(PPOTorchLearnerWithWeightRegularizerLoss, TritonPPOTorchLearner):
    """A loss in front of ours that is in Ray's package, as those of its examples are."""


STEPS = "_update", "postprocess_gradients"
OWN_UPDATE, OWN_GRADIENTS = ({"learner_class": derive(TritonPPOTorchLearner, name)} for name in STEPS)
OBSTACLES = {
    "those of RLlib: switched off": {"flags": {"rl_triton_update": False}},
    "those of RLlib: TritonPPOTorchLearner has its own _update (": OWN_UPDATE,
    "eager: Own has its own compute_loss_for_module (": {"learner_class": updates.own_loss(TritonPPOTorchLearner)},
    "eager: PPOTorchLearnerWithWeightRegularizerLoss has its own compute_loss_for_module (": {
        "learner_class": OwnLossOfRay,
        "flags": {"regularizer_coeff": 0.1},
    },
    "eager: TritonPPOTorchLearner has its own postprocess_gradients (": OWN_GRADIENTS,
    "eager: stateful modules": {"model_config": DefaultModelConfig(fcnet_hiddens=[8], use_lstm=True, max_seq_len=5)},
    "eager: the loss is RLlib's": {"rl_module_spec": RLModuleSpec(module_class=OwnModule)},
}


@pytest.mark.parametrize("reason", OBSTACLES)
def test_what_stands_against_it_is_said(reason, monkeypatch):
    given = dict(OBSTACLES[reason])
    flags, learner_class = given.pop("flags", {}), given.pop("learner_class", TritonPPOTorchLearner)
    allow_captures(monkeypatch)
    config = make_config("gaussian").learners(learner_class=learner_class, learner_config_dict=flags).rl_module(**given)
    learner = build_learner(enable_triton(config))
    assert f"; updates are {reason}" in learner.describe()
    stock_class = next(base for base in learner_class.__mro__ if not issubclass(base, TritonLearner))
    stock = build_learner(config.copy().learners(learner_class=stock_class, learner_config_dict=flags))
    found = [update_learner(config, "gaussian", 1, x) for x in (stock, learner)]
    if "Own" not in reason:
        assert_same_updates(*found)
    assert learner.triton_update.find_step().captured == {}


AVERAGED = 2  # graphs of a learner in `DistributedDataParallel`, which prepares itself in a first one


def update_share(rank):
    """One learner of several, whose gradients NCCL averages: RLlib's and ours, of experience that is its own."""
    config = make_config("gaussian", entropy_coeff=0.02, grad_clip_by="norm").learners(num_learners=2)
    config.learners(num_gpus_per_learner=1, local_gpu_idx=rank)
    stock = update_learner(config, "gaussian", 8, spread=0.3 + 0.1 * rank)
    learner = build_learner(enable_triton(config))
    assert learner.describe().endswith("; updates are captured")
    ours = update_learner(config, "gaussian", 8, learner=learner, spread=0.3 + 0.1 * rank)
    assert_same_updates(stock, ours, rtol=1e-2, atol=1e-3)
    step = learner.triton_update.find_step()
    assert len(step.captured) == AVERAGED and not step.reason, step.reason
    step.reset()
    return ours[1]


def describe_share(rank):
    learner = build_learner(enable_triton(make_config("gaussian").learners(num_learners=2)))
    return learner.describe()


def test_learners_that_average_gradients_are_ours_on_a_cpu(tmp_path):
    for said in run_ranks(describe_share, tmp_path, ranks=2, kind="gloo"):
        assert "the fused loss of default_policy; updates are eager" in said


@pytest.mark.gpu
def test_learners_that_average_gradients_are_captured(tmp_path):
    weights = run_ranks(update_share, tmp_path, ranks=min(2, torch.cuda.device_count()), kind="nccl")
    for name, want in weights[0].items():
        np.testing.assert_array_equal(weights[-1][name], want, err_msg=name)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no two GPUs")
def test_training_on_two_gpus_is_that_of_rllib(private_ray):
    """On Ray's processes, each of which sees one of them."""
    configs = [small_ppo().learners(num_learners=2, num_gpus_per_learner=1) for _ in range(2)]
    with running_ray(num_cpus=4, num_gpus=2):
        stock = train_algorithm(configs[0])
        ours = train_algorithm(enable_triton(configs[1]), updates.describe_captures)
    assert_same_training(stock, ours)
    assert [x["reason"] for x in ours[2]] == ["", ""]
    assert all(0 < x["graphs"] <= AVERAGED for x in ours[2])
