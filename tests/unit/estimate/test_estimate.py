"""The estimate: against calculations by hand, and against the arena that training allocates."""

import dataclasses
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from lightning_zenflow.cli import main
from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.core.partition import Slice, build_partition
from lightning_zenflow.estimate.cost import Cost, Estimate, estimate
from lightning_zenflow.estimate.report import as_text
from lightning_zenflow.estimate.setup import Setup
from lightning_zenflow.estimate.shapes import ModelShapes, shapes_of_count, shapes_of_module
from lightning_zenflow.schedule.staggered import StaggeredSchedule, UpdateSchedule
from lightning_zenflow.topk.state_export import export_bytes
from lightning_zenflow.worker.arena import ArenaSizes, arena_bytes
from networks import SmallNet

pytestmark = pytest.mark.unit

MODEL = ModelShapes(matrices=[(50_000, 20_000)] * 4, vector_numel=1_000_000)
"""4.001e9 parameters."""
SETUP = Setup(model=MODEL, step_ms=500, gpus=4, gpu_mem=80, pcie=25, cpu_bw=400)
FIXED = ZenFlowConfig(update_interval=4, publish_lag=1)


def found(config: ZenFlowConfig | None = None, **changes: Any) -> Estimate:
    return estimate(dataclasses.replace(SETUP, **changes), config)


def cost(config: ZenFlowConfig = FIXED, **changes: Any) -> Cost:
    (cost,) = found(config, **changes).costs.values()
    return cost


def test_by_hand() -> None:
    partition, weights = 4.001e9 / 4, 2 * 4.001e9
    c = cost()
    # 1000 of 20000 columns, and all vectors; 70000 floats a matrix; at S = 4 and d = 1 a quarter of the gradients is kept.
    owned = 4 * 50_000 * 1000 + 1_000_000
    expected = weights + 2 * 2 * (4.001e9 / 32) + 14 * owned / 4 + 4 * 4 * 70_000 / 4 + 2 * partition / 4
    assert c.device_bytes == pytest.approx(expected)
    assert (c.d2h_bytes, c.h2d_bytes) == pytest.approx((2 * partition, 2 * partition / 4))
    # The worker's 34 bytes and the copies' 10, every fourth step.
    assert c.cpu_s == pytest.approx((34 + 10) * partition / 100e9 / 4)
    # Where kept gradients have no room, they are read back.
    small = cost(gpu_mem=1)
    assert small.device_bytes == pytest.approx(expected - 2 * partition / 4)
    assert small.h2d_bytes == pytest.approx(c.h2d_bytes + 2 * partition / 4)
    assert cost(accumulate_grad_batches=4).device_bytes == pytest.approx(expected + 2 * partition)
    exact = cost(ZenFlowConfig(update_interval=1, publish_lag=0))
    assert exact.device_bytes == pytest.approx(weights + 2 * 2 * (4.001e9 / 32))
    frozen = dataclasses.replace(MODEL, frozen_numel=10**9)
    assert cost(model=frozen) == dataclasses.replace(c, device_bytes=c.device_bytes + 2 * 10**9)


def test_cost_of_a_job() -> None:
    # One behind: a committed gradient and a tentative one; and the copies.
    for moments, n_bytes in (("float32", 30 + 4), ("bfloat16", 22 + 4), ("int8", 18.1 + 4)):
        exact = cost(ZenFlowConfig(update_interval=1, publish_lag=0, moments_dtype=moments))
        assert exact.cpu_s == pytest.approx(n_bytes * 4.001e9 / 4 / 100e9)
    many = cost(gpus=1)
    assert cost(gpus=1, cpu_cores=256) == many
    # Half of four cores: 0.89 ns a parameter, where 44 bytes take 0.11.
    assert cost(gpus=1, cpu_cores=4).cpu_s == pytest.approx(4.001 * 1.78 / 2 / 4)
    keys = {"update_interval": 4, "publish_lag": 1}
    float32, bfloat16 = (cost(ZenFlowConfig(**keys, moments_dtype=dtype)) for dtype in ("float32", "bfloat16"))
    assert float32.host_bytes - bfloat16.host_bytes == pytest.approx(4 * 4.001e9 / 4, rel=1e-5)
    coded = cost(ZenFlowConfig(update_interval=1, publish_lag=0, moments_dtype="int8"))
    assert coded.host_bytes < 9.1 * 4.001e9 / 4


def test_the_least_stale_schedule_that_hides() -> None:
    assert found(step_ms=5000, cpu_bw=4000).schedule == UpdateSchedule(update_interval=1, publish_lag=0)
    loads = [found(cpu_bw=10 * 2.0**i) for i in range(12)]
    assert not loads[0].hides and loads[-1].hides
    # A slower CPU never has a less stale schedule; where nothing hides, it has the least work.
    schedules = [e.schedule for e in loads if e.hides]
    assert schedules == sorted(schedules, reverse=True)
    assert loads[0].schedule == UpdateSchedule(update_interval=16, publish_lag=1)
    assert "The CPU limits: a step takes at least its" in as_text(loads[0])
    # Ranks of one host share its memory's bandwidth, and its memory.
    spread, crowded = found(gpus=8, gpus_per_host=1), found(gpus=8)
    assert crowded.schedule > spread.schedule
    free, short = found(cpu_bw=20), found(cpu_bw=20, host_mem=4.001 * 19)
    assert free.costs[free.schedule].host_bytes * 4 > 19 * 4.001e9
    assert short.schedule < free.schedule and short.costs.keys() < free.costs.keys()


def test_the_gather_of_the_weights() -> None:
    pcie, nvlink = found(step_ms=1000), found(step_ms=1000, link=300)
    assert pcie.setup.gather_ms == pytest.approx(2 * 4001 * 0.75 / 25)
    assert "240 ms over PCIe, which" in as_text(pcie) and "20 ms over a link of 300 GB/s" in as_text(nvlink)
    assert "exchange" not in as_text(found(gpus=1)) and found(gpus=1).setup.gather_ms == 0
    # The CPU's 340 ms hide in 0.55 * 0.85 of what is left of the step.
    at = {link: found(step_ms=900, link=link).schedule.update_interval for link in (None, 300.0)}
    assert at == {None: 2, 300.0: 1}


def test_stage_3() -> None:
    partition, buckets = 4.001e9 / 4, 2 * 2 * (4.001e9 / 32)
    divided = cost(stage=3)
    assert divided.device_bytes - cost().device_bytes == pytest.approx(2 * (partition + 1e9) - 2 * 4.001e9)
    assert found(stage=3).setup.gather_ms == 0 and "exchange" not in as_text(found(stage=3))
    assert found(stage=3, gpus=1).setup.weight_bytes == 2 * 4.001e9
    (schedule, on_host), *others = found(stage=3, offload_parameters=True, accumulate_grad_batches=2).costs.items()
    assert schedule.is_immediate and not others
    assert on_host.device_bytes == pytest.approx(2 * 1e9 + buckets + 2 * partition)
    # Forward and backward of two micro-batches; gradients in one piece.
    assert (on_host.h2d_bytes, on_host.d2h_bytes) == pytest.approx((2 * 2 * 2 * partition, 2 * partition))
    assert 16 * partition < on_host.host_bytes < 16.7 * partition
    with pytest.raises(ValueError, match="publish_lag must be 0 or 'auto' where parameters are in host memory, got 1"):
        found(ZenFlowConfig(publish_lag=1), stage=3, offload_parameters=True)
    with pytest.raises(ValueError, match="stage must be 3 where offload_parameters is true, got 2"):
        found(offload_parameters=True)
    with pytest.raises(ValueError, match="stage must be 1, 2 or 3, got 4"):
        found(stage=4)


def test_limits() -> None:
    text = as_text(found(gpu_mem=5, pcie=1, link=100))
    assert "no: GPU" in text and "GPU memory limits: 8.0 GB are weights" in text
    assert "PCIe limits: gradients take 2000 ms, longer than backward's 293 ms" in text
    assert "no: host" in as_text(found(host_mem=40))


@pytest.mark.parametrize(("s", "d"), [(1, 0), (1, 1), (4, 1), (16, 2)])
def test_host_memory_is_the_arena(s: int, d: int) -> None:
    shapes = [(1000, 300), (777, 500), (300,), (2000, 100)] * 3
    slices, begin = [], 0
    for number, shape in enumerate(shapes):
        numel, columns = torch.Size(shape).numel(), shape[1] if len(shape) > 1 else 1
        where = {"parameter": number, "param_group": 0, "begin": begin, "start": 0, "numel": numel}
        slices.append(Slice(**where, columns=columns, is_matrix=len(shape) > 1))
        begin += numel
    partition = build_partition(slices, [begin], 16)
    staggered = StaggeredSchedule(n_blocks=16, update_interval=s, publish_lag=d, in_backward=d == 0)
    config = ZenFlowConfig(update_interval=s, publish_lag=d, topk_ratio=0.1)
    sizes = ArenaSizes(
        n_param_groups=1,
        n_step_records=staggered.n_step_records,
        n_slots=staggered.n_slots,
        n_publish_buffers=staggered.n_publish_buffers,
        dtype=torch.bfloat16,
        export_bytes=export_bytes(partition, config.owned_ratio),
    )
    model = ModelShapes(matrices=[(1000, 300), (777, 500), (2000, 100)] * 3, vector_numel=900)
    predicted = found(config, model=model, gpus=1).costs[UpdateSchedule(update_interval=s, publish_lag=d)].host_bytes
    assert predicted == pytest.approx(arena_bytes(partition, sizes), rel=0.02)


@pytest.mark.parametrize(
    ("key", "value"), [("gpus", 0), ("gpu_mem", -1.0), ("pcie", float("nan")), ("cpu_bw", float("inf")), ("step_ms", 0)]
)
def test_invalid_setups(key: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^{key} must be a finite number > 0, got {value!r}$"):
        found(**{key: value})


def test_shapes() -> None:
    shapes = shapes_of_module(SmallNet())
    assert shapes.numel == sum(p.numel() for p in SmallNet().parameters())
    assert shapes.vector_numel == 5 + 11 + 11 + 11 + 3
    # Columns: 13 of the embedding, 9 of the convolution, 455 and 11 of the linear layers; a tenth of each.
    assert shapes.device_owned_numel(0.1) == 23 * 1 + 5 * 1 + 11 * 46 + 3 * 1 + shapes.vector_numel
    assert (shapes.device_owned_numel(0), shapes.device_owned_numel(1)) == (0, shapes.numel)
    assert shapes.factor_numel == (23 + 13) + (5 + 9) + (11 + 455) + (3 + 11)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False), nn.Linear(5, 3))
    model[1].weight = model[0].weight
    model[2].requires_grad_(False)
    assert (shapes_of_module(model).numel, shapes_of_module(model).frozen_numel) == (64, 18)
    for params in (1, 2, 12345, 7e9, 1e12):
        assert shapes_of_count(params).numel == params
    assert 4000 <= shapes_of_count(7e9).matrices[0][1] <= 4300


OPTIONS = "estimate --gpus 4 --gpu-mem 80 --pcie 25 --cpu-bw 150 --step-ms 500 --params"


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*OPTIONS.split(), "7e9", "update_interval=4", "publish_lag=1", "--dtype", "fp32"]) == 0
    out = capsys.readouterr().out
    assert "S = 4, d = 1" in out and "32.8" in out
    for wrong, message in {
        ("3",): "gpus must be at most the number of parameters, 3, got 4",
        ("nan",): "params must be a finite number >= 1, got nan",
        ("7e9", "moments_dtype=fp8"): "moments_dtype must be",
        ("7e9", "topk_ration=1"): "did you mean 'topk_ratio'",
    }.items():
        with pytest.raises(SystemExit):
            main([*OPTIONS.split(), *wrong])
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", [["--help"], ["--version"], ["estimate", "--help"], [*OPTIONS.split(), "7e9"]])
def test_the_command_imports_no_torch(command: list[str]) -> None:
    """Nor Lightning, whose import takes ten times as long as the whole command."""
    code = """if True:
        import sys
        from lightning_zenflow.cli import main
        try:
            main()
        except SystemExit as end:
            assert not end.code
        assert not {"torch", "lightning", "deepspeed"} & sys.modules.keys()
    """
    shim = f"import sys; sys.argv = {['/bin/lightning-zenflow', *command]!r}\n"
    subprocess.run([sys.executable, "-c", shim + code], check=True, timeout=120, capture_output=True)


@pytest.mark.parametrize(
    ("text", "number"), [("7B", 7e9), ("1.5b", 1.5e9), ("350M", 350e6), ("7e9", 7e9), ("64k", 64e3), ("1T", 1e12)]
)
def test_numbers_of_parameters(text: str, number: float, capsys: pytest.CaptureFixture[str]) -> None:
    def shown(params: str) -> str:
        main([*OPTIONS.split(), params])
        return capsys.readouterr().out

    assert shown(text) == shown(repr(number))


def test_a_number_of_parameters_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*OPTIONS.split(), "7Q"])
    assert "argument --params: invalid number of parameters value: '7Q'" in capsys.readouterr().err
