"""What the user gives to `ZenFlowTrainer` beside the plain Trainer: arguments, fields, blocks, callbacks; and its process."""

import inspect
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.integrations.deepspeed
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR
from transformers import Trainer, TrainerCallback

from accelerate_loops import EXACT, LATE, new_process
from lightning_zenflow.accelerate import ZenFlowAccelerator
from lightning_zenflow.core.errors import MisconfigurationException
from lightning_zenflow.transformers import ZenFlowTrainer
from rank_processes import free_port
from tiny_trainers import configuration, logged, tiny_llama, trainer

SHORT = {"num_train_epochs": 1, "max_steps": 6, "eval_strategy": "no", "max_grad_norm": 0.5}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    with new_process():
        yield


NOT_DEEPSPEEDS = {
    "self",
    "model",
    "args",
    "data_collator",
    "train_dataset",
    "eval_dataset",
    "processing_class",
    "model_init",
}
NOT_DEEPSPEEDS |= {"compute_loss_func", "compute_metrics", "callbacks", "preprocess_logits_for_metrics"}
"""Arguments of the Trainer that transformers' integration of DeepSpeed leaves alone."""
DROPPED = {"optimizers", "optimizer_cls_and_kwargs"}
"""Those that it drops: kept, or refused beside a block."""
COMPARED = {
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "max_grad_norm",
    "learning_rate",
    "adam_beta1",
    "adam_beta2",
}
COMPARED |= {"adam_epsilon", "weight_decay", "bf16", "fp16", "get_warmup_steps"}
"""Fields that a configuration must say alike; what a block leaves out is the field's (`test_blocks_take_the_fields`)."""
REFUSED = {"bf16_full_eval", "fp16_full_eval", "auto_find_batch_size", "load_best_model_at_end", "save_only_model"}
"""Fields that are refused by name in some cases: here, or by transformers."""
OTHER = {"world_size", "get_process_log_level", "save_on_each_node", "hf_deepspeed_config", "activation_checkpointing"}
"""No values that are trained with."""


def test_new_arguments_and_fields_are_classified() -> None:
    assert set(inspect.signature(Trainer.__init__).parameters) == NOT_DEEPSPEEDS | DROPPED
    fields = set(re.findall(r"\bargs\.(\w+)", inspect.getsource(transformers.integrations.deepspeed)))
    creation = inspect.getsource(Trainer.create_accelerator_and_postprocess)
    _, _, behind = creation.partition("self.is_deepspeed_enabled =")
    fields |= set(re.findall(r"self\.args\.(\w+)", behind))
    assert fields - {*COMPARED, *REFUSED, *OTHER} == set()


def groups(model: Any) -> Any:
    """An optimizer with rates of its own and a scheduler, which are not those of the arguments."""
    head = [p for name, p in model.named_parameters() if "lm_head" in name]
    rest = [p for name, p in model.named_parameters() if "lm_head" not in name]
    optimizer = AdamW([{"params": head, "lr": 2e-2}, {"params": rest, "weight_decay": 0.1}], lr=3e-3, betas=(0.8, 0.95))
    return {"optimizers": (optimizer, StepLR(optimizer, 2, 0.5))}


def by_class(model: Any) -> Any:
    return {"optimizer_cls_and_kwargs": (AdamW, {"lr": 2e-2, "betas": (0.5, 0.9)})}


class Drops(TrainerCallback):
    """Leaves out every second step, as the errors of refused gradients advise; `model.zero_grad()` in others."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % 2:
            kwargs["optimizer" if state.global_step % 4 == 1 else "model"].zero_grad()


GIVEN = {
    "optimizer and scheduler": (groups, {}),
    "class": (by_class, {}),
    "callback that drops": (lambda _: {"callbacks": [Drops()]}, {"gradient_accumulation_steps": 2}),
}


@pytest.mark.parametrize("has_configuration", [False, True])
@pytest.mark.parametrize("case", GIVEN)
def test_given_things_train_as_in_the_plain_trainer(
    case: str,
    has_configuration: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given, options = GIVEN[case]
    with new_process():
        theirs = trainer(tmp_path, ours=False, given=given, **SHORT, **options)
        theirs.train()
    monkeypatch.setattr(ZenFlowTrainer, "zenflow", EXACT)
    more = {"deepspeed": configuration({})} if has_configuration else {}
    ours = trainer(tmp_path, given=given, **SHORT, **options, **more)
    ours.train()
    assert logged(ours, "learning_rate") == logged(theirs, "learning_rate")
    torch.testing.assert_close(logged(ours, "loss"), logged(theirs, "loss"), rtol=0, atol=2e-5)
    torch.testing.assert_close(dict(ours.model.state_dict()), dict(theirs.model.state_dict()), rtol=0, atol=2e-3)
    ours.accelerator.free_memory()
    assert "mismatch" not in caplog.text


def block(name: str, **values: Any) -> dict[str, Any]:
    return {"deepspeed": {**configuration(EXACT), name: values}}


ADAMW, WARMUP = block("optimizer", type="AdamW", params={}), block("scheduler", type="WarmupLR", params={})
BEST = {"save_strategy": "epoch", "eval_strategy": "epoch", "load_best_model_at_end": True}
BESIDE_BLOCKS: list[tuple[dict[str, Any], str]] = [
    ({"given": groups, **ADAMW}, r"Trainer\(optimizers=...\) must be absent .* a block `optimizer`"),
    ({"given": by_class, **ADAMW}, r"Trainer\(optimizer_cls_and_kwargs=...\) must be absent .* `optimizer`"),
    ({"optim": "adafactor", **ADAMW}, r"TrainingArguments\(optim=.*\) must be absent .* `optimizer`"),
    ({"given": groups, **WARMUP}, r"Trainer\(optimizers=...\) must be absent .* a block `scheduler`"),
    ({"lr_scheduler_type": "cosine", **WARMUP}, r"TrainingArguments\(lr_scheduler_type=...\) must be absent"),
    ({"lr_scheduler_kwargs": {"a": 1}, **WARMUP}, r"TrainingArguments\(lr_scheduler_kwargs=...\) must be absent"),
    ({"given": lambda model: {"optimizers": (SGD(model.parameters()), None)}}, "exactly one of torch.optim.AdamW"),
    ({"bf16_full_eval": True}, "bf16_full_eval must be False where bf16 is, got True"),
    (
        {"deepspeed": configuration(EXACT, stage=3), "save_only_model": True, **BEST},
        "save_only_model must be False with load_best_model_at_end under stage 3",
    ),
]


@pytest.mark.parametrize(("options", "message"), BESIDE_BLOCKS)
def test_what_cannot_be_kept_is_refused_by_name(
    options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a CPU transformers refuses it.
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
    with pytest.raises(MisconfigurationException, match=message):
        trainer(tmp_path, **{**SHORT, **options}).train()


def test_blocks_take_the_fields(tmp_path: Path) -> None:
    both = {"deepspeed": ADAMW["deepspeed"] | WARMUP["deepspeed"]}
    fields = {"adam_beta1": 0.8, "adam_epsilon": 1e-6, "weight_decay": 0.1, "warmup_steps": 3}
    ours = trainer(tmp_path, **{**SHORT, "max_steps": 1}, **fields, **both)
    ours.train()
    (group,) = ours.optimizer.param_groups
    assert ([*group["betas"]], group["eps"], group["weight_decay"]) == ([0.8, 0.999], 1e-6, 0.1)
    scheduler = ours.lr_scheduler.scheduler
    assert (scheduler.max_lrs, scheduler.warmup_num_steps) == ([1e-2], 3)
    with pytest.warns(UserWarning, match="moments and step count start at zero"):
        ours.train()
    ours.accelerator.free_memory()


def test_a_block_has_no_warmup_where_the_fields_have_none(tmp_path: Path) -> None:
    ours = trainer(tmp_path, **{**SHORT, "max_steps": 1}, **WARMUP)
    ours.train()
    assert ours.lr_scheduler.scheduler.warmup_num_steps == 2  # DeepSpeed's least
    ours.accelerator.free_memory()


class Reads(TrainerCallback):
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        model.lm_head.weight.grad.norm()


def test_refused_gradients_are_in_the_words_of_the_front(tmp_path: Path) -> None:
    ours = trainer(tmp_path, given=lambda _: {"callbacks": [Reads()]}, **SHORT)
    with pytest.raises(
        MisconfigurationException, match="under ZenFlowTrainer .* `on_pre_optimizer_step`.*max_grad_norm"
    ) as refused:
        ours.train()
    assert not re.search("fabric|gradient_clip_val|on_before_optimizer_step", str(refused.value))
    ours.accelerator.free_memory()


@pytest.mark.parametrize("save_only_model", [False, True])
def test_best_model(save_only_model: bool, tmp_path: Path) -> None:
    """The first one, so that training has gone on since. And a plain Trainer behind ours in the process, which is plain."""
    best = {"load_best_model_at_end": True, "save_strategy": "epoch", "greater_is_better": True}
    ours = trainer(tmp_path, **best, save_only_model=save_only_model, deepspeed=configuration(LATE))
    ours.train()
    losses = logged(ours, "eval_loss")
    assert ours.state.best_metric == losses[0] > losses[-1]
    assert ours.evaluate()["eval_loss"] == pytest.approx(losses[0], abs=1e-6)
    assert (tmp_path / ours.state.best_model_checkpoint / "global_step10").exists() != save_only_model
    with pytest.warns(UserWarning, match="moments and step count start at zero"):
        ours.train()
    assert "ACCELERATE_USE_DEEPSPEED" not in os.environ or os.environ["ACCELERATE_USE_DEEPSPEED"] == "false"
    ours.accelerator.end_training()
    assert not trainer(tmp_path, ours=False).is_deepspeed_enabled


@pytest.mark.parametrize("launcher", ["python", "torchrun"])
def test_reference_model(launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As TRL's trainers, which have DeepSpeed set up a model that is not trained, before the training; with torchrun's variables too."""
    from trl.models.utils import prepare_deepspeed

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if launcher == "torchrun":
        variables = {
            "RANK": 0,
            "LOCAL_RANK": 0,
            "WORLD_SIZE": 1,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": free_port(),
        }
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))
    ours = trainer(tmp_path, **SHORT)
    x = torch.arange(16, dtype=torch.int64)[None]
    with torch.no_grad():
        expected = tiny_llama()(x).logits
        reference = prepare_deepspeed(tiny_llama(), ours.accelerator)
    ours.train()
    with torch.no_grad():
        torch.testing.assert_close(reference(x).logits, expected)
        assert not torch.equal(ours.model(x).logits, expected)
    ours.accelerator.end_training()


def test_accelerator_on_the_cpu_gathers_before_prepare() -> None:
    accelerator = ZenFlowAccelerator(cpu=True)
    assert accelerator.gather(torch.ones(1, dtype=torch.float32)).item() == 1.0
    assert accelerator.device.type == "cpu"
