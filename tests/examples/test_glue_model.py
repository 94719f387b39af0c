"""The GLUE example's model, metrics and submission files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from glue_files import write
from glue_task.data import GlueDataModule
from glue_task.metrics import TaskMetrics
from glue_task.module import GlueClassifier
from glue_task.submission import SubmissionWriter, prediction_text, write_submission
from glue_task.tasks import TASKS, GlueTask
from glue_task.tokenizers import ByteEncoder, PretrainedEncoder

# Class 1: two true positives, one false positive, one false negative; class 0: one true negative.
LABELS, PREDICTIONS = torch.tensor([1, 1, 1, 0, 0]), torch.tensor([1, 1, 0, 1, 0])


def computed(name: str, batches: Sequence[tuple[int, float, Tensor, Tensor]]) -> dict[str, float]:
    metrics = TaskMetrics(TASKS[name])
    for set_index, loss, predictions, labels in batches:
        metrics.update(set_index, torch.tensor(loss), predictions, labels)
    return {key: float(value) for key, value in metrics.compute().items()}


def test_classification_metrics_equal_hand_computed_values() -> None:
    whole = [(0, 1.0, PREDICTIONS, LABELS)]
    assert computed("SST-2", whole) == pytest.approx({"loss": 1.0, "accuracy": 0.6, "score": 0.6})
    # F1 = 2 TP / (2 TP + FP + FN) = 4/6
    assert computed("MRPC", whole) == pytest.approx(
        {"loss": 1.0, "f1": 4 / 6, "accuracy": 0.6, "score": (4 / 6 + 0.6) / 2}
    )
    # (TP TN - FP FN) / sqrt((TP+FP)(TP+FN)(TN+FP)(TN+FN)) = (2 - 1) / sqrt(3 * 3 * 2 * 2)
    assert computed("CoLA", whole) == pytest.approx({"loss": 1.0, "matthews": 1 / 6, "score": 1 / 6})


def test_regression_metrics_equal_hand_computed_values() -> None:
    # Deviations from the means (-1.5 -0.5 0.5 1.5) and (-3 -2 -1 6): 14 / sqrt(5 * 50); the ranks agree.
    values = computed("STS-B", [(0, 0.5, torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([1.0, 2.0, 3.0, 10.0]))])
    assert values["pearson"] == pytest.approx(14 / 250**0.5, abs=1e-5)
    assert values["spearman"] == pytest.approx(1.0, abs=1e-5)
    assert values["score"] == pytest.approx((values["pearson"] + values["spearman"]) / 2)


# --- model -------------------------------------------------------------------------------------------------------------------


def tiny_module(task: str = "SST-2", **overrides: Any) -> GlueClassifier:
    torch.manual_seed(0)
    settings = {"vocab_size": 260, "pad_token_id": 256, "max_length": 64, "layers": 1, "width": 16, "heads": 2}
    return GlueClassifier(task=task, **(settings | overrides))


def test_padding_does_not_change_the_outputs() -> None:
    module = tiny_module().eval()
    ids = torch.tensor([ByteEncoder().encode("a short one", None, 64)])
    mask = torch.ones_like(ids)
    padded = torch.nn.functional.pad(ids, (0, 9), value=256)
    outputs, _ = module.model(ids, mask)
    outputs_padded, _ = module.model(padded, torch.nn.functional.pad(mask, (0, 9)))
    assert outputs.shape == (1, 2)
    assert torch.allclose(outputs, outputs_padded, atol=1e-6)


def test_language_model_loss_is_the_mean_over_real_tokens() -> None:
    module = tiny_module()
    ids = torch.tensor([[1, 2, 3, 4], [5, 6, 256, 256]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    _, hidden = module.model(ids, mask)
    log_probabilities = (hidden @ module.model.transformer.wte.weight.T).log_softmax(-1)
    expected = -torch.stack(
        [log_probabilities[row, at, ids[row, at + 1]] for row, at in ((0, 0), (0, 1), (0, 2), (1, 0))]
    ).mean()
    assert torch.allclose(module.model.language_model_loss(hidden, ids, mask), expected, atol=1e-6)


def test_pretrained_weights_are_taken_and_checked(tiny_gpt2: Path) -> None:
    from transformers import GPT2Model

    encoder = PretrainedEncoder(str(tiny_gpt2))
    settings = {"pretrained": str(tiny_gpt2), "vocab_size": encoder.vocab_size, "pad_token_id": encoder.pad_token_id}
    module = tiny_module("MNLI", **settings, max_length=32)
    stored = GPT2Model.from_pretrained(tiny_gpt2).float()
    assert torch.equal(module.model.transformer.wte.weight, stored.wte.weight)
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
    assert module.model.head.out_features == 3
    assert all(part.training for part in module.modules())  # or there would be no dropout
    with pytest.raises(ValueError, match="data.max_length=64 exceeds the 32 positions"):
        tiny_module(**settings, max_length=64)
    with pytest.raises(ValueError, match=r"knows \d+ tokens but data.tokenizer has 50257"):
        tiny_module(**settings | {"vocab_size": 50257}, max_length=32)


def test_wrong_model_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="model.width=15 is not allowed; it must be a multiple of model.heads=2"):
        tiny_module(width=15)


def quiet(tmp_path: Path) -> dict[str, Any]:
    return {
        "accelerator": "cpu",
        "devices": 1,
        "default_root_dir": str(tmp_path),
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }


def write_task(folder: Path, task: GlueTask) -> None:
    """Files of three examples per split with the columns that the example reads."""
    texts = [name for name in (task.tsv.first, task.tsv.second) if name is not None]
    for one in task.evaluation_sets:
        for stem in ("train", one.with_suffix("dev")):
            columns = list(task.headerless) or [*texts, task.tsv.label]
            rows = [
                [str(i) if task.is_regression else task.labels[i % len(task.labels)]] * len(columns) for i in range(3)
            ]
            header = [] if task.headerless else ["\t".join(columns)]
            write(folder / task.name / f"{stem}.tsv", *header, *map("\t".join, rows))
        rows = [[str(10 + i), *["some text"] * len(texts)] for i in range(3)]
        write(
            folder / task.name / f"{one.with_suffix('test')}.tsv", "\t".join(["index", *texts]), *map("\t".join, rows)
        )


@pytest.mark.parametrize("name", ["CoLA", "STS-B", "MNLI"])
def test_a_task_trains_validates_and_predicts(tmp_path: Path, name: str) -> None:
    task = TASKS[name]
    write_task(tmp_path, task)
    data = GlueDataModule(task=name, data_dir=str(tmp_path), batch_size=2, max_length=64)
    module = tiny_module(name, lm_weight=0.5)
    trainer = pl.Trainer(
        **quiet(tmp_path), max_epochs=1, num_sanity_val_steps=0, enable_checkpointing=False, logger=False
    )
    trainer.fit(module, data)
    assert torch.isfinite(trainer.callback_metrics["train/loss"])
    evaluated = {f"val/{one.with_suffix(metric)}" for one in task.evaluation_sets for metric in (*task.metrics, "loss")}
    assert evaluated | {"val/score"} <= set(trainer.callback_metrics)

    writer = SubmissionWriter(task=name, output_dir=str(tmp_path / "out"))
    trainer = pl.Trainer(**quiet(tmp_path), callbacks=[writer], enable_checkpointing=False, logger=False)
    trainer.predict(module, data)
    for one in task.evaluation_sets:
        header, *rows = (tmp_path / "out" / f"{one.submission}.tsv").read_text().splitlines()
        assert header == "index\tprediction"
        assert [row.split("\t")[0] for row in rows] == ["10", "11", "12"]


def test_submission_spells_predictions_as_glue_does(tmp_path: Path) -> None:
    assert prediction_text(1, TASKS["RTE"]) == "not_entailment"
    assert prediction_text(2, TASKS["MNLI"]) == "contradiction"
    assert prediction_text(1, TASKS["CoLA"]) == "1"
    assert [prediction_text(x, TASKS["STS-B"]) for x in (-0.3, 2.34567, 7.0)] == ["0.000", "2.346", "5.000"]
    write_submission(tmp_path / "new" / "RTE.tsv", {2: 1.0, 0: 0.0}, TASKS["RTE"])
    assert (tmp_path / "new" / "RTE.tsv").read_text() == "index\tprediction\n0\tentailment\n2\tnot_entailment\n"
