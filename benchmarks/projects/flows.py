"""What a project's own users write: fit, load the best checkpoint, predict, fit again. Runs in the environment that has the projects:

    python benchmarks/projects/flows.py PROJECT METHOD FOLDER

writes FOLDER/found.json: losses of all fits, predictions, seconds of the parts that were done, and the error that ended the rest. Of the
code that a project's user has, only `Run.options` differs between methods.
"""

import json
import math
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

CHANGE = 1e-7
"""Of the initial weights, relative, in the control."""
STEPS = 60
"""Of each fit, or about as many."""


class Run:
    """One run of a flow.

    Args:
        method: "auto", "control" or the name of a strategy.
        folder: for files.
        lightning: the package of the project.
    """

    def __init__(self, method: str, folder: Path, lightning: Any) -> None:
        self.folder, self.lightning = folder, lightning
        self._method = method
        self.losses: list[list[float]] = []
        self.predictions: list[float] = []
        self.parts: dict[str, float] = {}
        self.error = ""

    def __deepcopy__(self, memo: Any) -> "Run":
        # neuralforecast copies its models, with their callbacks.
        return self

    def options(self, *callbacks: Any, **others: Any) -> dict[str, Any]:
        """Of a Trainer."""
        record = self.lightning.callbacks.LambdaCallback(setup=self._set_up, on_train_batch_end=self._end_step)
        # Without a sampler of Lightning's own the batches are those of `auto`.
        return {
            "strategy": "auto" if self._method == "control" else self._method,
            "accelerator": "cpu",
            "devices": 1,
            "use_distributed_sampler": False,
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": str(self.folder),
            "callbacks": [record, *callbacks],
            **others,
        }

    def _set_up(self, trainer: Any, module: Any, stage: str) -> None:
        if stage != "fit":
            return
        self.losses.append([])
        if self._method == "control" and len(self.losses) == 1:
            noise = torch.Generator().manual_seed(0)
            for p in module.parameters():
                p.data *= 1 + CHANGE * torch.randn(p.shape, generator=noise)

    def _end_step(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        self.losses[-1].append(float(outputs["loss"]))

    def seed(self) -> None:
        """Seeds all generators. After Lightning's `seed_everything` a distributed strategy would seed them once more at its set-up."""
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A part of the flow; an exception ends all that follow."""
        self.seed()
        begin = time.perf_counter()
        try:
            yield
        except Exception as error:
            self.error = f"{name}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            raise
        self.parts[name] = time.perf_counter() - begin

    def predicted(self, values: Any) -> None:
        """Notes predictions."""
        self.predictions = np.asarray(values, dtype=float).ravel().tolist()


def series(n: int = 8, length: int = 120) -> pd.DataFrame:
    """Monthly series with seasons and noise: `unique_id`, `ds`, `y`."""
    noise = np.random.default_rng(0)
    months = pd.date_range("2010-01-31", periods=length, freq="ME")
    level = [
        10 + i + np.sin(np.arange(length) * math.pi / 6 + i) + 0.1 * noise.standard_normal(length) for i in range(n)
    ]
    parts = [pd.DataFrame({"unique_id": f"s{i}", "ds": months, "y": y}) for i, y in enumerate(level)]
    return pd.concat(parts, ignore_index=True)


def chemprop(run: Run) -> None:
    """https://chemprop.readthedocs.io, "Training": a message-passing network for molecules."""
    from chemprop import data, models, nn
    from rdkit import Chem

    chains = [
        f"{'C' * i}{group}{'C' * j}" for i in range(1, 9) for j in range(1, 9) for group in ("O", "N", "C(=O)", "S")
    ]
    mass = [sum(atom.GetMass() for atom in Chem.MolFromSmiles(chain).GetAtoms()) for chain in chains]
    points = [data.MoleculeDatapoint.from_smi(chain, [y]) for chain, y in zip(chains, mass, strict=True)]
    train, valid = (data.MoleculeDataset(part) for part in (points[::2], points[1::2]))
    scaler = train.normalize_targets()
    valid.normalize_targets(scaler)
    train_loader = data.build_dataloader(train, batch_size=16, seed=0)
    valid_loader = data.build_dataloader(valid, batch_size=16, shuffle=False)

    def make() -> Any:
        unscale = nn.UnscaleTransform.from_standard_scaler(scaler)
        return models.MPNN(nn.BondMessagePassing(), nn.MeanAggregation(), nn.RegressionFFN(output_transform=unscale))

    run.seed()
    model = make()
    best = run.lightning.callbacks.ModelCheckpoint(
        run.folder, "best-{epoch}-{val_loss:.2f}", "val_loss", save_last=True
    )
    trainer = run.lightning.Trainer(**run.options(best, max_epochs=STEPS // len(train_loader)))
    with run.part("fit"):
        trainer.fit(model, train_loader, valid_loader)
    with run.part("best"):
        loaded = models.MPNN.load_from_checkpoint(best.best_model_path)
    with run.part("predict"):
        run.predicted(torch.cat(trainer.predict(loaded, valid_loader)))
    with run.part("fit again"):
        run.lightning.Trainer(**run.options(max_epochs=2)).fit(model, train_loader, valid_loader)


def pytorch_forecasting(run: Run, network: str, **options: Any) -> None:
    """https://pytorch-forecasting.readthedocs.io, "Demand forecasting" and "NBeats"."""
    import pytorch_forecasting as pf

    frame = series().assign(month=lambda f: (f.ds.dt.year * 12 + f.ds.dt.month).astype(int)).drop(columns="ds")
    frame["month"] -= frame.month.min()
    settings: dict[str, Any] = {"time_idx": "month", "target": "y", "group_ids": ["unique_id"]}
    settings |= {"max_encoder_length": 24, "max_prediction_length": 6, "time_varying_unknown_reals": ["y"]}
    if network == "TemporalFusionTransformer":
        settings |= {
            "static_categoricals": ["unique_id"],
            "time_varying_known_reals": ["month"],
            "add_encoder_length": True,
        }
    training = pf.TimeSeriesDataSet(frame[frame.month < 114], **settings)
    validation = pf.TimeSeriesDataSet.from_dataset(training, frame, predict=True, stop_randomization=True)
    train = training.to_dataloader(train=True, batch_size=32, num_workers=0)
    valid = validation.to_dataloader(train=False, batch_size=32, num_workers=0)
    run.seed()
    kind = getattr(pf, network)
    model = kind.from_dataset(training, learning_rate=0.01, log_interval=-1, **options)
    best = run.lightning.callbacks.ModelCheckpoint(run.folder, monitor="val_loss")
    stop = run.lightning.callbacks.EarlyStopping(monitor="val_loss", min_delta=1e-4, patience=10, mode="min")
    limits = {"gradient_clip_val": 0.1, "limit_train_batches": STEPS // 3}
    with run.part("fit"):
        run.lightning.Trainer(**run.options(best, stop, max_epochs=3, **limits)).fit(model, train, valid)
    with run.part("best"):
        loaded = kind.load_from_checkpoint(best.best_model_path)
    with run.part("predict"):
        # Makes a Trainer of its own, with a callback of its own.
        options = {k: v for k, v in run.options().items() if k != "callbacks"}
        run.predicted(loaded.predict(valid, trainer_kwargs=options))
    with run.part("fit again"):
        run.lightning.Trainer(**run.options(max_epochs=1, **limits)).fit(model, train, valid)


def gluonts(run: Run) -> None:
    """https://ts.gluon.ai, "Quick start": DeepAR. The estimator opens the best checkpoint at the end of its fit."""
    from gluonts.dataset.pandas import PandasDataset
    from gluonts.torch import DeepAREstimator

    data = PandasDataset.from_long_dataframe(series(), item_id="unique_id", timestamp="ds", target="y", freq="M")

    def estimator(epochs: int) -> Any:
        options = run.options(max_epochs=epochs)
        sizes = {"prediction_length": 6, "num_batches_per_epoch": STEPS // 3, "hidden_size": 20}
        return DeepAREstimator(freq="M", trainer_kwargs=options, **sizes)

    with run.part("fit"):
        predictor = estimator(3).train(data)
    with run.part("best"):
        assert list(run.folder.rglob("*.ckpt"))
    with run.part("predict"):
        run.predicted([forecast.mean for forecast in predictor.predict(data)])
    with run.part("fit again"):
        estimator(1).train_from(predictor, data)


def neuralforecast(run: Run) -> None:
    """https://nixtlaverse.nixtla.io/neuralforecast, "Quickstart": NHITS. It imports `pytorch_lightning`, and each call makes a Trainer."""
    from neuralforecast import NeuralForecast
    from neuralforecast.models import NHITS

    run.seed()
    options = run.options(gradient_clip_val=1.0)
    model = NHITS(6, 24, max_steps=STEPS, val_check_steps=20, batch_size=4, windows_batch_size=32, **options)
    forecast = NeuralForecast([model], "ME")
    with run.part("fit"):
        forecast.fit(series(), val_size=12)
    with run.part("best"):
        forecast.save(str(run.folder / "saved"), overwrite=True)
        loaded = NeuralForecast.load(str(run.folder / "saved"))
    with run.part("predict"):
        run.predicted(loaded.predict(series()).NHITS)
        assert np.allclose(forecast.predict().NHITS, run.predictions)
    with run.part("fit again"):
        forecast.cross_validation(series(), n_windows=2)


def timm(run: Run) -> None:
    """timm's own network, optimizer and loss in a LightningModule: a vision transformer with a cosine schedule and clipping."""
    from timm import create_model
    from timm.loss import LabelSmoothingCrossEntropy
    from timm.optim import create_optimizer_v2

    class Classifier(run.lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self, network: str = "vit_tiny_patch16_224", classes: int = 10) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.model = create_model(network, img_size=32, patch_size=8, depth=4, num_classes=classes)
            self.loss = LabelSmoothingCrossEntropy()

        def training_step(self, batch: Any, index: int) -> Any:
            return self.loss(self.model(batch[0]), batch[1])

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("val_loss", self.loss(self.model(batch[0]), batch[1]))

        def predict_step(self, batch: Any, index: int) -> Any:
            return self.model(batch[0])

        def configure_optimizers(self) -> Any:
            optimizer = create_optimizer_v2(self.model, opt="adamw", lr=1e-3, weight_decay=0.05)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    noise = torch.Generator().manual_seed(0)
    labels = torch.randint(10, (320,), generator=noise)
    images = torch.randn(320, 3, 32, 32, generator=noise) + labels.view(-1, 1, 1, 1) / 5
    data = torch.utils.data.TensorDataset(images, labels)
    train = torch.utils.data.DataLoader(data, 16, shuffle=True)
    valid = torch.utils.data.DataLoader(data, 32)
    run.seed()
    model = Classifier()
    best = run.lightning.callbacks.ModelCheckpoint(run.folder, monitor="val_loss")
    trainer = run.lightning.Trainer(**run.options(best, max_epochs=STEPS // len(train), gradient_clip_val=1.0))
    with run.part("fit"):
        trainer.fit(model, train, valid)
    with run.part("best"):
        loaded = Classifier.load_from_checkpoint(best.best_model_path)
        torch.save(loaded.model.state_dict(), run.folder / "model.pth")
        network = {"img_size": 32, "patch_size": 8, "depth": 4, "num_classes": 10}
        create_model("vit_tiny_patch16_224", checkpoint_path=str(run.folder / "model.pth"), **network)
    with run.part("predict"):
        run.predicted(torch.cat(trainer.predict(loaded, valid)))
    with run.part("fit again"):
        run.lightning.Trainer(**run.options(max_epochs=1, gradient_clip_val=1.0)).fit(model, train, valid)


def forecasting(network: str, **options: Any) -> Callable[[Run], None]:
    return lambda run: pytorch_forecasting(run, network, **options)


FLOWS: dict[str, tuple[str, Callable[[Run], None]]] = {
    "chemprop": ("lightning.pytorch", chemprop),
    "pytorch-forecasting TFT": ("lightning.pytorch", forecasting("TemporalFusionTransformer", hidden_size=16)),
    "pytorch-forecasting NBeats": ("lightning.pytorch", forecasting("NBeats", widths=[32, 128])),
    "gluonts": ("lightning.pytorch", gluonts),
    "neuralforecast": ("pytorch_lightning", neuralforecast),
    "timm": ("lightning.pytorch", timm),
}
"""By project: the package of Lightning that it imports, and the flow."""


def main(project: str, method: str, folder: str) -> None:
    lightning, flow = FLOWS[project]
    if method.startswith("zenflow"):
        import_module(
            "lightning_zenflow" if lightning == "lightning.pytorch" else "lightning_zenflow.pytorch_lightning"
        )
    run = Run(method, Path(folder), import_module(lightning))
    try:
        flow(run)
    except Exception as error:
        if not run.error:
            raise
        sys.excepthook(type(error), error, error.__traceback__)
    found = {"losses": run.losses, "predictions": run.predictions, "parts": run.parts, "error": run.error}
    (run.folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
