"""ZeRO stage 3: cases of other tests with pieces of every parameter, several sub-groups, and small parameters that stay gathered; and with
the parameters in host memory, in place: the bits of parameters on the device, whatever happens, in less memory.

All cases of a number of ranks run in the same processes, as in test_ranks.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from test_equivalence import ACCUMULATED, BF16, FLUSHES, case_of
from test_equivalence import STEP_BY_STEP as LATE
from test_foreign_state import State, assert_found
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from callbacks import At
from checkpoint_files import assert_continues
from harness import AUTO, EVERYTHING, Case, Run, fit, make_trainer, optimizer_of, weights_of
from lightning_zenflow import ZenFlowConfig, ZenFlowStrategy
from models import OptimizerOptions, TestModule, generator
from rank_processes import Runs, run_each, run_on_ranks
from same_bits import (
    assert_close_to_adamw,
    assert_is_adamw,
    assert_same_run,
    assert_same_state,
    assert_same_tensors,
    compare_with_oracle,
)
from worker_killer import KillsWorker


def in_stage_3(case: Case, **options: Any) -> Case:
    return replace(case, **{"stage": 3, "loop": "trainer", **options})


OF_ADAMW = {
    name: in_stage_3(case)
    for name, case in {
        "in host memory, clipped": case_of(BF16, 0, 1, 0, offload_parameters=True),
        "S=4, d=1, top-k": case_of("fp32", 0.05, 4, 1).with_keys(reduce_bucket_size=400),
        "everything": case_of(ACCUMULATED, 0.3, 4, 1, flush_after=(5,)).with_keys(**EVERYTHING),
        "changes of schedule": case_of(
            BF16, 0.3, 1, 0, schedules=((2, 4, 1), (4, 1, 0), (5, 2, 1), (8, 1, 1))
        ).with_keys(**AUTO, **EVERYTHING),
        "freezing": case_of("fp32", 0.3, 4, 1, model_options={"frozen_in": {0: (2, 4), 3: (3, 100)}}).with_keys(
            **EVERYTHING
        ),
        "int8 moments, tiny": case_of("fp32", 0, 1, 0, model_options={"shapes": ((2, 1), (1,))}).with_keys(
            moments_dtype="int8"
        ),
    }.items()
}
LATE_ONES = OF_ADAMW["S=4, d=1, top-k"]
STEP_BY_STEP = {name: in_stage_3(LATE[name]) for name in ("flushes", "in backward")}

FP16 = Case(precision="16-true", topk_ratio=0, update_interval=1, publish_lag=0, stage=3)
"""Its first steps overflow. The gradients of this model do not depend on the weights."""

# With another learning rate rounding grows: to 2e-6 within 20 steps at 1e-3.
SLOW = OptimizerOptions(lr=3e-4)
NETWORK = Case(model="TiedNet", optimizer=SLOW, steps=8, topk_ratio=0, update_interval=1, publish_lag=0, stage=3)

NOT_CLIPPED = {
    name: in_stage_3(case)
    for name, case in {
        "fp32": case_of("fp32", 0, 1, 0, **FLUSHES),
        "accumulated on the host": case_of(ACCUMULATED, 0, 1, 0, max_norm=None, steps=5).with_keys(
            accumulate_on="host"
        ),
        "freezing": case_of("fp32", 0, 1, 0, model_options={"frozen_in": {0: (2, 4), 3: (3, 100)}}),
    }.items()
}
SAME: dict[str, Case] = {
    **NOT_CLIPPED,
    "clipped, synchronous": replace(NETWORK, max_norm=0.3).with_keys(overlap_step=False),
    "fp16, synchronous": FP16.with_keys(overlap_step=False),
}
"""Whose bits do not depend on how the partition is cut into blocks, as predicted factors do, and bf16 moments of unused parameters."""
CLIPPED = replace(NETWORK, max_norm=0.3)
PLAIN = {
    "clipped, synchronous": SAME["clipped, synchronous"],
    "convolution, embedding": replace(NETWORK, model="SmallNet"),
}


UNWATCHED = "accumulated on the host"


def on_host(case: Case) -> Case:
    return replace(case, offload_parameters=True)


RESUMED = {
    "device to host": (NETWORK, True),
    "host to device": (on_host(NETWORK), False),
}
"""What is saved, and whether it goes on in host memory."""


def cases(folder: Path) -> dict[str, Case]:
    """All that run on several ranks, in the order in which they run."""
    found = {
        **OF_ADAMW,
        **STEP_BY_STEP,
        "fp16": FP16,
        "fp16, stage 2": replace(FP16, stage=2),
        "fabric": replace(LATE_ONES, loop="fabric"),
        "states": replace(LATE_ONES, callbacks=(State(folder, read_after=3),)),
        "states in the middle": replace(LATE_ONES, steps=3),
        "host, not watched": replace(on_host(SAME[UNWATCHED]), watched=False),
        "killed": replace(on_host(CLIPPED), callbacks=(KillsWorker(seed=3),)).with_keys(max_worker_restarts=1000),
        "clipped": on_host(CLIPPED),
    }
    for name, case in SAME.items():
        found |= {f"device: {name}": case, f"host: {name}": on_host(case)}
    for name, case in PLAIN.items():
        found |= {f"device: {name}": case, f"plain: {name}": replace(case, stock=True)}
    for name, (case, to) in RESUMED.items():
        saved = replace(case, save_at=5, checkpoint=str(folder / name))
        found |= {f"saved: {name}": saved, f"resumed: {name}": replace(saved, save_at=0, offload_parameters=to)}
    return found


@dataclass(frozen=True)
class Group:
    """The cases of a number of ranks."""

    ranks: int
    folder: Path
    """For what the cases write."""
    runs: Runs

    def __getitem__(self, name: str) -> list[Run]:
        return self.runs[name]


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.slow), 2], ids=lambda n: f"ranks{n}")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Group:
    folder = tmp_path_factory.mktemp(f"ranks{request.param}")
    return Group(request.param, folder, run_each(cases(folder), ranks=request.param))


@pytest.mark.parametrize("name", OF_ADAMW)
def test_the_state_is_adamws_to_the_bit(name: str, runs: Group) -> None:
    assert_is_adamw(OF_ADAMW[name], *runs[name])


@pytest.mark.parametrize("name", STEP_BY_STEP)
def test_every_step_is_the_oracles(name: str, runs: Group) -> None:
    compare_with_oracle(STEP_BY_STEP[name], runs[name])


@pytest.mark.parametrize("name", PLAIN)
def test_weights_are_those_of_plain_zero_3(name: str, runs: Group) -> None:
    for ours, plain in zip(runs[f"device: {name}"], runs[f"plain: {name}"], strict=True):
        torch.testing.assert_close(ours.weights, plain.weights, rtol=0, atol=2e-6)
        torch.testing.assert_close(ours.losses, plain.losses, rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_has_the_same_bits(name: str, runs: Group) -> None:
    for saved, resumed in zip(runs[f"saved: {name}"], runs[f"resumed: {name}"], strict=True):
        assert_continues(resumed, saved, 5)


@pytest.mark.parametrize("name", SAME)
def test_the_bits_of_parameters_on_the_device(name: str, runs: Group) -> None:
    for ours, theirs in zip(runs[f"host: {name}"], runs[f"device: {name}"], strict=True):
        assert_same_run(ours, theirs)
        assert (ours.skipped > 0) == ("fp16" in name)


@pytest.mark.parametrize("name", NOT_CLIPPED)
def test_every_forward_pass_sees_adamws_weights(name: str, runs: Group) -> None:
    assert_is_adamw(NOT_CLIPPED[name], *runs[f"host: {name}"], shown=True)


def test_nothing_but_the_model_reads_the_weights(runs: Group) -> None:
    """So the worker's answers are awaited where the model's layers are fetched."""
    for ours, theirs in zip(runs["host, not watched"], runs[f"device: {UNWATCHED}"], strict=True):
        assert_same_run(ours, replace(theirs, shown=[]))


def test_every_forward_pass_sees_the_true_clip_factor(runs: Group) -> None:
    """Although blocks are submitted in backward, and workers die."""
    for name in ("clipped", "killed"):
        for ours, theirs in zip(runs[name], runs["device: clipped, synchronous"], strict=True):
            assert_same_run(ours, theirs)


class Sharded(TestModule):
    """Layers that are divided over the ranks as they are made, so that no rank has ever the whole model."""

    lr = 3e-4

    @override
    def configure_model(self) -> None:
        # Lightning asks again before each run.
        if hasattr(self, "layers"):
            return
        torch.manual_seed(7)
        self.layers = nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 3, bias=False))

    @override
    def loss(self, step: int, micro: int, rank: int) -> Tensor:
        x = torch.randn(4, 24, generator=generator(9, step))
        return functional.cross_entropy(self.layers(x), x[:, :3].argmax(1))


def test_fp16_with_a_dynamic_loss_scale_has_the_state_of_stage_2(runs: Group) -> None:
    for ours, theirs in zip(runs["fp16"], runs["fp16, stage 2"], strict=True):
        assert_same_state(ours, theirs)
        assert ours.skipped > 0


def test_fabric_gives_the_same_bits(runs: Group) -> None:
    for ours, theirs in zip(runs["fabric"], runs["S=4, d=1, top-k"], strict=True):
        assert_same_run(ours, theirs)


def test_states_and_gradients_of_whole_parameters(runs: Group) -> None:
    assert_found(LATE_ONES, runs["states"], runs["states in the middle"][0], runs.folder)


@pytest.mark.slow
def test_four_ranks() -> None:
    """More than one piece of a parameter may be padding."""
    plain, tiny = PLAIN["convolution, embedding"], OF_ADAMW["int8 moments, tiny"].with_keys(moments_dtype="float32")
    cases = {"top-k": LATE_ONES, "tiny": tiny}
    runs = run_on_ranks({**cases, "ours": plain, "plain": replace(plain, stock=True)}, ranks=4)
    for name, case in cases.items():
        # To rounding: four gradients are added in another order than the oracle's.
        for run in runs[name]:
            assert_close_to_adamw(run, case.adamw(world_size=4))
    torch.testing.assert_close(runs["ours"][0].weights, runs["plain"][0].weights, rtol=0, atol=2e-6)


def assert_in_place(trainer: pl.Trainer) -> None:
    """Weights are in the arena in a fit."""
    optimizer: Any = optimizer_of(trainer)
    pieces = [p.ds_tensor for p in optimizer.module.parameters()]
    places = {t.untyped_storage().data_ptr() for t in (*pieces, *optimizer.fp16_partitioned_groups_flat)}
    assert places == {optimizer.training.parts.rank.arena.publish.untyped_storage().data_ptr()}
    assert optimizer.param_groups_fp16_flat_cpu_memory == []
    assert optimizer.training.telemetry.h2d_bytes == 0


def test_a_model_that_is_made_in_pieces(tmp_path: Path) -> None:
    """Its weights outlive the training, are saved, validated and tested; those in host memory have the same bits."""
    results, linear, file = [], torch.nn.functional.linear, tmp_path / "a.ckpt"
    limits = {"max_epochs": 2, "val_check_interval": 3, "limit_val_batches": 2, "limit_test_batches": 3}
    for case in (NETWORK, on_host(NETWORK), replace(NETWORK, stock=True)):
        model = Sharded(length=10)
        callbacks = [At("on_train_batch_end", assert_in_place)] if case.offload_parameters else []
        trainer = fit(model, case.make_strategy(), steps=-1, callbacks=callbacks, **limits)
        assert torch.nn.functional.linear is linear or case.stock
        if case is NETWORK:
            trainer.save_checkpoint(file)
        weights = weights_of(model)
        losses = trainer.test(model, verbose=False)
        assert_same_tensors(weights_of(model), weights)
        results.append((losses, weights))
    ours, in_host_memory, (_, plain) = results
    assert in_host_memory[0] == ours[0]
    assert_same_tensors(in_host_memory[1], ours[1])
    torch.testing.assert_close(ours[1], plain, rtol=0, atol=2e-6)
    evaluated, resumed = Sharded(length=10), Sharded(length=10)
    make_trainer(NETWORK.make_strategy(), limit_test_batches=1).test(evaluated, ckpt_path=file, verbose=False)
    fit(resumed, NETWORK.make_strategy(), steps=-1, max_epochs=2, resume=file)
    for model in (evaluated, resumed):
        assert_same_tensors(weights_of(model), ours[1])


def test_a_deepspeed_json_is_enough() -> None:
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu", "pin_memory": True}}
    by_config = {"zero_optimization": {**zero, "zenflow": {"update_interval": "auto"}}}
    for strategy in (
        ZenFlowStrategy(stage=3, offload_parameters=True),
        ZenFlowStrategy(by_config),
        ZenFlowStrategy({"zero_optimization": {"stage": 3, "cpu_offload_param": True}}),
    ):
        assert strategy.zenflow_config.is_immediate
        assert strategy.config["zero_optimization"]["offload_param"]["device"] == "cpu"
    given = ZenFlowConfig(worker_cores=1)
    assert ZenFlowStrategy(given, stage=3, offload_parameters=True).zenflow_config.worker_cores == 1
    with pytest.raises(ValueError, match="publish_lag must be 0 or 'auto' where parameters are in host memory, got 1"):
        ZenFlowStrategy(stage=3, offload_parameters=True, publish_lag=1)
