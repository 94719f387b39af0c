"""`OffloadAdamW` under Lightning's own strategy and its Fabric: clipping, accumulation, checkpoints, without a line for them."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lightning_loops import fit
from lightning_zenflow import OffloadAdamW
from plain_loops import Who, groups_of, loss_of, make_model, make_optimizer


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_clip_val": 1.0}, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.5}],
    ids=["plain", "clipped", "accumulated"],
)
def test_trainer(tmp_path: Path, options: dict[str, Any]) -> None:
    ours, theirs = (fit(who, tmp_path, **options) for who in ("ours", "torch"))
    torch.testing.assert_close(ours, theirs, rtol=3e-6, atol=0)


@pytest.mark.parametrize("second", ["ours", "torch"])
def test_checkpoints(tmp_path: Path, second: Who) -> None:
    """A file of ours is continued with equal bits, and by torch's AdamW."""
    whole = fit("ours", tmp_path / "whole")
    fit("ours", tmp_path / "first", epochs=1)
    (file,) = (tmp_path / "first").rglob("*.ckpt")
    rest = fit(second, tmp_path / "second", ckpt=file, num_sanity_val_steps=0)
    expected = whole[-len(rest) :]
    if second == "ours":
        assert rest == expected
    torch.testing.assert_close(rest, expected, rtol=3e-6, atol=0)


def test_fabric(tmp_path: Path) -> None:
    losses, states = [], []
    for who in ("ours", "torch"):
        fabric = L.Fabric(accelerator="cpu", devices=1)
        bare = make_model(layers=2)
        model, optimizer = fabric.setup(bare, make_optimizer(who, groups_of(bare)))
        for number in range(6):
            losses.append(loss_of(model, number))
            fabric.backward(losses[-1])
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
        fabric.save(tmp_path / who, {"model": model, "optimizer": optimizer})
        states.append(torch.load(tmp_path / who)["optimizer"]["state"])
        if isinstance(optimizer.optimizer, OffloadAdamW):
            optimizer.optimizer.close()
    torch.testing.assert_close(losses[:6], losses[6:], rtol=3e-6, atol=0)
    torch.testing.assert_close(*states, rtol=1e-4, atol=1e-6)
