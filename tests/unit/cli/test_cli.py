"""The estimate, against calculations by hand and against the arena that training allocates; the report on this machine."""

import re
import subprocess
import sys
from argparse import Namespace
from typing import Any

import pytest
import torch

from lightning_zenflow import native
from lightning_zenflow.cli import Cost, costs, main
from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.core.partition import build_partition
from lightning_zenflow.core.schedule import StaggeredSchedule
from lightning_zenflow.worker.arena import ArenaSizes, arena_bytes
from oracle import slices_of_rank

OPTIONS = {"params": 4e9, "gpus": 4, "cpu_bw": 400.0, "frozen": 0.0, "gpus_per_host": 8, "stage": 2, "dtype": "bf16"}
OPTIONS |= {"offload_parameters": False, "accumulate_grad_batches": 1}
PARTITION, WEIGHTS, BUCKETS = 1e9, 2 * 4e9, 2 * 2 * 4e9 / 32
FIXED = ZenFlowConfig(update_interval=4, publish_lag=1)
EXACT = ZenFlowConfig(update_interval=1, publish_lag=0)


def cost(config: ZenFlowConfig = FIXED, **changes: Any) -> Cost:
    (cost,) = costs(Namespace(**{**OPTIONS, **changes}), config).values()
    return cost


def test_by_hand() -> None:
    c = cost()
    # A twentieth of the columns; at S = 4 and d = 1 a quarter of the gradients is kept.
    expected = WEIGHTS + BUCKETS + 14 * PARTITION / 20 + 2 * PARTITION / 4
    assert c.device_bytes == pytest.approx(expected)
    assert (c.d2h_bytes, c.h2d_bytes) == pytest.approx((2 * PARTITION, 2 * PARTITION / 4))
    # The worker's 34 bytes and the copies' 10, every fourth step.
    assert c.cpu_s == pytest.approx((34 + 10) * PARTITION / 100e9 / 4)
    assert cost(accumulate_grad_batches=4).device_bytes == pytest.approx(expected + 2 * PARTITION)
    assert cost(EXACT).device_bytes == pytest.approx(WEIGHTS + BUCKETS)
    # One behind: a committed gradient and a tentative one; and the copies.
    for moments, n_bytes in (("float32", 30 + 4), ("bfloat16", 22 + 4), ("int8", 18.125 + 4)):
        exact = cost(ZenFlowConfig(update_interval=1, publish_lag=0, moments_dtype=moments))
        assert exact.cpu_s == pytest.approx(n_bytes * PARTITION / 100e9)
    assert exact.host_bytes < 9.1 * 4 * PARTITION
    # A quarter of the states in host memory; the rest with its gradients on the device.
    quarter, whole = (cost(EXACT.model_copy(update={"offload_ratio": ratio})) for ratio in (0.25, 1.0))
    assert quarter.device_bytes == pytest.approx(whole.device_bytes + 14 * 0.75 * PARTITION)
    assert quarter.host_bytes == whole.host_bytes
    for ours, of_all in zip(quarter[2:], whole[2:], strict=True):
        assert ours == pytest.approx(of_all / 4)
    # Ranks of one host share its memory's bandwidth.
    assert cost(gpus=8, gpus_per_host=1).cpu_s == pytest.approx(cost(gpus=8).cpu_s / 8)


def test_frozen_weights() -> None:
    """Without state or gradients: on the device, or in host memory and fetched from there."""
    plain, frozen = cost(), cost(frozen=8e9)
    assert frozen == plain._replace(device_bytes=plain.device_bytes + 2 * 8e9)
    in_stage_3 = cost(stage=3, frozen=8e9).device_bytes - cost(stage=3).device_bytes
    assert in_stage_3 == pytest.approx(2 * 8e9 / 4)
    plain, frozen = (cost(EXACT, stage=3, offload_parameters=True, frozen=n) for n in (0, 8e9))
    n_bytes = 2 * 8e9 / 4
    assert frozen.host_bytes == pytest.approx(plain.host_bytes + 4 * n_bytes)
    assert frozen.h2d_bytes == pytest.approx(plain.h2d_bytes + 2 * n_bytes)
    assert (frozen.device_bytes, frozen.d2h_bytes) == (plain.device_bytes, plain.d2h_bytes)


def test_stage_3() -> None:
    divided = cost(stage=3)
    assert divided.device_bytes - cost().device_bytes == pytest.approx(2 * (PARTITION + 1e9) - WEIGHTS)
    # One GPU's part is all of them.
    assert cost(stage=3, gpus=1) == cost(gpus=1)
    on_weights = Namespace(**{**OPTIONS, "stage": 3, "offload_parameters": True, "accumulate_grad_batches": 2})
    (schedule, on_host), *others = costs(on_weights, ZenFlowConfig()).items()
    assert schedule.is_immediate and not others
    assert on_host.device_bytes == pytest.approx(2 * 1e9 + BUCKETS + 2 * PARTITION)
    # Forward and backward of two micro-batches; gradients in one piece.
    assert (on_host.h2d_bytes, on_host.d2h_bytes) == pytest.approx((2 * 2 * 2 * PARTITION, 2 * PARTITION))
    # DeepSpeed's own takes 20 a parameter.
    for moments, largest in (("float32", 16.7), ("bfloat16", 12.7), ("int8", 10.8)):
        of_type = cost(ZenFlowConfig(moments_dtype=moments), stage=3, offload_parameters=True)
        assert (largest - 0.5) * PARTITION < of_type.host_bytes / 4 < largest * PARTITION
    with pytest.raises(ValueError, match="publish_lag must be 0 or 'auto' where parameters are in host memory, got 1"):
        cost(ZenFlowConfig(publish_lag=1), stage=3, offload_parameters=True)


@pytest.mark.parametrize(("s", "d", "n_blocks"), [(1, 0, 8), (4, 1, 4)])
def test_host_memory_is_the_arena(s: int, d: int, n_blocks: int) -> None:
    parameters = [torch.empty(shape) for shape in [(1000, 300), (777, 500), (300,), (2000, 100)] * 3]
    partition = build_partition(*slices_of_rank([parameters], 0, 1), n_blocks)
    staggered = StaggeredSchedule(n_blocks=n_blocks, update_interval=s, publish_lag=d, in_backward=d == 0)
    config = ZenFlowConfig(update_interval=s, publish_lag=d, topk_ratio=0.1)
    sizes = ArenaSizes(
        n_step_records=staggered.n_step_records,
        n_slots=staggered.n_slots,
        n_publish_buffers=staggered.n_publish_buffers,
        dtype=torch.bfloat16,
    )
    predicted = cost(config, params=sum(p.numel() for p in parameters), gpus=1).host_bytes
    assert predicted == pytest.approx(arena_bytes(partition, sizes), rel=0.02)


COMMAND = "estimate --gpus 4 --cpu-bw 150 --params"


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND.split(), "7e9", "update_interval=4", "publish_lag=1", "--dtype", "fp32"]) == 0
    out = capsys.readouterr().out
    assert "S = 4, d = 1" in out and "32.8" in out
    for text, number in (("1.5b", "1.5e9"), ("350M", "350e6"), ("64k", "64e3"), ("1T", "1e12")):
        shown = [main([*COMMAND.split(), params]) or capsys.readouterr().out for params in (text, number)]
        assert shown[0] == shown[1]
    for wrong, message in {
        ("nan",): "argument --params: invalid positive_number value: 'nan'",
        ("7Q",): "argument --params: invalid positive_number value: '7Q'",
        ("7e9", "--gpus", "0"): "--gpus, --gpus-per-host and --accumulate-grad-batches must be at least 1",
        ("7e9", "--offload-parameters"): "--stage must be 3 with --offload-parameters, got 2",
        ("7e9", "moments_dtype=fp8"): "moments_dtype must be",
        ("7e9", "topk_ration=1"): "did you mean 'topk_ratio'",
        ("7e9", "--offload-ratio", "1,2"): "offload_ratio must be a number from 0 to 1 or 'auto', got 2.0",
        ("7e9", "--offload-ratio", "half"): "could not convert string to float: 'half'",
    }.items():
        with pytest.raises(SystemExit):
            main([*COMMAND.split(), *wrong])
        assert message in capsys.readouterr().err


def test_ratios_beside_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    """For one GPU and this host, whose bandwidth is measured, by default."""
    exact = ["update_interval=1", "publish_lag=0"]
    assert main(["estimate", "--params", "1e9", "--offload-ratio", "1,0.5,0", *exact]) == 0
    whole, half, none = (line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("S = "))
    assert [row[-6] for row in (whole, half, none)] == ["1", "0.5", "0"]
    # With the gradients 14 bytes a parameter.
    assert float(none[-5]) - float(half[-5]) == pytest.approx(7, abs=0.11)
    assert int(whole[-1]) > 0 and int(half[-1]) == pytest.approx(int(whole[-1]) / 2, abs=1) and none[-1] == "0"
    # As a key it has rows of its own too.
    assert main([*COMMAND.split(), "7e9", "offload_ratio=auto", *exact]) == 0
    assert re.search(r"d = 0 +auto ", capsys.readouterr().out)


REPORT_IMPORTS = """
import sys
sys.argv[0] = "/bin/lightning-zenflow"
from lightning_zenflow.cli import Cost, costs, main
for options in sys.argv[1:]:
    try:
        main(options.split())
    except SystemExit as exit:
        assert not exit.code
print("slow:", {"torch", "lightning", "deepspeed"} & sys.modules.keys())
"""


def test_the_command_imports_nothing_slow() -> None:
    """Lightning's import takes ten times as long as the whole command."""
    command = [sys.executable, "-c", REPORT_IMPORTS, "--version", "--help", "estimate --help", f"{COMMAND} 7e9"]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert re.search(r"(?s)^lightning-zenflow \d+\.\d+.*doctor[^|]*estimate.*key=value.*\nslow: set\(\)\n$", printed)


def test_this_machine(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # Limits on the trainer's threads do not stop the measurement, as they do not stop the worker of a training.
    monkeypatch.setenv("OMP_THREAD_LIMIT", "1")
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) <= 16
    for fact in (torch.__version__, "logical; of this process", "GB free", "GB/s of host memory on cores"):
        assert fact in out
    assert "cannot start" not in out
    monkeypatch.setattr(native, "worker_executable", lambda: "/no/worker")
    assert main(["doctor"]) == 1
    assert "training cannot start: the worker's benchmark did not end" in capsys.readouterr().out
