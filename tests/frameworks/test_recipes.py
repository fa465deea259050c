"""The blocks of docs/recipes.md, and for older versions of RSL-RL, against the frameworks' source, as it is installed.

None of the four can be imported whole without much that a test does not need. What the blocks touch is taken from the
installed files; RLinf's registry is imported.
"""

import ast
import enum
import math
import re
import sys
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial, wraps
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Optional, Union

import cloudpickle
import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


def read_block(section, page="recipes.md"):
    """The Python code of a section of a page."""
    text = (ROOT / "docs" / page).read_text()
    (block,) = re.findall(rf"^## {section}\n.*?```python\n(.*?)```", text, re.DOTALL | re.MULTILINE)
    assert block.count("```") == 0
    return block


def run_block(section, page="recipes.md"):
    names = {"__name__": "__main__"}  # as in a script of the user's
    exec(compile(read_block(section, page), f"docs/{page}, {section}", "exec"), names)
    return names


def find_source(package, path):
    """A file of an installed package, which is not imported."""
    spec = find_spec(package)
    if spec is None:
        pytest.skip(f"{package} is not installed")
    return Path(spec.submodule_search_locations[0]) / path


def extract(source, wanted, names, methods=None):
    """A module with some of the definitions of a file, and with `names` in the place of its imports.

    Of a class that is the only one wanted, methods perhaps.
    """
    tree = ast.parse(source.read_text())
    tree.body = [x for x in tree.body if isinstance(x, ast.ClassDef | ast.FunctionDef) and x.name in wanted]
    assert {x.name for x in tree.body} == set(wanted)
    if methods is not None:
        (whole,) = tree.body
        whole.bases, whole.body = [], [x for x in whole.body if getattr(x, "name", None) in methods]
        assert {x.name for x in whole.body} == set(methods)
    module = ModuleType(source.stem)
    vars(module).update(names)
    exec(compile(tree, str(source), "exec"), vars(module))
    return module


def put_in_place(module, name, monkeypatch):
    """Let `from name import ...` find this module."""
    parts = name.split(".")
    for i in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:i]), ModuleType(parts[i - 1]))
    monkeypatch.setitem(sys.modules, name, module)


def make_rollout(shape, scale=1.0):
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, *shape, generator=generator, dtype=torch.float64) * scale
    return rewards, values, torch.randint(0, 2, shape, generator=generator)


TRL_METHODS = (
    "_compute_loss",
    "_get_per_token_logps_and_entropies",
    "get_gamma_weights",
    "get_high_entropy_mask",
    "get_off_policy_mask",
)


class TinyModel(torch.nn.Module):
    """Gives what TRL's fused last layer does: log-probabilities and entropies of the next tokens."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(11, 6), torch.nn.Linear(6, 11)

    def forward(self, input_ids, attention_mask, labels, fused_lm_head):
        log_probs = self.head(self.embedding(input_ids).cumsum(1)).log_softmax(-1)
        own = log_probs.gather(-1, input_ids.roll(-1, 1)[..., None])[..., 0]
        return SimpleNamespace(log_probs=own, entropy=-(log_probs.exp() * log_probs).sum(-1))


@pytest.fixture
def trl(monkeypatch):
    """The class, with the methods that compute its loss."""
    source = find_source("trl", "trainer/grpo_trainer.py")
    utilities = extract(source.with_name("utils.py"), ["nanmin", "nanmax"], {"torch": torch})
    names = {"torch": torch, "math": math, "profiling_decorator": lambda x: x, "PreTrainedModel": object, "Any": object}
    names |= {"nanmin": utilities.nanmin, "nanmax": utilities.nanmax}
    module = extract(source, ["GRPOTrainer"], names, TRL_METHODS)
    put_in_place(module, "trl", monkeypatch)
    return module.GRPOTrainer


def make_trainer(kind, training, options):
    """A trainer of a class, without what its loss does not read."""
    trainer = object.__new__(kind)
    args = SimpleNamespace(
        delta=None, use_bias_correction_kl=False, sapo_temperature_pos=1.125, sapo_temperature_neg=1.25,
        steps_per_generation=6, vespo_k_pos=2.0, vespo_lambda_pos=3.0, vespo_k_neg=3.0, vespo_lambda_neg=2.0,
    )  # fmt: skip
    accelerator = SimpleNamespace(
        num_processes=2, gather=lambda x: x, gather_for_metrics=lambda x: x, reduce=lambda x, reduction: x,
        pad_across_processes=lambda x, **_: x, autocast=nullcontext,
    )  # fmt: skip
    torch.manual_seed(0)
    model = TinyModel().double().train(training)
    vars(trainer).update(
        args=args, accelerator=accelerator, model=model, loss_type="grpo", importance_sampling_level="token", beta=0.0,
        epsilon_low=0.1, epsilon_high=0.3, top_entropy_quantile=1.0, off_policy_mask_threshold=None, use_vllm=False,
        vllm_importance_sampling_correction=True, aux_loss_enabled=False, _entropy_bonus_enabled=False,
        max_completion_length=9, current_gradient_accumulation_steps=3,
        _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
    )  # fmt: skip
    for name, value in options.items():
        setattr(args if hasattr(args, name) else trainer, name, value)
    return trainer


def compute_trl_loss(kind, training, options):
    """The loss and the gradients of the model's parameters. Advantages may have another number per response."""
    columns, options = options.get("columns"), {name: x for name, x in options.items() if name != "columns"}
    trainer, generator = make_trainer(kind, training, options), torch.Generator().manual_seed(1)
    ids = torch.randint(0, 11, (5, 11), generator=generator)
    mask = (torch.arange(7) < torch.tensor([7, 3, 1, 5, 7])[:, None]).long()
    with torch.no_grad():
        own = trainer.model(ids, None, None, True).log_probs[:, -7:]
    old, ref, sampling = own + 0.4 * torch.randn(3, 5, 7, generator=generator, dtype=torch.float64)
    inputs = {
        "prompt_ids": ids[:, :4], "prompt_mask": torch.ones(5, 4).long(), "completion_ids": ids[:, 4:],
        "completion_mask": mask, "advantages": torch.tensor([1.0, -1.0, 0.5, -2.0, 0.0], dtype=torch.float64),
        "old_per_token_logps": old, "ref_per_token_logps": ref, "sampling_per_token_logps": sampling,
        "importance_sampling_ratio": (old - sampling).exp().clamp(max=1.2), "num_items_in_batch": torch.tensor(57),
        "tool_mask": (torch.rand(5, 7, generator=generator) < 0.8).long(),
    }  # fmt: skip
    if columns is not None:
        inputs["advantages"] = inputs["advantages"][:, None] * torch.linspace(0.5, 1.5, columns).double()
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    return [loss.detach(), *(x.grad for x in trainer.model.parameters())], trainer._metrics


COVERED = [
    *({"loss_type": x} for x in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "sapo")),
    *({"loss_type": x, "importance_sampling_level": "sequence"} for x in ("grpo", "bnpo", "dr_grpo", "luspo", "sapo")),
    *({"loss_type": "cispo", "epsilon_high": 1.2, "importance_sampling_level": x} for x in ("token", "sequence")),
    *({"delta": x, "importance_sampling_level": y} for x in (1.0, 1.05, 1.4) for y in ("token", "sequence")),
    *({"columns": 1, "importance_sampling_level": x} for x in ("token", "sequence")),
    {"columns": 7},
    {"columns": 7, "loss_type": "cispo", "epsilon_high": 1.2, "importance_sampling_level": "sequence"},
    {"columns": 7, "off_policy_mask_threshold": 0.05},
    {"beta": 0.1},
    {"beta": 0.1, "importance_sampling_level": "sequence"},
    {"beta": 0.1, "use_bias_correction_kl": True},
    {"use_bias_correction_kl": True, "importance_sampling_level": "sequence"},
    {"top_entropy_quantile": 0.5},
    {"off_policy_mask_threshold": 0.05},
    {"use_vllm": True, "loss_type": "dapo", "importance_sampling_level": "sequence", "top_entropy_quantile": 0.5},
]
LEFT = {  # by the reason
    "loss_type": {"loss_type": "vespo"},
    "KL times a": {"beta": 0.1, "use_bias_correction_kl": True, "importance_sampling_level": "sequence"},
    "delta below 1": {"delta": 0.95},
    "epsilon_high below 1": {"loss_type": "cispo"},
    "a ratio of sequences": {"columns": 7, "importance_sampling_level": "sequence"},
}


@pytest.mark.parametrize(("reason", "options"), [*((None, x) for x in COVERED), *LEFT.items()], ids=str)
def test_trl(trl, reason, options):
    """Loss, gradients and metrics; a warning has the reason where they are TRL's own."""
    names = run_block("TRL")
    names["grpo_loss"] = partial(names["grpo_loss"], backend="reference")  # which takes no compiler
    ours = names["TritonGRPOTrainer"]
    for training in (True, False):
        expected, logged = compute_trl_loss(trl, training, options)
        warns = nullcontext() if reason is None else pytest.warns(UserWarning, match=f"TRL's own .*: {reason}")
        with warns:
            got, metrics = compute_trl_loss(ours, training, options)
        for x, wanted in zip(got, expected, strict=True):
            torch.testing.assert_close(x, wanted, rtol=1e-10, atol=1e-13)
        for mode, values in logged.items():
            assert metrics[mode].keys() == values.keys() and bool(values) == (mode == ("train" if training else "eval"))
            for name, wanted in values.items():
                assert metrics[mode][name] == pytest.approx(wanted, rel=1e-6), name


SCALES = [1e-6, 1.0, 1e3]  # of which the first shows where an epsilon goes
SHAPE = (5, 30)


@pytest.fixture
def skyrl(monkeypatch):
    """SkyRL's registry and its own estimator."""
    source = find_source("skyrl", "backends/skyrl_train/utils/ppo_utils.py")
    utilities = extract(source.with_name("torch_utils.py"), ["masked_mean"], {"torch": torch})
    module = extract(
        source,
        [
            "BaseFunctionRegistry",
            "AdvantageEstimator",
            "AdvantageEstimatorRegistry",
            "register_advantage_estimator",
            "masked_var",
            "masked_whiten",
            "compute_gae_advantage_return",
            "compute_advantages_and_returns",
        ],
        {
            "AlgorithmConfig": object,
            "Callable": Callable,
            "Float": {(torch.Tensor, "batch_size response_len"): torch.Tensor},
            "List": list,
            "Optional": Optional,
            "StrEnum": enum.StrEnum,
            "Tuple": tuple,
            "Union": Union,
            "masked_mean": utilities.masked_mean,
            "np": np,
            "ray": SimpleNamespace(is_initialized=lambda: False),
            "torch": torch,
            "wraps": wraps,
        },
    )
    put_in_place(module, "skyrl.backends.skyrl_train.utils.ppo_utils", monkeypatch)
    return module


@pytest.mark.parametrize("scale", SCALES)
def test_skyrl(skyrl, scale):
    run_block("SkyRL")
    rewards, values, mask = make_rollout(SHAPE, scale)

    def compute(estimator):
        return skyrl.compute_advantages_and_returns(
            rewards, mask.double(), np.arange(5), estimator, None, values, gamma=0.97, lambd=0.9
        )

    (advantages, returns), ours = compute("gae"), compute("gae_triton")
    torch.testing.assert_close(ours[0], advantages * mask, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(ours[1], returns, rtol=1e-11, atol=1e-13 * scale)


def test_skyrl_can_send_the_function_to_other_processes(skyrl):
    run_block("SkyRL")
    rewards, values, mask = make_rollout(SHAPE)
    function = skyrl.AdvantageEstimatorRegistry.get("gae_triton")
    sent = cloudpickle.loads(cloudpickle.dumps(function))
    for got, expected in zip(
        sent(rewards, values, mask, 0.97, 0.9), function(rewards, values, mask, 0.97, 0.9), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.fixture
def rlinf():
    """RLinf's registry, with its own estimators in it again afterwards."""
    pytest.importorskip("rlinf")
    from rlinf.algorithms import registry

    own = dict(registry.ADV_REGISTRY)
    torch.set_default_dtype(torch.float64)  # which it takes for γ where an episode goes on
    yield registry
    torch.set_default_dtype(torch.float32)
    registry.ADV_REGISTRY.clear()
    registry.ADV_REGISTRY.update(own)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("critic", [False, True])
@pytest.mark.parametrize("scale", SCALES)
def test_rlinf(rlinf, scale, critic, masked):
    stock = rlinf.get_adv_and_returns("gae")
    run_block("RLinf")["register"]()
    ours = rlinf.get_adv_and_returns("gae")
    assert ours is not stock
    rewards, values, mask = make_rollout((31, 5), scale)
    arguments = {
        "rewards": rewards[:-1],
        "values": values if critic else None,
        "dones": torch.rand(31, 5, generator=torch.Generator().manual_seed(1)) < 0.2,
        "loss_mask": mask[:-1].bool() if masked else None,
        "gamma": 0.97,
        "gae_lambda": 0.9,
        "adv_type": "gae",
    }
    valid = mask[:-1] if masked else 1
    for normalize in (False, True):
        expected = stock(**arguments, normalize_advantages=normalize, normalize_returns=normalize)
        got = ours(**arguments, normalize_advantages=normalize, normalize_returns=normalize)
        for x, wanted in zip(got, expected, strict=True):
            shape = rewards[:-1].shape
            torch.testing.assert_close(x * valid, wanted.reshape(shape) * valid, rtol=1e-9, atol=1e-11 * min(scale, 1))


@pytest.fixture
def openrlhf(monkeypatch):
    """The class with the two methods that the block replaces."""
    source = find_source("openrlhf", "trainer/ppo_utils/experience_maker.py")
    names = dict.fromkeys(("RayActorGroup", "Experience"), object)
    names |= {"torch": torch, "List": list, "Tuple": tuple}
    module = extract(source, ["RemoteExperienceMaker"], names)
    put_in_place(module, "openrlhf.trainer.ppo_utils.experience_maker", monkeypatch)
    return module.RemoteExperienceMaker


@pytest.mark.parametrize("kind", ["bool", "long", None])
def test_openrlhf(openrlhf, kind):
    rewards, values, mask = make_rollout(SHAPE)
    mask = None if kind is None else getattr(mask, kind)()

    def compute(maker):
        both = maker.get_advantages_and_returns(None, values, rewards, mask, 0.97, 0.9)
        return *both, maker.get_cumulative_returns(None, rewards, mask, 0.97)

    expected, stock = compute(openrlhf), openrlhf.get_cumulative_returns
    run_block("OpenRLHF")
    assert openrlhf.get_cumulative_returns is not stock
    for got, wanted in zip(compute(openrlhf), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-13)
    if mask is not None:
        rewards, values = (x.masked_fill(mask == 0, torch.nan) for x in (rewards, values))
        for got, wanted in zip(compute(openrlhf), expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-13)


class LoopStorage:
    """Storage with the loop that RSL-RL 1 has, for a newer RSL-RL."""

    def compute_returns(self, last_values, gamma, lam):
        advantage, next_values = 0, last_values
        for step in reversed(range(len(self.rewards))):
            going_on = 1.0 - self.dones[step].float()
            delta = self.rewards[step] + going_on * gamma * next_values - self.values[step]
            advantage = delta + going_on * gamma * lam * advantage
            self.returns[step] = advantage + self.values[step]
            next_values = self.values[step]
        self.advantages = self.returns - self.values
        self.advantages = (self.advantages - self.advantages.mean()) / (self.advantages.std() + 1e-8)


def fill_storage(kind):
    storage, generator = kind.__new__(kind), torch.Generator().manual_seed(0)
    storage.rewards, storage.values = torch.randn(2, 24, 7, 1, generator=generator).unbind()
    storage.dones = (torch.rand(24, 7, 1, generator=generator) < 0.1).byte()
    storage.returns, storage.advantages = torch.zeros(2, 24, 7, 1).unbind()
    storage.num_transitions_per_env = 24
    return storage, torch.randn(7, 1, generator=generator)


def test_rsl_rl(monkeypatch):
    """Of RSL-RL 1 and 2, on their storage or on one of the same shape."""
    storage_module = pytest.importorskip("rsl_rl.storage")
    found = storage_module.RolloutStorage
    kind = found if hasattr(found, "compute_returns") else LoopStorage
    stock, last_values = fill_storage(kind)
    stock.compute_returns(last_values, 0.98, 0.9)
    monkeypatch.setattr(storage_module, "RolloutStorage", kind)
    monkeypatch.setattr(kind, "compute_returns", kind.compute_returns)
    run_block("Versions 1 and 2", "rsl_rl.md")
    ours, last_values = fill_storage(kind)
    assert kind.compute_returns.__code__.co_filename.startswith("docs/rsl_rl.md")
    ours.compute_returns(last_values, 0.98, 0.9)
    torch.testing.assert_close(ours.returns, stock.returns, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.advantages, stock.advantages, rtol=1e-5, atol=1e-5)
    assert ours.advantages.shape == stock.advantages.shape
