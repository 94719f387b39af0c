"""What only a CUDA device can show: order between streams, copies that nobody waits for, page-locked memory, and the device's own kernels.

    python -m pytest -m gpu

They are run by themselves: DeepSpeed has one accelerator per process. What they are compared with runs on the CPU in another process.
"""

import math
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function
from typing_extensions import override

import random_selection  # noqa: F401  # named by cases
from harness import Case, Run, run_here, run_on_ranks, workers
from lightning_zenflow import ZenFlowStrategy
from lightning_zenflow.arena import Arena, ArenaSizes
from lightning_zenflow.auto_schedule import AutoSchedule, Decision, Observation
from lightning_zenflow.clipping import StepScale
from lightning_zenflow.cpu_kernels import CpuKernels
from lightning_zenflow.gradients import GradientIntake
from lightning_zenflow.hyperparameters import GroupHyperparameters
from lightning_zenflow.kernels import TorchKernels, kernels_for
from lightning_zenflow.optimizer import ZenFlowZeroOptimizer
from lightning_zenflow.ownership import Ownership
from lightning_zenflow.partition import Slice, build_partition
from lightning_zenflow.provisional import RoundingNoise
from lightning_zenflow.rounds import Rounds

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("needs_cuda", "no_worker_is_left")]

NO_CUDA = {"CUDA_VISIBLE_DEVICES": ""}
APPROXIMATE = {"look_ahead": "auto", "provisional_scale": "auto"}
RESELECTING = {"select_interval": 3, "select_strategy": "random_selection:choose"}
EVERYTHING = {**APPROXIMATE, **RESELECTING}
AUTO = {"update_interval": "auto", "publish_lag": "auto"}
STEPS = 11


@pytest.fixture(scope="module")
def needs_cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and a torch that was built for it")


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def optimizer_of(trainer: pl.Trainer) -> ZenFlowZeroOptimizer:
    assert isinstance(trainer.strategy, ZenFlowStrategy)
    optimizer = trainer.strategy.zenflow_optimizer
    assert optimizer is not None
    return optimizer


def assert_same_state(ours: Run, theirs: Run) -> None:
    for kind in ("master", "exp_avg", "exp_avg_sq"):
        for i, (a, b) in enumerate(zip(getattr(ours, kind), getattr(theirs, kind), strict=True)):
            assert torch.equal(a, b), f"{kind} of parameter {i} differs by up to {(a - b).abs().max():.3g}"
    assert ours.counts == theirs.counts
    assert ours.skipped == theirs.skipped


# The state after a flush


SEQUENCES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp32, accumulated, clipped": {"accumulate": 3, "max_norm": 1.0},
    "bf16": {"precision": "bf16-true"},
    "bf16, accumulated, clipped": {"precision": "bf16-true", "accumulate": 3, "max_norm": 1.0},
    "bf16-mixed, not finite": {
        "precision": "bf16-mixed",
        "max_norm": 1.0,
        "model_options": {"not_finite": {(3, 0): math.nan, (4, 0): math.inf, (8, 0): -math.inf}},
    },
}
"""Everything that a sequence of gradients depends on; the gradients themselves do not depend on the weights."""

BASELINES = {
    name: Case(topk_ratio=0, update_interval=1, publish_lag=0, steps=STEPS, **options)
    for name, options in SEQUENCES.items()
}

SCHEDULES: dict[str, dict[str, Any]] = {
    "everything on the host, at once": {"topk_ratio": 0, "update_interval": 1, "publish_lag": 0},
    "defaults": {"topk_ratio": 0.05, "strategy_options": APPROXIMATE},
    "reselection": {"topk_ratio": 0.3, "strategy_options": EVERYTHING, "flush_after": (6, 7)},
    "offload, long lag": {
        "topk_ratio": 0.3,
        "update_interval": 2,
        "publish_lag": 3,
        "strategy_options": {**EVERYTHING, "offload": True},
    },
    "everything on the device, long windows": {"topk_ratio": 1, "update_interval": 7, "publish_lag": 0, "warm_up": 2},
    "changes of pace": {
        "topk_ratio": 0.3,
        "paces": ((3, 8, 1), (7, 1, 0), (9, 2, 2)),
        "strategy_options": {**EVERYTHING, **AUTO},
    },
    "small buckets": {"strategy_options": {**APPROXIMATE, "reduce_bucket_size": 400, "allgather_bucket_size": 200}},
    "no overlap": {"strategy_options": {**APPROXIMATE, "overlap_comm": False}},
}


@pytest.fixture(scope="module")
def on_cpu(needs_cuda: None) -> dict[str, Run]:
    """The baselines of all sequences, without any GPU."""
    runs = {name: of_rank[0] for name, of_rank in run_on_ranks(BASELINES, ranks=1, environment=NO_CUDA).items()}
    for run in runs.values():
        assert run.error is None, run.error
    return runs


@pytest.fixture(scope="module")
def on_cuda(needs_cuda: None) -> dict[str, Run]:
    """The baselines of all sequences, on the GPU."""
    return {name: run_here(replace(case, accelerator="gpu")) for name, case in BASELINES.items()}


@pytest.mark.parametrize("sequence", SEQUENCES)
def test_state_is_the_cpus(sequence: str, on_cpu: dict[str, Run], on_cuda: dict[str, Run]) -> None:
    ours, theirs = on_cuda[sequence], on_cpu[sequence]
    if BASELINES[sequence].max_norm is None:
        # The same gradients, and the worker is the same.
        assert_same_state(ours, theirs)
    assert (ours.counts, ours.skipped) == (theirs.counts, theirs.skipped)
    for i in range(len(ours.master)):
        # The norm is added up in another order: the clip coefficient differs in its last place, 6e-8.
        torch.testing.assert_close(ours.master[i], theirs.master[i], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(ours.exp_avg[i], theirs.exp_avg[i], rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(ours.exp_avg_sq[i], theirs.exp_avg_sq[i], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("sequence", SEQUENCES)
def test_state_is_the_same_to_the_bit(sequence: str, schedule: str, on_cuda: dict[str, Run]) -> None:
    case = Case(steps=STEPS, accelerator="gpu", **SEQUENCES[sequence], **SCHEDULES[schedule])
    run = run_here(case)
    assert_same_state(run, on_cuda[sequence])
    for shown, exact in zip(run.weights, run.master, strict=True):
        assert torch.equal(shown, exact.to(case.dtype))
    assert all(torch.isfinite(w).all() for of_step in run.shown for w in of_step)


def test_training_on_the_cpu_beside_a_gpu() -> None:
    runs = run_on_ranks({"fp32": BASELINES["fp32"]}, ranks=1)
    assert runs["fp32"][0].error is None, runs["fp32"][0].error


MIXED_FP16 = Case(
    precision="16-mixed",
    steps=20,
    accelerator="gpu",
    topk_ratio=0,
    update_interval=1,
    publish_lag=0,
    # The first scale, 65536, is too large for these gradients; later, one overflows at any scale.
    model_options={"not_finite": {(16, 0): math.inf}},
)


@pytest.fixture(scope="module")
def fp16_baseline(needs_cuda: None) -> Run:
    return run_here(MIXED_FP16)


def test_dynamic_loss_scale(fp16_baseline: Run) -> None:
    run = fp16_baseline
    assert 3 <= run.skipped <= 15
    assert run.counts == [20 - run.skipped] * 2
    # Nothing moved in the first steps, and nothing in the one that overflowed on its own.
    assert all(torch.equal(a, b) for a, b in zip(run.shown[0], run.shown[1], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(run.shown[16], run.shown[17], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(run.shown[17], run.shown[18], strict=True))


@pytest.mark.parametrize("schedule", ["defaults", "reselection", "offload, long lag", "changes of pace"])
def test_dynamic_loss_scale_changes_no_bit(schedule: str, fp16_baseline: Run) -> None:
    run = run_here(replace(MIXED_FP16, **{"update_interval": 4, "publish_lag": 1, **SCHEDULES[schedule]}))
    assert_same_state(run, fp16_baseline)


# Order


MANY_AND_HUGE = [(64, 48)] * 20 + [(4096, 4096)] + [(53, 7)] * 6 + [(33,)] * 6
"""Small buckets are full again while the huge layer's gradient is still on its way to the host."""

RACES = {
    "fixed gradients": Case(
        model="DeviceLinearLossModule",
        model_options={"shapes": MANY_AND_HUGE},
        topk_ratio=0.3,
        max_norm=1.0,
        strategy_options={**EVERYTHING, "reduce_bucket_size": 20_000, "overlap_comm": True},
    ),
    "accumulated": Case(
        model="DeviceLinearLossModule",
        model_options={"shapes": MANY_AND_HUGE},
        topk_ratio=0.3,
        accumulate=2,
        update_interval=2,
        publish_lag=0,
        strategy_options={**EVERYTHING, "reduce_bucket_size": 20_000, "overlap_comm": True, "offload": True},
    ),
    "a network": Case(
        model="Perceptron",
        model_options={"widths": [96] * 12 + [4096, 4096, 64]},
        topk_ratio=0.1,
        max_norm=1.0,
        strategy_options={**EVERYTHING, "reduce_bucket_size": 40_000, "overlap_comm": True},
    ),
}
for name, case in RACES.items():
    RACES[name] = replace(case, precision="bf16-true", steps=14, accelerator="gpu", recorded=False)


class Digests(pl.Callback):
    """One number of every parameter after every step: the sum of its bits as integers. Nothing waits for the device before the end."""

    def __init__(self) -> None:
        self._of_steps: list[Tensor] = []
        self.values = torch.empty(0)

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        bits = [p.detach().view(torch.int16).sum(dtype=torch.int64) for p in pl_module.parameters()]
        self._of_steps.append(torch.stack(bits))

    @override
    def on_train_end(self, *_: Any) -> None:
        self.values = torch.stack(self._of_steps).cpu()


class SlowBackward(pl.Callback):
    """The device sleeps before a gradient is there."""

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for i, p in enumerate(pl_module.parameters()):
            if i % 3 == 0:
                p.register_hook(lambda _: torch.cuda._sleep(MILLISECOND))


class SlowWorker(pl.Callback):
    """The worker stops for a third of a second, twice."""

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx in (5, 9):
            (pid,) = workers()
            os.kill(pid, signal.SIGSTOP)
            threading.Timer(0.3, os.kill, (pid, signal.SIGCONT)).start()


MILLISECOND = 1_800_000
"""Of the device, in its cycles, roughly."""


def late(owner: type, method: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Has the device sleep, on the stream that is current there, before the work that a method enqueues; in every third call."""

    def install(monkeypatch: pytest.MonkeyPatch) -> None:
        original, calls = getattr(owner, method), 0

        def slow(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls % 3 == 1:
                torch.cuda._sleep(2 * MILLISECOND)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, method, slow)

    return install


DELAYS: dict[str, Callable[[pytest.MonkeyPatch], None] | type[pl.Callback]] = {
    "backward": SlowBackward,
    "worker": SlowWorker,
    "reduced gradients": late(GradientIntake, "receive"),
    "copies to the host": late(Rounds, "fill"),
    "sums of gradients": late(GradientIntake, "finish"),
    "the step's number": late(Rounds, "seal"),
    "the device's update": late(Ownership, "step"),
    "copies from the host": late(Rounds, "publish"),
    "the device's weights": late(Ownership, "write_weights"),
}


def digests_of(case: Case, *callbacks: pl.Callback) -> tuple[Run, Tensor]:
    digests = Digests()
    run = run_here(case, callbacks=[digests, *callbacks])
    assert digests.values.shape[0] == case.steps * case.accumulate
    return run, digests.values


@pytest.fixture(scope="module")
def undisturbed(needs_cuda: None) -> dict[str, tuple[Run, Tensor]]:
    """Runs in which the device is waited for before and after every step's phases, so that nothing can overtake anything."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, method in ((GradientIntake, "receive"), (Rounds, "seal"), (Rounds, "publish"), (Ownership, "step")):
            original = getattr(owner, method)

            def waited_for(*args: Any, _original: Any = original, **kwargs: Any) -> Any:
                torch.cuda.synchronize()
                result = _original(*args, **kwargs)
                torch.cuda.synchronize()
                return result

            patch.setattr(owner, method, waited_for)
        return {name: digests_of(case) for name, case in RACES.items()}


@pytest.mark.parametrize("delay", [None, *DELAYS])
@pytest.mark.parametrize("name", RACES)
def test_delays_change_no_bit(
    name: str, delay: str | None, undisturbed: dict[str, tuple[Run, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    callbacks = []
    if delay is not None:
        slow = DELAYS[delay]
        if isinstance(slow, type):
            callbacks.append(slow())
        else:
            slow(monkeypatch)
    run, digests = digests_of(RACES[name], *callbacks)
    expected_run, expected = undisturbed[name]
    different = (digests != expected).nonzero()
    assert different.numel() == 0, f"weights first differ in (micro-batch, parameter) {different[0].tolist()}"
    assert_same_state(run, expected_run)


# Memory


@pytest.mark.parametrize("n_first", [1, 3, 5])
def test_every_page_is_page_locked_and_copied_without_waiting(n_first: int) -> None:
    """Pages are reserved little by little, as the pace grows; a copy into one must not cross from one reservation to the next."""
    numel, n_pages = 5 * 7 * 1237, 8
    whole = Slice(parameter=0, param_group=0, begin=0, start=0, numel=numel, columns=1237, is_matrix=True)
    partition = build_partition([whole], [numel], 1)
    sizes = ArenaSizes(n_param_groups=1, n_step_records=4, n_pages=n_pages, n_publish_buffers=4, dtype=torch.bfloat16)
    arena = Arena(partition, sizes, device=device())
    try:
        for n in (n_first, n_first + 1, n_pages):
            arena.reserve(n_pages=n, n_publish_buffers=min(n, 4))
        gradients = torch.randn(n_pages, arena.pages.shape[1], device=device()).bfloat16()
        assert arena.master.is_pinned() and arena.clip[1].is_pinned() and arena.sequence[2].is_pinned()
        torch.cuda.synchronize()
        torch.cuda._sleep(500 * MILLISECOND)
        done = torch.cuda.Event()
        begin = time.perf_counter()
        for page, gradient in zip(arena.pages, gradients, strict=True):
            assert page.is_pinned() and page[-1:].is_pinned()
            page.copy_(gradient, non_blocking=True)
        arena.clip[3].copy_(torch.full((), 0.5, device=device()), non_blocking=True)
        arena.sequence[3].copy_(torch.full((), 7, device=device()), non_blocking=True)
        done.record()
        assert time.perf_counter() - begin < 0.2
        assert not done.query()
        done.synchronize()
        assert torch.equal(arena.pages, gradients.cpu())
        assert float(arena.clip[3]) == 0.5 and int(arena.sequence[3]) == 7
        back = torch.empty_like(gradients[:4])
        for target, buffer in zip(back, arena.publish, strict=True):
            buffer.copy_(arena.pages[0])
            target.copy_(buffer, non_blocking=True)
        assert all(torch.equal(b, gradients[0]) for b in back)
    finally:
        arena.close()


class PeakMemory(pl.Callback):
    """The most that is allocated on the device in the steps from the given one on."""

    def __init__(self, first: int) -> None:
        self._first = first
        self.owned = 0

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self._first:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        self.n_bytes = torch.cuda.max_memory_allocated()
        self.owned = optimizer_of(trainer)._ownership.numel


@pytest.mark.parametrize("offload", [False, True])
def test_memory_ceiling(offload: bool) -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    width, layers, bucket = 2048, 24, 8_000_000
    case = Case(
        model="Perceptron",
        model_options={"widths": [width] * (layers + 1)},
        precision="bf16-true",
        topk_ratio=0.05,
        max_norm=1.0,
        steps=16,
        accelerator="gpu",
        recorded=False,
        strategy_options={
            **APPROXIMATE,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
            "offload": offload,
        },
    )
    memory = PeakMemory(first=10)
    run_here(case, callbacks=[memory])
    numel = layers * (width * width + width)
    assert 0.05 * numel < memory.owned < 0.06 * numel
    weights, buckets = 2 * numel, 2 * 2 * bucket
    columns = (2 if offload else 2 + 12) * memory.owned
    # Of one matrix: gradients before they are in a bucket, and the stand-in's temporary values in float32 and random bits.
    working = 24 * width * width
    allowed = weights + buckets + columns + working
    assert memory.n_bytes - before < 1.1 * allowed + 32 * 2**20, (
        f"{(memory.n_bytes - before) / 2**20:.0f} MiB, allowed {allowed / 2**20:.0f}: weights {weights / 2**20:.0f},"
        f" buckets {buckets / 2**20:.0f}, columns {columns / 2**20:.0f}, working memory {working / 2**20:.0f}"
    )


# Waiting


WAITING = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy", "cudaMemset")
"""Calls that return when the device is done; cudaMemcpyAsync and cudaMemsetAsync have names of their own."""


class Profile(pl.Callback):
    """What the host calls from the end of one step to the end of another."""

    def __init__(self, first: int, last: int) -> None:
        self._first, self._last = first, last
        self._profile = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], with_stack=False)
        self._span = record_function("the profiled steps")
        self._warnings = warnings.catch_warnings(record=True)
        self._caught: list[warnings.WarningMessage] | None = None
        self.calls: list[str] = []
        self.places: list[str] = []
        """Where blocking operations were called."""

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self._first:
            self._profile.start()
            self._span.__enter__()
            # Blocking operations warn; unlike the profiler this names the line, but it does not see calls of `synchronize`.
            self._caught = self._warnings.__enter__()
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
        if trainer.global_step == self._last:
            torch.cuda.set_sync_debug_mode("default")
            self._warnings.__exit__(None, None, None)
            self.places = [f"{w.filename}:{w.lineno}" for w in self._caught or () if "synchronizing" in str(w.message)]
            self._span.__exit__(None, None, None)
            self._profile.stop()
            events = self._profile.events()
            (span,) = [e for e in events if e.name == "the profiled steps" and str(e.device_type).endswith("CPU")]
            begin, end = span.time_range.start, span.time_range.end
            self.calls = [e.name for e in events if begin <= e.time_range.start and e.time_range.end <= end]


@pytest.mark.parametrize(
    "options",
    [
        {"update_interval": 4, "publish_lag": 1},
        {"update_interval": 1, "publish_lag": 1, "strategy_options": {**APPROXIMATE, "offload": True}},
        {"update_interval": 2, "publish_lag": 2, "accumulate": 2, "strategy_options": {"overlap_comm": False}},
    ],
    ids=["defaults", "offload", "accumulated, no overlap"],
)
def test_a_step_does_not_wait_for_the_device(options: dict[str, Any]) -> None:
    case = replace(
        RACES["a network"],
        steps=20,
        **{"strategy_options": {**APPROXIMATE, "reduce_bucket_size": 400_000}, **options},
    )
    profiled = Profile(first=8, last=16)
    run_here(case, callbacks=[profiled])
    assert "cudaLaunchKernel" in profiled.calls, "nothing of the device's calls was recorded"
    waits = [name for name in profiled.calls if name in WAITING]
    assert not waits and not profiled.places, (
        f"{len(waits)} in eight steps: {sorted(set(waits))}; called at {sorted(set(profiled.places))}"
    )


# auto


def test_auto_decides_and_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    observations: list[tuple[Observation, Decision | None]] = []
    observe = AutoSchedule.observe

    def observed(self: AutoSchedule, observation: Observation) -> Decision | None:
        decision = observe(self, observation)
        observations.append((observation, decision))
        return decision

    monkeypatch.setattr(AutoSchedule, "observe", observed)
    device_s: list[float] = []

    class Clock(pl.Callback):
        @override
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            device_s.append(optimizer_of(trainer).stalls.device_s)

    case = replace(RACES["fixed gradients"], steps=120)
    options = {**case.strategy_options, "select_strategy": "step", "select_interval": "auto"}
    run = run_here(replace(case, strategy_options={**options, **AUTO}), callbacks=[Clock()])
    assert len(observations) >= 2
    for observation, _ in observations:
        assert math.isfinite(observation.load) and observation.load > 0
        assert 0 <= observation.stall <= 1
    assert all(math.isfinite(s) for s in device_s)
    assert device_s == sorted(device_s) and device_s[0] >= 0
    assert_same_state(run, run_here(replace(case, topk_ratio=0, update_interval=1, publish_lag=0, strategy_options={})))


# Kernels


DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1), (1, 7), (3, 1), (5, 16), (31, 17), (2, 70001), (700, 1031), (4096, 4096)]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_cuda_has_torchs() -> None:
    assert isinstance(kernels_for(device()), TorchKernels)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_statistics(shape: tuple[int, int], dtype: torch.dtype) -> None:
    gradient = random(*shape, dtype=dtype)
    theirs = CpuKernels().statistics(gradient, directions=True)
    ours = TorchKernels().statistics(gradient.to(device()), directions=True)
    total_only = TorchKernels().statistics(gradient.to(device()), directions=False)
    assert ours.rows is not None and ours.columns is not None and theirs.rows is not None and theirs.columns is not None
    torch.testing.assert_close(ours.total.cpu(), theirs.total, rtol=1e-5, atol=0)
    torch.testing.assert_close(ours.rows.cpu(), theirs.rows, rtol=1e-5, atol=0)
    torch.testing.assert_close(ours.columns.cpu(), theirs.columns, rtol=2e-5, atol=0)
    assert torch.equal(ours.total, total_only.total)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_statistics_of_a_bad_gradient_are_not_finite(value: float) -> None:
    gradient = torch.ones(2, 517, device=device())
    gradient[1, 500] = value
    statistics = TorchKernels().statistics(gradient, directions=True)
    assert statistics.rows is not None and statistics.columns is not None
    assert not torch.isfinite(statistics.total)
    assert torch.isfinite(statistics.rows).tolist() == [True, False]
    assert (~torch.isfinite(statistics.columns)).nonzero().flatten().tolist() == [500]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_stand_in(shape: tuple[int, int], dtype: torch.dtype) -> None:
    rows, columns = shape
    gradient = random(*shape, seed=1, dtype=dtype)
    of_rows, of_columns = random(rows, 1, seed=2).abs() * 1e-2, random(1, columns, seed=3).abs()
    weights, before = random(*shape, dtype=dtype), random(*shape, dtype=dtype)
    ours = weights.to(device())
    for finite in (True, False):
        CpuKernels().stand_in_(
            weights, gradient, of_rows, of_columns, RoundingNoise(7, torch.device("cpu")), torch.tensor(finite)
        )
        on_device = [t.to(device()) for t in (gradient, of_rows, of_columns)]
        TorchKernels().stand_in_(ours, *on_device, RoundingNoise(7, device()), torch.tensor(finite, device=device()))
        # The same random bits: two roundings of float32 may tip a weight by one unit of its own type, rarely.
        unit = torch.finfo(dtype).eps
        torch.testing.assert_close(ours.cpu().float(), weights.float(), rtol=max(unit, 1e-6), atol=1e-6)
        assert dtype == torch.float32 or int((ours.cpu() != weights).sum()) <= 1e-3 * weights.numel() + 1
    assert weights.numel() < 10 or not torch.equal(weights, before)


@pytest.mark.parametrize("n", [1, 17, 513, 600_000])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("decoupled", [True, False])
def test_adamw(n: int, dtype: torch.dtype, decoupled: bool) -> None:
    state, weights = random(3, n).abs(), torch.empty(n, dtype=dtype)
    ours, shown = state.to(device()), weights.to(device())
    h = GroupHyperparameters(lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, decoupled=decoupled)
    for step, finite in ((1, True), (2, True), (2, False), (3, True)):
        gradient, count = random(n, seed=step, dtype=dtype), torch.tensor(float(step), dtype=torch.float64)
        factor = torch.tensor(0.5 if finite else math.nan)
        scale = StepScale(factor=factor, finite=torch.tensor(finite), norm=factor)
        scale_there = StepScale(factor=factor.to(device()), finite=scale.finite.to(device()), norm=factor.to(device()))
        before = ours.clone()
        CpuKernels().adamw_(state, gradient, weights, hyperparameters=h, count=count, scale=scale)
        TorchKernels().adamw_(
            ours, gradient.to(device()), shown, hyperparameters=h, count=count.to(device()), scale=scale_there
        )
        assert finite or torch.equal(ours, before)
    torch.testing.assert_close(ours.cpu(), state, rtol=2e-6, atol=2e-7)
    assert torch.equal(shown, ours[0].to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_columns_there_and_back(dtype: torch.dtype) -> None:
    matrix, columns = random(900, 701, dtype=dtype).to(device()), torch.tensor([0, 3, 350, 700], device=device())
    selected = torch.empty(900, 4, dtype=dtype, device=device())
    TorchKernels().gather_columns(matrix, columns, selected)
    assert torch.equal(selected, matrix[:, columns])
    target = torch.zeros_like(matrix)
    TorchKernels().scatter_columns(target, columns, selected)
    assert torch.equal(target[:, columns], selected)
    assert int((target != 0).sum()) == int((selected != 0).sum())
