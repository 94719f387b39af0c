"""Budgets of a settled step without a clock: bytes copied and device memory, as recorded, as counted and by formulas; launches.

The modules that a gradient enters on its way to the weights: few, and the ones that docs/architecture.md names.
Models larger than the device: stage 3 with parameters in host memory on a recorded device of limited memory; what crosses its link.
"""

import math
import re
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from typing_extensions import override

import lightning_zenflow
from direct_step import direct_step
from eventful_training import random_tensors
from gpu_cases import RACES
from harness import AUTO, Case, make_trainer, optimizer_of, run_here
from lightning_zenflow import ZenFlowStrategy
from lightning_zenflow.cli import Cost, costs
from lightning_zenflow.core.device import HostRuntime
from lightning_zenflow.core.partition import STATE_BYTES, column_count, row_length
from lightning_zenflow.core.schedule import UpdateSchedule, blocks_wanted, bucket_size
from lightning_zenflow.deepspeed.stage_2 import ZenFlowZeroOptimizer
from lightning_zenflow.kernels.base import NOISE_NUMEL
from lightning_zenflow.worker.arena import WORD_BYTES
from networks import Deep
from recorded_device.clocks import HOST
from recorded_device.device import RecordedDevice
from recorded_device.tensors import DEVICE
from recorded_device.watch import recorded_device

WIDTHS = [64] * 7 + [32]
NOISE = 2 * NOISE_NUMEL * 4
"""Of rounding, whatever the size of the model."""


def case_of(update_interval: int, publish_lag: int) -> Case:
    return replace(
        RACES["a network"],
        accelerator="cpu",
        model_options={"widths": WIDTHS},
        update_interval=update_interval,
        publish_lag=publish_lag,
        steps=2 * update_interval + publish_lag + 4,
        strategy_options={"weight_prediction": "auto", "provisional_scale": "auto", "select_interval": 0},
    ).with_keys(reduce_bucket_size=5000, overlap_comm=True)


class Budgets(pl.Callback):
    """Reads the counters and the log of device memory at the end of each step."""

    def __init__(self, device: RecordedDevice) -> None:
        self.device = device
        self.counted: list[tuple[int, int]] = []
        self.live: list[int] = []
        self.peaks: list[int] = []

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.device.note("step", HOST, event=trainer.global_step)
        traffic = optimizer_of(trainer).training.parts.rank.telemetry
        self.counted.append((traffic.d2h_bytes, traffic.h2d_bytes))
        self.live.append(self.device.memory.live)
        self.peaks.append(self.device.memory.peak)
        self.device.memory.restart()

    def recorded(self, kind: str, steps: range) -> int:
        """Bytes of a kind of copies, without those of batches."""
        operations = self.device.order.operations
        ends = {o.event: i for i, o in enumerate(operations) if o.kind == "step"}
        of_steps = operations[ends[steps[0] - 1] : ends[steps[-1]]]
        return sum(o.n_bytes for o in of_steps if o.kind == kind and not o.is_of_the_model)


def budgets_of(case: Case) -> Budgets:
    with recorded_device() as device:
        budgets = Budgets(device)
        run_here(case, callbacks=[budgets])
    return budgets


class Sizes:
    """Elements of a model."""

    def __init__(self, case: Case) -> None:
        shapes = [p.shape for p in case.make_model().parameters()]
        matrices = [(shape.numel() // n, n) for shape in shapes if (n := row_length(shape))]
        self.numel = sum(shape.numel() for shape in shapes)
        self.of_vectors = self.numel - sum(rows * columns for rows, columns in matrices)
        self.of_factors = sum(rows + columns for rows, columns in matrices)
        self.owned = sum(rows * column_count(columns, case.topk_ratio) for rows, columns in matrices) + self.of_vectors


def cost_of(case: Case, sizes: Sizes) -> Cost:
    """The formulas of `estimate`."""
    machine = {"gpus": 1, "gpus_per_host": 1, "cpu_bw": 100.0, "stage": 2, "offload_parameters": False}
    model = {"params": sizes.numel, "frozen": 0.0, "dtype": "bf16", "accumulate_grad_batches": 1}
    (cost,) = costs(Namespace(**machine, **model), case.make_strategy().zenflow_config).values()
    return cost


@pytest.mark.parametrize(
    ("s", "d", "room"),
    [(4, 1, True), (1, 0, True), pytest.param(1, 1, False, marks=pytest.mark.slow)],
)
def test_a_settled_window(s: int, d: int, room: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's bytes and the words down in each step; up the model's bytes once, and what is read back.

    The package's allocations at their peak, in backward: state of owned entries, factored moments, kept gradients; nothing grows.
    """
    monkeypatch.setattr(HostRuntime, "room", lambda _: math.inf if room else 0)
    case = case_of(s, d)
    budgets, sizes, schedule = budgets_of(case), Sizes(case), UpdateSchedule(update_interval=s, publish_lag=d)
    cost = cost_of(case, sizes)
    steps = range(case.steps - s + 1, case.steps + 1)
    # Without the number of skipped steps, an int64, which is looked at after each of a run's first steps.
    recorded = budgets.recorded("d2h", steps) - 8 * s, budgets.recorded("h2d", steps)
    (d2h, h2d), before = budgets.counted[steps[-1] - 1], budgets.counted[steps[0] - 2]
    assert recorded == (d2h - before[0], h2d - before[1])
    # With d = 0, each block that closes is submitted in backward with a word of its own.
    n_words = s + (blocks_wanted([s], in_backward=True, numel=0) if d == 0 else 0)
    assert recorded[0] == s * cost.d2h_bytes + n_words * WORD_BYTES
    # Without room on the device, kept gradients of matrices are read back; vectors have no provisional update.
    read_back = 0 if room else 2 * d * (sizes.numel - sizes.of_vectors)
    assert recorded[1] == s * cost.h2d_bytes + read_back
    assert budgets.live[-1] == budgets.live[-1 - s]
    if room:
        # The factors of kept gradients; gradients of vectors, which are held together; norms and words.
        rest = 4 * sizes.of_factors * schedule.kept_share + 4096
        state = 0 if d == 0 else (STATE_BYTES + 2) * sizes.owned + 4 * sizes.of_factors
        expected = state + 2 * sizes.numel * schedule.kept_share
        # Where nothing is ever late, there are no provisional updates.
        noise = 0 if d == 0 else NOISE
        assert 0 <= max(budgets.peaks[-s:]) - noise - expected <= rest
        # The estimate counts neither vectors, all of which the device owns, nor factors; weights and buckets are not the package's.
        estimated = cost.device_bytes - 2 * sizes.numel - 2 * 2 * bucket_size(sizes.numel)
        assert estimated == pytest.approx(expected - (d > 0) * (14 * sizes.of_vectors + 4 * sizes.of_factors), rel=0.1)


def test_a_schedule_that_changes() -> None:
    """`auto` at S = 1, d = 0 holds what that schedule holds where it is fixed; S = 2, d = 1 then adds factors and kept gradients.

    Nor are weights copied that the device owns.
    """
    # Without columns to select, which `auto` measures.
    case = replace(case_of(1, 0), topk_ratio=0)
    sizes = Sizes(case)
    late = 4 * sizes.of_factors + 2 * sizes.numel * UpdateSchedule(update_interval=2, publish_lag=1).kept_share
    auto = replace(case, steps=12).with_keys(**AUTO)
    later = budgets_of(replace(auto, schedules=((5, 2, 1),)))
    assert 0 <= later.peaks[3] - NOISE <= 4096
    assert 0 <= later.peaks[-1] - NOISE - late <= 4 * sizes.of_factors + 4096


LAYER_SHAPES = [(4, 4), (2, 4), (2, 4), (4, 4), (12, 4), (12, 4), (4, 12), (4,), (4,)]
SHAPES = [(8, 4), *LAYER_SHAPES * 9, (4,), (8, 4)]
"""84 tensors, 65 of them matrices."""


@pytest.mark.parametrize(
    ("s", "d", "select_interval", "ceiling"), [(1, 0, 0, 600), (4, 1, 0, 1050), (4, 1, 4, 1400)], ids=str
)
def test_launches_of_a_step(s: int, d: int, select_interval: int, ceiling: int) -> None:
    """With torch's passes: a step of few tokens takes as long as the host needs to launch it."""
    launches: list[int] = []
    keys = {"update_interval": s, "publish_lag": d, "select_interval": select_interval}
    with recorded_device() as device, direct_step([random_tensors(0, DEVICE, SHAPES)], max_norm=1.0, **keys) as direct:
        for step in range(6):
            gradients = random_tensors(step, DEVICE, SHAPES)
            before = len(device.order.operations)
            direct.backward(gradients)
            direct.step.step()
            launches.append(sum(o.kind in ("launch", "d2h", "h2d") for o in device.order.operations[before:]))
    assert max(launches[4:]) <= ceiling


WIDTH, LAYERS, STEPS = 256, 40, 3
LAYER = WIDTH**2
MODEL_BYTES = 2 * LAYERS * LAYER
ZERO = {
    "stage": 3,
    "reduce_bucket_size": LAYER,
    # A layer ahead, and none is kept from the forward to the backward pass.
    "stage3_prefetch_bucket_size": LAYER,
    "stage3_max_live_parameters": 2 * LAYER,
    "stage3_max_reuse_distance": 0,
    "stage3_param_persistence_threshold": 0,
}


def train(place: str, *, memory_limit: float = torch.inf) -> tuple[Sequence[float], RecordedDevice]:
    """Losses of all steps with the parameters in a place, and the device."""
    config = {"zero_optimization": {**ZERO, "offload_param": {"device": place}}}
    strategy = ZenFlowStrategy(config, update_interval=1, publish_lag=0, worker_cores=1)
    with recorded_device(memory_limit=memory_limit) as device:
        model = Deep(n_layers=LAYERS, width=WIDTH, dtype=torch.bfloat16)
        options: dict[str, Any] = {"precision": "bf16-true", "max_steps": STEPS, "gradient_clip_val": 0.1}
        make_trainer(strategy, callbacks=[device.step_ends()], **options).fit(model)
        return torch.stack(model.losses).tolist(), device


def test_a_model_of_four_times_the_devices_memory() -> None:
    losses, _ = train("cpu")
    assert losses[-1] < losses[0]
    limited, of_limited = train("cpu", memory_limit=MODEL_BYTES / 4)
    assert limited == losses and not of_limited.order.races
    with pytest.raises(torch.OutOfMemoryError):
        train("none", memory_limit=MODEL_BYTES / 4)


def test_bytes_a_parameter_over_the_link() -> None:
    """In a step. The last layer, with which the backward pass begins, is fetched once; batches and words are small."""
    _, device = train("cpu")
    operations = device.order.operations
    ends = [i for i, o in enumerate(operations) if o.kind == "step"]
    # Gloo reduces in host memory.
    of_step = [o for o in operations[ends[-2] : ends[-1]] if o.place != "stage3.__avg_scatter_grads"]
    counted = [sum(o.n_bytes for o in of_step if o.kind == way) / (LAYERS * LAYER) for way in ("d2h", "h2d")]
    assert counted == pytest.approx([2, 4 - 2 / LAYERS], abs=0.01)


PACKAGE = Path(lightning_zenflow.__file__).parent
ARCHITECTURE = Path(__file__).parents[2] / "docs" / "architecture.md"
IN_THE_MIDDLE = 6
"""A step in which nothing happens for the first time."""


def test_a_gradients_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """From its reduction to the end of the step, with S = 1, d = 0 and clipping, on one rank."""
    entered: set[str] = set()
    receive, step = ZenFlowZeroOptimizer.copy_grads_in_partition, ZenFlowZeroOptimizer.step

    def note(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            entered.add(path.relative_to(PACKAGE).as_posix())

    def recorded_receive(self: ZenFlowZeroOptimizer, *args: Any, **kwargs: Any) -> None:
        if self.training.steps.number + 1 == IN_THE_MIDDLE:
            sys.setprofile(note)
        receive(self, *args, **kwargs)

    def recorded_step(self: ZenFlowZeroOptimizer, *args: Any, **kwargs: Any) -> None:
        step(self, *args, **kwargs)
        sys.setprofile(None)

    monkeypatch.setattr(ZenFlowZeroOptimizer, "copy_grads_in_partition", recorded_receive)
    monkeypatch.setattr(ZenFlowZeroOptimizer, "step", recorded_step)
    options = {"reduce_bucket_size": 200, "worker_cores": 1}
    run_here(Case(model="TiedNet", steps=8, max_norm=1.0, update_interval=1, publish_lag=0, strategy_options=options))
    section = ARCHITECTURE.read_text().partition("\n## A gradient's way\n")[2].partition("\n## ")[0]
    assert entered == set(re.findall(r"`((?:[a-z_]+/)?[a-z0-9_]+\.py)`", section))
    assert len(entered) <= 16
