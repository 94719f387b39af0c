"""Hugging Face `datasets`: by name from the network or the cache, or from a local copy."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datasets import Dataset


def load_split(dataset: str, configuration: str | None, split: str, *, instead: str) -> Dataset:
    """The rows of one split, as `datasets` gives them.

    Raises ModuleNotFoundError, saying what to install or what to do `instead`, without the package `datasets`.
    """
    try:
        from datasets import load_dataset
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"data.dataset={dataset!r} needs the package `datasets`, which the extra `hub` installs: pip install '.[examples,hub]'; "
            f"or {instead}"
        ) from error
    return load_dataset(dataset, configuration, split=split)
