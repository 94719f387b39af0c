"""Which implementation a device gets, and the environment variable that overrules it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_zenflow.kernels.base import Kernels
from lightning_zenflow.kernels.cpu import CpuKernels
from lightning_zenflow.kernels.select import kernels_for

CPU, META = torch.device("cpu"), torch.device("meta")


def test_each_device_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZENFLOW_KERNELS", raising=False)
    assert isinstance(kernels_for(CPU), CpuKernels)
    assert type(kernels_for(META)) is Kernels


@pytest.mark.gpu
def test_cuda_has_tritons(needs_cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZENFLOW_KERNELS", raising=False)
    assert type(kernels_for(torch.device("cuda"))).__name__ == "TritonKernels"


@pytest.mark.parametrize(("name", "kind"), [("torch", "Kernels"), ("cpu", "CpuKernels"), ("triton", "TritonKernels")])
def test_the_variable_overrules_it(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "triton":
        pytest.importorskip("triton", reason="Triton has no wheel for this platform")
        if torch.cuda.is_available():
            pytest.skip("Triton's interpreter needs a machine without a CUDA device")
    monkeypatch.setenv("ZENFLOW_KERNELS", name)
    assert type(kernels_for(CPU)).__name__ == kind


def test_other_values_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZENFLOW_KERNELS", "cuda")
    with pytest.raises(ValueError, match="ZENFLOW_KERNELS must be torch, triton or cpu, or not be set, got 'cuda'"):
        kernels_for(CPU)
    monkeypatch.setenv("ZENFLOW_KERNELS", "cpu")
    with pytest.raises(ValueError, match="ZENFLOW_KERNELS must be torch or triton for training on meta, got 'cpu'"):
        kernels_for(META)


def test_without_a_compiler_torch_takes_over(tmp_path: Path) -> None:
    """In a process of its own, because here Triton interprets; and an empty package, whose own imports take seconds."""
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    script = """
import sys, types
sys.modules["lightning_zenflow"] = package = types.ModuleType("lightning_zenflow")
package.__path__ = [sys.argv[1]]
import torch
from lightning_zenflow.kernels.select import kernels_for
print(type(kernels_for(torch.device(sys.argv[2]))).__name__)
"""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # Neither a compiler nor results of an earlier one.
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "0", "ZENFLOW_KERNELS": "triton", "CC": "/nowhere/cc", "PATH": "", "TRITON_CACHE_DIR": str(tmp_path)
    }  # fmt: skip
    package = str(Path(__file__).parents[3] / "lightning_zenflow")
    ended = subprocess.run(
        [sys.executable, "-c", script, package, device], env=environment, check=True, capture_output=True, text=True
    )
    assert ended.stdout.split() == ["Kernels"]
    assert "Triton's kernels cannot be used, torch's are" in ended.stderr
    assert "ZENFLOW_KERNELS=torch" in ended.stderr
