"""Runs Lightning's own tests with `ZenFlowStrategy` in the place of its strategies, and compares the failures with a list of deviations.

    scripts/lightning_suite CHECKOUT [TEST ...]

CHECKOUT is a clone of Lightning at the installed version, or the nearest tag to it. Nothing is downloaded. A TEST is a file, a folder or a
test below `tests/tests_pytorch`; without any, those of `SELECTION` run. `lightning_plugin` says what is replaced.

The exit status is 1 if

- a test fails that no deviation lists, unless it fails with Lightning's own strategies as well, on this machine;
- a listed test fails with an error that the deviation does not describe;
- a listed test passes, so that the deviation is stale.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml
from tabulate import tabulate

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
DEVIATIONS = HERE / "lightning_deviations.yaml"
FOLDER = "tests_pytorch/"
SELECTION = ("strategies/test_deepspeed.py", "loops", "callbacks", "checkpointing", "trainer")


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """Tests that fail for one reason."""

    reason: str
    """Why they may fail."""
    error: str
    """A regular expression that is found in the error of each of them."""
    tests: tuple[str, ...]
    """Names below `tests_pytorch`; without parameters in brackets: with each of them."""

    def lists(self, test: str) -> bool:
        """Whether it lists a test, which is named with its parameters."""
        return test in self.tests or test.partition("[")[0] in self.tests


@dataclass(kw_only=True)
class Outcome:
    """What became of one test."""

    status: str = "passed"
    error: str = ""


@dataclass(kw_only=True)
class Comparison:
    """Outcomes beside the list of deviations."""

    complaints: list[str] = field(default_factory=list)
    """What has to be mended; a line each."""
    of_reason: Counter[str] = field(default_factory=Counter)
    """Tests that deviate, by reason."""
    fail_anyway: list[str] = field(default_factory=list)
    """Tests that fail with Lightning's own strategies as well."""
    passed: int = 0
    skipped: int = 0


def read_deviations(path: Path = DEVIATIONS) -> list[Deviation]:
    """The list of deviations.

    Raises:
        ValueError: a test is listed twice.
    """
    entries = yaml.safe_load(path.read_text(encoding="utf-8")) or []
    deviations = [Deviation(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]
    counts = Counter(test for deviation in deviations for test in deviation.tests)
    twice = sorted(test for test, count in counts.items() if count > 1)
    if twice:
        raise ValueError(f"{path.name}: each test must be listed once, got more of {', '.join(twice)}")
    return deviations


def read_outcomes(path: Path) -> dict[str, Outcome]:
    """Outcomes by test, from a file that `lightning_plugin` wrote."""
    outcomes: dict[str, Outcome] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        phase = json.loads(line)
        name = phase["nodeid"].partition(FOLDER)[2]
        outcome = outcomes.setdefault(name, Outcome())
        if phase["outcome"] == "failed":
            outcome.status, outcome.error = "failed", f"{outcome.error} {phase['error']}".strip()
        elif phase["outcome"] == "skipped" and outcome.status == "passed":
            outcome.status, outcome.error = "skipped", phase["error"]
    return outcomes


def compare(
    outcomes: Mapping[str, Outcome], deviations: Sequence[Deviation], fail_anyway: Iterable[str] = ()
) -> Comparison:
    """Compares outcomes with the list.

    Args:
        outcomes: with `ZenFlowStrategy`, by test.
        deviations: the list.
        fail_anyway: tests that fail with Lightning's own strategies as well.
    """
    result, anyway = Comparison(), frozenset(fail_anyway)
    for test, outcome in outcomes.items():
        listed = next((deviation for deviation in deviations if deviation.lists(test)), None)
        if outcome.status == "skipped":
            result.skipped += 1
        elif outcome.status == "passed":
            result.passed += 1
            if listed is not None:
                result.complaints.append(f"{test} passes: remove it from {DEVIATIONS.name}")
        elif test in anyway:
            result.fail_anyway.append(test)
        elif listed is None:
            result.complaints.append(f"{test} fails: {outcome.error}")
        elif re.search(listed.error, outcome.error) is None:
            result.complaints.append(f"{test} must fail with {listed.error!r}, got {outcome.error!r}")
        else:
            result.of_reason[listed.reason] += 1
    return result


def run(
    checkout: Path, tests: Iterable[str], *, only: Iterable[str] = (), own_strategies: bool = False, quiet: bool = False
) -> dict[str, Outcome]:
    """Runs tests in a process of their own, and returns their outcomes.

    Args:
        checkout: of Lightning.
        tests: files, folders or tests below `tests_pytorch`.
        only: names of the tests in them to run; none: all.
        own_strategies: whether Lightning's own strategies train.
        quiet: whether pytest's output is not shown.
    """
    path = os.pathsep.join([str(ROOT), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    with TemporaryDirectory() as folder:
        results, names = Path(folder) / "results.jsonl", Path(folder) / "only.txt"
        command = [sys.executable, "-m", "pytest", "-p", "lightning_plugin", f"--results={results}"]
        command += [FOLDER + test for test in tests]
        if listed := "\n".join(only):
            names.write_text(listed, encoding="utf-8")
            command += [f"--only={names}"]
        # Not Lightning's own options: doctests, and colours. A test that hangs ends itself.
        command += ["-o", "addopts=", "-p", "no:cacheprovider", "--timeout=120", "--quiet", "--tb=short", "--no-header"]
        command += ["--own-strategies"] if own_strategies else []
        subprocess.run(
            command,
            cwd=checkout / "tests",
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.DEVNULL if quiet else None,
            check=False,
        )
        return read_outcomes(results)


def report(comparison: Comparison, outcomes: Mapping[str, Outcome], tests: Sequence[str], revision: str) -> str:
    """The summary as a page of the documentation."""
    needs_gpu = sum(outcome.status == "skipped" and "GPUs>=" in outcome.error for outcome in outcomes.values())
    versions = ", ".join(f"{name} {version(name)}" for name in ("lightning", "torch", "deepspeed"))
    counts = [
        ("passed", comparison.passed),
        ("deviate, for a reason below", comparison.of_reason.total()),
        ("fail with Lightning's own strategies as well", len(comparison.fail_anyway)),
        (f"skipped by Lightning ({needs_gpu} of them need a GPU)", comparison.skipped),
        ("all", len(outcomes)),
    ]
    reasons = [(count, reason) for reason, count in comparison.of_reason.most_common()]
    lines = [
        "# Lightning's own tests",
        "",
        "Lightning's tests with `ZenFlowStrategy` (S = 1, d = 0) in the place of its default strategy and of `DeepSpeedStrategy`, and",
        "AdamW in the place of SGD. `scripts/lightning_suite CHECKOUT --record` writes this page;",
        "[development.md](development.md#lightnings-own-tests) says more.",
        "",
        f"Tests of Lightning {revision} ({', '.join(tests)}),",
        f"with {versions}, on the CPU.",
        "",
        tabulate(counts, headers=("tests", "number"), tablefmt="github"),
        "",
        "## Deviations",
        "",
        "`tests/foreign/lightning_deviations.yaml` lists the tests, with the error of each reason.",
        "",
        tabulate(reasons, headers=("tests", "reason"), tablefmt="github"),
        "",
    ]
    if comparison.fail_anyway:
        lines += ["## Fail with Lightning's own strategies as well", ""]
        counts_anyway = Counter(test.partition("[")[0] for test in comparison.fail_anyway)
        lines += [tabulate(sorted(counts_anyway.items()), headers=("test", "number"), tablefmt="github"), ""]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="scripts/lightning_suite", description=__doc__.partition("\n")[0])
    parser.add_argument("checkout", type=Path, help="folder of a clone of Lightning")
    parser.add_argument(
        "tests", nargs="*", default=list(SELECTION), help="files, folders or tests below tests/tests_pytorch"
    )
    parser.add_argument("--record", action="store_true", help="write docs/lightning_suite.md")
    parser.add_argument("--deviations", type=Path, default=DEVIATIONS, help=f"another list than {DEVIATIONS.name}")
    given = parser.parse_args(arguments)
    checkout = given.checkout.resolve()
    if not (checkout / "tests" / FOLDER).is_dir():
        parser.error(f"CHECKOUT must be a clone of Lightning, with tests/{FOLDER}, got {given.checkout}")
    deviations = read_deviations(given.deviations)
    outcomes: dict[str, Outcome] = {}
    for test in given.tests:
        # A process for each, so that one that dies takes no other with it.
        of_test = run(checkout, [test])
        if not of_test:
            parser.error(f"TEST must name tests below {FOLDER}, got {test}")
        outcomes |= of_test
    # What fails here without this package is no deviation of it.
    failed = [test for test, outcome in outcomes.items() if outcome.status == "failed"]
    files = sorted({test.partition("::")[0] for test in failed})
    own = run(checkout, files, only=failed, own_strategies=True, quiet=True) if failed else {}
    fail_anyway = [test for test, outcome in own.items() if outcome.status == "failed"]
    result = compare(outcomes, deviations, fail_anyway)
    if given.record:
        revision = (checkout / "src" / "version.info").read_text(encoding="utf-8").strip()
        page = report(result, outcomes, given.tests, revision)
        (ROOT / "docs" / "lightning_suite.md").write_text(page, encoding="utf-8")
    for complaint in result.complaints:
        print(complaint)
    print(
        f"{result.passed} passed, {result.of_reason.total()} deviate as listed, {len(result.fail_anyway)} fail anyway,"
        f" {result.skipped} skipped, {len(result.complaints)} to mend"
    )
    return bool(result.complaints)


if __name__ == "__main__":
    sys.exit(main())
