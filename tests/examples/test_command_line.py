"""The command line in a process of its own."""

import re
import subprocess
import sys

REPORT_IMPORTS = """
import sys
from lightning_zenflow.cli import main
for options in sys.argv[1:]:
    try:
        main(options.split())
    except SystemExit as exit:
        assert not exit.code
print("slow:", "deepspeed" in sys.modules)
"""


def test_help_imports_nothing_slow() -> None:
    command = [sys.executable, "-c", REPORT_IMPORTS, "--version", "--help", "estimate --help"]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert re.search(r"(?s)^lightning-zenflow \d+\.\d+.*doctor[^|]*estimate.*key=value.*\nslow: False\n$", printed)
