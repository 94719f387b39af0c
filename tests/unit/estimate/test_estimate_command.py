"""The command `lightning-zenflow estimate`: table, JSON and errors."""

import dataclasses
import json
import shlex
from pathlib import Path

import pytest

from lightning_zenflow.cli import main
from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.estimate.cost import estimate
from lightning_zenflow.estimate.machine import Machine, Workload
from lightning_zenflow.estimate.shapes import shapes_of_count

ROOT = Path(__file__).parents[3]
COMMAND = shlex.split("estimate --params 7e9 --gpus 4 --gpu-mem 80 --pcie 25 --cpu-bw 150 --step-ms 500")


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(COMMAND) == 0
    text = capsys.readouterr().out
    assert text in (ROOT / "docs" / "estimate.md").read_text()
    rows = {line.split("  ")[0]: line.split() for line in text.splitlines()}
    assert rows["ZeRO-2, no offload"][-3:] == ["500", "100%", "yes"]
    assert rows["ZeRO-Offload"][-3:] == ["2600", "19%", "yes"]
    assert "ZenFlow settles at update_interval S = " in text


def test_the_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--json", "--update-interval", "4", "--publish-lag", "2", "--host-mem", "500"]) == 0
    result = json.loads(capsys.readouterr().out)
    config = ZenFlowConfig(update_interval=4, publish_lag=2)
    machine = Machine(gpus=4, gpu_mem=80, pcie=25, cpu_bw=150, host_mem=500)
    expected = estimate(Workload(model=shapes_of_count(7e9), step_ms=500), machine, config)
    assert (result["update_interval"], result["publish_lag"], result["limit"]) == (4, 2, expected.limit)
    assert result["zenflow"] == dataclasses.asdict(expected.zenflow)
    assert result["workload"]["model"]["numel"] == 7_000_000_000


def test_the_command_takes_a_hugging_face_config(gpt2_config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "--hf-config", str(gpt2_config), *COMMAND[3:], "--dtype", "fp32"]) == 0
    assert capsys.readouterr().out.startswith("small-gpt2, ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu-mem", "0"], "argument --gpu-mem: gpu_mem must be a finite number > 0, got 0.0"),
        (["--gpus", "two"], "argument --gpus: invalid int value: 'two'"),
        (
            ["--topk-ratio", "2"],
            "argument --topk-ratio: ZenFlowConfig: topk_ratio must be a number from 0 to 1, got 2.0",
        ),
        (["--update-interval", "some"], "argument --update-interval: must be an integer or 'auto', got 'some'"),
        (["--update-interval", "32"], "update_interval must be an integer from 1 to max_update_interval=16, got 32"),
        (["--params", "nan"], "argument --params: params must be a finite number >= 1, got nan"),
        (["--hf-config", "gpt2"], "argument --hf-config: not allowed with argument --params"),
        (["--reduce-bucket-size", "1.5"], "argument --reduce-bucket-size: must be an integer >= 1, got '1.5'"),
    ],
)
def test_errors_of_the_command(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*COMMAND, *arguments])
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert "lightning-zenflow estimate: error" in captured.err
