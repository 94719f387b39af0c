"""The LightningModule: a GPT-2 classifier (or regressor, for STS-B), its loss, metrics, optimizer and scheduler."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from transformers import GPT2Config, GPT2ForSequenceClassification, get_linear_schedule_with_warmup
from typing_extensions import override

from glue_task.data import Batch, unpack_scores
from glue_task.metrics import TaskMetrics
from glue_task.tasks import find_task


class GlueClassifier(pl.LightningModule):
    """GPT-2 with a linear head on the last token of the text that is not padding."""

    def __init__(
        self,
        *,
        task: str,
        vocab_size: int,
        pad_token_id: int,
        max_length: int,
        pretrained: str | None = None,
        layers: int = 3,
        width: int = 128,
        heads: int = 4,
        dropout: float = 0.0,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        warmup_ratio: float = 0.1,
    ) -> None:
        """Build the model; the first four arguments follow from the data module when the command line is used.

        Args:
            task: Name of the GLUE task, which decides the head, the loss and the metrics.
            vocab_size: Number of token ids of the tokenizer.
            pad_token_id: Token id of padding.
            max_length: Longest input in tokens.
            pretrained: Name or folder of a GPT-2 model in transformers; null builds one with random weights.
            layers: Transformer blocks. This and the next two are for random weights only.
            width: Size of the embeddings; the feed-forward layers are four times as wide.
            heads: Attention heads; they divide the width.
            dropout: Share of activations dropped in training, everywhere GPT-2 has dropout.
            lr: Learning rate of AdamW at the end of the warm-up.
            betas: AdamW's decay rates of the first and second moment, per step.
            eps: AdamW's term added to the denominator.
            weight_decay: AdamW's decay of matrices; biases and LayerNorm weights have none.
            warmup_ratio: Share of all steps in which the learning rate rises from 0; then it falls linearly to 0.
        """
        super().__init__()
        self.save_hyperparameters()
        if not 0 <= warmup_ratio <= 1:
            raise ValueError(f"model.warmup_ratio={warmup_ratio} is not allowed; it must lie between 0 and 1")
        if width % heads:
            raise ValueError(f"model.width={width} is not allowed; it must be a multiple of model.heads={heads}")
        self.task = find_task(task)
        if pretrained is None:
            config = GPT2Config(
                vocab_size=vocab_size,
                n_positions=max_length,
                n_embd=width,
                n_layer=layers,
                n_head=heads,
                resid_pdrop=dropout,
                embd_pdrop=dropout,
                attn_pdrop=dropout,
                num_labels=self.task.num_outputs,
                pad_token_id=pad_token_id,
                # GPT-2's own start and end tokens do not exist in another tokenizer.
                bos_token_id=None,
                eos_token_id=None,
                use_cache=False,
            )
            self.model = GPT2ForSequenceClassification(config)
        else:
            self.model = load_pretrained(
                pretrained, self.task.num_outputs, dropout, vocab_size=vocab_size, pad_token_id=pad_token_id, max_length=max_length
            )
        self.validation_metrics = TaskMetrics(self.task)
        self.test_metrics = TaskMetrics(self.task)

    @override
    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Logits or scores, float32 [B, number of outputs], of token ids int64 [B, L] padded on the right."""
        logits: Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
        return logits.float()

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss, _, labels = self._evaluate(batch)
        self.log("train/loss", loss, prog_bar=True, batch_size=len(labels))
        return loss

    @override
    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.validation_metrics.update(dataloader_idx, *self._evaluate(batch))

    @override
    def test_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.test_metrics.update(dataloader_idx, *self._evaluate(batch))

    @override
    def predict_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> tuple[Tensor, Tensor]:
        """Indices of the examples, int64 [B], and their predicted classes or scores, [B]."""
        return batch["indices"], self._decide(self(batch["input_ids"], batch["attention_mask"]))

    @override
    def on_validation_epoch_end(self) -> None:
        self._log_metrics("val", self.validation_metrics)

    @override
    def on_test_epoch_end(self) -> None:
        self._log_metrics("test", self.test_metrics)

    def _log_metrics(self, prefix: str, metrics: TaskMetrics) -> None:
        values = {f"{prefix}/{name}": value for name, value in metrics.compute().items()}
        # The values are already those of all ranks; sync_dist only keeps Lightning from warning that they might not be.
        self.log_dict(values, prog_bar=True, sync_dist=True)

    def _evaluate(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Mean loss (scalar), predictions [B] and labels [B] of a labelled batch."""
        outputs = self(batch["input_ids"], batch["attention_mask"])
        if self.task.is_regression:
            labels = unpack_scores(batch["labels"])
            loss = nn.functional.mse_loss(outputs.squeeze(-1), labels)
        else:
            labels = batch["labels"]
            loss = nn.functional.cross_entropy(outputs, labels)
        return loss, self._decide(outputs.detach()), labels

    def _decide(self, outputs: Tensor) -> Tensor:
        return outputs.squeeze(-1) if self.task.is_regression else outputs.argmax(-1)

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": self.hparams["weight_decay"]},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(
            groups, lr=self.hparams["lr"], betas=tuple(self.hparams["betas"]), eps=self.hparams["eps"]
        )
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = get_linear_schedule_with_warmup(optimizer, int(steps * self.hparams["warmup_ratio"]), steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def load_pretrained(
    name: str, num_outputs: int, dropout: float, *, vocab_size: int, pad_token_id: int, max_length: int
) -> GPT2ForSequenceClassification:
    """GPT-2 weights by name or folder, with a new head of `num_outputs`; ValueError where model and tokenizer do not fit."""
    settings: dict[str, Any] = {"num_labels": num_outputs, "pad_token_id": pad_token_id}
    settings |= {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    config = GPT2Config.from_pretrained(name, **settings)
    if config.vocab_size < vocab_size:
        raise ValueError(
            f"model.pretrained={name!r} knows {config.vocab_size} tokens, its tokenizer gives {vocab_size}; set data.tokenizer to {name!r}"
        )
    if config.n_positions < max_length:
        raise ValueError(f"data.max_length={max_length} is more than the {config.n_positions} positions of model.pretrained={name!r}")
    # from_pretrained keeps the dtype of the file; the strategy's precision, not the file, decides how we train.
    return GPT2ForSequenceClassification.from_pretrained(name, config=config, dtype=torch.float32)
