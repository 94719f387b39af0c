"""The nine tasks of GLUE (https://gluebenchmark.com): where the text and the label stand, what they mean and how they are scored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MetricName = Literal["accuracy", "f1", "matthews", "pearson", "spearman"]
Stage = Literal["train", "dev", "test"]


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Column names of one source of data. `second` is None for tasks on single sentences."""

    first: str
    second: str | None = None
    label: str


@dataclass(frozen=True, kw_only=True)
class EvaluationSet:
    """One development set and its test set. MNLI has two, told apart by `name`; every other task has one, whose name is empty."""

    name: str = ""
    submission: str
    """File name, without `.tsv`, that GLUE asks for in a submission."""

    def with_suffix(self, stem: str) -> str:
        """`stem` for the unnamed set, `stem_name` for a named one: "dev" or "dev_matched"."""
        return f"{stem}_{self.name}" if self.name else stem


@dataclass(frozen=True, kw_only=True)
class GlueTask:
    """One row of the table below."""

    name: str
    """GLUE's name, which is also the name of the task's folder."""
    hub_name: str
    """Configuration of the Hugging Face dataset nyu-mll/glue."""
    tsv: Columns
    hub: Columns
    labels: tuple[str, ...]
    """Labels as the TSV files and submissions spell them; a class index counts in this tuple. Empty for regression."""
    metrics: tuple[MetricName, ...]
    evaluation_sets: tuple[EvaluationSet, ...]
    headerless: tuple[str, ...] = ()
    """Column names of train and dev files that have no header line (CoLA only)."""

    @property
    def is_regression(self) -> bool:
        """Whether the label is a score instead of a class."""
        return not self.labels

    @property
    def num_outputs(self) -> int:
        """Width of the classifier's output: the number of classes, 1 for regression."""
        return len(self.labels) or 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """One example. `label` is a class index or a score, None where the set is published without labels."""

    index: int
    """The number that GLUE's submission files name the example by."""
    first: str
    second: str | None
    label: int | float | None


_ENTAILMENT = ("entailment", "not_entailment")
_NO_YES = ("0", "1")


def _single(submission: str) -> tuple[EvaluationSet]:
    return (EvaluationSet(submission=submission),)


_TABLE = (
    GlueTask(
        name="CoLA",
        hub_name="cola",
        tsv=Columns(first="sentence", label="label"),
        hub=Columns(first="sentence", label="label"),
        labels=_NO_YES,
        metrics=("matthews",),
        evaluation_sets=_single("CoLA"),
        headerless=("source", "label", "original_label", "sentence"),
    ),
    GlueTask(
        name="SST-2",
        hub_name="sst2",
        tsv=Columns(first="sentence", label="label"),
        hub=Columns(first="sentence", label="label"),
        labels=_NO_YES,
        metrics=("accuracy",),
        evaluation_sets=_single("SST-2"),
    ),
    GlueTask(
        name="MRPC",
        hub_name="mrpc",
        tsv=Columns(first="#1 String", second="#2 String", label="Quality"),
        hub=Columns(first="sentence1", second="sentence2", label="label"),
        labels=_NO_YES,
        metrics=("f1", "accuracy"),
        evaluation_sets=_single("MRPC"),
    ),
    GlueTask(
        name="QQP",
        hub_name="qqp",
        tsv=Columns(first="question1", second="question2", label="is_duplicate"),
        hub=Columns(first="question1", second="question2", label="label"),
        labels=_NO_YES,
        metrics=("f1", "accuracy"),
        evaluation_sets=_single("QQP"),
    ),
    GlueTask(
        name="STS-B",
        hub_name="stsb",
        tsv=Columns(first="sentence1", second="sentence2", label="score"),
        hub=Columns(first="sentence1", second="sentence2", label="label"),
        labels=(),
        metrics=("pearson", "spearman"),
        evaluation_sets=_single("STS-B"),
    ),
    GlueTask(
        name="MNLI",
        hub_name="mnli",
        tsv=Columns(first="sentence1", second="sentence2", label="gold_label"),
        hub=Columns(first="premise", second="hypothesis", label="label"),
        labels=("entailment", "neutral", "contradiction"),
        metrics=("accuracy",),
        evaluation_sets=(
            EvaluationSet(name="matched", submission="MNLI-m"),
            EvaluationSet(name="mismatched", submission="MNLI-mm"),
        ),
    ),
    GlueTask(
        name="QNLI",
        hub_name="qnli",
        tsv=Columns(first="question", second="sentence", label="label"),
        hub=Columns(first="question", second="sentence", label="label"),
        labels=_ENTAILMENT,
        metrics=("accuracy",),
        evaluation_sets=_single("QNLI"),
    ),
    GlueTask(
        name="RTE",
        hub_name="rte",
        tsv=Columns(first="sentence1", second="sentence2", label="label"),
        hub=Columns(first="sentence1", second="sentence2", label="label"),
        labels=_ENTAILMENT,
        metrics=("accuracy",),
        evaluation_sets=_single("RTE"),
    ),
    GlueTask(
        name="WNLI",
        hub_name="wnli",
        tsv=Columns(first="sentence1", second="sentence2", label="label"),
        hub=Columns(first="sentence1", second="sentence2", label="label"),
        labels=_NO_YES,
        metrics=("accuracy",),
        evaluation_sets=_single("WNLI"),
    ),
)

TASKS: dict[str, GlueTask] = {task.name: task for task in _TABLE}


def find_task(name: str) -> GlueTask:
    """The task called `name` by GLUE ("SST-2") or by Hugging Face ("sst2"), in any case; ValueError for any other name."""
    for task in TASKS.values():
        if name.lower() in (task.name.lower(), task.hub_name):
            return task
    raise ValueError(f"task must be one of {', '.join(TASKS)}, got {name!r}")
