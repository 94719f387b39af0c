"""The LightningDataModule: instructions from JSON files or from Hugging Face, as packed or padded batches of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, random_split
from typing_extensions import override

from alpaca_task.packing import pack
from alpaca_task.prompts import find_template
from alpaca_task.records import Record, load_records, read_records
from alpaca_task.tokenized import IGNORED, TokenizedExample, tokenize
from alpaca_task.tokenizers import build_encoder
from common.byte_tokens import BYTE_TOKENIZER
from common.loading import check_at_least, check_one_source, data_loader, padded_length

SPLIT_SEED = 0
"""Of the held-out examples, apart from the run's seed, so that runs with other seeds can be compared."""

Row = list[TokenizedExample]
"""Examples that follow one another in one row of a batch."""


class Batch(TypedDict):
    """Rows as tensors, int64 [B, L]; B is the batch size, L the padded length.

    There is no attention mask: the model tells the examples of a row apart by the positions, which start anew with each of them, and
    padding is on the right, where nothing sees it.
    """

    input_ids: Tensor
    labels: Tensor
    """The tokens to be predicted at their own positions (the model shifts them); `IGNORED` for prompts and padding."""
    position_ids: Tensor


class Collator:
    """Makes a `Batch` of rows."""

    def __init__(self, pad_token_id: int, max_length: int) -> None:
        self.pad_token_id = pad_token_id
        self.max_length = max_length

    def __call__(self, rows: Sequence[Row]) -> Batch:
        longest = max(sum(len(example.input_ids) for example in row) for row in rows)
        width = padded_length(longest, self.max_length)
        input_ids = torch.full((len(rows), width), self.pad_token_id)
        labels = torch.full((len(rows), width), IGNORED)
        position_ids = torch.zeros((len(rows), width), dtype=torch.int64)
        for index, row in enumerate(rows):
            start = 0
            for example in row:
                end = start + len(example.input_ids)
                input_ids[index, start:end] = torch.tensor(example.input_ids)
                labels[index, start:end] = torch.tensor(example.labels)
                # Padding goes on counting: a row with one example then needs no mask but the causal one.
                position_ids[index, start:] = torch.arange(width - start)
                start = end
        return Batch(input_ids=input_ids, labels=labels, position_ids=position_ids)


class InstructionData(pl.LightningDataModule):
    """Instructions in Alpaca's format, from exactly one of `train_file` and `dataset`."""

    def __init__(
        self,
        *,
        train_file: str | None = None,
        val_file: str | None = None,
        dataset: str | None = None,
        val_size: int = 500,
        template: str = "alpaca",
        tokenizer: str = BYTE_TOKENIZER,
        max_length: int = 512,
        packing: bool = True,
        batch_size: int = 8,
        eval_batch_size: int = 8,
        num_workers: int = 0,
    ) -> None:
        """Say where the data is; nothing is read before `setup`.

        Args:
            train_file: JSON (or .jsonl) file in Alpaca's format.
            val_file: The same for validation; null holds out `val_size` examples.
            dataset: Name of a Hugging Face dataset with Alpaca's columns: tatsu-lab/alpaca.
            val_size: Examples that are held out for validation where there is no `val_file`; the same ones whatever the seed.
            template: "alpaca", the text that Alpaca was trained with, or "short".
            tokenizer: "bytes" (ours, nothing to download) or a tokenizer of transformers by name.
            max_length: Tokens in a row; longer examples are cut.
            packing: true: rows are filled with several examples, which do not see one another; false: one example a row, padded.
            batch_size: Rows per step and device in training.
            eval_batch_size: Rows per step and device in validation.
            num_workers: Processes that prepare batches; 0 prepares them in the training process.
        """
        super().__init__()
        self.save_hyperparameters()
        check_one_source(train_file=train_file, dataset=dataset)
        check_at_least(8, max_length=max_length)
        check_at_least(1, val_size=val_size, batch_size=batch_size, eval_batch_size=eval_batch_size)
        check_at_least(0, num_workers=num_workers)
        self.train_file = train_file
        self.val_file = val_file
        self.dataset = dataset
        self.val_size = val_size
        self.max_length = max_length
        self.packing = packing
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.num_workers = num_workers
        self.template = find_template(template)
        self.encoder = build_encoder(tokenizer)
        self.val_records: list[Record] = []
        """What validation reads, from `setup` on."""
        self._train_rows: list[Row] = []
        self._val_rows: list[Row] = []

    @property
    def vocab_size(self) -> int:
        """Number of token ids; the model is built with it."""
        return self.encoder.vocab_size

    @override
    def prepare_data(self) -> None:
        # One process per machine downloads; the others find the data in the cache.
        if self.dataset is not None:
            load_records(self.dataset)

    @override
    def setup(self, stage: str) -> None:
        train, self.val_records = self._load()
        self._val_rows = self._rows(self.val_records)
        if stage == "fit":
            self._train_rows = self._rows(train)

    def _load(self) -> tuple[list[Record], list[Record]]:
        """Records for training and for validation."""
        if self.train_file is not None:
            records = read_records(self.train_file)
        else:
            assert self.dataset is not None
            records = load_records(self.dataset)
        if self.val_file is not None:
            return records, read_records(self.val_file)
        if self.val_size >= len(records):
            raise ValueError(f"data.val_size={self.val_size} leaves nothing of {len(records)} examples to train with")
        generator = torch.Generator().manual_seed(SPLIT_SEED)
        train, held_out = random_split(records, [len(records) - self.val_size, self.val_size], generator)
        return list(train), list(held_out)

    def _rows(self, records: Sequence[Record]) -> list[Row]:
        examples = tokenize(records, self.template, self.encoder, self.max_length)
        if not self.packing:
            return [[example] for example in examples]
        packed = pack([len(example.input_ids) for example in examples], self.max_length)
        return [[examples[index] for index in row] for row in packed]

    @override
    def train_dataloader(self) -> DataLoader[Row]:
        # DeepSpeed's strategy asks for this loader's batch size before validation too, where no training data is read.
        return self._loader(self._train_rows, training=True)

    @override
    def val_dataloader(self) -> DataLoader[Row]:
        return self._loader(self._val_rows, training=False)

    def _loader(self, rows: Sequence[Row], *, training: bool) -> DataLoader[Any]:
        return data_loader(
            rows,
            Collator(self.encoder.pad_token_id, self.max_length),
            batch_size=self.batch_size if training else self.eval_batch_size,
            shuffle=training,
            num_workers=self.num_workers,
        )
