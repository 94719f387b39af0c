"""Settings of the comparison: tasks, their lengths and learning rates."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A task, its length, and the learning rates of which each method takes its best."""

    task: Literal["gpt", "glue"]
    """Fine-tuning of a byte-level GPT from Python to C headers; or the bundled sample of examples/glue.py."""
    steps: int
    """Optimizer steps."""
    lrs: tuple[float, ...]
    """Peak learning rates."""
    title: str
    all_methods: bool = False
    """False: by default only the main methods."""


SETTINGS = {
    "fast": Setting(
        task="gpt",
        steps=400,
        lrs=(2e-3, 4e-3, 8e-3),
        title="byte-level GPT, 400 steps at large learning rates",
        all_methods=True,
    ),
    "gentle": Setting(
        task="gpt",
        steps=800,
        lrs=(1e-4, 3e-4, 6e-4),
        title="byte-level GPT, 800 steps at usual learning rates of fine-tuning",
    ),
    "glue": Setting(
        task="glue",
        steps=500,
        lrs=(5e-4, 1e-3, 2e-3),
        title="examples/glue.py on its bundled sample, from a language model of its sentences",
    ),
}
