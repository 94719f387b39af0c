"""Files in GLUE's official layouts, for the tests of the GLUE example."""

from pathlib import Path
from typing import Any

from example_runs import EXAMPLES, ROOT

SAMPLE = EXAMPLES / "data" / "SST-2"
CONFIG = ROOT / "conf" / "glue.yaml"

# What each task's files look like: (file, header or None, one line, what must be read from it: index, first, second, label).
MNLI_HEADER = (
    "index promptID pairID genre sentence1_binary_parse sentence2_binary_parse sentence1_parse sentence2_parse"
)
MNLI_PARSES = "7\tp\tq\tfiction\t(a)\t(b)\t(c)\t(d)"
LAYOUTS: list[tuple[str, str, str | None, str, tuple[int, str, str | None, float | None]]] = [
    ("CoLA", "dev", None, "gj04\t1\t\tThe dog sleeps.", (0, "The dog sleeps.", None, 1)),
    ("CoLA", "test", "index sentence", "5\tBill pushed Harry.", (5, "Bill pushed Harry.", None, None)),
    ("SST-2", "train", "sentence label", 'a "fine" film \t1', (0, 'a "fine" film ', None, 1)),
    ("SST-2", "test", "index sentence", '3\t"half a quotation', (3, '"half a quotation', None, None)),
    ("MRPC", "train", "Quality|#1 ID|#2 ID|#1 String|#2 String", "1\t70\t71\tOne .\tTwo .", (0, "One .", "Two .", 1)),
    ("QQP", "dev", "id qid1 qid2 question1 question2 is_duplicate", "133\t1\t2\tWhy?\tHow?\t0", (0, "Why?", "How?", 0)),
    (
        "STS-B",
        "dev",
        "index genre filename year old_index source1 source2 sentence1 sentence2 score",
        "0\tmain\tf\t2012\t1\tnone\tnone\tA man.\tA dog.\t1.250",
        (0, "A man.", "A dog.", 1.25),
    ),
    (
        "MNLI",
        "train",
        f"{MNLI_HEADER} sentence1 sentence2 label1 gold_label",
        f"{MNLI_PARSES}\tIt rains.\tIt is wet.\tneutral\tentailment",
        (0, "It rains.", "It is wet.", 0),
    ),
    (
        "MNLI",
        "dev_mismatched",
        f"{MNLI_HEADER} sentence1 sentence2 label1 label2 label3 label4 label5 gold_label",
        f"{MNLI_PARSES}\tIt rains.\tIt is dry.\tneutral\tneutral\tneutral\tneutral\tneutral\tcontradiction",
        (0, "It rains.", "It is dry.", 2),
    ),
    (
        "MNLI",
        "test_matched",
        f"{MNLI_HEADER} sentence1 sentence2",
        f"{MNLI_PARSES}\tIt rains.\tIt is dry.",
        (7, "It rains.", "It is dry.", None),
    ),
    ("QNLI", "dev", "index question sentence label", "0\tWho?\tMe.\tnot_entailment", (0, "Who?", "Me.", 1)),
    ("RTE", "train", "index sentence1 sentence2 label", "0\tIt is.\tIt was.\tentailment", (0, "It is.", "It was.", 0)),
]


def write(path: Path, *lines: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def stage_of(stem: str) -> Any:
    return stem.split("_")[0]
