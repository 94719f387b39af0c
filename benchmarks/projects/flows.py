"""What a project's own users write: fit, load the best checkpoint, predict, fit again. Runs in the environment that has the projects:

    python benchmarks/projects/flows.py PROJECT METHOD FOLDER

writes FOLDER/found.json: losses of all fits, predictions, seconds of the parts that were done, and the error that ended the rest. Of the
code that a project's user has, only `Run.options` differs between methods.
"""

import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from run import STEPS, Run


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
    # With the default of 1e-3 rounding grows by a million in these steps.
    options |= {"learning_rate": 1e-4}
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


def scvi(run: Run) -> None:
    """https://docs.scvi-tools.org, "Introduction to scvi-tools": an autoencoder of counts. Its sampler yields batches of indices."""
    from anndata import AnnData
    from scvi import model, settings, train

    noise = np.random.default_rng(0)
    rates = noise.gamma(2, 1, (4, 50))[noise.integers(4, size=700)]
    cells = AnnData(noise.poisson(rates).astype(np.float32))
    cells.obs["batch"] = noise.integers(2, size=len(cells)).astype(str)
    model.SCVI.setup_anndata(cells, batch_key="batch")
    # Of the split; it is drawn by no generator that `seed` knows.
    settings.seed = 1
    network = model.SCVI(cells, n_hidden=32, n_latent=5)
    best = train.SaveCheckpoint(str(run.folder), monitor="elbo_validation", load_best_on_end=True)
    # None: a logger of its own.
    options = {"batch_size": 64, "early_stopping": True, "logger": None}
    with run.part("fit"):
        network.train(max_epochs=STEPS // 10, **run.options(best, **options))
    with run.part("best"):
        network.save("saved")
        saved, loaded = model.SCVI.load("saved", cells), model.SCVI.load(best.best_model_path, cells)
    with run.part("predict"):
        run.predicted(loaded.get_latent_representation())
        assert np.allclose(saved.get_latent_representation().ravel(), run.predictions)
    with run.part("fit again"):
        network.train(max_epochs=2, **run.options(**options))


def lightly(run: Run) -> None:
    """https://docs.lightly.ai, what `lightly-ssl-train` does: SimCLR. The module is made with its optimizer, and makes Trainers."""
    from lightly import data, loss, models, transforms
    from lightly.cli._helpers import load_from_state_dict
    from lightly.embedding import SelfSupervisedEmbedding
    from lightly.models.modules import SimCLRProjectionHead
    from torchvision.datasets import FakeData
    from torchvision.transforms import ToTensor

    class SimCLR(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            *layers, last = models.ResNetGenerator("resnet-9", width=0.125).children()
            self.backbone = torch.nn.Sequential(*layers, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
            self.projection_head = SimCLRProjectionHead(last.in_features, 32, 16, batch_norm=False)

        def forward(self, *views: Any) -> Any:
            return [self.projection_head(self.backbone(view)) for view in views]

    def loader(transform: Any, **options: Any) -> Any:
        images = data.LightlyDataset.from_torch_dataset(FakeData(320, (3, 32, 32)), transform)
        return torch.utils.data.DataLoader(images, 16, **options)

    run.seed()
    model = SimCLR()
    # With 1e-3 rounding grows to 3e-3 in these steps.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    train = loader(transforms.SimCLRTransform(32), collate_fn=data.MultiViewCollate(), shuffle=True, drop_last=True)
    encoder = SelfSupervisedEmbedding(model, loss.NTXentLoss(), optimizer, train)

    def fit(epochs: int) -> None:
        options = run.options(max_epochs=epochs, enable_model_summary=True)
        # Its Trainer has callbacks of its own.
        callbacks = options.pop("callbacks")
        encoder.configure_callbacks = lambda: callbacks
        encoder.train_embedding(options, {"save_top_k": 1}, {"max_depth": 1})

    with run.part("fit"):
        fit(STEPS // len(train))
    with run.part("best"):
        loaded = SimCLR()
        load_from_state_dict(loaded, torch.load(encoder.checkpoint)["state_dict"])
    with run.part("predict"):
        run.predicted(SelfSupervisedEmbedding(loaded, None, None, None).embed(loader(ToTensor()))[0])
    with run.part("fit again"):
        fit(1)


def forecasting(network: str, **options: Any) -> Callable[[Run], None]:
    return lambda run: pytorch_forecasting(run, network, **options)


FLOWS: dict[str, tuple[str, Callable[[Run], None]]] = {
    "chemprop": ("lightning.pytorch", chemprop),
    "pytorch-forecasting TFT": ("lightning.pytorch", forecasting("TemporalFusionTransformer", hidden_size=16)),
    "pytorch-forecasting NBeats": ("lightning.pytorch", forecasting("NBeats", widths=[32, 128])),
    "gluonts": ("lightning.pytorch", gluonts),
    "neuralforecast": ("pytorch_lightning", neuralforecast),
    "scvi-tools": ("lightning.pytorch", scvi),
    "lightly": ("pytorch_lightning", lightly),
}
"""By project: the package of Lightning that it imports, and the flow."""


def main(project: str, method: str, folder: str) -> None:
    lightning, flow = FLOWS[project]
    run = Run(method, Path(folder).resolve(), lightning)
    # Some projects write files into the current folder.
    os.chdir(folder)
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
