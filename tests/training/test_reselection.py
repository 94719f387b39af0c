"""Columns change owners while training goes on, and nothing is reset, dropped or applied twice."""

import functools
from collections.abc import Container
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from typing_extensions import override

from direct_step import direct_step
from eventful_training import random_tensors
from harness import AUTO, Case, make_trainer, optimizer_of, run_here
from lightning_zenflow import ZenFlowStrategy
from networks import SmallNet
from same_bits import assert_is_adamw, assert_same_tensors

STEPS = 14


def case_of(**options: Any) -> Case:
    return Case(**{"steps": STEPS, "max_norm": 1.0, "topk_ratio": 0.3, **options})


@functools.cache
def exact_weights(steps: int) -> list[Tensor]:
    """AdamW's weights after some steps."""
    return case_of(steps=steps).adamw().weights


class OwnedEntries(pl.Callback):
    """After each step, compares every device-owned entry with AdamW's weight of that very step, and notes how many there are.

    Args:
        synchronous: steps behind which all weights are AdamW's.
    """

    def __init__(self, synchronous: Container[int] = ()) -> None:
        self._synchronous = synchronous
        self.numel: list[int] = []
        self.shows_exact: list[bool] = []

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        parts = optimizer_of(trainer).training.parts
        rank, ownership = parts.rank, parts.ownership
        partition = rank.partition
        exact = torch.zeros(partition.numel, dtype=torch.float64)
        for s in partition.slices:
            weights = exact_weights(trainer.global_step)[s.parameter]
            exact[s.begin : s.end] = weights.flatten()[s.start : s.start + s.numel]
        # Writing the owned entries over NaN shows which they are and what they hold.
        shown = torch.full((partition.numel,), torch.nan)
        before = [weights.clone() for weights in rank.weights]
        for weights in rank.weights:
            weights.fill_(torch.nan)
        if ownership.current is not None:
            ownership.current.write_weights()
        for begin, weights, old in zip(partition.group_begins, rank.weights, before, strict=True):
            shown[begin : begin + len(weights)] = weights
            weights.copy_(old)
        owned = ~torch.isnan(shown)
        assert int(owned.sum()) == ownership.numel
        self.numel.append(ownership.numel)
        self.shows_exact.append(parts.jobs.shows_exact)
        torch.testing.assert_close(shown[owned].double(), exact[owned], rtol=1e-6, atol=1e-6)
        if trainer.global_step in self._synchronous:
            for begin, weights in zip(partition.group_begins, before, strict=True):
                of_group = exact[begin : begin + len(weights)]
                torch.testing.assert_close(weights.double(), of_group, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("update_interval", "publish_lag", "select_interval"), [(4, 1, 3), (2, 0, 1), (1, 1, 2)])
def test_other_columns_in_turn(update_interval: int, publish_lag: int, select_interval: int) -> None:
    owned = OwnedEntries(synchronous=range(1, STEPS + 1, select_interval))
    case = case_of(update_interval=update_interval, publish_lag=publish_lag).with_keys(select_interval=select_interval)
    assert_is_adamw(case, run_here(case, callbacks=[owned]))
    assert min(owned.numel) > 0
    assert owned.shows_exact == [step % select_interval == 0 for step in range(STEPS)]


def test_columns_are_selected_and_released_with_the_lag() -> None:
    owned = OwnedEntries(synchronous=(4, 9, 13))
    case = case_of(schedules=((3, 4, 1), (8, 1, 0), (12, 2, 0)), strategy_options=AUTO)
    assert_is_adamw(case, run_here(case, callbacks=[owned]))
    is_owned = [numel > 0 for numel in owned.numel]
    # S and d change after steps 3, 8 and 12; the next step selects or releases.
    assert is_owned == [False] * 3 + [True] * 5 + [False] * 4 + [True] * 2
    assert owned.shows_exact == [True] * 4 + [False] * 4 + [True] * 5 + [False]


def test_the_strategy_says_which_epoch_it_is() -> None:
    trainer = make_trainer(ZenFlowStrategy(update_interval=2, select_strategy="epoch", select_interval=2), max_epochs=5)
    trainer.fit(SmallNet(length=3))
    assert trainer.global_step == 15
    assert optimizer_of(trainer).training.parts.selector.state_dict()["next"] == 6  # after epochs 0, 2 and 4


def test_the_state_of_selected_columns_counts_as_copied() -> None:
    """In the step that selects, which publishes all weights as well."""
    with direct_step([random_tensors(50)], update_interval=4, publish_lag=1, topk_ratio=0.3) as direct:
        direct.backward(random_tensors(0))
        direct.step.step()
        numel, telemetry = sum(s.numel for s in direct.parts.rank.partition.slices), direct.parts.rank.telemetry
        assert direct.parts.ownership.numel > 0
        assert telemetry.h2d_bytes == 4 * numel + 12 * direct.parts.ownership.numel


def test_a_change_of_columns_in_a_checkpoint_of_an_earlier_version(tmp_path: Path) -> None:
    """Which changed them block by block: here the first block has still to follow. All follow at once."""
    path, options = str(tmp_path / "saved.pt"), {"update_interval": 4, "publish_lag": 1, "topk_ratio": 0.3}
    with (
        direct_step([random_tensors(50)], **options) as first,
        direct_step([random_tensors(51)], **options) as resumed,
    ):
        for step in range(3):
            first.backward(random_tensors(step))
            first.step.step()
        first.save(path)
        states, shown, run, count = torch.load(path, weights_only=False)
        ownership = run["ownership"]
        ((number, columns),) = ownership["selections"].items()
        ownership["selections"] = {number: [None] * len(columns), number + 1: columns}
        ownership["of_block"] = [number] + [number + 1] * (len(ownership["of_block"]) - 1)
        ownership["wanted"] = [number + 1] * len(ownership["of_block"])
        run["planner"]["changing_until"] = 9
        torch.save((states, shown, run, count), path)
        resumed.load(path)
        assert resumed.parts.ownership.numel == first.parts.ownership.numel > 0
        for direct in (first, resumed):
            for step in range(3, 6):
                direct.backward(random_tensors(step))
                direct.step.step()
        assert_same_tensors(resumed.shown, first.shown)
        first.step.flush()
        resumed.step.flush()
        assert_same_tensors(resumed.state(), first.state())
