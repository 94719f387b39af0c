"""In a notebook: training, a second fit in the next cell, an interrupted cell, several devices."""

import os
import sys

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

from example_runs import ROOT

pytestmark = pytest.mark.slow

IMPORTS = """
import signal
import lightning.pytorch as pl
from first_training import Model
from lightning_zenflow import ZenFlowStrategy

def trainer(**options):
    return pl.Trainer(
        accelerator="cpu", strategy=ZenFlowStrategy(), max_epochs=1, logger=False, enable_checkpointing=False,
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


def texts(cell: nbformat.NotebookNode) -> str:
    """What is shown below a cell."""
    return "\n".join(
        output.get("text", "") + output.get("evalue", "") + output.get("data", {}).get("text/plain", "")
        for output in cell.outputs
    )


@pytest.fixture(scope="module")
def cells() -> list[nbformat.NotebookNode]:
    """The cells of a notebook after its execution; cells that raise do not end it."""
    notebook = new_notebook(
        cells=[new_code_cell(code) for code in (IMPORTS, FIT, FIT, INTERRUPT, FIT, "trainer(devices=2)")]
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "tests" / "support"), *sys.path])}
    client = NotebookClient(notebook, timeout=200, kernel_name="python3", allow_errors=True)
    client.execute(env=environment)
    return notebook.cells


def test_trains_in_each_cell(cells: list[nbformat.NotebookNode]) -> None:
    """Twice, and again after an interruption."""
    assert "KeyboardInterrupt" in texts(cells[3])
    for cell in (cells[1], cells[2], cells[4]):
        shown = texts(cell)
        assert "32" in shown.splitlines()
        # The summary's rows, as columns.
        assert "step, median and p99  " in shown


def test_several_devices_are_refused(cells: list[nbformat.NotebookNode]) -> None:
    assert "devices must be 1, got 2" in texts(cells[5])
    assert "%%writefile train.py" in texts(cells[5])
