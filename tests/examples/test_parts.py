"""What an example's own numbers depend on: GLUE's metrics; that packed instructions do not see one another."""

import pytest
import torch

from alpaca_task.data import Collator
from alpaca_task.module import InstructionTuner
from alpaca_task.tokenized import TokenizedExample
from glue_task.metrics import TaskMetrics
from glue_task.tasks import TASKS


def test_metrics_of_glue_equal_hand_computed_values() -> None:
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


def test_packed_examples_do_not_see_one_another() -> None:
    torch.manual_seed(0)
    module = InstructionTuner(vocab_size=260, max_length=64, tokenizer="bytes", layers=2, width=32, heads=2, lr=1e-2)
    module.configure_model()
    module.eval()
    collate = Collator(pad_token_id=256, max_length=64)
    three = [TokenizedExample(input_ids=torch.randint(256, (n,)).tolist(), prompt_length=1) for n in (9, 20, 14)]
    alone = [module(collate([[example]]))[0, : len(example.input_ids)] for example in three]
    torch.testing.assert_close(module(collate([three]))[0, :43], torch.cat(alone), atol=1e-5, rtol=0)
