"""`moments_dtype: bfloat16` and `int8`: the state has the bits of the oracle, whose moments are rounded once a window."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from deepspeed.utils import safe_get_full_optimizer_state
from torch import Tensor

from callbacks import At
from checkpoint_files import zero_state
from harness import UP_TO_TWO, Case, Run, optimizer_of, run_here
from lightning_zenflow.checkpoint.reader import SavedCheckpoint
from lightning_zenflow.core.schedule import blocks_wanted
from models import SHAPES, hyperparameters
from replay_reference import coded
from same_bits import assert_is_adamw, assert_same_tensors

SHORT = ("bfloat16", "int8")
CASE = Case(topk_ratio=0.0, steps=11, model_options={"shapes": SHAPES[:6]}, loop="direct")
"""The gradients do not depend on the weights. The last parameter of the model, which has none in every second step, is left out: its block
is then submitted at the end of the step, with another window."""


def case_of(s: int, d: int, **fields: Any) -> Case:
    return replace(CASE, update_interval=s, publish_lag=d, **fields)


NOT_FINITE = {**CASE.model_options, "not_finite": {(4, 0): math.nan, (6, 0): math.inf}}
CASES = {
    "S=2, d=0, columns on the device": case_of(2, 0, topk_ratio=0.3),
    "flushes, one behind": case_of(2, 0, flush_after=(3, 4, 8), max_norm=0.5),
    "not finite": case_of(1, 0, model_options=NOT_FINITE, max_norm=0.5),
    "freezing": case_of(1, 0, model_options={**CASE.model_options, "frozen_in": {0: (2, 4), 3: (3, 100)}}),
    "two threads": case_of(1, 0).with_keys(worker_cores=UP_TO_TWO),
    "slow first moments": case_of(
        2, 1, optimizer=replace(CASE.optimizer, given=[hyperparameters(lr=1e-2, beta1=b) for b in (0.999, 0.9)])
    ),
}


ALTERNATING = [
    pytest.param(name, dtype, marks=() if number % 2 == of_dtype else pytest.mark.slow)
    for number, name in enumerate(CASES)
    for of_dtype, dtype in enumerate(SHORT)
]
"""Each case with one type in the fast tests, with the other in the slow ones; what lies between them, tests/fuzz draws."""


@pytest.mark.parametrize(("name", "dtype"), ALTERNATING)
def test_the_bits_of_the_oracle(name: str, dtype: str) -> None:
    case = CASES[name].with_keys(moments_dtype=dtype)
    assert_is_adamw(case, run_here(case))


def find_moments(trainer: Any, found: list[Tensor]) -> None:
    """DeepSpeed's own way to the moments of a parameter after a flush; those that a checkpoint would hold are the arena's memory."""
    parameters = [p for group in trainer.lightning_module.parameter_groups() for p in group]
    found[:] = [safe_get_full_optimizer_state(p, "exp_avg_sq") for p in parameters]
    arena = optimizer_of(trainer).training.parts.rank.arena
    states = optimizer_of(trainer).state_dict()["base_optimizer_state"]["state"].values()
    for kind in ("exp_avg", "exp_avg_sq"):
        of_arena = getattr(arena, kind).array
        own = {state[kind].untyped_storage().data_ptr() for state in states}
        assert (own == {of_arena.untyped_storage().data_ptr()}) != (of_arena.dtype in (torch.uint8, torch.int8))


def assert_loaded(run: Run, saved: Run, scales: list[Tensor], dtype: str) -> None:
    """The moments of `run`, which is of this type, are those of `saved`, rounded: with int8 each square to one of its neighbours."""
    for ours_m, ours_v, m, v, of_scales in zip(
        run.exp_avg, run.exp_avg_sq, saved.exp_avg, saved.exp_avg_sq, scales, strict=True
    ):
        if dtype != "int8":
            assert torch.equal(ours_m, m.to(getattr(torch, dtype)).float())
            assert torch.equal(ours_v, v.to(getattr(torch, dtype)).float())
            continue
        m, v = m.float(), v.float()
        down, middle, up = torch.tensor([65535, 32768, 0])
        either, other = (coded(m, v, of_scales, down, noise)[1] for noise in (down, up))
        assert ((ours_v == either) | (ours_v == other)).all()
        # Beside the coded second moments, and in their root's last bits not by the same operations.
        either, other = (coded(m, ours_v, of_scales, noise, middle)[0] for noise in (down, up))
        assert (
            (((ours_m - either) / either).nan_to_num().abs() < 1e-4)
            .logical_or(((ours_m - other) / other).nan_to_num().abs() < 1e-4)
            .all()
        )


def test_checkpoints_hold_float32_and_runs_with_any_type_load_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that loads another type takes the exact state, or rounds it once to nearest.

    What is saved is the arena's memory, or a file's; torch's loading, which would convert all moments at once, is not called.
    """
    saved: dict[str, Run] = {}

    def refuse(*_: Any) -> NoReturn:
        raise AssertionError("torch's loading was called")

    monkeypatch.setattr(torch.optim.Optimizer, "load_state_dict", refuse)
    found, short, dtypes = list[Tensor](), replace(CASE, steps=5, loop="trainer"), ("float32", *SHORT)
    finds = At("on_train_end", partial(find_moments, found=found))
    for dtype in dtypes:
        case = replace(short, save_at=5, checkpoint=str(tmp_path / dtype)).with_keys(moments_dtype=dtype)
        saved[dtype] = run_here(case, callbacks=[finds])
        for state in zero_state(tmp_path / dtype)["base_optimizer_state"]["state"].values():
            assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.float32
        of_rank = SavedCheckpoint(tmp_path / dtype).optimizer_state(0)["base_optimizer_state"]["state"]
        in_file = torch.bfloat16 if dtype == "bfloat16" else torch.float32
        assert all(of_group["exp_avg"].dtype == in_file for of_group in of_rank.values())
        assert_same_tensors(found, [x.float() for x in saved[dtype].exp_avg_sq], "what DeepSpeed finds")
    n_blocks = blocks_wanted([CASE.update_interval], in_backward=False, numel=0)
    _, _, scales = CASE.make_oracle(world_size=1).places(n_blocks)
    for ours, theirs in (("float32", "int8"), ("bfloat16", "float32"), ("int8", "bfloat16"), ("int8", "int8")):
        run = run_here(replace(short, checkpoint=str(tmp_path / theirs)).with_keys(moments_dtype=ours))
        assert_same_tensors(run.master, saved[theirs].master, "master")
        assert_loaded(run, saved[theirs], scales, ours)
        for kind in ("exp_avg", "exp_avg_sq") if ours == theirs else ():
            assert_same_tensors(getattr(run, kind), getattr(saved[theirs], kind), kind)
