"""How far `lightning-zenflow estimate` is from what was measured: `python -m benchmarks.estimate_check`.

    python -m benchmarks.estimate_check --results FOLDER --pcie 25    # of another machine, one with a GPU for instance

Nothing is run. The model gets the memory bandwidth that `benchmarks.kernel` has measured, the step of `floor` or else of `none` as the step
without offload, and S and d as they were at the end of a run. Where training is on the CPU, the simulated accelerator included, nothing
crosses PCIe, and copies cost nothing in the prediction either. Prints the tables; writes RESULTS/estimate_check.md and docs/estimate.md.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from tabulate import tabulate

from benchmarks import records
from benchmarks.documents import RESULTS, update_document
from benchmarks.kernel import triad_gb_per_s
from benchmarks.step_methods import METHODS
from benchmarks.step_report import baseline_of, runs_by_method
from benchmarks.step_run import StepResult, results_of
from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.estimate.byte_counts import cpu_adamw_bytes, replay_bytes
from lightning_zenflow.estimate.cost import estimate
from lightning_zenflow.estimate.machine import Machine, Workload
from lightning_zenflow.estimate.shapes import shapes_of_count
from lightning_zenflow.estimate.zenflow_cost import replay_core_s

_DTYPE_BYTES = 2
_NO_LIMIT = 1e9
"""GB and GB/s where there is no such limit."""


@dataclass(frozen=True, kw_only=True)
class Checked:
    """One number beside its prediction."""

    of: str
    """What was measured."""
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Relative to what was measured; negative: the prediction is too low."""
        return self.predicted / self.measured - 1


def check_kernel(kernel: Mapping[str, Any], cores: int) -> list[Checked]:
    """The kernels' times in ns a parameter and step, on all cores.

    Args:
        kernel: what `benchmarks.kernel` has written.
        cores: of that machine.
    """
    gb_per_s = triad_gb_per_s(kernel)
    checked = []
    for name, values in kernel["ns"].items():
        window = re.fullmatch(r"replay, S=(\d+)", name)
        if window is not None:
            s = int(window[1])
            predicted = max(replay_bytes(s, _DTYPE_BYTES) / gb_per_s, 1e9 * replay_core_s(s) / cores) / s
        elif name == "DeepSpeedCPUAdam":
            predicted = cpu_adamw_bytes(_DTYPE_BYTES) / gb_per_s
        else:
            continue
        checked.append(Checked(of=name, predicted=predicted, measured=median(values)))
    return checked


@dataclass(frozen=True, kw_only=True)
class CheckedRun:
    """A method's runs."""

    title: str
    baseline: str
    """What stood in for the step without offload."""
    baseline_ms: float
    schedule: list[int]
    """S and d; empty for ZeRO-Offload."""
    step: Checked | None
    """ms; None for ours in training on the CPU, where the worker takes cores from it, which the model knows nothing of."""
    worker: Checked | None
    """ms a step; only ours are measured."""


def check_steps(results: Sequence[Sequence[StepResult]], machine: Machine) -> list[CheckedRun]:
    """ZeRO-Offload's and our steps; nothing where no run shows what a step takes without offload.

    Args:
        results: of each repeat the runs, all of one device and size.
        machine: its rates.
    """
    runs = runs_by_method(results)
    baseline = baseline_of(runs)
    if baseline is None:
        return []
    baseline_ms = _step_ms(runs[baseline])
    checked = []
    for method, of_method in runs.items():
        schedule = of_method[-1].schedule
        if not schedule and method != "zero_offload":
            continue
        keys = {"update_interval": schedule[0], "publish_lag": schedule[1]} if schedule else {}
        keys = {**METHODS[method].zenflow_keys, **keys}
        clips = METHODS[method].clips
        workload = Workload(model=shapes_of_count(of_method[0].n_params), step_ms=baseline_ms, clips=clips)
        prediction = estimate(workload, machine, ZenFlowConfig(**keys))
        cost = prediction.zenflow if schedule else prediction.zero_offload
        title = METHODS[method].title
        step = Checked(of=title, predicted=1e3 * cost.step_s, measured=_step_ms(of_method))
        checked.append(
            CheckedRun(
                title=title,
                baseline=baseline,
                baseline_ms=baseline_ms,
                schedule=schedule,
                step=None if schedule and of_method[0].spec.device == "cpu" else step,
                worker=Checked(of=title, predicted=1e3 * cost.cpu_s, measured=_worker_ms(of_method))
                if schedule
                else None,
            )
        )
    return checked


def _step_ms(runs: Iterable[StepResult]) -> float:
    return 1e3 * median(mean(r.step_s) for r in runs)


def _worker_ms(runs: Iterable[StepResult]) -> float:
    return 1e3 * median(mean(r.worker_s) for r in runs)


def tables(kernel: Mapping[str, Any], steps: Mapping[str, Mapping[str, Any]], pcie: float | None) -> str:
    """Both tables, what was left out, and the range of the errors.

    Args:
        kernel: what `benchmarks.kernel` has written.
        steps: for each name what `benchmarks.step_time` has written.
        pcie: GB/s each way; None: not known, results of a GPU are left out.
    """
    cores = _cores(kernel["hardware"])
    gb_per_s = triad_gb_per_s(kernel)
    rows, left_out, errors = [], [], []
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
        runs = check_steps(results, machine)
        if written["hardware"].rpartition(", ")[2] != kernel["hardware"]:
            left_out.append(f"{name}: it is of another machine than the bandwidth")
        elif on_gpu and pcie is None:
            left_out.append(f"{name}: PCIe's speed was not given")
        elif not runs:
            left_out.append(f"{name}: no run shows what a step takes without offload")
        else:
            rows += [_row(name, run) for run in runs]
            errors += [run.step.error for run in runs if run.step is not None]
    kernels = [
        {"kernel": c.of, "predicted ns": f"{c.predicted:.2f}", "measured ns": f"{c.measured:.2f}", "error": _percent(c)}
        for c in check_kernel(kernel, cores)
    ]
    parts = [
        f"Time of a parameter and step, {kernel['hardware']}, {gb_per_s:.1f} GB/s:",
        tabulate(kernels, headers="keys", tablefmt="github", disable_numparse=True),
        "Time of a step in ms:",
        tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True),
    ]
    if errors:
        parts.append(f"Error of the predicted steps: {min(errors):+.0%} to {max(errors):+.0%}.")
    if left_out:
        parts.append("Left out: " + "; ".join(left_out) + ".")
    return "\n\n".join([*parts, "`python -m benchmarks.estimate_check`"])


def _row(name: str, run: CheckedRun) -> dict[str, str]:
    return {
        "measurement": name,
        "method": run.title,
        "S, d": ", ".join(map(str, run.schedule)),
        "without offload": f"{run.baseline_ms:.0f} ({run.baseline})",
        **_cells("", run.step),
        **_cells("worker ", run.worker),
    }


def _cells(what: str, checked: Checked | None) -> dict[str, str]:
    return {
        f"{what}predicted": f"{checked.predicted:.0f}" if checked else "",
        f"{what}measured": f"{checked.measured:.0f}" if checked else "",
        f"{what}error": _percent(checked) if checked else "",
    }


def _percent(checked: Checked) -> str:
    return f"{checked.error:+.0%}"


def _cores(hardware: str) -> int:
    """Cores of a machine as `records.hardware` describes it."""
    found = re.search(r"(\d+) cores", hardware)
    assert found is not None, hardware
    return int(found[1])


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--results", type=Path, default=RESULTS, metavar="FOLDER", help="with kernel.json and step_time_*.json"
    )
    parser.add_argument("--pcie", type=float, help="pinned copies, GB/s each way; for results of a GPU")
    options = parser.parse_args(arguments)
    kernel = json.loads((options.results / "kernel.json").read_text())
    files = sorted(options.results.glob("step_time_*.json"))
    steps = {path.stem.removeprefix("step_time_"): json.loads(path.read_text()) for path in files}
    text = tables(kernel, steps, options.pcie)
    (options.results / "estimate_check.md").write_text(text + "\n")
    update_document(records.ROOT / "docs" / "estimate.md", {"estimate_check": text}, options.results)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
