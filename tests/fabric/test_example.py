"""`examples/fabric_loop.py` runs, and trains what `examples/glue.py` trains under the Trainer, bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch

from example_runs import csv_rows, run_example
from glue_files import CONFIG, SAMPLE

FIXED = {"update_interval": 4, "publish_lag": 1}
"""With `auto`, measured times decide on the schedule, and runs do not repeat."""


def saved(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Weights, and the optimizer's state of the only parameter group's partition."""
    model = torch.load(folder / "checkpoint" / "mp_rank_00_model_states.pt", weights_only=False)
    optimizer = torch.load(folder / "checkpoint" / "zero_pp_rank_0_mp_rank_00_optim_states.pt", weights_only=False)
    return model["module"], optimizer["optimizer_state_dict"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_example_and_the_trainer(tmp_path: Path) -> None:
    settings = ["trainer.max_steps=20", "trainer.accelerator=cpu", f"data.data_dir={SAMPLE}"]
    settings += [f"trainer.strategy.init_args.{key}={value}" for key, value in FIXED.items()]
    printed = run_example(tmp_path, "fabric_loop.py", *settings, timeout=300)
    assert "epoch 0, step 20:" in printed
    names = {name for row in csv_rows(tmp_path / "logs" / "fabric" / "version_0" / "metrics.csv") for name in row}
    assert {"train/lm_loss", "val/accuracy", "zenflow/stall/device_percent"} <= names

    cli = [f"--{setting}" for setting in settings] + [
        "--trainer.val_check_interval=20",
        "--trainer.limit_val_batches=1",
    ]
    run_example(tmp_path, "glue.py", "fit", "--config", str(CONFIG), *cli, timeout=300)
    ours, our_state = saved(tmp_path / "logs" / "fabric" / "last.ckpt")
    theirs, their_state = saved(tmp_path / "logs" / "glue" / "version_0" / "checkpoints" / "last.ckpt")
    weights = {name for name in theirs if name.startswith("model.")}
    assert weights and weights <= ours.keys()
    for name in weights:
        assert torch.equal(ours[name], theirs[name]), name
    masters = "single_partition_of_fp32_groups"
    for a, b in zip(our_state[masters], their_state[masters], strict=True):
        assert torch.equal(a, b)
