"""Step times to a table and a plot."""

from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from tabulate import tabulate

from benchmarks import records
from benchmarks.step_methods import METHODS
from benchmarks.step_run import StepResult

_BASELINES = ("floor", "none")
"""What a step costs without offloading: the first of these that was run."""


def runs_by_method(results: Iterable[Iterable[StepResult]]) -> dict[str, list[StepResult]]:
    """Of each method all repeats, in the order of `METHODS`."""
    runs: dict[str, list[StepResult]] = {}
    for of_repeat in results:
        for result in of_repeat:
            runs.setdefault(result.spec.method, []).append(result)
    return {method: runs[method] for method in METHODS if method in runs}


def baseline_of(methods: Container[str]) -> str | None:
    """Which of the methods shows what a step takes without offloading, if any does."""
    return next((name for name in _BASELINES if name in methods), None)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _ratio(results: Sequence[Sequence[StepResult]], method: str, peer: str) -> float | None:
    """Median over the repeats of the ratio of mean step times."""
    ratios = []
    for of_repeat in results:
        by_method = {r.spec.method: mean(r.step_s) for r in of_repeat}
        if method in by_method and peer in by_method:
            ratios.append(by_method[method] / by_method[peer])
    return median(ratios) if ratios else None


def _stall_ms(results: Sequence[Sequence[StepResult]], method: str, baseline: str) -> float | None:
    """Median over the repeats of what a mean step takes longer than the baseline's."""
    differences = []
    for of_repeat in results:
        by_method = {r.spec.method: mean(r.step_s) for r in of_repeat}
        if method in by_method and baseline in by_method:
            differences.append(1e3 * (by_method[method] - by_method[baseline]))
    return median(differences) if differences else None


def table(results: Sequence[Sequence[StepResult]]) -> str:
    """One row a method, in Markdown."""
    runs = runs_by_method(results)
    baseline = baseline_of(runs)
    peers = [name for name in ("zero_offload", "deepspeed_zenflow", "torchao") if name in runs]
    rows = []
    for method, of_method in runs.items():
        row: dict[str, Any] = {
            "method": METHODS[method].title,
            "mean ms": f"{1e3 * median(mean(r.step_s) for r in of_method):.0f}",
            "median ms": f"{1e3 * median(median(r.step_s) for r in of_method):.0f}",
            "p99/p50": f"{median(percentile(r.step_s, 0.99) / median(r.step_s) for r in of_method):.2f}",
        }
        if baseline is not None:
            over = _stall_ms(results, method, baseline)
            row[f"above {baseline} ms"] = "" if over is None else f"{over:.0f}"
            share = _ratio(results, baseline, method)
            row[f"speed of {baseline}"] = "" if share is None else f"{share:.0%}"
        for peer in peers:
            ratio = _ratio(results, method, peer)
            row[f"time / {peer}"] = "" if ratio is None else f"{ratio:.2f}"
        ours = any(r.schedule for r in of_method)
        row["waiting"] = f"{median(sum(r.stall_s) / sum(r.step_s) for r in of_method):.1%}" if ours else ""
        row["worker ms"] = f"{1e3 * median(mean(r.worker_s) for r in of_method):.0f}" if ours else ""
        row["S, d"] = ", ".join(map(str, of_method[-1].schedule))
        if any(r.moved_sizes for of_repeat in results for r in of_repeat):
            for way, name in enumerate(("down", "up")):
                sizes = [r.moved_sizes[way] for r in of_method if r.moved_sizes]
                row[name] = f"{median(sizes):.2f}" if sizes else ""
        row["host GB"] = f"{median(r.host_bytes for r in of_method) / 1e9:.2f}"
        if any(r.device_bytes for r in of_method):
            row["device GB"] = f"{median(r.device_bytes for r in of_method) / 1e9:.2f}"
        rows.append(row)
    return tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True)


def write_report(results: Sequence[Sequence[StepResult]], about: Mapping[str, Any], path: Path) -> str:
    """Writes table and plot beside the result file.

    Args:
        results: of each repeat the runs.
        about: command, date, commit, versions, hardware.
        path: the result file, .json.

    Returns:
        The table and what it is about.
    """
    n = max((len(r.step_s) for of_repeat in results for r in of_repeat), default=0)
    text = records.with_origin(table(results), about) + f"; {len(results)} repeats of {n} steps, interleaved.\n"
    path.with_suffix(".md").write_text(text)
    _plot(results, path.with_suffix(".png"))
    return text


def _plot(results: Sequence[Sequence[StepResult]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
    for result in results[-1] if results else []:
        axes.plot([1e3 * s for s in result.step_s], label=METHODS[result.spec.method].title, linewidth=1.2)
    axes.set_xlabel("step")
    axes.set_ylabel("ms")
    axes.set_ylim(bottom=0)
    if axes.lines:
        axes.legend(fontsize="small")
    axes.set_title("Time of each step, last repeat")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
