"""The comparison of Lightning's own tests with the list of deviations, and a run of it on a tiny checkout."""

import re
from pathlib import Path

import pytest
import yaml
from lightning_suite import Deviation, Outcome, compare, main, read_deviations

LISTED = [
    Deviation(reason="a reason", error="refused", tests=("loops/test_a.py::test_all", "loops/test_a.py::test_one[1]"))
]
REFUSED = Outcome(status="failed", error="ValueError: refused")


def test_listed_failures_are_counted_by_reason() -> None:
    outcomes = {f"loops/test_a.py::test_all[{i}]": REFUSED for i in range(3)}
    outcomes |= {"loops/test_a.py::test_one[1]": REFUSED, "loops/test_a.py::test_one[2]": Outcome()}
    result = compare(outcomes, LISTED)
    assert result.complaints == []
    assert result.of_reason == {"a reason": 4}
    assert result.passed == 1


@pytest.mark.parametrize(
    ("test", "outcome", "complaint"),
    [
        ("test_one[2]", REFUSED, "test_one[2] fails: ValueError: refused"),
        ("test_one[1]", Outcome(), "test_one[1] passes: remove it"),
        ("test_all", Outcome(status="failed", error="KeyError"), "test_all must fail with 'refused', got 'KeyError'"),
    ],
)
def test_complaints(test: str, outcome: Outcome, complaint: str) -> None:
    result = compare({f"loops/test_a.py::{test}": outcome}, LISTED)
    assert [complaint in found for found in result.complaints] == [True]


def test_what_fails_anyway_and_what_is_skipped_is_no_deviation() -> None:
    outcomes = {"a::fails": REFUSED, "loops/test_a.py::test_all[1]": Outcome(status="skipped")}
    result = compare(outcomes, LISTED, fail_anyway=["a::fails"])
    assert (result.complaints, result.fail_anyway, result.skipped) == ([], ["a::fails"], 1)


def test_the_list_is_well_formed() -> None:
    deviations = read_deviations()
    assert len({deviation.reason for deviation in deviations}) == len(deviations)
    for deviation in deviations:
        re.compile(deviation.error)
        assert deviation.tests


TESTS = """
import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

def test_trains(tmp_path):
    trainer = Trainer(default_root_dir=tmp_path, fast_dev_run=True)
    trainer.fit(BoringModel())
    assert type(trainer.strategy).__name__ == "ZenFlowStrategy"

def test_needs_the_network():
    raise OSError("no network")
"""


@pytest.mark.slow  # starts pytest twice
def test_a_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "tests" / "tests_pytorch" / "loops"
    folder.mkdir(parents=True)
    (folder / "test_a.py").write_text(TESTS)
    deviations = tmp_path / "deviations.yaml"
    arguments = [str(tmp_path), "loops", f"--deviations={deviations}"]
    deviations.write_text("[]")
    # With Lightning's own strategy, the first one fails as well.
    assert main(arguments) == 0
    assert "1 passed, 0 deviate as listed, 1 fail anyway, 0 skipped, 0 to mend" in capfd.readouterr().out
    stale = {"reason": "r", "error": "e", "tests": ["loops/test_a.py::test_trains"]}
    deviations.write_text(yaml.safe_dump([stale]))
    assert main(arguments) == 1
    assert "loops/test_a.py::test_trains passes: remove it" in capfd.readouterr().out
