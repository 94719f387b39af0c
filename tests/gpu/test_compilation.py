"""Triton's kernels compile to machine code of GPUs, for which no GPU is needed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

# A compilation takes 15 s; what the kernels compute is shown under Triton's interpreter (tests/unit/kernels).
pytestmark = pytest.mark.slow

Variants = list[dict[str, Any]]
"""Of every kernel, as `triton_build.build` has them."""

OLDEST, NEWEST = "3.2.0", "3.9.0"
"""Releases of Triton that have been tested; pyproject.toml has the bound."""


def build(folder: Path, capability: int, *dtypes: str, path: Path | None = None) -> Variants:
    """Compiles for a compute capability and element types, in a process of its own: here, Triton interprets. `folder` gets its cache,
    `path` may have another Triton.
    """
    environment = {
        **os.environ,
        "TRITON_CACHE_DIR": str(folder),
        "TRITON_INTERPRET": "0",
        "PYTHONPATH": os.pathsep.join(map(str, filter(None, (path, os.environ.get("PYTHONPATH"))))),
    }
    script = Path(__file__).parents[1] / "support" / "triton_build.py"
    command = [sys.executable, str(script), str(capability), *dtypes]
    output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    variants: Variants = json.loads(output.splitlines()[-1])
    return variants


def check(variants: Variants) -> None:
    """No register is spilled, and where rows allow it memory is read in words of 16 bytes."""
    assert {v["kernel"] for v in variants} == {
        "sum_squares", "factored_step", "provisional_update", "adamw", "write_columns", "block_word"
    }  # fmt: skip
    for v in variants:
        assert v["spilled"] == 0, v
        # Columns are scattered one element at a time.
        if "aligned" in v["case"] and not v["kernel"].endswith("_columns"):
            n_bytes = {int(size): int(size) * n for size, n in v["loads"].items()}
            assert n_bytes[16] > 0.75 * sum(n_bytes.values()), v


def check_arithmetic(variants: Variants) -> None:
    """That of IEEE, fused where the worker's is and nowhere else."""
    for v in variants:
        found = v["arithmetic"]
        if v["kernel"] == "provisional_update":
            assert found.keys() == {"mul.rn", "sub.rn"}
        elif v["kernel"] == "adamw":
            n = found["div.rn"]
            fused = 4 if "decay 0.0" in v["case"] else 5
            assert found == {"fma.rn": fused * n, "mul.rn": 4 * n, "sqrt.rn": n, "div.rn": n}
        elif v["kernel"] == "sum_squares":
            assert found.keys() == {"mul.rn", "add.rn"}
        elif v["kernel"].endswith("_columns"):
            assert found == {}
        elif v["kernel"] == "block_word":
            # A number minus itself, which is NaN or zero, is not taken for zero.
            clips = set() if "limit 0" in v["case"] else {"div.rn", "mul.rn"}
            assert found.keys() == {"sub.rn", "add.rn"} | clips


@pytest.mark.parametrize("capability", [80, 89, 90, 100])
def test_for_gpus_and_types(capability: int, tmp_path: Path) -> None:
    variants = build(tmp_path, capability, "bfloat16", "float16", "float32")
    check(variants)
    if capability < 100:  # later ones have instructions for pairs, which are named otherwise
        check_arithmetic(variants)


@pytest.mark.parametrize("release", [OLDEST, NEWEST])
def test_by_other_tritons(release: str, tmp_path: Path) -> None:
    install = f"{sys.executable} -m pip install -q --no-deps --target {tmp_path} triton=={release}".split()
    if subprocess.run(install, capture_output=True).returncode:
        pytest.skip(f"pip cannot install triton {release}")
    # The oldest does not know the newest GPUs.
    for capability in (80, 90) if release == OLDEST else (80, 100):
        check(build(tmp_path / "cache", capability, "bfloat16", path=tmp_path))
