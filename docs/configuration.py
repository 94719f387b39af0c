"""Writes the table of keys in docs/configuration.md from the fields of `ZenFlowConfig`: `python -m docs.configuration`."""

import ast
import inspect
import json
from itertools import pairwise
from pathlib import Path

from lightning_zenflow.config import KEYS, ZenFlowConfig

DOCUMENT = Path(__file__).with_suffix(".md")

_BEGIN, _END = "<!-- keys -->\n", "<!-- end -->\n"


def meanings() -> dict[str, str]:
    """The docstring below each field, which Python itself does not keep."""
    (definition,) = ast.parse(inspect.getsource(ZenFlowConfig)).body
    assert isinstance(definition, ast.ClassDef)
    return {
        ast.unparse(field.target): " ".join(ast.literal_eval(text.value).split())
        for field, text in pairwise(definition.body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


def table() -> str:
    """The keys as a Markdown table."""
    lines = ["| key | must be | unit | default | changes numbers | meaning |", "| --- | --- | --- | --- | --- | --- |"]
    texts = meanings()
    for name, key in KEYS.items():
        default = json.dumps(key.default).strip('"')
        numbers = "yes" if key.changes_numbers else "no"
        lines.append(f"| `{name}` | {key.domain.text} | {key.unit} | {default} | {numbers} | {texts[name]} |")
    return "\n".join(lines)


def with_table(document: str) -> str:
    """The document with the table of the keys as they are now."""
    before, _, rest = document.partition(_BEGIN)
    return f"{before}{_BEGIN}\n{table()}\n\n{_END}{rest.partition(_END)[2]}"


if __name__ == "__main__":
    DOCUMENT.write_text(with_table(DOCUMENT.read_text()))
