"""The arguments of a strategy: keys of ZenFlow and a DeepSpeed configuration, from a source and from keywords."""

import inspect
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_zenflow.config import KEYS, ZenFlowConfig, check_keys
from lightning_zenflow.deepspeed.config import (
    ConfigSource,
    offloads_parameters,
    prepare_deepspeed_config,
    refuse_options,
    resolve_config,
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a user has given a strategy."""

    zenflow: ZenFlowConfig
    """Without what a DeepSpeed configuration or a training changes (`beside`, `of_one_training`)."""
    deepspeed: dict[str, Any] | None
    """The DeepSpeed configuration, if there is one, without keys of ZenFlow."""
    chooses_buckets: bool
    """Whether the size of DeepSpeed's buckets is chosen for the model."""

    def beside(self, config: Mapping[str, Any]) -> "Settings":
        """These beside the prepared DeepSpeed config; logs keys of ZenFlow that have no effect there."""
        if not offloads_parameters(config):
            return self
        if unused := self.zenflow.without_effect_on_host:
            rank_zero_info(
                f"ZenFlow: {', '.join(unused)} has no effect with parameters in host memory: nothing is late"
            )
        return replace(self, zenflow=self.zenflow.with_weights_on_host())

    def config_under(self, config: Mapping[str, Any], trainer: pl.Trainer, precision: str) -> dict[str, Any]:
        """`prepare_deepspeed_config` with the Trainer's values; logs that there is no clipping where plain DeepSpeed clips."""
        users = self.deepspeed
        if users is not None and users.get("gradient_clipping") is None and trainer.gradient_clip_val is None:
            rank_zero_info(
                "ZenFlowStrategy does not clip, as nothing sets a norm. Plain DeepSpeed since 0.19.3 clips by a norm of 1.0 then:"
                " set gradient_clipping to 1.0 for the same, to 0 for none"
            )
        # DeepSpeed's throughput log alone reads it. Lightning asks for the training data once more, which not all loaders have.
        return prepare_deepspeed_config(
            {"train_micro_batch_size_per_gpu": 1, **config},
            accumulate_grad_batches=trainer.accumulate_grad_batches,
            gradient_clip_val=trainer.gradient_clip_val,
            precision=precision,
        )


def read_settings(config: ConfigSource, options: Mapping[str, Any], lightnings: type[Any], **keys: Any) -> Settings:
    """Reads and checks the arguments of a strategy.

    Args:
        config: source of the keys that are absent; None: the environment variable by which Lightning takes a DeepSpeed configuration, if
            it is set.
        options: keywords of Lightning's strategy.
        lightnings: that strategy.
        **keys: of `ZenFlowConfig`; None: absent.

    Raises:
        ValueError: a key has a value that is not allowed.
        MisconfigurationException: a keyword is unknown; `config` cannot be read, or something asks for what ZenFlow does not support.
    """
    if config is None:
        config = os.environ.get(lightnings.DEEPSPEED_ENV_VAR)
    check_keys(options, (*KEYS, *inspect.signature(lightnings).parameters), "ZenFlowStrategy")
    zenflow, deepspeed = resolve_config(config, {key: value for key, value in keys.items() if value is not None})
    refuse_options(options, beside_config=deepspeed is not None)
    said = {**options, **((deepspeed or {}).get("zero_optimization") or {})}
    chooses_buckets = said.get("reduce_bucket_size") in (None, "auto")
    return Settings(zenflow=zenflow, deepspeed=deepspeed, chooses_buckets=chooses_buckets)


def of_one_training(config: ZenFlowConfig) -> ZenFlowConfig:
    """The configuration of a training. Runs must repeat where the user asks torch for it; `Trainer(deterministic=...)` does as well."""
    # Measured memory changes no bit.
    if not (config.measures and torch.are_deterministic_algorithms_enabled()):
        return config
    fixed = config.without_measurements()
    rank_zero_info(
        f"ZenFlow: torch's deterministic algorithms are on, so that runs must repeat: update_interval={fixed.update_interval},"
        f" publish_lag={fixed.publish_lag}, and no measured time changes them. If steps wait for the CPU, set larger values"
    )
    return fixed
