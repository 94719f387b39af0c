"""The command `lightning-zenflow`: `doctor`, `estimate` and `timeline`.

What a command needs is imported when it runs: torch and Lightning take seconds, and `--help` and `--version` need neither.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from lightning_zenflow.config import ConfigValueError, ZenFlowConfig
from lightning_zenflow.estimate.byte_counts import MOMENT_BYTES

_DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and writes its result to standard output.

    Args:
        arguments: command-line arguments; None: those of the process.

    Returns:
        Exit status 0. Invalid arguments exit with status 2 and a message on standard error.
    """
    options = _parser().parse_args(arguments)
    sys.stdout.write(options.run(options))
    return 0


def _doctor(parser: argparse.ArgumentParser, options: argparse.Namespace) -> str:
    from lightning_zenflow.doctor.report import as_dict, as_text, examine

    try:
        examination = examine()
    except ValueError as error:
        parser.error(str(error))
    return (json.dumps(as_dict(examination), indent=2) if options.json else as_text(examination)) + "\n"


def _estimate(parser: argparse.ArgumentParser, options: argparse.Namespace) -> str:
    from lightning_zenflow.estimate.cost import estimate
    from lightning_zenflow.estimate.machine import Machine, Workload
    from lightning_zenflow.estimate.report import as_dict, as_text
    from lightning_zenflow.estimate.shapes import shapes_of_count, shapes_of_hugging_face_config

    by_config = options.hf_config is not None
    try:
        machine = Machine(
            gpus=options.gpus,
            gpu_mem=options.gpu_mem,
            pcie=options.pcie,
            cpu_bw=options.cpu_bw,
            cpu_cores=options.cpu_cores,
            gpus_per_host=options.gpus_per_host,
            host_mem=options.host_mem,
        )
        config = ZenFlowConfig(
            topk_ratio=options.topk_ratio,
            update_interval=options.update_interval,
            max_update_interval=options.max_update_interval,
            publish_lag=options.publish_lag,
            moments_dtype=options.moments_dtype,
        )
        workload = Workload(
            model=shapes_of_hugging_face_config(options.hf_config) if by_config else shapes_of_count(options.params),
            step_ms=options.step_ms,
            dtype_bytes=_DTYPE_BYTES[options.dtype],
            accumulate_grad_batches=options.accumulate_grad_batches,
            reduce_bucket_size=options.reduce_bucket_size,
        )
        comparison = estimate(workload, machine, config)
    except ConfigValueError as error:
        option = f"argument --{error.key.replace('_', '-')}: " if error.key else ""
        parser.error(f"{option}{error}")
    if options.json:
        return json.dumps(as_dict(comparison), indent=2) + "\n"
    return as_text(comparison, unicode=_shows_bars()) + "\n"


def _shows_bars() -> bool:
    """Whether standard output has the characters of the bars."""
    try:
        "█▏┃".encode(sys.stdout.encoding or "ascii")
    except (LookupError, UnicodeEncodeError):
        return False
    return True


def _timeline(parser: argparse.ArgumentParser, options: argparse.Namespace) -> str:
    from lightning_zenflow.monitor.plot import draw_to
    from lightning_zenflow.monitor.timeline import read_trace

    try:
        draw_to(read_trace(options.file), options.png)
    except (ModuleNotFoundError, OSError, ValueError) as error:
        parser.error(str(error))
    return ""


def _version() -> str:
    try:
        return version("lightning-zenflow")
    except PackageNotFoundError:
        return "(not installed)"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-zenflow",
        description="Tools of lightning-zenflow, a PyTorch Lightning strategy that offloads AdamW to the CPU.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {_version()}")
    commands = parser.add_subparsers(required=True, metavar="command")
    _add_doctor(commands)
    _add_estimate(commands)
    _add_timeline(commands)
    return parser


def _add_doctor(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    summary = "show what this machine has, measure it, and say what to expect; for issues too"
    command = commands.add_parser("doctor", help=summary, description=f"{summary}.", allow_abbrev=False)
    command.add_argument("--json", action="store_true", help="print JSON instead of a table")
    command.set_defaults(run=partial(_doctor, command))


def _add_estimate(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    summary = "predict memory, traffic and duration of a step on a machine that is not at hand"
    command = commands.add_parser("estimate", help=summary, description=f"{summary}.", allow_abbrev=False)

    model = command.add_argument_group("model").add_mutually_exclusive_group(required=True)
    model.add_argument("--params", type=float, help="number of trained parameters, such as 7e9")
    model.add_argument(
        "--hf-config",
        metavar="PATH_OR_NAME",
        help="Hugging Face config of a causal language model: a folder, a config.json, or a name on the Hub",
    )

    machine = command.add_argument_group("machine")
    machine.add_argument("--gpus", type=int, required=True, help="number of GPUs, over all hosts")
    machine.add_argument("--gpu-mem", type=float, required=True, help="memory of one GPU, GB")
    machine.add_argument("--pcie", type=float, required=True, help="pinned copies of one GPU, GB/s in each direction")
    machine.add_argument("--cpu-bw", type=float, required=True, help="memory bandwidth of one host, GB/s")
    machine.add_argument(
        "--cpu-cores",
        type=int,
        help="physical cores of one host; default: one for each 10 GB/s of --cpu-bw or more, so that memory limits the worker",
    )
    machine.add_argument("--gpus-per-host", type=int, default=8, help="default %(default)s")
    machine.add_argument("--host-mem", type=float, help="memory of one host, GB; default: not checked")

    training = command.add_argument_group("training")
    training.add_argument(
        "--step-ms",
        type=float,
        required=True,
        help="duration of an optimizer step without offload, ms: all micro-batches, communication, AdamW",
    )
    training.add_argument(
        "--dtype", choices=tuple(_DTYPE_BYTES), default="bf16", help="dtype of the model, default %(default)s"
    )
    training.add_argument("--accumulate-grad-batches", type=int, default=1, help="default %(default)s")
    training.add_argument(
        "--reduce-bucket-size", type=_whole_number, help="elements; default: that of each strategy for the model"
    )

    zenflow = command.add_argument_group("ZenFlow", "keys of ZenFlowStrategy")
    defaults = ZenFlowConfig()
    zenflow.add_argument("--topk-ratio", type=float, default=defaults.topk_ratio, help="default %(default)s")
    zenflow.add_argument("--update-interval", type=_integer_or_auto, default="auto", help="default %(default)s")
    zenflow.add_argument(
        "--max-update-interval", type=int, default=defaults.max_update_interval, help="default %(default)s"
    )
    zenflow.add_argument("--publish-lag", type=_integer_or_auto, default="auto", help="default %(default)s")
    zenflow.add_argument(
        "--moments-dtype", choices=tuple(MOMENT_BYTES), default=defaults.moments_dtype, help="default %(default)s"
    )

    command.add_argument("--json", action="store_true", help="print JSON, in bytes and seconds, instead of a table")
    command.set_defaults(run=partial(_estimate, command))


def _add_timeline(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    summary = "draw a timeline that ZenFlowStrategy(timeline=FILE) wrote"
    timeline = commands.add_parser("timeline", help=summary, description=f"{summary}.", allow_abbrev=False)
    timeline.add_argument("file", type=Path, help="timeline, JSON; ui.perfetto.dev opens it too")
    timeline.add_argument("--png", type=Path, required=True, metavar="OUT", help="drawing to write")
    timeline.set_defaults(run=partial(_timeline, timeline))


def _integer_or_auto(text: str) -> int | str:
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be an integer or 'auto', got {text!r}") from None


def _whole_number(text: str) -> int:
    """Parses an integer, which may be written as 5e8."""
    try:
        number = float(text)
        if number.is_integer():
            return int(number)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"must be an integer >= 1, got {text!r}")
