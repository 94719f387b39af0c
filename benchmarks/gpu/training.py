"""A short training by examples/alpaca.py with the network and the settings of conf/alpaca_llama2_7b.yaml, from random weights."""

import argparse
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common.processes import run_command
from benchmarks.common.provenance import ROOT
from benchmarks.gpu.calls import Calls

_PARAMETERS = 6.48e9
_BESIDE = 8 * 2**30
"""Host memory in bytes for the trainer and the system."""
_SCHEDULES: dict[int, dict[str, int]] = {
    20: {},
    19: {"update_interval": 2},
    16: {"update_interval": 1, "publish_lag": 0},
}
"""Host memory in bytes a parameter (`lightning-zenflow estimate`) -> changes of the configuration, which has update_interval 4."""
_ON_CPU = (
    "--trainer.accelerator=cpu",
    "--trainer.max_steps=4",
    "--data.num_workers=0",
    "--data.max_length=256",
    "--data.batch_size=1",
    *("--model.layers=2", "--model.width=32", "--model.heads=2"),
)
_STEP = re.compile(r"^Step (\d+), Loss: ([\d.naif]+), Time: ([\d.]+)ms", re.MULTILINE)


def schedule_keys(memory: float) -> dict[str, int]:
    """Changes of the configuration with which its states fit `memory` bytes of a host; the least there is if none fits."""
    fitting = [keys for n_bytes, keys in _SCHEDULES.items() if n_bytes * _PARAMETERS + _BESIDE <= memory]
    return fitting[0] if fitting else _SCHEDULES[min(_SCHEDULES)]


def run_training(options: argparse.Namespace, calls: Calls) -> int:
    """Trains unless a call has done so; the exit status is that of the training."""
    if calls.done.get("training", {}).get("status") != 0:
        keys = schedule_keys(psutil.virtual_memory().total)
        configurations = ["conf/alpaca_llama2_7b.yaml", "benchmarks/gpu/random_llama2_7b.yaml"]
        command = ["examples/alpaca.py", "fit", *(f"--config={path}" for path in configurations)]
        command += [f"--trainer.strategy.init_args.{key}={value}" for key, value in keys.items()]
        command += [*(_ON_CPU if options.device == "cpu" else ()), *options.arguments]
        with tempfile.TemporaryDirectory() as folder:
            log, root = Path(folder) / "log", f"--trainer.default_root_dir={folder}"
            status = run_command([sys.executable, *command, root], timeout=calls.left(), output=log)
            text = log.read_text(errors="replace")
        steps = [(int(step), float(loss), float(ms)) for step, loss, ms in _STEP.findall(text)]
        done = {"command": " ".join(command), "status": status, "steps_loss_ms": steps, "output": text[-20_000:]}
        calls.put("training", done)
    result: dict[str, Any] = dict(calls.done["training"])
    print(result["output"][-4000:])
    print(
        f"{calls.path.relative_to(ROOT) if calls.path.is_relative_to(ROOT) else calls.path}: {len(result['steps_loss_ms'])} steps"
    )
    return int(result["status"])
