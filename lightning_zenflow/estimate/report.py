"""Report of a cost comparison: a table, a picture of the memory and sentences on what limits, or JSON."""

import dataclasses
from typing import Any

from tabulate import tabulate

from lightning_zenflow.estimate.bars import memory_bars
from lightning_zenflow.estimate.cost import Cost, CostComparison
from lightning_zenflow.schedule.staggered import UpdateSchedule

_HEADERS = ("training", "GPU GB", "host GB", "d2h GB", "h2d GB", "CPU ms", "step ms", "speed", "fits")

_ALIGNMENT = ("left", *["right"] * 7, "left")


_IMMEDIATE = UpdateSchedule(update_interval=1, publish_lag=0)


def as_text(comparison: CostComparison, *, unicode: bool = True) -> str:
    """The table, the memory as bars, whether offload is needed, the S and d that `auto` chooses, and the limit.

    Args:
        comparison: the costs.
        unicode: whether the bars may have characters that are not ASCII.
    """
    machine, workload = comparison.machine, comparison.workload
    costs = _costs(comparison)
    rows = [_row(name, cost, comparison) for name, cost in costs.items()]
    head = (
        f"{workload.model.name}, {workload.model.numel / 1e9:.4g} B trained parameters, "
        f"on {_plural(machine.gpus, 'GPU')} of {machine.gpu_mem:g} GB, {machine.ranks_per_host} a host; "
        f"PCIe {machine.pcie:g} GB/s a GPU, memory {machine.cpu_bw:g} GB/s a host; "
        f"{workload.step_ms:g} ms a step without offload"
    )
    legend = "GPU: one, without activations. Host: all ranks of one. d2h, h2d, CPU: one rank, a step."
    table = tabulate(rows, headers=_HEADERS, tablefmt="simple", colalign=_ALIGNMENT, disable_numparse=True)
    host = (
        "GB" if machine.host_mem is None else f"┃ {machine.host_mem:g} GB" if unicode else f"| {machine.host_mem:g} GB"
    )
    device = f"{'┃' if unicode else '|'} {machine.gpu_mem:g} GB"
    bars = [
        *memory_bars(
            f"GPU memory before activations, {device}",
            {name: cost.device_bytes / 1e9 for name, cost in costs.items()},
            machine.gpu_mem,
            unicode=unicode,
        ),
        *memory_bars(
            f"Host memory, {host}",
            {name: cost.host_bytes / 1e9 for name, cost in costs.items() if cost.host_bytes},
            machine.host_mem,
            unicode=unicode,
        ),
    ]
    sentences = [legend, *advice(comparison)]
    return "\n".join([head, "", table, "", *bars, "", *sentences])


def advice(comparison: CostComparison) -> list[str]:
    """Conclusions: whether offload is needed, the schedule, the limit."""
    machine, schedule, none = comparison.machine, comparison.schedule, comparison.none
    lines = []
    if none.fits:
        lines.append(
            f"You need no offload if activations fit in the {_gb(machine.gpu_mem * 1e9 - none.device_bytes)} GB that ZeRO-2 without it"
            " leaves: nothing is faster."
        )
    chosen = (
        f"ZenFlow settles at update_interval S = {schedule.update_interval}, publish_lag d = {schedule.publish_lag}"
    )
    if comparison.tail > 0:
        where = "stay on the GPU" if comparison.owns_tail else "take a step more"
        chosen += f"; the last {comparison.tail:.0%} of the blocks {where}"
    is_exact = schedule == _IMMEDIATE and (comparison.tail == 0 or comparison.owns_tail)
    meaning = ": AdamW itself, its update hidden behind backward." if is_exact else "."
    lines.append(chosen + meaning + ("" if is_exact else " S = 1, d = 0 is AdamW itself: nothing is late."))
    lines.append(limit_sentence(comparison))
    if is_worth_fixing(comparison):
        fastest = comparison.fastest_schedule
        lines.append(
            f"A fixed S = {fastest.update_interval}, d = {fastest.publish_lag} would be faster: fewer weights are copied a step."
        )
    return lines


def as_dict(comparison: CostComparison) -> dict[str, Any]:
    """Converts a comparison to plain numbers for JSON, in bytes and seconds."""
    workload = dataclasses.asdict(comparison.workload)
    model = comparison.workload.model
    workload["model"] = {"name": model.name, "numel": model.numel, "frozen_numel": model.frozen_numel}
    return {
        "machine": dataclasses.asdict(comparison.machine),
        "workload": workload,
        "update_interval": comparison.schedule.update_interval,
        "publish_lag": comparison.schedule.publish_lag,
        "tail": comparison.tail,
        "owns_tail": comparison.owns_tail,
        "limit": comparison.limit,
        "none": dataclasses.asdict(comparison.none),
        "zero_offload": dataclasses.asdict(comparison.zero_offload),
        "zenflow": dataclasses.asdict(comparison.zenflow),
        "immediate": dataclasses.asdict(comparison.immediate),
        "fastest_update_interval": comparison.fastest_schedule.update_interval,
        "fastest_publish_lag": comparison.fastest_schedule.publish_lag,
        "fastest": dataclasses.asdict(comparison.fastest),
    }


def limit_sentence(comparison: CostComparison) -> str:
    """The reason why ZenFlow is slower than training without offload, in one sentence."""
    machine, cost, schedule = comparison.machine, comparison.zenflow, comparison.schedule
    match comparison.limit:
        case "device memory":
            return (
                f"GPU memory limits: {_gb(cost.device_bytes)} GB are needed before activations and there are {machine.gpu_mem:g}; "
                f"{_gb(comparison.workload.weight_bytes)} GB are the weights, which ZeRO-2 replicates."
            )
        case "host memory":
            return f"Host memory limits: {_gb(cost.host_bytes)} GB are needed and there are {machine.host_mem or 0:g}."
        case "PCIe":
            return (
                f"PCIe limits: {_ms(cost.copy_s)} ms of a step are exposed copies; "
                f"the CPU's {_ms(cost.cpu_s)} ms {'hide' if cost.wait_s < 1e-4 else f'make it wait {_ms(cost.wait_s)} ms'}."
            )
        case "CPU":
            return (
                f"The CPU's memory bandwidth limits: its {_ms(cost.cpu_s)} ms a step do not hide even at S = {schedule.update_interval}, "
                f"so a step waits {_ms(cost.wait_s)} ms."
            )
        case "nothing":
            return f"Nothing limits: the CPU's {_ms(cost.cpu_s)} ms a step hide, and copies add {_ms(cost.copy_s)} ms."


def is_worth_fixing(comparison: CostComparison) -> bool:
    """True if `fastest_schedule` is more than 5 % faster than the schedule that `auto` settles at."""
    return comparison.fastest.step_s < 0.95 * comparison.zenflow.step_s


def _costs(comparison: CostComparison) -> dict[str, Cost]:
    """By name; ZenFlow with the S and d of `auto`, with S = 1, d = 0, and with the fastest if that is worth fixing."""
    costs = {
        "ZeRO-2, no offload": comparison.none,
        "ZeRO-Offload": comparison.zero_offload,
        _name_of(_IMMEDIATE): comparison.immediate,
    }
    if is_worth_fixing(comparison):
        costs[_name_of(comparison.fastest_schedule)] = comparison.fastest
    # The last: with "auto", S and d change until they settle, which takes the memory of all of them.
    costs[_name_of(comparison.schedule)] = comparison.zenflow
    return costs


def _name_of(schedule: UpdateSchedule) -> str:
    return f"ZenFlow, S = {schedule.update_interval}, d = {schedule.publish_lag}"


def _row(name: str, cost: Cost, comparison: CostComparison) -> list[str]:
    speed = comparison.workload.step_ms / 1e3 / cost.step_s
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
    """Text of the column "fits": "yes", or "no" and the memories that are too small."""
    too_small = [name for name, fits in (("GPU", cost.fits_device), ("host", cost.fits_host)) if fits is False]
    return f"no: {' and '.join(too_small)}" if too_small else "yes"


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _gb(n_bytes: float) -> str:
    return f"{n_bytes / 1e9:.1f}" if n_bytes >= 1e8 or n_bytes == 0 else f"{n_bytes / 1e9:.2g}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f}" if seconds >= 0.01 or seconds == 0 else f"{seconds * 1e3:.2g}"
