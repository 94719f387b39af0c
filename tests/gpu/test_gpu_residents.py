"""On a CUDA device: blocks whose state it owns have the bits of those in host memory.

    python -m pytest -m gpu tests/gpu/test_gpu_residents.py

The same runs on the CPU.
"""

import math
from dataclasses import replace

import pytest
import torch

from harness import AUTO, Case, run_here
from lightning_zenflow.core.step_inputs import GroupHyperparameters, StepScale
from same_bits import assert_same_run

COUNTS, BETAS = 1_000_000, (0.8, 0.95, 0.999, 0.99999)
"""Steps, and both betas in turn."""


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def accelerator(request: pytest.FixtureRequest) -> str:
    """Where it trains."""
    return str(request.param)


@pytest.mark.parametrize("beta", BETAS)
def test_coefficients_are_the_workers(beta: float, accelerator: str) -> None:
    """In float32, to which both sides round them: the worker has the C library's functions, as Python has, a GPU its own."""
    device = torch.device("cuda" if accelerator == "gpu" else "cpu")
    counts, one = torch.arange(1, COUNTS + 1, dtype=torch.float64, device=device), torch.ones((), device=device)
    scale = StepScale(factor=one, finite=one.bool(), norm=one, count=counts)
    h = GroupHyperparameters(lr=1e-3, beta1=beta, beta2=beta, eps=1e-8, weight_decay=0.0, decoupled=True)
    corrections = [1.0 - math.pow(beta, float(count)) for count in range(1, COUNTS + 1)]
    expected = [h.lr / c for c in corrections], [1.0 / math.sqrt(c) for c in corrections]
    for ours, theirs in zip(scale.coefficients(h), expected, strict=True):
        of_worker = torch.tensor(theirs, dtype=torch.float64, device="cpu").float()
        differ = (ours.cpu().float() != of_worker).nonzero().flatten() + 1
        assert differ.numel() == 0, f"{differ.numel()} of {COUNTS}, at first those of steps {differ[:10].tolist()}"


LONG = Case(model="SmallNet", update_interval=1, publish_lag=0, steps=50, recorded=False)
TRAININGS = {
    "float32": LONG,
    "clipped": replace(LONG, max_norm=0.5),
    "bf16, clipped, accumulated": replace(LONG, precision="bf16-true", max_norm=0.5, accumulate=2),
}


@pytest.mark.parametrize("name", TRAININGS)
def test_no_bit_depends_on_the_owner(name: str, accelerator: str) -> None:
    """With fixed shares, and where owners change."""
    case = replace(TRAININGS[name], accelerator=accelerator).with_keys(clip_prediction=False)
    whole = run_here(case.with_keys(offload_ratio=1.0))
    for ratio in (0.5, 0.0):
        assert_same_run(run_here(case.with_keys(offload_ratio=ratio)), whole)
    moves = ((5, 1, 0, 0.3), (20, 1, 0, 0.8), (35, 1, 0, 1.0))
    assert_same_run(run_here(replace(case, schedules=moves).with_keys(**AUTO)), whole)
