"""Whatever a configuration holds, and however it is given: it is accepted, or the error names the key to blame."""

import pytest
from hypothesis import given

from configurations import FORMS, Given, configurations, examples, only_errors_that_name, strategy_of


@examples(200)
@given(configurations(junk=True, forms=FORMS[:-1]))
def test_it_is_accepted_or_refused(configuration: Given) -> None:
    with only_errors_that_name(configuration):
        strategy_of(configuration)


# jsonargparse takes a large part of a second for each.
@examples(10)
@given(configurations(junk=True, forms=FORMS[-1:]))
def test_command_line_is_accepted_or_refused(configuration: Given) -> None:
    with only_errors_that_name(configuration):
        strategy_of(configuration)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@examples(5000)
@given(configurations(junk=True))
def test_many_are_accepted_or_refused(configuration: Given) -> None:
    with only_errors_that_name(configuration):
        strategy_of(configuration)
