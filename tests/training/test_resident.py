"""Blocks whose state is on the device (`offload_ratio`): the exact state has the same bits whoever owns what, and so has the trajectory
where no weight is late and all factors are true.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param, safe_set_full_optimizer_state
from typing_extensions import override

from callbacks import At
from direct_step import direct_step
from eventful_training import random_tensors
from harness import AUTO, EVERYTHING, Case, Run, fit, optimizer_of, run_here
from lightning_zenflow import ZenFlowStrategy
from lightning_zenflow.core.device import HostRuntime
from lightning_zenflow.core.errors import MisconfigurationException
from lightning_zenflow.core.partition import Slice, build_partition
from lightning_zenflow.offload.owner_moves import MemoryWatch
from lightning_zenflow.offload.resident import last_arrivals
from lightning_zenflow.offload.step import ZenFlowStep
from networks import Perceptron
from rank_processes import run_on_ranks
from recorded_device.watch import recorded_device
from same_bits import assert_as_promised, assert_is_adamw, assert_same_run, assert_same_state, assert_same_tensors

NETWORK = Case(model="SmallNet", update_interval=1, publish_lag=0, steps=6, loop="direct")
LATE = Case(steps=11, topk_ratio=0.3, max_norm=1.0, precision="bf16-true", loop="direct")
FREEZING = replace(NETWORK, model="LinearLossModule", model_options={"frozen_in": {0: (3, 6), 2: (0, 5), 3: (4, 9)}})
CASES = {
    "nothing clips": NETWORK,
    "bf16": replace(NETWORK, precision="bf16-true"),
    "true factors": replace(NETWORK, max_norm=0.5).with_keys(clip_prediction=False),
    "sums in slots, flushes": replace(NETWORK, accumulate=3, flush_after=(2, 3)).with_keys(accumulate_on="host"),
    "freezing": replace(FREEZING, steps=9),
    "Trainer": replace(NETWORK, loop="trainer", flush_after=(3,)),
    "stage 3": replace(NETWORK, loop="trainer", stage=3),
    "S=4, d=1, everything": replace(LATE, flush_after=(5,)).with_keys(**EVERYTHING),
    "S=1, d=0, predicted factors": replace(LATE, update_interval=1, publish_lag=0),
    "S=7, d=1": replace(NETWORK, topk_ratio=0.5, update_interval=7, publish_lag=1, steps=14, flush_after=(9,)),
    "in backward": replace(NETWORK, topk_ratio=0.3, update_interval=2, steps=14),
    "freezing, S=4, d=1": replace(FREEZING, update_interval=4, publish_lag=1, steps=14),
}


@pytest.mark.parametrize("ratio", [0.6, 0.3, 0.0])
@pytest.mark.parametrize("name", CASES)
def test_state_and_shown_weights(name: str, ratio: float) -> None:
    """What is resident is never late, whatever the schedule of the rest. Where nothing is late, no bit depends on the owner."""
    case = CASES[name].with_keys(offload_ratio=ratio)
    assert_as_promised(case, run_here(case))


TRUE = replace(NETWORK, loop="trainer", max_norm=0.5, steps=6).with_keys(clip_prediction=False)


@pytest.mark.parametrize("checkpoint_format", ["lightning", "deepspeed"])
def test_checkpoints_know_no_owner(checkpoint_format: str, tmp_path: Path) -> None:
    """Files have the same bytes for every share, and are continued at another one with the same bits."""
    case, whole = TRUE.with_keys(checkpoint_format=checkpoint_format), run_here(TRUE)
    contents = []
    for ratio in (1.0, 0.5, 0.0):
        path = tmp_path / str(ratio) / "saved"
        saving = replace(case, save_at=3, checkpoint=str(path)).with_keys(offload_ratio=ratio)
        run_here(saving)
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        contents.append({file.relative_to(path): file.read_bytes() for file in files if file.is_file()})
        resumed = run_here(replace(saving, save_at=0).with_keys(offload_ratio=1 - ratio))
        assert_same_tensors(resumed.weights, whole.weights)
        assert_same_state(resumed, whole)
    assert contents[0] == contents[1] == contents[2]


class Clamps(pl.Callback):
    """Writes weights in place behind each step, and one of them through DeepSpeed's functions behind the third."""

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        with torch.no_grad():
            for p in pl_module.parameters():
                p.clamp_(-0.1, 0.1)
        if trainer.global_step == 3:
            for p in list(pl_module.parameters())[:3]:
                safe_set_full_fp32_param(p, safe_get_full_fp32_param(p) * 0.5)
                safe_set_full_optimizer_state(p, torch.ones(p.shape), "exp_avg_sq")
                with torch.no_grad():
                    p.mul_(0.5)


@pytest.mark.parametrize("moments_dtype", ["float32", "int8"])
def test_what_users_write_reaches_the_owner(moments_dtype: str) -> None:
    case = replace(TRUE, callbacks=(Clamps(),)).with_keys(moments_dtype=moments_dtype)
    runs = [run_here(case.with_keys(offload_ratio=ratio)) for ratio in (1.0, 0.5)]
    if moments_dtype == "float32":
        assert_same_run(runs[1], runs[0])
    for ours, theirs in zip(runs[1].weights, runs[0].weights, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-3)


def test_the_state_stays_readable_and_its_device_memory_is_freed() -> None:
    with recorded_device() as device:
        trainer = fit(TRUE.make_model(), TRUE.with_keys(offload_ratio=0.25).make_strategy(), steps=3)
        optimizer = optimizer_of(trainer)
        assert not optimizer.training.parts.residents.n_bytes
        assert any(flat.detach().any() for flat in optimizer.single_partition_of_fp32_groups)
    assert not device.order.races


def test_a_share_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # Of 8 blocks of about 470 elements with 16 bytes two fit.
    monkeypatch.setattr(HostRuntime, "room", lambda _: 2.5 * 470 * 16)
    weights = [torch.zeros(94, 40)]
    with direct_step([weights], offload_ratio=0.75):
        pass
    with (
        pytest.raises(MisconfigurationException, match=r"offload_ratio must be at least 0\.75 here, .*, got 0\.5"),
        direct_step([weights], offload_ratio=0.5),
    ):
        pass


def test_what_is_refused() -> None:
    on_host = {"stage": 3, "offload_parameters": True}
    with pytest.raises(ValueError, match=r"offload_ratio must be 1 where parameters are in host memory, got 0\.5"):
        ZenFlowStrategy(offload_ratio=0.5, **on_host)


def test_deepspeeds_own_key_is_read() -> None:
    config: dict[str, Any] = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.25}}}
    assert ZenFlowStrategy(config).zenflow_config.offload_ratio == 0.25
    config["zero_optimization"]["zenflow"] = {"offload_ratio": 0.5}
    with pytest.raises(MisconfigurationException, match=r"ratio must be absent beside .*offload_ratio, got 0\.25"):
        ZenFlowStrategy(config)


def test_the_last_arrivals() -> None:
    """By the module's order, whatever the groups'; padding alone arrives at no time."""
    slices = [Slice.of((4, 4), parameter=n, param_group=n // 2, begin=16 * n, start=0, numel=16) for n in range(4)]
    partition = build_partition(slices, [32, 32], 4)
    # The second group has the first and third layer's.
    assert last_arrivals(partition, [1, 3, 0, 2]) == [2, 0, 3, 1]


@pytest.mark.parametrize("late", [False, True])
def test_memory_is_given_back(late: bool) -> None:
    """After more steps than the ring of words has, of which no job has read one; with the bits of a training without residents."""
    keys: dict[str, Any] = (
        {"update_interval": 4, "publish_lag": 1} if late else {"update_interval": 1, "publish_lag": 0}
    )

    def train(*, gives_back: bool) -> list[torch.Tensor]:
        with direct_step([random_tensors(0)], offload_ratio=0.0, topk_ratio=0.3, **keys) as direct:
            for number in range(1, 60):
                direct.backward(random_tensors(number))
                direct.step.step()
                if gives_back and number in (20, 40):
                    direct.training.give_back()
                    assert direct.parts.residents.n_bytes == 0
                    assert all(block.resident is None for block in direct.parts.rank.blocks)
            direct.step.flush()
            assert not gives_back or direct.parts.read_counters().steps_in_backward == (0 if late else 39)
            return direct.state()

    assert_same_tensors(train(gives_back=True), train(gives_back=False))


def test_memory_is_given_back_between_two_steps() -> None:
    with direct_step([random_tensors(0)], offload_ratio=0.5) as direct:
        direct.step.begin_backward(last=False)
        direct.backward(random_tensors(1), last=False)
        with pytest.raises(MisconfigurationException, match="give_back must be called between two steps"):
            direct.training.give_back()


def test_the_trainer_gives_memory_back() -> None:
    gives = At("on_train_batch_end", lambda trainer: trainer.global_step == 3 and trainer.strategy.give_back())
    run = run_here(replace(TRUE, callbacks=(gives,)).with_keys(offload_ratio=0.25))
    assert_same_run(run, run_here(TRUE))


MOVES = ((2, 1, 0, 0.3), (4, 1, 0, 0.8), (6, 1, 0, 1.0))
"""As `auto` decides: (step, S, d, share of the blocks that the device owns from then on)."""


@pytest.mark.parametrize("loop", ["direct", "trainer"])
def test_no_bit_depends_on_moves(loop: str) -> None:
    case = replace(TRUE, loop=loop, steps=9)  # type: ignore[arg-type]
    with_moves = replace(case, schedules=MOVES).with_keys(update_interval="auto", publish_lag="auto")
    assert_same_run(run_here(with_moves), run_here(case))


LATE_MOVES = ((2, 4, 1, 0.3), (5, 4, 1, 0.6), (7, 1, 0), (9, 1, 0, 1.0))


@pytest.mark.parametrize("moments_dtype", ["float32", "int8"])
def test_moves_of_late_schedules_lose_nothing(moments_dtype: str) -> None:
    case = replace(LATE, schedules=LATE_MOVES, steps=13).with_keys(**AUTO, **EVERYTHING, moments_dtype=moments_dtype)
    run = run_here(case)
    if moments_dtype == "float32":
        assert_is_adamw(case, run)
    assert all(torch.isfinite(w).all() for w in run.weights)


@pytest.mark.parametrize("name", ["S=1, d=0", "S=4, d=1"])
def test_blocks_are_given_back_before_a_backward_pass_that_would_not_fit(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With jobs of other blocks in flight; and a look may take them again."""
    s, d = (1, 0) if name == "S=1, d=0" else (4, 1)
    schedules = ((2, s, d), (3, s, d, 1.0), (8, s, d, 0.75))
    case = replace(LATE, schedules=schedules, steps=16, max_norm=None, precision="32-true").with_keys(**AUTO)
    lacks = {6: 1.0, 7: 3000.0, 10: 1e9}
    monkeypatch.setattr(MemoryWatch, "lack", lambda self: lacks.get(number(), 0.0))
    kept: list[tuple[int, int]] = []
    begin, steps = ZenFlowStep.begin_backward, []

    def number() -> int:
        return steps[-1].number + 1

    def begins(step: ZenFlowStep, *, last: bool) -> None:
        steps.append(step)
        before = len(step._residents.blocks)
        begin(step, last=last)
        if before > len(step._residents.blocks):
            kept.append((step.number + 1, len(step._residents.blocks)))

    monkeypatch.setattr(ZenFlowStep, "begin_backward", begins)
    run = run_here(case)
    assert [step for step, _ in kept] == [6, 7, 10]
    assert 0 == kept[2][1] < kept[1][1] < kept[0][1]
    assert_is_adamw(case, run, shown=s == 1)


def test_a_resumed_run_has_the_residents_of_the_saver(tmp_path: Path) -> None:
    """And its bits: moments in 8 bits are rounded where they are laid down."""
    case = replace(TRUE, schedules=MOVES[:2], steps=7, checkpoint=str(tmp_path / "saved"))
    case = case.with_keys(**AUTO, moments_dtype="int8")
    sizes: list[int] = []
    look = At("on_train_batch_end", lambda t: sizes.append(len(optimizer_of(t).training.parts.residents.blocks)))
    with recorded_device():
        saved = run_here(replace(case, save_at=5, callbacks=(look,)))
        resumed = run_here(replace(case, schedules=((7, 1, 0),), callbacks=(look,)))
    assert sizes[:2] == [0, sizes[2]] and sizes[3:] == [sizes[4]] * 6 and sizes[4] > sizes[2] > 0
    assert_same_tensors(resumed.weights, saved.weights)
    assert_same_state(resumed, saved)


class Grows(Perceptron):
    """Its batches grow behind the sixth step."""

    @override
    def loss(self, step: int, micro: int, rank: int) -> torch.Tensor:
        device, n = self.layers[0].weight.device, 32 * (1 + max(0, step - 5))
        x = torch.randn(
            n, self.layers[0].in_features, generator=torch.Generator(device).manual_seed(step), device=device
        )
        for layer in self.layers:
            x = self.through(layer, x)
        return x.square().mean()


GROWING = Case(
    model=Grows, model_options={"widths": [128] * 10}, steps=10, update_interval=1, publish_lag=0, recorded=False
)
GROWING = replace(GROWING, schedules=((2, 1, 0, 1.0),)).with_keys(
    **AUTO, max_update_interval=1, clip_prediction=False, reduce_bucket_size=700
)


def test_growing_batches_find_their_memory() -> None:
    """Blocks are given back before a backward pass for which there is room without them, and only then."""
    sizes: list[int] = []
    watch = At("on_train_batch_end", lambda t: sizes.append(len(optimizer_of(t).training.parts.residents.blocks)))

    def train(limit: float) -> tuple[Run, float]:
        sizes.clear()
        with recorded_device(memory_limit=limit) as device:
            run = run_here(replace(GROWING, callbacks=(watch,)))
        assert not device.order.races
        return run, device.memory.most

    run, needed = train(math.inf)
    assert sizes[0] == 0 and len({*sizes[2:]}) == 1
    all_blocks = sizes[-1]
    limited, most = train(0.99 * needed)
    assert most < 0.99 * needed
    assert sizes[2:7] == [all_blocks] * 5 and all_blocks > sizes[-1]
    # torch's passes round as the worker to a few units in the last place.
    torch.testing.assert_close(limited.weights, run.weights, rtol=0, atol=2e-6)


class Jumps(Grows):
    """One batch is too large for a forward pass beside resident blocks, of which the last layer's noise is a part."""

    @override
    def loss(self, step: int, micro: int, rank: int) -> torch.Tensor:
        loss = super().loss(11 if step == 7 else 0, micro, rank)
        return loss * (1 + 0.1 * torch.rand(()))


def test_a_forward_pass_without_room_is_repeated(caplog: pytest.LogCaptureFixture) -> None:
    def train(limit: float, **keys: Any) -> tuple[Run, float]:
        torch.manual_seed(3)
        with recorded_device(memory_limit=limit) as device:
            run = run_here(replace(GROWING, model=Jumps).with_keys(**keys))
        return run, device.memory.most

    run, needed = train(math.inf)
    assert not caplog.messages or "has run out of device memory" not in caplog.text
    # Of which states are a third.
    limited, _ = train(0.8 * needed)
    assert "a forward pass has run out of device memory beside" in caplog.text
    torch.testing.assert_close(limited.weights, run.weights, rtol=0, atol=2e-6)


def script_measurements(trainer: pl.Trainer) -> None:
    """Steps wait, beside devices that differ in room."""
    control = optimizer_of(trainer).training.parts.planner.control
    assert control is not None
    shares, reduce, room = control._shares, control._reduce, (0.3, 0.7)[trainer.global_rank]
    control._shares = lambda: (shares()[0], room)
    control._reduce = lambda load, stall, *of_shares: reduce(1.4, 0.4, *of_shares)  # type: ignore[method-assign]


def compare_owners(trainer: pl.Trainer) -> None:
    parts = optimizer_of(trainer).training.parts
    assert len(parts.residents.blocks) == math.ceil(0.3 * len(parts.rank.blocks)) > 0
    assert (parts.jobs.schedule.update_interval, parts.jobs.schedule.publish_lag) == (1, 0)


def test_ranks_with_different_room_agree() -> None:
    """The least room of all decides, in the first look, and nothing becomes late."""
    acts = (At("on_train_start", script_measurements), At("on_train_end", compare_owners))
    case = Case(steps=24, topk_ratio=0.0, callbacks=acts).with_keys(**AUTO, max_update_interval=1)
    runs = run_on_ranks({"ranks": case})["ranks"]
    assert_is_adamw(case, *runs)
