"""Checkpoints with older layouts. One with layout 2, written by commit 01ec44d, continues under the present code; see `version_2`."""

import logging
import shutil
from pathlib import Path

import pytest
import torch
from version_2 import DATA, RUNS, train

from checkpoint_files import edit
from lightning_zenflow.checkpoint.upgrade import upgrade
from lightning_zenflow.step.run_state import VERSION
from same_bits import assert_same_tensors

pytestmark = pytest.mark.usefixtures("no_worker_is_left")


@pytest.mark.parametrize("name", RUNS)
def test_it_continues_bit_for_bit(name: str) -> None:
    ours, theirs = train(name, resume=DATA / f"{name}.ckpt"), torch.load(DATA / f"{name}.result.pt")
    assert ours["hashes"] == theirs["hashes"]
    assert_same_tensors(list(ours["weights"].values()), list(theirs["weights"].values()))
    for group, (a, b) in enumerate(zip(ours["state"], theirs["state"], strict=True)):
        assert a.keys() == b.keys()
        assert_same_tensors(list(a.values()), list(b.values()), f"state of parameter group {group}")


def test_one_of_mean_gradients_begins_anew_from_adamws_state(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = shutil.copytree(DATA / "auto.ckpt", tmp_path / "a.ckpt")
    file = "checkpoint/zero_pp_rank_0_mp_rank_00_optim_states.pt"
    edit(file, lambda c: c["optimizer_state_dict"]["zenflow"]["layout"]["config"].update(deferred_update="accumulate"))(
        path
    )
    with caplog.at_level(logging.INFO):
        train("auto", resume=path)
    assert (
        "AdamW's exact state after 7 steps, but it was saved with deferred_update='accumulate', a key that no longer exists"
        in caplog.text
    )


@pytest.mark.parametrize(
    ("loss_scale", "factor", "clip"),
    [(1.0, 0.25, 0.25), (128.0, 2.0**-9, 0.25), (None, 2.0**-9, None), (None, None, None)],
)
def test_layout_3_has_the_loss_scale_in_the_factor(
    loss_scale: float | None, factor: float | None, clip: float | None
) -> None:
    """Where it changes and there are provisional updates, the one of the factor is not known: only AdamW's state is taken then."""
    provisional = None if factor is None else {"factor": torch.tensor(factor), "noise": ()}
    state = upgrade({"version": 3, "layout": {"config": {}}, "provisional": provisional}, loss_scale=loss_scale)
    assert state["version"] == (3 if clip is None and factor is not None else VERSION)
    if clip is not None:
        assert state["provisional"] == {"clip": torch.tensor(clip), "noise": ()}
