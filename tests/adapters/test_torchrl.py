"""TorchRL with our value estimators: the numbers, gradients and losses of its own, from functions to PPO.

γ and λ are powers of two away from 1: TorchRL keeps them in float32, whatever the dtype of the data.
"""

import copy
import inspect
import pickle
import re
from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("torchrl")

from gpu_checks import forbid_waiting
from overrides import derive
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule, TensorDictSequential
from torch import nn
from torch._dynamo.testing import CompileCounter
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import IndependentNormal, OneHotCategorical, ProbabilisticActor, ValueOperator
from torchrl.objectives import A2CLoss, ClipPPOLoss
from torchrl.objectives.utils import ValueEstimators
from torchrl.objectives.value import GAE, MultiAgentGAE, TDLambdaEstimator, VTrace, functional

from rl_triton_adapters import torchrl as ours
from rl_triton_adapters.torchrl import TritonGAE, TritonTDLambdaEstimator, TritonVTrace, use_triton_estimators
from rl_triton_core.compiled import CompiledUpdate, Rollout

pytestmark = pytest.mark.covering

GAMMA, LMBDA = 31 / 32, 7 / 8
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 0.05}
SHAPES = [  # and where time is
    ((20, 1), -2),
    ((20, 3), 0),
    ((20,), -1),
    ((5, 20, 1), -2),
    ((5, 20, 3), 1),
    ((20, 5, 1), 0),
    ((20, 5, 3), -3),
    ((2, 3, 20, 1), 2),
    ((2, 20, 3, 3), -3),
    ((1, 1, 1), 1),
]


def list_results(results):
    return [*results] if isinstance(results, tuple) else [results]


def assert_same(got, want):
    assert type(got) is type(want)
    for ours_, theirs in zip(list_results(got), list_results(want), strict=True):
        torch.testing.assert_close(ours_, theirs, rtol=TOLERANCE[theirs.dtype], atol=TOLERANCE[theirs.dtype])


def random_steps(shape, dtype=torch.float64, seed=0):
    """TorchRL's arguments by name. The value after a step is not that of the next step: another network's."""
    generator = torch.Generator().manual_seed(seed)
    names = ("state_value", "next_state_value", "reward", "log_pi", "log_mu")
    steps = {name: torch.randn(shape, generator=generator, dtype=dtype) for name in names}
    terminated, truncated = torch.rand((2, *shape), generator=generator) < 0.15
    return {**steps, "done": terminated | truncated, "terminated": terminated}


def has_parameter(function, name):
    return name in inspect.signature(function).parameters


def call_with_steps(function, steps, **kwargs):
    """The function with those of the steps that it takes."""
    return function(**{name: x for name, x in steps.items() if has_parameter(function, name)}, **kwargs)


DISCOUNTS = {"gamma": GAMMA, "lmbda": LMBDA}
CLIPS = {"gamma": GAMMA, "rho_thresh": 1.5, "c_thresh": 0.75}
FUNCTIONS = [
    (ours.generalized_advantage_estimate, functional.vec_generalized_advantage_estimate, DISCOUNTS),
    (ours.td_lambda_return_estimate, functional.vec_td_lambda_return_estimate, DISCOUNTS),
    (ours.vtrace_advantage_estimate, functional.vtrace_advantage_estimate, CLIPS),
]
EVERY = pytest.mark.parametrize(("function", "stock", "scalars"), FUNCTIONS, ids=["gae", "td-lambda", "vtrace"])


def every_argument(*names):
    """Each function with each of these arguments that it has."""
    each = [(*row, name) for row in FUNCTIONS for name in names if has_parameter(row[0], name)]
    ids = [f"{function.__name__}-{name}" for function, *_, name in each]
    return pytest.mark.parametrize(("function", "stock", "scalars", "name"), each, ids=ids)


@EVERY
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("shape", "time_dim"), SHAPES)
def test_any_batch_and_time_dimension(function, stock, scalars, shape, time_dim, dtype):
    steps = random_steps(shape, dtype)
    assert_same(*(call_with_steps(f, steps, **scalars, time_dim=time_dim) for f in (function, stock)))


def copy_to_gpu(steps):
    return {name: x.cuda() for name, x in steps.items()}


@pytest.mark.gpu
@EVERY
@pytest.mark.parametrize(("shape", "time_dim"), [((20,), -1), ((5, 20, 3), 1), ((200, 64, 1), 0)])
def test_numbers_on_a_gpu(function, stock, scalars, shape, time_dim):
    """Of TorchRL's loops: its vectorized functions are convolutions, in TensorFloat-32. Ours wait for nothing."""
    steps, options = random_steps(shape, torch.float32), {**scalars, "time_dim": time_dim}
    on_gpu, loop = copy_to_gpu(steps), getattr(functional, function.__name__)
    call_with_steps(function, on_gpu, **options)
    with forbid_waiting():
        got = call_with_steps(function, on_gpu, **options)
    assert {x.device.type for x in list_results(got)} == {"cuda"}
    assert_same(got, call_with_steps(loop, on_gpu, **options))
    on_cpu = call_with_steps(stock, steps, **options)
    assert_same(*(tuple(x.cpu() for x in list_results(x)) for x in (got, on_cpu)))


@EVERY
@pytest.mark.parametrize("flags", ["terminated", "truncated", "both", "neither", "done alone"])
def test_done_and_terminated(function, stock, scalars, flags):
    """Without `terminated` every done step is one."""
    steps = random_steps((5, 20, 1))
    steps["terminated"] &= flags in ("terminated", "both")
    steps["done"] = steps["terminated"] if flags in ("terminated", "neither") else steps["done"]
    assert steps["done"].any() == (flags != "neither")
    if flags == "done alone":
        del steps["terminated"]
    assert_same(*(call_with_steps(f, steps, **scalars) for f in (function, stock)))


@EVERY
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_single(function, stock, scalars, dtype):
    steps = random_steps((5, 20, 1), dtype)
    wide = {name: x.float() if x.is_floating_point() else x for name, x in steps.items()}
    assert_same(call_with_steps(function, steps, **scalars), call_with_steps(stock, wide, **scalars))


@EVERY
@pytest.mark.parametrize("values", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (1,), (5, 20, 1)])
def test_dtypes_of_discounts_count(function, stock, scalars, values, dtype, shape):
    steps = random_steps((5, 20, 1), values)
    discounts = (GAMMA, 1) if dtype is None else (torch.full(shape, GAMMA, dtype=dtype),)
    for gamma in discounts:
        found = [list_results(call_with_steps(f, steps, **{**scalars, "gamma": gamma})) for f in (function, stock)]
        assert [x.dtype for x in found[0]] == [x.dtype for x in found[1]]


FLOATS = [torch.float32, torch.float64]


@EVERY
@pytest.mark.parametrize("values", FLOATS)
@pytest.mark.parametrize("rewards", [*FLOATS, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool])
@pytest.mark.parametrize("flags", [torch.bool, torch.uint8, torch.int64])
def test_dtypes_in_and_out_are_those_of_torchrl(function, stock, scalars, values, rewards, flags):
    """TorchRL gets bool flags: it negates them bit by bit."""
    steps = {name: x if x.dtype == torch.bool else x.to(values) for name, x in random_steps((5, 20, 1)).items()}
    steps["reward"] = (2 * steps["reward"]).abs().to(rewards)
    want = call_with_steps(stock, steps, **scalars)
    got = call_with_steps(
        function, {name: x.to(flags) if name in ("done", "terminated") else x for name, x in steps.items()}, **scalars
    )
    for x, y in zip(*map(list_results, (got, want)), strict=True):
        assert x.dtype == y.dtype == torch.promote_types(values, rewards)
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


@EVERY
def test_what_lies_behind_a_terminal_state_leaves_no_trace(function, stock, scalars):
    steps = random_steps((5, 20, 1))
    clean = call_with_steps(function, steps, **scalars)
    steps["next_state_value"] = torch.where(steps["terminated"], torch.nan, steps["next_state_value"])
    assert_same(call_with_steps(function, steps, **scalars), clean)


@every_argument("state_value", "next_state_value", "reward", "log_pi", "log_mu")
def test_gradients(function, stock, scalars, name):
    def gradient(f):
        steps = random_steps((4, 20, 3))
        steps[name].requires_grad_()
        results = list_results(call_with_steps(f, steps, **scalars))
        weights = torch.Generator().manual_seed(1)
        sum((x * torch.randn(x.shape, generator=weights)).sum() for x in results if x.requires_grad).backward()
        return steps[name].grad

    assert_same(gradient(function), gradient(stock))


@EVERY
@pytest.mark.parametrize("differentiated", [False, True])
@pytest.mark.parametrize("shape", [(), (1,)], ids=["scalar", "one element"])
def test_compiled_with_numbers_in_tensors(function, stock, scalars, shape, differentiated):
    """Which may change: the compiled code reads them."""
    torch._dynamo.reset()
    steps = random_steps((4, 20, 1), torch.float32)
    steps["next_state_value"].requires_grad_(differentiated)
    counter = CompileCounter()
    compiled = torch.compile(partial(call_with_steps, function), backend=counter, fullgraph=True)
    for factor in (1.0, 0.5, 0.25):
        tensors = {name: torch.full(shape, factor * x) for name, x in scalars.items()}
        results = [f(steps, **tensors) for f in (compiled, partial(call_with_steps, stock))]
        assert_same(*results)
        assert list_results(results[0])[-1].requires_grad == differentiated
    assert counter.frame_count == 1


@EVERY
def test_names_and_defaults_are_those_of_torchrl(function, stock, scalars):
    want = inspect.signature(getattr(functional, function.__name__)).parameters
    got = inspect.signature(function).parameters
    assert [(x.name, x.default) for x in got.values()] == [(x.name, x.default) for x in want.values()]


@every_argument("state_value", "next_state_value", "reward", "done")
def test_shapes_that_differ_are_torchrls_error(function, stock, scalars, name):
    steps = random_steps((5, 20, 1))
    steps[name] = steps[name][:, :10]
    for f in (function, stock):
        with pytest.raises(RuntimeError, match="must share a unique shape"):
            call_with_steps(f, steps, **scalars)


@EVERY
@pytest.mark.parametrize(("shape", "time_dim"), [((5, 20, 1), 3), ((5, 20, 1), -4), ((20,), 2)])
def test_a_time_dimension_that_is_not_there_is_torchrls_error(function, stock, scalars, shape, time_dim):
    for f in (function, stock):
        with pytest.raises(RuntimeError, match="time dimension are not compatible"):
            call_with_steps(f, random_steps(shape), **scalars, time_dim=time_dim)


@every_argument("gamma", "lmbda", "rho_thresh", "c_thresh")
@pytest.mark.parametrize(("shape", "time_dim"), [((5, 20, 1), -2), ((20, 5, 3), 0)])
def test_these_may_differ_from_step_to_step(function, stock, scalars, name, shape, time_dim):
    """TorchRL's function computes them then, but for discounts."""
    options = {**scalars, name: torch.rand(shape, dtype=torch.float64), "time_dim": time_dim}
    pair = function, getattr(functional, function.__name__)
    assert_same(*(call_with_steps(f, random_steps(shape), **options) for f in pair))


@every_argument("gamma", "lmbda", "rho_thresh", "c_thresh")
def test_these_may_be_learned(function, stock, scalars, name):
    """TorchRL's function of that name computes them then; a vectorized one does not have all of the gradient."""
    found = []
    for f in (function, getattr(functional, function.__name__)):
        number = torch.tensor(0.8, dtype=torch.float64, requires_grad=True)
        first, *_ = list_results(call_with_steps(f, random_steps((5, 20, 1)), **{**scalars, name: number}))
        found.append(torch.autograd.grad(first.square().sum(), number, allow_unused=True) if first.requires_grad else 0)
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-10)


def test_a_discount_for_all_that_follows():
    """TorchRL's function computes it, in both forms of ours."""
    steps, options = random_steps((5, 20, 1)), {"lmbda": LMBDA, "rolling_gamma": False}
    options["gamma"] = torch.rand(5, 20, 1, dtype=torch.float64)
    loop = functional.td_lambda_return_estimate
    for function in (ours.td_lambda_return_estimate, ours.with_stock(loop)(ours.td_lambda_return_estimate)):
        assert_same(call_with_steps(function, steps, **options), call_with_steps(loop, steps, **options))
    with pytest.raises(RuntimeError, match="expected only with time-sensitive gamma"):
        call_with_steps(ours.td_lambda_return_estimate, steps, **{**options, "gamma": GAMMA})


@EVERY
def test_vmap(function, stock, scalars):
    """Of a call and of its gradient."""

    def compute_square(*steps):
        results = call_with_steps(function, dict(zip(names, steps, strict=True)), **scalars)
        return sum(x.square().sum() for x in list_results(results))

    names, batch = zip(*random_steps((3, 5, 20, 1)).items(), strict=True)
    for call in (compute_square, torch.func.grad(compute_square, argnums=names.index("next_state_value"))):
        torch.testing.assert_close(torch.vmap(call)(*batch), torch.stack([call(*x) for x in zip(*batch, strict=True)]))


@EVERY
@pytest.mark.parametrize(
    ("name", "given", "error", "message"),
    [
        ("gamma", -1.0, ValueError, "gamma: got -1.0"),
        ("gamma", "high", TypeError, "gamma: got str"),
        ("gamma", torch.rand(7), RuntimeError, "expanded size"),
        ("next_state_value", torch.ones(5, 20, 1, dtype=torch.int64), TypeError, "next_values: got dtype torch.int64"),
        ("done", torch.ones(5, 20, 1, dtype=torch.complex64), TypeError, "truncated: got dtype torch.complex64"),
    ],
)
def test_other_mistakes_name_the_argument(function, stock, scalars, name, given, error, message):
    with pytest.raises(error, match=message):
        call_with_steps(function, {**random_steps((5, 20, 1)), **scalars, name: given})


def critic(seed=0, outputs=1):
    torch.manual_seed(seed)
    return TensorDictModule(nn.Linear(4, outputs), in_keys=["observation"], out_keys=["state_value"])


def actor(seed=0):
    torch.manual_seed(seed)
    return ProbabilisticActor(
        TensorDictModule(nn.Linear(4, 2), in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        distribution_class=OneHotCategorical,
        return_log_prob=True,
    )


def random_rollout(*batch, seed=0):
    steps = {name: x.unsqueeze(-1) for name, x in random_steps(batch, torch.float32, seed).items()}
    generator = torch.Generator().manual_seed(seed)
    observation, following = torch.randn((2, *batch, 4), generator=generator)
    following = {"observation": following, **{name: steps[name] for name in ("reward", "done", "terminated")}}
    following["truncated"] = following["done"] & ~following["terminated"]
    rollout = {
        "observation": observation,
        "action": torch.eye(2)[torch.randint(2, batch, generator=generator)],
        "action_log_prob": -torch.rand(batch, generator=generator),
        "next": following,
    }
    return TensorDict(rollout, batch)


MODULES = [
    (TritonGAE, GAE, {"gamma": 0.99, "lmbda": 0.95}),
    (TritonTDLambdaEstimator, TDLambdaEstimator, {"gamma": 0.99, "lmbda": 0.95}),
    (TritonVTrace, VTrace, {"gamma": 0.99, "rho_thresh": 1.2, "c_thresh": 0.8}),
]
EVERY_MODULE = pytest.mark.parametrize(("module", "stock", "scalars"), MODULES, ids=["gae", "td-lambda", "vtrace"])


def make_module(module, scalars, **kwargs):
    kwargs = {"value_network": critic(), **scalars, **kwargs}
    return module(actor_network=actor(), **kwargs) if issubclass(module, VTrace) else module(**kwargs)


def assert_same_estimates(module, stock, rollout, **kwargs):
    got, want = module(rollout.clone(), **kwargs), stock(rollout.clone(), **kwargs)
    assert set(got.keys(True)) == set(want.keys(True))
    for key in ("advantage", "value_target", "state_value"):
        assert_same(got[key], want[key])


OPTIONS = [
    *((batch, {}) for batch in ((20,), (5, 20), (2, 3, 20))),
    ((20, 5), {"time_dim": 0}),
    ((2, 20, 3), {"time_dim": -2}),
    *(((5, 20), {name: True}) for name in ("differentiable", "average_gae", "average_rewards", "average_adv")),
    *(((5, 20), x) for x in ({"vectorized": True}, {"vectorized": False}, {"auto_reset_env": True})),
    *(((5, 20), x) for x in ({"shifted": True, "shifted_budget": 3}, {"num_chunks": 2})),
]
EVERY_OPTION = [
    (*row, *option) for row in MODULES for option in OPTIONS if all(has_parameter(row[1], name) for name in option[1])
]


@pytest.mark.parametrize(("module", "stock", "scalars", "batch", "kwargs"), EVERY_OPTION)
def test_batches_and_options_of_modules(module, stock, scalars, batch, kwargs):
    assert_same_estimates(*(make_module(x, scalars, **kwargs) for x in (module, stock)), random_rollout(*batch))


@pytest.mark.parametrize(("module", "stock", "scalars"), MODULES[:2], ids=["gae", "td-lambda"])
@pytest.mark.parametrize("vectorized", [None, True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.float16])
def test_dtypes_of_estimates_are_those_of_torchrl(module, stock, scalars, vectorized, dtype):
    """The loops of TorchRL, which run unless a program says otherwise, keep the values' dtype."""
    rollout = random_rollout(5, 20)
    rollout["next", "reward"] = rollout["next", "reward"].to(dtype)
    assert_same_estimates(*(make_module(x, scalars, vectorized=vectorized) for x in (module, stock)), rollout)


@EVERY_MODULE
def test_steps_to_the_next_observation_make_a_discount_per_step(module, stock, scalars):
    rollout = random_rollout(5, 20)
    rollout["steps_to_next_obs"] = torch.randint(1, 4, (5, 20, 1))
    assert_same_estimates(make_module(module, scalars), make_module(stock, scalars), rollout)


@EVERY_MODULE
@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
def test_a_time_dimension_by_name_and_tensors_for_numbers(module, stock, scalars):
    scalars = {name: torch.tensor(x) for name, x in scalars.items()}
    rollout = random_rollout(20, 5)
    rollout.names = ["time", None]
    assert_same_estimates(make_module(module, scalars), make_module(stock, scalars), rollout)


@pytest.mark.parametrize(("module", "stock", "scalars"), MODULES[:2], ids=["gae", "td-lambda"])
def test_value_estimate(module, stock, scalars):
    rollout = random_rollout(5, 20)
    got, want = (make_module(x, scalars).value_estimate(rollout.clone()) for x in (module, stock))
    assert_same(got, want)


@EVERY_MODULE
def test_the_core_computes(module, stock, scalars, monkeypatch):
    class CalledError(Exception):
        pass

    def stub(*args, **kwargs):
        raise CalledError

    for name in ("compute_gae", "compute_lambda_returns", "compute_vtrace"):
        monkeypatch.setattr(ours, name, stub)
    make_module(stock, scalars)(random_rollout(5, 20))
    for kwargs in ({},) if module is TritonVTrace else ({"vectorized": True}, {"vectorized": False}):
        estimator = make_module(module, scalars, **kwargs)
        with pytest.raises(CalledError):
            estimator(random_rollout(5, 20))
        if module is not TritonVTrace:
            with pytest.raises(CalledError):
                estimator.value_estimate(random_rollout(5, 20))


@EVERY_MODULE
@pytest.mark.parametrize("replace", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_and_pickles(module, stock, scalars, replace):
    replaced = replace(make_module(module, scalars))
    assert type(replaced) is module
    assert_same_estimates(replaced, make_module(stock, scalars), random_rollout(5, 20))


@pytest.mark.parametrize(("module", "stock", "name"), [
    (TritonGAE, GAE, "forward"),
    (TritonGAE, GAE, "value_estimate"),
    (TritonTDLambdaEstimator, TDLambdaEstimator, "value_estimate"),
    (TritonVTrace, VTrace, "forward"),
])  # fmt: skip
def test_a_method_behind_ours_is_refused(module, stock, name):
    """Which a copied method would not call; in front of ours it is called."""
    own = derive(stock, name)
    with pytest.raises(
        TypeError, match=f"Ours: {stock.__name__} has its own {name} .*, and got {module.__name__} in front"
    ):
        type("Ours", (module, own), {})
    assert getattr(type("Ours", (own, module), {}), name) is getattr(own, name)


@EVERY_MODULE
def test_methods_of_users(module, stock, scalars):
    """Each of those that an estimate calls, which is TorchRL's code."""
    for name in ("_call_value_nets", "_get_time_dim", "_next_value", "_normalize_advantage", "_prepare_signals"):
        if hasattr(stock, name):
            assert_same_estimates(
                *(make_module(derive(x, name), scalars) for x in (module, stock)), random_rollout(5, 20)
            )


def test_agents_that_share_a_reward():
    class TritonMultiAgentGAE(TritonGAE, MultiAgentGAE):
        pass

    network = TensorDictSequential(
        critic(outputs=3), TensorDictModule(lambda x: x.unsqueeze(-1), ["state_value"], ["state_value"])
    )
    scalars = {"gamma": 0.99, "lmbda": 0.95, "value_network": network, "average_gae": True}
    assert_same_estimates(TritonMultiAgentGAE(**scalars), MultiAgentGAE(**scalars), random_rollout(5, 20))


@pytest.mark.parametrize(("module", "stock", "scalars"), MODULES[::2], ids=["gae", "vtrace"])
@pytest.mark.parametrize("differentiable", [False, True])
def test_graph_breaks_of_torch_compile(module, stock, scalars, differentiable):
    """No more than TorchRL's own has, with a batch that is larger and one whose numbers are others."""
    rollout, breaks = random_rollout(4, 20), []
    for cls in (stock, module):
        torch._dynamo.reset()
        estimator = make_module(cls, {**scalars, "differentiable": differentiable})
        breaks.append(torch._dynamo.explain(estimator)(rollout.clone()).graph_break_count)
    assert breaks[1] <= breaks[0]
    torch._dynamo.reset()
    compiled = torch.compile(estimator, backend="eager")
    for gamma in (GAMMA, 0.5):
        estimator.gamma.fill_(gamma)
        want = estimator(rollout.clone())
        torch.testing.assert_close(compiled(rollout.clone())["value_target"], want["value_target"])


def test_a_copied_method_inside_torch_compile():
    estimator, rollout = make_module(TritonTDLambdaEstimator, MODULES[1][2]), random_rollout(5, 20)
    compiled = torch.compile(estimator.value_estimate, backend="eager")
    next_value = torch.randn(5, 20, 1)
    assert_same(compiled(rollout, next_value=next_value), estimator.value_estimate(rollout, next_value=next_value))


def test_a_method_that_calls_another_function_is_refused():
    with pytest.raises(ImportError, match="TDLambdaEstimator.value_estimate calls no vtrace_advantage_estimate"):
        ours.replace_call(ours.vtrace_advantage_estimate, TDLambdaEstimator.value_estimate)


def by_class(loss, module, scalars):
    loss.make_value_estimator(module, value_network=loss.critic_network, differentiable=True, **scalars)


def by_instance(loss, module, scalars):
    loss.make_value_estimator(module.for_loss(loss, differentiable=True, **scalars))


@pytest.fixture(scope="module")
def rollout():
    """Some episodes terminated and others ran out of time."""
    pytest.importorskip("gymnasium")
    from torchrl.envs import GymEnv

    env = GymEnv("CartPole-v1", max_episode_steps=16)
    env.set_seed(0)
    torch.manual_seed(0)
    with set_exploration_type(ExplorationType.RANDOM):
        rollout = env.rollout(100, actor(), break_when_any_done=False).detach()
    terminated = rollout["next", "terminated"]
    assert terminated.any() and (rollout["next", "done"] & ~terminated).any()
    return rollout


def losses_and_gradients(loss, rollout):
    losses = {name: x for name, x in loss(rollout.clone()).items() if name.startswith("loss_")}
    sum(losses.values()).backward()
    return losses, {name: x.grad for name, x in loss.named_parameters() if x.grad is not None}


def assert_same_losses(loss_class, choose, choose_stock, module, rollout):
    """The same networks, a loss whose estimator was chosen in each of two ways, the same results."""
    got, want = (loss_class(actor(seed=1), critic(seed=1)) for _ in range(2))
    choose(got)
    choose_stock(want)
    assert type(got.value_estimator) is module and type(want.value_estimator) is module.__base__
    for ours_, theirs in zip(*(losses_and_gradients(loss, rollout) for loss in (got, want)), strict=True):
        assert ours_.keys() == theirs.keys() and theirs
        for name, x in theirs.items():
            assert_same(ours_[name], x)


VALUE_TYPES = {
    TritonGAE: ValueEstimators.GAE,
    TritonTDLambdaEstimator: ValueEstimators.TDLambda,
    TritonVTrace: ValueEstimators.VTrace,
}


@pytest.mark.parametrize(
    ("module", "choose"),
    [
        *((x, choose) for x in (TritonGAE, TritonTDLambdaEstimator) for choose in (by_class, by_instance)),
        (TritonVTrace, by_instance),
    ],
)
@pytest.mark.parametrize("loss_class", [ClipPPOLoss, A2CLoss])
def test_losses_of_a_real_rollout(loss_class, module, choose, rollout):
    scalars = {"gamma": 0.97} if module is TritonVTrace else {"gamma": 0.97, "lmbda": 0.9}

    def stock(loss):
        loss.make_value_estimator(VALUE_TYPES[module], **scalars)

    assert_same_losses(loss_class, lambda loss: choose(loss, module, scalars), stock, module, rollout)


@pytest.mark.parametrize("module", VALUE_TYPES)
def test_for_every_loss_and_back(module, rollout):
    def switched(enabled):
        def choose(loss):
            use_triton_estimators(enabled)
            loss.make_value_estimator(VALUE_TYPES[module], gamma=0.97)

        return choose

    try:
        assert_same_losses(ClipPPOLoss, switched(True), switched(False), module, rollout)
        use_triton_estimators()
        assert type(ClipPPOLoss(actor(), critic()).value_estimator) is TritonGAE
    finally:
        use_triton_estimators(False)
    assert type(ClipPPOLoss(actor(), critic()).value_estimator) is GAE


@pytest.mark.filterwarnings("ignore:This module is instantiated on a machine without CUDA:UserWarning")
@pytest.mark.filterwarnings("ignore:Tensordict is registered in PyTree:UserWarning")
def test_the_page_in_the_docs_runs():
    page = Path(__file__).parents[2] / "docs" / "torchrl.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    rollout = random_rollout(20)
    minibatch = GAE(gamma=GAMMA, lmbda=LMBDA, value_network=critic())(rollout).exclude("next")
    loss = ClipPPOLoss(actor(), critic())
    names = {"loss": loss, "actor": actor(), "critic": critic(), "minibatch": minibatch}
    try:
        exec(compile("\n".join(blocks), page, "exec"), names)
    finally:
        use_triton_estimators(False)
    assert blocks and type(loss.value_estimator) is TritonGAE
    assert torch.isfinite(names["losses"]["loss_objective"])


@pytest.mark.parametrize("head", ["categorical", "gaussian"])
def test_a_compiled_update_is_that_of_torchrls_loss(head):
    """With actors and rollouts as the page has them."""
    policy, value = make_perceptron(2), make_perceptron(1)
    discrete = TensorDictModule(policy, ["observation"], ["logits"]), ["logits"], OneHotCategorical
    scaled = TensorDictModule(nn.Sequential(policy, NormalParamExtractor("exp")), ["observation"], ["loc", "scale"])
    module, keys, kind = discrete if head == "categorical" else (scaled, ["loc", "scale"], IndependentNormal)
    acting = ProbabilisticActor(module, in_keys=keys, distribution_class=kind, return_log_prob=True)
    samples = {name: torch.randn(96, 1) for name in ("advantage", "value_target")}
    with set_exploration_type(ExplorationType.RANDOM):
        samples = acting(TensorDict({"observation": torch.randn(96, 4), **samples}, [96])).detach()
    samples["action_log_prob"] += 0.3 * torch.randn(96)
    trained, order = copy.deepcopy([policy, value]), torch.randperm(96)
    compiled = CompiledUpdate(*trained, torch.optim.Adam(nn.ModuleList(trained).parameters(), lr=1e-2), head=head)
    columns = [samples[name].reshape(-1) for name in ("advantage", "value_target", "action_log_prob")]
    actions = samples["action"].argmax(-1, keepdim=True) if head == "categorical" else samples["action"]
    options = {"clip": 0.2, "value_coef": 1.0, "entropy_coef": 0.01, "max_grad_norm": 1.0}
    compiled.run(Rollout(samples["observation"], actions, *columns), [order], 32, **options)
    loss = ClipPPOLoss(acting, ValueOperator(value, in_keys=["observation"]), loss_critic_type="l2")
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-2)
    for chosen in order.split(32):
        optimizer.zero_grad()
        sum(x for name, x in loss(samples[chosen]).items() if name.startswith("loss_")).backward()
        nn.utils.clip_grad_norm_(loss.parameters(), 1.0)
        optimizer.step()
    torch.testing.assert_close([*nn.ModuleList(trained).parameters()], [*loss.parameters()], rtol=1e-4, atol=1e-5)


def make_perceptron(outputs):
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, outputs))
