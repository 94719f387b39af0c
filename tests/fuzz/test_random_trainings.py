"""Random configurations and random modules train with AdamW's bits, or are refused by an error that names what is wrong."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st

from configurations import examples
from random_options import of_configurations, of_modules
from random_runs import outcome

Count = Callable[[str, str], None]
KINDS: dict[str, Callable[[], st.SearchStrategy[Any]]] = {
    "configurations": of_configurations,
    "modules": of_modules,
}
PORTION = 200


def run(kind: str, n: int, portion: int, count: Count) -> None:
    """Some examples of one kind; another portion has others."""

    # Nothing is shrunk: an example takes a large part of a second.
    @settings(examples(n), phases=[Phase.generate])
    @seed(portion)
    @given(KINDS[kind]())
    def each(example: Any) -> None:
        count(kind, outcome(*example))

    each()


@pytest.mark.parametrize(("kind", "n"), [("configurations", 20), ("modules", 10)])
def test_a_few(kind: str, n: int, outcomes: Count) -> None:
    run(kind, n, 0, outcomes)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("portion", range(1, 11))
def test_two_thousand_configurations(portion: int, outcomes: Count) -> None:
    run("configurations", PORTION, portion, outcomes)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_two_hundred_modules(outcomes: Count) -> None:
    run("modules", PORTION, 1, outcomes)
