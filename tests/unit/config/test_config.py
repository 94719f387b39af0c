"""ZenFlowConfig: what each key accepts and refuses, also by way of OmegaConf."""

import dataclasses
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf import OmegaConf
from omegaconf.errors import ValidationError

from lightning_zenflow.config import ConfigValueError, ZenFlowConfig, default_value, zenflow_keys
from lightning_zenflow.schedule.compensation import StalenessCompensation

DEFAULTS = {
    "topk_ratio": 0.05,
    "select_strategy": "step",
    "select_interval": "auto",
    "update_interval": "auto",
    "max_update_interval": 16,
    "publish_lag": "auto",
    "optimizer_in_backward": True,
    "full_warm_up_rounds": 0,
    "overlap_step": True,
    "deferred_update": "replay",
    "weight_prediction": "auto",
    "provisional_scale": "auto",
    "auto_ratio": 0.99,
    "offload": False,
    "accumulate_on": "auto",
    "worker_cores": "auto",
    "pt_reserved_cores_perc": 0.5,
    "worker_timeout": 600.0,
    "max_worker_restarts": 3,
    "stall_monitor": True,
    "timeline": None,
    "timeline_steps": "auto",
}

NOT_NUMBERS = [None, True, "4", "auto ", [1], {}, math.nan, math.inf, -math.inf, 10**400]
NOT_INTEGERS = [*NOT_NUMBERS[:-1], 1.0, 2.5]
NOT_BOOLEANS = [None, 0, 1, "true", "auto", []]

# Key, what its error says is allowed, values that are refused.
REFUSED: list[tuple[str, str, list[Any]]] = [
    ("topk_ratio", "a number from 0 to 1", [*NOT_NUMBERS, -0.01, 1.01, 2]),
    ("auto_ratio", "a number from 0 to 1", [*NOT_NUMBERS, -0.01, 1.01]),
    ("pt_reserved_cores_perc", "a number from 0 to 1", [*NOT_NUMBERS, -0.01, 1.01]),
    ("worker_timeout", "a number > 0 and up to 1e+06", [*NOT_NUMBERS, 0, 0.0, -1, 2e6]),
    ("weight_prediction", "a number from 0 to 1e+06 or 'auto'", [*NOT_NUMBERS, -0.5, 2e6]),
    ("provisional_scale", "a number from 0 to 1e+06 or 'auto'", [*NOT_NUMBERS, -0.5, 2e6]),
    ("max_update_interval", "an integer from 1 to 1024", [*NOT_INTEGERS, 0, -1, 1025, "auto"]),
    ("full_warm_up_rounds", "an integer >= 0", [*NOT_INTEGERS, -1, "auto"]),
    ("max_worker_restarts", "an integer >= 0", [*NOT_INTEGERS, -1, "auto"]),
    ("update_interval", "an integer from 1 to 1024 or 'auto'", [*NOT_INTEGERS, 0, -1, 1025]),
    ("select_interval", "an integer >= 0 or 'auto'", [*NOT_INTEGERS, -1]),
    ("publish_lag", "an integer from 0 to 1024 or 'auto'", [*NOT_INTEGERS, -1, 1025]),
    ("overlap_step", "true or false", NOT_BOOLEANS),
    ("optimizer_in_backward", "true or false", NOT_BOOLEANS),
    ("offload", "true or false", NOT_BOOLEANS),
    ("accumulate_on", "'auto', 'device' or 'host'", [None, True, 1, "cpu", "Host", ["host"]]),
    ("stall_monitor", "true or false", NOT_BOOLEANS),
    ("timeline", "a path that ends in '.json'", [True, 1, "", "timeline.png", []]),
    ("timeline_steps", "'auto' or [first, last]", [None, True, 5, "all", [5], [1, 2], [4, 3], [2.0, 3], [2, 3, 4]]),
    ("deferred_update", "'replay' or 'accumulate'", [None, True, 1, "Replay", "", []]),
    (
        "select_strategy",
        "'auto', 'step', 'epoch' or the import path",
        [None, True, 1, "", "steps", "a..b", ".a", "a:", "a b.c", "a:b:c"],
    ),
    (
        "worker_cores",
        "'auto', an integer >= 1 (how many) or a list of distinct integers >= 0",
        [None, True, 0, -1, 1.0, "2", "all", [], [0, 0], [-1], [True], [1.0], ["1"], {}, [[1]]],
    ),
]

ACCEPTED: list[tuple[str, Any, Any]] = [
    ("offload", True, True),
    ("accumulate_on", "host", "host"),
    ("stall_monitor", False, False),
    ("timeline", Path("logs/timeline.json"), "logs/timeline.json"),
    ("timeline_steps", (5, 5), [5, 5]),
    ("topk_ratio", 0, 0.0),
    ("topk_ratio", 1, 1.0),
    ("topk_ratio", np.float32(0.5), 0.5),
    ("update_interval", 1, 1),
    ("update_interval", "auto", "auto"),
    ("update_interval", 16, 16),
    ("update_interval", np.int64(7), 7),
    ("max_update_interval", 4, 4),
    ("publish_lag", 0, 0),
    ("publish_lag", "auto", "auto"),
    ("publish_lag", 3, 3),
    ("full_warm_up_rounds", 10, 10),
    ("overlap_step", False, False),
    ("optimizer_in_backward", False, False),
    *(("select_strategy", value, value) for value in ["auto", "epoch", "pkg.mod:fn", "pkg.mod.fn", "mod:Class.method"]),
    ("select_interval", "auto", "auto"),
    ("select_interval", 0, 0),
    ("select_interval", 100, 100),
    ("deferred_update", "accumulate", "accumulate"),
    ("weight_prediction", "auto", "auto"),
    ("weight_prediction", 4, 4.0),
    ("provisional_scale", "auto", "auto"),
    ("provisional_scale", 0.3, 0.3),
    ("weight_prediction", 0, 0.0),
    ("provisional_scale", 0, 0.0),
    ("auto_ratio", 0.5, 0.5),
    ("worker_cores", 3, 3),
    ("worker_cores", [4, 0], [4, 0]),
    ("worker_cores", (1, 2), [1, 2]),
    ("worker_cores", range(2), [0, 1]),
    ("pt_reserved_cores_perc", 1, 1.0),
    ("worker_timeout", 1, 1.0),
]


def flat(table: list[tuple[str, str, list[Any]]]) -> list[Any]:
    return [
        pytest.param(key, value, allowed, id=f"{key}={str(value)[:20]}")
        for key, allowed, values in table
        for value in values
    ]


def test_defaults() -> None:
    config = ZenFlowConfig()
    assert dataclasses.asdict(config) == DEFAULTS
    assert zenflow_keys() == tuple(DEFAULTS)
    assert {key: default_value(key) for key in zenflow_keys()} == DEFAULTS


def test_every_key_is_in_the_tables_of_this_file() -> None:
    assert {key for key, _, _ in REFUSED} == set(zenflow_keys())


@pytest.mark.parametrize(("key", "value", "allowed"), flat(REFUSED))
def test_wrong_value_is_refused_by_name(key: str, value: Any, allowed: str) -> None:
    with pytest.raises(ValueError) as error:
        ZenFlowConfig(**{key: value})
    message = str(error.value)
    assert message.startswith(f"ZenFlowConfig: {key}={value!r}: allowed is {allowed}")


@pytest.mark.parametrize(("key", "value", "expected"), ACCEPTED)
def test_value_is_accepted_in_the_type_of_its_field(key: str, value: Any, expected: Any) -> None:
    actual = getattr(ZenFlowConfig(**{key: value}), key)
    assert actual == expected
    assert type(actual) is type(expected)


def test_update_interval_is_bounded_by_max_update_interval() -> None:
    with pytest.raises(ValueError, match="update_interval=5: allowed is an integer from 1 to max_update_interval=4"):
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


def test_prediction() -> None:
    immediate = {"update_interval": 1, "publish_lag": 0}
    assert ZenFlowConfig().prediction == StalenessCompensation(weight_prediction="auto", provisional_scale="auto")
    assert ZenFlowConfig(**immediate).prediction == StalenessCompensation(weight_prediction=0.0, provisional_scale=0.0)
    assert ZenFlowConfig(**immediate, weight_prediction=2.5).prediction == StalenessCompensation(
        weight_prediction=2.5, provisional_scale=0.0
    )
    assert ZenFlowConfig(provisional_scale=0.3).prediction == StalenessCompensation(
        weight_prediction="auto", provisional_scale=0.3
    )
    assert ZenFlowConfig(deferred_update="accumulate").prediction.means


def test_replace_validates_again() -> None:
    with pytest.raises(ValueError, match="topk_ratio=2"):
        dataclasses.replace(ZenFlowConfig(), topk_ratio=2)


def test_positional_arguments_are_refused() -> None:
    with pytest.raises(TypeError):
        ZenFlowConfig(0.05)  # type: ignore[misc]


def test_error_survives_the_way_between_processes() -> None:
    with pytest.raises(ConfigValueError) as error:
        ZenFlowConfig(topk_ratio=2)
    copied = pickle.loads(pickle.dumps(error.value))
    assert (str(copied), copied.key) == (str(error.value), "topk_ratio")


class TestOmegaConf:
    def test_structured_defaults(self) -> None:
        structured = OmegaConf.structured(ZenFlowConfig)
        assert OmegaConf.to_container(structured) == DEFAULTS
        assert OmegaConf.to_object(structured) == ZenFlowConfig()
        assert ZenFlowConfig.from_mapping(structured) == ZenFlowConfig()

    @pytest.mark.parametrize(
        ("key", "value", "expected"), [case for case in ACCEPTED if type(case[1]) in (int, float, bool, list)]
    )
    def test_merge_and_back(self, key: str, value: Any, expected: Any) -> None:
        merged = OmegaConf.merge(OmegaConf.structured(ZenFlowConfig), {key: value})
        assert getattr(ZenFlowConfig.from_mapping(merged), key) == expected

    def test_dotlist(self) -> None:
        dotlist = [
            "topk_ratio=0.1",
            "update_interval=2",
            "worker_cores=[0,2]",
            "overlap_step=false",
            "weight_prediction=0",
        ]
        merged = OmegaConf.merge(OmegaConf.structured(ZenFlowConfig), OmegaConf.from_dotlist(dotlist))
        config = ZenFlowConfig.from_mapping(merged)
        assert (config.topk_ratio, config.update_interval, config.worker_cores) == (0.1, 2, [0, 2])
        assert config.overlap_step is False

    def test_assignment_is_typed_and_validated_on_the_way_back(self) -> None:
        structured = OmegaConf.structured(ZenFlowConfig)
        with pytest.raises(ValidationError, match="topk_ratio"):
            structured.topk_ratio = "much"
        with pytest.raises(ValidationError, match="update_interval"):
            structured.update_interval = 1.5
        structured.topk_ratio = 1.5
        with pytest.raises(ValueError, match=r"topk_ratio=1\.5: allowed is a number from 0 to 1"):
            ZenFlowConfig.from_mapping(structured)

    @pytest.mark.parametrize(
        "key",
        ["select_interval", "update_interval", "publish_lag", "weight_prediction", "provisional_scale", "worker_cores"],
    )
    def test_auto_passes_the_types(self, key: str) -> None:
        merged = OmegaConf.merge(OmegaConf.structured(ZenFlowConfig), {key: "auto"})
        assert getattr(ZenFlowConfig.from_mapping(merged), key) == "auto"

    def test_interpolation(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TOPK", "0.25")
        config = OmegaConf.create({"topk_ratio": "${oc.decode:${oc.env:TOPK}}", "auto_ratio": "${topk_ratio}"})
        assert ZenFlowConfig.from_mapping(config) == ZenFlowConfig(topk_ratio=0.25, auto_ratio=0.25)

    def test_unknown_key(self) -> None:
        with pytest.raises(
            MisconfigurationException, match=r"unknown key 'topk_ration' \(did you mean 'topk_ratio'\?\)"
        ):
            ZenFlowConfig.from_mapping({"topk_ration": 0.1})
