"""Whether a random training under a random configuration ends with AdamW's bits or with an error that names what is wrong."""

import re
from dataclasses import replace

from lightning.pytorch.utilities.exceptions import MisconfigurationException

from configurations import Given, OutOfScopeError, only_errors_that_name, strategy_of
from lightning_zenflow.config import KEYS
from random_training import Training, must_be_refused, train

BOUNDS = r" update_interval must be an integer from 1 to max_update_interval=\d+, got \d+;"


def outcome(given: Given, training: Training) -> str:
    """Trains, and checks everything.

    Returns:
        What `train` found, or "refused: " and the key that the error names.
    """
    mistake = training.mistake
    if mistake is not None and mistake.where == "keywords":
        given = replace(given, config={**given.config, mistake.key: mistake.value})
    wanted = must_be_refused(training)
    try:
        found = train(training, strategy_of(given))
    except OutOfScopeError:
        assert given.junk is not None
        return "refused: another library's parser"
    except (ValueError, TypeError, MisconfigurationException) as error:
        if re.search(BOUNDS, str(error)):
            return "refused: update_interval"
        if wanted is not None and (training.mistake or re.search(wanted, str(error))):
            assert re.search(wanted, str(error)), f"does not say {wanted!r}: {error}"
            return f"refused: {f'{mistake.where}, {mistake.key}' if mistake else 'optimizer, params'}"
        with only_errors_that_name(given):
            raise
        return f"refused: {given.junk if given.junk in KEYS else 'an unknown key'}"
    assert wanted is None, f"it trained, but should have been refused with {wanted!r}"
    return found
