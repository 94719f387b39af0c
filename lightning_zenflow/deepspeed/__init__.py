"""DeepSpeed around a training: configuration, environment, engines, and its optimizers, whose steps are ours. Private names
of DeepSpeed are used in this room and in `checkpoint` only, each with a comment that says which and why.
"""

import functools
import logging
import sys
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any
from unittest.mock import patch

import torch

with (
    # DeepSpeed's logger keeps the standard output that it finds on its first import, which is for the results of a user's program.
    redirect_stdout(sys.stderr),
    # Against a warning that there is no GPU: Lightning chooses the device, and says so.
    patch.object(logging.getLogger("DeepSpeed"), "filters", [lambda record: record.module != "real_accelerator"]),
):
    import deepspeed
    import deepspeed.runtime.compiler


def _compile_when_called(function: Callable[..., Any]) -> Callable[..., Any]:
    """As `torch.compile`, which itself imports torch's compilers at once."""
    compiled = functools.cache(lambda: torch.compile(function))
    return functools.wraps(function)(lambda *args, **keywords: compiled()(*args, **keywords))


# Private: every engine asks whether its optimizer is Muon, whose module compiles functions where it is imported: seconds of a first fit.
with patch.object(deepspeed.runtime.compiler, "compile", lambda: _compile_when_called):
    import deepspeed.runtime.zero.muon.original_muon
# From torch 2.13 on it warns of the names by which DeepSpeed's stage 3 calls collectives, in every step.
warnings.filterwarnings(
    "ignore", r"`torch\.distributed\.(all_gather_into|reduce_scatter)_tensor` is deprecated", FutureWarning
)
