"""Tasks and methods of the comparison, by name."""

from dataclasses import dataclass

from benchmarks.convergence.methods import METHODS as SMALL_MODELS
from benchmarks.convergence.methods import Method
from lightning_zenflow import ZenFlowStrategy


@dataclass(frozen=True, kw_only=True)
class Training:
    """How long a task is trained."""

    epochs: int
    batches: int | float = 1.0
    """Of an epoch: a number, or a share."""


TASKS = {"CoLA": Training(epochs=3), "RTE": Training(epochs=3), "SST-2": Training(epochs=1, batches=250)}
"""In batches of 32, so SST-2 has 8,000 sentences."""

METHODS = {
    "auto": Method(make_strategy=lambda: "auto", title='torch\'s AdamW, strategy="auto"', family="AdamW"),
    "zero_offload": SMALL_MODELS["adamw"],
    "zenflow": Method(
        make_strategy=ZenFlowStrategy, title="ZenFlowStrategy, defaults (S and d auto)", family="ZenFlowStrategy"
    ),
    "zenflow_s4": SMALL_MODELS["zenflow_s4"],
    "zenflow_adamw": Method(
        make_strategy=lambda: ZenFlowStrategy(update_interval=1, publish_lag=0, clip_prediction=False),
        title="ZenFlowStrategy, zenflow_adamw",
        family="ZenFlowStrategy",
    ),
    "zenflow_int8": Method(
        make_strategy=lambda: ZenFlowStrategy(moments_dtype="int8"),
        title="ZenFlowStrategy, defaults, int8 moments",
        family="ZenFlowStrategy",
    ),
    "deepspeed_zenflow": SMALL_MODELS["deepspeed_zenflow"],
    "deepspeed_zenflow_as_is": SMALL_MODELS["deepspeed_zenflow_as_is"],
}
