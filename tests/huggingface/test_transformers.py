"""`ZenFlowTrainer` beside the Trainer of transformers with torch's AdamW: losses, checkpoints, configurations, what the user gives; the
recipe's snippets."""

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoModelForCausalLM, TrainerCallback
from trl.models.utils import prepare_deepspeed

import sft
from accelerate_loops import EXACT, LATE, Net, new_process
from example_runs import ROOT, blocks
from lightning_zenflow.core.errors import MisconfigurationException
from lightning_zenflow.deepspeed.users_module import is_in_pieces
from rank_processes import free_port
from same_bits import assert_same_tensors
from tiny_models import save_tiny_model
from tiny_trainers import Tokens, configuration, logged, tiny_llama, trainer


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    with new_process():
        yield


def weights(of: Any) -> list[Tensor]:
    return [value.clone() for value in of.accelerator.get_state_dict(of.model_wrapped).values()]


def end(of: Any) -> None:
    of.accelerator.free_memory()


@pytest.mark.parametrize(
    ("on_host", "options"),
    [
        (False, {"gradient_accumulation_steps": 3, "max_grad_norm": 0.5}),
        (True, {"weight_decay": 0.1, "only_matrices": True}),
    ],
    ids=["stage 3, clipped and accumulated", "weights on the host"],
)
def test_losses_are_adamws(
    on_host: bool, options: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with new_process():
        theirs = trainer(tmp_path, ours=False, **options)
        theirs.evaluate()
        theirs.train()
    ours = trainer(tmp_path, **options, deepspeed=configuration(EXACT, stage=3, on_host=on_host))
    ours.evaluate()
    assert is_in_pieces(ours.model)
    ours.train()
    for name, tolerance in {"loss": 2e-5, "grad_norm": 2e-4, "eval_loss": 1e-4}.items():
        torch.testing.assert_close(logged(ours, name), logged(theirs, name), rtol=0, atol=tolerance)
    assert len(logged(ours, "zenflow/stall/device_percent")) == len(logged(ours, "loss"))
    end(ours)
    # A Trainer that is done has the exact weights in its model.
    x = Tokens(2).texts
    with torch.no_grad():
        torch.testing.assert_close(ours.model(x).logits, theirs.model(x).logits, rtol=0, atol=2e-3)
    # The summary, once.
    assert len([record for record in caplog.records if " steps, median " in record.getMessage()]) == 1


class At(TrainerCallback):
    """Calls a function at one of the Trainer's hooks, with the number of steps before and what the Trainer gives by name."""

    def __init__(self, hook: str, act: Callable[..., object]) -> None:
        setattr(self, hook, lambda args, state, control, **given: act(state.global_step, control=control, **given))


@pytest.mark.parametrize(
    "of_deepspeed",
    [configuration(LATE), configuration(EXACT, stage=3, on_host=True)],
    ids=["late", "weights on the host"],
)
def test_resumed_run_has_the_same_bits(of_deepspeed: dict[str, Any], tmp_path: Path) -> None:

    def stop(step: int, control: Any, **_: Any) -> None:
        """As a time limit does."""
        control.should_training_stop = step == 5

    options = {"save_strategy": "steps", "save_steps": 5, "eval_strategy": "no", "deepspeed": of_deepspeed}
    whole = trainer(tmp_path / "whole", **options)
    whole.train()
    expected, losses = weights(whole), logged(whole, "loss")
    end(whole)
    with new_process():
        first = trainer(tmp_path / "rest", **options)
        first.add_callback(At("on_step_end", stop))
        first.train()
        end(first)
    with new_process():
        rest = trainer(tmp_path / "rest", **options)
        rest.train(resume_from_checkpoint=True)
        assert logged(rest, "loss") == losses
        assert_same_tensors(weights(rest), expected)
        end(rest)


def test_configuration_of_the_seeds_and_a_second_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # On a CPU it is refused, although torch computes it there.
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
    options = {"per_device_train_batch_size": 32, "learning_rate": 2e-5, "weight_decay": 0.01}
    options |= {"bf16": True, "bf16_full_eval": True}
    ours = trainer(tmp_path, **options, deepspeed=str(ROOT / "conf" / "zf_config.json"))
    ours.train()
    config = ours.deepspeed.optimizer.training.config
    assert (config.topk_ratio, config.update_interval) == (0.1, 4)
    (group,) = ours.optimizer.param_groups
    assert (group["weight_decay"], group["initial_lr"], group["eps"]) == (0.01, 2e-5, 1e-8)
    assert ours.model.lm_head.weight.dtype == torch.bfloat16
    first, before = weights(ours), ours.deepspeed.optimizer.training.parts.rank.arena
    with pytest.warns(UserWarning, match="moments and step count start at zero"):
        ours.train()
    # Its memory is freed, and reads as zeros.
    assert not before.master.any() and ours.deepspeed.optimizer.training.parts.rank.arena.master.any()
    assert any(not torch.equal(a, b) for a, b in zip(first, weights(ours), strict=True))
    end(ours)


def test_the_trainer_says_which_epoch_it_is(tmp_path: Path) -> None:
    keys = {**LATE, "select_strategy": "epoch", "select_interval": 2}
    ours = trainer(tmp_path, num_train_epochs=3, eval_strategy="no", deepspeed=configuration(keys))
    ours.train()
    assert ours.deepspeed.optimizer.training.parts.selector.state_dict()["next"] == 4  # after epochs 0 and 2
    shown = [p.detach().clone() for p in ours.model.parameters()]
    ours.accelerator.strategy.flush()
    assert_same_tensors(shown, list(ours.model.parameters()))
    end(ours)


def test_evaluation_before_and_training_behind_an_interrupt(tmp_path: Path) -> None:
    def interrupt(step: int, **_: Any) -> None:
        if step == 3:
            raise KeyboardInterrupt

    ours = trainer(tmp_path, deepspeed=configuration(LATE))
    before = ours.evaluate()["eval_loss"]
    ours.add_callback(At("on_pre_optimizer_step", interrupt))
    with pytest.raises(KeyboardInterrupt):
        ours.train()
    end(ours)
    # Not the weights of the beginning.
    assert ours.evaluate()["eval_loss"] != before
    end(ours)


def test_save_between_backward_and_step_is_made_behind_it(tmp_path: Path) -> None:
    """As of `enable_jit_checkpoint`."""

    def save(step: int, **_: Any) -> None:
        if step == 3:
            ours._save_checkpoint(ours.model_wrapped, trial=None)

    options = {"deepspeed": configuration(EXACT, stage=3), "eval_strategy": "no", "max_steps": 6}
    with new_process():
        expected = trainer(tmp_path, **options)
        expected.train()
        end(expected)
    ours = trainer(tmp_path / "saved", **options)
    ours.add_callback(At("on_pre_optimizer_step", save))
    ours.train()
    assert logged(ours, "loss") == logged(expected, "loss")
    assert [*(tmp_path / "saved").glob("checkpoint-*")] == [tmp_path / "saved" / "checkpoint-4"]
    end(ours)


SHORT = {"num_train_epochs": 1, "max_steps": 6, "eval_strategy": "no", "max_grad_norm": 0.5}


def groups(model: Any) -> Any:
    """An optimizer with rates of its own and a scheduler, which are not those of the arguments."""
    head = [p for name, p in model.named_parameters() if "lm_head" in name]
    rest = [p for name, p in model.named_parameters() if "lm_head" not in name]
    optimizer = AdamW([{"params": head, "lr": 2e-2}, {"params": rest, "weight_decay": 0.1}], lr=3e-3, betas=(0.8, 0.95))
    return {"optimizers": (optimizer, StepLR(optimizer, 2, 0.5))}


def drop(step: int, **given: Any) -> None:
    """Leaves out every second step, as the errors of refused gradients advise; `model.zero_grad()` in others."""
    if step % 2:
        given["optimizer" if step % 4 == 1 else "model"].zero_grad()


def test_given_things_train_as_in_the_plain_trainer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given, options = (
        lambda model: {**groups(model), "callbacks": [At("on_pre_optimizer_step", drop)]},
        {"gradient_accumulation_steps": 2},
    )
    with new_process():
        theirs = trainer(tmp_path, ours=False, given=given, **SHORT, **options)
        theirs.train()
    ours = trainer(tmp_path, given=given, **SHORT, **options, deepspeed=configuration(EXACT, stage=3))
    ours.train()
    assert logged(ours, "learning_rate") == logged(theirs, "learning_rate")
    torch.testing.assert_close(logged(ours, "loss"), logged(theirs, "loss"), rtol=0, atol=2e-5)
    end(ours)
    torch.testing.assert_close(dict(ours.model.state_dict()), dict(theirs.model.state_dict()), rtol=0, atol=2e-3)
    assert "mismatch" not in caplog.text


def block(name: str = "optimizer", kind: str = "AdamW", **params: Any) -> dict[str, Any]:
    return {"deepspeed": {**configuration(LATE), name: {"type": kind, "params": params}}}


BEST = {"save_strategy": "epoch", "eval_strategy": "epoch", "load_best_model_at_end": True}
ADAMW = "block `optimizer` .* must be AdamW's, of lr, betas, eps and weight_decay, without an optimizer"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"given": groups, **block()}, ADAMW),
        ({"optim": "adafactor", **block()}, ADAMW),
        (block(kind="Adam"), f"{ADAMW}.*'Adam'"),
        (block(amsgrad=True), f"{ADAMW}.*amsgrad"),
        (block("scheduler", "WarmupLR"), "no block `scheduler`: .*lr_scheduler_type"),
        ({"given": lambda model: {"optimizers": (SGD(model.parameters()), None)}}, "exactly one of torch.optim.AdamW"),
        ({"bf16_full_eval": True}, "bf16_full_eval must be False where bf16 is, got True"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(
    options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a CPU transformers refuses it.
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
    with pytest.raises(MisconfigurationException, match=message):
        trainer(tmp_path, **{**SHORT, **options}).train()


def test_refused_gradients_are_in_the_words_of_the_front(tmp_path: Path) -> None:
    def use(step: int, model: Any, **_: Any) -> None:
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        # Behind the clipping.
        torch.testing.assert_close(torch.nn.utils.get_total_norm(gradients), torch.tensor(SHORT["max_grad_norm"]))
        gradients[0].zero_()

    ours = trainer(tmp_path, given=lambda _: {"callbacks": [At("on_pre_optimizer_step", use)]}, **SHORT)
    with pytest.raises(
        MisconfigurationException, match="ZenFlowTrainer: .*zero_.* `on_pre_optimizer_step`.*max_grad_norm"
    ) as refused:
        ours.train()
    assert not re.search("fabric|gradient_clip_val|on_before_optimizer_step", str(refused.value))
    end(ours)


def test_best_model(tmp_path: Path) -> None:
    """The first one, so that training has gone on since. And a plain Trainer behind ours in the process, which is plain."""
    ours = trainer(tmp_path, **BEST, greater_is_better=True, deepspeed=configuration(LATE))
    ours.train()
    losses = logged(ours, "eval_loss")
    assert ours.state.best_metric == losses[0] > losses[-1]
    assert ours.evaluate()["eval_loss"] == pytest.approx(losses[0], abs=1e-6)
    assert "ACCELERATE_USE_DEEPSPEED" not in os.environ or os.environ["ACCELERATE_USE_DEEPSPEED"] == "false"
    ours.accelerator.end_training()
    assert not trainer(tmp_path, ours=False).is_deepspeed_enabled


@pytest.mark.parametrize("launcher", ["python", "torchrun"])
def test_reference_model(launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As TRL's trainers, which have DeepSpeed set up a model that is not trained, before the training; with torchrun's variables too."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    ranks = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for name, value in ranks.items() if launcher == "torchrun" else ():
        monkeypatch.setenv(name, str(value))
    ours, x = trainer(tmp_path, **SHORT), torch.arange(16, dtype=torch.int64)[None]
    with torch.no_grad():
        expected = tiny_llama()(x).logits
        reference = prepare_deepspeed(tiny_llama(), ours.accelerator)
    ours.train()
    with torch.no_grad():
        torch.testing.assert_close(reference(x).logits, expected)
        assert not torch.equal(ours.model(x).logits, expected)
    end(ours)


SNIPPETS = [
    snippet
    for document in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    for snippet in blocks(document, "python")
    if "TrainingArguments" in snippet or "lightning_zenflow.accelerate" in snippet
]


@pytest.mark.parametrize("snippet", SNIPPETS, ids=range(len(SNIPPETS)))
def test_snippets_of_the_documents(snippet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a model from a folder, as without network."""
    monkeypatch.chdir(tmp_path)
    is_loop, folder = "TrainingArguments" not in snippet, str(save_tiny_model(tmp_path / "llama", "llama"))
    model = Net() if is_loop else AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    before = [p.detach().clone() for p in model.parameters()]
    data = TensorDataset(torch.randn(32, 16, dtype=torch.float32), torch.zeros(32, dtype=torch.int64))
    names = {"model": model, "dataset": Tokens(), "loader": DataLoader(data, batch_size=4)}
    exec(snippet.replace("Qwen/Qwen3-1.7B", folder), names)
    assert any(not torch.equal(p, q.float()) for p, q in zip(before, names["model"].parameters(), strict=True))
    assert is_loop == (tmp_path / "state" / "pytorch_model" / "mp_rank_00_model_states.pt").is_file()


@pytest.mark.parametrize("has_configuration", [False, True])
def test_example_of_trl(has_configuration: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of `examples/sft.py`: with a configuration of DeepSpeed, and with `OffloadAdamW`."""
    monkeypatch.chdir(tmp_path)
    options = ["--max_steps=30", "--per_device_train_batch_size=8", "--logging_steps=10", "--disable_tqdm=True"]
    if has_configuration:
        Path("zero.json").write_text(json.dumps(configuration(LATE)))
        options.append("--deepspeed=zero.json")
    trainer = sft.main([*options, "--eval_strategy=no", "--warmup_steps=0"])
    losses = logged(trainer, "loss")
    trainer.accelerator.free_memory()
    assert losses[-1] < 0.8 * losses[0]
    assert (tmp_path / "sft_output" / "model.safetensors").is_file()
