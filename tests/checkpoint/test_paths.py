"""Where checkpoints may go: what else is there stays."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from harness import make_trainer
from lightning_zenflow import ZenFlowStrategy
from models import LinearLossModule

pytestmark = pytest.mark.usefixtures("no_worker_is_left")

LIMIT: dict[str, Any] = {"topk_ratio": 0.0, "update_interval": 1, "publish_lag": 0, "worker_cores": 1}


@pytest.mark.parametrize("format_", ["lightning", "deepspeed"])
def test_a_folder_of_the_users_is_neither_replaced_nor_removed(
    format_: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results" / "out").mkdir(parents=True)
    (tmp_path / "results" / "table.csv").write_text("1,2")
    strategy = ZenFlowStrategy(**LIMIT, checkpoint_format=format_)
    trainer = make_trainer(strategy, max_steps=2)
    trainer.fit(LinearLossModule(length=2))
    before = sorted(tmp_path.rglob("*"))
    for path, weights_only in product(("results", tmp_path / "results", "results/", "results/out/.."), (False, True)):
        with pytest.raises(IsADirectoryError, match=r"results must be a checkpoint.*got a folder with"):
            trainer.save_checkpoint(path, weights_only=weights_only)
        with pytest.warns(UserWarning, match=r"nothing was removed: .*results"):
            trainer.strategy.remove_checkpoint(path)
        assert sorted(tmp_path.rglob("*")) == before
    # An empty one may be replaced, and so may a checkpoint.
    for _ in range(2):
        trainer.save_checkpoint("results/out")
    strategy.remove_checkpoint("results/out")
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["table.csv"]
