"""Settings of the comparison: tasks, their lengths, learning rates and methods."""

from dataclasses import dataclass
from typing import Literal

from benchmarks.convergence.methods import ABOUT_DELAY, ABOUT_MOMENTS, WITHOUT_DELAY


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A task, its length, and the learning rates of which each method takes its best."""

    task: Literal["gpt", "small_gpt", "recall", "modular"]
    """Fine-tuning of a byte-level GPT from Python to C headers; a small byte-level GPT from random weights; or one of
    `threshold_tasks.TASKS`."""
    steps: int
    """Optimizer steps; with a threshold, at most."""
    lrs: tuple[float, ...]
    """Peak learning rates."""
    title: str
    methods: tuple[str, ...]
    """Methods by default."""
    precision: Literal["bf16-true", "32-true"] = "bf16-true"
    measure: Literal["loss", "steps"] = "loss"
    """What counts: the validation loss after the last step, or the steps until a held-out accuracy."""


# Those about delay in 32 bits: delay is what is compared, and a CPU without bfloat16 instructions takes ten times as long in bfloat16.
SETTINGS = {
    "fast": Setting(
        task="gpt",
        steps=400,
        lrs=(2e-3, 4e-3, 8e-3),
        title="byte-level GPT, 400 steps at large learning rates",
        methods=WITHOUT_DELAY,
    ),
    "delay_small": Setting(
        task="small_gpt",
        steps=3000,
        lrs=(1e-3, 2e-3, 4e-3),
        title="byte-level GPT from random weights, 2 layers of width 64, 3000 steps",
        methods=(*ABOUT_DELAY, *ABOUT_MOMENTS[1:]),
        precision="32-true",
    ),
    "recall": Setting(
        task="recall",
        steps=3000,
        lrs=(1e-3, 2e-3, 4e-3),
        title="multi-query associative recall, 8 pairs, until 99 %",
        methods=(*ABOUT_DELAY, *ABOUT_MOMENTS[1:]),
        precision="32-true",
        measure="steps",
    ),
    "modular": Setting(
        task="modular",
        steps=4000,
        lrs=(2e-3, 4e-3, 8e-3, 16e-3),
        title="addition modulo 31 from half of all pairs, until 99 % of the other half",
        methods=(*ABOUT_DELAY, *ABOUT_MOMENTS[1:]),
        precision="32-true",
        measure="steps",
    ),
}
