"""Trains projects of others as their tutorials do, under `ZenFlowStrategy` beside `strategy="auto"`, and compares losses and predictions.

    python -m benchmarks.projects

makes an environment with the projects of `requirements.txt` and this package, some GB, and trains there (`flows.py`) on small data that is
made up: no project is changed but for the argument `strategy`, by a name or as an object. The control is `auto` with initial weights
changed by 1e-7: what rounding alone does to a training.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.command_line import CommandLine, list_of, one_of
from benchmarks.common.processes import run_command
from benchmarks.common.provenance import ROOT, with_origin
from benchmarks.common.results import markdown, report

HERE = Path(__file__).parent
PROJECTS = (
    *("chemprop", "gluonts", "lightly", "neuralforecast", "pytorch-forecasting TFT", "pytorch-forecasting NBeats"),
    "scvi-tools",
)
METHODS = ("auto", "control", "zenflow_adamw", "zenflow_adamw object", "zenflow")
PARTS = ("fit", "best", "predict", "fit again")
"""Of a flow: "best" opens the best checkpoint with the project's own code, "fit again" trains the same module once more."""
TIMEOUT = 900
"""Seconds of one run."""


def make_environment(folder: Path) -> Path:
    """Installs the projects and this package in a virtual environment, and returns its interpreter."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    # The tested versions of what this package needs, but for torch.
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(line for line in lines if not line.startswith("torch==")))
    install = [python, "-m", "pip", "install", "--quiet", "--constraint", constraints]
    # pip installs a folder each time, also a version that is there.
    subprocess.run([*install, "--requirement", HERE / "requirements.txt", ROOT], check=True)
    return python


def train(python: Path, project: str, method: str) -> dict[str, Any]:
    """One run of `flows.py`."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [str(python), str(HERE / "flows.py"), project, method, name]
        status = run_command(command, timeout=TIMEOUT, output=folder / "output.txt", OMP_NUM_THREADS="1")
        if (found := folder / "found.json").exists():
            return {"project": project, "method": method, **json.loads(found.read_text())}
        tail = (folder / "output.txt").read_text(errors="replace").strip()[-2000:]
    raise RuntimeError(f"{project}, {method}: no result (exit status {status}): {tail}")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Trains all of it."""
    python = make_environment(options.environment)
    runs = []
    for project in options.projects:
        for method in METHODS:
            runs.append(train(python, project, method))
            print(project, method, runs[-1]["parts"], runs[-1]["error"], file=sys.stderr, flush=True)
    installed = (HERE / "requirements.txt").read_text().splitlines()
    return {"installed": [line for line in installed if not line.startswith("#")], "runs": runs}


def difference(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """The largest difference, in units of the mean magnitude of `theirs`; "nan" if one is, "" if a run did not come so far."""
    if not ours or not theirs:
        return ""
    if len(ours) != len(theirs):
        return f"{len(ours)} values beside {len(theirs)}"
    differences = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    # `max` passes over NaN.
    largest = math.nan if any(map(math.isnan, differences)) else max(differences)
    return f"{largest * len(theirs) / sum(map(abs, theirs)):.0e}"


def numbers_of(run: Mapping[str, Any]) -> list[list[float]]:
    """What is compared: losses of both fits, predictions; empty where a run did not come so far."""
    first, again, *_ = [*run["losses"], [], []]
    return [first, again, run["predictions"]]


def describe(written: Mapping[str, Any]) -> str:
    """The table of a result file: a row for each project, and for each method its differences to `auto`."""
    run_of = {(run["project"], run["method"]): run for run in written["runs"]}
    rows = []
    for project in dict.fromkeys(project for project, _ in run_of):
        of_methods = {}
        for method in METHODS:
            run, auto = run_of[project, method], run_of[project, "auto"]
            pairs = zip(numbers_of(run), numbers_of(auto), strict=True)
            cells = [] if method == "auto" else [difference(*pair) for pair in pairs]
            if list(run["parts"]) != list(PARTS):
                cells.append(f"parts done: {', '.join(run['parts'])}; {run['error']}")
            of_methods[method] = ", ".join(cells)
        rows.append({"project": project, **{name: text for name, text in of_methods.items() if name != "auto" or text}})
    return with_origin(markdown(rows), written, "in the environment of the projects " + ", ".join(written["installed"]))


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = CommandLine("benchmarks.projects", __doc__)
    parser.add_argument("--projects", type=list_of(one_of(PROJECTS, "project")), default=list(PROJECTS))
    parser.add_argument(
        "--environment",
        type=Path,
        default=ROOT / "build" / "projects",
        help="folder of the environment, made if it is missing",
    )
    parser.add_results()
    return parser.parse(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point."""
    report(parse_arguments(arguments), "projects", measure, describe)
    return 0


if __name__ == "__main__":
    sys.exit(main())
