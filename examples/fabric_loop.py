"""The training of glue.py as a plain loop under Fabric: the same model, data and settings, and the same weights, bit for bit.

    python examples/fabric_loop.py
    python examples/fabric_loop.py trainer.max_epochs=1 model.lr=1e-3

Settings are those of conf/glue.yaml, overridden by OmegaConf's `key=value`. Logs and the checkpoint are below logs/fabric.
"""

import sys
from pathlib import Path

import torch
from lightning.fabric import Fabric
from lightning.fabric.loggers import CSVLogger
from omegaconf import OmegaConf

from common.optimizers import adamw_with_warmup
from glue_task.data import GlueDataModule
from glue_task.module import GlueClassifier
from lightning_zenflow.fabric import ZenFlowStrategy


def main(arguments: list[str]) -> None:
    file = OmegaConf.load(Path(__file__).parents[1] / "conf" / "glue.yaml")
    settings = OmegaConf.to_object(OmegaConf.merge(file, OmegaConf.from_dotlist(arguments)))
    trainer, hyperparameters = settings["trainer"], {**settings["model"], "lr": float(settings["model"]["lr"])}

    strategy = ZenFlowStrategy(**trainer["strategy"]["init_args"])
    hardware = {key: trainer[key] for key in ("accelerator", "devices", "precision")}
    fabric = Fabric(strategy=strategy, loggers=CSVLogger("logs", name="fabric"), **hardware)
    fabric.seed_everything(settings["seed_everything"])
    data = GlueDataModule(**settings["data"], pretrained=hyperparameters.get("pretrained"))
    data.setup("fit")
    sizes = {"vocab_size": data.vocab_size, "pad_token_id": data.pad_token_id, "max_length": data.max_length}
    module = GlueClassifier(task=data.task.name, **sizes, **hyperparameters)
    # It seeds again. Where it comes after the model, as in the Trainer, the batches are the Trainer's.
    fabric.launch()

    batches, evaluation = fabric.setup_dataloaders(data.train_dataloader(), *data.val_dataloader())
    epochs, steps = trainer["max_epochs"], trainer.get("max_steps", trainer["max_epochs"] * len(batches))
    keys = ("lr", "betas", "weight_decay", "warmup_ratio")
    configured = adamw_with_warmup(
        module.parameters(), eps=1e-8, steps=steps, **{key: hyperparameters[key] for key in keys}
    )
    scheduler = configured["lr_scheduler"]["scheduler"]
    model, optimizer = fabric.setup(module, configured["optimizer"])

    step = 0
    for epoch in range(epochs):
        model.train()
        for index, batch in zip(range(steps - step), batches, strict=False):
            fabric.backward(model.training_step(batch, index))
            fabric.clip_gradients(model, optimizer, max_norm=trainer["gradient_clip_val"])
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            step += 1
            if step % trainer["log_every_n_steps"] == 0:
                fabric.log_dict(strategy.metrics(), step)
        # A forward pass in evaluation mode makes the weights exact first.
        model.eval()
        with torch.no_grad():
            for index, batch in enumerate(evaluation):
                model.validation_step(batch, index)
        scores = {f"val/{name}": float(value) for name, value in module.validation_metrics.compute().items()}
        fabric.log_dict(scores, step)
        fabric.print(f"epoch {epoch}, step {step}: {scores}")
        if step == steps:
            break
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": step}
    fabric.save("logs/fabric/last.ckpt", state)
    fabric.print(strategy.summary())
    fabric.logger.finalize("success")


if __name__ == "__main__":
    main(sys.argv[1:])
