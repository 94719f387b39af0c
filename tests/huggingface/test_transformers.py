"""`ZenFlowTrainer` beside the Trainer of transformers with torch's AdamW: losses, checkpoints, configurations; the recipe's snippets."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from transformers import (
    TrainerCallback,
)

import sft
from accelerate_loops import EXACT, LATE, Net, new_process
from lightning_zenflow.deepspeed.users_module import is_in_pieces
from same_bits import assert_same_tensors
from tiny_trainers import Tokens, configuration, logged, tiny_llama, trainer

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    with new_process():
        yield


def weights(of: Any) -> list[Tensor]:
    return [value.clone() for value in of.accelerator.get_state_dict(of.model_wrapped).values()]


def end(of: Any) -> None:
    of.accelerator.free_memory()


@pytest.mark.parametrize(
    ("stage", "options"),
    [
        (None, {"max_grad_norm": 0.0, "weight_decay": 0.1, "only_matrices": True}),
        (2, {"max_grad_norm": 0.5, "gradient_accumulation_steps": 3}),
        (3, {"max_grad_norm": 0.5}),
    ],
    ids=["no configuration", "stage 2, clipped and accumulated", "stage 3, clipped"],
)
def test_losses_are_adamws(
    stage: int | None, options: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with new_process():
        theirs = trainer(tmp_path, ours=False, **options)
        theirs.train()
    of_deepspeed = {} if stage is None else {"deepspeed": configuration(EXACT, stage=stage)}
    ours = trainer(tmp_path, **options, **of_deepspeed)
    ours.train()
    for name, tolerance in {"loss": 2e-5, "grad_norm": 2e-4, "eval_loss": 1e-4}.items():
        torch.testing.assert_close(logged(ours, name), logged(theirs, name), rtol=0, atol=tolerance)
    assert len(logged(ours, "zenflow/stall/device_percent")) == len(logged(ours, "loss"))
    # A Trainer that is done has the exact weights in its model.
    x = Tokens(2).texts
    with torch.no_grad():
        torch.testing.assert_close(ours.model(x).logits, theirs.model(x).logits, rtol=0, atol=2e-3)
    end(ours)
    # The summary, once.
    assert len([record for record in caplog.records if " steps, median " in record.getMessage()]) == 1


class Stop(TrainerCallback):
    """Stops training after a step, as a time limit does."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step == self.step


@pytest.mark.parametrize("keys", [EXACT, LATE], ids=["exact", "late"])
def test_resumed_run_has_the_same_bits(keys: dict[str, Any], tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 5, "eval_strategy": "no", "deepspeed": configuration(keys)}
    whole = trainer(tmp_path / "whole", **options)
    whole.train()
    expected, losses = weights(whole), logged(whole, "loss")
    end(whole)
    with new_process():
        first = trainer(tmp_path / "rest", **options)
        first.add_callback(Stop(5))
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


class Interrupt(TrainerCallback):
    """Ends a step between backward and update, as a user at the keyboard may."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 3:
            raise KeyboardInterrupt


class SaveBeforeStep(TrainerCallback):
    """Saves between backward and update, as `enable_jit_checkpoint` does: behind the update, that is."""

    trainer: Any

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 3:
            self.trainer._save_checkpoint(self.trainer.model_wrapped, trial=None)


def test_evaluation_before_and_training_behind_an_interrupt(tmp_path: Path) -> None:
    expected = trainer(tmp_path, deepspeed=configuration(EXACT))
    before = expected.evaluate()["eval_loss"]
    expected.train()
    losses = logged(expected, "loss")
    end(expected)
    with new_process():
        ours = trainer(tmp_path, deepspeed=configuration(LATE))
        ours.add_callback(Interrupt())
        with pytest.raises(KeyboardInterrupt):
            ours.train()
        end(ours)
        with torch.no_grad():
            # Not the weights of the beginning.
            assert ours.evaluate()["eval_loss"] != before
    with new_process():
        ours = trainer(tmp_path / "saved", deepspeed=configuration(EXACT))
        saves = SaveBeforeStep()
        saves.trainer = ours
        ours.add_callback(saves)
        ours.train()
        assert logged(ours, "loss") == losses
        assert [*(tmp_path / "saved").glob("checkpoint-*")] == [tmp_path / "saved" / "checkpoint-4"]
        end(ours)


def test_evaluation_in_pieces_before_a_training(tmp_path: Path) -> None:
    with new_process():
        expected = trainer(tmp_path, ours=False).evaluate()["eval_loss"]
    ours = trainer(tmp_path, deepspeed=configuration(EXACT, stage=3))
    assert ours.evaluate()["eval_loss"] == pytest.approx(expected, abs=1e-6)
    assert is_in_pieces(ours.model)
    end(ours)


RECIPES = ROOT / "docs" / "recipes.md"


def snippet(text: str) -> str:
    """The block of the recipe that has a text."""
    (found,) = (block for block in RECIPES.read_text().split("```python\n")[1:] if text in block.partition("```")[0])
    return found.partition("```")[0]


def test_loop_under_accelerate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = TensorDataset(torch.randn(32, 16, dtype=torch.float32), torch.zeros(32, dtype=torch.int64))
    names = {"model": Net(), "loader": DataLoader(data, batch_size=4)}
    before = Net()
    with new_process():
        exec(snippet("lightning_zenflow.accelerate"), names)
    after = names["accelerator"].unwrap_model(names["model"])
    assert any(not torch.equal(p, q) for p, q in zip(before.parameters(), after.parameters(), strict=True))
    assert (tmp_path / "state" / "pytorch_model" / "mp_rank_00_model_states.pt").is_file()


def test_trainer_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model, before = tiny_llama(), tiny_llama()
    with new_process():
        exec(snippet("lightning_zenflow.transformers"), {"model": model, "dataset": Tokens()})
    assert any(not torch.equal(p, q) for p, q in zip(before.parameters(), model.parameters(), strict=True))


def test_example_of_trl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of `examples/sft.py`."""
    monkeypatch.chdir(tmp_path)
    options = ["--max_steps=30", "--per_device_train_batch_size=8", "--logging_steps=10", "--disable_tqdm=True"]
    with new_process():
        trainer = sft.main([*options, "--eval_strategy=no", "--warmup_steps=0"])
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        trainer.accelerator.free_memory()
    assert losses[-1] < 0.8 * losses[0]
    assert (tmp_path / "sft_output" / "model.safetensors").is_file()
