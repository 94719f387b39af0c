"""The benchmark of GLUE: a run of two methods from end to end, which continues, and the report."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.glue import __main__ as glue
from benchmarks.glue.report import write_report
from benchmarks.glue.run import Record
from tiny_models import save_tiny_model


@pytest.mark.timeout(600)
def test_runs_leave_a_file_each_and_are_not_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [f"{i}\tthe plot is {'dull' if i % 2 else 'warm'}\tthe cast\tnot_entailment" for i in range(6)]
    rows[0] = "0\tthe plot\tthe cast\tentailment"
    (tmp_path / "data" / "RTE").mkdir(parents=True)
    for stem in ("train", "dev"):
        text = "\n".join(["index\tsentence1\tsentence2\tlabel", *rows])
        (tmp_path / "data" / "RTE" / f"{stem}.tsv").write_text(f"{text}\n")
    save_tiny_model(tmp_path / "model", "bert", max_position_embeddings=128)
    arguments = ["--data-dir", str(tmp_path / "data"), "--pretrained", str(tmp_path / "model"), "--tasks", "RTE"]
    arguments += ["--methods", "auto,zenflow", "--lrs", "0.001", "--seeds", "1", "--jobs=2", "--results", str(tmp_path)]
    assert glue.main(arguments) == 0
    assert "[2/2, " in capsys.readouterr().out
    found = [json.loads((tmp_path / "glue" / f"RTE_{m}_0.001_1.json").read_text()) for m in ("auto", "zenflow")]
    assert [record["error"] for record in found] == [None, None]
    assert found[0]["initial_weights"] == found[1]["initial_weights"]
    assert all(0 <= record["score"] <= 1 for record in found)
    assert 0 <= found[0]["clipped"] <= 1 and sum(found[1]["schedules"].values()) == 3
    assert glue.main(arguments) == 0
    assert "/2, " not in capsys.readouterr().out
    assert len(list((tmp_path / "glue").iterdir())) == 2


def test_the_first_seed_chooses_the_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = {("auto", 1e-4): 0.5, ("auto", 3e-4): 0.4, ("zenflow", 1e-4): 0.1, ("zenflow", 3e-4): 0.2}

    def scored(_: object, record: Record, *__: object, **___: object) -> Record:
        return replace(record, score=scores[record.method, record.lr], initial_weights=str(record.seed))

    monkeypatch.setattr(glue, "run_process", scored)
    arguments = ["--data-dir", "data", "--pretrained", "model", "--tasks", "RTE", "--methods", "auto,zenflow"]
    options = glue.parse_arguments([*arguments, "--lrs", "1e-4,3e-4", "--seeds", "1,2,3"])
    glue.run_missing(options, tmp_path)
    assert {(run.method, run.lr) for run in glue.stored(tmp_path) if run.seed == 1} == scores.keys()
    others = [(run.method, run.lr) for run in glue.stored(tmp_path) if run.seed != 1]
    assert sorted(others) == [("auto", 1e-4)] * 2 + [("zenflow", 3e-4)] * 2


def test_the_table_has_each_method_at_its_best_rate(tmp_path: Path) -> None:
    def record(method: str, lr: float, seed: int, score: float, **fields: object) -> Record:
        values = {"train_loss": [1.0, 0.5], "initial_weights": str(seed), "score": score, "seconds": 9.0, **fields}
        return Record(task="CoLA", method=method, lr=lr, seed=seed, commit="abc", hardware="one", **values)

    records = [
        *(record("auto", 1e-4, seed, 0.4 + seed / 100, clipped=0.25) for seed in (1, 2)),
        # More, but of one seed.
        record("auto", 5e-5, 1, 0.9, clipped=1.0),
        *(record("zenflow", lr, 1, 4000 * lr, schedules={"S=1, d=0": 30, "S=1, d=1": 10}) for lr in (1e-4, 5e-5)),
        record("zenflow_int8", 1e-4, 1, 0.0, error="RuntimeError: no"),
    ]
    text = write_report(records, tmp_path)
    auto, zenflow = (line.split("|") for line in text.splitlines() if "41.5" in line or "ZenFlowStrategy" in line)
    assert [cell.strip() for cell in auto[2:-1]] == [
        *("0.0001", "41.5", "41.0..42.0", "2", "5e-05: 90.0; 0.0001: 41.5", "25%", "", "9"),
    ]
    assert [cell.strip() for cell in zenflow[2:4]] == ["0.0001", "40.0"] and "S=1, d=1: 25%" in zenflow[-3]
    assert "CoLA_zenflow_int8_0.0001_1: RuntimeError: no" in text
    assert (tmp_path / "glue.md").read_text() == f"{text}\n"
    assert "<svg" in (tmp_path / "glue.svg").read_text()
    records[0].initial_weights = "others"
    with pytest.raises(ValueError, match="CoLA_auto_5e-05_1: all runs of a seed must begin with the same weights"):
        write_report(records, tmp_path)
