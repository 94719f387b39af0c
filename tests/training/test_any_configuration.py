"""Whatever a configuration holds, and however it is given: training takes two steps, or the error names the key to blame."""

import pytest
from hypothesis import given

from configurations import Given, configurations, examples, only_errors_that_name, strategy_of
from harness import fit
from models import TINY, LinearLossModule

pytestmark = pytest.mark.usefixtures("no_worker_is_left")


def train(configuration: Given) -> None:
    with only_errors_that_name(configuration):
        # In several micro-batches, or `accumulate_on` would do nothing.
        model = LinearLossModule(shapes=TINY, accumulate=2)
        fit(model, strategy_of(configuration), steps=2, accumulate_grad_batches=2)
        assert model.trainer.global_step == 2


@examples(60)
@given(configurations(junk=False))
def test_it_trains(configuration: Given) -> None:
    train(configuration)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@examples(2000)
@given(configurations(junk=False) | configurations(junk=True))
def test_many_train_or_are_refused(configuration: Given) -> None:
    train(configuration)
