"""The command line in a process of its own."""

import json
import shlex
import subprocess
import sys


def test_standard_output_is_the_json_and_nothing_else() -> None:
    options = "estimate --params 7e9 --gpus 4 --gpu-mem 80 --pcie 25 --cpu-bw 150 --step-ms 500 --json"
    command = [sys.executable, "-m", "lightning_zenflow", *shlex.split(options)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(result.stdout)["zenflow"]["fits_device"] is True
