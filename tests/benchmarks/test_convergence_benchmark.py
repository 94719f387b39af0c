"""The convergence benchmark: its data, its reports, and two short runs from end to end."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from benchmarks.convergence import __main__ as convergence
from benchmarks.convergence import corpus, records, report, summary
from benchmarks.convergence.methods import METHODS
from benchmarks.convergence.optimizers import DelayedOptimizer, delays_by_stage
from benchmarks.convergence.records import Record, Spec
from benchmarks.convergence.settings import SETTINGS
from benchmarks.convergence.threshold_tasks import IGNORED, TASKS


def record(method: str, lr: float, seed: int, val_loss: float | None, **fields: object) -> Record:
    spec = Spec(setting="fast", method=method, lr=lr, seed=seed, steps=SETTINGS["fast"].steps)
    loss = [2.0, 1.5, 1.0]
    return Record(spec=spec, commit="abc", versions={"torch": "2"}, val_loss=val_loss, train_loss=loss, **fields)


def summarise(runs: list[Record]) -> list[summary.Summary]:
    return summary.summarise(runs, SETTINGS["fast"])


RECORDS = [
    record("zenflow_s4", 1e-3, 1, 1.01),
    record("zenflow_s4", 1e-3, 2, 1.03),
    # Lower in one seed, but not in the mean.
    record("zenflow_s4", 2e-3, 1, 0.9),
    record("zenflow_s4", 2e-3, 2, 1.5),
    record("adamw", 1e-3, 1, 1.1),
    record("adamw", 1e-3, 2, 1.1),
    record("adamw", 2e-3, 1, 0.9),
    record("adamw", 2e-3, 2, 1.1),
    # A learning rate at which one seed failed does not count, however good the other is.
    record("deepspeed_zenflow", 1e-3, 1, 0.1),
    record("deepspeed_zenflow", 1e-3, 2, None, error="RuntimeError: a | b\nc"),
    record("deepspeed_zenflow", 2e-3, 1, 1.2),
    record("zenflow_auto", 1e-3, 1, None, error="ValueError: not there yet"),
]


def test_each_method_takes_its_best_learning_rate_over_the_seeds() -> None:
    best = {summary.method: summary.best_lr for summary in summarise(RECORDS)}
    assert best == {"adamw": 2e-3, "deepspeed_zenflow": 2e-3, "zenflow_s4": 1e-3, "zenflow_auto": None}


def test_the_table_holds_means_spread_difference_and_failures() -> None:
    rows = {row.split("`")[1]: row for row in report.table(summarise(RECORDS)).splitlines()[2:]}
    for text in ("1.0200", "1.0100..1.0300", "+2.0 %", "0.001: 1.0200; 0.002: 1.2000"):
        assert text in rows["zenflow_s4"]
    assert "1.0000" in rows["adamw"] and "+0.0 %" in rows["adamw"]
    assert "RuntimeError: a / b c" in rows["deepspeed_zenflow"] and "1.2000" in rows["deepspeed_zenflow"]
    assert "failed" in rows["zenflow_auto"] and "not there yet" in rows["zenflow_auto"]
    assert len({row.count("|") for row in rows.values()}) == 1


def test_the_newest_record_of_a_run_counts_but_no_later_failure() -> None:
    again = record("adamw", 1e-3, 1, 1.3)
    failed = record("adamw", 1e-3, 1, None, error="killed")
    assert summarise([*RECORDS, again, failed])[0].by_lr[1e-3][0] is again


def test_records_survive_their_file(tmp_path: Path) -> None:
    path = tmp_path / "results" / "convergence.jsonl"
    for one in RECORDS:
        records.append(path, one)
    assert records.read(path) == RECORDS


def test_only_what_the_same_code_finished_is_skipped() -> None:
    spec = RECORDS[0].spec
    assert records.is_finished(spec, "abc", RECORDS)
    assert not records.is_finished(spec, "abd", RECORDS)
    assert not records.is_finished(RECORDS[-1].spec, "abc", RECORDS)


def test_reports_are_written(tmp_path: Path) -> None:
    tables = report.write_reports(RECORDS, tmp_path)
    assert list(tables) == ["fast"]
    assert (tmp_path / "convergence_fast.md").read_text() == tables["fast"] + "\n"
    assert (tmp_path / "convergence_fast.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("setting", ["delay_small", "recall", "moments"])
def test_every_kind_of_setting_has_a_plot(setting: str, tmp_path: Path) -> None:
    losses = {"adamw": 2.0, "delayed_1": 2.4, "zenflow_s1": 1.99, "zenflow_s4": 2.01}
    runs = [
        Record(
            spec=Spec(setting=setting, method=method, lr=1e-3, seed=seed, steps=SETTINGS[setting].steps),
            val_loss=loss,
            train_loss=[3.0, loss, loss],
            steps_to_threshold=None if method == "delayed_1" else 100 * (seed + 1),
        )
        for method, loss in losses.items()
        for seed in (0, 1)
    ]
    failed = replace(runs[-1], spec=replace(runs[-1].spec, method="zenflow_auto"), val_loss=None, error="killed")
    tables = report.write_reports([*runs, failed], tmp_path)
    assert ("delay" in tables) == (SETTINGS[setting].methods == "delay")
    if "delay" in tables:
        rows = {row.split("|")[1].strip(): row for row in tables["delay"].splitlines()[2:]}
        assert ("not reached" if setting == "recall" else "+20.0 %") in rows["AdamW, 1 step late"]
        assert "%" not in rows["ZenFlowStrategy, S and d auto"]
    assert (tmp_path / f"convergence_{setting}.png").read_bytes().startswith(b"\x89PNG")


def test_shortened_trials_are_in_no_table(tmp_path: Path) -> None:
    short = Record(spec=Spec(setting="fast", method="adamw", lr=1e-3, seed=1, steps=5), val_loss=3.0)
    assert report.write_reports([short], tmp_path) == {}


def test_the_corpus_depends_on_the_files_alone(tmp_path: Path) -> None:
    files = []
    for i in range(20):
        files.append(tmp_path / f"folder{i % 3}" / f"{i}.h")
        files[-1].parent.mkdir(exist_ok=True)
        files[-1].write_bytes(bytes([i]) * 10)
    data = corpus.read_corpus(tmp_path, files, 150)
    assert len(data) == 150
    assert corpus.read_corpus(tmp_path, reversed(files), 150) == data
    assert corpus.python_library(50_000) == corpus.python_library(50_000)
    with pytest.raises(RuntimeError, match="must have 201 bytes, got 200"):
        corpus.read_corpus(tmp_path, files, 201)


def test_unknown_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        convergence.parse_arguments(["--methods", "adamw,sgd"])
    assert "a method must be one of adamw, adamw_nearest," in capsys.readouterr().err


def test_removed_methods_keep_their_rows() -> None:
    summaries = summarise([*RECORDS, record("zenflow_s4_accumulate", 1e-3, 1, 1.2)])
    assert summaries[-1].method == "zenflow_s4_accumulate"
    assert "the window's mean gradient (removed)" in report.table(summaries)


def test_the_grid_has_every_method_where_runs_are_short() -> None:
    specs = convergence.grid(convergence.parse_arguments(["--settings", "fast,glue"]), [1, 2])
    count = {name: sum(spec.setting == name for spec in specs) for name in SETTINGS}
    main = sum(method.main and not method.clips for method in METHODS.values())
    without_delay = sum(not method.clips for method in METHODS.values())
    assert {name: n for name, n in count.items() if n} == {"fast": without_delay * 3 * 2, "glue": main * 3 * 2}
    assert len(set(specs)) == len(specs)


def test_the_quick_comparison_has_every_row_about_delay_and_one_seed() -> None:
    options = convergence.parse_arguments(["--quick"])
    specs = convergence.grid(options, options.seeds)
    assert {spec.method for spec in specs} == {name for name, method in METHODS.items() if method.about_delay}
    assert {spec.setting for spec in specs} == {"delay_quick"} and {spec.seed for spec in specs} == {1}


def test_further_seeds_run_at_the_learning_rate_that_was_best_with_the_first() -> None:
    options = convergence.parse_arguments(["--settings", "fast", "--methods", "adamw,zenflow_s4,zenflow_s1"])
    first, rest = convergence.grid(options, [1]), convergence.grid(options, [2, 3])
    specs = convergence.at_best_lr(rest, first, [replace(r, spec=replace(r.spec, lr=2 * r.spec.lr)) for r in RECORDS])
    assert {(spec.method, spec.lr) for spec in specs} == {("adamw", 4e-3), ("zenflow_s4", 4e-3)}
    assert {spec.seed for spec in specs} == {2, 3}


def test_a_learning_rate_with_fewer_seeds_is_not_the_best_one() -> None:
    (summary,) = summarise([*RECORDS[:2], record("zenflow_s4", 2e-3, 1, 0.9)])
    assert summary.best_lr == 1e-3


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_five_steps_of_two_methods(tmp_path: Path) -> None:
    arguments = ["--settings", "fast", "--methods", "adamw,zenflow_s4", "--lrs", "2e-3", "--seeds", "1", "--steps", "5"]
    folders = ["--results", str(tmp_path / "results"), "--cache", str(tmp_path / "cache")]
    assert convergence.main([*arguments, *folders]) == 0
    path = tmp_path / "results" / "convergence.jsonl"
    runs = records.read(path)
    assert [run.error for run in runs] == [None, None]
    assert len({(run.initial_weights, run.data) for run in runs}) == 1
    assert len({run.final_weights for run in runs}) == 2
    assert all(run.val_loss is not None and 2 < run.val_loss < 4 for run in runs)
    # Everything is finished, so nothing runs.
    assert convergence.main([*arguments, *folders]) == 0
    assert records.read(path) == runs


def test_runs_from_different_weights_are_not_compared(tmp_path: Path) -> None:
    runs = [record(method, 1e-3, 1, 1.0, initial_weights=method) for method in ("adamw", "zenflow_s4")]
    with pytest.raises(
        ValueError, match=r"fast, seed 1: runs must begin from the same weights, got adamw, zenflow_s4;"
    ):
        report.write_reports(runs, tmp_path)


def test_the_share_of_the_gap_that_a_method_recovers() -> None:
    losses = {"adamw": (2.0, 2.1), "delayed_1": (2.4, 2.5), "zenflow_s1": (2.04, 2.1), "delayed_4": (1.99, 2.05)}
    runs = [
        Record(
            spec=Spec(setting="delay_small", method=method, lr=1e-3, seed=seed, steps=3000),
            val_loss=loss,
            train_loss=[3.0, loss, loss],
        )
        for method, of_seeds in losses.items()
        for seed, loss in enumerate(of_seeds)
    ]
    table = report.table(summary.summarise(runs, SETTINGS["delay_small"]))
    rows = {row.split("`")[1]: row for row in table.splitlines()[2:]}
    assert "95 % (90..100)" in rows["zenflow_s1"] and "not reached" in rows["delayed_1"]
    feedback = [*runs, record("feedback_4", 1e-3, 0, 2.04)]
    rows = {row.split("`")[1]: row for row in report.table(summarise_delay(feedback)).splitlines()[2:]}
    assert "no gap" in rows["feedback_4"]


def summarise_delay(runs: list[Record]) -> list[summary.Summary]:
    return summary.summarise(runs, SETTINGS["delay_small"])


def of_recall(method: str, steps: Sequence[int | None], lr: float = 1e-3) -> list[Record]:
    """A run for each seed, from 0."""
    return [
        Record(
            spec=Spec(setting="recall", method=method, lr=lr, seed=seed, steps=3000),
            val_loss=0.0,
            steps_to_threshold=n,
        )
        for seed, n in enumerate(steps)
    ]


def steps_rows(runs: list[Record]) -> dict[str, str]:
    lines = report.steps_table(summary.summarise(runs, SETTINGS["recall"])).splitlines()[2:]
    rows = {row.split("`")[1]: row for row in lines}
    assert len(rows) == len(lines), "a row for each method"
    return rows


def test_a_threshold_counts_the_median_of_the_steps() -> None:
    (row,) = steps_rows(
        [*of_recall("adamw", (500, 700, 600)), *of_recall("adamw", (400, None, None), lr=2e-3)]
    ).values()
    for text in ("0.001", "600", "500..700", "3 of 3", "0.002: inf"):
        assert text in row


def test_methods_are_compared_over_the_seeds_that_both_have() -> None:
    rows = steps_rows([*of_recall("adamw", (100, 200, 300, 1000, 1000)), *of_recall("zenflow_s1", (110, 220, 330))])
    assert " 300 " in rows["adamw"] and "+10 %" in rows["zenflow_s1"], (
        "of all five seeds, and to 200 of the first three"
    )
    losses = {"adamw": (2.0, 2.0, 8.0), "delayed_1": (2.4, 2.4, 9.0), "zenflow_s1": (2.1, 2.1)}
    runs = [
        record(method, 1e-3, seed, loss) for method, of_seeds in losses.items() for seed, loss in enumerate(of_seeds)
    ]
    rows = {row.split("`")[1]: row for row in report.table(summarise_delay(runs)).splitlines()[2:]}
    assert "+5.0 %" in rows["zenflow_s1"] and "75 % (75..75)" in rows["zenflow_s1"]


def test_a_threshold_that_is_not_reached() -> None:
    rows = steps_rows([*of_recall("adamw", (100, 200)), *of_recall("neither", (None, None))])
    assert rows["neither"].count("not reached") == 2
    rows = steps_rows([*of_recall("adamw", (None, None)), *of_recall("zenflow_s1", (100, 200))])
    assert "%" not in rows["zenflow_s1"] and "%" not in rows["adamw"], "nothing to compare with"


def test_error_feedback_moves_on_by_the_delay_times_the_last_update() -> None:
    shown, exact = torch.nn.Linear(2, 1, bias=False), torch.nn.Linear(2, 1, bias=False)
    exact.load_state_dict(shown.state_dict())

    def rule(weights: Sequence[Tensor]) -> list[Optimizer]:
        return [torch.optim.AdamW(weights)]

    feedback = DelayedOptimizer([shown.weight], 0.1, rule=rule, delays=[2], error_feedback=True)
    plain = DelayedOptimizer([exact.weight], 0.1, rule=rule, delays=[2])
    for step in range(5):
        before = exact.weight.detach().clone()
        shown.weight.grad = exact.weight.grad = torch.tensor([[1.0 + step, -0.1 * step]])
        feedback.step()
        plain.step()
        assert torch.equal(shown.weight, exact.weight + 2 * (exact.weight - before))


def test_rules_of_the_other_optimizers() -> None:
    network = torch.nn.Sequential(
        torch.nn.Embedding(5, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 5)
    )

    def rules(name: str) -> list[Optimizer]:
        optimizer = METHODS[name].make_optimizer(network, 0.1, 0.01)
        assert isinstance(optimizer, DelayedOptimizer)
        network(torch.arange(5)).square().sum().backward()
        for _ in range(3):
            optimizer.step()
        return optimizer.rules

    (nesterov,) = rules("nesterov")
    (state, *_) = nesterov.state.values()
    assert float(state["mu_product"]) == pytest.approx(0.9**3), "beta1 does not decay"
    muon, adamw = rules("muon")
    assert [tuple(w.shape) for w in muon.param_groups[0]["params"]] == [(4, 4)]
    assert sorted(tuple(w.shape) for w in adamw.param_groups[0]["params"]) == [(4,), (4,), (4, 4), (5,), (5, 4), (5, 4)]


def test_gradients_are_applied_as_late_as_asked() -> None:
    late, on_time = torch.nn.Linear(2, 1, bias=False), torch.nn.Linear(2, 1, bias=False)
    on_time.load_state_dict(late.state_dict())

    def rule(weights: Sequence[Tensor]) -> list[Optimizer]:
        return [torch.optim.AdamW(weights, lr=0.1)]

    delayed = DelayedOptimizer([late.weight], 0.1, rule=rule, delays=[2])
    reference = DelayedOptimizer([on_time.weight], 0.1, rule=rule, delays=[0])
    history = [on_time.weight.detach().clone()]
    for step in range(6):
        gradient = torch.tensor([[1.0 + step, -0.1 * step]])
        late.weight.grad, on_time.weight.grad = gradient, gradient.clone()
        delayed.step()
        reference.step()
        history.append(on_time.weight.detach().clone())
        assert torch.equal(late.weight, history[max(0, step - 1)])
    assert delays_by_stage(torch.nn.Sequential(*(torch.nn.Linear(1, 1) for _ in range(4))), 4) == [
        3, 3, 2, 2, 1, 1, 0, 0
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["recall", "modular", "addition", "mnist1d", "digits"])
def test_a_task_is_a_function_of_the_seed(name: str) -> None:
    task = TASKS[name]()
    first, again, other = (task.train(8, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert all(map(torch.equal, first, again)) and not torch.equal(first[0], other[0])
    logits = task.network()(first[0])
    assert logits.shape[:-1] == first[1].shape and int(first[1].max()) < logits.shape[-1]


def test_answers_of_the_sequence_tasks() -> None:
    inputs, targets = TASKS["recall"]().train(4, torch.Generator().manual_seed(1))
    for row, answers in zip(inputs.tolist(), targets.tolist(), strict=True):
        known = dict(zip(row[0:16:2], row[1:16:2], strict=True))
        asked = [(row[i], answer) for i, answer in enumerate(answers) if answer != IGNORED]
        assert len(asked) == 8 and all(known[key] == answer for key, answer in asked)
    inputs, targets = TASKS["addition"]().train(4, torch.Generator().manual_seed(1))
    for row, answers in zip(inputs.tolist(), targets.tolist(), strict=True):
        a, b = (int("".join(map(str, row[i : i + 3][::-1]))) for i in (0, 4))
        total = [answer for answer in answers if answer != IGNORED]
        assert int("".join(map(str, total[::-1]))) == a + b
