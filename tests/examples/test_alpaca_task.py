"""The Alpaca example's parts: records, prompts, tokens, packed batches, metrics, network, answers, printed steps."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from alpaca_task.data import Batch, Collator
from alpaca_task.metrics import ResponseMetrics
from alpaca_task.module import InstructionTuner
from alpaca_task.packing import pack
from alpaca_task.prompts import TEMPLATES
from alpaca_task.records import Record
from alpaca_task.tokenized import TokenizedExample, tokenize
from alpaca_task.tokenizers import ByteEncoder, PretrainedEncoder
from tiny_models import save_tiny_model


def test_only_response_and_end_are_learned_and_long_examples_cut(caplog: pytest.LogCaptureFixture) -> None:
    def tokenized(max_length: int, *records: tuple[str, str]) -> list[TokenizedExample]:
        made = [Record(instruction=instruction, input="", output=output) for instruction, output in records]
        return tokenize(made, TEMPLATES["short"], ByteEncoder(), max_length)

    prompt = [257, *b"Say it.\n> "]
    (example,) = tokenized(64, ("Say it.", "yes"))
    assert example.input_ids == [*prompt, *b"yes", 259]
    assert example.labels == [-100] * len(prompt) + [*b"yes", 259]
    (example,) = tokenized(15, ("Say it.", "a long answer"))
    assert example.input_ids == [*prompt, *b"a lo"], "an end token would teach to stop there"
    records = ("short", "yes"), ("much longer", "yes")
    assert len(tokenized(12, *records)) == 1
    assert "1 of 2 examples are left out: their prompts fill data.max_length=12" in caplog.text
    with pytest.raises(ValueError, match="data.max_length=8 is too short"):
        tokenized(8, *records)


@given(st.integers(1, 30).flatmap(lambda capacity: st.tuples(st.lists(st.integers(1, capacity)), st.just(capacity))))
def test_packing_keeps_every_item_once_and_rows_full(case: tuple[list[int], int]) -> None:
    lengths, capacity = case
    rows = pack(lengths, capacity)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    loads = sorted(sum(lengths[index] for index in row) for row in rows)
    assert all(0 < load <= capacity for load in loads)
    # No two rows would fit into one.
    assert len(loads) < 2 or loads[0] + loads[1] > capacity


def collate(*rows: list[TokenizedExample]) -> Batch:
    return Collator(pad_token_id=256, max_length=64)(rows)


def test_metrics_equal_hand_computed_values_and_stay_float32() -> None:
    metrics = ResponseMetrics().to(torch.bfloat16)
    metrics.keep_float32()
    probabilities = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.7, 0.2], [0.2, 0.2, 0.6], [0.3, 0.4, 0.3]])
    targets = torch.tensor([0, 2, -100, 1])
    losses = -torch.tensor([0.5, 0.2, 0.4]).log()
    # In two batches of different size.
    metrics.update(losses[0], probabilities[:1].log(), targets[:1])
    metrics.update(losses[1:].mean(), probabilities[1:].log(), targets[1:])
    values = metrics.compute()
    assert {value.dtype for value in values.values()} == {torch.float32}
    mean = float(losses.mean())
    expected = {"loss": mean, "perplexity": math.exp(mean), "token_accuracy": 2 / 3}
    assert {name: float(value) for name, value in values.items()} == pytest.approx(expected, rel=1e-5)
    metrics.update(losses[0], probabilities[:1].log(), targets[:1])
    assert float(metrics.compute()["token_accuracy"]) == 1.0  # starts afresh


def built(**overrides: Any) -> InstructionTuner:
    torch.manual_seed(0)
    settings = {"vocab_size": 260, "max_length": 64, "tokenizer": "bytes", "layers": 2, "width": 32, "heads": 2}
    module = InstructionTuner(**(settings | overrides), lr=1e-2)
    module.configure_model()
    return module


def test_packed_examples_do_not_see_one_another() -> None:
    module = built().eval()
    three = [TokenizedExample(input_ids=torch.randint(256, (n,)).tolist(), prompt_length=1) for n in (9, 20, 14)]
    alone = [module(collate([example]))[0, : len(example.input_ids)] for example in three]
    torch.testing.assert_close(module(collate(three))[0, :43], torch.cat(alone), atol=1e-5, rtol=0)


def test_a_model_may_know_more_tokens_than_its_tokenizer(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path, "llama", vocab_size=320)
    encoder = PretrainedEncoder(str(folder))
    assert encoder.vocab_size < 320
    module = built(pretrained=str(folder), tokenizer=str(folder), vocab_size=encoder.vocab_size, max_length=32).eval()
    (ids,) = encoder.encode_prompts(["the plot is dull"])
    batch = collate([TokenizedExample(input_ids=ids, prompt_length=1)])
    module.validation_step(batch, 0)
    predicted = module(batch)[0].argmax(-1)
    right = [int(predicted[i - 1]) == ids[i] for i in range(1, len(ids))]
    assert float(module.validation_metrics.compute()["token_accuracy"]) == pytest.approx(sum(right) / len(right))


def test_pretrained_weights_are_taken_and_checked(tiny_llama: Path) -> None:
    from transformers import AutoTokenizer, LlamaForCausalLM

    name = str(tiny_llama)
    settings = {"pretrained": name, "tokenizer": name, "vocab_size": len(AutoTokenizer.from_pretrained(name))}
    module = built(**settings)
    stored = LlamaForCausalLM.from_pretrained(tiny_llama)
    assert torch.equal(module.model.lm_head.weight, stored.lm_head.weight.float())
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
    assert all(part.training for part in module.modules())  # or there would be no activation checkpointing
    with pytest.raises(ValueError, match="data.max_length=512 exceeds the 256 positions"):
        built(**settings, max_length=512)
    with pytest.raises(ValueError, match=r"knows \d+ tokens but data.tokenizer='bytes' has 260; set data.tokenizer="):
        built(**settings | {"tokenizer": "bytes", "vocab_size": 260})
