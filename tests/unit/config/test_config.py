"""ZenFlowConfig: bounds and defaults of each key; keywords and documentation agree with the fields."""

import inspect
import logging
import math
import pydoc
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

from docs.configuration import DOCUMENT, with_table
from lightning_zenflow import StallMonitor, ZenFlowStrategy
from lightning_zenflow.config import KEYS, ZenFlowConfig, allowed_values
from lightning_zenflow.core.schedule import StalenessCompensation
from lightning_zenflow.fabric import ZenFlowStrategy as FabricStrategy

SHARE = ([0, 1, 0.5], [-0.01, 1.01, "auto", 10**400])
BOOLEAN = ([True, False], [0, 1, "true", "auto"])
FACTOR = (["auto", 0, 0.3, 1e6], [-0.5, 2e6])
VALUES: dict[str, tuple[list[Any], list[Any]]] = {
    "topk_ratio": SHARE,
    "select_strategy": (["step", "epoch", "auto"], ["steps", "pkg.mod:fn", 1]),
    "select_interval": (["auto", 0, 10**30], [1.5]),
    "update_interval": (["auto", 1, 1024], [0, 1025, "4", 4.0]),
    "max_update_interval": ([1, 1024], [0, 1025, "auto"]),
    "publish_lag": (["auto", 0, 1], [-1, 2, 1.0, True]),
    "clip_prediction": ([True, False, "auto"], [0, 1, "true"]),
    "full_warm_up_rounds": ([0, 10], ["auto"]),
    "overlap_step": BOOLEAN,
    "weight_prediction": FACTOR,
    "provisional_scale": FACTOR,
    "offload_ratio": ([*SHARE[0], "auto"], [-0.01, 1.01, "all"]),
    "auto_ratio": ([0.99], [-0.01, 1.01, "auto"]),
    "moments_dtype": (["float32", "bfloat16", "int8"], ["fp32", "bf16", "auto", 16]),
    "offload": ([False], [0, 1, "true", "auto"]),
    "accumulate_on": (["auto", "device", "host"], ["cpu", "Host", ["host"]]),
    "worker_cores": (["auto", 3, [4, 0], range(2)], [0, 1.0, "2", [], [-1], [True], [1.0], ["1"]]),
    "pt_reserved_cores_perc": ([*SHARE[0], "auto"], [-0.01, 1.01, "half", 10**400]),
    "worker_timeout": ([1, 1e6], [0, 2e6]),
    "max_worker_restarts": ([0, 100], ["auto"]),
    "checkpoint_format": (["auto", "deepspeed", "lightning"], ["file", "Lightning", 1]),
    "sync_checkpoints": BOOLEAN,
    "async_checkpoints": BOOLEAN,
    "stall_monitor": BOOLEAN,
}
"""Allowed values of each key, and values that are not."""

JUNK = [None, True, math.nan, math.inf, -1, "auto ", "", {}, [[1]]]
"""Refused by every key, but for None as the default and True as a boolean."""


@pytest.mark.parametrize("key", KEYS)
def test_values_of_each_key(key: str) -> None:
    allowed, refused = VALUES[key]
    for value in allowed:
        stored = getattr(ZenFlowConfig(**{key: value}), key)
        plain = list(stored) if isinstance(stored, tuple) else stored
        assert plain == (list(value) if isinstance(value, range) else value)
    default, names = KEYS[key]["default"], allowed_values(KEYS[key])
    for value in [
        *refused,
        *(v for v in JUNK if v is not default and not (v is True and any(isinstance(a, bool) for a in allowed))),
    ]:
        with pytest.raises(ValueError) as error:
            ZenFlowConfig(**{key: value})
        expected = f"ZenFlowConfig: {key} must be {names}, got {value!r}; leave it out for the default, {default!r}"
        assert str(error.value) == expected


def test_keys_without_effect(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert ZenFlowConfig(offload=True, auto_ratio=0.5) == ZenFlowConfig(offload=False, auto_ratio=0.99)
    assert [message.partition(".")[0] for message in caplog.messages] == [
        "ZenFlow ignores auto_ratio=0",
        "ZenFlow ignores offload=True",
    ]


def test_keywords_of_the_strategy_are_the_keys() -> None:
    keywords = inspect.signature(ZenFlowStrategy).parameters
    assert [name for name in keywords if name in KEYS] == list(KEYS)
    types = get_type_hints(ZenFlowStrategy.__init__)
    for key in KEYS:
        assert keywords[key].default is None
        # LightningCLI reads the types of words.
        assert {word for member in get_args(types[key]) for word in get_args(member) if isinstance(word, str)} == {
            word for part in KEYS[key].get("anyOf", [KEYS[key]]) for word in [*part.get("enum", ()), part.get("const")]
        } - {None}
        # Passed on under its own name.
        given = ZenFlowStrategy(**{key: KEYS[key]["default"]}).zenflow_config
        assert given.model_fields_set == {key}


@pytest.mark.parametrize("documented", [ZenFlowStrategy, FabricStrategy, StallMonitor])
def test_help_has_the_arguments(documented: type[Any]) -> None:
    """Python's `help` does not look for the docstring of a base class."""
    assert "Args:" in pydoc.plain(pydoc.render_doc(documented)).split("Method resolution order")[0]


def test_the_command_line(tmp_path: Path) -> None:
    """Keys, where weights are, and a file: without `dict_kwargs`."""
    (path := tmp_path / "zenflow.yaml").write_text("provisional_scale: 0.3")

    def strategy(*options: str) -> Any:
        arguments = [f"--trainer.strategy{option}" for option in ("=lightning_zenflow.ZenFlowStrategy", *options)]
        arguments = ["--seed_everything=0", "--trainer.accelerator=cpu", *arguments]
        return LightningCLI(BoringModel, args=arguments, run=False, save_config_callback=None).trainer.strategy

    keys = {"worker_cores": [0], "update_interval": "auto", "topk_ratio": 0}
    options = [f".{key}={value}" for key, value in keys.items()]
    zero = strategy(".stage=3", ".offload_parameters=true").config["zero_optimization"]
    assert (zero["stage"], zero["offload_param"]["device"]) == (3, "cpu")
    assert strategy(f".config={path}", *options).zenflow_config == ZenFlowConfig(provisional_scale=0.3, **keys)


def test_documented_table_is_that_of_the_fields() -> None:
    text = DOCUMENT.read_text()
    assert with_table(text) == text, "docs/configuration.md is out of date: run `python -m docs.configuration`"


@pytest.mark.parametrize(
    ("keys", "intervals", "lags", "unmeasured"),
    [
        ({}, [1, 2, 4, 8, 16], [0, 1], (1, 0)),
        ({"max_update_interval": 7}, [1, 2, 4], [0, 1], (1, 0)),
        ({"update_interval": 6, "publish_lag": 1}, [6], [1], (6, 1)),
        ({"publish_lag": 1, "overlap_step": False}, [1], [0], (1, 0)),  # a longer window would hide no more
        ({"update_interval": 4, "overlap_step": False}, [4], [0], (4, 0)),
        ({"update_interval": 1, "publish_lag": 0}, [1], [0], (1, 0)),  # asked for: nothing late
        ({"update_interval": 4}, [4], [0, 1], (4, 0)),
        ({"publish_lag": 1}, [1, 2, 4, 8, 16], [1], (1, 1)),
    ],
)
def test_schedules_to_choose_from(
    keys: dict[str, Any], intervals: list[int], lags: list[int], unmeasured: tuple[int, int]
) -> None:
    """Without measurements what is given stays; of what is "auto", S and d are the least stale."""
    config = ZenFlowConfig(topk_ratio=0.3, **keys)
    assert (config.update_intervals, config.publish_lags) == (intervals, lags)
    fixed = config.without_measurements()
    assert (fixed.update_intervals, fixed.publish_lags) == ([unmeasured[0]], [unmeasured[1]])
    assert not fixed.measures and fixed.topk_ratio == 0.3 and fixed.without_measurements() == fixed


NOTHING_LATE = {"update_interval": 1, "publish_lag": 0}


def test_compensation_of_staleness() -> None:
    """None where nothing is late, unless it is asked for."""
    for keys, weight_prediction, provisional_scale in (
        ({}, "auto", "auto"),
        ({"provisional_scale": 0.3}, "auto", 0.3),
        ({**NOTHING_LATE, "weight_prediction": 2.5}, 2.5, 0.0),
    ):
        expected = StalenessCompensation(weight_prediction=weight_prediction, provisional_scale=provisional_scale)
        assert ZenFlowConfig(**keys).compensation == expected


@pytest.mark.parametrize(
    ("keys", "others", "same"),
    [
        # The same value, said in another way.
        ({}, {"clip_prediction": True, "select_strategy": "step"}, True),
        # Keys without effect.
        (
            NOTHING_LATE,
            {"topk_ratio": 0.3, "select_strategy": "epoch", "select_interval": 5, "provisional_scale": 1.0},
            True,
        ),
        (NOTHING_LATE, {"max_update_interval": 4}, True),
        (NOTHING_LATE, {"update_interval": "auto", "max_update_interval": 1}, True),
        ({"update_interval": 4}, {"max_update_interval": 2}, True),
        ({"max_update_interval": 16}, {"max_update_interval": 31}, True),
        ({"topk_ratio": 0}, {"select_strategy": "epoch", "select_interval": 5}, True),
        ({"overlap_step": False}, {"clip_prediction": False, "publish_lag": 1, "topk_ratio": 0.3}, True),
        ({"update_interval": 4, "publish_lag": 1}, {"clip_prediction": False}, True),
        ({**NOTHING_LATE, "clip_prediction": False}, {"offload_ratio": 0.5}, True),
        # With one.
        ({}, {"clip_prediction": False}, False),
        ({}, {"select_strategy": "epoch"}, False),
        ({}, {"max_update_interval": 4}, False),
        (NOTHING_LATE, {"weight_prediction": 1.0}, False),
        (NOTHING_LATE, {"clip_prediction": False}, False),
        (NOTHING_LATE, {"full_warm_up_rounds": 3}, False),
        ({"publish_lag": 1}, {"topk_ratio": 0.3}, False),
        ({"publish_lag": 1}, {"select_interval": 5}, False),
        (NOTHING_LATE, {"offload_ratio": 0.5}, False),
    ],
)
def test_numbers_depend_on_keys_with_effect(keys: dict[str, Any], others: dict[str, Any], same: bool) -> None:
    assert (ZenFlowConfig(**keys).numeric_values() == ZenFlowConfig(**{**keys, **others}).numeric_values()) == same
