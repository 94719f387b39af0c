"""What does `StallMonitor` cost? Resolves 0.5 % of a step where steps differ by ten times that.

    python -m benchmarks.monitor                                      # under six minutes on two cores
    python -m benchmarks.monitor --seconds 60 --settings 4.2e6x5x1,4.2e6x5x50

Within one training on the simulated accelerator the monitor is switched on and off in turn, for some steps each. Measured are:

- CPU time of the training thread in the monitor's hooks, loggers included, in recording spans, and in TensorBoard's figures. Other
  processes hardly affect it.
- CPU time of the whole process, TensorBoard's writing thread included: runs of steps with the monitor less their neighbours without.
- Wall time, in the same way.

The cost depends on steps and hardly on weights, so short steps of a small model show it best; long ones of a large model are measured
beside them. Numbers are medians with their 95 % confidence interval (order statistics). TensorBoard and a progress bar are on.
Prints a table; writes RESULTS/monitor_overhead.json and .md.
"""

import argparse
import math
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.loggers import TensorBoardLogger

from benchmarks.common.command_line import CommandLine, list_of
from benchmarks.common.provenance import with_origin
from benchmarks.common.results import markdown, report
from benchmarks.monitor.alternating import AlternatingMonitor, Costs, Setting, seconds_of_a_span
from benchmarks.step_time.run import StepSpec, train
from lightning_zenflow import ZenFlowStrategy

LIMIT_PERCENT = 0.5
_MOST_STEPS = 1_000_000
_DEFAULT_SETTINGS = [
    Setting(params=4.2e6, compute_ms=10.0, log_every=50),
    Setting(params=4.2e6, compute_ms=10.0, log_every=1),
    Setting(params=151e6, compute_ms=540.0, log_every=1),
]


def train_alternating(setting: Setting, seconds: float) -> Costs:
    """Measures one training."""
    costs = Costs(setting=setting, span_s=seconds_of_a_span())
    spec = StepSpec(
        device="simulated",
        method="zenflow",
        params=setting.params,
        compute_s=setting.compute_ms / 1e3,
        warm_up=setting.warm_up,
        steps=_MOST_STEPS,
    )
    with tempfile.TemporaryDirectory() as folder:
        train(
            spec,
            ZenFlowStrategy(update_interval=4, publish_lag=1),
            callbacks=[AlternatingMonitor(costs, seconds=seconds), ProgressBar()],
            logger=TensorBoardLogger(folder),
            log_every_n_steps=setting.log_every,
            enable_progress_bar=True,
        )
    return costs


def median_with_bounds(values: Sequence[float]) -> tuple[float, float, float]:
    """The median, and the order statistics that are its 95 % confidence interval."""
    ordered, n = sorted(values), len(values)
    rank = max(0, math.floor(n / 2 - 0.98 * math.sqrt(n)))
    return statistics.median(ordered), ordered[rank], ordered[n - 1 - rank]


def row(costs: Costs) -> dict[str, str]:
    """A row of the table."""
    own, process, wall = (
        [1e6 * value for value in median_with_bounds(values)]
        for values in (costs.own_s(), *(_differences(times) for times in (costs.process_s, costs.wall_s)))
    )
    step_s = statistics.median(costs.wall_s["off"])
    return {
        "weights": f"{costs.setting.params / 1e6:g} M",
        "step ms": f"{1e3 * step_s:.1f}",
        "log_every_n_steps": str(costs.setting.log_every),
        "training thread, us a step": _with_bounds(own, "{:.0f}"),
        "% of the step": _with_bounds([1e-4 * value / step_s for value in own], "{:.2f}"),
        f"{LIMIT_PERCENT} % of a step of": f"{own[2] / 1e3 / (LIMIT_PERCENT / 100):.0f} ms",
        "process, on - off, us": _with_bounds(process, "{:.0f}"),
        "wall, on - off, us": _with_bounds(wall, "{:.0f}"),
        "pairs": str(len(costs.hooks_s)),
    }


def _differences(times: dict[str, list[float]]) -> list[float]:
    return [on - off for on, off in zip(times["on"], times["off"], strict=True)]


def _with_bounds(values: Sequence[float], style: str) -> str:
    middle, low, high = (style.format(value) for value in values)
    return f"{middle} ({low} to {high})"


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = CommandLine("benchmarks.monitor", __doc__)
    parser.add_argument(
        "--settings",
        type=list_of(Setting.parse),
        default=_DEFAULT_SETTINGS,
        metavar="PARAMSxMSxN,...",
        help="weights, compute time, log_every_n_steps",
    )
    parser.add_argument("--seconds", type=float, default=80.0, help="of each setting")
    parser.add_results()
    return parser.parse(arguments)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The costs in every setting."""
    return {"measured": [train_alternating(setting, options.seconds) for setting in options.settings]}


def describe(written: Mapping[str, Any]) -> str:
    """The table of a result file."""
    measured = [Costs(**{**values, "setting": Setting(**values["setting"])}) for values in written["measured"]]
    return with_origin(markdown(row(costs) for costs in measured), written)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point."""
    report(parse_arguments(arguments), "monitor_overhead", "metrics.md", measure, describe)
    return 0


if __name__ == "__main__":
    sys.exit(main())
