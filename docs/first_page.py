"""Writes the tables of README.md that formulas and records give: `python -m docs.first_page`."""

import contextlib
import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.common.results import RESULTS, markdown
from benchmarks.step_time.report import runs_by_method
from benchmarks.step_time.run import results_of
from lightning_zenflow.cli import main

README = Path(__file__).parents[1] / "README.md"

FUSED_S = 0.219
"""A step of the H200 without offload, with AdamW fused, which did not run: by its bytes, docs/performance.md."""

_SIZES = (1, 3, 7, 13)
"""In 1e9 parameters."""

_OTHERS = {
    "no offload: `torch.optim.AdamW`": (20, 0),
    "DeepSpeed's ZeRO-Offload": (2.11, 18),
}
"""Bytes a parameter of the GPU, with buckets, and of the host: docs/peers.md."""

_OURS = {
    '`"zenflow_adamw"`, `OffloadAdamW`: *exact*': ("S = 1, d = 0", ()),
    'the same with `moments_dtype="int8"`': ("S = 1, d = 0", ("moments_dtype=int8",)),
    "the same with `offload_ratio=0.5`: the GPU has half of the states": ("S = 1, d = 0", ("offload_ratio=0.5",)),
    '`"zenflow"`, *late* as on the H200 (S = 4, d = 1)': ("S = 4, d = 1", ()),
    "`ZenFlowStrategy(stage=3, offload_parameters=True)`": ("S = 1, d = 0", ("--stage=3", "--offload-parameters")),
}
"""What to write -> schedule and arguments of `lightning-zenflow estimate`."""


def _estimate(billions: int, schedule: str, arguments: Sequence[str]) -> tuple[float, float]:
    """GB of the GPU and of the host, from the row of a schedule."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        main(["estimate", f"--params={billions}B", "--gpus=1", "--cpu-bw=100", *arguments])
    rows = [re.split(r"\s{2,}", line.strip()) for line in printed.getvalue().splitlines()]
    (row,) = (dict(zip(rows[0], cells, strict=True)) for cells in rows if cells[0] == schedule)
    return float(row["GPU GB"]), float(row["host GB"])


def memory() -> str:
    """GB on the GPU and in host memory by what is written, for models of several sizes."""
    found = {name: [_estimate(n, *asked) for n in _SIZES] for name, asked in _OURS.items()}
    found |= {name: [(n * gpu, n * host) for n in _SIZES] for name, (gpu, host) in _OTHERS.items()}
    return markdown(
        {
            "GB, GPU + host": name,
            **{f"{n}B": f"{gpu:.0f} + {host:.0f}" for n, (gpu, host) in zip(_SIZES, of_size, strict=True)},
        }
        for name, of_size in found.items()
    )


def on_gpu() -> dict[str, dict[str, Any]]:
    """The runs of the H200, by method."""
    done = json.loads((RESULTS / "gpu_h200" / "bench.json").read_text())["done"]
    case = "1.5B_8x1024/"
    return {name.removeprefix(case): of_one["result"] for name, of_one in done.items() if name.startswith(case)}


EXACT = {
    "no offload": ("none", "floor"),
    "this, S = 1, d = 0, predicted clip factors": ("zenflow_exact_cores", "zenflow_exact"),
    "ZeRO-Offload": ("zero_offload", "zero_offload"),
}
LATE = {
    "this, S = 4, d = 1": ("zenflow", "zenflow"),
    'this, `"zenflow"` (`auto`)': ("zenflow_auto", "zenflow_auto"),
    "DeepSpeed ZenFlow, S = 4": ("deepspeed_zenflow", "deepspeed_zenflow"),
}
"""Name in README -> method in the record of the H200, and in that of the simulated accelerator."""


def times(heading: str, methods: dict[str, tuple[str, str]]) -> str:
    """Mean times of a step, of the H200 and of the simulated accelerator, beside steps without offload."""
    gpu = on_gpu()
    record = json.loads((RESULTS / "step_time_simulated_151M_asynchronous_1x16.json").read_text())
    simulated = {
        name: median(mean(run.step_s) for run in runs) for name, runs in runs_by_method(results_of(record)).items()
    }
    none_s, floor_s = mean(gpu["none"]["step_s"]), simulated["floor"]
    rows = []
    for name, (of_gpu, of_simulated) in methods.items():
        run = gpu[of_gpu]
        step_s = mean(run["step_s"])
        row = {heading: name, "ms a step, H200": f"{1e3 * step_s:.0f}"}
        row["speed beside no offload (fused)"] = f"{none_s / step_s:.0%} ({FUSED_S / step_s:.0%})"
        row["GB, GPU + host"] = f"{run['device_bytes'] / 1e9:.0f} + {run['host_bytes'] / 1e9:.0f}"
        row["ms, simulated"] = f"{1e3 * simulated[of_simulated]:.0f}"
        row["speed"] = f"{floor_s / simulated[of_simulated]:.0%}"
        rows.append(row)
    return markdown(rows)


def with_tables(text: str) -> str:
    """The README with all of them as they are now."""
    for name, table in {
        "memory": memory(),
        "times": times("*exact*", EXACT) + "\n\n" + times("*late*", LATE),
    }.items():
        before, begin, rest = text.partition(f"<!-- {name} -->\n")
        text = f"{before}{begin}{table}\n<!-- end -->{rest.partition('<!-- end -->')[2]}"
    return text


if __name__ == "__main__":
    README.write_text(with_tables(README.read_text()))
