"""`examples/fabric_loop.py` runs."""

from pathlib import Path

import pytest

from example_runs import GLUE_SAMPLE, csv_rows, run_example


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_example(tmp_path: Path) -> None:
    settings = ["trainer.max_steps=20", "trainer.accelerator=cpu", f"data.data_dir={GLUE_SAMPLE}"]
    printed = run_example(tmp_path, "fabric_loop.py", *settings, timeout=300)
    assert "epoch 0, step 20:" in printed
    assert (tmp_path / "logs" / "fabric" / "last.ckpt").is_file()
    names = {name for row in csv_rows(tmp_path / "logs" / "fabric" / "version_0" / "metrics.csv") for name in row}
    assert {"train/lm_loss", "val/accuracy", "zenflow/stall/device_percent"} <= names
