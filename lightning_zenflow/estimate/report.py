"""Report of an estimate: a table, and sentences on what limits."""

from tabulate import tabulate

from lightning_zenflow.estimate.cost import Estimate

_BACKWARD_SHARE = 2 / 3
"""Of a step: backward computes two matrix products for each one of the forward pass."""


def as_text(found: Estimate) -> str:
    """The table: the least stale schedule and the one that hides; and what does not fit or hide."""
    setup, cost = found.setup, found.costs[found.schedule]
    rows = []
    for schedule in dict.fromkeys((next(iter(found.costs)), found.schedule)):
        c = found.costs[schedule]
        n_bytes = c.device_bytes, c.host_bytes * setup.ranks_per_host, c.d2h_bytes, c.h2d_bytes
        too_small = [memory for memory, share in c.fullness(setup).items() if share > 1]
        fits = f"no: {' and '.join(too_small)}" if too_small else "yes"
        name = f"S = {schedule.update_interval}, d = {schedule.publish_lag}"
        rows.append([name, *(f"{n / 1e9:.1f}" for n in n_bytes), f"{1e3 * c.cpu_s:.0f}", fits])
    headers = ("schedule", "GPU GB", "host GB", "d2h GB", "h2d GB", "CPU ms", "fits")
    align = ("left", *["right"] * 5, "left")
    lines = [tabulate(rows, headers=headers, tablefmt="simple", colalign=align, disable_numparse=True), ""]
    lines.append("GPU: one, without activations. Host: all ranks of one. d2h, h2d, CPU: one rank, a step.")
    if found.hides:
        meaning = ": nothing is late" if found.schedule.is_immediate else ""
        lines.append(f"The least stale schedule whose CPU work hides is {rows[-1][0]}{meaning}.")
    else:
        lines.append(f"The CPU limits: a step takes at least its {1e3 * cost.cpu_s:.0f} ms.")
    if setup.gather_ms > 0:
        link = "PCIe" if setup.link is None else f"a link of {setup.link:g} GB/s"
        lines.append(
            f"At the end of a step the GPUs exchange weights: {setup.gather_ms:.0f} ms over {link}, which ZeRO-2 does not hide."
        )
    backward_ms = _BACKWARD_SHARE * max(setup.step_ms - setup.gather_ms, 0) / setup.accumulate_grad_batches
    copies_ms = cost.d2h_bytes / setup.pcie / 1e6
    if copies_ms > backward_ms:
        lines.append(
            f"PCIe limits: gradients take {copies_ms:.0f} ms, longer than backward's {backward_ms:.0f} ms or so."
        )
    if cost.fullness(setup)["GPU"] > 1:
        where = (
            "of which every GPU has all"
            if setup.stage < 3
            else "a GPU's own and those that DeepSpeed gathers at a time"
        )
        lines.append(f"GPU memory limits: {setup.weight_bytes / 1e9:.1f} GB are weights, {where}.")
    return "\n".join(lines)
