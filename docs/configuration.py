"""Writes the tables of keys in docs/configuration.md from the fields of `ZenFlowConfig`: `python -m docs.configuration`."""

import json
from collections.abc import Sequence
from pathlib import Path

from docs.generated import with_part
from lightning_zenflow.config import KEYS, allowed_values

DOCUMENT = Path(__file__).with_suffix(".md")


USUAL = (
    "worker_cores",
    "moments_dtype",
    "offload_ratio",
    "update_interval",
    "publish_lag",
    "max_update_interval",
    "clip_prediction",
    "full_warm_up_rounds",
    "checkpoint_format",
    "async_checkpoints",
    "stall_monitor",
)
"""Keys that users set; all others are for experts."""


def table(names: Sequence[str]) -> str:
    """These keys as a Markdown table."""
    lines = ["| key | must be | unit | default | changes numbers | meaning |", "| --- | --- | --- | --- | --- | --- |"]
    for name in names:
        key = KEYS[name]
        default = json.dumps(key["default"]).strip('"')
        numbers = "yes" if key["changes_numbers"] else "no"
        meaning = " ".join(key["description"].split())
        lines.append(f"| `{name}` | {allowed_values(key)} | {key['unit']} | {default} | {numbers} | {meaning} |")
    return "\n".join(lines)


def with_table(document: str) -> str:
    """The document with the tables of the keys as they are now; those of DeepSpeed's that do nothing come last."""
    others = sorted(
        {*KEYS}.difference(USUAL),
        key=lambda name: ("ZenFlow without effect" in KEYS[name]["description"], list(KEYS).index(name)),
    )
    return with_part(with_part(document, "usual keys", table(USUAL)), "expert keys", table(others))


if __name__ == "__main__":
    DOCUMENT.write_text(with_table(DOCUMENT.read_text()))
