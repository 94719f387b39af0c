"""The LightningModule: losses, metrics, optimizer and scheduler of one GLUE task."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from typing_extensions import override

from common.optimizers import adamw_with_warmup, check_warmup_ratio
from glue_task.data import Batch, unpack_scores
from glue_task.metrics import TaskMetrics
from glue_task.model import build_model, language_model_loss, load_model
from glue_task.tasks import find_task


class GlueClassifier(pl.LightningModule):
    """A classifier, or for STS-B a regressor."""

    def __init__(
        self,
        *,
        task: str,
        vocab_size: int,
        pad_token_id: int,
        max_length: int,
        pretrained: str | None = None,
        layers: int = 2,
        width: int = 96,
        heads: int = 8,
        dropout: float = 0.0,
        lm_weight: float = 0.0,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        warmup_ratio: float = 0.1,
    ) -> None:
        """Build the model; on the command line the first four arguments follow from the data module.

        Args:
            task: Name of the GLUE task, which decides the head, the loss and the metrics.
            vocab_size: Number of token ids of the tokenizer.
            pad_token_id: Token id of padding.
            max_length: Longest input in tokens.
            pretrained: Name or folder of a model in transformers; null builds a GPT-2 with random weights.
            layers: Transformer blocks. This and the next four are for random weights only.
            width: Size of the embeddings; the feed-forward layers are four times as wide.
            heads: Attention heads; they divide the width.
            dropout: Share of activations dropped in training, everywhere GPT-2 has dropout. Pretrained models have their own.
            lm_weight: Weight of the language-model loss that is added to the task's loss, the auxiliary objective of the first GPT
                (Radford et al. 2018, section 3.2). It teaches random weights what words are; 0 leaves it out.
            lr: Learning rate of AdamW at the end of the warm-up.
            betas: AdamW's decay rates of the first and second moment, per step.
            eps: AdamW's term added to the denominator.
            weight_decay: AdamW's decay of matrices; biases and LayerNorm weights have none.
            warmup_ratio: Share of all steps in which the learning rate rises from 0; then it falls linearly to 0.
        """
        super().__init__()
        self.save_hyperparameters()
        check_warmup_ratio(warmup_ratio)
        if lm_weight < 0:
            raise ValueError(f"model.lm_weight={lm_weight} is not allowed; it must be 0 or more")
        self.task = find_task(task)
        sizes = {"pad_token_id": pad_token_id, "max_length": max_length}
        if pretrained is None:
            shape = {"layers": layers, "width": width, "heads": heads, "dropout": dropout, "vocab_size": vocab_size}
            self.model = build_model(self.task.num_outputs, **shape, **sizes)
        else:
            self.model = load_model(pretrained, self.task.num_outputs, **sizes)
        self._lm_weight = lm_weight if pretrained is None else 0.0
        self.validation_metrics = TaskMetrics(self.task)
        self.test_metrics = TaskMetrics(self.task)

    @override
    def forward(self, batch: Batch) -> Tensor:
        """Predicted classes, int64 [B], or scores, float32 [B]."""
        return self._decide(self._outputs(batch))

    def _outputs(self, batch: Batch) -> Tensor:
        """What the head gives, float32 [B, number of outputs]."""
        return self.model(**batch["inputs"]).logits.float()

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        found = self.model(**batch["inputs"], output_hidden_states=self._lm_weight > 0)
        loss = self._task_loss(found.logits.float(), self._labels(batch))
        self.log("train/loss", loss, prog_bar=True)
        if self._lm_weight:
            lm_loss = language_model_loss(self.model, found.hidden_states[-1], batch["inputs"])
            self.log("train/lm_loss", lm_loss, prog_bar=True)
            loss = loss + self._lm_weight * lm_loss
        return loss

    @override
    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._update_metrics(self.validation_metrics, batch, dataloader_idx)

    @override
    def test_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._update_metrics(self.test_metrics, batch, dataloader_idx)

    @override
    def predict_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> tuple[Tensor, Tensor]:
        """Indices of the examples, int64 [B], and their predicted classes or scores, [B]."""
        return batch["indices"], self(batch)

    @override
    def on_validation_epoch_end(self) -> None:
        self._log_metrics("val", self.validation_metrics)

    @override
    def on_test_epoch_end(self) -> None:
        self._log_metrics("test", self.test_metrics)

    def _update_metrics(self, metrics: TaskMetrics, batch: Batch, set_index: int) -> None:
        outputs, labels = self._outputs(batch), self._labels(batch)
        metrics.update(set_index, self._task_loss(outputs, labels), self._decide(outputs), labels)

    def _log_metrics(self, prefix: str, metrics: TaskMetrics) -> None:
        values = {f"{prefix}/{name}": value for name, value in metrics.compute().items()}
        # torchmetrics has already put all ranks together; sync_dist only tells Lightning so.
        self.log_dict(values, prog_bar=True, sync_dist=True)

    def _labels(self, batch: Batch) -> Tensor:
        return unpack_scores(batch["labels"]) if self.task.is_regression else batch["labels"]

    def _task_loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        if self.task.is_regression:
            return nn.functional.mse_loss(outputs.squeeze(-1), labels)
        return nn.functional.cross_entropy(outputs, labels)

    def _decide(self, outputs: Tensor) -> Tensor:
        return outputs.squeeze(-1) if self.task.is_regression else outputs.argmax(-1)

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        """See `adamw_with_warmup`."""
        return adamw_with_warmup(
            self.parameters(),
            lr=self.hparams["lr"],
            betas=self.hparams["betas"],
            eps=self.hparams["eps"],
            weight_decay=self.hparams["weight_decay"],
            warmup_ratio=self.hparams["warmup_ratio"],
            steps=int(self.trainer.estimated_stepping_batches),
        )
