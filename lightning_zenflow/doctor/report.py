"""Report of a machine on one screen, and what to expect of it. Pure but for `examine`."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tabulate import tabulate

from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.core.device import PAGEABLE_MEMORY
from lightning_zenflow.doctor.machine import Gpu, Host, gpus, host, page_lock_refusal, versions
from lightning_zenflow.doctor.speed import Pcie, Worker, measure_pcie, measure_worker
from lightning_zenflow.estimate.cost import Cost, CostComparison, estimate
from lightning_zenflow.estimate.machine import Machine, Workload
from lightning_zenflow.estimate.shapes import shapes_of_count

_USUAL = ZenFlowConfig(update_interval=1, publish_lag=0, tail="none")
"""The schedule whose memory is meant: what training starts with. It is fixed, so that `estimate` does not search for one."""

_FEW_CORES, _SLOW_PCIE_GB_S = 4, 10.0

_SIGNIFICANT = 0.02
"""Relative accuracy of the largest models."""


@dataclass(frozen=True, kw_only=True)
class Examination:
    """Findings of `doctor`."""

    versions: dict[str, str]
    host: Host
    gpus: list[Gpu]
    pcie: list[Pcie]
    """By GPU; empty if it could not be measured."""
    pcie_error: str | None
    """Why there is no measurement of PCIe."""
    page_lock_refusal: str | None
    """Why host memory cannot be page-locked for the first GPU; None if it can, or if there is no GPU."""
    worker: Worker | None
    worker_error: str | None
    """Why there is no measurement of the worker."""


def examine() -> Examination:
    """Reads and measures this machine; takes some seconds.

    Raises:
        ValueError: `LIGHTNING_ZENFLOW_HOST_GIB` is not a number above 0.
    """
    found = gpus()
    device = torch.device("cuda", 0) if found else torch.device("cpu")
    worker, error = None, None
    try:
        worker = measure_worker(device, ZenFlowConfig().pt_reserved_cores_perc)
    except RuntimeError as reason:
        error = str(reason)
    pcie: list[Pcie] = []
    pcie_error = None
    try:
        pcie = [measure_pcie(index) for index in range(len(found))]
    except RuntimeError as reason:  # torch's, as where another process has taken the memory
        pcie_error = str(reason).partition("\n")[0]
    return Examination(
        versions=versions(),
        host=host(),
        gpus=found,
        pcie=pcie,
        pcie_error=pcie_error,
        page_lock_refusal=page_lock_refusal(device) if found else None,
        worker=worker,
        worker_error=error,
    )


def as_dict(examination: Examination) -> dict[str, Any]:
    """Converts an examination to plain values for JSON."""
    return {**dataclasses.asdict(examination), "expect": expectations(examination)}


def as_text(examination: Examination) -> str:
    """A table of facts and measurements, and sentences on what to expect."""
    rows = [
        ("versions", ", ".join(f"{name} {number}" for name, number in examination.versions.items())),
        ("system", examination.host.system),
        *_gpu_rows(examination),
        ("cores", _cores_text(examination.host)),
        ("memory", _memory_text(examination)),
        ("limits", _limits_text(examination.host)),
        ("worker", _worker_text(examination)),
        ("compiler", examination.host.compiler or "none"),
    ]
    table = tabulate(rows, tablefmt="plain", disable_numparse=True)
    expected = "\n".join(f"- {sentence}" for sentence in expectations(examination))
    return f"{table}\n\nWhat to expect\n{expected}"


def expectations(examination: Examination) -> list[str]:
    """Expectations for a training here, most important first: what is missing, what fits, how fast the CPU's work is."""
    return [*_missing(examination), *_fitting(examination), *_speeds(examination), *_advice(examination)]


def _missing(examination: Examination) -> list[str]:
    sentences = []
    for name, number in examination.versions.items():
        if number == "missing":
            sentences.append(f"{name} is not installed: `pip install lightning-zenflow`.")
    if examination.worker_error is not None:
        sentences.append(f"Training cannot start: {examination.worker_error}")
    if not examination.host.has_memfd:
        sentences.append(
            "Training cannot start: the system refuses memfd_create, by which trainer and worker share memory."
        )
    return sentences


def _fitting(examination: Examination) -> list[str]:
    """The largest models, where there are GPUs whose PCIe could be measured."""
    if examination.pcie_error is not None:
        return [
            f"PCIe could not be measured ({examination.pcie_error}): run it again while nothing else uses the GPUs."
        ]
    if not examination.gpus:
        what = "this build of torch has no CUDA" if examination.versions["CUDA"] == "none" else "torch sees none"
        return [f"No GPU ({what}): training runs on the CPU, for tests and small models."]
    machine = _machine(examination)
    ways: dict[str, Callable[[CostComparison], Cost]] = {
        "without offload": lambda comparison: comparison.none,
        "with ZeRO-Offload": lambda comparison: comparison.zero_offload,
        "with ZenFlow": lambda comparison: comparison.zenflow,
    }
    sizes = ", ".join(f"{largest_model(machine, way) / 1e9:.2g} B {name}" for name, way in ways.items())
    gpus = "the GPU" if machine.gpus == 1 else f"all {machine.gpus} GPUs"
    return [f"Largest models in bf16 on {gpus}, before activations: {sizes}."]


def _speeds(examination: Examination) -> list[str]:
    worker = examination.worker
    if worker is None:
        return []
    ranks = max(1, len(examination.gpus))
    shared = "" if ranks == 1 else f" if one rank works; {ranks} ranks share the memory's bandwidth"
    sentences = [
        f"AdamW of 1 B parameters takes the worker {worker.update_ns[1]:.2g} s{shared}. It hides behind steps that take longer"
        f" without offload; with S = 4 behind steps of {worker.update_ns[4]:.2g} s."
    ]
    if examination.pcie:
        slowest = min(pcie.both_gb_s for pcie in examination.pcie)
        sentences.append(f"Gradients of 1 B parameters in bf16 take {2 / slowest:.2g} s over PCIe, as do weights.")
    return sentences


def _advice(examination: Examination) -> list[str]:
    facts, sentences = examination.host, []
    if examination.page_lock_refusal is not None:
        sentences.append(
            f"Host memory cannot be page-locked ({examination.page_lock_refusal}): training works, but {PAGEABLE_MEMORY}."
        )
    elif examination.gpus and facts.is_wsl:
        sentences.append(
            "WSL2 page-locks a part of its memory only. Where it refuses, training works, but copies make the training thread wait; a Linux"
            " of its own has no such limit."
        )
    if facts.cpu_limit is not None and facts.cpu_limit < facts.logical_cores:
        sentences.append(
            f"A control group grants {facts.cpu_limit:g} CPUs of the {facts.logical_cores}: the worker takes no more."
        )
    if examination.gpus:
        each = facts.physical_cores / len(examination.gpus)
        if each < _FEW_CORES:
            sentences.append(f"{each:g} physical cores a GPU are few: data loaders compete with the worker.")
        slow = min((min(pcie.d2h_gb_s, pcie.h2d_gb_s) for pcie in examination.pcie), default=_SLOW_PCIE_GB_S)
        if slow < _SLOW_PCIE_GB_S:
            sentences.append(
                f"PCIe's {slow:.2g} GB/s are slow: a GPU in a slot of 16 lanes has 12 (PCIe 3) to 50 (PCIe 5)."
            )
        if facts.compiler is None:
            sentences.append(
                "Without a C compiler Triton's kernels cannot be built; torch's take over, which are slower."
            )
        if examination.pcie:
            sentences.append(f"For your model, with its parameters and step time: {_estimate_command(examination)}")
    return sentences


def largest_model(machine: Machine, way: Callable[[CostComparison], Cost]) -> float:
    """Parameters of the largest model that fits, in bf16 and without activations, to 2 %; 0 if none does.

    Args:
        machine: the hardware.
        way: chooses the way to train.
    """

    def fits(params: float) -> bool:
        return way(estimate(Workload(model=shapes_of_count(params), step_ms=1000.0), machine, _USUAL)).fits

    low, high = 1e6, 1e13
    if not fits(low):
        return 0.0
    while high / low > 1 + _SIGNIFICANT:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _machine(examination: Examination) -> Machine:
    """The inputs of the estimate."""
    n, worker = len(examination.gpus), examination.worker
    free_gb = examination.host.free_gb
    return Machine(
        gpus=n,
        gpus_per_host=n,
        gpu_mem=_rounded(min(gpu.memory_gb for gpu in examination.gpus)),
        pcie=_rounded(min(pcie.both_gb_s for pcie in examination.pcie)),
        cpu_bw=_rounded(worker.memory_gb_s if worker else 40.0),
        cpu_cores=examination.host.physical_cores,
        host_mem=None if free_gb is None or math.isinf(free_gb) else _rounded(free_gb),
    )


def _estimate_command(examination: Examination) -> str:
    machine = _machine(examination)
    host_mem = "" if machine.host_mem is None else f" --host-mem {machine.host_mem:g}"
    return (
        f"lightning-zenflow estimate --params 7e9 --gpus {machine.gpus} --gpus-per-host {machine.gpus_per_host}"
        f" --gpu-mem {machine.gpu_mem:g} --pcie {machine.pcie:g} --cpu-bw {machine.cpu_bw:g} --cpu-cores {machine.cpu_cores}"
        f"{host_mem} --step-ms 1000"
    )


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def _gpu_rows(examination: Examination) -> list[tuple[str, str]]:
    if not examination.gpus:
        return [("GPU", "none")]
    speeds = [
        f"PCIe d2h {pcie.d2h_gb_s:.1f}, h2d {pcie.h2d_gb_s:.1f}, both at once {pcie.both_gb_s:.1f} GB/s each"
        for pcie in examination.pcie
    ] or ["PCIe not measured"] * len(examination.gpus)
    return [
        (
            f"GPU {index}",
            f"{gpu.name}, {gpu.memory_gb:.1f} GB; {speed}; "
            + (f"{len(gpu.numa_cores)} cores on its NUMA node" if gpu.numa_cores else "NUMA node unknown"),
        )
        for index, (gpu, speed) in enumerate(zip(examination.gpus, speeds, strict=True))
    ]


def _cores_text(facts: Host) -> str:
    nodes = (
        f"{facts.numa_nodes} NUMA node{'' if facts.numa_nodes == 1 else 's'}" if facts.numa_nodes else "NUMA unknown"
    )
    limit = "" if facts.cpu_limit is None else f"; control group: {facts.cpu_limit:g} CPUs"
    return f"{facts.physical_cores} physical, {facts.logical_cores} logical, of this process; {nodes}{limit}"


def _memory_text(examination: Examination) -> str:
    facts, worker = examination.host, examination.worker
    free = "unknown" if facts.free_gb is None else f"{facts.free_gb:.1f} GB free ({facts.free_limit})"
    speed = "" if worker is None else f"; read and written at {worker.memory_gb_s:.1f} GB/s by the worker's cores"
    return f"{facts.memory_gb:.1f} GB, {free}{speed}"


def _limits_text(facts: Host) -> str:
    memlock = "unlimited" if facts.memlock_gb is None else f"{facts.memlock_gb:.3g} GB"
    return f"memlock {memlock}, memfd {'yes' if facts.has_memfd else 'no'}"


def _worker_text(examination: Examination) -> str:
    worker = examination.worker
    if worker is None:
        return "none"
    times = ", ".join(f"S = {s}: {ns:.2f}" for s, ns in worker.update_ns.items())
    cores = ",".join(map(str, worker.cores))
    return f"{worker.instruction_set}, cores {cores}; ns a parameter and step, {times}"
