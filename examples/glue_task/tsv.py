"""GLUE's TSV files: tab-separated UTF-8, one example a line, no quoting, so that a lone quotation mark is only a character."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from glue_task.tasks import TASKS, EvaluationSet, Example, GlueTask, Stage

log = logging.getLogger(__name__)

INDEX_COLUMNS = ("index", "id")
"""Names of the column that numbers the test examples; QQP has "id"."""
MAX_BAD_SHARE = 0.01
"""Above this share of unreadable lines the file is refused: it is probably not what the task expects."""


class BadLineError(ValueError):
    """One line that cannot be read; the message says why."""


def find_folder(data_dir: str, task: GlueTask) -> Path:
    """The folder of the task's TSV files: `data_dir` itself, or the folder named after the task inside it."""
    root = Path(data_dir).expanduser()
    if not root.is_dir():
        raise FileNotFoundError(f"data.data_dir={data_dir!r} is no folder (working directory: {Path.cwd()})")
    return root / task.name if (root / task.name).is_dir() else root


def split_path(folder: Path, stage: Stage, evaluation_set: EvaluationSet) -> Path:
    """Path of one split's file, such as `dev.tsv` or MNLI's `dev_matched.tsv`; FileNotFoundError with what is there instead."""
    path = folder / f"{stage if stage == 'train' else evaluation_set.with_suffix(stage)}.tsv"
    if not path.is_file():
        there = ", ".join(sorted(file.name for file in folder.glob("*.tsv"))) or "no .tsv file at all"
        raise FileNotFoundError(f"{path} does not exist; the folder has {there}")
    return path


def read_tsv(path: Path, task: GlueTask, stage: Stage) -> list[Example]:
    """Read one file of `task`.

    Lines that cannot be read are reported with their numbers and left out of the training and development sets. Too many of them
    (`MAX_BAD_SHARE`), or a single one in a test set, whose every line must get a prediction, raise ValueError. So do a missing
    column and a file that is not UTF-8.
    """
    lines = _read_lines(path)
    if task.headerless and stage != "test":
        header, first_line = list(task.headerless), 1
    else:
        header, first_line = next(lines, []), 2
        _check_header(path, header, task, stage)

    examples: list[Example] = []
    bad: list[str] = []
    count = 0
    for count, fields in enumerate(lines, start=1):
        try:
            examples.append(_parse(dict(zip(header, fields, strict=False)), fields, header, task, stage, count - 1))
        except BadLineError as error:
            bad.append(f"line {count - 1 + first_line}: {error}")
    if not count:
        raise ValueError(f"{path} has no examples")
    if bad:
        _report(path, bad, count, stage)
    return examples


def _read_lines(path: Path) -> Iterator[list[str]]:
    # newline="\n": a carriage return or a Unicode line separator inside a sentence must not start a new line.
    with path.open(encoding="utf-8-sig", newline="\n") as file:
        try:
            for line in file:
                yield line.rstrip("\r\n").split("\t")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8: {error}") from error


def _check_header(path: Path, header: Sequence[str], task: GlueTask, stage: Stage) -> None:
    wanted = _wanted_columns(task, labelled=stage != "test")
    missing = [name for name in wanted if name not in header]
    if not missing:
        return
    others = [
        other.name
        for other in TASKS.values()
        if other is not task
        and not other.headerless
        and set(_wanted_columns(other, labelled=stage != "test")) <= set(header)
    ]
    hint = f"; these are the columns of {' or '.join(others)}" if others else ""
    raise ValueError(
        f"{path} lacks the column{'s' if len(missing) > 1 else ''} {', '.join(map(repr, missing))} that task={task.name!r} reads; "
        f"its first line has {', '.join(map(repr, header)) or 'nothing'}{hint}"
    )


def _wanted_columns(task: GlueTask, *, labelled: bool) -> list[str]:
    columns = task.tsv
    return [name for name in (columns.first, columns.second, columns.label if labelled else None) if name is not None]


def _parse(
    row: dict[str, str], fields: Sequence[str], header: Sequence[str], task: GlueTask, stage: Stage, position: int
) -> Example:
    if len(fields) != len(header):
        raise BadLineError(f"{len(fields)} fields instead of {len(header)}")
    columns = task.tsv
    # Only a submission needs GLUE's own numbers; elsewhere the position serves, whatever the file's index column holds.
    index = _parse_index(row, position) if stage == "test" else position
    label = parse_label(row[columns.label], task) if columns.label in row else None
    return Example(
        index=index,
        first=row[columns.first],
        second=None if columns.second is None else row[columns.second],
        label=label,
    )


def _parse_index(row: dict[str, str], position: int) -> int:
    for name in INDEX_COLUMNS:
        if name in row:
            if not row[name].isdecimal():
                raise BadLineError(f"{name} {row[name]!r} is not a number")
            return int(row[name])
    return position


def parse_label(text: str, task: GlueTask) -> int | float:
    """The class index or the score that `text` stands for; BadLineError for anything else."""
    if task.is_regression:
        try:
            score = float(text)
        except ValueError:
            score = math.nan
        if not math.isfinite(score):
            raise BadLineError(f"{task.tsv.label} {text!r} is not a number")
        return score
    if text not in task.labels:
        raise BadLineError(f"{task.tsv.label} {text!r} is none of {', '.join(task.labels)}")
    return task.labels.index(text)


def _report(path: Path, bad: Sequence[str], count: int, stage: Stage) -> None:
    summary = (
        f"{path}: {len(bad)} of {count} lines cannot be read ({'; '.join(bad[:3])}{'; ...' if len(bad) > 3 else ''})"
    )
    if stage == "test":
        raise ValueError(f"{summary}; a test set is taken whole, so that every example gets its prediction")
    if len(bad) > MAX_BAD_SHARE * count:
        raise ValueError(f"{summary}; at most {MAX_BAD_SHARE:.0%} are passed over")
    log.warning("%s; they are left out", summary)
