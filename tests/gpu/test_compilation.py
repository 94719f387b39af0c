"""Triton's kernels compile to machine code of GPUs, for which no GPU is needed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

Instructions = dict[str, dict[str, int]]
"""For each kernel, how often each instruction of float32 occurs."""


@pytest.fixture(scope="module")
def of_dtype(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Instructions]:
    """In a process of its own: here, Triton interprets."""
    cache = str(tmp_path_factory.mktemp("triton"))
    environment = {**os.environ, "TRITON_CACHE_DIR": cache, "TRITON_INTERPRET": "0"}
    command = [sys.executable, str(Path(__file__).parents[1] / "support" / "triton_build.py"), "bf16", "fp32"]
    output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    return json.loads(output.splitlines()[-1])


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_arithmetic_is_that_of_ieee(dtype: str, of_dtype: dict[str, Instructions]) -> None:
    """Fused where the worker's is and nowhere else."""
    instructions = of_dtype[dtype]
    assert instructions["_provisional"].keys() == {"mul.rn", "sub.rn"}
    per_element = instructions["_adamw"]["div.rn"]
    assert instructions["_adamw"] == {
        "fma.rn": 5 * per_element, "mul.rn": 4 * per_element, "sqrt.rn": per_element, "div.rn": per_element
    }  # fmt: skip
    assert instructions["_sums_of_squares"].keys() == {"mul.rn", "add.rn"}
    assert instructions["_copy_columns"] == {}
