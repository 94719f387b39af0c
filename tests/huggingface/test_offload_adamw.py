"""`OffloadAdamW` with the Trainer of transformers and under Accelerate, without a front of this package."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from accelerate_loops import new_process
from lightning_zenflow import OffloadAdamW
from plain_loops import Who, groups_of, loss_of, make_model, make_optimizer
from tiny_trainers import logged, trainer


@pytest.fixture
def made() -> Iterator[list[Optimizer]]:
    """Optimizers that are closed at the end."""
    optimizers: list[Optimizer] = []
    yield optimizers
    for optimizer in optimizers:
        if isinstance(optimizer, OffloadAdamW):
            optimizer.close()


@pytest.mark.parametrize(
    "options", [{}, {"gradient_accumulation_steps": 3, "max_grad_norm": 0.5}], ids=["plain", "accumulated"]
)
def test_trainer(tmp_path: Path, made: list[Optimizer], options: dict[str, Any]) -> None:
    """As `optimizers=(OffloadAdamW(...), None)`; a checkpoint is continued with the same losses."""

    def train(who: Who, folder: str, resume: bool | str = False, **more: Any) -> Any:
        def given(model: Any) -> dict[str, Any]:
            made.append(make_optimizer(who, model.parameters()))
            return {"optimizers": (made[-1], None)}

        one = trainer(tmp_path / folder, ours=False, given=given, **options, **more)
        one.train(resume_from_checkpoint=resume)
        return one

    ours = train("ours", "ours", save_strategy="epoch")
    theirs = train("torch", "torch")
    torch.testing.assert_close(logged(ours, "loss"), logged(theirs, "loss"), rtol=3e-6, atol=0)
    torch.testing.assert_close(logged(ours, "grad_norm"), logged(theirs, "grad_norm"), rtol=3e-5, atol=0)
    first = min((tmp_path / "ours").glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))
    again = train("ours", "again", str(first))
    assert logged(again, "loss")[-3:] == logged(ours, "loss")[-3:]


def test_accelerate(tmp_path: Path, made: list[Optimizer]) -> None:
    """`accumulate`, with a step of fewer micro-batches, clipping, and a saved state."""

    def train(who: Who) -> list[float]:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
        bare = make_model(layers=2)
        made.append(make_optimizer(who, groups_of(bare)))
        # Eleven micro-batches: the last step has two.
        model, optimizer, numbers = accelerator.prepare(bare, made[-1], DataLoader(range(11), batch_size=1))
        losses = []
        for number in numbers:
            with accelerator.accumulate(model):
                loss = loss_of(model, int(number))
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(float(loss.detach()))
        accelerator.save_state(tmp_path / who)
        accelerator.load_state(tmp_path / who)
        return [*losses, float(loss_of(model, 1).detach())]

    with new_process():
        ours = train("ours")
    with new_process():
        theirs = train("torch")
    torch.testing.assert_close(ours, theirs, rtol=3e-6, atol=0)
