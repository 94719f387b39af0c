"""The Alpaca example's model, metrics, answers and printed steps."""

import math
import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from alpaca_task.data import Batch, Collator, InstructionData
from alpaca_task.generation import answer
from alpaca_task.metrics import ResponseMetrics
from alpaca_task.module import InstructionTuner
from alpaca_task.step_printer import StepPrinter
from alpaca_task.tokenized import TokenizedExample
from alpaca_task.tokenizers import ByteEncoder
from example_runs import EXAMPLES

SAMPLE = EXAMPLES / "data" / "alpaca"


def tiny_tuner(**overrides: Any) -> InstructionTuner:
    settings = {
        "vocab_size": 260,
        "max_length": 64,
        "tokenizer": "bytes",
        "layers": 2,
        "width": 32,
        "heads": 2,
        "lr": 1e-2,
    }
    return InstructionTuner(**(settings | overrides))


def built(**overrides: Any) -> InstructionTuner:
    torch.manual_seed(0)
    module = tiny_tuner(**overrides)
    module.configure_model()
    return module


def examples(*lengths: int) -> list[TokenizedExample]:
    torch.manual_seed(1)
    return [TokenizedExample(input_ids=torch.randint(256, (n,)).tolist(), prompt_length=n // 2) for n in lengths]


def collate(rows: list[list[TokenizedExample]]) -> Batch:
    return Collator(pad_token_id=256, max_length=64)(rows)


# --- packing and loss --------------------------------------------------------------------------------------------------------


def test_packed_examples_do_not_see_one_another() -> None:
    module = built().eval()
    three = examples(9, 20, 14)
    packed = module(collate([three]))[0]
    start = 0
    for example in three:
        end = start + len(example.input_ids)
        alone = module(collate([[example]]))[0, : len(example.input_ids)]
        assert torch.allclose(packed[start:end], alone, atol=1e-5)
        start = end


# --- half precision ----------------------------------------------------------------------------------------------------------


def test_metrics_equal_hand_computed_values_and_stay_float32() -> None:
    metrics = ResponseMetrics(3).to(torch.bfloat16)
    metrics.keep_float32()
    probabilities = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.7, 0.2], [0.2, 0.2, 0.6], [0.3, 0.4, 0.3]])
    targets = torch.tensor([0, 2, -100, 1])
    losses = -torch.tensor([0.5, 0.2, 0.4]).log()
    # In two batches of different size.
    metrics.update(losses[0], probabilities[:1].log(), targets[:1])
    metrics.update(losses[1:].mean(), probabilities[1:].log(), targets[1:])
    values = metrics.compute()
    assert {value.dtype for value in values.values()} == {torch.float32}
    assert float(values["loss"]) == pytest.approx(float(losses.mean()), rel=1e-6)
    assert float(values["perplexity"]) == pytest.approx(math.exp(float(losses.mean())), rel=1e-5)
    assert float(values["token_accuracy"]) == pytest.approx(2 / 3)
    metrics.update(losses[0], probabilities[:1].log(), targets[:1])
    assert float(metrics.compute()["token_accuracy"]) == 1.0  # starts afresh


# --- pretrained weights ------------------------------------------------------------------------------------------------------


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


def test_wrong_model_settings_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"model.width=30 is not allowed; it must be a multiple of twice model.heads=2"
    ):
        built(width=30, heads=2)


# --- answers -----------------------------------------------------------------------------------------------------------------


def test_answers_do_not_depend_on_the_batch_and_continue_the_prompt() -> None:
    module, encoder = built().eval(), ByteEncoder()
    prompts = ["Say this again.\nn", "Count.\n> "]
    together = answer(module.model, encoder, prompts, max_prompt=64, max_new_tokens=6)
    alone = [answer(module.model, encoder, [prompt], max_prompt=64, max_new_tokens=6)[0] for prompt in prompts]
    assert together == alone

    ids = encoder.encode_prompts(prompts)[0]
    for _ in range(6):
        row = TokenizedExample(input_ids=ids, prompt_length=1)
        ids = [*ids, int(module(collate([[row]]))[0, len(ids) - 1].argmax())]
    generated = ids[-6:]
    expected = generated[: generated.index(259)] if 259 in generated else generated
    assert together[0] == encoder.decode(expected)


# --- printed steps -----------------------------------------------------------------------------------------------------------


class Rows(InstructionData):
    """The bundled validation set, some of it to train with."""

    def __init__(self, **options: Any) -> None:
        super().__init__(train_file=str(SAMPLE / "val.json"), val_size=8, template="short", max_length=64, **options)


QUIET: dict[str, Any] = dict.fromkeys(
    ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
)


class Losses(pl.Callback):
    """Loss of each micro-batch."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *_: Any) -> None:
        self.seen.append(float(outputs["loss"]) * trainer.accumulate_grad_batches)


@pytest.mark.parametrize(
    ("accelerator", "accumulate", "every", "expected"),
    [
        ("cpu", 1, 1, [1, 2, 3, 4]),
        ("cpu", 2, 2, [2, 4]),
        pytest.param("gpu", 1, 1, [1, 2, 3, 4], marks=pytest.mark.gpu),
    ],
)
def test_steps_are_printed_with_their_loss_and_time(
    capsys: pytest.CaptureFixture[str], accelerator: str, accumulate: int, every: int, expected: list[int]
) -> None:
    losses = Losses()
    trainer = pl.Trainer(
        accelerator=accelerator,
        devices=1,
        max_steps=4,
        accumulate_grad_batches=accumulate,
        val_check_interval=2,
        limit_val_batches=1,
        callbacks=[StepPrinter(every_n_steps=every), losses],
        **QUIET,
    )
    trainer.fit(tiny_tuner(), Rows(batch_size=2))
    lines = re.findall(r"^Step (\d+), Loss: (\d+\.\d{4}), Time: (\d+\.\d\d)ms$", capsys.readouterr().out, re.MULTILINE)
    assert [int(number) for number, _, _ in lines] == expected
    means = [sum(losses.seen[i * accumulate : (i + 1) * accumulate]) / accumulate for i in range(4)]
    assert [float(loss) for _, loss, _ in lines] == pytest.approx([means[n - 1] for n in expected], abs=1e-4)
    assert all(float(time) > 0 for _, _, time in lines)


def test_bfloat16_training_validates_in_float32() -> None:
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        precision="bf16-true",
        max_steps=2,
        **QUIET,
    )
    module = tiny_tuner()
    data = Rows(batch_size=2)
    trainer.fit(module, data)
    trainer.validate(module, data, verbose=False)
    assert {parameter.dtype for parameter in module.parameters()} == {torch.bfloat16}
    loss, perplexity = (trainer.callback_metrics[f"val/{name}"] for name in ("loss", "perplexity"))
    assert loss.dtype == torch.float32
    assert float(loss.bfloat16()) != float(loss)
    assert math.exp(float(loss)) == pytest.approx(float(perplexity), rel=1e-4)
    assert module.model.model.rotary_emb.inv_freq.dtype == torch.float32
