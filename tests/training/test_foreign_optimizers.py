"""torch's own list of optimizer inputs: each of Adam and AdamW trains as torch's optimizer, or is refused by the option's name."""

from unittest import mock

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from harness import fit
from lightning_zenflow import ZenFlowStrategy
from models import TINY, LinearLossModule
from side_by_side import NOTHING_LATE


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_each_input_of_torchs_list(kind: type) -> None:
    pytest.importorskip("expecttest", reason="torch's list of optimizers needs it; the extra `test` has it")
    # Importing torch's own tests takes seconds, and forbids setting flags of cuDNN, as the Trainer's `deterministic` does, for the rest of
    # the process.
    with mock.patch.object(torch.backends, "disable_global_flags"):
        from torch.testing._internal.common_optimizers import optim_db

    (info,) = (info for info in optim_db if info.optim_cls is kind)
    for entry in info.optim_inputs_func("cpu"):
        ours, theirs = (LinearLossModule(shapes=TINY) for _ in range(2))
        for model in (ours, theirs):
            configure = lambda model=model, keys=entry.kwargs: kind(model.parameters(), **keys)  # noqa: E731
            model.configure_optimizers = configure  # type: ignore[method-assign]
        refused = [key for key in ("amsgrad", "maximize", "differentiable") if entry.kwargs.get(key)]
        if refused:
            with pytest.raises(MisconfigurationException, match=f"{refused[0]} must be False, got True"):
                fit(ours, ZenFlowStrategy(**NOTHING_LATE))
            continue
        fit(ours, ZenFlowStrategy(**NOTHING_LATE), steps=5)
        fit(theirs, "auto", steps=5)
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=0, atol=1e-6, msg=lambda text, e=entry: f"{e.desc}: {text}")
