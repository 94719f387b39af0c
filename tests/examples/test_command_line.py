"""The command line in a process of its own."""

import json
import os
import re
import shlex
import subprocess
import sys

import pytest

SLOW_TO_IMPORT = "torch", "lightning", "pytorch_lightning", "deepspeed", "transformers"

REPORT_IMPORTS = f"""
import sys
from lightning_zenflow.cli import main
try:
    main(sys.argv[1:])
finally:
    print([name for name in {SLOW_TO_IMPORT} if name in sys.modules], file=sys.stderr)
"""


def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={**os.environ, **variables},
        encoding="utf-8",
    )


def test_standard_output_is_the_json_and_nothing_else() -> None:
    options = "estimate --params 7e9 --gpus 4 --gpu-mem 80 --pcie 25 --cpu-bw 150 --step-ms 500 --json"
    result = run("-m", "lightning_zenflow", *shlex.split(options))
    assert json.loads(result.stdout)["zenflow"]["fits_device"] is True


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ("--version", r"^lightning-zenflow \d+\.\d+"),
        ("--help", "doctor[^|]*estimate[^|]*timeline"),
        ("estimate --help", "--update-interval"),
    ],
)
def test_help_imports_nothing_slow(options: str, shown: str) -> None:
    result = run("-c", REPORT_IMPORTS, *shlex.split(options))
    assert re.search(shown, result.stdout)
    assert result.stderr == "[]\n"


def test_bars_in_an_encoding_without_them() -> None:
    options = "estimate --params 1e9 --gpus 1 --gpu-mem 24 --pcie 25 --cpu-bw 60 --step-ms 500"
    # A locale without UTF-8 must not turn UTF-8 on.
    result = run("-m", "lightning_zenflow", *shlex.split(options), PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert "####" in result.stdout
    assert result.stdout.isascii()
    assert "You need no offload if activations fit in the 4.0 GB" in result.stdout
