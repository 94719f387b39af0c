"""The cost model: against calculations by hand, and against the arena that training allocates."""

import dataclasses
import itertools

import pytest
import torch
from torch import nn

from lightning_zenflow.config import ConfigValueError, ZenFlowConfig
from lightning_zenflow.core.partition import Slice, build_partition
from lightning_zenflow.estimate.byte_counts import arena_bytes_of, cpu_adamw_bytes, replay_bytes
from lightning_zenflow.estimate.cost import CostComparison, estimate
from lightning_zenflow.estimate.machine import Machine, Workload
from lightning_zenflow.estimate.report import as_text
from lightning_zenflow.estimate.shapes import Matrix, ModelShapes, shapes_of_count, shapes_of_module
from lightning_zenflow.estimate.zenflow_cost import replay_core_s
from lightning_zenflow.schedule.staggered import StaggeredSchedule, UpdateSchedule
from lightning_zenflow.topk.state_export import export_bytes
from lightning_zenflow.worker.arena import ArenaSizes, arena_bytes

MACHINE = Machine(gpus=4, gpu_mem=80, pcie=25, cpu_bw=150)
MODEL = ModelShapes(name="test", matrices=[Matrix(rows=50_000, columns=20_000, count=4)], vector_numel=1_000_000)
"""4.001e9 parameters."""
FIXED = ZenFlowConfig(update_interval=4, publish_lag=1)


def predict(
    model: ModelShapes = MODEL,
    *,
    step_ms: float = 500,
    config: ZenFlowConfig | None = None,
    accumulate_grad_batches: int = 1,
    **machine: float,
) -> CostComparison:
    workload = Workload(model=model, step_ms=step_ms, accumulate_grad_batches=accumulate_grad_batches)
    return estimate(workload, dataclasses.replace(MACHINE, **machine), config)


def test_memory_by_hand() -> None:
    prediction = predict()
    partition = 4.001e9 / 4
    weights, buckets = 2 * 4.001e9, 2 * 2 * 2e8
    # In the step: master, moments, gradients, fp32 gradients. That is more than the buckets were.
    assert prediction.none.device_bytes == pytest.approx(weights + (12 + 2 + 4) * partition)
    assert prediction.none.host_bytes == 0
    assert prediction.zero_offload.device_bytes == pytest.approx(weights + buckets + 2 * 1e9)
    assert prediction.zero_offload.host_bytes == pytest.approx((12 + 4 + 2) * 4.001e9)
    # 1000 of 20000 columns, and all vectors; 70000 floats a matrix; at S = 4 and d = 1 a quarter of the gradients is kept.
    owned = 4 * 50_000 * 1000 + 1_000_000
    expected = weights + 2 * 2 * (4.001e9 / 32) + 14 * owned / 4 + 4 * 4 * 70_000 / 4 + 2 * partition / 4
    assert prediction.zenflow.device_bytes == pytest.approx(expected)


def test_traffic_and_time_by_hand() -> None:
    prediction = predict(config=FIXED, cpu_bw=400)
    partition = 4.001e9 / 4
    none, offload, zenflow = prediction.none, prediction.zero_offload, prediction.zenflow
    assert none.step_s == 0.5
    assert (none.d2h_bytes, none.h2d_bytes, none.cpu_s) == (0, 0, 0)

    assert offload.d2h_bytes == pytest.approx(4 * partition)
    assert offload.h2d_bytes == pytest.approx(2 * partition)
    # Its 160 ms of gradients hide behind backward's 333 ms.
    assert offload.step_s == pytest.approx(0.5 + 2 * partition / 25e9 + 42 * partition / 100e9)

    assert zenflow.d2h_bytes == pytest.approx(2 * partition)
    assert zenflow.h2d_bytes == pytest.approx(2 * partition / 4, abs=1)
    # The worker's 34 bytes and the copies' 10, every fourth step.
    assert zenflow.cpu_s == pytest.approx((34 + 10) * partition / 100e9 / 4)
    assert zenflow.wait_s == 0
    assert zenflow.step_s == pytest.approx(0.5 + 2 * partition / 25e9 / 4)
    assert prediction.schedule == UpdateSchedule(update_interval=4, publish_lag=1)
    assert (prediction.fastest, prediction.fastest_schedule) == (zenflow, prediction.schedule)


def test_without_lag_the_worker_is_waited_for() -> None:
    cost = predict(config=ZenFlowConfig(update_interval=1, publish_lag=0, optimizer_in_backward=False)).zenflow
    assert cost.wait_s == pytest.approx(cost.cpu_s)
    assert cost.step_s == pytest.approx(0.5 + cost.copy_s + cost.cpu_s)


def test_in_backward_only_the_last_gradients_are_waited_for() -> None:
    """A quarter of the 4 billion is the embedding, whose gradient comes last; the rest is updated while backward goes on."""
    config = ZenFlowConfig(update_interval=1, publish_lag=0)
    cost = predict(config=config, cpu_bw=400).zenflow
    late = predict(config=dataclasses.replace(config, optimizer_in_backward=False), cpu_bw=400).zenflow
    assert late.wait_s == pytest.approx(late.cpu_s)
    assert 0.2 * cost.cpu_s < cost.wait_s < 0.4 * cost.cpu_s


def test_gradients_that_outlast_backward_delay_the_step() -> None:
    partition = 4.001e9 / 4
    prediction = predict(step_ms=60, config=ZenFlowConfig(update_interval=8, publish_lag=1), cpu_bw=1e6)
    assert prediction.zenflow.copy_s == pytest.approx(2 * partition / 25e9 - 0.04 + 2 * partition / 25e9 / 8)
    assert prediction.zero_offload.copy_s == pytest.approx(4 * partition / 25e9 - 0.04 + 2 * partition / 25e9)
    assert prediction.limit == "PCIe"


def test_accumulation() -> None:
    partition = 4.001e9 / 4
    config = ZenFlowConfig(update_interval=4, publish_lag=1)
    one, four = (predict(step_ms=2000, accumulate_grad_batches=n, config=config) for n in (1, 4))
    assert four.zero_offload.d2h_bytes == pytest.approx((4 + 4 * 2) * partition)
    assert four.zero_offload.h2d_bytes == pytest.approx((2 + 3 * 2) * partition)
    assert four.zero_offload.host_bytes - one.zero_offload.host_bytes == pytest.approx(2 * 4.001e9)
    assert four.zenflow.d2h_bytes == one.zenflow.d2h_bytes
    assert four.zenflow.device_bytes - one.zenflow.device_bytes == pytest.approx(2 * partition, abs=2)


def test_accumulation_on_the_host() -> None:
    """Three sums cross PCIe in both directions; the device holds that of the largest matrix only."""
    partition, matrix = 4.001e9 / 4, 1e9
    keys = {"update_interval": 4, "publish_lag": 1}
    device, host = (
        predict(step_ms=2000, accumulate_grad_batches=4, config=ZenFlowConfig(**keys, accumulate_on=where)).zenflow
        for where in ("device", "host")
    )
    assert host.d2h_bytes - device.d2h_bytes == pytest.approx(3 * 2 * partition, abs=2)
    assert host.h2d_bytes - device.h2d_bytes == pytest.approx(3 * 2 * partition, abs=2)
    assert device.device_bytes - host.device_bytes == pytest.approx(2 * (partition - matrix), abs=2)
    assert host.step_s > device.step_s


def test_cost_of_a_job() -> None:
    assert [replay_bytes(s, 2) for s in (1, 2, 4)] == [28, 30, 34]
    assert replay_bytes(1, 4) == 32
    # One behind: a committed gradient and a tentative one.
    assert [replay_bytes(2, 2, moment_bytes) for moment_bytes in (4, 2)] == [30, 22]
    # What was measured for the design on two cores with 40 GB/s, in ns a parameter.
    for n_steps, measured in ((1, 0.60), (2, 0.67), (4, 0.93)):
        ns = max(replay_bytes(n_steps, 2) / 40, 1e9 * replay_core_s(n_steps) / 2)
        assert ns == pytest.approx(measured, rel=0.2)
    assert cpu_adamw_bytes(2) / 40 == pytest.approx(1.01, rel=0.05)


@pytest.mark.parametrize("keys", [{"update_interval": 4, "publish_lag": 1}, {"update_interval": 1, "publish_lag": 0}])
def test_bf16_moments_take_four_bytes_a_parameter_less(keys: dict[str, int]) -> None:
    float32, bfloat16 = (
        predict(gpus=1, config=ZenFlowConfig(**keys, moments_dtype=dtype)).zenflow for dtype in ("float32", "bfloat16")
    )
    numel = predict(gpus=1).workload.model.numel
    assert float32.host_bytes - bfloat16.host_bytes == pytest.approx(4 * numel)
    assert bfloat16.cpu_s < float32.cpu_s
    assert (float32.device_bytes, float32.d2h_bytes) == (bfloat16.device_bytes, bfloat16.d2h_bytes)


def test_few_cores_take_longer_than_memory() -> None:
    """One rank; 0.1 + 0.42 S ns a parameter and job of a core, of which the worker has half."""
    many = predict(gpus=1, config=FIXED).zenflow
    assert predict(gpus=1, config=FIXED, cpu_cores=64).zenflow == many
    # Eight cores: 0.45 ns a parameter, where 44 bytes take 0.29.
    assert predict(gpus=1, config=FIXED, cpu_cores=8).zenflow.cpu_s == pytest.approx(4.001 * 1.78 / 4 / 4)
    for cores in (2, [0, 1]):
        config = dataclasses.replace(FIXED, worker_cores=cores)
        assert predict(gpus=1, config=config).zenflow.cpu_s == pytest.approx(4.001 * 1.78 / 2 / 4)
    # Four ranks have two cores each.
    assert predict(config=FIXED, cpu_cores=8).zenflow.cpu_s == pytest.approx(4.001 / 4 * 1.78 / 1 / 4)


@pytest.mark.parametrize("key", ["pcie", "cpu_bw"])
@pytest.mark.parametrize("step_ms", [100, 3000])
def test_more_bandwidth_is_never_slower(key: str, step_ms: float) -> None:
    values = [10 * 2.0**i for i in range(8)]
    predictions = [predict(step_ms=step_ms, **{key: value}) for value in values]
    for costs in ([p.zero_offload for p in predictions], [p.fastest for p in predictions]):
        times = [c.step_s for c in costs]
        # The fastest S and d is the least stale within 2 %.
        assert all(later <= 1.02 * earlier + 1e-9 for earlier, later in itertools.pairwise(times)), times


@pytest.mark.parametrize("cpu_bw", [2, 20, 100, 200, 1000, 1e5])
def test_auto_hides_where_something_hides_and_says_what_limits(cpu_bw: float) -> None:
    prediction = predict(cpu_bw=cpu_bw)
    # With a tail that the device owns, less is copied than with any fixed schedule.
    assert prediction.fastest.step_s <= (1.025 if prediction.owns_tail else 1.02) * prediction.zenflow.step_s
    assert prediction.zenflow.step_s < prediction.zero_offload.step_s
    if prediction.limit == "CPU":
        assert prediction.schedule.update_interval == 16
    else:
        assert prediction.zenflow.wait_s <= 0.02 * prediction.zenflow.step_s
    assert (prediction.limit == "CPU") == (cpu_bw <= 20)


def test_a_long_step_on_a_fast_host_needs_no_lag() -> None:
    assert predict(step_ms=5000, cpu_bw=4000).schedule == UpdateSchedule(update_interval=1, publish_lag=0)


def test_ranks_of_one_host_share_its_memory() -> None:
    spread, crowded = predict(gpus=8, gpus_per_host=1), predict(gpus=8, gpus_per_host=8)
    assert crowded.zero_offload.host_bytes == 8 * spread.zero_offload.host_bytes
    assert crowded.zero_offload.cpu_s == pytest.approx(8 * spread.zero_offload.cpu_s)
    assert crowded.zero_offload.device_bytes == spread.zero_offload.device_bytes


def test_limits_of_memory() -> None:
    assert predict(gpu_mem=5).limit == "device memory"
    prediction = predict(host_mem=40)
    assert (prediction.limit, prediction.zenflow.fits, prediction.none.fits) == ("host memory", False, True)
    assert "40" in as_text(prediction).splitlines()[-1]
    assert predict().zenflow.fits_host is None
    assert predict().zenflow.fits


@pytest.mark.parametrize(("s", "d"), [(1, 0), (1, 1), (2, 1), (4, 1), (4, 2), (16, 2)])
def test_host_memory_is_the_arena(s: int, d: int) -> None:
    shapes = [(1000, 300), (777, 500), (300,), (2000, 100)] * 3
    slices, begin = [], 0
    for number, shape in enumerate(shapes):
        numel = torch.Size(shape).numel()
        columns = shape[1] if len(shape) > 1 else 1
        slices.append(
            Slice(
                parameter=number,
                param_group=0,
                begin=begin,
                start=0,
                numel=numel,
                columns=columns,
                is_matrix=len(shape) > 1,
            )
        )
        begin += numel
    partition = build_partition(slices, [begin], 16)
    staggered = StaggeredSchedule(n_blocks=16, update_interval=s, publish_lag=d)
    sizes = ArenaSizes(
        n_param_groups=1,
        n_step_records=staggered.n_step_records,
        n_slots=staggered.n_slots,
        n_publish_buffers=staggered.n_publish_buffers,
        dtype=torch.bfloat16,
        export_bytes=export_bytes(partition, 0.1, offload=s == 1),
    )
    predicted = arena_bytes_of(
        begin,
        n_blocks=16,
        schedules=[UpdateSchedule(update_interval=s, publish_lag=d)],
        dtype_bytes=torch.bfloat16.itemsize,
        owned_numel=3 * (1000 * 30 + 777 * 50 + 300 + 2000 * 10),
        offload=s == 1,
    )
    assert predicted == pytest.approx(arena_bytes(partition, sizes), rel=0.01)
    assert predicted < arena_bytes(partition, sizes)


def test_where_adamw_itself_hides_auto_never_takes_the_memory_of_longer_windows() -> None:
    prediction = predict(step_ms=5000, cpu_bw=4000)
    assert prediction.schedule.is_immediate
    assert prediction.zenflow.host_bytes <= 20 * 4.001e9


def test_shared_parameters_count_once_and_frozen_ones_only_on_the_device() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False), nn.Linear(5, 3))
    model[1].weight = model[0].weight
    model[2].requires_grad_(False)
    shapes = shapes_of_module(model)
    assert (shapes.numel, shapes.frozen_numel) == (64, 18)
    frozen = dataclasses.replace(MODEL, frozen_numel=10**9)
    assert predict(frozen).zenflow.device_bytes == predict().zenflow.device_bytes + 2 * 10**9
    assert predict(frozen).zenflow.step_s == predict().zenflow.step_s


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"gpus": 0}, "gpus"),
        ({"gpus": True}, "gpus"),
        ({"gpu_mem": -1.0}, "gpu_mem"),
        ({"pcie": float("nan")}, "pcie"),
        ({"cpu_bw": float("inf")}, "cpu_bw"),
        ({"gpus_per_host": 0}, "gpus_per_host"),
        ({"cpu_cores": 0}, "cpu_cores"),
        ({"host_mem": 0.0}, "host_mem"),
    ],
)
def test_invalid_machines(change: dict[str, float], key: str) -> None:
    with pytest.raises(ValueError, match=f"^{key} must be .*, got {change[key]!r}$") as caught:
        dataclasses.replace(MACHINE, **change)
    assert isinstance(caught.value, ConfigValueError)
    assert caught.value.key == key


@pytest.mark.parametrize(
    "change", [{"step_ms": 0}, {"dtype_bytes": 1}, {"accumulate_grad_batches": 0}, {"reduce_bucket_size": 0}]
)
def test_invalid_workloads(change: dict[str, float]) -> None:
    ((key, value),) = change.items()
    with pytest.raises(ValueError, match=f"^{key} must be .*, got {value!r}$"):
        dataclasses.replace(Workload(model=MODEL, step_ms=1), **change)


def test_more_gpus_than_parameters() -> None:
    with pytest.raises(ValueError, match="gpus must be at most the number of parameters, 3, got 4"):
        predict(shapes_of_count(3))


def test_auto_takes_no_schedule_that_the_host_has_no_memory_for() -> None:
    """A CPU that is too slow for S = 1: with memory for it `auto` takes longer windows, up to where memory ends."""
    free, short = predict(cpu_bw=20), predict(cpu_bw=20, host_mem=4.001 * 19)
    assert free.zenflow.host_bytes > 19 * 4.001e9
    assert short.schedule < free.schedule
    assert short.zenflow.fits_host
    assert short.fastest.fits_host
    assert short.schedule.update_interval > 1
