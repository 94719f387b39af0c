"""The GLUE example's parts: data in GLUE's layouts and from Hugging Face, tokens and batches, metrics, network, submission files."""

import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from glue_task.data import Collator, GlueDataModule, unpack_scores
from glue_task.metrics import TaskMetrics
from glue_task.module import GlueClassifier
from glue_task.submission import SubmissionWriter
from glue_task.tasks import TASKS, Example
from glue_task.tokenizers import byte_tokenizer, pretrained_tokenizer
from glue_task.tsv import find_folder, read_tsv, split_path
from tiny_models import TINY_MODELS, save_tiny_model


def write(path: Path, *lines: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


PARSES = "promptID pairID genre sentence1_binary_parse sentence2_binary_parse sentence1_parse sentence2_parse"
MNLI = f"index {PARSES} sentence1 sentence2"
LAYOUTS: dict[str, tuple[str, str, tuple[int, str, str | None, float | None]]] = {
    "CoLA/dev": ("", "gj04|1||The dog sleeps.", (0, "The dog sleeps.", None, 1)),
    "CoLA/test": ("index sentence", "5|Bill pushed Harry.", (5, "Bill pushed Harry.", None, None)),
    "SST-2/train": ("sentence label", 'a "fine film |1', (0, 'a "fine film ', None, 1)),
    "MRPC/train": ("Quality,#1 ID,#2 ID,#1 String,#2 String", "1|70|71|One .|Two .", (0, "One .", "Two .", 1)),
    "QQP/dev": ("id qid1 qid2 question1 question2 is_duplicate", "9|1|2|Why?|How?|0", (0, "Why?", "How?", 0)),
    "STS-B/dev": ("index sentence1 sentence2 score", "0|A man.|A dog.|1.250", (0, "A man.", "A dog.", 1.25)),
    "MNLI/dev_mismatched": (
        f"{MNLI} label1 gold_label",
        "7|p|q|f|(|(|(|(|A.|B.|neutral|contradiction",
        (0, "A.", "B.", 2),
    ),
    "MNLI/test_matched": (MNLI, "7|p|q|f|(|(|(|(|A.|B.", (7, "A.", "B.", None)),
    "QNLI/dev": ("index question sentence label", "0|Who?|Me.|not_entailment", (0, "Who?", "Me.", 1)),
    "RTE/train": ("index sentence1 sentence2 label", "0|It is.|It was.|entailment", (0, "It is.", "It was.", 0)),
}
"""FOLDER/FILE -> its header (CoLA: none), a line, and what must be read from it: index, first, second, label."""


@pytest.mark.parametrize("file", LAYOUTS)
def test_official_layout_of_every_task(tmp_path: Path, file: str) -> None:
    header, line, expected = LAYOUTS[file]
    columns = ["\t".join(header.split("," if "," in header else " "))] if header else []
    write(tmp_path / f"{file}.tsv", *columns, line.replace("|", "\t"))
    name, stem = file.split("/")
    task = TASKS[name]
    stage: Any = stem.split("_")[0]
    evaluation_set = next(one for one in task.evaluation_sets if stem in ("train", one.with_suffix(stage)))
    (example,) = read_tsv(split_path(find_folder(str(tmp_path), task), stage, evaluation_set), task, stage)
    assert (example.index, example.first, example.second, example.label) == expected


@pytest.mark.parametrize(
    ("file", "lines", "message"),
    [
        ("SST-2/train", ["sentence|label", "fine|1", "bad"], "1 of 2 lines cannot be read (line 3: 1 fields instead"),
        ("SST-2/test", ["index|sentence", *["1|fine"] * 500, "x|fine"], "line 502: index 'x' is not a number"),
        ("RTE/dev", ["index|question|sentence|label", "0|a|b|1"], "these are the columns of SST-2 or QNLI"),
        ("STS-B/dev", ["sentence1|sentence2|score", "a|b|nan"], "score 'nan' is not a number"),
    ],
)
def test_files_that_do_not_fit_are_refused(tmp_path: Path, file: str, lines: list[str], message: str) -> None:
    name, stage = file.split("/")
    path = write(tmp_path / "file.tsv", *(line.replace("|", "\t") for line in lines))
    with pytest.raises(ValueError, match=re.escape(message)):
        read_tsv(path, TASKS[name], stage)


def test_a_local_copy_of_the_dataset_is_read_by_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    copy = tmp_path / "copy"
    files = "".join(f"  - split: {split}\n    path: sst2/{split}-*\n" for split in ("train", "validation", "test"))
    write(copy / "README.md", "---", f"configs:\n- config_name: sst2\n  data_files:\n{files}---")
    (copy / "sst2").mkdir()
    for split, labels in (("train", [0, 1, 1]), ("validation", [1, 0]), ("test", [-1, -1])):
        rows = {"sentence": [f"{split} {i}" for i in range(len(labels))], "label": labels, "idx": range(len(labels))}
        datasets.Dataset.from_dict(rows).to_parquet(str(copy / "sst2" / f"{split}-00000-of-00001.parquet"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")

    data = GlueDataModule(task="SST-2", dataset=str(copy))
    data.prepare_data()
    data.setup("fit")
    data.setup("predict")
    assert [example.first for example in data.train_dataloader().dataset] == ["train 0", "train 1", "train 2"]
    (validation,), (prediction,) = data.val_dataloader(), data.predict_dataloader()
    assert next(iter(validation))["labels"].tolist() == [1, 0]
    assert "labels" not in next(iter(prediction))
    with pytest.raises(ValueError, match="the test set of SST-2 has no labels"):
        data.setup("test")


def test_batches_are_padded_and_hold_scores_exactly() -> None:
    texts = ("abc", "é ", "z" * 20)
    examples = [Example(index=3 + i, first=text, second=None, label=1.1 * i) for i, text in enumerate(texts)]
    batch = Collator(TASKS["STS-B"], byte_tokenizer(), max_length=12)(examples)
    ids = batch["inputs"]["input_ids"]
    assert ids.shape == (3, 12) and batch["indices"].tolist() == [3, 4, 5]
    assert ids[0].tolist() == [257, 97, 98, 99, 259] + [256] * 7
    assert ids[1].tolist() == [257, 0xC3, 0xA9, 32, 259] + [256] * 7
    assert batch["inputs"]["attention_mask"].sum(1).tolist() == [5, 5, 12]
    # DeepSpeed casts tensors of floating point to the training's precision.
    assert not batch["labels"].is_floating_point()
    assert torch.equal(unpack_scores(batch["labels"]), torch.tensor([0, 1.1, 2.2]))


def test_a_batch_has_examples_of_one_length(tmp_path: Path) -> None:
    """Each once, in another order in each epoch; without `group_by_length` they are mixed."""
    lines = [f"{'word ' * (1 + i % 32)}{i}\t{i % 2}" for i in range(128)]
    write(tmp_path / "SST-2" / "train.tsv", "sentence\tlabel", *lines)
    write(tmp_path / "SST-2" / "dev.tsv", "sentence\tlabel", *lines)
    torch.manual_seed(1)
    grouped, mixed = (
        GlueDataModule(task="SST-2", data_dir=str(tmp_path), batch_size=8, group_by_length=group)
        for group in (True, False)
    )
    epochs, padding = [], []
    for data in (grouped, grouped, mixed):
        data.setup("fit")
        batches = list(data.train_dataloader())
        epochs.append([index for batch in batches for index in batch["indices"].tolist()])
        padding.append(sum(int((batch["inputs"]["attention_mask"] == 0).sum()) for batch in batches))
    assert all(sorted(epoch) == list(range(128)) for epoch in epochs) and epochs[0] != epochs[1]
    assert max(padding[:2]) < 0.5 * padding[2]


def test_metrics_equal_hand_computed_values() -> None:
    # Class 1: two true positives, one false positive, one false negative; class 0: one true negative.
    classes = torch.tensor([1, 1, 0, 1, 0]), torch.tensor([1, 1, 1, 0, 0])
    # Deviations from the means (-1.5 -0.5 0.5 1.5) and (-3 -2 -1 6): 14 / sqrt(5 * 50); the ranks agree.
    scores = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([1.0, 2.0, 3.0, 10.0])
    pearson = 14 / 250**0.5
    for name, (predictions, labels), expected in (
        ("SST-2", classes, {"accuracy": 0.6, "score": 0.6}),
        # F1 = 2 TP / (2 TP + FP + FN)
        ("MRPC", classes, {"f1": 4 / 6, "accuracy": 0.6, "score": (4 / 6 + 0.6) / 2}),
        # (TP TN - FP FN) / sqrt((TP+FP)(TP+FN)(TN+FP)(TN+FN))
        ("CoLA", classes, {"matthews": 1 / 6, "score": 1 / 6}),
        ("STS-B", scores, {"pearson": pearson, "spearman": 1.0, "score": (pearson + 1) / 2}),
    ):
        metrics = TaskMetrics(TASKS[name])
        metrics.update(0, torch.tensor(0.5), predictions, labels)
        found = {key: float(value) for key, value in metrics.compute().items()}
        assert found == pytest.approx({"loss": 0.5, **expected}, abs=1e-5), name


def tiny_module(task: str = "SST-2", **overrides: Any) -> GlueClassifier:
    torch.manual_seed(0)
    settings = {"vocab_size": 260, "pad_token_id": 256, "max_length": 64, "layers": 1, "width": 16, "heads": 2}
    return GlueClassifier(task=task, **(settings | overrides))


@pytest.mark.parametrize("architecture", TINY_MODELS)
def test_every_architecture_reads_pairs_and_no_padding(architecture: str, tmp_path: Path) -> None:
    """Also where the tokenizer has no token for padding (all but BERT's), none between sentences, or pads on the left (Llama's)."""
    folder = save_tiny_model(tmp_path / "model", architecture)
    tokenizer = pretrained_tokenizer(str(folder))
    module = tiny_module("RTE", pretrained=str(folder), pad_token_id=tokenizer.pad_token_id, max_length=32).eval()
    examples = [
        Example(index=i, first=first, second=second, label=0)
        for i, (first, second) in enumerate([("the plot", "is dull"), ("the plot is", "dull"), ("the cast", "x " * 60)])
    ]
    collate = Collator(TASKS["RTE"], tokenizer, max_length=32)
    batch = collate(examples)
    assert batch["inputs"]["input_ids"].shape == (3, 32)
    ends_at_the_last_column = batch["inputs"]["attention_mask"][:, -1].tolist()
    assert ends_at_the_last_column == ([1, 1, 1] if architecture == "llama" else [0, 0, 1])
    outputs = module.model(**batch["inputs"]).logits
    alone = torch.cat([module.model(**collate([example])["inputs"]).logits for example in examples])
    torch.testing.assert_close(outputs, alone, atol=1e-5, rtol=1e-5)
    # Where one sentence ends and the other begins is seen.
    assert (outputs[0] - outputs[1]).abs().max() > 1e-4
    if architecture == "bert":
        assert batch["inputs"]["token_type_ids"].any(1).all()


@pytest.mark.parametrize("name", ["STS-B", "MNLI"])
def test_a_task_trains_validates_and_predicts(tmp_path: Path, name: str) -> None:
    """Regression, and two evaluation sets."""
    task = TASKS[name]
    labels = task.labels or ("0.5", "1.5", "4")
    for one in task.evaluation_sets:
        for stem in ("train", one.with_suffix("dev")):
            rows = [f"{label}\tb\t{label}" for label in labels]
            write(tmp_path / name / f"{stem}.tsv", f"sentence1\tsentence2\t{task.tsv.label}", *rows)
        rows = [f"{10 + i}\tsome\ttext" for i in range(3)]
        write(tmp_path / name / f"{one.with_suffix('test')}.tsv", "index\tsentence1\tsentence2", *rows)
    data = GlueDataModule(task=name, data_dir=str(tmp_path), batch_size=2, max_length=64)
    module = tiny_module(name, lm_weight=0.5)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        callbacks=[SubmissionWriter(task=name, output_dir=str(tmp_path / "out"))],
        **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
    )
    trainer.fit(module, data)
    assert torch.isfinite(trainer.callback_metrics["train/loss"])
    evaluated = {f"val/{one.with_suffix(metric)}" for one in task.evaluation_sets for metric in (*task.metrics, "loss")}
    assert evaluated | {"val/score"} <= set(trainer.callback_metrics)
    trainer.predict(module, data)
    for one in task.evaluation_sets:
        header, *lines = (tmp_path / "out" / f"{one.submission}.tsv").read_text().splitlines()
        assert header == "index\tprediction"
        assert [line.split("\t")[0] for line in lines] == ["10", "11", "12"]
