"""A Trainer of transformers with a tiny Llama, ours or the plain one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Trainer, TrainingArguments, set_seed

from lightning_zenflow.transformers import ZenFlowTrainer


class Tokens(Dataset[dict[str, Tensor]]):
    """Random texts of equal length."""

    def __init__(self, number: int = 40) -> None:
        self.texts = torch.randint(0, 64, (number, 16), generator=torch.Generator().manual_seed(3), dtype=torch.int64)

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.texts[index], "labels": self.texts[index]}


def tiny_llama() -> LlamaForCausalLM:
    set_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=32, num_key_value_heads=2, **sizes))


def configuration(zenflow: dict[str, Any], *, stage: int = 2, on_host: bool = False) -> dict[str, Any]:
    """As people write it for this Trainer."""
    host = {"offload_param": {"device": "cpu"}} if on_host else {}
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu"}, **host, "zenflow": zenflow},
    }


def trainer(
    folder: Path,
    *,
    ours: bool = True,
    only_matrices: bool = False,
    given: Callable[[LlamaForCausalLM], dict[str, Any]] | None = None,
    **options: Any,
) -> Any:
    """A Trainer of a tiny Llama, ours or that of transformers on the CPU; one that trains only matrices, as with PEFT, has no parameter in
    the group without decay. `given` makes further arguments of the Trainer.
    """
    fixed = {"per_device_train_batch_size": 4, "num_train_epochs": 2, "logging_steps": 1, "report_to": []}
    options = {"learning_rate": 1e-2, "save_strategy": "no", "eval_strategy": "epoch", **fixed, **options}
    arguments = TrainingArguments(output_dir=str(folder), disable_tqdm=True, use_cpu=not ours, **options)
    kind, model = ZenFlowTrainer if ours else Trainer, tiny_llama()
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.ndim > 1 or not only_matrices)
    more = {} if given is None else given(model)
    return kind(model, arguments, train_dataset=Tokens(), eval_dataset=Tokens(8), **more)


def logged(of: Any, name: str) -> list[float]:
    return [float(entry[name]) for entry in of.state.log_history if name in entry]


def tokenizer_of(texts: list[str]) -> PreTrainedTokenizerFast:
    """Of their words."""
    words = sorted({word for text in texts for word in text.split()})
    vocabulary = {word: index for index, word in enumerate(["<pad>", "</s>", *words])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", pad_token="<pad>")
