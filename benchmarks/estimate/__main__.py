"""How accurate is `lightning-zenflow estimate`? Puts its predictions beside measured kernels and steps.

    python -m benchmarks.estimate
    python -m benchmarks.estimate --results FOLDER --pcie 25          # of another machine, for instance with a GPU

Nothing is run. The model gets the memory bandwidth that `benchmarks.kernel` has measured, the step of `floor` or else of `none` as the step
without offload, and S and d of the end of a run. Where training is on the CPU, the simulated accelerator included, nothing crosses PCIe,
and copies cost nothing in the prediction either. The estimate is also put beside the timelines of `benchmarks.recorded_device` and beside
figures that others have published. Prints the tables; writes RESULTS/estimate_*.md and docs/estimate.md.
"""

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.common.command_line import CommandLine
from benchmarks.common.results import from_json, markdown, publish
from benchmarks.estimate.check import Checked, check_kernel, check_steps, check_timelines
from benchmarks.estimate.published import rows as published_rows
from benchmarks.kernel.measure import triad_gb_per_s
from benchmarks.recorded_device.prediction import Prediction, prediction_of
from benchmarks.step_time.run import results_of
from lightning_zenflow.estimate.machine import Machine

_NO_LIMIT = 1e9
"""GB and GB/s where there is no such limit."""


def tables(kernel: Mapping[str, Any], steps: Mapping[str, Mapping[str, Any]], pcie: float | None) -> str:
    """Both tables, the excluded results, and the range of the errors.

    Args:
        kernel: result file of `benchmarks.kernel`.
        steps: name -> result file of `benchmarks.step_time`.
        pcie: GB/s each way; None: unknown, results of a GPU are excluded.
    """
    (cores,) = map(int, re.findall(r"(\d+) cores", kernel["hardware"]))
    gb_per_s = triad_gb_per_s(kernel)
    rows, excluded, errors = [], [], []
    for name, written in steps.items():
        results = results_of(written)
        on_gpu = any(r.spec.device == "cuda" for of_repeat in results for r in of_repeat)
        machine = Machine(
            gpus=1,
            gpu_mem=_NO_LIMIT,
            pcie=(pcie or _NO_LIMIT) if on_gpu else _NO_LIMIT,
            cpu_bw=gb_per_s,
            cpu_cores=cores,
        )
        runs = list(check_steps(results, machine))
        if written["hardware"].rpartition(", ")[2] != kernel["hardware"]:
            excluded.append(f"{name}: the bandwidth was measured on another machine")
        elif on_gpu and pcie is None:
            excluded.append(f"{name}: the bandwidth of PCIe was not given")
        elif not runs:
            excluded.append(f"{name}: no run shows a step without offload")
        else:
            errors += [run.step.error for run in runs if run.step is not None]
            rows += [
                {
                    "measurement": name,
                    "method": run.title,
                    "S, d": ", ".join(map(str, run.schedule)),
                    "without offload": run.without_offload,
                    **_cells(run.step),
                    **_cells(run.worker, "worker "),
                }
                for run in runs
            ]
    kernels = [
        {"kernel": name, **_cells(checked, unit=" ns", style="{:.2f}")}
        for name, checked in check_kernel(kernel, cores).items()
    ]
    parts = [
        f"Time of a parameter and step, {kernel['hardware']}, {gb_per_s:.1f} GB/s:",
        markdown(kernels),
        "Time of a step in ms:",
        markdown(rows),
    ]
    if errors:
        parts.append(f"Error of the predicted steps: {min(errors):+.0%} to {max(errors):+.0%}.")
    if excluded:
        parts.append("Excluded: " + "; ".join(excluded) + ".")
    return "\n\n".join([*parts, "`python -m benchmarks.estimate`"])


def timeline_table(predictions: Iterable[Prediction]) -> str:
    """The estimate beside steps that `benchmarks.recorded_device` has predicted."""
    rows, errors = [], []
    for checked in check_timelines(predictions):
        setting = checked.timeline.setting
        rows.append(
            {
                "GPU": setting.device,
                "parameters": f"{setting.params / 1e9:g}B",
                "tokens": str(setting.tokens),
                "S, d": f"{setting.update_interval}, {setting.publish_lag}",
                "model alone": f"{1e3 * checked.timeline.alone_s:.0f}",
                "estimate": f"{checked.step.predicted:.0f}",
                "timeline": f"{checked.step.measured:.0f}",
                "difference": f"{checked.step.error:+.0%}",
                "worker, difference": f"{checked.worker.error:+.0%}",
            }
        )
        errors.append(checked.step.error)
    return "\n\n".join(
        [
            "Time of a step in ms:",
            markdown(rows),
            f"Differences of the estimate: {min(errors):+.0%} to {max(errors):+.0%}.",
            "`python -m benchmarks.estimate`, with the predictions of `python -m benchmarks.recorded_device`",
        ]
    )


def _cells(checked: Checked | None, prefix: str = "", unit: str = "", style: str = "{:.0f}") -> dict[str, str]:
    return {
        f"{prefix}predicted{unit}": style.format(checked.predicted) if checked else "",
        f"{prefix}measured{unit}": style.format(checked.measured) if checked else "",
        f"{prefix}error": f"{checked.error:+.0%}" if checked else "",
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = CommandLine("benchmarks.estimate", __doc__)
    parser.add_argument("--pcie", type=float, help="pinned copies, GB/s each way; for results of a GPU")
    parser.add_results(report_only=False)
    options = parser.parse(arguments)
    kernel = from_json((options.results / "kernel.json").read_text())
    files = sorted(options.results.glob("step_time_*.json"))
    steps = {path.stem.removeprefix("step_time_"): from_json(path.read_text()) for path in files}
    publish("estimate_check", tables(kernel, steps, options.pcie), "estimate.md", options.results)
    published = f"{markdown(published_rows())}\n\n`python -m benchmarks.estimate`"
    publish("estimate_published", published, "estimate.md", options.results)
    timelines = options.results / "predicted_steps.json"
    if timelines.exists():
        predictions = from_json(timelines.read_text())["predictions"]
        publish("estimate_timelines", timeline_table(map(prediction_of, predictions)), "estimate.md", options.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
