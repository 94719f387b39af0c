"""A run that is saved to a folder or a file, ended, loaded and continued is the run that went on: the same weights in every step, bit for
bit. With another configuration: AdamW's state exactly, everything else anew. Other ranks and stages: test_readers.
"""

import logging
from dataclasses import replace
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint_files import RANK_FILE, assert_continues, assert_saved, edit
from harness import APPROXIMATE, AUTO, EVERYTHING, Case, fit, optimizer_of, run_here
from lightning_zenflow import ZenFlowStrategy
from lightning_zenflow.core import schedule
from models import LinearLossModule
from same_bits import assert_same_state, assert_same_tensors

FREEZING: dict[str, Any] = {
    "model": "LinearLossModule",
    # One parameter stays frozen after every save, one is unfrozen between two of them.
    "model_options": {"frozen_in": {0: (3, 100), 3: (0, 100), 2: (4, 9)}},
}
BFLOAT16 = {"reduce_bucket_size": 200, "moments_dtype": "bfloat16"}
FILE = {"checkpoint_format": "lightning"}
LIMIT = Case(topk_ratio=0.0, update_interval=1, publish_lag=0, model="SmallNet")
"""The settings at which training is AdamW's, so that only the order of sums depends on the number of ranks."""
CASES = {
    "random selection, not finite": Case(
        topk_ratio=0.3,
        strategy_options=EVERYTHING,
        model_options={"not_finite": {(3, 0): float("nan")}},
    ),
    "bf16, accumulated, clipped, in warm-up": Case(
        topk_ratio=0.3, warm_up=9, precision="bf16-true", accumulate=2, max_norm=1.0, strategy_options=EVERYTHING
    ),
    "nothing on the device": Case(topk_ratio=0.0, strategy_options=APPROXIMATE),
    "frozen": Case(**FREEZING, topk_ratio=0.3, strategy_options=EVERYTHING),
    "in backward": Case(
        **FREEZING, update_interval=1, publish_lag=0, max_norm=0.5, strategy_options={"reduce_bucket_size": 200}
    ),
    "bfloat16 moments": Case(
        model="SmallNet", topk_ratio=0.3, update_interval=1, publish_lag=0, max_norm=0.5, strategy_options=BFLOAT16
    ),
    "int8 moments": Case(topk_ratio=0.3, max_norm=0.5, strategy_options={**EVERYTHING, "moments_dtype": "int8"}),
    # The change comes before the save, so the resumed run has it from the checkpoint only.
    "auto": Case(topk_ratio=0.3, strategy_options={**EVERYTHING, **AUTO}, schedules=((1, 2, 1),)),
    "fabric": replace(LIMIT, topk_ratio=0.3, max_norm=0.1, accumulate=2, loop="fabric"),
    "fabric, stage 3": Case(model="SmallNet", stage=3, max_norm=0.1, accumulate=2, loop="fabric").with_keys(
        **EVERYTHING
    ),
    "file": LIMIT.with_keys(**FILE),
    "file, bf16": Case(topk_ratio=0.3, precision="bf16-true", max_norm=1.0, accumulate=2).with_keys(
        **FILE, **EVERYTHING, moments_dtype="bfloat16"
    ),
    "file, fp16": Case(topk_ratio=0.3, precision="16-true").with_keys(**FILE),
    "file, int8": Case(topk_ratio=0.3).with_keys(**FILE, **EVERYTHING, moments_dtype="int8"),
    "file, stage 3": Case(**FREEZING, topk_ratio=0.3, stage=3, precision="bf16-true").with_keys(**FILE, **EVERYTHING),
    "file, parameters on the host": replace(LIMIT, stage=3, offload_parameters=True).with_keys(**FILE),
}
EXACT = Case(topk_ratio=0.3, strategy_options=EVERYTHING)
STEPS = 14


def saving(case: Case, step: int, path: Path) -> Case:
    return replace(case, steps=STEPS, save_at=step, checkpoint=str(path))


def resuming(case: Case, path: Path) -> Case:
    return replace(case, steps=STEPS, checkpoint=str(path), schedules=((STEPS + 1, 1, 1),) if case.schedules else ())


@pytest.mark.parametrize("saved_at", [6, *(pytest.param(step, marks=pytest.mark.slow) for step in (1, 11))])
@pytest.mark.parametrize("name", CASES)
def test_a_resumed_run_continues_bit_for_bit(name: str, saved_at: int, tmp_path: Path) -> None:
    case, path = CASES[name], tmp_path / "half.ckpt"
    whole, rest = run_here(saving(case, saved_at, path)), run_here(resuming(case, path))
    assert_continues(rest, whole, saved_at)
    if name.startswith("file"):
        assert [file.name for file in tmp_path.iterdir()] == ["half.ckpt"] and path.is_file()
        # Without the user's own objects nothing but tensors, numbers and texts; each tensor has its own memory.
        content = torch.load(path, weights_only=True)
        (state,) = content["optimizer_states"]
        saved = [*content["state_dict"].values(), *(t for s in state["state"].values() for t in s.values())]
        assert all(t.untyped_storage().nbytes() == t.nbytes for t in saved)
    if name in ("file, bf16", "file, stage 3"):
        assert_saved(path, run_here(replace(case, steps=saved_at)), case)


def test_another_configuration_starts_over_from_adamws_state(tmp_path: Path) -> None:
    """In which each parameter has its own step count."""
    case = replace(EXACT, **FREEZING)
    whole = run_here(saving(case, 6, path := tmp_path / "half.ckpt"))
    # Gradients do not depend on weights, so the exact state is the same whatever the configuration.
    assert_same_state(run_here(resuming(replace(case, topk_ratio=0.1, update_interval=2), path)), whole)
    # Of a former release, with a key that no longer exists.
    of_config = "optimizer_state_dict", "zenflow", "layout", "config"
    edit(RANK_FILE, lambda content: reduce(getitem, of_config, content).update(tail="auto"))(path)
    assert_same_state(run_here(resuming(case, path)), whole)


def test_keys_without_effect_may_change(tmp_path: Path) -> None:
    """What the next clip factor is predicted from stays."""
    case = Case(model="SmallNet", topk_ratio=0.1, update_interval=1, publish_lag=0, max_norm=0.5)
    whole = run_here(saving(case, 6, path := tmp_path / "half.ckpt"))
    others = {"select_strategy": "epoch", "select_interval": 3, "max_update_interval": 4, "provisional_scale": 0.5}
    again = run_here(resuming(replace(case, topk_ratio=0.3), path).with_keys(**others))
    assert_continues(again, whole, 6)


def test_other_blocks_start_over_from_adamws_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A former release had more in small models, and weights in place have others than copies."""
    case, path = replace(EXACT, update_interval=1, publish_lag=0), tmp_path / "half.ckpt"
    with monkeypatch.context() as patch:
        patch.setattr(schedule, "_FEW_BLOCKS", 16)
        whole = run_here(saving(case, 6, path))
    with caplog.at_level(logging.INFO):
        assert_same_state(run_here(resuming(case, path)), whole)
    assert "its partition is another" in caplog.text


@pytest.mark.parametrize(
    ("format_", "first", "then"),
    [
        ("deepspeed", ("32-true", None), ("16-true", None)),
        ("deepspeed", ("16-true", None), ("32-true", None)),
        *((format_, ("16-true", 8.0), ("16-true", 16.0)) for format_ in ("deepspeed", "lightning")),
    ],
)
def test_loss_scales_are_those_of_precision_and_configuration(
    format_: Any, first: Any, then: Any, tmp_path: Path
) -> None:
    path = tmp_path / "a.ckpt"
    for (precision, scale), resume in ((first, None), (then, path)):
        strategy = ZenFlowStrategy(checkpoint_format=format_, loss_scale=scale or 0)
        trainer = fit(
            LinearLossModule(), strategy, steps=2 if resume is None else 3, resume=resume, precision=precision
        )
        scaler = optimizer_of(trainer).loss_scaler
        assert scaler.dynamic == (precision == "16-true" and scale is None)
        assert scale is None or scaler.loss_scale == scale
        trainer.save_checkpoint(path)


def test_other_frozen_parameters_start_over_from_adamws_state(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A parameter that is trained again: its moments went on nowhere, all others are those of the run that saved."""
    case, path = CASES["frozen"], tmp_path / "half.ckpt"
    whole = run_here(saving(case, 6, path))
    with caplog.at_level(logging.INFO):
        rest = run_here(replace(resuming(case, path), model_options={"frozen_in": {2: (4, 9), 3: (0, 100)}}))
    assert "parameters were frozen or unfrozen before step 7: the selection of columns starts again" in caplog.text
    # Not the first, which is frozen in one of them only.
    assert_same_tensors(rest.master[1:], whole.master[1:])
    assert not torch.equal(rest.master[0], whole.master[0])
