"""Writes the table of what users do between two steps to docs/reliability.md, from what is tested: `python -m docs.between_steps`."""

import sys
from pathlib import Path

from docs.generated import with_part

DOCUMENT = Path(__file__).with_name("reliability.md")


def table() -> str:
    """The uses as a Markdown table."""
    # The tests' shared code is no package.
    sys.path.append(str(DOCUMENT.parents[1] / "tests" / "support"))
    from between_steps import USES

    lines = ["| what users do | in | what happens |", "| --- | --- | --- |"]
    for what, use in USES.items():
        hooks = ", ".join(f"`{hook}`" for hook in use.hooks)
        lines.append(f"| {what} | {hooks} | {f'refused: {use.instead}' if use.refused else 'as under `auto`'} |")
    return "\n".join(lines)


def with_table(document: str) -> str:
    """The document with the table of what the tests hold now."""
    return with_part(document, "between steps", table())


if __name__ == "__main__":
    DOCUMENT.write_text(with_table(DOCUMENT.read_text()))
