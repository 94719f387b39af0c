"""Tables of step times."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import mean, median

import numpy

from benchmarks.common.results import markdown
from benchmarks.step_time.methods import METHODS, RATIO
from benchmarks.step_time.models import PART_OF_STEP, RESIDENT_BYTES
from benchmarks.step_time.run import StepResult

_BASELINES = ("floor", "none", "floor3")
"""Steps without offloading: the first of these that was run."""


def runs_by_method(results: Iterable[Iterable[StepResult]]) -> dict[str, list[StepResult]]:
    """All repeats of each method, in the order of `METHODS`."""
    runs: dict[str, list[StepResult]] = {}
    for of_repeat in results:
        for result in of_repeat:
            runs.setdefault(result.spec.method, []).append(result)
    return {method: runs[method] for method in METHODS if method in runs}


def _compared(
    results: Sequence[Sequence[StepResult]],
    method: str,
    peer: str,
    form: Callable[[float], str],
    compare: Callable[[float, float], float],
) -> str:
    """Median over the repeats of a comparison of two methods' mean step times in seconds; "" without a common repeat."""
    repeats = [{r.spec.method: mean(r.step_s) for r in of_repeat} for of_repeat in results]
    values = [compare(step_s[method], step_s[peer]) for step_s in repeats if method in step_s and peer in step_s]
    return form(median(values)) if values else ""


def _by_formula(runs: Mapping[str, Sequence[StepResult]]) -> dict[str, float]:
    """Seconds of a step with some of the blocks resident, from the floor and the worker's pass without residents.

    The device updates residents, and the worker the others, at the same time. What is left of its pass behind backward delays the step; all
    of it where each step clips by its true factor, which is known at the step's end.
    """
    whole = f"zenflow_exact_{RATIO}100"
    if not {"floor", whole} <= {*runs}:
        return {}
    spec, n_params = runs[whole][0].spec, runs[whole][0].n_params
    floor_s = median(mean(r.step_s) for r in runs["floor"])
    pass_s = median(mean(r.worker_s) for r in runs[whole])
    backward_s, update_s = (
        PART_OF_STEP["backward"] * spec.compute_s,
        RESIDENT_BYTES * n_params / spec.device_memory / 1e9,
    )
    found = {}
    for name in runs:
        kind, is_one, percent = name.partition(RATIO)
        if is_one:
            on_host = int(percent) / 100
            behind_s = on_host * pass_s * 28 / 30 if kind == "zenflow_adamw_" else on_host * pass_s - backward_s
            found[name] = floor_s + max(0.0, (1 - on_host) * update_s, behind_s)
    return found


def _ms(seconds: float) -> str:
    """In milliseconds, below 100 with a decimal."""
    return f"{1e3 * seconds:.{int(seconds < 0.1)}f}"


def tables(results: Sequence[Sequence[StepResult]]) -> str:
    """A table of the methods for each time that the device computes."""
    specs = {r.spec.worker_share: r.spec for of_repeat in results for r in of_repeat}
    parts = []
    for share, spec in specs.items():
        of_share = [[r for r in of_repeat if r.spec.worker_share == share] for of_repeat in results]
        if share > 0:
            takes_ms = 1e3 * PART_OF_STEP[spec.share_of] * spec.compute_s
            parts.append(f"The worker's pass is {share:.0%} of {spec.share_of}, which takes {takes_ms:.0f} ms:")
        parts.append(table(of_share))
    return "\n\n".join(parts)


def table(results: Sequence[Sequence[StepResult]]) -> str:
    """A Markdown table with a row for each method."""
    runs = runs_by_method(results)
    baseline = next((name for name in _BASELINES if name in runs), None)
    peers = [name for name in runs if METHODS[name].peer]
    every_run, by_formula = [r for of_method in runs.values() for r in of_method], _by_formula(runs)
    rows = []
    for method, of_method in runs.items():
        p99_by_p50 = [numpy.quantile(r.step_s, 0.99, method="inverted_cdf") / median(r.step_s) for r in of_method]
        row = {
            "method": METHODS[method].title,
            "mean ms": _ms(median(mean(r.step_s) for r in of_method)),
            "median ms": _ms(median(median(r.step_s) for r in of_method)),
            "p99/p50": f"{median(p99_by_p50):.2f}",
        }
        if baseline is not None:
            above = _compared(results, method, baseline, _ms, lambda step_s, floor_s: step_s - floor_s)
            row[f"above {baseline} ms"] = above
            share = _compared(results, method, baseline, "{:.0%}".format, lambda step_s, floor_s: floor_s / step_s)
            row[f"speed of {baseline}"] = share
        for peer in peers:
            row[f"time / {peer}"] = _compared(
                results, method, peer, "{:.2f}".format, lambda step_s, peer_s: step_s / peer_s
            )
        zenflow = any(r.schedule for r in of_method)
        row["waiting"] = f"{median(sum(r.stall_s) / sum(r.step_s) for r in of_method):.1%}" if zenflow else ""
        row["worker ms"] = f"{1e3 * median(mean(r.worker_s) for r in of_method):.0f}" if zenflow else ""
        row["S, d"] = ", ".join(map(str, of_method[-1].schedule))
        if any(r.resident_share for r in every_run):
            row["offload_ratio"] = f"{1 - (of_method[-1].resident_share or 0):.2f}" if zenflow else ""
        if of_method[-1].spec.asynchronous and by_formula:
            row["by formula ms"] = _ms(by_formula[method]) if method in by_formula else ""
        if any(r.moved_sizes for r in every_run):
            for way, name in enumerate(("d2h", "h2d")):
                sizes = [r.moved_sizes[way] for r in of_method if r.moved_sizes]
                row[name] = f"{median(sizes):.2f}" if sizes else ""
        if any(r.host_bytes for r in every_run):
            row["host GB"] = f"{median(r.host_bytes for r in of_method) / 1e9:.2f}"
        floor = "floor3" if METHODS[method].stage == 3 else "floor"
        if floor in runs and any(r.arena_bytes for r in every_run):
            for name, value in _host_bytes(of_method, runs[floor]).items():
                row[name] = f"{value:.1f}" if value else ""
        if any(r.device_bytes for r in every_run):
            row["device GB"] = f"{median(r.device_bytes for r in of_method) / 1e9:.2f}"
        rows.append(row)
    return markdown(rows)


def _host_bytes(runs: Sequence[StepResult], floor: Sequence[StepResult]) -> dict[str, float]:
    """Host memory in bytes a parameter: what is resident beside the floor, by formula, the arena, what of it is page-locked."""
    method, n_params = METHODS[runs[-1].spec.method], runs[-1].n_params
    resident = median(r.host_bytes for r in runs) - median(r.host_bytes for r in floor)
    if method.host_bytes:
        # The floor's weights are in host memory as well.
        resident += (METHODS[floor[-1].spec.method].host_bytes or 0) * n_params
    return {
        "host bytes/param": resident / n_params,
        **({"by formula": method.host_bytes or 0} if method.stage == 3 else {}),
        "arena": median(r.arena_bytes for r in runs) / n_params,
        "page-locked": median(r.page_locked_bytes for r in runs) / n_params,
    }
