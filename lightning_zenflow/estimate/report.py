"""A prediction in words: the table, the sentence below it, and the same as JSON."""

import dataclasses
from typing import Any

from tabulate import tabulate

from lightning_zenflow.estimate.cost import Cost, CostComparison

_HEADERS = ("training", "GPU GB", "host GB", "down GB", "up GB", "CPU ms", "step ms", "speed", "fits")

_ALIGNMENT = ("left", *["right"] * 7, "left")


def as_text(prediction: CostComparison) -> str:
    """The table with its head, the S and d that were chosen, and what limits."""
    machine, workload, schedule = prediction.machine, prediction.workload, prediction.schedule
    rows = [_row(name, cost, prediction) for name, cost in _costs(prediction).items()]
    head = (
        f"{workload.model.name}, {workload.model.numel / 1e9:.4g} B trained parameters, "
        f"on {_plural(machine.gpus, 'GPU')} of {machine.gpu_mem:g} GB, {machine.ranks_per_host} a host; "
        f"PCIe {machine.pcie:g} GB/s a GPU, memory {machine.cpu_bw:g} GB/s a host; "
        f"{workload.step_ms:g} ms a step without offload"
    )
    legend = "GPU: one, without activations. Host: all ranks of one. Down, up, CPU: one rank, a step."
    table = tabulate(rows, headers=_HEADERS, tablefmt="simple", colalign=_ALIGNMENT, disable_numparse=True)
    chosen = (
        f"ZenFlow settles at update_interval S = {schedule.update_interval}, publish_lag d = {schedule.publish_lag}."
    )
    lines = [head, "", table, "", legend, chosen, limit_sentence(prediction)]
    if is_worth_fixing(prediction):
        fastest = prediction.fastest_pace
        lines.append(
            f"A fixed S = {fastest.update_interval}, d = {fastest.publish_lag} would be faster: fewer weights are copied a step."
        )
    return "\n".join(lines)


def as_dict(prediction: CostComparison) -> dict[str, Any]:
    """Plain numbers, in bytes and seconds, for JSON."""
    workload = dataclasses.asdict(prediction.workload)
    model = prediction.workload.model
    workload["model"] = {"name": model.name, "numel": model.numel, "frozen_numel": model.frozen_numel}
    return {
        "machine": dataclasses.asdict(prediction.machine),
        "workload": workload,
        "update_interval": prediction.schedule.update_interval,
        "publish_lag": prediction.schedule.publish_lag,
        "limit": prediction.limit,
        "none": dataclasses.asdict(prediction.none),
        "zero_offload": dataclasses.asdict(prediction.zero_offload),
        "zenflow": dataclasses.asdict(prediction.zenflow),
        "fastest_update_interval": prediction.fastest_pace.update_interval,
        "fastest_publish_lag": prediction.fastest_pace.publish_lag,
        "fastest": dataclasses.asdict(prediction.fastest),
    }


def limit_sentence(prediction: CostComparison) -> str:
    """What keeps ZenFlow from the speed of training without offload, in one sentence."""
    machine, cost, schedule = prediction.machine, prediction.zenflow, prediction.schedule
    match prediction.limit:
        case "device memory":
            model = prediction.workload.model
            weights = prediction.workload.dtype_bytes * (model.numel + model.frozen_numel)
            return (
                f"GPU memory limits: {_gb(cost.device_bytes)} GB are needed before activations and there are {machine.gpu_mem:g}; "
                f"{_gb(weights)} GB are the weights, which ZeRO-2 replicates."
            )
        case "host memory":
            return f"Host memory limits: {_gb(cost.host_bytes)} GB are needed and there are {machine.host_mem or 0:g}."
        case "PCIe":
            return (
                f"PCIe limits: {_ms(cost.copy_s)} ms of a step are copies that nothing hides; "
                f"the CPU's {_ms(cost.cpu_s)} ms {'hide' if cost.wait_s < 1e-4 else f'make it wait {_ms(cost.wait_s)} ms'}."
            )
        case "CPU":
            return (
                f"The CPU's memory bandwidth limits: its {_ms(cost.cpu_s)} ms a step do not hide even at S = {schedule.update_interval}, "
                f"so a step waits {_ms(cost.wait_s)} ms."
            )
        case "nothing":
            return f"Nothing limits: the CPU's {_ms(cost.cpu_s)} ms a step hide, and copies add {_ms(cost.copy_s)} ms."


def is_worth_fixing(prediction: CostComparison) -> bool:
    """Whether a fixed S and d would be noticeably faster than what `auto` settles at."""
    return prediction.fastest.step_s < 0.95 * prediction.zenflow.step_s


def _costs(prediction: CostComparison) -> dict[str, Cost]:
    schedule = prediction.fastest_pace
    costs = {
        "ZeRO-2, no offload": prediction.none,
        "ZeRO-Offload": prediction.zero_offload,
        "ZenFlow": prediction.zenflow,
    }
    if is_worth_fixing(prediction):
        costs[f"ZenFlow, S = {schedule.update_interval}, d = {schedule.publish_lag}"] = prediction.fastest
    return costs


def _row(name: str, cost: Cost, prediction: CostComparison) -> list[str]:
    speed = prediction.workload.step_ms / 1e3 / cost.step_s
    return [
        name,
        _gb(cost.device_bytes),
        _gb(cost.host_bytes),
        _gb(cost.d2h_bytes),
        _gb(cost.h2d_bytes),
        _ms(cost.cpu_s),
        _ms(cost.step_s),
        f"{speed:.0%}",
        fits_text(cost),
    ]


def fits_text(cost: Cost) -> str:
    """Whether it fits: "yes", or what is too small."""
    too_small = [name for name, fits in (("GPU", cost.fits_device), ("host", cost.fits_host)) if fits is False]
    return f"no: {' and '.join(too_small)}" if too_small else "yes"


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _gb(n_bytes: float) -> str:
    return f"{n_bytes / 1e9:.1f}" if n_bytes >= 1e8 or n_bytes == 0 else f"{n_bytes / 1e9:.2g}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f}" if seconds >= 0.01 or seconds == 0 else f"{seconds * 1e3:.2g}"
