"""Writes the table of keys in docs/configuration.md from the fields of `ZenFlowConfig`: `python -m docs.configuration`."""

import json
from pathlib import Path

from docs.generated import with_part
from lightning_zenflow.config import KEYS, allowed_values

DOCUMENT = Path(__file__).with_suffix(".md")


def table() -> str:
    """The keys as a Markdown table."""
    lines = ["| key | must be | unit | default | changes numbers | meaning |", "| --- | --- | --- | --- | --- | --- |"]
    # Those of DeepSpeed's that do nothing come last.
    for name, key in sorted(KEYS.items(), key=lambda item: "ZenFlow without effect" in item[1]["description"]):
        default = json.dumps(key["default"]).strip('"')
        numbers = "yes" if key["changes_numbers"] else "no"
        meaning = " ".join(key["description"].split())
        lines.append(f"| `{name}` | {allowed_values(key)} | {key['unit']} | {default} | {numbers} | {meaning} |")
    return "\n".join(lines)


def with_table(document: str) -> str:
    """The document with the table of the keys as they are now."""
    return with_part(document, "keys", table())


if __name__ == "__main__":
    DOCUMENT.write_text(with_table(DOCUMENT.read_text()))
