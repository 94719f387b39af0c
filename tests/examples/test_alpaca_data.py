"""The Alpaca example's data: records, prompts, tokenizers, masking, packing, batches."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import make_alpaca_sample as sample_script
from alpaca_task.data import Collator, InstructionData
from alpaca_task.packing import pack
from alpaca_task.prompts import TEMPLATES
from alpaca_task.records import Record, read_records
from alpaca_task.tokenized import TokenizedExample, tokenize
from alpaca_task.tokenizers import ByteEncoder, Encoder, build_encoder
from example_runs import EXAMPLES

SAMPLE = EXAMPLES / "data" / "alpaca"
ROWS = [
    {"instruction": "Say this again.", "input": f"word {i}", "output": f"word {i}", "text": "as in tatsu-lab/alpaca"}
    for i in range(20)
]


def write_json(path: Path, content: object) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")
    return str(path)


# --- records and prompts -----------------------------------------------------------------------------------------------------


def test_json_and_json_lines_are_read(tmp_path: Path) -> None:
    rows = [{"instruction": "a", "input": "", "output": "b"}, {"instruction": "c\u2028", "output": "d"}]
    expected = [Record(instruction="a", input="", output="b"), Record(instruction="c\u2028", input="", output="d")]
    assert read_records(write_json(tmp_path / "list.json", rows)) == expected
    lines = tmp_path / "lines.jsonl"
    lines.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n\n", encoding="utf-8")
    assert read_records(str(lines)) == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"instruction": "a"}, "must hold a list of objects, got a dict"),
        ([{"instruction": "a", "output": "b"}, {"instruction": "a"}], "row 1: output must be text, got None"),
    ],
)
def test_files_of_another_form_are_refused(tmp_path: Path, content: object, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        read_records(write_json(tmp_path / "data.json", content))


def test_prompts_end_where_the_response_begins() -> None:
    alpaca = TEMPLATES["alpaca"]
    with_input = alpaca.fill(Record(instruction="Add {these}.", input="1 2", output="3"))
    assert "further context" in with_input
    assert with_input.endswith("### Instruction:\nAdd {these}.\n\n### Input:\n1 2\n\n### Response:\n")
    assert alpaca.fill(Record(instruction="Hi.", input="", output="")).endswith(
        "request.\n\n### Instruction:\nHi.\n\n### Response:\n"
    )


# --- tokenizers --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bytes", "pretrained"])
def test_pairs_have_the_prompts_tokens_and_come_back_as_text(kind: str, tiny_llama: Path) -> None:
    encoder: Encoder = build_encoder("bytes" if kind == "bytes" else str(tiny_llama))
    prompts, responses = ["Say this again.\nn\u00fc\n", "Say"], ["n\u00fc", " this again."]
    assert [prompt for prompt, _ in encoder.encode_pairs(prompts, responses)] == encoder.encode_prompts(prompts)
    for (prompt, response), texts in zip(
        encoder.encode_pairs(prompts, responses), zip(prompts, responses, strict=True), strict=True
    ):
        assert encoder.decode([*prompt, *response, encoder.end_token_id]) == "".join(texts)
        assert max(*prompt, *response, encoder.end_token_id, encoder.pad_token_id) < encoder.vocab_size


# --- masking and packing -----------------------------------------------------------------------------------------------------


def tokenized(*outputs: str, max_length: int = 64) -> list[TokenizedExample]:
    records = [Record(instruction="Say it.", input="", output=output) for output in outputs]
    return tokenize(records, TEMPLATES["short"], ByteEncoder(), max_length)


def test_only_response_and_end_are_learned() -> None:
    (example,) = tokenized("yes")
    prompt = [257, *b"Say it.\n> "]
    assert example.input_ids == [*prompt, *b"yes", 259]
    assert example.labels == [-100] * len(prompt) + [*b"yes", 259]


def test_long_examples_are_cut_without_an_end_and_prompts_without_room_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    (example,) = tokenized("a long answer", max_length=15)
    assert example.input_ids == [257, *b"Say it.\n> ", *b"a lo"]
    records = [Record(instruction=text, input="", output="yes") for text in ("short", "much longer")]
    assert len(tokenize(records, TEMPLATES["short"], ByteEncoder(), 12)) == 1
    assert "1 of 2 examples are left out: their prompts fill data.max_length=12" in caplog.text
    with pytest.raises(ValueError, match="data.max_length=8 is too short"):
        tokenize(records, TEMPLATES["short"], ByteEncoder(), 8)


@given(st.integers(1, 30).flatmap(lambda capacity: st.tuples(st.lists(st.integers(1, capacity)), st.just(capacity))))
def test_packing_keeps_every_item_once_and_rows_full(case: tuple[list[int], int]) -> None:
    lengths, capacity = case
    rows = pack(lengths, capacity)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    loads = [sum(lengths[index] for index in row) for row in rows]
    assert all(0 < load <= capacity for load in loads)
    # No two rows would fit into one.
    assert all(first + second > capacity for first, second in zip(sorted(loads), sorted(loads)[1:], strict=False))


def test_batches_number_the_positions_of_each_example() -> None:
    examples = [
        TokenizedExample(input_ids=[1, 2, 3], prompt_length=2),
        TokenizedExample(input_ids=[4, 5], prompt_length=1),
        TokenizedExample(input_ids=[6, 7, 8, 9], prompt_length=1),
    ]
    batch = Collator(pad_token_id=0, max_length=64)([[examples[0], examples[1]], [examples[2]]])
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5, 0, 0, 0], [6, 7, 8, 9, 0, 0, 0, 0]]
    ignored = -100
    assert batch["labels"].tolist() == [
        [ignored, ignored, 3, ignored, 5, ignored, ignored, ignored],
        [ignored, 7, 8, 9, ignored, ignored, ignored, ignored],
    ]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "set exactly one of data.train_file (got None) and data.dataset (got None)"),
        ({"train_file": "a", "batch_size": 0}, "data.batch_size=0 is not allowed; it must be at least 1"),
        (
            {"train_file": "a", "template": "chat"},
            "data.template='chat' is not allowed; it must be one of alpaca, short",
        ),
    ],
)
def test_wrong_data_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        InstructionData(**options)


# --- the bundled sample ------------------------------------------------------------------------------------------------------


def test_the_script_writes_the_bundled_files_again(tmp_path: Path) -> None:
    sample_script.write_sample(sample_script.make_sample(), tmp_path)
    for name in ("train.json", "val.json"):
        assert (tmp_path / name).read_bytes() == (SAMPLE / name).read_bytes(), name
    assert sum(file.stat().st_size for file in SAMPLE.iterdir()) < 500_000
