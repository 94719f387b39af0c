"""A run that is saved to a folder or a file, ended, loaded and continued is the run that went on: the same weights in every step, bit for
bit. Under another number of ranks, and from a file under the other stage: AdamW's state exactly, everything else anew.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial, reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict

from callbacks import At, save
from checkpoint_files import RANK_FILE, assert_continues, assert_saved, edit, in_order
from harness import APPROXIMATE, AUTO, EVERYTHING, Case, fit, optimizer_of, run_here
from lightning_zenflow import ZenFlowStrategy
from lightning_zenflow.checkpoint.single_file import FILE_KEY
from lightning_zenflow.core import schedule
from models import SHAPES, LinearLossModule
from rank_processes import run_each, run_on_ranks
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
IN_FILES = [name for name in CASES if name.startswith("file")]
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
    if name in IN_FILES:
        assert [file.name for file in tmp_path.iterdir()] == ["half.ckpt"] and path.is_file()
        # Without the user's own objects nothing but tensors, numbers and texts; each tensor has its own memory.
        content = torch.load(path, weights_only=True)
        (state,) = content["optimizer_states"]
        saved = [*content["state_dict"].values(), *(t for s in state["state"].values() for t in s.values())]
        assert all(t.untyped_storage().nbytes() == t.nbytes for t in saved)
    if name in ("file, bf16", "file, stage 3"):
        assert_saved(path, run_here(replace(case, steps=saved_at)), case)


def register_sparse(trainer: Any) -> None:
    trainer.lightning_module.register_buffer("graph", torch.eye(3).to_sparse())


SPARSE = At("setup", register_sparse)


def saves_weights(path: Path) -> At:
    """Saves weights only at the end of training."""
    return At("on_train_end", partial(save, path, weights_only=True))


def change_slices(path: Path, trainer: Any) -> None:
    """In the second rank's file, so that this rank alone finds another partition."""
    if trainer.global_rank == 1:
        file = f"checkpoint/bf16_{Path(RANK_FILE).name}".replace("rank_0", "rank_1", 1)
        edit(file, lambda content: content["optimizer_state_dict"]["zenflow"]["layout"].update(slices=None))(path)


def test_two_ranks(tmp_path: Path) -> None:
    path = tmp_path / "half.ckpt"
    case = replace(CASES["auto"], precision="bf16-true", accumulate=2, max_norm=1.0)
    cases = {"whole": saving(case, 12, path), "rest": resuming(case, path)}
    # Rank 1 has nothing of the last sub-group, a single element, and finds all its slices where they were.
    single = replace(EXACT, stage=3, model_options={"shapes": ((31, 29), (37,), (1,))})
    several, one = (single.with_keys(config={"zero_optimization": {"stage": 3, "sub_group_size": n}}) for n in (19, 99))
    # A folder by default; weights only are a file whatever the format.
    path, several = tmp_path / "sub-groups.ckpt", several.with_keys(checkpoint_format="auto")
    several = replace(several, callbacks=(saves_weights(tmp_path / "small.ckpt"),))
    cases |= {"sub-groups": saving(several, 7, path), "other sub-groups": resuming(one, path)}
    for stage in (2, 3):
        # The first one is frozen from the beginning, and gathered from its pieces.
        frozen = {"model_options": {"frozen_in": {0: (0, 100), 3: (3, 100), 2: (4, 9)}}}
        case, path = replace(EXACT, **frozen, stage=stage).with_keys(**FILE), tmp_path / f"{stage}.ckpt"
        cases[f"file, stage {stage}"] = replace(saving(case, 6, path), callbacks=(SPARSE,))
        ends = saves_weights(tmp_path / f"weights {stage}.ckpt")
        cases[f"file, stage {stage}, rest"] = replace(resuming(case, path), callbacks=(SPARSE, ends))
    # Behind the others, which the same file continues.
    cases["one starts over"] = replace(
        cases["rest"], callbacks=(At("setup", partial(change_slices, tmp_path / "half.ckpt")),)
    )
    runs = run_on_ranks(cases)
    assert_same_state(runs["other sub-groups"][0], runs["sub-groups"][0])
    for whole, rest, again in zip(runs["whole"], runs["rest"], runs["one starts over"], strict=True):
        assert_continues(rest, whole, 12)
        # The schedule that only the checkpoint has.
        assert rest.schedules[0] != again.schedules[0]
    assert (tmp_path / "sub-groups.ckpt" / "latest").is_file() and (tmp_path / "small.ckpt").is_file()
    for stage in (2, 3):
        name, case = f"file, stage {stage}", cases[f"file, stage {stage}"]
        for whole, rest in zip(runs[name], runs[f"{name}, rest"], strict=True):
            assert_continues(rest, whole, 6)
        entries = torch.load(tmp_path / f"{stage}.ckpt", weights_only=True)["state_dict"]
        assert torch.equal(entries["graph"].to_dense(), torch.eye(3))
        first, weight = next(case.make_model().named_parameters())
        assert torch.equal(entries[first], weight)
        end = torch.load(tmp_path / f"weights {stage}.ckpt", weights_only=True)
        assert "optimizer_states" not in end and FILE_KEY not in end
        assert_same_tensors(in_order(case, end["state_dict"]), runs[f"{name}, rest"][0].master)


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


@pytest.mark.parametrize(("precision", "moments"), [("32-true", "float32"), ("bf16-true", "bfloat16")])
def test_it_opens_in_plain_deepspeed_and_the_other_way_round(precision: str, moments: str, tmp_path: Path) -> None:
    """Master weights, moments and step counts as they were; the rest of the run is AdamW's, by whichever kernel."""
    case = replace(EXACT, precision=precision, max_norm=1.0).with_keys(moments_dtype=moments)
    of_ours, of_stock = tmp_path / "ours.ckpt", tmp_path / "theirs.ckpt"
    whole = run_here(saving(case, 6, of_ours))
    run_here(replace(saving(case, 6, of_stock), stock=True))
    # What DeepSpeed's own optimizer has when training begins: flat, of each parameter group.
    masters: list[Any] = []
    note = At(
        "on_train_start", lambda t: masters.extend(map(torch.clone, t.optimizers[0].single_partition_of_fp32_groups))
    )
    for resumed, stock, callbacks in ((of_ours, True, [note]), (of_stock, False, [])):
        rest = run_here(replace(resuming(case, resumed), stock=stock), callbacks=callbacks)
        assert len(rest.losses) == STEPS - 6
        # Where the others have no gradient, DeepSpeed's offload applies the one before again.
        ours, expected = ([w for w in run.weights if w.shape != SHAPES[6]] for run in (rest, whole))
        tolerance = {"rtol": 0.0, "atol": 2e-6} if precision == "32-true" else {"rtol": 1 / 128, "atol": 1e-4}
        torch.testing.assert_close(ours, expected, **tolerance)
    # The same bits in DeepSpeed's optimizer and in the file that its tool writes.
    exact = run_here(replace(case, steps=6)).master
    state = convert_zero_checkpoint_to_fp32_state_dict(of_ours, str(tmp_path / "weights.pt"))["state_dict"]
    assert_same_tensors(in_order(case, state), exact, "master")
    for group, flat in zip(case.make_model().parameter_groups(), masters, strict=True):
        ours_flat = torch.cat([exact.pop(0).flatten() for _ in group])
        # Without the padding.
        assert torch.equal(flat[: len(ours_flat)], ours_flat)


FEW_STEPS = 12
LATE = Case(**FREEZING, topk_ratio=0.3, max_norm=1.0).with_keys(**EVERYTHING)
ON_OTHER_RANKS = {
    "limit": LIMIT,
    "everything": LATE,
    "bf16": Case(topk_ratio=0.3, precision="bf16-true", strategy_options=EVERYTHING),
    "file": LATE.with_keys(**FILE),
    "file, stage 3": replace(LATE, stage=3).with_keys(**FILE),
}


@pytest.mark.parametrize(
    ("names", "before", "after"),
    [
        (["bf16", "file"], 1, 2),
        (["everything", "file", "file, stage 3"], 2, 1),
        *(
            pytest.param(list(ON_OTHER_RANKS), *ranks, marks=pytest.mark.slow)
            for ranks in [(1, 2), (2, 1), (2, 4), (4, 2)]
        ),
    ],
)
def test_other_ranks(names: Sequence[str], before: int, after: int, tmp_path: Path) -> None:
    """Saves after 5 steps; loads that without a step, and goes on with both numbers of ranks; files under the other stage."""
    saving: dict[str, Case] = {}
    loading: dict[str, Case] = {}
    for name in names:
        # The same data on every rank: then the gradient's mean does not depend on how many there are.
        case, path = ON_OTHER_RANKS[name], str(tmp_path / f"{name}.ckpt")
        case = replace(case, steps=FEW_STEPS, model_options={**case.model_options, "ranks_differ": False})
        other = replace(case, stage=5 - case.stage) if "file" in name else case
        saving[f"{name}, saved"] = replace(case, steps=5, save_at=5, checkpoint=path)
        saving[f"{name}, the same ranks"] = replace(case, checkpoint=path)
        loading[f"{name}, loaded"] = replace(other, steps=5, checkpoint=path)
        loading[f"{name}, other ranks"] = replace(other, checkpoint=path)
    runs = {**run_each(saving, ranks=before), **run_each(loading, ranks=after)}
    for name in names:
        (loaded, *_), (saved, *_) = runs[f"{name}, loaded"], runs[f"{name}, saved"]
        assert_same_state(loaded, saved)
        assert_same_tensors(loaded.weights, saved.weights)
        (other, *_), (same, *_) = runs[f"{name}, other ranks"], runs[f"{name}, the same ranks"]
        assert len(other.losses) == len(same.losses) == FEW_STEPS - 5
        torch.testing.assert_close(other.master, same.master, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("order", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_plain_deepspeed_on_two_ranks_in_both_of_its_orders(order: bool, tmp_path: Path) -> None:
    """A folder has the order in which plain DeepSpeed, with the same configuration, has the parameters; any order is read."""
    case = replace(LIMIT, steps=FEW_STEPS, model_options={"ranks_differ": False})
    config = {"zero_optimization": {"round_robin_gradients": order}}
    ours, stock = case.with_keys(config=config), replace(case, stock=True).with_keys(config=config)
    by_ours, by_stock = str(tmp_path / "ours.ckpt"), str(tmp_path / "stock.ckpt")
    cases = {
        "whole": replace(ours, save_at=5, checkpoint=by_ours),
        "stock from ours": replace(stock, checkpoint=by_ours),
        "stock": replace(stock, save_at=5, checkpoint=by_stock),
        # Whatever the configuration says.
        "ours from stock": replace(case, checkpoint=by_stock),
        "loaded ours": replace(case, steps=5, checkpoint=by_ours),
        "loaded stock": replace(case, steps=5, checkpoint=by_stock),
    }
    runs = run_on_ranks(cases)
    for name in ("ours", "stock"):
        saved = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / f"{name}.ckpt"))
        assert_same_tensors(runs[f"loaded {name}"][0].master, in_order(case, saved))
    for name in ("stock from ours", "stock", "ours from stock"):
        torch.testing.assert_close(runs[name][0].weights, runs["whole"][0].weights, rtol=0, atol=2e-6)
