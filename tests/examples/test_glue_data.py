"""The GLUE example's data: tasks, files in GLUE's layout, Hugging Face data, tokenizers, batches."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from glue_files import LAYOUTS, stage_of, write
from glue_task.data import Collator, GlueDataModule, unpack_scores
from glue_task.tasks import TASKS, Example
from glue_task.tokenizers import ByteEncoder, build_encoder, join_pair
from glue_task.tsv import find_folder, read_tsv, split_path

# --- tasks -------------------------------------------------------------------------------------------------------------------


# --- TSV files ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "stem", "header", "line", "expected"), LAYOUTS, ids=[f"{x[0]}-{x[1]}" for x in LAYOUTS]
)
def test_official_layout_of_every_task(
    tmp_path: Path,
    name: str,
    stem: str,
    header: str | None,
    line: str,
    expected: tuple[int, str, str | None, float | None],
) -> None:
    task = TASKS[name]
    first_lines = [] if header is None else ["\t".join(header.split("|" if "|" in header else " "))]
    write(tmp_path / name / f"{stem}.tsv", *first_lines, line)
    evaluation_set = next(one for one in task.evaluation_sets if stem in ("train", one.with_suffix(stage_of(stem))))
    path = split_path(find_folder(str(tmp_path), task), stage_of(stem), evaluation_set)
    (example,) = read_tsv(path, task, stage_of(stem))
    assert (example.index, example.first, example.second, example.label) == expected


def test_few_bad_lines_are_left_out_and_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines = [f"sentence {i}\t{i % 2}" for i in range(400)]
    lines[10], lines[20] = "only one field", "no such label\t7"
    path = write(tmp_path / "train.tsv", "sentence\tlabel", *lines)
    assert len(read_tsv(path, TASKS["SST-2"], "train")) == 398
    assert "2 of 400 lines cannot be read" in caplog.text
    assert "line 12: 1 fields instead of 2; line 22: label '7' is none of 0, 1" in caplog.text


@pytest.mark.parametrize(
    ("name", "stage", "lines", "message"),
    [
        (
            "SST-2",
            "train",
            ["sentence\tlabel", "fine\t1", "bad"],
            "1 of 2 lines cannot be read (line 3: 1 fields instead",
        ),
        ("SST-2", "test", ["index\tsentence", *["1\tfine"] * 500, "x\tfine"], "line 502: index 'x' is not a number"),
        ("SST-2", "dev", ["text\tlabel", "fine\t1"], "lacks the column 'sentence' that task='SST-2' reads"),
        ("RTE", "dev", ["index\tquestion\tsentence\tlabel", "0\ta\tb\t1"], "these are the columns of SST-2 or QNLI"),
        ("STS-B", "dev", ["sentence1\tsentence2\tscore", "a\tb\tnan"], "score 'nan' is not a number"),
        (
            "MNLI",
            "train",
            ["sentence1\tsentence2\tgold_label", "a\tb\t-"],
            "gold_label '-' is none of entailment, neutral",
        ),
    ],
)
def test_files_that_do_not_fit_are_refused(
    tmp_path: Path, name: str, stage: Any, lines: list[str], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        read_tsv(write(tmp_path / "file.tsv", *lines), TASKS[name], stage)


# --- Hugging Face ------------------------------------------------------------------------------------------------------------


def test_a_local_copy_of_the_dataset_is_read_by_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for split, labels in (("train", [0, 1, 1]), ("validation", [1, 0]), ("test", [-1, -1])):
        rows = {
            "sentence": [f"{split} {i}" for i in range(len(labels))],
            "label": labels,
            "idx": list(range(len(labels))),
        }
        (tmp_path / "copy" / "sst2").mkdir(parents=True, exist_ok=True)
        datasets.Dataset.from_dict(rows).to_parquet(str(tmp_path / "copy" / "sst2" / f"{split}-00000-of-00001.parquet"))
    files = "".join(f"  - split: {split}\n    path: sst2/{split}-*\n" for split in ("train", "validation", "test"))
    write(tmp_path / "copy" / "README.md", "---", f"configs:\n- config_name: sst2\n  data_files:\n{files}---")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")

    data = GlueDataModule(task="SST-2", dataset=str(tmp_path / "copy"))
    data.prepare_data()
    data.setup("fit")
    data.setup("predict")
    assert [example.first for example in data.train_dataloader().dataset] == ["train 0", "train 1", "train 2"]
    (validation,), (prediction,) = data.val_dataloader(), data.predict_dataloader()
    assert next(iter(validation))["labels"].tolist() == [1, 0]
    assert "labels" not in next(iter(prediction))
    with pytest.raises(ValueError, match="the test set of SST-2 has no labels"):
        data.setup("test")


# --- tokenizers and batches --------------------------------------------------------------------------------------------------


def test_byte_tokenizer() -> None:
    encoder = ByteEncoder()
    assert encoder.encode("ab", None, 16) == [257, 97, 98, 259]
    assert encoder.encode("é", "b", 16) == [257, 0xC3, 0xA9, 258, 98, 259]
    assert encoder.encode("", "", 16) == [257, 258, 259]
    assert max(encoder.encode("x", "y", 16)) < encoder.vocab_size
    assert isinstance(build_encoder("bytes"), ByteEncoder)


@pytest.mark.parametrize(
    ("first", "second", "kept"),
    [(9, None, (8, 0)), (2, 3, (2, 3)), (9, 2, (5, 2)), (2, 9, (2, 5)), (9, 9, (3, 4)), (1, 1, (1, 1)), (0, 9, (0, 7))],
)
def test_the_longer_sentence_is_cut_first(first: int, second: int | None, kept: tuple[int, int]) -> None:
    ids = join_pair(
        [1] * first, None if second is None else [2] * second, start=[7], separator=[8], end=[9], max_length=10
    )
    assert (ids.count(1), ids.count(2)) == kept
    assert len(ids) <= 10
    assert (ids[0], ids[-1], ids.count(8)) == (7, 9, int(second is not None))


def test_batches_are_padded_on_the_right() -> None:
    collate = Collator(TASKS["SST-2"], ByteEncoder(), max_length=12)
    batch = collate(
        [Example(index=3, first="abc", second=None, label=1), Example(index=4, first="z" * 20, second=None, label=0)]
    )
    assert batch["input_ids"].shape == batch["attention_mask"].shape == (2, 12)
    assert batch["input_ids"][0].tolist() == [257, 97, 98, 99, 259] + [256] * 7
    assert batch["attention_mask"].sum(1).tolist() == [5, 12]
    assert (batch["labels"].tolist(), batch["indices"].tolist()) == ([1, 0], [3, 4])


def test_scores_survive_a_cast_of_floating_point_tensors() -> None:
    examples = [Example(index=i, first="a", second="b", label=label) for i, label in enumerate((3.333, 0.25))]
    batch = Collator(TASKS["STS-B"], ByteEncoder(), 16)(examples)
    assert not batch["labels"].is_floating_point()
    assert torch.equal(unpack_scores(batch["labels"]), torch.tensor([3.333, 0.25]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "set exactly one of data.data_dir (got None) and data.dataset (got None)"),
        ({"data_dir": "x", "task": "SQuAD"}, "task must be one of CoLA"),
        ({"data_dir": "x", "max_length": 4}, "data.max_length=4 is not allowed; it must be at least 8"),
    ],
)
def test_wrong_data_settings_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        GlueDataModule(**arguments)
