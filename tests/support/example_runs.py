"""The examples' commands, run as a user runs them."""

import csv
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.common.processes import fresh_environment

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def run_example(folder: Path, script: str, *arguments: str, timeout: float) -> str:
    """`python examples/SCRIPT ARGUMENTS` in a process of its own that works in `folder`; returns its standard output."""
    environment = fresh_environment(PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / script), *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def check_configuration(
    main: Callable[[], object], file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An example's command knows all keys of a configuration, which builds a ZenFlowStrategy."""
    from omegaconf import OmegaConf

    from lightning_zenflow import ZenFlowStrategy

    monkeypatch.setattr(sys, "argv", ["example.py", "fit", "--config", str(file), "--print_config"])
    with pytest.raises(SystemExit) as exit_status:
        main()
    assert exit_status.value.code in (None, 0)
    settings = OmegaConf.create(capsys.readouterr().out).trainer.strategy
    assert settings.class_path == "lightning_zenflow.ZenFlowStrategy"
    ZenFlowStrategy(**settings.init_args)


def csv_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def logged(path: Path, name: str) -> list[float]:
    """The values of one metric in a `metrics.csv`, in order."""
    return [float(row[name]) for row in csv_rows(path) if row[name]]
