"""The LightningModule: loss on responses, metrics, optimizer and scheduler."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from transformers import PreTrainedModel
from typing_extensions import override

from alpaca_task.data import Batch, InstructionData
from alpaca_task.float32_buffers import Float32Buffers
from alpaca_task.metrics import ResponseMetrics
from alpaca_task.model import build_llama, checkpoint_activations, load_llama, next_token_loss
from common.optimizers import adamw_with_warmup, check_warmup_ratio

CONFIG_KEY = "transformers_config"
"""Where a checkpoint has the configuration of its network."""


class InstructionTuner(pl.LightningModule):
    """Trains a causal language model to answer instructions."""

    model: PreTrainedModel
    """From `configure_model` on."""

    def __init__(
        self,
        *,
        vocab_size: int,
        max_length: int,
        tokenizer: str,
        pretrained: str | None = None,
        layers: int = 4,
        width: int = 128,
        heads: int = 4,
        attention: str | None = None,
        activation_checkpointing: bool = False,
        lr: float = 2e-5,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        warmup_ratio: float = 0.03,
    ) -> None:
        """Say what to train; on the command line the first three arguments follow from the data module.

        Args:
            vocab_size: Number of token ids of the tokenizer.
            max_length: Tokens in a row.
            tokenizer: Name of the tokenizer, which has to fit pretrained weights.
            pretrained: Name or folder of a causal language model in transformers; null builds a Llama with random weights.
            layers: Transformer blocks. This and the next two are for random weights only.
            width: Size of the embeddings; the feed-forward layers are 2.7 times as wide.
            heads: Attention heads.
            attention: How pretrained weights compute attention, such as "sdpa"; null leaves it to transformers. "flash_attention_2"
                needs data.packing=false, or batches of one row.
            activation_checkpointing: Keep only the inputs of the blocks and compute the rest again in backward.
            lr: Learning rate of AdamW at the end of the warm-up.
            betas: AdamW's decay rates of the first and second moment, per step.
            eps: AdamW's term added to the denominator.
            weight_decay: AdamW's decay of matrices; the weights of norms have none.
            warmup_ratio: Share of all steps in which the learning rate rises from 0; then it falls linearly to 0.
        """
        super().__init__()
        self.save_hyperparameters()
        check_warmup_ratio(warmup_ratio)
        self.validation_metrics = ResponseMetrics()
        self._float32_buffers: Float32Buffers | None = None

    @override
    def setup(self, stage: str) -> None:
        data, attention = self.trainer.datamodule, self.hparams["attention"]
        if not isinstance(data, InstructionData) or not data.packing or "flash" not in (attention or ""):
            return
        # Of several rows, transformers' flash attention ignores where examples begin.
        if (data.batch_size, data.eval_batch_size) != (1, 1):
            raise ValueError(
                f"model.attention={attention!r} keeps the examples of a row apart only in batches of one row, got"
                f" data.batch_size={data.batch_size} and data.eval_batch_size={data.eval_batch_size}; set both to 1,"
                " or model.attention=sdpa, or data.packing=false"
            )

    @override
    def configure_model(self) -> None:
        # Not in __init__: only here torch's default dtype is that of the training, so that 7e9 weights are never float32.
        if self._float32_buffers is not None:
            return
        settings = self.hparams
        if settings["pretrained"] is None:
            self.model = build_llama(
                layers=settings["layers"],
                width=settings["width"],
                heads=settings["heads"],
                vocab_size=settings["vocab_size"],
                max_length=settings["max_length"],
            )
        else:
            self.model = load_llama(
                settings["pretrained"],
                tokenizer=settings["tokenizer"],
                vocab_size=settings["vocab_size"],
                max_length=settings["max_length"],
                attention=settings["attention"],
                stage_3=self._stage_3(),
            )
        if settings["activation_checkpointing"]:
            checkpoint_activations(self.model)
        self._float32_buffers = Float32Buffers(self.model)

    def _stage_3(self) -> dict[str, Any] | None:
        """DeepSpeed's configuration where it divides the weights."""
        # Without a Trainer, `self.trainer` is an error.
        strategy = None if self._trainer is None else self.trainer.strategy
        return strategy.config if isinstance(strategy, DeepSpeedStrategy) and strategy.zero_stage_3 else None

    @override
    def forward(self, batch: Batch) -> Tensor:
        """Logits [B, L, V] in the dtype of the weights."""
        # Without a mask transformers tells the examples of a row apart by their positions; a cache would prevent that.
        output = self.model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False)
        logits: Tensor = output.logits
        return logits

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss, _, _ = next_token_loss(self(batch), batch["labels"])
        self.log("train/loss", loss, prog_bar=True)
        return loss

    @override
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.validation_metrics.update(*next_token_loss(self(batch), batch["labels"]))

    @override
    def on_fit_start(self) -> None:
        self._keep_float32()

    @override
    def on_validation_start(self) -> None:
        self._keep_float32()

    @override
    def on_validation_epoch_end(self) -> None:
        values = {f"val/{name}": value for name, value in self.validation_metrics.compute().items()}
        # torchmetrics has already put all ranks together; sync_dist only tells Lightning so.
        self.log_dict(values, prog_bar=True, sync_dist=True)

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint[CONFIG_KEY] = self.model.config.to_dict()

    def _keep_float32(self) -> None:
        """Undo what the conversion to half precision did to everything but weights."""
        assert self._float32_buffers is not None, "Lightning calls configure_model first"
        self._float32_buffers.put_back(self.model)
        self.validation_metrics.keep_float32()

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
