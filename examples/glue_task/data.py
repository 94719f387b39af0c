"""The LightningDataModule: examples from TSV files or from Hugging Face, cut into padded batches of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase
from transformers.trainer_pt_utils import LengthGroupedSampler
from typing_extensions import NotRequired, override

from common.loading import check_at_least, check_one_source, data_loader
from glue_task.hub import load_hub, load_split, split_name
from glue_task.tasks import EvaluationSet, Example, GlueTask, Stage, find_task
from glue_task.tokenizers import byte_tokenizer, encode, pretrained_tokenizer
from glue_task.tsv import find_folder, read_tsv, split_path


class Batch(TypedDict):
    """Examples as tensors; B is the batch size."""

    inputs: dict[str, Tensor]
    """See `encode`."""
    indices: Tensor
    """int64 [B], `Example.index`."""
    labels: NotRequired[Tensor]
    """Class indices, int64 [B]; for regression the bits of the float32 scores, int32 [B] (`pack_scores`). Absent if unknown."""


def pack_scores(scores: Sequence[float]) -> Tensor:
    """Scores as the bits of their float32 value, int32 [B].

    DeepSpeed's strategy casts every floating-point tensor of a batch to the training precision, and a true score rounded to
    bfloat16 would falsify the metrics. Integers pass unharmed.
    """
    return torch.tensor(scores, dtype=torch.float32).view(torch.int32)


def unpack_scores(labels: Tensor) -> Tensor:
    """The float32 scores that `pack_scores` hid."""
    return labels.view(torch.float32)


class Collator:
    """Makes a `Batch` of a list of examples."""

    def __init__(self, task: GlueTask, tokenizer: PreTrainedTokenizerBase, max_length: int) -> None:
        self.task = task
        self.tokenizer = tokenizer
        self.max_length = max_length

    def __call__(self, examples: Sequence[Example]) -> Batch:
        seconds = [example.second for example in examples if example.second is not None]
        batch = Batch(
            inputs=encode(self.tokenizer, [example.first for example in examples], seconds or None, self.max_length),
            indices=torch.tensor([example.index for example in examples]),
        )
        labels = [example.label for example in examples if example.label is not None]
        if len(labels) == len(examples):
            batch["labels"] = (
                pack_scores(labels) if self.task.is_regression else torch.tensor(labels, dtype=torch.int64)
            )
        return batch


class GlueDataModule(pl.LightningDataModule):
    """One GLUE task, from exactly one of `data_dir` and `dataset`."""

    def __init__(
        self,
        *,
        task: str = "SST-2",
        data_dir: str | None = None,
        dataset: str | None = None,
        pretrained: str | None = None,
        max_length: int = 128,
        batch_size: int = 32,
        eval_batch_size: int = 128,
        num_workers: int = 0,
        group_by_length: bool = False,
    ) -> None:
        """Say where the data is; nothing is read before `setup`.

        Args:
            task: CoLA, SST-2, MRPC, QQP, STS-B, MNLI, QNLI, RTE or WNLI.
            data_dir: Folder of the task's TSV files in GLUE's layout, or the folder of all tasks.
            dataset: Name of a Hugging Face dataset with GLUE's configurations: nyu-mll/glue.
            pretrained: Name or folder of the model whose tokenizer is used; null: bytes, where nothing is downloaded.
            max_length: Longest input in tokens; longer ones are cut.
            batch_size: Training examples per step and device.
            eval_batch_size: Examples per step and device of validate, test and predict.
            num_workers: Processes that prepare batches; 0 prepares them in the training process.
            group_by_length: Whether a training batch has examples of about the same number of tokens, which leaves little padding.
        """
        super().__init__()
        check_one_source(data_dir=data_dir, dataset=dataset)
        check_at_least(8, max_length=max_length)
        check_at_least(1, batch_size=batch_size, eval_batch_size=eval_batch_size)
        check_at_least(0, num_workers=num_workers)
        self.task = find_task(task)
        self.data_dir = data_dir
        self.dataset = dataset
        self.max_length = max_length
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.num_workers = num_workers
        self.group_by_length = group_by_length
        self.tokenizer = byte_tokenizer() if pretrained is None else pretrained_tokenizer(pretrained)
        self._examples: dict[tuple[Stage, str], list[Example]] = {}

    @property
    def vocab_size(self) -> int:
        """Number of token ids; the model is built with it."""
        return len(self.tokenizer)

    @property
    def pad_token_id(self) -> int:
        """Token id of padding; the model is built with it."""
        return int(self.tokenizer.pad_token_id)

    @override
    def prepare_data(self) -> None:
        # One process per machine downloads; the others find the data in the cache.
        if self.dataset is not None:
            load_split(self.dataset, self.task, split_name("train", self.task.evaluation_sets[0]))

    @override
    def setup(self, stage: str) -> None:
        needed: dict[str, tuple[Stage, ...]] = {
            "fit": ("train", "dev"),
            "validate": ("dev",),
            "test": ("test",),
            "predict": ("test",),
        }
        for split in needed[stage]:
            for evaluation_set in self.task.evaluation_sets[: 1 if split == "train" else None]:
                key = split, evaluation_set.name
                if key not in self._examples:
                    self._examples[key] = self._load(split, evaluation_set)
        if stage == "test":
            self._require_labels()

    def _load(self, stage: Stage, evaluation_set: EvaluationSet) -> list[Example]:
        if self.dataset is not None:
            return load_hub(self.dataset, self.task, stage, evaluation_set)
        assert self.data_dir is not None
        path = split_path(find_folder(self.data_dir, self.task), stage, evaluation_set)
        return read_tsv(path, self.task, stage)

    def _require_labels(self) -> None:
        for evaluation_set in self.task.evaluation_sets:
            if any(example.label is None for example in self._examples["test", evaluation_set.name]):
                raise ValueError(
                    f"the test set of {self.task.name} has no labels (GLUE keeps them private), so `test` cannot score it; use "
                    "`validate` for the development set, or `predict` for a submission file"
                )

    @override
    def train_dataloader(self) -> DataLoader[Example]:
        # DeepSpeed's strategy asks for this loader's batch size before validate, test and predict too, where no training data is read.
        return self._loader(self._examples.get(("train", self.task.evaluation_sets[0].name), []), training=True)

    @override
    def val_dataloader(self) -> list[DataLoader[Example]]:
        return self._evaluation_loaders("dev")

    @override
    def test_dataloader(self) -> list[DataLoader[Example]]:
        return self._evaluation_loaders("test")

    @override
    def predict_dataloader(self) -> list[DataLoader[Example]]:
        return self._evaluation_loaders("test")

    def _evaluation_loaders(self, stage: Stage) -> list[DataLoader[Example]]:
        return [self._loader(self._examples[stage, one.name], training=False) for one in self.task.evaluation_sets]

    def _loader(self, examples: Sequence[Example], *, training: bool) -> DataLoader[Any]:
        sampler = None
        if training and self.group_by_length and examples:
            pairs = [(example.first, example.second or "") for example in examples]
            sampler = LengthGroupedSampler(self.batch_size, lengths=self.tokenizer(pairs, return_length=True)["length"])
        return data_loader(
            examples,
            Collator(self.task, self.tokenizer, self.max_length),
            batch_size=self.batch_size if training else self.eval_batch_size,
            shuffle=training,
            sampler=sampler,
            num_workers=self.num_workers,
        )
