"""Command lines of the benchmarks: shared options and parsers of lists."""

import argparse
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TypeVar

from benchmarks.common.results import RESULTS

T = TypeVar("T")


class CommandLine(argparse.ArgumentParser):
    """Parser of a benchmark's command line.

    Args:
        module: the benchmark's module, as `python -m` takes it.
        description: text of `--help`, usually the module's docstring.
    """

    def __init__(self, module: str, description: str | None) -> None:
        super().__init__(
            prog=f"python -m {module}",
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def add_results(self, name: str | None = None) -> None:
        """Adds `--results` and `--report-only`, and `--name` with this default for benchmarks whose results are one file."""
        self.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER", help="of the result files")
        self.add_argument("--report-only", action="store_true", help="tabulate the existing result")
        if name is not None:
            self.add_argument("--name", default=name, help="of the result file, without its suffix")

    def parse(self, arguments: Sequence[str] | None) -> argparse.Namespace:
        """Parses `arguments`, or those of this process where None; `command` is the whole command as text."""
        options = self.parse_args(arguments)
        options.command = " ".join([self.prog, *(sys.argv[1:] if arguments is None else arguments)])
        return options


def list_of(parse: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Parser of a comma-separated list."""

    def parse_all(text: str) -> list[T]:
        try:
            return [parse(part) for part in text.split(",")]
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse_all


def one_of(names: Collection[str], kind: str) -> Callable[[str], str]:
    """Parser of a name."""

    def parse(text: str) -> str:
        if text not in names:
            raise ValueError(f"a {kind} must be one of {', '.join(names)}, got {text!r}")
        return text

    return parse
