"""Settings of the comparison: tasks, their lengths and learning rates."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A task, its length, and the learning rates of which each method takes its best."""

    task: Literal["gpt", "glue", "small_gpt", "large_gpt", "recall", "modular", "addition", "mnist1d", "digits"]
    """Fine-tuning of a byte-level GPT from Python to C headers; the bundled sample of examples/glue.py; a byte-level GPT from random
    weights, in two sizes; or one of `threshold_tasks.TASKS`."""
    steps: int
    """Optimizer steps; with a threshold, at most."""
    lrs: tuple[float, ...]
    """Peak learning rates."""
    title: str
    methods: Literal["main", "all", "delay"] | tuple[str, ...] = "main"
    """Methods by default: `methods.names_of`."""
    precision: Literal["bf16-true", "32-true"] = "bf16-true"
    measure: Literal["loss", "steps"] = "loss"
    """What counts: the validation loss after the last step, or the steps until a held-out accuracy."""


_DELAY_LRS = (1e-3, 2e-3, 4e-3)


def _delay(
    task: Literal["gpt", "small_gpt", "large_gpt"], steps: int, title: str, lrs: tuple[float, ...] = _DELAY_LRS
) -> Setting:
    # In 32 bits: delay is what is compared, and a CPU without bfloat16 instructions takes up to ten times as long in bfloat16.
    return Setting(task=task, steps=steps, lrs=lrs, title=title, methods="delay", precision="32-true")


def _threshold(
    task: Literal["recall", "modular", "addition", "mnist1d", "digits"],
    steps: int,
    title: str,
    lrs: tuple[float, ...] = _DELAY_LRS,
) -> Setting:
    return Setting(task=task, steps=steps, lrs=lrs, title=title, methods="delay", precision="32-true", measure="steps")


_PERCEPTRON_LRS = (4e-3, 8e-3, 16e-3, 32e-3)


SETTINGS = {
    "fast": Setting(
        task="gpt",
        steps=400,
        lrs=(2e-3, 4e-3, 8e-3),
        title="byte-level GPT, 400 steps at large learning rates",
        methods="all",
    ),
    "gentle": Setting(
        task="gpt",
        steps=800,
        lrs=(1e-4, 3e-4, 6e-4),
        title="byte-level GPT, 800 steps at usual learning rates of fine-tuning",
    ),
    "moments": Setting(
        task="gpt",
        steps=600,
        lrs=(2e-3, 4e-3),
        title="byte-level GPT in 32 bits, 600 steps, for the element type of the moments",
        methods=("adamw", "adamw_nearest", "zenflow_adamw_bf16_moments"),
        # A model in bfloat16 would add rounding errors of its own, the same for all methods.
        precision="32-true",
    ),
    "glue": Setting(
        task="glue",
        steps=500,
        lrs=(5e-4, 1e-3, 2e-3),
        title="examples/glue.py on its bundled sample, from a language model of its sentences",
    ),
    "delay_quick": _delay(
        "small_gpt", 400, "byte-level GPT from random weights, 2 layers of width 64, 400 steps", lrs=(1e-3, 2e-3)
    ),
    "delay_small": _delay("small_gpt", 3000, "byte-level GPT from random weights, 2 layers of width 64, 3000 steps"),
    "delay_large": _delay(
        "large_gpt",
        3000,
        "byte-level GPT from random weights, 4 layers of width 128, 3000 steps",
        lrs=(5e-4, 1e-3, 2e-3),
    ),
    "delay_tuning": _delay("gpt", 400, "fine-tuning of the byte-level GPT, 400 steps", lrs=(*_DELAY_LRS, 8e-3)),
    "recall": _threshold("recall", 3000, "multi-query associative recall, 8 pairs, until 99 %"),
    "modular": _threshold(
        "modular",
        4000,
        "addition modulo 31 from half of all pairs, until 99 % of the other half",
        lrs=(2e-3, 4e-3, 8e-3, 16e-3),
    ),
    "addition": _threshold("addition", 4000, "sums of two numbers of three digits, until 99 % of the digits"),
    "mnist1d": _threshold("mnist1d", 3000, "MNIST-1D, until 90 %", lrs=_PERCEPTRON_LRS),
    "digits": _threshold("digits", 1500, "scikit-learn's digits, until 96 %", lrs=_PERCEPTRON_LRS),
}
