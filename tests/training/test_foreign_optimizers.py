"""torch's own list of optimizer inputs: each of Adam and AdamW trains as torch's optimizer, or is refused by the option's name."""

from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from harness import fit
from lightning_zenflow import ZenFlowStrategy
from models import TINY, LinearLossModule
from side_by_side import NOTHING_LATE

pytest.importorskip("expecttest", reason="torch's list of optimizers needs it; the extra `test` has it")
# Importing torch's own tests forbids setting flags of cuDNN, as the Trainer's `deterministic` does, for the rest of the process.
with mock.patch.object(torch.backends, "disable_global_flags"):
    from torch.testing._internal.common_optimizers import optim_db

INPUTS = [
    pytest.param(info.optim_cls, entry.kwargs, id=f"{info.optim_cls.__name__}, {entry.desc}")
    for info in optim_db
    if info.optim_cls in (torch.optim.Adam, torch.optim.AdamW)
    for entry in info.optim_inputs_func("cpu")
]


@pytest.mark.parametrize(("kind", "keys"), INPUTS)
def test_an_input_of_torchs_list(kind: type, keys: dict[str, Any]) -> None:
    ours, theirs = (LinearLossModule(shapes=TINY) for _ in range(2))
    for model in (ours, theirs):
        model.configure_optimizers = lambda model=model: kind(model.parameters(), **keys)  # type: ignore[method-assign]
    refused = [key for key in ("amsgrad", "maximize", "differentiable") if keys.get(key)]
    if refused:
        with pytest.raises(MisconfigurationException, match=f"{refused[0]} must be False, got True"):
            fit(ours, ZenFlowStrategy(**NOTHING_LATE))
        return
    fit(ours, ZenFlowStrategy(**NOTHING_LATE), steps=5)
    fit(theirs, "auto", steps=5)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-6)
