"""The bookkeeping benchmark: a smoke run, and its arithmetic."""

import json
from pathlib import Path

import pytest

from benchmarks.step_time import bookkeeping
from benchmarks.step_time.bookkeeping import main, table
from benchmarks.step_time.models import TimedGpt
from docs.quote_tables import rows_of


def test_smoke(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # The smoke run of the times of steps has a process for each run.
    monkeypatch.setattr(bookkeeping, "run_process", lambda function, spec, **_: function(spec))
    arguments = ["--params", "25e6", "--methods", "floor,zenflow", "--repeats", "1", "--steps", "5", "--own-steps", "2"]
    assert main([*arguments, "--results", str(tmp_path)]) == 0
    written = json.loads((tmp_path / "bookkeeping.json").read_text())
    (repeat,) = written["repeats"]
    assert {name: len(step_s) for name, step_s in repeat.items()} == {
        "floor": 5, "zenflow": 5, "the model's own step": 2
    }  # fmt: skip
    assert min(min(step_s) for step_s in repeat.values()) > 0
    text = (tmp_path / "bookkeeping.md").read_text()
    assert text.strip() in capsys.readouterr().out and "ZenFlowStrategy, S=4, d=1" in text


def test_a_list_without_the_floor_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--methods", "zenflow"])
    assert "--methods must contain 'floor'" in capsys.readouterr().err


def test_table_by_hand() -> None:
    repeats = [
        {"floor": [0.010], "zenflow": [0.014, 0.016, 0.060], "the model's own step": [0.2]},
        {"floor": [0.012], "zenflow": [0.014, 0.014, 0.014], "the model's own step": [0.1]},
        {"floor": [0.010], "zenflow": [0.013, 0.013, 0.013], "the model's own step": [0.1]},
    ]
    floor, zenflow, own = rows_of(table(repeats, n_tensors=100))
    assert (floor["step ms"], floor["above floor ms"], own["step ms"]) == ("10.0", "", "100.0")
    assert (zenflow["step ms"], zenflow["above floor ms"], zenflow["min..max"]) == ("14.0", "3.0", "2.0..6.0")
    assert (zenflow["us a tensor"], zenflow["of the model's own step"]) == ("30", "3.0%")
    assert zenflow["above floor, mean ms"] == "3.0"


def test_the_narrow_model_has_the_same_tensors() -> None:
    wide, narrow = (TimedGpt(steps=1, params=25e6, batch=1, tokens=16, narrow=narrow) for narrow in (False, True))
    assert [(name, p.dim()) for name, p in wide.named_parameters()] == [
        (n, p.dim()) for n, p in narrow.named_parameters()
    ]
    assert sum(p.numel() for p in narrow.parameters()) < 0.01 * sum(p.numel() for p in wide.parameters())
