"""A record as the text that the model is given; the response follows it immediately."""

from __future__ import annotations

from dataclasses import dataclass

from alpaca_task.records import Record


@dataclass(frozen=True, kw_only=True)
class Template:
    """Two patterns with the slots {instruction} and {input}; the second one is for records without input."""

    with_input: str
    without_input: str

    def fill(self, record: Record) -> str:
        """The prompt of `record`."""
        pattern = self.with_input if record.input else self.without_input
        return pattern.format(instruction=record.instruction, input=record.input)


TEMPLATES = {
    # The text that Alpaca was trained with (Taori et al. 2023).
    "alpaca": Template(
        with_input=(
            "Below is an instruction that describes a task, paired with an input that provides further context. "
            "Write a response that appropriately completes the request.\n\n"
            "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
        ),
        without_input=(
            "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
            "### Instruction:\n{instruction}\n\n### Response:\n"
        ),
    ),
    # As little as tells the parts apart, for models that read bytes.
    "short": Template(with_input="{instruction}\n{input}\n> ", without_input="{instruction}\n> "),
}


def find_template(name: str) -> Template:
    """The template called `name`; ValueError for any other name."""
    if name not in TEMPLATES:
        raise ValueError(f"data.template={name!r} is not allowed; it must be one of {', '.join(TEMPLATES)}")
    return TEMPLATES[name]
