"""Configurations drawn by hypothesis in every form in which one can be given, and the errors that they may raise."""

import json
import math
import re
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from deepspeed.runtime.zenflow.zenflow_config import ZenFlowConfig as DeepSpeedZenFlowConfig
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf import OmegaConf

from lightning_zenflow import ZenFlowStrategy
from lightning_zenflow.config import KEYS

SHARES = st.floats(0, 1) | st.sampled_from([0, 1, 0.0, 1.0, 1e-300])
LARGE = st.sampled_from([10**4, 10**6, 2**31, 2**63, 10**30, 10**400])
VALID: dict[str, st.SearchStrategy[Any]] = {
    **{name: st.booleans() for name, key in KEYS.items() if key.get("type") == "boolean"},
    "topk_ratio": SHARES,
    "select_strategy": st.sampled_from(["step", "epoch", "auto", "random_selection:choose", "random_selection.choose"]),
    "select_interval": st.integers(0, 9) | LARGE | st.just("auto"),
    "update_interval": st.integers(1, 20) | st.sampled_from(["auto", 1024]),
    "max_update_interval": st.integers(1, 40) | st.just(1024),
    "publish_lag": st.integers(0, 9) | st.sampled_from(["auto", 1024]),
    "tail": st.sampled_from(["auto", "none", "device"]),
    "full_warm_up_rounds": st.integers(0, 3) | LARGE,
    "weight_prediction": st.floats(0, 20) | st.sampled_from(["auto", 1e6]),
    "provisional_scale": st.floats(0, 2) | st.sampled_from(["auto", 1e6]),
    "auto_ratio": SHARES,
    "moments_dtype": st.sampled_from(["float32", "bfloat16"]),
    "accumulate_on": st.sampled_from(["auto", "device", "host"]),
    "worker_cores": st.sampled_from(["auto", 1, [0]]),
    "pt_reserved_cores_perc": SHARES,
    "worker_timeout": st.floats(200, 1e6),
    "max_worker_restarts": st.integers(0, 9),
    "timeline": st.sampled_from([f"{tempfile.gettempdir()}/zenflow-fuzz/timeline.json", "/proc/no/such/folder.json"]),
    "timeline_steps": st.sampled_from(["auto", [2, 2], [2, 1000]]),
}
JUNK: st.SearchStrategy[Any] = (
    LARGE
    | st.sampled_from([math.nan, math.inf, -math.inf, -1, -0.5, 1.5, 2, 0, 1e-320, 1e30, 1e300, True, False, None])
    | st.sampled_from(["", "Auto", "AUTO", "1", "nan", "true", "no.such:thing", "os:path", "os:sep", "ü", "a b", "${x}", "${oc.env:X}"])
    | st.sampled_from(["???", "1e400", "0x10", "[", "{", "a: b", "\n", "-", "--help", "null", "~", "a=b", "!!python/name:os.x"])
    | st.recursive(st.none() | st.integers() | st.text(max_size=3), lambda s: st.lists(s, max_size=2), max_leaves=3)
    | st.dictionaries(st.sampled_from(["a", "topk_ratio"]), st.integers(), max_size=1)
)  # fmt: skip
UNKNOWN = ("deferred_update", "topk", "update_intervall", "topk_ratio ", "zero", "lr", "", "1", "TOPK_RATIO")

assert set(VALID) == set(KEYS)


def as_flat(config: dict[str, Any]) -> dict[str, Any]:
    return config


def as_sections(config: dict[str, Any]) -> dict[str, Any]:
    return {"zenflow": config, "deepspeed": {"gradient_clipping": 1.0}}


def as_deepspeed_block(config: dict[str, Any]) -> dict[str, Any]:
    return {"train_batch_size": 4, "zero_optimization": {"stage": 2, "zenflow": config}}


FORMS = ("keywords", "dict", "DictConfig", "json", "yaml", "dotlist", "command line")
LAYOUTS = (as_flat, as_sections, as_deepspeed_block)


@dataclass(frozen=True)
class Given:
    """A configuration and how it is given."""

    form: str
    layout: Callable[[dict[str, Any]], dict[str, Any]]
    config: dict[str, Any]
    junk: str | None
    """The key that is unknown, or that may have a value that is not allowed."""


@st.composite
def configurations(draw: st.DrawFn, *, junk: bool, forms: Sequence[str] = FORMS) -> Given:
    form = draw(st.sampled_from(forms))
    layout = as_flat if form in ("keywords", "dotlist", "command line") else draw(st.sampled_from(LAYOUTS))
    # DeepSpeed's own block does not have all of our keys.
    allowed = [key for key in KEYS if layout is not as_deepspeed_block or key in DeepSpeedZenFlowConfig.model_fields]
    keys = draw(st.lists(st.sampled_from(allowed), unique=True, max_size=8))
    config = {key: draw(VALID[key]) for key in keys}
    wrong = draw(st.sampled_from(list(KEYS)) | st.sampled_from(UNKNOWN)) if junk else None
    if wrong is not None:
        config[wrong] = draw(JUNK)
    return Given(form=form, layout=layout, config=config, junk=wrong)


def build(form: str, content: Mapping[str, Any], folder: Path) -> ZenFlowStrategy:
    """The strategy, with `content` given in some form."""
    match form:
        case "dict":
            return ZenFlowStrategy(config=content)
        case "DictConfig":
            try:
                config = OmegaConf.create(dict(content))
            except Exception as error:
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
    """Another library's parser has refused the configuration before the strategy received it."""


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


@contextmanager
def only_errors_that_name(given: Given) -> Generator[None]:
    """Accepts errors that name the key to blame, and of a valid configuration only the one of two keys that exclude each other."""
    try:
        yield
    except OutOfScopeError:
        assert given.junk is not None
    except (ValueError, MisconfigurationException) as error:
        text = str(error)
        if given.junk is None:
            assert re.search(
                r" update_interval must be an integer from 1 to max_update_interval=\d+, got \d+;", text
            ), text
        else:
            bounds = ("update_interval", "max_update_interval")
            keys = [given.junk, *(bounds if given.junk in bounds or bounds[0] in given.config else ())]
            forms = ("{} must be", "{} was removed", "{}=", "{!r}", '"{}"', '"{}.', "'{}.", "full_key: {}\n", ".{}\n")
            names = (form.format(key) for key in keys for form in forms)
            assert any(name in text for name in names), f"does not name {given.junk!r}: {text}"


def strategy_of(given: Given) -> ZenFlowStrategy:
    """The strategy with a drawn configuration, in its form and layout."""
    with tempfile.TemporaryDirectory() as folder:
        return build(given.form, given.layout(given.config), Path(folder))


def examples(n: int) -> Any:
    """Hypothesis settings: the same `n` examples in every run, so that a failure belongs to the change under test."""
    return settings(
        max_examples=n, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
