"""The command line in a process of its own."""

import os
import re
import shlex
import subprocess
import sys

import pytest

SLOW_TO_IMPORT = ("deepspeed",)

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


def test_the_module_is_the_command() -> None:
    options = "estimate --params 7e9 --gpus 4 --gpu-mem 80 --pcie 25 --cpu-bw 150 --step-ms 500"
    result = run("-m", "lightning_zenflow", *shlex.split(options))
    assert result.stdout.startswith("schedule ")


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ("--version", r"^lightning-zenflow \d+\.\d+"),
        ("--help", "doctor[^|]*estimate"),
        ("estimate --help", "--update-interval"),
    ],
)
def test_help_imports_nothing_slow(options: str, shown: str) -> None:
    result = run("-c", REPORT_IMPORTS, *shlex.split(options))
    assert re.search(shown, result.stdout)
    assert result.stderr == "[]\n"
