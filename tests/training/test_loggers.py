"""Weights & Biases and MLflow, both without network: the same metrics, under their names, over the trainer's step."""

from pathlib import Path

import pytest
from lightning.pytorch.loggers import Logger, MLFlowLogger, WandbLogger

from harness import fit
from lightning_zenflow import ZenFlowStrategy
from lightning_zenflow.monitor.metrics import METRICS
from networks import SmallNet

IN_BACKWARD = {"zenflow/overlap/late_blocks_percent", "zenflow/overlap/clip_prediction_error_percent"}
"""Not known with d = 1."""


def train(logger: Logger) -> None:
    strategy = ZenFlowStrategy(worker_cores=1, update_interval=4, publish_lag=1, select_interval=4)
    fit(SmallNet(length=24), strategy, steps=24, logger=logger, log_every_n_steps=8)
    logger.finalize("success")


@pytest.mark.filterwarnings("error:MLFlow only allows")
def test_mlflow(tmp_path: Path) -> None:
    logger = MLFlowLogger(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db", artifact_location=str(tmp_path / "artifacts"))
    train(logger)
    client, run = logger.experiment, str(logger.run_id)
    logged = client.get_run(run).data.metrics
    assert {name for name in logged if name.startswith("zenflow/")} == set(METRICS) - IN_BACKWARD
    assert [point.step for point in client.get_metric_history(run, "zenflow/overlap/step_ms")] == [7, 15, 23]


def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = WandbLogger(save_dir=tmp_path, offline=True)
    train(logger)
    last = logger.experiment.summary
    assert {name for name in last.keys() if name.startswith("zenflow/")} == set(METRICS) - IN_BACKWARD  # noqa: SIM118
    assert last["zenflow/overlap/publish_lag_steps"] == 1
    # The axis that Lightning defines for all metrics; panels are grouped by what precedes the first slash.
    assert last["trainer/global_step"] == 23
    logger.experiment.finish()
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
