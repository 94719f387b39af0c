"""A device that runs behind the host, recorded: nothing races, nothing waits, and planted errors are found; which operations the host
waits for, as on a CUDA device, and which are errors there.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from deepspeed.utils import safe_get_full_grad
from torch import Tensor
from typing_extensions import override

from callbacks import At
from gpu_cases import RACES
from harness import AUTO, Case, optimizer_of, run_here
from lightning_zenflow.core.device import HostRuntime, SideStream, runtime_of
from lightning_zenflow.deepspeed.fetch import FetchCoordinator
from lightning_zenflow.deepspeed.stage_3 import ZenFlowZero3Optimizer
from lightning_zenflow.offload.resident import Residents
from lightning_zenflow.worker.process import SupervisedWorker
from networks import TiedNet
from rank_processes import run_on_ranks
from recorded_device.clocks import HOST
from recorded_device.device import RecordedDevice, RecordedEvent
from recorded_device.tensors import DEVICE
from recorded_device.watch import recorded_device
from same_bits import assert_same_run

SHAPES = [(16, 12)] * 6 + [(64, 64)] + [(13, 7)] * 3 + [(9,)] * 4
WIDTHS = [24] * 5 + [64, 64, 16]
SMALL = {
    "DeviceLinearLossModule": {"shapes": SHAPES},
    "Perceptron": {"widths": WIDTHS},
    "PerceptronAtOnce": {"widths": WIDTHS},
}


def on_this_machine(case: Case, **keys: Any) -> Case:
    """A case of the GPU's tests, with a small model and with keys of the strategy."""
    small = replace(case, accelerator="cpu", model_options=SMALL[case.model], steps=8)
    return small.with_keys(reduce_bucket_size=700, **keys)


class UsedEarly(TiedNet):
    """Only a step's first micro-batch uses the last layer."""

    @override
    def loss(self, step: int, micro: int, rank: int) -> Tensor:
        self.used_every = int(micro == 0)
        return super().loss(step, micro, rank)


def produce_on_two_streams(trainer: pl.Trainer) -> None:
    """Has every second gradient come up on a stream of its own, as where autograd or torch.compile uses several."""
    optimizer, calls = optimizer_of(trainer), itertools.count()
    runtime = runtime_of(optimizer.training.parts.rank.device)
    main, second = runtime.current_stream(), runtime.new_stream()
    process, end = optimizer.process_gradients, optimizer.independent_gradient_partition_epilogue

    def on_its_stream(*args: Any) -> None:
        if next(calls) % 2:
            process(*args)
            return
        second.wait_stream(main)
        with runtime.on(second):
            process(*args)

    def epilogue() -> None:
        # As autograd does at the end of a backward pass.
        main.wait_stream(second)
        end()

    optimizer.process_gradients, optimizer.independent_gradient_partition_epilogue = on_its_stream, epilogue


TWO_PRODUCERS = (At("on_train_start", produce_on_two_streams),)
READ = At("on_before_optimizer_step", lambda t: [safe_get_full_grad(p) for p in t.lightning_module.parameters()])


FIXED, NETWORK = (on_this_machine(RACES[name]) for name in ("fixed gradients", "a network"))
CASES = {
    **{name: on_this_machine(case) for name, case in RACES.items()},
    "S=1, d=1, accumulated": replace(FIXED, update_interval=1, publish_lag=1, accumulate=2),
    # Where nothing is in flight but what is published, a flush has no publish buffer to wait for before it gathers anew.
    "flushes, one step late": replace(NETWORK, update_interval=1, flush_after=(5, 6, 7)).with_keys(
        weight_prediction=0, provisional_scale=0
    ),
    # As from layers that torch compiles.
    "gradients at once": replace(NETWORK, model="PerceptronAtOnce"),
    "changes of schedule": replace(NETWORK, schedules=((3, 8, 1), (7, 1, 0), (9, 2, 1))).with_keys(**AUTO),
    "frozen layers": replace(
        FIXED, model="LinearLossModule", model_options={"frozen_in": {0: (4, 8), 3: (2, 100)}}
    ).with_keys(reduce_bucket_size=50),
    "fp16": replace(NETWORK, precision="16-true"),
    "a layer of the first micro-batch": replace(NETWORK, model=UsedEarly, model_options={}, accumulate=2).with_keys(
        accumulate_on="device"
    ),
    "in host memory": replace(
        NETWORK,
        stage=3,
        offload_parameters=True,
        topk_ratio=0,
        update_interval=1,
        publish_lag=0,
        flush_after=(5,),
        strategy_options={"overlap_comm": True, "reduce_bucket_size": 700},
    ),
    # Every third step is clipped.
    "true factors": replace(FIXED, update_interval=1, publish_lag=0, max_norm=65.0, flush_after=(5,)).with_keys(
        clip_prediction=False
    ),
    "stage 3": replace(NETWORK, stage=3),
    "stage 3, submitted in backward": replace(NETWORK, stage=3, update_interval=1, publish_lag=0, flush_after=(5,)),
    "half resident": replace(NETWORK, update_interval=1, publish_lag=0, flush_after=(5,)).with_keys(offload_ratio=0.5),
    "half resident, late, sums in slots": replace(NETWORK, accumulate=2).with_keys(
        offload_ratio=0.5, accumulate_on="host"
    ),
    "all resident": replace(NETWORK, stage=3, flush_after=(5,)).with_keys(offload_ratio=0),
    # A bucket is filled again behind its copies to the host, also from a stream that does not wait for the one of the reduction.
    **{
        f"{name}, two streams": replace(on_this_machine(RACES[name]), callbacks=TWO_PRODUCERS)
        for name in ("fixed gradients", "submitted in backward")
    },
    "whole gradients are read": replace(NETWORK, steps=3, callbacks=(READ,)),
}


FAST = (
    "a network",
    "submitted in backward",
    "fp16",
    "flushes, one step late",
    "gradients at once",
    "stage 3",
    "a layer of the first micro-batch",
    "in host memory",
    "half resident",
    "submitted in backward, two streams",
    "whole gradients are read",
)
"""Each finds waits that the others do not need."""


def record(case: Case, *, events_are_reached: bool = False) -> RecordedDevice:
    with recorded_device(events_are_reached=events_are_reached) as device:
        run_here(case, callbacks=[device.step_ends()])
    return device


@pytest.mark.parametrize(
    "events_are_reached", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["late", "early"]
)
@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in CASES])
def test_every_access_is_ordered(name: str, events_are_reached: bool) -> None:
    assert not record(CASES[name], events_are_reached=events_are_reached).order.races


def test_without_room_for_gradients_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostRuntime, "room", lambda _: 0)
    device = record(NETWORK)
    assert not device.order.races
    assert any(o.kind == "h2d" and o.place == "provisional_update.published" for o in device.order.operations)


def lift_bound(trainer: pl.Trainer) -> None:
    """DeepSpeed's, of the number of fetches under way, for which the host waits."""
    coordinator = optimizer_of(trainer).parameter_offload.param_coordinator
    coordinator._PartitionedParameterCoordinator__max_ongoing_fetch_events = 10**6


ON_HOST = replace(CASES["in host memory"], callbacks=(At("on_train_start", lift_bound),), flush_after=())


@pytest.mark.parametrize(
    "name",
    [pytest.param("fixed gradients", marks=pytest.mark.slow), "submitted in backward", "stage 3", "in host memory"],
)
def test_what_a_step_waits_for(name: str) -> None:
    """Neither selecting nor synchronous: under stage 3 for DeepSpeed's bound of the gradients under way, else for nothing. For a fetch the
    stream of the module waits that needs it.
    """
    device = record(ON_HOST if name == "in host memory" else CASES[name].with_keys(select_interval=0))
    assert not device.order.races
    assert {*device.waits()} == ({"stage3.__reduce_and_partition_ipg_grads"} if CASES[name].stage == 3 else set())


def test_weights_in_host_memory_are_fetched_anew_in_each_step() -> None:
    """Copies of them, on a device with memory of its own; after training the module has those of the last step."""
    case = replace(ON_HOST, max_norm=None, steps=6, recorded=True, watched=False, callbacks=())
    with recorded_device():
        run = run_here(case)
    assert_same_run(run, run_here(replace(case, offload_parameters=False)))


def test_frozen_weights_in_host_memory_are_page_locked_until_the_end() -> None:
    case = replace(ON_HOST, model="TiedNet", model_options={"frozen": (1,)}, precision="bf16-true", steps=4)
    pieces: list[Tensor] = []

    def look(trainer: Any) -> None:
        pieces[:] = [p.ds_tensor.data for p in trainer.lightning_module.parameters() if not p.requires_grad]
        assert len(pieces) == 6 and all(map(device.is_page_locked, pieces))

    with recorded_device() as device:
        run_here(case, callbacks=[At("on_train_batch_end", look)])
    assert not device.order.races
    assert not any(map(device.is_page_locked, pieces))


def test_late_fetches_are_ordered(monkeypatch: pytest.MonkeyPatch) -> None:
    """They begin where the parameters are needed, since the worker's answers are never seen before they are waited for."""
    late: list[Any] = []
    begin = FetchCoordinator._begin

    def begins(coordinator: FetchCoordinator, parameters: list[Any], forward: bool) -> None:
        late.extend(parameters)
        begin(coordinator, parameters, forward)

    monkeypatch.setattr(SupervisedWorker, "has_answered", lambda *_: False)
    monkeypatch.setattr(FetchCoordinator, "_begin", begins)
    assert not record(ON_HOST).order.races
    assert len(late) > 25


def test_a_clipped_step_waits_for_the_worker_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it submits more blocks at its end than there are publish buffers: 24 and 3.

    The device reaches an event when the host next waits for an answer of the worker.
    """
    record_event = RecordedEvent.record
    n_waited, await_worker = [0], SupervisedWorker.wait_for

    def wait_for(worker: SupervisedWorker, *submissions: Any) -> None:
        n_waited[0] += 1
        await_worker(worker, *submissions)

    def records(event: RecordedEvent, stream: Any = None) -> None:
        record_event(event, stream)
        event.at = n_waited[0]  # type: ignore[attr-defined]

    def query(event: RecordedEvent) -> bool:
        if is_reached := event.at < n_waited[0]:  # type: ignore[attr-defined]
            event._device.order.follow(HOST, event.clock)
        return is_reached

    monkeypatch.setattr(SupervisedWorker, "wait_for", wait_for)
    monkeypatch.setattr(RecordedEvent, "record", records)
    monkeypatch.setattr(RecordedEvent, "query", query)
    monkeypatch.setattr("lightning_zenflow.offload.build.blocks_wanted", lambda *_, **__: 24)
    case = replace(CASES["true factors"], max_norm=1e-2, flush_after=(), steps=6)
    device = record(case.with_keys(select_interval=0))
    assert not device.order.races
    assert not any(device.waits())


def test_gradients_larger_than_a_bucket_are_kept_for_their_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a wait: they have memory of their own, which is not used again before."""
    case = replace(NETWORK, callbacks=TWO_PRODUCERS, steps=6).with_keys(reduce_bucket_size=10)
    assert not record(case).order.races
    monkeypatch.setattr(RecordedDevice, "keep_for", lambda *_: None)
    assert record(case).order.races


FETCHES = ZenFlowZero3Optimizer.fetches


def order_fetches(in_order: bool, _: pl.Trainer) -> None:
    """Trains with or without the order of stage 3's fetches behind what was published."""
    ZenFlowZero3Optimizer.fetches = FETCHES if in_order else None  # type: ignore[assignment,method-assign]


UNORDERED = (At("setup", partial(order_fetches, False)), At("teardown", partial(order_fetches, True)))


def test_fetches_of_stage_3_are_behind_what_was_published() -> None:
    """On two ranks, each on a device of its own: one rank alone uses its weights in place."""
    case = replace(CASES["stage 3"], loop="recorded", steps=6, flush_after=(3,))
    runs = run_on_ranks({"ordered": case, "unordered": replace(case, callbacks=UNORDERED)})
    assert not any(run.races for run in runs["ordered"])
    for run in runs["unordered"]:
        assert any("_allgather_base_ in fetch." in race for race in run.races), run.races


def without(owner: type, method: str) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(owner, method, lambda *_: None)


def updated_too_early(patch: pytest.MonkeyPatch) -> None:
    """Resident blocks are updated without a wait for the copies of their gradients."""
    step = Residents.step

    def early(residents: Residents) -> None:
        with pytest.MonkeyPatch.context() as unordered:
            unordered.setattr(SideStream, "join", lambda self: None)
            step(residents)

    patch.setattr(Residents, "step", early)


def event_elsewhere(patch: pytest.MonkeyPatch) -> None:
    """Events of the stream of copies to the host are recorded on the current stream."""
    patch.setattr(SideStream, "record_event", lambda self: self._runtime.record_event())


PLANTED = {
    "no wait for copies": (without(SideStream, "join"), CASES["a layer of the first micro-batch"]),
    "residents updated too early": (updated_too_early, CASES["half resident"]),
    "a bucket filled again too early": (event_elsewhere, FIXED),
    # Its job's word does not wait for the copies from it.
    "a buffer reused too early in backward": (without(SideStream, "wait_for"), CASES["submitted in backward"]),
    "a buffer reused too early": (without(RecordedEvent, "synchronize"), replace(NETWORK, flush_after=(5, 6))),
}


@pytest.mark.parametrize(
    "error", [error if n < 2 else pytest.param(error, marks=pytest.mark.slow) for n, error in enumerate(PLANTED)]
)
def test_planted_errors_are_found(error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, case = PLANTED[error]
    plant(monkeypatch)
    assert record(case).order.races


Operation = Callable[[Tensor, Tensor, Tensor], object]
"""Of a tensor of the device, one in pageable and one in page-locked memory of the host: [3, 4] float32 each."""


@pytest.fixture
def device() -> Iterator[RecordedDevice]:
    with recorded_device() as device:
        yield device


def tensors(device: RecordedDevice) -> tuple[Tensor, Tensor, Tensor]:
    shape = (3, 4)
    return torch.ones(shape, device=DEVICE), torch.ones(shape), device.empty_on_host(shape, torch.float32).zero_()


WAITS: list[Operation] = [
    lambda device, _, __: device[0, 0].item(),
    lambda device, _, __: bool(device[0, 0] > 0),
    lambda device, _, __: device.tolist(),
    lambda device, _, __: device.cpu(),
    lambda device, _, __: device.nonzero(),
    lambda device, _, __: torch.equal(device, device),
    lambda device, _, __: torch.unique(device),
    lambda device, _, __: device[device > 0],
    lambda device, _, __: device.__setitem__(device > 0, torch.zeros(12, device=DEVICE)),
    lambda device, _, __: device[torch.tensor([0, 1])],
    lambda device, pageable, _: pageable.copy_(device, non_blocking=True),
    lambda device, pageable, _: device.copy_(pageable, non_blocking=True),
    lambda device, pageable, _: pageable.to(DEVICE, non_blocking=True),
    lambda device, _, locked: locked.copy_(device),
    lambda device, _, locked: device.copy_(locked),
    # By way of pageable memory.
    lambda device, _, locked: device.view(-1)[:3].copy_(locked[:, 0], non_blocking=True),
    lambda device, _, locked: locked[:, 0].copy_(device.view(-1)[:3], non_blocking=True),
    lambda device, _, locked: device.double().copy_(locked, non_blocking=True),
]
NO_WAITS: list[Operation] = [
    lambda device, _, __: device[1:].add_(device[0]),
    lambda device, _, __: device.mul_(torch.tensor(2.0)),
    lambda device, _, __: device.__setitem__(device > 0, 2.0),
    lambda device, _, __: torch.where(device > 0, device, 0.0),
    lambda device, _, __: device[torch.arange(2, device=DEVICE)],
    lambda device, _, locked: locked.copy_(device, non_blocking=True),
    lambda device, _, locked: locked.copy_(device.double(), non_blocking=True),
    lambda device, _, locked: locked[1:].to(DEVICE, non_blocking=True),
    lambda _, pageable, __: pageable[pageable > 0].tolist(),
]
MIXED: list[Operation] = [
    lambda device, pageable, _: device + pageable,
    lambda device, _, locked: device.add_(locked),
    lambda device, pageable, _: pageable.add_(device[0, 0]),
    lambda device, pageable, _: torch.cat([device, pageable]),
]


@pytest.mark.parametrize("operation", WAITS + NO_WAITS + MIXED)
def test_what_the_host_waits_for_and_what_is_an_error(operation: Operation, device: RecordedDevice) -> None:
    of_both = tensors(device)
    operation(*of_both)
    if operation in MIXED:
        (error,) = device.order.races
        assert "mixes memory of host and device" in error
    else:
        assert [o.kind for o in device.order.operations].count("host wait") == (operation in WAITS)
        assert not device.order.races


def test_the_host_must_wait_before_it_reads(device: RecordedDevice) -> None:
    on_device, _, locked = tensors(device)
    locked.copy_(on_device, non_blocking=True)
    copied = device.main.record_event()
    copied.synchronize()
    locked.sum()
    assert not device.order.races
    locked.copy_(on_device, non_blocking=True)
    locked.sum()
    (error,) = device.order.races
    assert error.endswith(f"on {HOST}")
