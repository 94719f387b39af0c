"""Where checkpoints may go: what else is there stays; a store by its URL; a plugin of the user's."""

import threading
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import fsspec
import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from harness import fit, make_trainer, weights_of
from lightning_zenflow import ZenFlowStrategy
from networks import SmallNet
from side_by_side import HOW

LIMIT = HOW["in backward"]


def train(steps: int, keys: dict[str, Any] | None = None, **options: Any) -> pl.Trainer:
    return fit(SmallNet(length=8), ZenFlowStrategy(**LIMIT, **(keys or {})), steps=steps, **options)


@pytest.mark.parametrize("format_", ["lightning", "deepspeed"])
def test_a_folder_of_the_users_is_neither_replaced_nor_removed(
    format_: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results" / "out").mkdir(parents=True)
    (tmp_path / "results" / "table.csv").write_text("1,2")
    trainer = train(2, {"checkpoint_format": format_})
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
    trainer.strategy.remove_checkpoint("results/out")
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["table.csv"]


@pytest.fixture(scope="module")
def whole() -> list[Tensor]:
    """Weights after all steps."""
    return weights_of(train(8).lightning_module)


@pytest.mark.parametrize("kind", ["", "asynchronous", "in the background"])
def test_a_store(kind: str, whole: list[Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under `strategy="auto"`: the callback keeps the best there, removes others, finds the last one; a run goes on bit for bit."""
    monkeypatch.chdir(tmp_path)
    root, store = "memory://bucket", fsspec.filesystem("memory")
    plugins: list[Any] = [AsyncCheckpointIO()] if kind == "asynchronous" else []
    for steps, resume in ((4, None), (8, "last")):
        files = ModelCheckpoint(
            dirpath=f"{root}/runs", every_n_train_steps=2, save_last=True, enable_version_counter=False
        )
        options: dict[str, Any] = {"enable_checkpointing": True, "callbacks": [files], "plugins": plugins}
        trainer = train(steps, {"async_checkpoints": kind == "in the background"}, resume=resume, **options)
        left = {p.rpartition("/")[2] for p in store.ls(f"{root}/runs", detail=False)}
        assert left == {f"epoch=0-step={steps}.ckpt", "last.ckpt"}
    torch.testing.assert_close(weights_of(trainer.lightning_module), whole, rtol=0, atol=0)
    trainer.save_checkpoint(f"{root}/own.ckpt", weights_only=True)
    if not plugins:
        trainer.lightning_module.on_save_checkpoint = lambda checkpoint: checkpoint.update(lock=threading.Lock())
        message = r"could not be saved: cannot pickle .*lock' object; training can continue\.$"
        with pytest.raises(OSError, match=message):
            trainer.save_checkpoint(f"{root}/lock.ckpt")
        del trainer.lightning_module.on_save_checkpoint
    trainer.strategy.teardown()
    trainer.strategy.remove_checkpoint(files.best_model_path)
    assert store.exists(f"{root}/own.ckpt") and not store.exists(files.best_model_path)
    assert not list(tmp_path.iterdir())
    store.rm(root, recursive=True)
    trainer.save_checkpoint(f"file://{tmp_path}/own.ckpt")
    trainer.strategy.teardown()
    trainer = train(8, resume=f"file://{tmp_path}/own.ckpt")
    torch.testing.assert_close(weights_of(trainer.lightning_module), whole, rtol=0, atol=0)


def test_folders_for_a_store_or_a_plugin_are_refused_before_training(tmp_path: Path) -> None:
    for dirpath, plugins in (("memory://bucket", []), (str(tmp_path), [AsyncCheckpointIO()])):
        files = ModelCheckpoint(dirpath=dirpath)
        strategy = ZenFlowStrategy(**LIMIT, checkpoint_format="deepspeed")
        trainer = make_trainer(strategy, max_steps=1, enable_checkpointing=True, callbacks=[files], plugins=plugins)
        message = f"must be 'lightning', one file, for checkpoints in {dirpath}"
        with pytest.raises(MisconfigurationException, match=message):
            trainer.fit(SmallNet(length=2))
        assert trainer.global_step == 0
    # A save that nobody has announced; weights only are a file.
    trainer = train(1, {"checkpoint_format": "deepspeed"})
    with pytest.raises(MisconfigurationException, match=r"must be 'lightning'.* in memory://bucket/a\.ckpt"):
        trainer.save_checkpoint("memory://bucket/a.ckpt")
    trainer.save_checkpoint("memory://bucket/weights.ckpt", weights_only=True)
    assert [p["name"] for p in fsspec.filesystem("memory").ls("bucket")] == ["/bucket/weights.ckpt"]


def test_a_plugin_saves_loads_and_removes(whole: list[Tensor], tmp_path: Path) -> None:
    path, plugin = tmp_path / "a.ckpt", TorchCheckpointIO()
    first, second = (Mock(spec=plugin, wraps=plugin) for _ in range(2))
    # torch's own takes no options.
    first.save_checkpoint.side_effect = lambda content, path, options: plugin.save_checkpoint(content, path)
    train(4, plugins=[first]).save_checkpoint(path, storage_options=7)
    trainer = train(8, resume=str(path), plugins=[second])
    torch.testing.assert_close(weights_of(trainer.lightning_module), whole, rtol=0, atol=0)
    trainer.strategy.remove_checkpoint(path)
    assert first.save_checkpoint.call_args.args[1:] == (path, 7)
    second.remove_checkpoint.assert_called_once_with(path)
    trainer = train(1)
    trainer.save_checkpoint(path)
    with pytest.raises(TypeError, match="storage_options must be None without a plugin"):
        trainer.save_checkpoint(path, storage_options=7)
    called = [[name for name, *_ in plugin.method_calls if name != "teardown"] for plugin in (first, second)]
    assert called == [["save_checkpoint"], ["load_checkpoint", "remove_checkpoint"]]
