"""`OffloadAdamW` under the Trainer of transformers, by Accelerate, TRL's trainers and PEFT, without a front of this package."""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, TaskType, get_peft_model
from torch.optim import AdamW
from transformers import LlamaForCausalLM
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from accelerate_loops import new_process
from lightning_zenflow import OffloadAdamW
from lightning_zenflow.core.errors import MisconfigurationException
from plain_loops import Who, loss_of, make_model, make_optimizer
from same_bits import assert_same_tensors
from tiny_trainers import logged, tiny_llama, tokenizer_of, trainer

WORDS = ("red", "green", "blue", "grey")
TEXTS = [f"{a} and {b} or {c}" for a in WORDS for b in WORDS for c in WORDS[:2]]
PAIRS = [{"prompt": a, "chosen": f" {a}", "rejected": f" {b}"} for a, b in zip(TEXTS, TEXTS[::-1], strict=True)]
LORA = LoraConfig(task_type=TaskType.CAUSAL_LM, r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    with new_process():
        yield


def of_trl(kind: Any, settings: Any, rows: list[dict[str, str]], folder: Path, *, given: Any, **options: Any) -> Any:
    """SFT, or DPO with a reference model, with TRL's defaults, such as activation checkpoints. LoRA: of the adapters only."""
    wrap, is_dpo = options.pop("wrap", lambda model: model), kind is DPOTrainer
    fixed = {"per_device_train_batch_size": 4, "num_train_epochs": 2, "logging_steps": 1, "report_to": []}
    fixed |= {"max_length": 24, "use_cpu": True, "bf16": False, "disable_tqdm": True, "learning_rate": 1e-2}
    model, reference = wrap(tiny_llama()), {"ref_model": tiny_llama()} if is_dpo else {}
    arguments = settings(output_dir=str(folder), **fixed, **options)
    data, tokenizer = Dataset.from_list(rows), tokenizer_of(TEXTS)
    return kind(model, args=arguments, train_dataset=data, processing_class=tokenizer, **reference, **given(model))


sft = partial(of_trl, SFTTrainer, SFTConfig, [{"text": text} for text in TEXTS])
TRAINERS: dict[str, Callable[..., Any]] = {
    "transformers": partial(trainer, ours=False, eval_strategy="no"),
    "SFT": sft,
    "DPO": partial(of_trl, DPOTrainer, DPOConfig, PAIRS),
    "LoRA": partial(sft, wrap=lambda model: get_peft_model(model, LORA)),
    # By `peft_config` and `optimizer_cls_and_kwargs`.
    "adapters and optimizer by the trainer": partial(sft, weight_decay=0.1),
}


@pytest.mark.parametrize(
    "options", [{}, {"gradient_accumulation_steps": 3, "max_grad_norm": 0.5}], ids=["plain", "accumulated and clipped"]
)
@pytest.mark.parametrize("which", TRAINERS)
def test_trainers(which: str, options: dict[str, Any], tmp_path: Path) -> None:
    """As `optimizers=(OffloadAdamW(...), None)`: losses are AdamW's, and a checkpoint is continued with the same bits."""

    def train(who: Who, folder: str, resume: str | None = None, **more: Any) -> Any:
        def given(model: LlamaForCausalLM) -> dict[str, Any]:
            if "by the trainer" in which:
                kind, keys = (OffloadAdamW, {"worker_cores": 1}) if who == "ours" else (AdamW, {})
                return {"peft_config": LORA, "optimizer_cls_and_kwargs": (kind, {"lr": 1e-2, **keys})}
            return {"optimizers": (make_optimizer(who, model.parameters()), None)}

        one = TRAINERS[which](tmp_path / folder, given=given, **options, **more)
        one.train(resume_from_checkpoint=resume)
        return one

    ours, theirs = train("ours", "ours", save_strategy="epoch"), train("torch", "torch", save_strategy="no")
    torch.testing.assert_close(logged(ours, "loss"), logged(theirs, "loss"), rtol=3e-6, atol=0)
    torch.testing.assert_close(logged(ours, "grad_norm"), logged(theirs, "grad_norm"), rtol=3e-5, atol=0)
    first = min((tmp_path / "ours").glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))
    again = train("ours", "again", str(first))
    assert logged(again, "loss") == logged(ours, "loss")
    assert_same_tensors([*again.model.state_dict().values()], [*ours.model.state_dict().values()])


@pytest.mark.parametrize("has_trained", [False, True])
def test_parameters_that_are_exchanged_are_refused(has_trained: bool) -> None:
    """As Accelerate does with those of FSDP2, in `prepare`."""
    model = make_model(layers=1)
    optimizer = make_optimizer("ours", model[-1].parameters())
    if has_trained:
        loss_of(model, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
    model[-1] = copy.deepcopy(model[-1])
    optimizer.param_groups[0]["params"] = [*model[-1].parameters()]
    loss_of(model, 1).backward()
    with pytest.raises(
        MisconfigurationException, match="parameter 0.requires_grad must be True .* behind `fully_shard`"
    ):
        optimizer.step()
