"""A step of TRL's GRPO trainer, stock and ours in turns: the passes of a model, the loss and its metrics, and AdamW.

The responses are drawn ahead: nothing is generated. On a GPU the model has the shape of Qwen2.5-0.5B, and bfloat16 is
what `bf16=True` makes of it. Peaks are beyond the parameters.
"""

from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from benchmarks import harness
from benchmarks.harness import Options, Rows, Setting, make_row
from rl_triton_adapters.trl import TritonGRPOTrainer
from rl_triton_core.testing import assert_close

WORDS = ["<pad>", "<eos>", *(f"w{i}" for i in range(40))]


def make_trainer(kind: type, model: Any, folder: Any, **options: Any) -> Any:
    """A trainer of prompts of a few words, with a tokenizer made here, and any rewards."""
    words = Tokenizer(models.WordLevel(dict(zip(WORDS, range(len(WORDS)), strict=True)), unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    prompts = Dataset.from_dict({"prompt": [" ".join(WORDS[i : i + 3 + i % 3]) for i in range(2, 34)]})
    fixed = {"report_to": [], "disable_tqdm": True, "logging_steps": 1, "save_strategy": "no", "top_k": 0}
    fixed |= {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 9, "max_steps": 3}
    fixed |= {"use_cpu": True, "bf16": False, "learning_rate": 1e-3, "output_dir": str(folder), **options}
    data = {"train_dataset": prompts, "eval_dataset": prompts.select(range(4)), "processing_class": tokenizer}
    data |= {"reward_funcs": lambda completions, **_: [sum(map(ord, x)) % 17.0 for x in completions]}
    return kind(model, args=GRPOConfig(**fixed), **data)


def make_batch(lengths: torch.Tensor, tokens: int, vocabulary: int) -> dict[str, torch.Tensor]:
    """Prompts of 4 tokens, and responses of these lengths."""
    ids = torch.randint(2, vocabulary, (len(lengths), 4 + tokens))
    mask = (torch.arange(tokens) < lengths[:, None]).long()
    batch = {"prompt_ids": ids[:, :4], "prompt_mask": torch.ones_like(ids[:, :4]), "advantages": torch.randn(len(ids))}
    return batch | {"completion_ids": ids[:, 4:], "completion_mask": mask, "num_items_in_batch": mask.sum()}


def measure(setting: Setting, options: Options) -> Rows:
    responses, tokens, layers, width, vocabulary = vars(setting).values()
    sizes = {"vocab_size": vocabulary, "hidden_size": width, "intermediate_size": 5 * width}
    sizes |= {"num_hidden_layers": layers, "num_attention_heads": width // 64, "num_key_value_heads": 2}
    batch = make_batch(torch.linspace(tokens / 4, tokens, responses), tokens, vocabulary)
    arms, norms, on_cpu = {}, [], options.device == "cpu"
    for name, kind in {"stock": GRPOTrainer, "ours": TritonGRPOTrainer}.items():
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(Qwen2Config(**sizes, tie_word_embeddings=True)).to(options.device)
        with TemporaryDirectory() as folder:
            trainer = make_trainer(kind, model, folder, bf16=not on_cpu, use_cpu=on_cpu, num_iterations=1 << 30)
        trainer._buffered_inputs, trainer._step = [{k: x.to(options.device) for k, x in batch.items()}], 1
        trainer.create_optimizer()
        trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation = 1
        trainer.training_step(model, None, None)
        norms.append(torch.nn.utils.get_total_norm([x.grad for x in model.parameters()]))
        arms[name] = partial(make_step, trainer)
    assert_close(*norms, rtol=0.02)
    times = harness.time_in_turns(arms, options.device, options.seconds)
    yield from harness.list_times(times, unit="ms")
    for name, bursts in times.items():
        yield make_row(name, "tokens", "1/s", [1e6 * int(batch["num_items_in_batch"]) / x for y in bursts for x in y])
        if not on_cpu:
            yield make_row(name, "peak", "MiB", harness.measure_memory(arms[name]))


def make_step(trainer: Any) -> None:
    trainer.training_step(trainer.model, None, None)
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
