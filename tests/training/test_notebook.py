"""In a notebook: training, a second fit in the next cell, an interrupted cell, several devices."""

import os
import sys

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

from example_runs import ROOT

IMPORTS = """
import signal
import lightning.pytorch as pl
from first_training import Model
from lightning_zenflow import ZenFlowStrategy

def trainer(**options):
    return pl.Trainer(
        accelerator="cpu", strategy=ZenFlowStrategy(), max_epochs=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **options
    )

model = Model()
"""

INTERRUPT = """
class Interrupt(pl.Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == 3:
            signal.raise_signal(signal.SIGINT)

trainer(devices=1, callbacks=[Interrupt()]).fit(model)
"""

FIT = "t = trainer(devices=1); t.fit(model); t.global_step"


def below(cell: nbformat.NotebookNode) -> str:
    """What is shown below a cell."""
    return "\n".join(
        output.get("text", "") + output.get("evalue", "") + output.get("data", {}).get("text/plain", "")
        for output in cell.outputs
    )


@pytest.mark.slow
def test_cells() -> None:
    """Each trains, after an interrupted one too; cells that raise do not end the notebook."""
    sources = (IMPORTS, FIT, FIT, INTERRUPT, FIT, "trainer(devices=2)")
    notebook = new_notebook(cells=[new_code_cell(code) for code in sources])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "tests" / "support"), *sys.path])}
    NotebookClient(notebook, timeout=200, kernel_name="python3", allow_errors=True).execute(env=environment)
    _, *fits, interrupted, last, several = map(below, notebook.cells)
    assert "KeyboardInterrupt" in interrupted
    for shown in (*fits, last):
        assert "64" in shown.splitlines()
        assert "ZenFlow: 64 steps, median " in shown
    assert "devices must be 1, got 2" in several
    assert "%%writefile train.py" in several
