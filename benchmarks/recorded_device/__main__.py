"""What would a step take on a GPU? Predicted from the operations of a recorded training and from the rates of machines.

    python -m benchmarks.recorded_device                    # three machines, two sizes, three schedules: a few minutes
    python -m benchmarks.recorded_device --device h200 --params 1.45e9 --tokens 8192 --update-interval 4 --publish-lag 1 --out FOLDER

Nothing is measured on a GPU. A narrow GPT with all tensors of the one with 1.5 B parameters is trained on CPU tensors through the code path
of a GPU, and the order of its operations is kept. `rates` has the machines and how bytes are scaled, `timeline` the rules. Prints the
table; writes RESULTS/predicted_steps.* and docs/performance.md. With `--out` it writes the timeline of each setting (JSON for
ui.perfetto.dev, and a picture) to a folder instead.
"""

import argparse
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.command_line import CommandLine, list_of, one_of
from benchmarks.common.results import markdown, report
from benchmarks.recorded_device.prediction import Prediction, Setting, predict, prediction_of, recording_of, timeline_of
from benchmarks.recorded_device.rates import DEVICES
from benchmarks.recorded_device.timeline import CAUSES, traces
from lightning_zenflow.monitor.plot import draw_to
from lightning_zenflow.monitor.timeline import chrome_trace, write_trace

SCHEDULES = ((4, 1), (1, 1), (1, 0))


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = CommandLine("benchmarks.recorded_device", __doc__)
    add = parser.add_argument
    add(
        "--device",
        dest="devices",
        type=list_of(one_of(DEVICES, "device")),
        default=list(DEVICES),
        metavar="NAMES",
    )
    add("--params", type=list_of(float), default=[1.45e9, 7e9], metavar="NUMBERS")
    add("--tokens", type=list_of(int), default=[8 * 1024, 1024], metavar="NUMBERS", help="in a step")
    add("--update-interval", type=int, metavar="S", help="with --publish-lag; by default S, d = 4, 1; 1, 1; 1, 0")
    add("--publish-lag", type=int, default=1, metavar="d")
    add("--out", type=Path, metavar="FOLDER", help="for timelines")
    parser.add_results()
    return parser.parse(arguments)


def settings(options: argparse.Namespace) -> list[Setting]:
    """All that is asked for."""
    one = options.update_interval
    schedules = SCHEDULES if one is None else ((one, options.publish_lag),)
    return [
        Setting(device=device, params=params, tokens=tokens, update_interval=s, publish_lag=d)
        for s, d in schedules
        for params in options.params
        for tokens in options.tokens
        for device in options.devices
    ]


def row(p: Prediction) -> dict[str, str]:
    """A row of the table."""
    s = p.setting
    return {
        "GPU": s.device,
        "parameters": f"{s.params / 1e9:g}B",
        "tokens": str(s.tokens),
        "S, d": f"{s.update_interval}, {s.publish_lag}",
        "step ms": f"{1e3 * p.step_s:.0f}",
        "model alone ms": f"{1e3 * p.alone_s:.0f}",
        "other kernels ms": f"{1e3 * p.other_s:.0f}",
        "worker ms": f"{1e3 * p.worker_s:.0f}",
        "idle": f"{sum(p.idle_s.values()) / p.step_s:.0%}",
        **{f"for {cause}": f"{p.idle_s[cause] / p.step_s:.0%}" for cause in CAUSES},
    }


def describe(written: Mapping[str, Any]) -> str:
    """The table of a result file."""
    rows = [row(prediction_of(p)) for p in written["predictions"]]
    machines = "; ".join(
        f"{name}: {r.matmul / 1e12:.0f} TFLOP/s in matrix products, memory {r.memory / 1e9:.0f} GB/s,"
        f" PCIe {r.pcie / 1e9:.0f} GB/s each way, worker {r.worker / 1e9:.0f} GB/s"
        for name, r in DEVICES.items()
    )
    return "\n\n".join([markdown(rows), f"{machines}.", f"`{written['command']}`", f"Commit {written['commit']}."])


def draw(setting: Setting, folder: Path) -> None:
    """Writes the timeline of the measured steps."""
    s = setting
    name = f"{s.device}_{s.params / 1e9:g}B_{s.tokens}_S{s.update_interval}_d{s.publish_lag}"
    trace = chrome_trace(traces(timeline_of(setting), recording_of(setting).steps))
    write_trace(trace, folder / f"{name}.json")
    draw_to(trace, folder / f"{name}.png")
    print(folder / f"{name}.png")


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point."""
    options = parse_arguments(arguments)
    if options.out is not None:
        print(markdown(row(predict(s)) for s in settings(options)))
        for setting in settings(options):
            draw(setting, options.out)
        return 0

    def measure(_: argparse.Namespace) -> dict[str, Any]:
        return {"predictions": [dataclasses.asdict(predict(setting)) for setting in settings(options)]}

    report(options, "predicted_steps", "performance.md", measure, describe)
    return 0


if __name__ == "__main__":
    sys.exit(main())
