"""GLUE from Hugging Face `datasets`, by name (nyu-mll/glue) or by the path of a copy with the same configurations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from common import hub
from glue_task.tasks import EvaluationSet, Example, GlueTask, Stage

if TYPE_CHECKING:
    from datasets import Dataset

UNLABELLED = -1
"""The label that Hugging Face gives to the examples of a test set whose labels are private."""


def split_name(stage: Stage, evaluation_set: EvaluationSet) -> str:
    """Hugging Face's name of a split: "train", "validation", "test_matched", ..."""
    if stage == "train":
        return "train"
    return evaluation_set.with_suffix("validation" if stage == "dev" else "test")


def load_hub(dataset: str, task: GlueTask, stage: Stage, evaluation_set: EvaluationSet) -> list[Example]:
    """Download (or take from the cache) one split of `task` from `dataset`.

    Raises ModuleNotFoundError, saying what to install, without the `datasets` package; ValueError for missing columns and empty splits.
    """
    rows = load_split(dataset, task, split_name(stage, evaluation_set))
    missing = {task.hub.first, task.hub.second or task.hub.first, task.hub.label} - set(rows.column_names)
    if missing:
        raise ValueError(
            f"data.dataset={dataset!r}, configuration {task.hub_name!r} lacks {', '.join(map(repr, sorted(missing)))}; "
            f"it has {', '.join(map(repr, rows.column_names))}"
        )
    if not len(rows):
        raise ValueError(f"data.dataset={dataset!r}, configuration {task.hub_name!r}, has no examples for {stage}")
    return examples_from_rows(rows, task)


def load_split(dataset: str, task: GlueTask, split: str) -> Dataset:
    """The rows of one split, as `datasets` gives them."""
    return hub.load_split(dataset, task.hub_name, split, instead="set data.data_dir to a folder of GLUE's TSV files")


def examples_from_rows(rows: Iterable[Mapping[str, Any]], task: GlueTask) -> list[Example]:
    """Turn the rows of a Hugging Face split into examples. Class indices are those of `task.labels`: both follow GLUE."""
    columns = task.hub
    return [
        Example(
            index=int(row.get("idx", position)),
            first=row[columns.first],
            second=None if columns.second is None else row[columns.second],
            label=None if row[columns.label] == UNLABELLED else row[columns.label],
        )
        for position, row in enumerate(rows)
    ]
