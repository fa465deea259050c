"""TorchRL's loss in one pass: the results and gradients of the installed `ClipPPOLoss`, option by option.

Where an option or a minibatch is left to TorchRL's own operations, the results are equal bit for bit.
"""

import inspect

import pytest
import torch

pytest.importorskip("torchrl")

from gpu_checks import forbid_waiting
from process_state import interrupt
from replaced import list_changes, list_run
from tensordict import TensorDict
from tensordict import nn as tdn
from torch import nn
from torch.distributions import Categorical, Independent, Normal
from torchrl import modules
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from rl_triton_adapters.torchrl import TritonGAE
from rl_triton_adapters.torchrl.losses import KnownGradient, TritonClipPPOLoss

pytestmark = [
    pytest.mark.covering,
    pytest.mark.filterwarnings("ignore:.*entropy.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:No target network updater:UserWarning"),
]

OBSERVATIONS, ACTIONS = 5, 3
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5}


class DiagonalNormal(Independent):
    def __new__(cls, loc, scale):
        return Independent(Normal(loc, scale), 1)


class ColumnNormal(Independent):
    """Independent normals whose actions have two dimensions."""

    def __new__(cls, loc, scale):
        return Independent(Normal(loc.unsqueeze(-1), scale.unsqueeze(-1)), 2)


class SharedCategorical(Categorical):
    def __new__(cls, logits):
        return Categorical(logits=logits[..., :1, :])


KINDS = (TritonClipPPOLoss, ClipPPOLoss)
DISTRIBUTIONS = {
    "categorical": Categorical,
    "one-hot": modules.OneHotCategorical,
    "masked": modules.MaskedCategorical,
    "normal": modules.IndependentNormal,
    "independent": DiagonalNormal,
    "tanh": modules.TanhNormal,
    "column": ColumnNormal,
    "composite": tdn.CompositeDistribution,
}
SPLIT = {"distribution_map": dict.fromkeys(("move", "turn"), modules.IndependentNormal)}  # several kinds of actions
FUSED_HEADS = ("categorical", "one-hot", "masked", "normal", "independent")


def make_actor(head):
    layers, keys, size = [nn.Linear(OBSERVATIONS, ACTIONS)], ["logits"], 2 * ACTIONS
    if head in ("normal", "independent", "tanh", "column"):
        layers, keys = [nn.Linear(OBSERVATIONS, size), tdn.NormalParamExtractor()], ["loc", "scale"]
    module, more = tdn.TensorDictModule(nn.Sequential(*layers), ["observation"], keys), {}
    if head == "shared":
        features = tdn.TensorDictModule(nn.Linear(OBSERVATIONS, 4), ["observation"], ["hidden"])
        module = tdn.TensorDictSequential(features, tdn.TensorDictModule(nn.Linear(4, ACTIONS), ["hidden"], keys))
    if head == "composite":
        layer = nn.Sequential(nn.Linear(OBSERVATIONS, 4), tdn.NormalParamExtractor())
        names = [[("params", name, key) for key in ("loc", "scale")] for name in ("move", "turn")]
        module = tdn.TensorDictSequential(*(tdn.TensorDictModule(layer, ["observation"], x) for x in names))
        keys, more = ["params"], {"distribution_kwargs": SPLIT}
    keys = [*keys, "mask"] if head == "masked" else keys
    kind = DISTRIBUTIONS.get(head, Categorical)
    return modules.ProbabilisticActor(module, in_keys=keys, distribution_class=kind, return_log_prob=True, **more)


def make_loss(loss_class, head="categorical", dtype=torch.float64, **options):
    torch.manual_seed(0)
    size, key = (4, "hidden") if head == "shared" else (OBSERVATIONS, "observation")
    actor, critic = make_actor(head), modules.ValueOperator(nn.Linear(size, 1), in_keys=[key])
    return loss_class(actor, critic, **options).to(dtype)


@torch.no_grad()
def make_minibatch(head="categorical", dtype=torch.float64, shape=(64,), seed=1):
    """Steps whose ratios and values are inside and outside of all clips."""
    torch.manual_seed(seed)
    batch = TensorDict({"observation": torch.randn(*shape, OBSERVATIONS, dtype=dtype)}, shape)
    batch["mask"] = torch.rand(*shape, ACTIONS) < 0.7
    batch["mask"][..., 0] = True
    batch = make_actor(head).to(dtype)(batch)
    batch["action_log_prob"] += 0.4 * torch.randn(shape, dtype=dtype)
    for name in ("advantage", "value_target", "state_value"):
        batch[name] = 0.7 * torch.randn(*shape, 1, dtype=dtype)
    return batch.exclude("logits", "loc", "scale")


def add_following(batch, observation, reward):
    """What an estimator reads."""
    flags = dict.fromkeys(("done", "terminated"), torch.rand(*batch.shape, 1) < 0.1)
    batch["next"] = TensorDict({"observation": observation, "reward": reward, **flags}, batch.shape)
    return batch


def assert_alike(compute, *about, **options):
    """What is computed with both losses."""
    torch.testing.assert_close(*(compute(make_loss(x, *about, **options)) for x in KINDS), rtol=1e-11, atol=1e-11)


def sum_terms(losses):
    return sum(x for name, x in losses.items() if name.startswith("loss_"))


def compute_results(loss, batch, total=sum_terms, seed=2):
    """All results and gradients, and whether they were computed in one pass."""
    torch.manual_seed(seed)
    losses = loss(batch.clone())
    fused = type(losses["loss_objective"].grad_fn).__name__ == KnownGradient.__name__ + "Backward"
    assert not isinstance(loss, TritonClipPPOLoss) or (loss.reason == "") == fused
    total(losses).sum().backward()
    gradients = {name: x.grad for name, x in loss.named_parameters() if x.grad is not None}
    return {name: x.detach() for name, x in losses.items()}, gradients, fused


def assert_same_results(
    head="categorical", dtype=torch.float64, batch=None, fused=True, total=sum_terms, classes=KINDS, **options
):
    """The results of both losses, with their keys in order, and the same gradients."""
    batch = make_minibatch(head, dtype) if batch is None else batch
    (got, got_gradients, was_fused), (want, want_gradients, _) = (
        compute_results(make_loss(cls, head, dtype, **options), batch, total) for cls in classes
    )
    assert was_fused == fused
    assert list(got) == list(want) and got_gradients.keys() == want_gradients.keys() and want_gradients
    tolerance = TOLERANCE[dtype] if fused else 0.0
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, equal_nan=True)
    torch.testing.assert_close(got_gradients, want_gradients, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("head", FUSED_HEADS)
def test_results_and_gradients(head, dtype):
    assert_same_results(head, dtype)


def test_integer_actions_of_a_normal_distribution():
    batch = make_minibatch("independent")
    batch["action"] = batch["action"].round().long()
    assert_same_results("independent", batch=batch)


FUSED_OPTIONS = {
    "no entropy": {"entropy_bonus": False},
    "coefficients": {"entropy_coeff": 0.3, "critic_coeff": 0.25, "clip_epsilon": 0.05},
    "no critic": {"critic_coeff": 0.0},
    "wide clip": {"clip_epsilon": 1.0},
    "asymmetric clip": {"clip_epsilon": (0.1, 0.4)},
    "normalized": {"normalize_advantage": True},
    "clipped values": {"clip_value": 0.3},
    "values clipped alike": {"clip_value": True, "loss_critic_type": "l2"},
    "l2": {"loss_critic_type": "l2"},
    "separate": {"separate_losses": True},
    "modules": {"functional": False},
    "no explained variance": {"log_explained_variance": False, "device": torch.device("cpu")},
}


@pytest.mark.parametrize("head", ["categorical", "normal"])
@pytest.mark.parametrize("options", FUSED_OPTIONS.values(), ids=FUSED_OPTIONS)
def test_options(options, head):
    assert_same_results(head, **options)


@pytest.mark.parametrize(
    "total",
    [
        lambda x: 2 * x["loss_objective"] + 0.5 * x["loss_critic"] - 3 * x["loss_entropy"],
        lambda x: x["loss_objective"],
        lambda x: x["loss_critic"],
        lambda x: x["loss_entropy"],
        lambda x: x["loss_objective"] + x["loss_entropy"],
        lambda x: torch.stack([x["loss_critic"], x["loss_objective"], x["loss_entropy"]]),
    ],
)
@pytest.mark.parametrize("head", ["categorical", "normal"])
def test_each_term_has_a_gradient_of_its_own(head, total):
    assert_same_results(head, total=total, normalize_advantage=True, clip_value=0.3)


@pytest.mark.parametrize("frozen", ["actor", "critic", "bias"])
def test_frozen_parameters(frozen):
    """A term without a parameter that learns has no graph."""

    def freeze_and_differentiate(loss):
        for name, parameter in loss.named_parameters():
            parameter.requires_grad_(frozen not in name)
        losses = loss(make_minibatch("normal"))
        sum_terms(losses).backward()
        gradients = {name: x.grad for name, x in loss.named_parameters() if x.grad is not None}
        assert gradients
        return gradients, {name: torch.tensor(x.requires_grad) for name, x in losses.items()}

    assert_alike(freeze_and_differentiate, "normal", clip_value=0.2)


def test_terms_one_after_the_other():
    """The actor's terms first, then the critic's, and no graph retained, as with an optimizer for each."""

    def differentiate(loss):
        losses = loss(make_minibatch())
        (losses["loss_objective"] + losses["loss_entropy"]).backward()
        losses["loss_critic"].backward()
        return {name: x.grad for name, x in loss.named_parameters()}

    assert_alike(differentiate)


def test_a_retained_graph_gives_the_same_gradient_again_and_no_second_derivative():
    loss = make_loss(TritonClipPPOLoss)
    total, parameters = sum_terms(loss(make_minibatch())), list(loss.parameters())
    first = torch.autograd.grad(total, parameters, retain_graph=True)
    with pytest.raises(RuntimeError, match="create_graph: got True, expected False"):
        torch.autograd.grad(total, parameters, create_graph=True)
    torch.testing.assert_close(torch.autograd.grad(total, parameters), first, rtol=0, atol=0)


@pytest.mark.parametrize("options", [{"normalize_advantage": True, "normalize_advantage_exclude_dims": (-2,)}, {}])
def test_time_and_agents(options):
    """A minibatch of sequences, and one with an advantage for each agent."""
    assert_same_results(batch=make_minibatch(shape=(8, 6)), **options)
    agents = make_minibatch("normal", shape=(8, 6))
    agents.batch_size = (8,)
    assert_same_results("normal", batch=agents, **options)


def test_values_that_may_not_change_are_not_clipped():
    """TorchRL takes a clip of 0 for none; here it is a number that a schedule may change."""
    (got, *_), (want, *_) = (compute_results(make_loss(cls, clip_value=0.0), make_minibatch()) for cls in KINDS)
    assert got.pop("value_clip_fraction") == 0
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("normalize_advantage", [True, False])
def test_missing_advantages_are_estimated(normalize_advantage):
    batch = make_minibatch(shape=(4, 16)).exclude("advantage", "value_target", "state_value")
    add_following(batch, batch["observation"].roll(-1, 1), torch.randn(4, 16, 1, dtype=torch.float64))
    assert_same_results(batch=batch, normalize_advantage=normalize_advantage)


@pytest.mark.parametrize("network", ["actor_network", "critic_network"])
@pytest.mark.parametrize("given", ["advantage", "nothing"])
def test_an_interrupted_loss_leaves_what_that_of_torchrl_does(given, network):
    """Networks, which are called with other parameters, have their own again. TensorDict may raise an error instead."""
    batch, left = make_minibatch(shape=(4, 16)), []
    add_following(batch, batch["observation"], batch["advantage"])
    batch = batch if given == "advantage" else batch.exclude("advantage", "value_target", "state_value")
    for loss_class, estimator in ((ClipPPOLoss, GAE), (TritonClipPPOLoss, TritonGAE)):
        loss = make_loss(loss_class)
        loss.make_value_estimator(estimator, gamma=0.5, lmbda=0.5, value_network=loss.critic_network)
        (layer,) = [x for x in getattr(loss, network).modules() if type(x) is nn.Linear]
        handle = layer.register_forward_hook(interrupt)
        with pytest.raises((KeyboardInterrupt, RuntimeError)) as error:
            loss(batch)
        handle.remove()
        learning = [(name, x.requires_grad) for name, x in loss.named_parameters()]
        kept = error.type, set(vars(loss)) - {"reason", "_asked"}, learning, torch.is_grad_enabled()
        left.append((kept, *compute_results(loss, batch)[:2]))
    assert left[0][0] == left[1][0]
    torch.testing.assert_close(left[1][1:], left[0][1:], rtol=1e-11, atol=1e-11)


def test_advantages_of_an_estimator_as_programs_build_it():
    """Rewards in float64, as Gymnasium has them, leave them in float32."""
    batch = make_minibatch(dtype=torch.float32, shape=(4, 16))
    add_following(batch, batch["observation"].roll(-1, 1), torch.randn(4, 16, 1).double())
    critic = modules.ValueOperator(nn.Linear(OBSERVATIONS, 1), in_keys=["observation"])
    estimated = TritonGAE(gamma=0.99, lmbda=0.95, value_network=critic)(batch.select("observation", "next"))
    batch.update(estimated.select("advantage", "value_target", "state_value"))
    assert_same_results(dtype=torch.float32, batch=batch)


@pytest.mark.parametrize("separate_losses", [True, False])
def test_a_critic_of_the_features_of_the_actor(separate_losses):
    """The critic's gradient reaches them, unless losses are separate."""
    assert_same_results("shared", batch=make_minibatch(), separate_losses=separate_losses)


def derive_both(mixin):
    """Classes in front of which somebody's own stands."""
    return [type(cls.__name__, (mixin, cls), {}) for cls in KINDS]


def test_keys_of_other_names():
    class Renamed:
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.set_keys(advantage="adv", value_target=("targets", "v"), sample_log_prob="lp")

    batch = make_minibatch()
    for names in (("advantage", "adv"), ("value_target", ("targets", "v")), ("action_log_prob", "lp")):
        batch.rename_key_(*names)
    assert_same_results(batch=batch, classes=derive_both(Renamed))


def test_by_keyword_instead_of_a_tensordict():
    batch = make_minibatch()

    def call_by_keyword(loss):
        loss.in_keys = ["observation", "action", "action_log_prob", "advantage", "value_target"]
        return loss(**{key: batch[key] for key in loss.in_keys})

    assert_alike(call_by_keyword)


def test_the_hook_for_values_of_a_subclass():
    """MAPPO normalises values through it."""

    class Scaled:
        def _critic_loss_inputs(self, *tensors):
            return tuple(None if x is None else 2 * x for x in tensors)

    assert_same_results(classes=derive_both(Scaled), clip_value=0.3)


def test_schedules():
    def schedule_and_compute(loss):
        loss.entropy_coeff, loss.critic_coeff, loss.clip_value = 0.5, 0.125, 0.1
        loss.clip_epsilon.fill_(0.05)
        return compute_results(loss, make_minibatch())[:2]

    assert_alike(schedule_and_compute, clip_value=0.2)


def test_without_a_graph():
    loss, batch = make_loss(TritonClipPPOLoss), make_minibatch()
    with torch.no_grad():
        got = loss(batch)
    assert not any(x.requires_grad for x in got.values())
    torch.testing.assert_close(got, loss(batch).detach(), rtol=0, atol=0)


def test_ratios_that_overflow():
    """The effective sample size, taken from logarithms, and the gradient of clipped steps stay finite."""
    batch = make_minibatch()
    batch["action_log_prob"][:2] = -60.0
    batch["advantage"][:2] = 1.0
    assert_same_results(batch=batch)


@pytest.mark.parametrize("head", ["tanh", "column"])
def test_distributions_left_to_torchrl(head):
    assert_same_results(head, fused=False)


@pytest.mark.parametrize("coefficient", [0.01, {"move_entropy": 0.1, "turn_entropy": 0.2}])
@pytest.mark.filterwarnings("ignore:You are using a composite distribution:UserWarning")
def test_several_kinds_of_actions_are_left_to_torchrl(coefficient):
    with tdn.set_composite_lp_aggregate(False), torch.no_grad():
        batch = make_actor("composite").double()(make_minibatch().exclude("action", "action_log_prob"))
    with tdn.set_composite_lp_aggregate(False):
        assert_same_results("composite", batch=batch, fused=False, entropy_coeff=coefficient)


STOCK_OPTIONS = {
    "sum": {"reduction": "sum"},
    "each step": {"reduction": "none"},
    "l1": {"loss_critic_type": "l1"},
    "norm": {"advantage_norm": modules.RunningValueNorm(shape=1)},
    "delayed": {"delay_actor": True},
    "capped": {"max_importance_ratio": 1.1},
    "a coefficient with dimensions": {"entropy_coeff": torch.tensor([0.1])},
    "half precision": {"dtype": torch.bfloat16},
}


@pytest.mark.parametrize("options", STOCK_OPTIONS.values(), ids=STOCK_OPTIONS)
def test_options_left_to_torchrl(options):
    assert_same_results(fused=False, **{"dtype": torch.float32, **options})


@pytest.mark.parametrize(
    "change",
    [
        lambda batch: batch.set("shifted_valid", torch.arange(64) % 3 > 0),
        lambda batch: batch.set(("collector", "mask"), torch.arange(64).unsqueeze(-1) % 3 > 0),
        lambda batch: batch["advantage"].requires_grad_(),
        lambda batch: batch.set("value_target", batch["value_target"].double()),
    ],
    ids=["shifted", "collected", "a gradient", "a wide target"],
)
def test_minibatches_left_to_torchrl(change):
    batch = make_minibatch(dtype=torch.float32)
    change(batch)
    assert_same_results(fused=False, dtype=torch.float32, batch=batch)


@pytest.mark.parametrize("how", ["autocast", "advantages", "coefficient", "distribution"])
def test_networks_run_once_where_torchrl_computes(how):
    """Dropout draws what it draws there. A loss looks once at the distribution."""
    found, head = [], "column" if how == "distribution" else "categorical"
    for loss_class in (ClipPPOLoss, TritonClipPPOLoss):
        loss = make_loss(loss_class, head, dtype=torch.float32)
        if how == "distribution":
            loss(make_minibatch(head, dtype=torch.float32))
        calls = []
        layer = next(x for x in loss.actor_network.modules() if isinstance(x, torch.nn.Linear))
        layer.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        batch = make_minibatch(head, dtype=torch.float32)
        if how == "advantages":
            batch["advantage"], batch["value_target"] = batch["advantage"].double(), batch["value_target"].double()
        if how == "coefficient":
            loss.critic_coeff = torch.tensor(1.0, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            found.append(loss(batch))
        assert len(calls) == 1
    assert loss.reason
    torch.testing.assert_close(*(dict(x.items()) for x in found))


def test_torch_compile_is_left_to_torchrl():
    class Compiled(TritonClipPPOLoss):
        def forward(self, tensordict):
            return torch.compile(super().forward, backend="eager")(tensordict)

    assert_same_results(classes=(Compiled, ClipPPOLoss), fused=False, dtype=torch.float32)


def test_one_distribution_of_all_agents_is_left_to_torchrl(monkeypatch):
    agents = make_minibatch(shape=(8, 6), dtype=torch.float32)
    agents.batch_size = (8,)
    monkeypatch.setitem(DISTRIBUTIONS, "categorical", SharedCategorical)
    assert_same_results(batch=agents, fused=False, dtype=torch.float32)


@pytest.mark.parametrize("head", ["normal", "categorical"])
def test_every_function_that_torchrl_runs(head):
    """Replaced, or a user's own: the results are those of TorchRL's loss with it, whichever it is."""
    batch, reasons = make_minibatch(head), {}
    losses = [make_loss(cls, head, clip_value=0.3, normalize_advantage=True) for cls in KINDS]
    ran = list_run(["torchrl"], compute_results, losses[1], batch)
    assert len(ran) > 50 and compute_results(losses[0], batch)[2]
    for name, change in list_changes(ran, losses, torch.nn.Module.modules):
        losses[0]._asked, found = (-1, ""), []
        with change():
            for loss in losses:
                torch.manual_seed(0)
                results = loss(batch.clone())
                gradients = torch.autograd.grad(sum_terms(results).sum(), [*loss.parameters()], allow_unused=True)
                found.append(({key: x.detach() for key, x in results.items()}, gradients))
            reasons[name] = losses[0].reason
        torch.testing.assert_close(*found, rtol=1e-11, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}")
    assert reasons["a class with PPOLoss.loss_critic"].startswith("TritonClipPPOLoss has its own loss_critic (")
    assert not reasons["numbers"] and not reasons["a class with LossModule.named_parameters"]


WRONG_MASK = torch.ones(64, 2, dtype=torch.bool)
MISTAKES = {
    "value_target": (lambda batch: batch.pop("value_target"), KeyError, "value_target"),
    "action_log_prob": (lambda batch: batch.pop("action_log_prob"), KeyError, "action_log_prob"),
    "state_value": (lambda batch: batch.pop("state_value"), KeyError, "clip_value is set"),
    "a mask of another shape": (lambda x: x.set(("collector", "mask"), WRONG_MASK), RuntimeError, "expanded size"),
    "an advantage without its last dimension": (
        lambda batch: batch.set("advantage", batch["advantage"].squeeze(-1)),
        ValueError,
        "outer product",
    ),
}


@pytest.mark.parametrize("loss_class", KINDS)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_torchrls_errors(mistake, loss_class):
    change, error, message = MISTAKES[mistake]
    options = {"critic_coeff": 0.0} if error is ValueError else {"clip_value": 0.2}
    batch = make_minibatch()
    change(batch)
    with pytest.raises(error, match=message):
        make_loss(loss_class, **options)(batch)


def test_arguments_and_keys_are_those_of_torchrl():
    assert inspect.signature(TritonClipPPOLoss) == inspect.signature(ClipPPOLoss)
    ours, theirs = make_loss(TritonClipPPOLoss, clip_value=0.2), make_loss(ClipPPOLoss, clip_value=0.2)
    assert set(ours.in_keys) == set(theirs.in_keys) and ours.out_keys == theirs.out_keys
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    theirs.load_state_dict(ours.state_dict())


# --- on a GPU ---------------------------------------------------------------------------------------------------------

CAPTURED_HEADS = pytest.mark.parametrize("head", FUSED_HEADS)
ON_GPU = {"normalize_advantage": True, "clip_value": 0.3}


@pytest.mark.gpu
@CAPTURED_HEADS
def test_the_loss_reads_nothing_from_the_device(head):
    """And gives what TorchRL's does."""
    batch = make_minibatch(head, torch.float32, shape=(512,)).to("cuda")
    losses = [make_loss(x, head, torch.float32, **ON_GPU).to("cuda") for x in KINDS]
    got, want = (compute_results(x, batch) for x in losses)
    assert got[2] and list(got[0]) == list(want[0])
    torch.testing.assert_close(got[:2], want[:2], rtol=2e-5, atol=2e-5)
    with forbid_waiting():
        sum_terms(losses[0](batch)).backward()


class Training:
    """A loss, an optimizer whose step can be captured, and minibatches of one shape."""

    def __init__(self, loss_class, head):
        self.loss = make_loss(loss_class, head, torch.float32, **ON_GPU).to("cuda")
        self.optimizer = torch.optim.Adam(self.loss.parameters(), lr=1e-3, fused=True, capturable=True)
        self.batches = [make_minibatch(head, torch.float32, shape=(256,), seed=i).to("cuda") for i in range(8)]

    def take_step(self, minibatch):
        losses = self.loss(minibatch)
        self.optimizer.zero_grad()
        sum_terms(losses).backward()
        torch.nn.utils.clip_grad_norm_(self.loss.parameters(), 0.5)
        self.optimizer.step()
        return losses.detach()

    def train(self, step, num_steps=300):
        """Step by step, with schedules; the parameters and the last results."""
        for i in range(num_steps):
            self.loss.entropy_coeff = 0.01 * (1 - i / num_steps)
            self.loss.clip_epsilon.fill_(0.2 * (1 - i / num_steps))
            losses = step(self.batches[i % len(self.batches)].clone())
        return [x.detach().clone() for x in self.loss.parameters()], dict(losses.items())


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Tensordict is registered in PyTree:UserWarning")
@CAPTURED_HEADS
def test_captured_steps_are_the_eager_ones(head):
    eager, captured, stock = (Training(cls, head) for cls in (TritonClipPPOLoss, TritonClipPPOLoss, ClipPPOLoss))
    step = tdn.CudaGraphModule(captured.take_step, in_keys=[], out_keys=[])
    want, got = eager.train(eager.take_step), captured.train(step)
    assert isinstance(step.graph, torch.cuda.CUDAGraph)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got[0], stock.train(stock.take_step)[0], rtol=0, atol=1e-4)
