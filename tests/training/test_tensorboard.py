"""TensorBoard: the layout of charts, in the event file and in a browser."""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2, metadata

from benchmarks.step_time.models import SimulatedAccelerator
from harness import fit
from lightning_zenflow import ZenFlowStrategy
from lightning_zenflow.monitor.callbacks import tensorboard_layout
from rank_processes import free_port

_TIMEOUT_S = 120


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run that submits in backward, with clipping and selections, so that there is something to show in every chart."""
    model = SimulatedAccelerator(steps=40, params=8.5e6, compute_s=0.02)
    logger = TensorBoardLogger(tmp_path_factory.mktemp("tensorboard"), name="example")
    strategy = ZenFlowStrategy(worker_cores=1, update_interval=4, publish_lag=0, select_interval=8)
    options = {"log_every_n_steps": 4, "gradient_clip_val": 1.0, "precision": "bf16-true"}
    fit(model, strategy, steps=40, logger=logger, **options)
    return Path(logger.log_dir)


def test_layout(logs: Path) -> None:
    events = EventAccumulator(str(logs)).Reload()
    (event,) = events.Tensors(metadata.CONFIG_SUMMARY_TAG)
    shown = layout_pb2.Layout.FromString(event.tensor_proto.string_val[0])
    assert [category.title for category in shown.category] == list(tensorboard_layout())
    logged = events.Tags()["scalars"]
    for category in shown.category:
        for chart in category.chart:
            (tag,) = chart.multiline.tag
            assert len([name for name in logged if re.match(tag, name)]) == 1, chart.title


@pytest.fixture
def tensorboard(logs: Path, tmp_path: Path) -> Iterator[str]:
    """Address of a TensorBoard that shows the run."""
    port = free_port()
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(logs), "--port", str(port)]
    with open(tmp_path / "output.txt", "wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    yield f"http://localhost:{port}"
    process.terminate()
    process.wait(timeout=30)


# TensorBoard's pages consist of web components, whose inside ordinary queries do not see.
_FIND = """
const found = [];
const visit = (root) => {
    for (const element of root.querySelectorAll("*")) {
        if (element.matches(arguments[0])) found.push(element);
        if (element.shadowRoot) visit(element.shadowRoot);
        if (element.tagName === "IFRAME" && element.contentDocument) visit(element.contentDocument);
    }
};
visit(document);
return found;
"""


_HIDE_THE_SIDEBAR = "arguments[0].forEach((element) => element.style.display = 'none')"


@pytest.mark.browser
@pytest.mark.timeout(600)
def test_in_a_browser(tensorboard: str, browser: Any, pytestconfig: pytest.Config) -> None:
    """`tensorboard --logdir logs` shows every chart with its lines; leaves the screenshot where --screenshot says."""
    from selenium.common.exceptions import WebDriverException
    from selenium.webdriver.support.ui import WebDriverWait

    def shown(selector: str, read: str) -> list[str]:
        """A property of the elements that a CSS selector finds, in every component of the page."""
        return [str(element.get_property(read)).strip() for element in browser.execute_script(_FIND, selector)]

    def until(condition: Callable[[], bool], message: str) -> None:
        # Elements come and go while the page is built.
        WebDriverWait(browser, _TIMEOUT_S, ignored_exceptions=(WebDriverException,)).until(
            lambda _: condition(), message
        )

    browser.set_window_size(1250, 4000)
    until(
        lambda: browser.get(f"{tensorboard}/#custom_scalars&_smoothingWeight=0") is None, "TensorBoard does not answer"
    )
    titles = [title for charts in tensorboard_layout().values() for title in charts]
    until(lambda: shown("tf-card-heading", "displayName") == titles, "there are other charts, or none")
    until(lambda: shown(".matches-text", "textContent") == ["Matches (1)"] * len(titles), "a metric is missing")
    until(lambda: len(shown("vz-line-chart2", "id")) == len(titles), "a chart is empty")
    until(lambda: len(shown("path.line", "id")) >= len(titles), "lines are missing")
    screenshot = pytestconfig.getoption("screenshot")
    if screenshot is not None:
        # The picture has the charts alone.
        browser.execute_script(_HIDE_THE_SIDEBAR, browser.execute_script(_FIND, ".sidebar, #sidebar"))
        assert browser.save_screenshot(screenshot)
