"""Whatever a configuration holds, and however it is given: training takes two steps, or our error names what is wrong with it."""

import json
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf import OmegaConf

from harness import fit
from lightning_zenflow import ZenFlowStrategy
from lightning_zenflow.config import zenflow_keys
from models import LinearLossModule

pytestmark = pytest.mark.usefixtures("no_worker_is_left")

SHARES = st.floats(0, 1) | st.sampled_from([0, 1, 0.0, 1.0, 1e-300])
LARGE = st.sampled_from([10**4, 10**6, 2**31, 2**63, 10**30, 10**400])
VALID: dict[str, st.SearchStrategy[Any]] = {
    "topk_ratio": SHARES,
    "select_strategy": st.sampled_from(["step", "epoch", "auto", "random_selection:choose", "random_selection.choose"]),
    "select_interval": st.integers(0, 9) | LARGE | st.just("auto"),
    "update_interval": st.integers(1, 20) | LARGE | st.just("auto"),
    "max_update_interval": st.integers(1, 40) | LARGE,
    "publish_lag": st.integers(0, 9) | LARGE | st.just("auto"),
    "full_warm_up_rounds": st.integers(0, 3) | LARGE,
    "overlap_step": st.booleans(),
    "deferred_update": st.sampled_from(["replay", "accumulate"]),
    "look_ahead": st.floats(0, 20) | st.sampled_from(["auto", 1e30, 1e300]),
    "provisional_scale": st.floats(0, 2) | st.sampled_from(["auto", 1e30, 1e300]),
    "auto_ratio": SHARES,
    "offload": st.booleans(),
    "accumulate_on": st.sampled_from(["auto", "device", "host"]),
    "worker_cores": st.sampled_from(["auto", 1, [0]]),
    "pt_reserved_cores_perc": SHARES,
    "worker_timeout": st.floats(200, 1e6) | st.sampled_from([1e12, 1e300]),
}
"""What is allowed, or nearly: where a number is too large for the machine, an error may say so."""
JUNK: st.SearchStrategy[Any] = (
    st.sampled_from([math.nan, math.inf, -math.inf, -1, -0.5, 1.5, 2, 0, 1e-320, 10**400, True, False, None])
    | st.sampled_from(["", "Auto", "AUTO", "1", "nan", "true", "no.such:thing", "os:path", "os:sep", "ü", "a b", "${x}", "${oc.env:X}"])
    | st.sampled_from(["???", "1e400", "0x10", "[", "{", "a: b", "\n", "-", "--help", "null", "~", "a=b", "!!python/name:os.x"])
    | st.recursive(st.none() | st.integers() | st.text(max_size=3), lambda s: st.lists(s, max_size=2), max_leaves=3)
    | st.dictionaries(st.sampled_from(["a", "topk_ratio"]), st.integers(), max_size=1)
)  # fmt: skip
UNKNOWN = ("topk", "update_intervall", "topk_ratio ", "zero", "lr", "", "1", "TOPK_RATIO")

assert tuple(VALID) == zenflow_keys()


@st.composite
def configs(draw: st.DrawFn, *, junk: bool) -> dict[str, Any]:
    """Some keys with values; with junk, one of them has a wrong one or is unknown."""
    keys = draw(st.lists(st.sampled_from(zenflow_keys()), unique=True, max_size=8))
    config = {key: draw(VALID[key]) for key in keys}
    if junk:
        key = draw(st.sampled_from(zenflow_keys()) | st.sampled_from(UNKNOWN))
        config[key] = draw(JUNK)
    return config


def as_flat(config: dict[str, Any]) -> dict[str, Any]:
    return config


def as_sections(config: dict[str, Any]) -> dict[str, Any]:
    return {"zenflow": config, "deepspeed": {"gradient_clipping": 1.0}}


def as_deepspeed_block(config: dict[str, Any]) -> dict[str, Any]:
    return {"train_batch_size": 4, "zero_optimization": {"stage": 2, "zenflow": config}}


FORMS = ("keywords", "dict", "DictConfig", "json", "yaml", "dotlist", "command line")
LAYOUTS = (as_flat, as_sections, as_deepspeed_block)


def build(form: str, content: Mapping[str, Any], folder: Path) -> ZenFlowStrategy:
    """The strategy, with `content` given in some form."""
    match form:
        case "dict":
            return ZenFlowStrategy(config=content)
        case "DictConfig":
            try:
                config = OmegaConf.create(dict(content))
            except Exception as error:
                # What OmegaConf itself refuses never reaches us.
                raise OutOfScopeError from error
            return ZenFlowStrategy(config=config)
        case "json":
            file = folder / "config.json"
            file.write_text(json.dumps(content))
            return ZenFlowStrategy(config=file)
        case "yaml":
            file = folder / "config.yaml"
            file.write_text(yaml.safe_dump(dict(content)))
            return ZenFlowStrategy(config=str(file))
        case "dotlist":
            try:
                config = OmegaConf.from_dotlist([f"{key}={value}" for key, value in content.items()])
            except Exception as error:
                raise OutOfScopeError from error
            return ZenFlowStrategy(config=config)
        case "command line":
            return from_command_line(content)
        case _:
            return ZenFlowStrategy(**content)


class OutOfScopeError(Exception):
    """Another library's parser has refused what never got to us."""


class RefusedByParserError(ValueError):
    """The parser of the command line has refused a value."""


def from_command_line(content: Mapping[str, Any]) -> ZenFlowStrategy:
    """As LightningCLI does it for ``--trainer.strategy``."""
    parser = LightningArgumentParser(parser_mode="omegaconf", exit_on_error=False)
    parser.add_subclass_arguments(ZenFlowStrategy, "strategy", required=True)
    arguments = [f"--strategy.{key}={json.dumps(v) if isinstance(v, list | dict) else v}" for key, v in content.items()]
    try:
        parsed = parser.parse_args(["--strategy=lightning_zenflow.ZenFlowStrategy", *arguments])
        strategy = parser.instantiate_classes(parsed).strategy
    except SystemExit as error:
        raise OutOfScopeError from error
    except Exception as error:
        if isinstance(error, ValueError | MisconfigurationException) and "ZenFlowConfig" in str(error):
            raise
        raise RefusedByParserError(str(error)) from error
    assert isinstance(strategy, ZenFlowStrategy)
    return strategy


def check(form: str, layout: Any, config: dict[str, Any], *, train: bool) -> None:
    content = config if form in ("keywords", "dotlist", "command line") else layout(config)
    with tempfile.TemporaryDirectory() as folder:
        try:
            strategy = build(form, content, Path(folder))
            if train:
                model = LinearLossModule(shapes=((7, 5), (3,)))
                fit(model, strategy, steps=2)
                assert all(p.dtype == torch.float32 for p in model.parameters())
        except OutOfScopeError:
            pass
        except (ValueError, MisconfigurationException) as error:
            assert config, "nothing was asked for"
            assert any(key in str(error) for key in config), f"names none of {list(config)}: {error}"


def examples(n: int) -> Any:
    return settings(
        max_examples=n,
        deadline=None,
        # The same examples in every run: a failure then belongs to the change under test.
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


ANY = {"form": st.sampled_from(FORMS), "layout": st.sampled_from(LAYOUTS)}


@examples(300)
@given(**ANY, config=configs(junk=True))
def test_it_is_taken_or_refused(form: str, layout: Any, config: dict[str, Any]) -> None:
    check(form, layout, config, train=False)


@examples(60)
@given(**ANY, config=configs(junk=False))
def test_it_trains_or_is_refused(form: str, layout: Any, config: dict[str, Any]) -> None:
    check(form, layout, config, train=True)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@examples(4000)
@given(**ANY, config=configs(junk=True))
def test_many_are_taken_or_refused(form: str, layout: Any, config: dict[str, Any]) -> None:
    check(form, layout, config, train=False)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@examples(2000)
@given(**ANY, config=configs(junk=False) | configs(junk=True))
def test_many_train_or_are_refused(form: str, layout: Any, config: dict[str, Any]) -> None:
    check(form, layout, config, train=True)
