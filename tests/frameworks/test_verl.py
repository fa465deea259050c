"""The adapter against the functions of the installed verl: their numbers at valid tokens, gradients and metrics."""

import importlib
import inspect
import os
import subprocess
import sys
from importlib.metadata import entry_points
from typing import Optional

import pytest
import torch
from test_recipes import extract, find_source

verl = pytest.importorskip("verl")

from transformers import Qwen2Config, Qwen2ForCausalLM  # noqa: E402
from verl.models.transformers.monkey_patch import patch_forward_with_backends  # noqa: E402
from verl.protocol import DataProto  # noqa: E402
from verl.trainer.config import AlgoConfig  # noqa: E402
from verl.trainer.ppo import core_algos  # noqa: E402
from verl.utils import torch_functional  # noqa: E402
from verl.workers.config import ActorConfig  # noqa: E402

from rl_triton_adapters import verl as adapter  # noqa: E402

STOCK_GAE = core_algos.compute_gae_advantage_return
STOCK_LOSS = core_algos.compute_policy_loss_vanilla
VERSION = tuple(map(int, verl.__version__.split(".")[:3]))
OLD = VERSION < (0, 9)
ATTRIBUTES = {name: function.__name__ for name, function in adapter.ESTIMATORS.items()}
STOCK_TOKENS = {name: getattr(torch_functional, name) for name in adapter.TOKENS}
LOSSES = {name: x for name, x in adapter.LOSSES.items() if name in core_algos.POLICY_LOSS_REGISTRY}
STOCK_LOSSES = {name: core_algos.POLICY_LOSS_REGISTRY[name] for name in LOSSES}
if VERSION < (0, 9, 1):  # a GSPO that reads no `loss_agg_mode`
    del LOSSES["gspo"]
MODULES = core_algos, torch_functional, *(adapter._find_module(name) for name in adapter.LINEAR)
BATCH, LENGTH = 6, 40


def make_mask(kind, generator):
    """int64, as verl's are: prefixes of several lengths, or valid tokens anywhere, with one response of none."""
    if kind == "prefix":
        return (torch.arange(LENGTH) < torch.tensor([40, 1, 17, 40, 39, 5])[:, None]).long()
    mask = torch.randint(0, 2, (BATCH, LENGTH), generator=generator)
    mask[2] = 0
    return mask


def make_rollout(kind="holes", scale=1.0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(len(kind))
    rewards, values = torch.randn(2, BATCH, LENGTH, generator=generator, dtype=torch.float64).mul(scale).to(dtype)
    return rewards, values, make_mask(kind, generator)


def compute_stock_gae(rewards, values, mask, gamma, lam):
    """With a mask of float64, as verl's arithmetic with counts of integers is float32."""
    return STOCK_GAE(rewards.double(), values.double(), mask.double(), gamma, lam)


def check_valid(got, expected, mask, **tolerance):
    torch.testing.assert_close(got * mask, expected * mask, **tolerance)


WHITENED = {"rtol": 1e-9, "atol": 1e-10}  # verl's mean is the sum divided by n + 1e-8


@pytest.mark.parametrize("scale", [1e-6, 1e-4, 1.0, 1e6])  # with variances on both sides of verl's 1e-8
@pytest.mark.parametrize("kind", ["prefix", "holes"])
def test_gae_is_that_of_verl(kind, scale):
    rewards, values, mask = make_rollout(kind, scale)
    advantages, returns = compute_stock_gae(rewards, values, mask, 0.97, 0.9)
    ours = adapter.compute_gae_advantage_return(rewards, values.requires_grad_(), mask, 0.97, 0.9)
    assert not any(x.requires_grad for x in ours)
    check_valid(ours[0], advantages, mask, **WHITENED)
    check_valid(ours[1], returns, mask, rtol=1e-11, atol=1e-13 * scale)


@pytest.mark.parametrize("mask_dtype", [torch.int64, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes_are_those_of_verl(dtype, mask_dtype):
    """A floating mask may be of more digits than rewards, which verl multiplies."""
    rewards, values, mask = make_rollout("prefix", dtype=dtype)
    expected = compute_stock_gae(rewards, values, mask, 1.0, 0.95)
    results = [
        compute(rewards, values, mask.to(mask_dtype), 1.0, 0.95)
        for compute in (adapter.compute_gae_advantage_return, STOCK_GAE)
    ]
    for got, stock, right in zip(*results, expected, strict=True):
        assert got.dtype == stock.dtype
        tolerance = 2**-8 if got.dtype == torch.bfloat16 else 1e-5
        check_valid(got.double(), right, mask, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
@pytest.mark.parametrize("filler", [torch.nan, torch.inf, 1e6])
def test_what_stands_in_masked_cells_is_not_read(filler, dtype):
    rewards, values, mask = make_rollout()
    expected = adapter.compute_gae_advantage_return(rewards * mask, values, mask, 0.97, 0.95)
    spoilt = [x.masked_fill(mask == 0, filler) for x in (rewards, values)]
    results = adapter.compute_gae_advantage_return(*spoilt, mask.to(dtype), 0.97, 0.95)
    for got, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)
        assert (got[mask == 0] == 0).all() and got.any()


@pytest.mark.parametrize("count", [0, 1])
def test_too_few_valid_tokens_raise_as_in_verl(count):
    rewards, values, mask = make_rollout()
    mask = torch.zeros_like(mask)
    mask[0, :count] = 1
    with pytest.raises(ValueError, match="mask"):
        STOCK_GAE(rewards, values, mask, 1.0, 0.95)
    with pytest.raises(ValueError, match=f"response_mask: got {count} valid tokens"):
        adapter.compute_gae_advantage_return(rewards, values, mask, 1.0, 0.95)


AGGREGATIONS = [x for x in adapter.AGGREGATIONS if not (OLD and x == "token-sum")]
ALONE = {"dp_size": 1, "batch_num_tokens": None, "global_batch_size": None, "loss_scale_factor": None}
OF_FOUR = {"dp_size": 4, "batch_num_tokens": 700, "global_batch_size": 24, "loss_scale_factor": 512}


def make_actor_config(info=ALONE, **options):
    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **options)
    config.global_batch_info.update(info)
    return config


def make_minibatch(dtype=torch.float64):
    """Log-ratios on both sides of every clip, and beyond ±20; masked cells that would spoil a sum."""
    generator = torch.Generator().manual_seed(1)
    old, change, advantages = torch.randn(3, BATCH, LENGTH, generator=generator, dtype=dtype).unbind()
    change[:, ::7] *= 30
    mask = make_mask("holes", generator).bool()
    old[0, ~mask[0]] = torch.inf
    return old, (old + change).detach(), advantages, mask


def compute_loss(function, minibatch, aggregation, config, weights=None):
    old, log_prob, advantages, mask = minibatch
    log_prob = log_prob.clone().requires_grad_()
    loss, metrics = function(old, log_prob, advantages, mask, aggregation, config, weights)
    loss -= 0.1 * log_prob[mask].sum()  # as verl's `ppo_loss` adds entropy: in place
    loss.backward()
    return loss.detach(), log_prob.grad * mask, metrics


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("info", [{}, ALONE, OF_FOUR], ids=["empty", "alone", "of four"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", ["triton", *LOSSES])
def test_loss_gradient_and_metrics_are_those_of_verl(name, aggregation, info, weighted):
    minibatch, is_vanilla = make_minibatch(), name == "triton"
    if name.startswith("dppo"):  # which reads probabilities
        minibatch = (*(x.clamp(max=-0.01) for x in minibatch[:2]), *minibatch[2:])
    options = {"tau_pos": 1.2, "tau_neg": 1.7} if name == "sapo" else {}
    config = make_actor_config(info, clip_ratio_low=0.1, clip_ratio_high=0.28, clip_ratio_c=2.5, **options)
    weights = torch.rand(BATCH, LENGTH, generator=torch.Generator().manual_seed(2)).double() * 2 if weighted else None
    if weighted:
        weights[:, ::5] = 0.0
    function = adapter.LOSSES[name]
    ours = compute_loss(function, minibatch, aggregation, config, weights)
    finite = [x.nan_to_num(posinf=0) for x in minibatch[:3]]
    stock = compute_loss(STOCK_LOSSES.get(name, STOCK_LOSS), (*finite, minibatch[3]), aggregation, config, weights)
    scale = 1 if is_vanilla else 10
    torch.testing.assert_close(ours[0], stock[0], rtol=scale * 1e-12, atol=0)
    torch.testing.assert_close(ours[1], stock[1], rtol=scale * 1e-12, atol=scale * 1e-14)
    assert ours[2] == pytest.approx(stock[2], rel=1e-7)
    assert ours[2].get("actor/pg_clipfrac", not is_vanilla) > 0 or name == "sapo"
    assert ours[2].get("actor/pg_clipfrac_lower", 1) > 0 or not (is_vanilla or name.startswith("dppo"))


@pytest.mark.parametrize("name", ["triton", *LOSSES])
def test_a_token_that_cannot_be_drawn_any_more(name):
    """Of log-probability −∞: gradients are verl's, and no loss is NaN, as some of verl's are."""
    old, log_prob, advantages, mask = make_minibatch()
    old, log_prob = (x.nan_to_num(posinf=-1.0).clamp(max=-0.01) for x in (old, log_prob))
    log_prob[torch.arange(BATCH), mask.int().argmax(1)] = -torch.inf
    results = []
    for function in (STOCK_LOSSES.get(name, STOCK_LOSS), adapter.LOSSES[name]):
        leaf = log_prob.clone().requires_grad_()
        loss, _ = function(old, leaf, advantages, mask.long(), "token-mean", make_actor_config())
        loss.backward()
        results.append(leaf.grad)
    torch.testing.assert_close(results[1], results[0], rtol=1e-11, atol=1e-13)
    assert not loss.isnan() or name in ("cispo", "gpg") or name.startswith("dppo")  # of both signs: +∞ less ∞


def make_logits(dtype=torch.float64):
    """Logits that are not a leaf, and that leaf."""
    generator = torch.Generator().manual_seed(3)
    leaf = torch.randn(20, 50, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    return leaf * 3, leaf, torch.randint(0, 50, (20,), generator=generator)


@pytest.mark.parametrize("name", adapter.TOKENS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_functions_of_logits_are_those_of_verl(name, dtype):
    """Where verl keeps bfloat16, the numbers are float32."""
    results = []
    for function, kind in ((adapter.TOKENS[name], dtype), (STOCK_TOKENS[name], torch.float64)):
        logits, leaf, labels = make_logits(dtype)
        logits = logits.to(kind)
        result = function(logits, labels) if "prob" in name else function(logits)
        result.square().sum().backward()
        results.append((result.detach(), leaf.grad.double()))
    (got, slope), (expected, exact_slope) = results
    assert got.dtype == torch.promote_types(dtype, torch.float32)
    exact = dtype == torch.float64 and expected.dtype == dtype
    torch.testing.assert_close(got.double(), expected.double(), rtol=1e-12 if exact else 1e-5, atol=1e-6 * (not exact))
    rtol = 1e-11 if exact else 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(slope, exact_slope, rtol=rtol, atol=rtol)


def test_the_gradient_takes_the_memory_of_logits_that_are_given_up():
    for given_up in (True, False):
        logits, _, labels = make_logits()
        before = logits.detach().clone()
        adapter.logprobs_from_logits(logits, labels, inplace_backward=given_up).sum().backward()
        assert torch.equal(logits, before) != given_up
    leaf = before.requires_grad_()
    adapter.logprobs_from_logits(leaf, labels).sum().backward()  # as verl's function takes it
    assert leaf.grad is not None


def make_model(dtype):
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config = Qwen2Config(**sizes, num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True)
    return Qwen2ForCausalLM(config).to(dtype)


@pytest.mark.parametrize("ours", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_with_fused_kernels_is_that_of_verl(ours, dtype, monkeypatch):
    """Its own backend "triton" asks for a GPU."""
    tokens, results, calls = torch.randint(50, (3, 20), generator=torch.Generator().manual_seed(0)), [], []
    linear = adapter.linear_token_log_probs
    monkeypatch.setattr(
        adapter, "linear_token_log_probs", lambda *args, **options: calls.append(1) or linear(*args, **options)
    )
    for backend in ("torch", ours):
        model = make_model(dtype)
        kept = type(model).forward
        patch_forward_with_backends(model, use_fused_kernels=True, fused_kernels_backend=backend)
        try:
            found = model(input_ids=tokens, temperature=0.7, return_dict=True)
        finally:
            type(model).forward = kept
        log_probs, entropy = found.log_probs.view(3, 20), found.entropy.view(3, 20)
        (log_probs.square().sum() + entropy.float().sum()).backward()
        assert log_probs.dtype == torch.float32 or not calls  # verl's own before 0.8
        results.append([log_probs.float().detach(), entropy.float().detach(), *(x.grad for x in model.parameters())])
        adapter.install()
    adapter.uninstall()
    assert len(calls) == 1
    rtol = 0.03 if dtype == torch.bfloat16 else 1e-5
    for got, want in zip(*reversed(results), strict=True):
        torch.testing.assert_close(got, want, rtol=rtol, atol=rtol * want.abs().max().item())


@pytest.mark.parametrize("name", adapter.LINEAR)
def test_what_hidden_states_are_asked_for_besides_is_verls(name, monkeypatch):
    """Temperatures of tokens, reductions and groups of several ranks."""
    asked, kind = [], type("Stock", (), {"apply": lambda *given: asked.append(given)})
    stock = kind if name == "FusedLinearForPPOFunction" else kind.apply
    monkeypatch.setattr(adapter._find_module(name), name, stock)
    monkeypatch.setattr(adapter, "_compare", lambda *_: "")
    adapter.install()
    place = getattr(adapter._find_module(name), name)
    call, group = getattr(place, "apply", place), type("Group", (), {"size": lambda self: 2})()
    given = torch.randn(5, 4), torch.randn(7, 4), torch.tensor([0, 6, 2, 3, 1])
    for more in [(torch.ones(5),), *([] if hasattr(place, "apply") else [(1.0, "mean"), (1.0, "none", group)])]:
        asked.clear()
        call(*given, *more)
        assert asked[0][: len(given) + len(more)] == (*given, *more)
    call(*given, 1.0)
    assert len(asked) == 1
    adapter.uninstall()
    assert getattr(adapter._find_module(name), name) is stock


def make_dispatcher():
    names = {"core_algos": core_algos, "DataProto": DataProto, "AlgoConfig": AlgoConfig, "Optional": Optional}
    names["AdvantageEstimator"] = core_algos.AdvantageEstimator
    source = find_source("verl", "trainer/ppo/ray_trainer.py")  # whose other imports are not wanted here
    return extract(source, ["compute_advantage"], names).compute_advantage


@pytest.mark.parametrize("estimator", ATTRIBUTES)
def test_verl_computes_advantages_with_ours(estimator, monkeypatch):
    rewards, values, mask = make_rollout("prefix", dtype=torch.float32)
    rewards *= mask
    compute_advantage, results = make_dispatcher(), []
    for ours in (False, True):
        if ours:
            adapter.install()
            monkeypatch.setattr(core_algos.verl_F, "masked_whiten", None)  # which verl's own functions call
        data = DataProto.from_dict({"token_level_rewards": rewards, "values": values, "response_mask": mask})
        config = AlgoConfig(gamma=0.97, adv_estimator=estimator)
        results.append(compute_advantage(data, estimator, gamma=0.97, lam=0.9, config=config).batch)
    adapter.uninstall()
    for name in ("advantages", "returns"):
        check_valid(results[1][name], results[0][name], mask, rtol=1e-5, atol=1e-5)


def test_installing_replaces_and_uninstalling_restores():
    stock = read_places()
    adapter.uninstall()
    for backend in ("reference", None, None):
        adapter.install(backend=backend)
    for name, attribute in ATTRIBUTES.items():
        assert getattr(core_algos, attribute) is adapter.ESTIMATORS[name] is core_algos.get_adv_estimator_fn(name)
    assert core_algos.get_policy_loss_fn("triton") is adapter.LOSSES["triton"]
    for name, function in LOSSES.items():
        assert core_algos.get_policy_loss_fn(name) is function is getattr(core_algos, function.__name__)
    for name, function in adapter.TOKENS.items():
        assert getattr(torch_functional, name) is function
    adapter.uninstall()
    adapter.uninstall()
    assert read_places() == stock


def test_an_interrupted_install_replaces_nothing(monkeypatch):
    stock, put, left = read_places(), adapter._replace, iter(range(1, 5))
    monkeypatch.setattr(adapter, "_replace", lambda *given: next(left) and put(*given))
    with pytest.raises(StopIteration):
        adapter.install()
    assert read_places() == stock


def read_places():
    registries = core_algos.ADV_ESTIMATOR_REGISTRY, core_algos.POLICY_LOSS_REGISTRY
    return [{name: x for name, x in places.items() if callable(x)} for places in (*map(vars, MODULES), *registries)]


def test_what_others_put_in_place_after_us_stays(monkeypatch):
    monkeypatch.setattr(core_algos, "compute_gae_advantage_return", STOCK_GAE)
    adapter.install()
    core_algos.compute_gae_advantage_return = max
    adapter.uninstall()
    assert core_algos.compute_gae_advantage_return is max


def test_the_backend_asked_for_computes(caplog):
    rewards, values, mask = make_rollout()
    with pytest.raises(ValueError, match="backend: got 'tritonn'"):
        adapter.install(backend="tritonn")
    adapter.install(backend="reference")
    try:
        assert "backend reference" in caplog.text
        assert core_algos.compute_gae_advantage_return.keywords == {"backend": "reference"}
        assert core_algos.get_policy_loss_fn("triton").keywords == {"backend": "reference"}
        got, _ = core_algos.compute_gae_advantage_return(rewards, values, mask, gamma=0.97, lam=0.9)
        check_valid(got, compute_stock_gae(rewards, values, mask, 0.97, 0.9)[0], mask, **WHITENED)
    finally:
        adapter.uninstall()


def test_a_policy_loss_of_the_same_name_is_not_overwritten(monkeypatch):
    monkeypatch.setitem(core_algos.POLICY_LOSS_REGISTRY, "triton", max)
    with pytest.raises(ValueError, match="another policy loss of the name 'triton'"):
        adapter.install()
    assert core_algos.compute_gae_advantage_return is STOCK_GAE


def change_numbers(monkeypatch, *names):
    """Pretend a version of verl whose functions of these names have other results."""
    for name in names:
        stock = getattr(adapter._find_module(name), name)

        def changed(*args, stock=stock, **kwargs):
            result = stock(*args, **kwargs)
            return (1.001 * result[0], result[1]) if isinstance(result, tuple) else 1.001 * result

        changed.__signature__ = inspect.signature(stock)
        monkeypatch.setattr(adapter._find_module(name), name, changed)


VANILLA = "compute_policy_loss_vanilla"
FUNCTIONS = [*ATTRIBUTES.values(), *(x.__name__ for x in LOSSES.values()), *adapter.TOKENS, VANILLA]


def read_functions():
    return {name: getattr(adapter._find_module(name), name) for name in FUNCTIONS[:-1]}


@pytest.mark.parametrize("name", [*FUNCTIONS[:2], LOSSES["gpg"].__name__, VANILLA])
def test_a_function_with_other_numbers_is_left_out(name, monkeypatch, caplog):
    """And the others are replaced."""
    change_numbers(monkeypatch, name)
    stock = read_functions()
    adapter.install()
    replaced = [name for name, x in read_functions().items() if x is not stock[name]]
    has_loss = "triton" in core_algos.POLICY_LOSS_REGISTRY
    adapter.uninstall()
    assert replaced == [x for x in stock if x != name] and has_loss == (name != VANILLA)
    assert read_functions() == stock and "triton" not in core_algos.POLICY_LOSS_REGISTRY
    assert f".{name} has other results than ours; verl's own stays" in caplog.text


def test_a_function_that_takes_other_arguments_is_left_out(monkeypatch, caplog):
    monkeypatch.setattr(core_algos, "compute_gae_advantage_return", core_algos.compute_grpo_outcome_advantage)
    adapter.install()
    kept = core_algos.compute_gae_advantage_return
    adapter.uninstall()
    assert kept is core_algos.compute_grpo_outcome_advantage
    assert "core_algos.compute_gae_advantage_return takes" in caplog.text


def test_a_version_in_which_all_differ_is_refused(monkeypatch):
    change_numbers(monkeypatch, *(x for x in FUNCTIONS if x not in adapter.TOKENS))
    for name in adapter.PLACES:
        monkeypatch.setattr(adapter._find_module(name), name, lambda other: other)
    with pytest.raises(RuntimeError, match="core_algos.compute_gae_advantage_return has other results"):
        adapter.install()


@pytest.mark.parametrize(
    ("info", "aggregation", "message"),
    [
        ({}, "mean", "loss_agg_mode: got 'mean', expected one of token-mean"),
        ({"dp_size": 2}, "token-mean", "batch_num_tokens: got None with dp_size=2"),
        ({"dp_size": 2}, "seq-mean-token-mean", "global_batch_size: got None with dp_size=2"),
    ],
)
def test_a_bad_configuration_is_named(info, aggregation, message):
    config = make_actor_config(info)
    with pytest.raises(ValueError, match=message):
        adapter.LOSSES["triton"](*torch.zeros(3, 2, 3), torch.ones(2, 3), aggregation, config)


def test_switched_off_in_the_environment_it_is_stock(switched_off, caplog):
    """A policy loss that the command line asks for is verl's."""
    before = {**core_algos.ADV_ESTIMATOR_REGISTRY}
    adapter.install()
    try:
        assert before == core_algos.ADV_ESTIMATOR_REGISTRY
        assert core_algos.get_policy_loss_fn("triton") is core_algos.get_policy_loss_fn("vanilla")
        assert caplog.records[-1].message.endswith("computes with its own functions: RL_TRITON=0 in the environment")
    finally:
        adapter.uninstall()
    assert "triton" not in core_algos.POLICY_LOSS_REGISTRY
    assert core_algos.get_policy_loss_fn("vanilla") is core_algos.compute_policy_loss_vanilla


REPORT = """
import verl
from verl.trainer.ppo import core_algos
from verl.utils.torch_functional import logprobs_from_logits
print(core_algos.compute_gae_advantage_return.__module__, "triton" in core_algos.POLICY_LOSS_REGISTRY)
print(logprobs_from_logits.__module__)
"""


VARIABLES = [{"VERL_USE_EXTERNAL_MODULES": "rl_triton_adapters.verl"}, *[{"RL_TRITON": "1"}] * (not OLD)]
"""Before 0.9, verl has no plugins."""


def test_either_variable_loads_it_in_a_process():
    assert "rl_triton" in {entry.name for entry in entry_points(group="verl.plugins")}, "install this package first"
    about = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [sys.executable, "-c", REPORT]
    processes = [subprocess.Popen(command, env={**os.environ, **variables}, **about) for variables in VARIABLES]
    for process in processes:
        output, log = process.communicate(timeout=600)
        assert output.split() == ["rl_triton_adapters.verl", "True", "rl_triton_adapters.verl"], log
        assert f"{', '.join(ATTRIBUTES)} advantages and log-probabilities from logits and hidden states with rl_" in log


@pytest.mark.parametrize(
    ("modules", "flag", "requested"),
    [
        ("", "", False), ("", "1", True), ("other,rl_triton_adapters.verl", "", True),
        ("rl_triton_adapters.verl", "0", True), ("rl_triton_adapters.verl_other", "", False),
    ],
)  # fmt: skip
def test_what_the_environment_asks_for(modules, flag, requested, monkeypatch):
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", modules)
    monkeypatch.setenv("RL_TRITON", flag)
    monkeypatch.delitem(sys.modules, adapter.__name__)
    monkeypatch.setattr(adapter.__name__, adapter)  # is put back, as the module is
    imported = importlib.import_module(adapter.__name__)
    is_installed = bool(imported._replaced)
    imported.uninstall()
    assert is_installed == requested


@pytest.fixture
def plugin(monkeypatch):
    """What verl imports in each process, in one that has not imported the adapter."""
    monkeypatch.delenv("VERL_USE_EXTERNAL_MODULES", raising=False)
    monkeypatch.delitem(sys.modules, "rl_triton_adapters.verl")
    monkeypatch.delitem(sys.modules, "rl_triton_adapters.verl_plugin", raising=False)
    return lambda: importlib.import_module("rl_triton_adapters.verl_plugin")


@pytest.mark.parametrize("flag", [None, ""])
def test_without_its_flag_the_plugin_imports_nothing(flag, plugin, monkeypatch):
    monkeypatch.delenv("RL_TRITON", raising=False)
    if flag is not None:
        monkeypatch.setenv("RL_TRITON", flag)
    plugin()
    assert "rl_triton_adapters.verl" not in sys.modules


def test_a_plugin_that_fails_says_so(plugin, monkeypatch, caplog):
    monkeypatch.setenv("RL_TRITON", "yes")
    with pytest.raises(ValueError, match="RL_TRITON: got 'yes', expected 0 or 1"):
        plugin()
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "verl computes with its own functions: RL_TRITON" in record.message
