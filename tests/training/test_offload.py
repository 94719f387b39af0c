"""`offload: true`: the device-owned columns' state lives in host memory, and no bit depends on it."""

import dataclasses
import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from typing_extensions import override

import random_selection  # noqa: F401  # named by cases
from harness import APPROXIMATE, AUTO, EVERYTHING, RESELECTING, Case, make_trainer, run_here
from lightning_zenflow import ZenFlowStrategy
from lightning_zenflow.core.partition import Slice, build_partition
from lightning_zenflow.core.step_inputs import GroupHyperparameters, step_scale
from lightning_zenflow.telemetry.counters import Traffic
from lightning_zenflow.topk.columns import Columns, DeviceColumns, NewState, OffloadedState, ResidentState
from lightning_zenflow.topk.state_export import ExportRegion, ExportSection, export_bytes
from lightning_zenflow.worker.arena import Arena, ArenaSizes
from lightning_zenflow.worker.rank_state import RankState
from rank_processes import run_on_ranks
from rank_states import make_rank_state, supervised_worker
from same_bits import assert_same_run

CPU = torch.device("cpu")

CASES = {
    "one selection": Case(topk_ratio=0.3),
    "no lag": Case(topk_ratio=0.3, update_interval=2, publish_lag=0, strategy_options=RESELECTING),
    "reselection": Case(topk_ratio=0.3, strategy_options=RESELECTING, flush_after=(6, 7)),
    "reselection, long lag": Case(topk_ratio=0.3, update_interval=2, publish_lag=3, strategy_options=EVERYTHING),
    "warm-up, everything on the device, clipped": Case(topk_ratio=1, warm_up=3, max_norm=1.0),
    "bf16, accumulated over micro-batches": Case(
        topk_ratio=0.3, precision="bf16-true", accumulate=3, max_norm=1.0, strategy_options=APPROXIMATE
    ),
    "changes of schedule": Case(
        topk_ratio=0.3,
        schedules=((3, 8, 1), (7, 1, 0), (9, 2, 2)),
        strategy_options={**EVERYTHING, **AUTO},
    ),
    "a network": Case(model="SmallNet", topk_ratio=0.3, strategy_options=EVERYTHING),
}


def both(case: Case) -> tuple[Case, Case]:
    """The case without and with offload."""
    case = replace(case, steps=13)
    return case, case.with_keys(offload=True)


@pytest.mark.parametrize("name", CASES)
def test_no_bit_depends_on_it(name: str) -> None:
    resident, offloaded = both(CASES[name])
    assert_same_run(run_here(offloaded), run_here(resident))


def test_no_bit_depends_on_it_on_two_ranks() -> None:
    names = ["reselection", "a network"]
    cases = {f"{name} {i}": case for name in names for i, case in enumerate(both(CASES[name]))}
    runs = run_on_ranks(cases)
    for name in names:
        for resident, offloaded in zip(runs[f"{name} 0"], runs[f"{name} 1"], strict=True):
            assert_same_run(offloaded, resident)


@pytest.fixture
def region() -> Iterator[ExportRegion]:
    """Room for five entries."""
    vector = Slice(parameter=0, param_group=0, begin=0, start=0, numel=5, columns=1, is_matrix=False)
    rank = make_rank_state(build_partition([vector], [5], 1), [torch.zeros(5)], topk_ratio=1.0)
    worker = supervised_worker(rank)
    yield ExportSection(rank, worker, topk_ratio=1.0, offload=False).next_region(0)
    worker.kill()
    rank.arena.close(keep_state=False)


@pytest.mark.parametrize("state_class", [ResidentState, OffloadedState])
def test_what_changes_on_the_device_is_kept(state_class: NewState, region: ExportRegion) -> None:
    (exported,) = region.state([5])
    state = state_class(exported, region, CPU, Traffic())
    exported.copy_(torch.arange(15.0).view(3, 5))
    state.load()
    with state.on_device() as values:
        values.add_(1)
    with state.on_device() as values:
        assert torch.equal(values, torch.arange(1.0, 16.0).view(3, 5))
    assert torch.equal(state.master_on_device(), torch.arange(1.0, 6.0))


def test_a_visit_leaves_nothing_behind(region: ExportRegion) -> None:
    (exported,) = region.state([5])
    state = OffloadedState(exported, region, CPU, Traffic())
    with state.on_device() as values:
        visitor = weakref.ref(values)
        assert values.data_ptr() != exported.data_ptr()
    del values
    gc.collect()
    assert visitor() is None


class HeldMemory(pl.Callback):
    """After each step: bytes that device-owned entries hold, by who holds them."""

    def __init__(self) -> None:
        self.states = 0
        self.beside: dict[torch.dtype, int] = {}

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        assert isinstance(trainer.strategy, ZenFlowStrategy)
        optimizer = trainer.strategy.zenflow_optimizer
        assert optimizer is not None
        self.states, self.beside = 0, {}
        # The model's own, of which columns keep views.
        storages = {weights.untyped_storage().data_ptr() for weights in optimizer.parts.rank.weights}
        for columns in optimizer.parts.ownership.current:
            if columns is not None:
                arena = optimizer.parts.rank.arena.export.untyped_storage().data_ptr()
                for group in columns._groups:
                    assert isinstance(group.state, OffloadedState)
                    self.states += group.state._exported.nbytes
                for tensor in tensors_of(columns):
                    storage = tensor.untyped_storage()
                    n_bytes = storage.nbytes()
                    if storage.data_ptr() == arena:
                        continue
                    if storage.data_ptr() not in storages:
                        storages.add(storage.data_ptr())
                        self.beside[tensor.dtype] = self.beside.get(tensor.dtype, 0) + n_bytes
        self.numel = optimizer.parts.ownership.numel


def tensors_of(columns: DeviceColumns) -> Iterator[Tensor]:
    """Every tensor that is reachable from an object of this package but the state of the rank, starting at `columns`."""
    seen: set[int] = set()
    waiting: list[Any] = [columns]
    while waiting:
        found = waiting.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, Tensor):
            yield found
        elif isinstance(found, dict):
            waiting.extend(found.values())
        elif isinstance(found, list | tuple):
            waiting.extend(found)
        elif type(found).__module__.startswith("lightning_zenflow") and not isinstance(found, RankState | ExportRegion):
            fields = dataclasses.fields(found) if dataclasses.is_dataclass(found) else ()
            waiting.extend([getattr(found, field.name) for field in fields] or vars(found).values())


def test_between_steps_the_device_holds_nothing_but_one_value_an_entry() -> None:
    held = HeldMemory()
    _, case = both(replace(CASES["bf16, accumulated over micro-batches"], accumulate=1))
    trainer = make_trainer(case.make_strategy(), max_steps=case.steps, precision=case.precision, callbacks=[held])
    trainer.fit(case.make_model())
    assert held.numel > 0
    assert held.states == 12 * held.numel
    # The other ones are the numbers of columns.
    assert set(held.beside) == {torch.bfloat16, torch.int64}
    assert held.beside[torch.bfloat16] == 2 * held.numel


ROWS, COLUMNS, OWNED, STEPS = 4096, 2048, 512, 4


def train_columns(device: torch.device, *, offload: bool) -> tuple[int, int, Tensor, Tensor]:
    """Some steps of one block's columns, without a trainer.

    Returns:
        Bytes of the device that the columns hold between steps, and at most in a step; the weights shown; their exact state on the host.
    """
    numel = ROWS * COLUMNS
    whole = Slice(parameter=0, param_group=0, begin=0, start=0, numel=numel, columns=COLUMNS, is_matrix=True)
    partition = build_partition([whole], [numel], 1)
    share = OWNED / COLUMNS
    sizes = ArenaSizes(
        n_param_groups=1,
        n_step_records=2,
        n_slots=1,
        n_publish_buffers=1,
        dtype=torch.bfloat16,
        export_bytes=export_bytes(partition, share, offload=offload),
    )
    arena = Arena(partition, sizes, device=device)
    generator = torch.Generator().manual_seed(0)
    arena.master.copy_(torch.randn(numel, generator=generator))
    weights = arena.master.to(device, torch.bfloat16)
    gradients = torch.randn(STEPS, numel, generator=generator).to(device, torch.bfloat16)
    host = torch.arange(0, COLUMNS, COLUMNS // OWNED)
    selected = Columns(device=host.to(device), host=host)
    adamw = GroupHyperparameters(lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, decoupled=True)
    one = torch.ones((), device=device, dtype=torch.float64)

    def allocated() -> int:
        return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0

    scale = step_scale(one, max_norm=0.0, loss_scale=1.0, count=torch.zeros_like(one))
    before = allocated()
    rank = make_rank_state(partition, [weights], arena=arena)
    worker = supervised_worker(rank)
    arena.reserve(n_slots=1, n_publish_buffers=1, touch=worker.touch)
    region = ExportSection(rank, worker, topk_ratio=share, offload=offload).next_region(0)
    columns = DeviceColumns(rank, 0, [selected], region, new_state=OffloadedState if offload else ResidentState)
    for _ in range(2):  # twice, so that the worker writes what the device may still be reading
        columns.request("select")
        columns.load("select")
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        for step in range(STEPS):
            wanted = columns.selection(0)
            assert wanted is not None
            rank.kernels.select(gradients[step].view(-1, COLUMNS), [wanted])
            columns.step([adamw], replace(scale, count=one * (step + 1)))
            columns.write_weights()
    held = allocated() - before
    peak = torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else 0
    with columns._groups[0].state.on_device() as values:
        state = values.to("cpu", copy=True)
    shown = weights.cpu()
    worker.close()
    arena.close(keep_state=False)
    return held, peak, shown, state


def test_columns_alone() -> None:
    _, _, resident_weights, resident = train_columns(CPU, offload=False)
    _, _, weights, state = train_columns(CPU, offload=True)
    assert torch.equal(weights, resident_weights)
    assert torch.equal(state, resident)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_device_memory_drops() -> None:
    device = torch.device("cuda", 0)
    entries = ROWS * OWNED
    held_resident, peak_resident, resident_weights, resident = train_columns(device, offload=False)
    held, peak, weights, state = train_columns(device, offload=True)
    assert held_resident - held == pytest.approx(12 * entries, rel=0.01)
    assert held == pytest.approx(2 * entries, rel=0.05)
    # This block is the only one, so it is all on the device during its visit: no more than without offload.
    assert peak <= peak_resident * 1.01
    assert torch.equal(weights, resident_weights)
    assert torch.equal(state, resident)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_no_bit_depends_on_it_on_a_gpu() -> None:
    """Pinned memory under copies that the training thread does not wait for: a missing order shows as a difference."""
    for _ in range(5):
        _, _, resident_weights, resident = train_columns(torch.device("cuda", 0), offload=False)
        _, _, weights, state = train_columns(torch.device("cuda", 0), offload=True)
        assert torch.equal(weights, resident_weights)
        assert torch.equal(state, resident)
