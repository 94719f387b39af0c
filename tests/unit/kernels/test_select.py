"""Which implementation a device gets, and the environment variable that overrules it."""

import pytest
import torch

from lightning_zenflow.kernels.base import Kernels, kernels_for
from lightning_zenflow.kernels.cpu import CpuKernels

CPU, META = torch.device("cpu"), torch.device("meta")


@pytest.mark.gpu
def test_cuda_has_tritons(needs_cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZENFLOW_KERNELS", raising=False)
    assert type(kernels_for(torch.device("cuda"))).__name__ == "TritonKernels"


def test_each_device_has_its_own_and_the_variable_overrules_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZENFLOW_KERNELS", raising=False)
    assert isinstance(kernels_for(CPU), CpuKernels)
    assert type(kernels_for(META)) is Kernels
    monkeypatch.setenv("ZENFLOW_KERNELS", "torch")
    assert type(kernels_for(CPU)) is Kernels
    monkeypatch.setenv("ZENFLOW_KERNELS", "cuda")
    with pytest.raises(ValueError, match="ZENFLOW_KERNELS must be torch, triton or cpu, or not be set, got 'cuda'"):
        kernels_for(CPU)
    monkeypatch.setenv("ZENFLOW_KERNELS", "cpu")
    with pytest.raises(ValueError, match="ZENFLOW_KERNELS must be torch or triton for training on meta, got 'cpu'"):
        kernels_for(META)


PASSES = ["route", "factored_step_", "provisional_update_", "select", "column_writer", "adamw_"]


@pytest.mark.parametrize("name", PASSES)
def test_where_a_kernel_cannot_be_compiled_torch_takes_over(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its first launch compiles, and raises what Triton raises then."""
    triton = pytest.importorskip("lightning_zenflow.kernels.triton", reason="Triton has no wheel for this platform")

    def no_compiler(*_: object, **__: object) -> None:
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")

    monkeypatch.setattr(triton.TritonKernels, name, no_compiler)
    monkeypatch.setenv("ZENFLOW_KERNELS", "triton")
    assert type(kernels_for(CPU)) is Kernels
    assert "Triton's kernels cannot be used, torch's are" in caplog.text
    assert "Failed to find C compiler" in caplog.text and "ZENFLOW_KERNELS=torch" in caplog.text
