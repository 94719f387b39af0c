"""State of single parameters, odd layouts and what checkpoints hold beside weights: on two ranks, and with moments in 16 and 8 bits."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
)
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from lightning.pytorch.callbacks import WeightAveraging
from test_training import compare_with_oracle
from torch import Tensor
from typing_extensions import override

from harness import Case, Run, run_here
from models import TestModule
from rank_processes import Runs, run_each, run_on_ranks
from same_bits import assert_is_adamw, assert_same_run, assert_same_tensors

KINDS = ("exp_avg", "exp_avg_sq")


def parameters_of(module: pl.LightningModule) -> list[Tensor]:
    """Trained ones, in the order of the parameter groups."""
    assert isinstance(module, TestModule)
    return [p for group in module.parameter_groups() for p in group]


def read(parameters: Sequence[Tensor]) -> list[list[Tensor]]:
    """[kind][parameter]"""
    moments = [[safe_get_full_optimizer_state(p, kind) for p in parameters] for kind in KINDS]
    return [[safe_get_full_fp32_param(p) for p in parameters], *moments]


class State(pl.Callback):
    """Writes what each rank reads to files in a folder: gradients of every step, the state after a step (counted from 1) and at the end."""

    def __init__(self, folder: Path, *, read_after: int) -> None:
        self.folder, self.read_after = folder, read_after
        self.gradients: list[list[Tensor]] = []

    def save(self, trainer: pl.Trainer, name: str, found: Any) -> None:
        torch.save(found, self.folder / f"{name}.{trainer.global_rank}.pt")

    @override
    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        self.gradients.append([safe_get_full_grad(p) for p in parameters_of(pl_module)])

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if trainer.global_step == self.read_after:
            self.save(trainer, "middle", read(parameters_of(pl_module)))

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.save(trainer, "end", read(parameters_of(pl_module)))
        self.save(trainer, "gradients", self.gradients)


def found(folder: Path, name: str, ranks: int) -> Any:
    """What rank 0 has read; the others have read the same."""
    first, *others = (torch.load(folder / f"{name}.{rank}.pt") for rank in range(ranks))
    for other in others:
        for ours, theirs in zip(other, first, strict=True):
            assert_same_tensors(ours, theirs, name)
    return first


def run(case: Case, ranks: int) -> Run:
    return run_here(case) if ranks == 1 else run_on_ranks({"case": case}, ranks=ranks)["case"][0]


NOTHING_LATE = {"update_interval": 1, "publish_lag": 0}
STATES: dict[str, Case] = {
    "S=4, d=1": Case(steps=7),
    "S=4, d=1, bf16 moments": Case(steps=7).with_keys(moments_dtype="bfloat16"),
    "S=1, d=0, int8 moments": Case(steps=7, **NOTHING_LATE, max_norm=0.5).with_keys(moments_dtype="int8"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", STATES)
def test_states_and_gradients_of_whole_parameters(name: str, ranks: int, tmp_path: Path) -> None:
    case = replace(STATES[name], topk_ratio=0.0, model_options={"shapes": ((31, 29), (53, 7), (37,), (1,))})
    case = replace(case, callbacks=(State(tmp_path, read_after=3),), flush_after=(3,))
    result = run(case, ranks)
    end, middle = found(tmp_path, "end", ranks), found(tmp_path, "middle", ranks)
    for kind, tensors in zip(("master", *KINDS), end, strict=True):
        assert_same_tensors(tensors, [x.float() for x in getattr(result, kind)], kind)
        assert all(x.dtype == torch.float32 for x in tensors)
    if "moments_dtype" in case.strategy_options:
        assert_is_adamw(case, result, world_size=ranks)
    # The state after three steps is that of a run of three steps.
    short = run(replace(case, steps=3, callbacks=()), ranks)
    for kind, tensors in zip(("master", *KINDS), middle, strict=True):
        assert_same_tensors(tensors, [x.float() for x in getattr(short, kind)], kind)
    _, wanted, _ = case.fixed_gradients(world_size=ranks)
    for ours, theirs in zip(found(tmp_path, "gradients", ranks), wanted, strict=True):
        assert_same_tensors(ours, theirs, "gradient")


ODD = Case(model="OddNet", steps=6, topk_ratio=0.3, update_interval=4, publish_lag=1)


def half_way(averaged: Tensor, present: Tensor, _: Any) -> Tensor:
    return torch.lerp(averaged, present, 0.5)


CLIPPED = replace(ODD, max_norm=0.1, accumulate=2)


@pytest.fixture(scope="module")
def odd_runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Runs]:
    """On two ranks, with averaged weights and without, and resumed in the middle; the checkpoint, and all runs."""
    path = tmp_path_factory.mktemp("odd") / "a"
    averaged = replace(
        ODD, update_interval=1, publish_lag=0, callbacks=(WeightAveraging(avg_fn=half_way),), checkpoint=str(path)
    ).with_keys(optimizer_in_backward=False)
    cases = {"late": ODD, "clipped": CLIPPED, "saved": replace(averaged, save_at=3), "resumed": averaged}
    return path, run_each(cases)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "case"), [("late", ODD), ("clipped", CLIPPED)])
def test_odd_layouts_begin_with_the_weights_of_the_first_rank_and_train_as_the_oracle(
    name: str, case: Case, odd_runs: tuple[Path, Runs]
) -> None:
    first, second = odd_runs[1][name]
    assert_same_tensors(first.weights, second.weights)
    compare_with_oracle(case, [first, second])


@pytest.mark.slow
def test_averaged_weights_and_further_names_are_in_a_checkpoint_of_two_ranks(
    odd_runs: tuple[Path, Runs],
) -> None:
    path, runs = odd_runs
    for saved, resumed in zip(runs["saved"], runs["resumed"], strict=True):
        assert len(resumed.losses) == 3
        # The callback shows the averaged weights at the end of both.
        assert_same_run(resumed, replace(saved, shown=saved.shown[3:], losses=saved.losses[3:]))
    (file,) = path.glob("checkpoint/mp_rank_00_model_states.pt")
    state = torch.load(file, weights_only=False)
    average = state["averaged_state_dict"]
    exported = get_fp32_state_dict_from_zero_checkpoint(path, tag="checkpoint")
    model = ODD.make_model()
    assert exported.keys() == average.keys() == model.state_dict().keys()
    assert {name: p.shape for name, p in exported.items()} == {name: p.shape for name, p in model.state_dict().items()}
    assert torch.equal(exported["same.weight"], exported["transposed.weight"])
    distance = math.dist(*(x["transposed.weight"].flatten().tolist() for x in (average, exported)))
    assert distance > 1e-4, "the average lags behind"
