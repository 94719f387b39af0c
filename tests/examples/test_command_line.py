"""The command line in a process of its own."""

import re
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


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ("--version", r"^lightning-zenflow \d+\.\d+"),
        ("--help", "doctor[^|]*estimate"),
        ("estimate --help", "key=value"),
    ],
)
def test_help_imports_nothing_slow(options: str, shown: str) -> None:
    command = [sys.executable, "-c", REPORT_IMPORTS, *options.split()]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert re.search(shown, result.stdout)
    assert result.stderr == "[]\n"
