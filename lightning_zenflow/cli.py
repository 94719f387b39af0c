"""The command `lightning-zenflow`: `doctor` and `estimate`."""

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, cast

from omegaconf import OmegaConf

from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.core.errors import MisconfigurationException
from lightning_zenflow.estimate import Setup, as_text, costs

_DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}

_UNITS = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and writes its result to standard output.

    Args:
        arguments: command-line arguments; None: those of the process.

    Returns:
        Exit status: 1 if `doctor` finds that the worker does not run, else 0. Invalid arguments exit with status 2 and a message on
        standard error.
    """
    parser = _parser()
    options = vars(parser.parse_args(arguments))
    try:
        if options.pop("command") == "doctor":
            # Here, because it imports torch, which takes seconds.
            from lightning_zenflow.doctor import examine

            text, succeeded = examine()
        else:
            text, succeeded = _estimate(options), True
    except (ValueError, MisconfigurationException) as error:
        parser.error(str(error))
    sys.stdout.write(text + "\n")
    return 0 if succeeded else 1


def _estimate(options: dict[str, Any]) -> str:
    keys = cast(dict[str, Any], OmegaConf.to_container(OmegaConf.from_dotlist(options.pop("keys"))))
    given = {name: value for name, value in options.items() if value is not None}
    setup = Setup(dtype_bytes=_DTYPE_BYTES[given.pop("dtype")], **given)
    return as_text(setup, costs(setup, ZenFlowConfig(**keys)))


def _count(text: str) -> float:
    """A number of parameters: 7e9, or 7B, 1.5b, 350M."""
    unit = _UNITS.get(text[-1:].upper(), 1.0)
    return unit * float(text if unit == 1.0 else text[:-1])


# What argparse calls a wrong value.
_count.__name__ = "number of parameters"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-zenflow",
        description="Tools of lightning-zenflow, a PyTorch Lightning strategy that offloads AdamW to the CPU.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {version('lightning-zenflow')}")
    commands = parser.add_subparsers(required=True, dest="command", metavar="command")
    summary = "show what this machine has and how fast the worker is on it; for issues too"
    commands.add_parser("doctor", help=summary, description=f"{summary}.", allow_abbrev=False)
    summary = "memory, copies and CPU time of a step, by formula"
    add = commands.add_parser("estimate", help=summary, description=f"{summary}.", allow_abbrev=False).add_argument
    add("--params", type=_count, required=True, help="number of trained parameters, such as 7B, 350M or 7e9")
    add("--gpus", type=int, required=True, help="number of GPUs, over all hosts")
    add("--cpu-bw", type=float, required=True, help="memory bandwidth of one host, GB/s")
    add("--frozen", type=_count, help="number of parameters that are not trained, default 0")
    add("--gpus-per-host", type=int, help="default 8")
    add("--stage", type=int, choices=(1, 2, 3), help="of ZeRO, default 2")
    add("--offload-parameters", action="store_true", help="weights are in host memory, under stage 3")
    add("--dtype", choices=tuple(_DTYPE_BYTES), default="bf16", help="dtype of the model, default %(default)s")
    add("--accumulate-grad-batches", type=int, help="micro-batches in an optimizer step, default 1")
    add("keys", nargs="*", metavar="key=value", help="keys of ZenFlowStrategy, such as update_interval=4")
    return parser
