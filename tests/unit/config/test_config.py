"""ZenFlowConfig: bounds and defaults of each key, also by way of OmegaConf; keywords and documentation agree with the fields."""

import dataclasses
import inspect
import math
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf import OmegaConf
from omegaconf.errors import ValidationError

from configurations import from_command_line
from docs.configuration import DOCUMENT, with_table
from lightning_zenflow import ZenFlowStrategy
from lightning_zenflow.config import AS_IN_CONFIG, KEYS, ConfigValueError, ZenFlowConfig
from lightning_zenflow.core.allowed_values import BOOLEAN
from lightning_zenflow.fabric import ZenFlowStrategy as FabricStrategy
from lightning_zenflow.schedule.compensation import StalenessCompensation

BOOLEANS = ("optimizer_in_backward", "overlap_step", "offload", "sync_checkpoints", "stall_monitor")
DEFAULTS = {name: key.default for name, key in KEYS.items()}

JUNK = [None, True, math.nan, math.inf, -1, "auto ", "", {}, [[1]]]
"""Refused by every key, but for None as the default and True as a boolean."""

# The bounds of each key; tests/unit/core/test_allowed_values.py has the rest of each kind of domain.
REFUSED: dict[str, list[Any]] = {
    "topk_ratio": [-0.01, 1.01, 2, "auto"],
    "select_strategy": ["steps", "a..b", ".a", "a:", "a b.c", "a:b:c", 1],
    "select_interval": [1.5],
    "update_interval": [0, 1025],
    "max_update_interval": [0, 1025, "auto"],
    "publish_lag": [1025],
    "tail": ["Lag", "late", "gpu", 0.15],
    "full_warm_up_rounds": ["auto"],
    "weight_prediction": [-0.5, 2e6],
    "provisional_scale": [-0.5, 2e6],
    "auto_ratio": [-0.01, 1.01],
    "moments_dtype": ["fp32", "bf16", "float16", "auto", 16],
    "accumulate_on": ["cpu", "Host", ["host"]],
    "worker_cores": [0, 1.0, "2", "all", [], [0, 0], [-1], [True], [1.0], ["1"]],
    "pt_reserved_cores_perc": [-0.01, 1.01],
    "worker_timeout": [0, 2e6],
    "max_worker_restarts": ["auto"],
    "timeline": [1, "timeline.png", []],
    "timeline_steps": [5, "all", [5], [1, 2], [4, 3], [2.0, 3], [2, 3, 4]],
    **{key: [0, 1, "true", "auto"] for key in BOOLEANS},
}
ACCEPTED: dict[str, list[Any]] = {
    "topk_ratio": [0, 1],
    "select_strategy": ["auto", "epoch", "pkg.mod:fn", "pkg.mod.fn", "mod:Class.method"],
    "select_interval": ["auto", 0, 100],
    "update_interval": ["auto", 1, 16],
    "max_update_interval": [1, 1024],
    "publish_lag": ["auto", 0, 1024],
    "tail": ["auto", "none", "lag", "device"],
    "full_warm_up_rounds": [0, 10],
    "weight_prediction": ["auto", 0, 4, 1e6],
    "provisional_scale": ["auto", 0, 0.3, 1e6],
    "auto_ratio": [0, 1],
    "moments_dtype": ["float32", "bfloat16"],
    "accumulate_on": ["auto", "device", "host"],
    "worker_cores": ["auto", 3, [4, 0]],
    "pt_reserved_cores_perc": [0, 1],
    "worker_timeout": [1, 1e6],
    "max_worker_restarts": [0, 100],
    "timeline": ["logs/timeline.json"],
    "timeline_steps": ["auto", [2, 2], [5, 9]],
    **{key: [True, False] for key in BOOLEANS},
}


def test_offloaded_states_are_no_tail_on_the_device() -> None:
    with pytest.raises(ConfigValueError, match="tail must be 'auto', 'none' or 'lag' with offload=True, got 'device'"):
        ZenFlowConfig(tail="device", offload=True)


@pytest.mark.parametrize(
    ("keys", "allowed"),
    [
        ({}, True),
        ({"update_interval": 1, "publish_lag": 0}, False),  # asked for: AdamW itself
        ({"update_interval": 1, "publish_lag": 0, "tail": "lag"}, True),
        ({"tail": "none"}, False),
        ({"publish_lag": 1, "tail": "device"}, False),
        ({"optimizer_in_backward": False}, False),
    ],
)
def test_where_a_tail_is_allowed(keys: dict[str, Any], allowed: bool) -> None:
    assert ZenFlowConfig(**keys).allows_tail == allowed


def test_every_key_is_in_the_tables_of_this_file() -> None:
    assert set(REFUSED) == set(ACCEPTED) == set(KEYS)
    assert dataclasses.asdict(ZenFlowConfig()) == DEFAULTS


@pytest.mark.parametrize("key", KEYS)
def test_wrong_value_is_refused_by_name(key: str) -> None:
    default, domain = KEYS[key].default, KEYS[key].domain
    junk = [value for value in JUNK if value is not default and not (value is True and domain is BOOLEAN)]
    for value in [*REFUSED[key], *junk]:
        with pytest.raises(ConfigValueError) as error:
            ZenFlowConfig(**{key: value})
        assert error.value.key == key
        expected = (
            f"ZenFlowConfig: {key} must be {domain.text}, got {value!r}; leave it out for the default, {default!r}"
        )
        assert str(error.value) == expected


@pytest.mark.parametrize("key", KEYS)
def test_value_is_accepted_also_by_way_of_omegaconf(key: str) -> None:
    bounds = {"max_update_interval": 1024} if key == "update_interval" else {}
    for value in ACCEPTED[key]:
        config = ZenFlowConfig(**{key: value}, **bounds)
        assert getattr(config, key) == value
        merged = OmegaConf.merge(OmegaConf.structured(ZenFlowConfig), {key: value, **bounds})
        assert ZenFlowConfig.from_mapping(merged) == config


def test_values_are_stored_in_the_type_of_their_field() -> None:
    config = ZenFlowConfig(topk_ratio=1, worker_cores=range(2), timeline=Path("a.json"))  # type: ignore[arg-type]
    assert [type(value) for value in (config.topk_ratio, config.worker_cores, config.timeline)] == [float, list, str]


def alternatives(annotation: Any) -> set[Any]:
    """The members of a union, with int in float and lists as sequences."""
    parts = set(get_args(annotation)) if get_origin(annotation) is not Literal else {annotation}
    parts = {Sequence[int] if part == list[int] else part for part in parts or {annotation}}
    return parts - {int} if float in parts else parts


def test_keywords_of_the_strategy_are_the_keys() -> None:
    keywords = inspect.signature(ZenFlowStrategy).parameters
    assert [name for name in keywords if name in KEYS] == list(KEYS)
    types = get_type_hints(ZenFlowStrategy.__init__)
    for key, field_type in get_type_hints(ZenFlowConfig).items():
        assert keywords[key].default == (AS_IN_CONFIG if KEYS[key].domain.contains(None) else None)
        # A path need not be a string.
        assert alternatives(types[key]) - {Path} == alternatives(field_type | None), key


@pytest.mark.parametrize("strategy", [ZenFlowStrategy, FabricStrategy])
def test_keywords_override_the_file(strategy: Any, tmp_path: Path) -> None:
    """None does so only where it is a value."""
    path = tmp_path / "zenflow.yaml"
    path.write_text("zenflow: {timeline: a.json, topk_ratio: 0.3}")
    assert strategy(config=path, timeline=None).zenflow_config == ZenFlowConfig(topk_ratio=0.3)
    assert strategy(config=path, topk_ratio=None).zenflow_config == ZenFlowConfig(timeline="a.json", topk_ratio=0.3)


def test_the_command_line_overrides_the_file(tmp_path: Path) -> None:
    path = tmp_path / "zenflow.yaml"
    path.write_text("zenflow: {timeline: a.json}")
    assert from_command_line({"config": str(path)}).zenflow_config.timeline == "a.json"
    assert from_command_line({"config": str(path), "timeline": "null"}).zenflow_config.timeline is None


def test_documented_table_is_that_of_the_fields() -> None:
    text = DOCUMENT.read_text()
    assert with_table(text) == text, "docs/configuration.md is out of date: run `python -m docs.configuration`"


def test_keys_that_change_no_number() -> None:
    same = {
        "offload",
        "accumulate_on",
        "worker_cores",
        "pt_reserved_cores_perc",
        "worker_timeout",
        "max_worker_restarts",
    }
    same |= {"sync_checkpoints", "stall_monitor", "timeline", "timeline_steps"}
    assert set(KEYS) - set(ZenFlowConfig().numeric_values()) == same
    assert ZenFlowConfig(topk_ratio=0.25).numeric_values()["topk_ratio"] == 0.25


def test_update_interval_is_bounded_by_max_update_interval() -> None:
    message = "update_interval must be an integer from 1 to max_update_interval=4, got 5; lower it or raise the bound"
    with pytest.raises(ConfigValueError, match=message):
        ZenFlowConfig(update_interval=5, max_update_interval=4)
    assert ZenFlowConfig(update_interval=32, max_update_interval=32).update_intervals == [32]


def test_update_intervals_and_publish_lags_to_choose_from() -> None:
    assert ZenFlowConfig().update_intervals == [1, 2, 4, 8, 16]
    assert ZenFlowConfig(max_update_interval=7).update_intervals == [1, 2, 4]
    assert ZenFlowConfig(max_update_interval=1).update_intervals == [1]
    assert ZenFlowConfig(update_interval=6).update_intervals == [6]
    assert ZenFlowConfig().publish_lags == [0, 1, 2]
    assert ZenFlowConfig(publish_lag=3).publish_lags == [3]
    assert ZenFlowConfig(publish_lag=3, overlap_step=False).publish_lags == [0]
    assert ZenFlowConfig(overlap_step=False).publish_lags == [0]


@pytest.mark.parametrize(
    ("keys", "weight_prediction", "provisional_scale"),
    [
        ({}, "auto", "auto"),
        ({"provisional_scale": 0.3}, "auto", 0.3),
        ({"update_interval": 1, "publish_lag": 0}, 0.0, 0.0),
        ({"update_interval": 1, "publish_lag": 0, "weight_prediction": 2.5}, 2.5, 0.0),
    ],
)
def test_compensation_of_staleness(keys: dict[str, Any], weight_prediction: Any, provisional_scale: Any) -> None:
    expected = StalenessCompensation(weight_prediction=weight_prediction, provisional_scale=provisional_scale)
    assert ZenFlowConfig(**keys).compensation == expected


def test_replace_validates_again() -> None:
    with pytest.raises(ConfigValueError, match="topk_ratio must be a number from 0 to 1, got 2"):
        dataclasses.replace(ZenFlowConfig(), topk_ratio=2)


def test_positional_arguments_are_refused() -> None:
    with pytest.raises(TypeError):
        ZenFlowConfig(0.05)  # type: ignore[misc]


def test_error_can_be_pickled() -> None:
    with pytest.raises(ConfigValueError) as error:
        ZenFlowConfig(topk_ratio=2)
    copied = pickle.loads(pickle.dumps(error.value))
    assert (str(copied), copied.key) == (str(error.value), "topk_ratio")


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("topk_ration", r"unknown key 'topk_ration' \(did you mean 'topk_ratio'\?\); keys are topk_ratio, "),
        ("deferred_update", "deferred_update was removed: every gradient is replayed exactly"),
    ],
)
def test_unknown_key(key: str, message: str) -> None:
    with pytest.raises(MisconfigurationException, match=f"ZenFlowConfig: {message}"):
        ZenFlowConfig.from_mapping({key: "replay"})
    with pytest.raises(MisconfigurationException, match=f"ZenFlowStrategy: {message}"):
        ZenFlowStrategy(**{key: "replay"})


class TestOmegaConf:
    def test_structured_defaults(self) -> None:
        structured = OmegaConf.structured(ZenFlowConfig)
        assert OmegaConf.to_container(structured) == DEFAULTS
        assert OmegaConf.to_object(structured) == ZenFlowConfig()
        assert ZenFlowConfig.from_mapping(structured) == ZenFlowConfig()

    def test_dotlist(self) -> None:
        dotlist = [
            "topk_ratio=0.1",
            "update_interval=2",
            "worker_cores=[0,2]",
            "overlap_step=false",
            "weight_prediction=0",
        ]
        merged = OmegaConf.merge(OmegaConf.structured(ZenFlowConfig), OmegaConf.from_dotlist(dotlist))
        assert ZenFlowConfig.from_mapping(merged) == ZenFlowConfig(
            topk_ratio=0.1, update_interval=2, worker_cores=[0, 2], overlap_step=False, weight_prediction=0
        )

    def test_assignment_is_typed_and_validated_on_the_way_back(self) -> None:
        structured = OmegaConf.structured(ZenFlowConfig)
        with pytest.raises(ValidationError, match="topk_ratio"):
            structured.topk_ratio = "much"
        with pytest.raises(ValidationError, match="update_interval"):
            structured.update_interval = 1.5
        structured.topk_ratio = 1.5
        with pytest.raises(ConfigValueError, match=r"topk_ratio must be a number from 0 to 1, got 1\.5"):
            ZenFlowConfig.from_mapping(structured)


@pytest.mark.parametrize(
    ("keys", "s", "d"),
    [
        ({}, 1, 0),
        ({"optimizer_in_backward": False}, 1, 1),
        ({"overlap_step": False}, 1, 0),
        ({"update_interval": 4}, 4, 0),
        ({"publish_lag": 2, "tail": "lag"}, 1, 2),
        ({"update_interval": 4, "publish_lag": 1}, 4, 1),
    ],
)
def test_without_measurements(keys: dict[str, Any], s: int, d: int) -> None:
    """What is given stays; of what is "auto", S and d are the least stale that may hide, and there is no tail."""
    config = ZenFlowConfig(topk_ratio=0.3, **keys).without_measurements()
    assert (config.update_intervals, config.publish_lags) == ([s], [d])
    assert not config.measures and config.topk_ratio == 0.3
    assert config.without_measurements() == config


@pytest.mark.parametrize("tail", ["lag", "device"])
def test_a_tail_cannot_be_had_without_measurements(tail: Literal["lag", "device"]) -> None:
    with pytest.raises(ConfigValueError, match=f"tail must be 'auto' or 'none' with .* got '{tail}'"):
        ZenFlowConfig(update_interval=1, publish_lag=0, tail=tail).without_measurements()
