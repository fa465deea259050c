"""The adapter of TRL against its trainer: losses, gradients and metrics of a tiny model, and what is trained."""

import os
from argparse import Namespace
from functools import partial

import pytest
import torch
from overrides import derive
from torch.overrides import TorchFunctionMode

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # for TRL 1.15, which has kernels alone
trl_step = pytest.importorskip("benchmarks.trl_step", exc_type=ImportError)
layers = pytest.importorskip("benchmarks.linear_token_log_probs")
TritonGRPOTrainer, GRPOTrainer = trl_step.TritonGRPOTrainer, trl_step.GRPOTrainer
transformers = pytest.importorskip("transformers")
VOCABULARY, RESPONSE = len(trl_step.WORDS), 7


def make_model(kind="Llama", **options):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    tokens = {"vocab_size": VOCABULARY, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    config = getattr(transformers, f"{kind}Config")(initializer_range=0.5, **sizes, **tokens, **options)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def make_inputs(trainer, columns=None, masked=0):
    """Of responses of several lengths, whose ratios lie on both sides of every clip."""
    torch.manual_seed(1)
    inputs = trl_step.make_batch(torch.tensor([7, 3, 1, 5, 7]), RESPONSE, VOCABULARY)
    inputs["completion_mask"][:masked] = 0
    whole = (torch.cat([inputs[f"{x}_{y}"] for x in ("prompt", "completion")], 1) for y in ("ids", "mask"))
    with torch.no_grad():
        own, *_ = GRPOTrainer._get_per_token_logps_and_entropies(trainer, trainer.model, *whole, RESPONSE)
    old, ref, sampling = own + 0.4 * torch.randn(3, *own.shape)
    inputs |= {"old_per_token_logps": old, "tool_mask": (torch.rand(own.shape) < 0.8).long()}
    inputs |= {"ref_per_token_logps": ref} if trainer.beta else {}
    if columns is not None:
        inputs["advantages"] = inputs["advantages"][:, None] * torch.linspace(0.5, 1.5, columns)
    if trainer.use_vllm:
        inputs |= {"sampling_per_token_logps": sampling, "importance_sampling_ratio": (old - sampling).exp()}
    return inputs


def compute(trainer, inputs, training):
    trainer.model.train(training).zero_grad()
    trainer.current_gradient_accumulation_steps, metrics = 3, trainer._metrics["train" if training else "eval"]
    metrics.clear()
    with torch.set_grad_enabled(training):
        loss = trainer.compute_loss(trainer.model, inputs)
    if training:
        loss.backward()
    gradients = [torch.zeros(0), *(x.grad.flatten() for x in trainer.model.parameters() if x.grad is not None)]
    return loss.detach(), torch.cat(gradients), dict(metrics)


def check_same(ours, stock, inputs, tolerance=2e-6, modes=(True, False)):
    for training in modes:
        (loss, wanted, logged), (got, slopes, metrics) = (compute(x, inputs, training) for x in (stock, ours))
        torch.testing.assert_close(got, loss, rtol=5e-5, atol=1e-6)
        assert (slopes - wanted).norm() <= tolerance * wanted.norm() and bool(len(wanted)) == training and metrics
        found = {name: [float(x) for x in values] for name, values in metrics.items()}
        close = partial(pytest.approx, rel=5e-5, abs=1e-7, nan_ok=True)
        assert found == {name: close(values) for name, values in logged.items()}


def make_both(folder, options):
    """Of options that need vLLM or the folder of a model, attributes are set."""
    own = "columns", "masked", "beta", "use_vllm", "model", "tolerance"
    rest = {name: x for name, x in options.items() if name not in own}
    kinds = TritonGRPOTrainer, GRPOTrainer
    both = [trl_step.make_trainer(x, make_model(**options.get("model", {})), folder, **rest) for x in kinds]
    for trainer in both:
        vars(trainer).update({name: options[name] for name in ("beta", "use_vllm") if name in options})
    return *both, make_inputs(both[1], options.get("columns"), options.get("masked", 0))


LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "sapo", "vespo", "cispo")
CORRECTED, SEQUENCE = {"use_vllm": True}, {"importance_sampling_level": "sequence"}
GEMMA = {"kind": "Gemma2", "final_logit_softcapping": 5.0, "head_dim": 8, "num_key_value_heads": 4}
COVERED = [
    *({"loss_type": x, "epsilon_high": 1.3, **level} for x in LOSSES for level in ({}, SEQUENCE)),
    *({"delta": x, "epsilon_high": 0.3, **level} for x in (1.0, 1.05, 1.4) for level in ({}, SEQUENCE)),
    *({"columns": 1, **level} for level in ({}, SEQUENCE)),
    *({"columns": RESPONSE}, {"columns": RESPONSE, "off_policy_mask_threshold": 0.05}),
    *({"beta": 0.1, "loss_type": x, "use_bias_correction_kl": x == "grpo"} for x in ("grpo", "dapo", "vespo")),
    {"beta": 0.1, "use_bias_correction_kl": False, **SEQUENCE},
    *({"top_entropy_quantile": 0.5}, {"entropy_coef": 0.05}, {"use_adaptive_entropy": True}),
    *({"off_policy_mask_threshold": 0.05, **CORRECTED}, {"loss_type": "vespo", **CORRECTED}),
    {"loss_type": "dapo", "top_entropy_quantile": 0.5, **SEQUENCE, **CORRECTED},
    *({"masked": x} for x in (2, 5)),
    {"model": {"tie_word_embeddings": True}, "gradient_checkpointing": True, "temperature": 0.7},
    *({"bf16": True, "cast_lm_head_to_fp32": x, "tolerance": 2e-6 if x else 1e-2} for x in (False, True)),
    *({"model": x} for x in (GEMMA, {"kind": "Cohere", "logit_scale": 0.25}, {"kind": "Phi"})),  # the last has a bias
]
LEFT = {  # by the reason
    "clip_high: got -0.8": {"loss_type": "cispo"},
    "clip_high: got -0.05": {"delta": 0.95},
    "kl_times_ratio": {"beta": 0.1, "use_bias_correction_kl": True, **SEQUENCE},
    "advantages per token": {"columns": RESPONSE, **SEQUENCE},
}


@pytest.mark.parametrize(("reason", "options"), [*((None, x) for x in COVERED), *LEFT.items()], ids=str)
def test_loss_gradients_and_metrics_are_those_of_trl(reason, options, tmp_path, recwarn):
    ours, stock, inputs = make_both(tmp_path, options)
    check_same(ours, stock, inputs, options.get("tolerance", 2e-6))
    said = [str(x.message) for x in recwarn if "takes TRL's gradient" in str(x.message)]
    assert len(said) == (reason is not None) and (reason or "") in "".join(said)
    assert isinstance(ours._last_world_entropy, float)  # which a checkpoint has
    is_read = [not isinstance(x, torch.Tensor) for x in (y for z in compute(ours, inputs, True)[2].values() for y in z)]
    assert any(is_read) == (reason is not None or ours._entropy_bonus_enabled)  # of which the coefficient is a number


@pytest.mark.parametrize("options", [{}, {"num_iterations": 2, "gradient_accumulation_steps": 2, "beta": 0.1}], ids=str)
def test_training_is_that_of_trl(options, tmp_path):
    """With evaluations, a reference model, and a checkpoint from which it goes on."""
    make_model().save_pretrained(model := str(tmp_path / "model"))
    saved = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, **options}
    results = []
    for kind in (TritonGRPOTrainer, GRPOTrainer):
        history = []
        for resumes in (False, True):
            trainer = trl_step.make_trainer(kind, model, tmp_path / kind.__name__, **saved)
            trainer.train(resume_from_checkpoint=resumes)
            history += trainer.state.log_history
        results.append((history, [*trainer.model.parameters()]))
    (logged, ours), (expected, stock) = results
    torch.testing.assert_close(ours, stock, rtol=0, atol=2e-4)
    for got, wanted in zip(logged, expected, strict=True):
        numbers = {name: x for name, x in wanted.items() if not name.endswith(("time", "runtime", "per_second"))}
        assert {name: got[name] for name in numbers} == pytest.approx(numbers, rel=1e-3, abs=1e-4)
        assert all(x is None or isinstance(x, int | float) for x in got.values())


class Waits(TorchFunctionMode):
    """Counts what waits for a device."""

    count = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.count += getattr(function, "__name__", "") in ("item", "__bool__", "__float__")
        return function(*args, **(kwargs or {}))


def test_no_metric_waits_for_the_device(tmp_path):
    *both, inputs = make_both(tmp_path, {})
    counts = []
    for trainer in both:
        compute(trainer, inputs, True)
        trainer._compute_own_loss = lambda *_: torch.zeros(())
        with Waits() as waits:
            trainer._compute_loss(trainer.model, inputs)
        counts.append(waits.count)
    assert counts[0] <= 2 and counts[1] >= 8  # a mask of attention, and tokens that are checked on a CPU


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("method", ["compute_loss", "_compute_loss", "_get_per_token_logps_and_entropies"])
def test_methods_of_a_class_of_ones_own(method, behind, tmp_path):
    base = derive(GRPOTrainer, method)
    kind = type("Both", (TritonGRPOTrainer, base), {}) if behind else derive(TritonGRPOTrainer, method)
    ours, stock = (trl_step.make_trainer(x, make_model(), tmp_path) for x in (kind, base))
    check_same(ours, stock, make_inputs(stock), modes=(True,))


def test_a_factor_of_ones_own(tmp_path):
    own = {"get_off_policy_mask": lambda self, advantages, **_: 0.5 + (advantages > 0)}
    kinds = (type("Own", (x,), own) for x in (TritonGRPOTrainer, GRPOTrainer))
    ours, stock = (trl_step.make_trainer(x, make_model(), tmp_path, off_policy_mask_threshold=0.1) for x in kinds)
    with pytest.warns(RuntimeWarning, match="another one than ours"):
        check_same(ours, stock, make_inputs(stock))


def test_settings_that_change_between_steps(tmp_path):
    ours, stock, inputs = make_both(tmp_path, {})
    for changes in ({}, {"epsilon_high": 0.4}, {"beta": 0.2}, {"loss_type": "dapo"}, {"temperature": 0.5}):
        vars(ours).update(changes)
        vars(stock).update(changes)
        check_same(ours, stock, inputs | make_inputs(stock))


def test_switched_off_in_the_environment_it_is_stock(tmp_path, monkeypatch):
    monkeypatch.setenv("RL_TRITON", "0")
    for name in ("grpo_loss", "linear_token_log_probs"):
        monkeypatch.setattr(f"rl_triton_adapters.trl.{name}", None)
    check_same(*make_both(tmp_path, {}), 0)


def test_the_benchmark_of_the_last_layer_compares_and_times_that_of_trl():
    setting = layers.Setting(tokens=40, width=8, vocabulary=100, dtype="float32")
    rows = layers.measure(setting, Namespace(device="cpu", seconds=1e-3, quick=True))
    assert {row.arm for row in rows if row.metric == "full"} >= {"TRL", "TRL's GRPO", "GRPO", "split", "GRPO split"}
