"""The command `lightning-zenflow`: `doctor` and `estimate`.

What a command needs is imported when it runs: DeepSpeed takes seconds, and `--help` and `--version` do not need it.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version

_DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}

_ZENFLOW_KEYS = ("topk_ratio", "update_interval", "max_update_interval", "publish_lag", "moments_dtype")
"""Options of `estimate` that are keys of `ZenFlowStrategy`."""


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
    from lightning_zenflow.doctor.report import examine

    try:
        return examine() + "\n"
    except ValueError as error:
        parser.error(str(error))


def _estimate(parser: argparse.ArgumentParser, options: argparse.Namespace) -> str:
    from lightning_zenflow.config import ZenFlowConfig
    from lightning_zenflow.estimate.cost import estimate
    from lightning_zenflow.estimate.report import as_text
    from lightning_zenflow.estimate.setup import Setup
    from lightning_zenflow.estimate.shapes import shapes_of_count

    given = {key: value for key, value in vars(options).items() if value is not None and key != "run"}
    keys = {key: given.pop(key) for key in _ZENFLOW_KEYS if key in given}
    try:
        model, dtype_bytes = shapes_of_count(given.pop("params")), _DTYPE_BYTES[given.pop("dtype")]
        setup = Setup(model=model, dtype_bytes=dtype_bytes, **given)
        return as_text(estimate(setup, ZenFlowConfig(**keys))) + "\n"
    except ValueError as error:
        parser.error(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-zenflow",
        description="Tools of lightning-zenflow, a PyTorch Lightning strategy that offloads AdamW to the CPU.",
        allow_abbrev=False,
    )
    try:
        number = version("lightning-zenflow")
    except PackageNotFoundError:
        number = "(not installed)"
    parser.add_argument("--version", action="version", version=f"%(prog)s {number}")
    commands = parser.add_subparsers(required=True, metavar="command")

    summary = "show what this machine has, measure it, and say what to expect; for issues too"
    doctor = commands.add_parser("doctor", help=summary, description=f"{summary}.", allow_abbrev=False)
    doctor.set_defaults(run=partial(_doctor, doctor))

    summary = "memory, traffic and CPU time of a step on a machine that is not at hand"
    command = commands.add_parser("estimate", help=summary, description=f"{summary}.", allow_abbrev=False)
    command.set_defaults(run=partial(_estimate, command))
    _add_setup(command)
    return parser


def _add_setup(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--params", type=float, required=True, help="number of trained parameters, such as 7e9")
    add("--gpus", type=int, required=True, help="number of GPUs, over all hosts")
    add("--gpu-mem", type=float, required=True, help="memory of one GPU, GB")
    add("--pcie", type=float, required=True, help="pinned copies of one GPU, GB/s in each direction")
    add("--cpu-bw", type=float, required=True, help="memory bandwidth of one host, GB/s")
    add("--cpu-cores", type=int, help="physical cores of one host; default: so many that memory limits the worker")
    add("--gpus-per-host", type=int, help="default 8")
    add("--host-mem", type=float, help="memory of one host, GB; default: not checked")
    add("--step-ms", type=float, required=True, help="duration of an optimizer step without offload, ms")
    add("--dtype", choices=tuple(_DTYPE_BYTES), default="bf16", help="dtype of the model, default %(default)s")
    add("--accumulate-grad-batches", type=int, help="micro-batches in an optimizer step, default 1")

    add = command.add_argument_group("ZenFlow", "keys of ZenFlowStrategy").add_argument
    add("--topk-ratio", type=float)
    add("--update-interval", type=_integer_or_auto)
    add("--max-update-interval", type=int)
    add("--publish-lag", type=_integer_or_auto)
    add("--moments-dtype")


def _integer_or_auto(text: str) -> int | str:
    try:
        return text if text == "auto" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be an integer or 'auto', got {text!r}") from None
