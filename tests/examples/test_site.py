"""The documentation's site, as `scripts/docs` builds it: every link leads somewhere, and a browser shows pages, pictures and reference."""

import re
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from test_readme import GUIDES, ROOT, blocks

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    subprocess.run([ROOT / "scripts" / "docs", folder], cwd=ROOT, check=True, timeout=500)
    return folder


def test_every_document_is_a_page(site: Path) -> None:
    pages = {page.stem for page in site.glob("*.html")}
    assert {"index" if document.stem == "README" else document.stem for document in GUIDES} <= pages
    menu = (ROOT / "mkdocs.yml").read_text()
    assert all(f" {document.name}\n" in menu for document in GUIDES if document.stem != "README")


def test_links(site: Path) -> None:
    for page in site.glob("*.html"):
        for target in re.findall(r'(?:href|src)="([^"]+)"', page.read_text()):
            path, _, anchor = unquote(target).partition("#")
            if "://" in path or path.startswith(
                ("data:", "mailto:", "/")
            ):  # absolute ones are those of the page for wrong addresses
                continue
            file = page.parent / path if path else page
            file = file / "index.html" if file.is_dir() else file
            assert file.is_file(), f"{page.name}: {target}"
            assert not anchor or f'id="{anchor}"' in file.read_text() or "api" in file.parts, f"{page.name}: {target}"


def test_in_a_browser(site: Path, browser: Any, tmp_path: Path) -> None:
    browser.set_window_size(1300, 1400)

    def read(page: str, selector: str, name: str) -> list[Any]:
        browser.get(f"file://{site / page}")
        script = f"return [...document.querySelectorAll(arguments[0])].map((element) => element.{name})"
        return list(browser.execute_script(script, selector))

    for page in ("index.html", "metrics.html", "how_it_works.html"):
        widths = read(page, "article img", "naturalWidth")
        assert widths and all(width > 300 for width in widths), page
        assert browser.save_screenshot(str(tmp_path / f"{page}.png"))
    assert read("recipes.html", "article h2", "innerText")[0].startswith("Weights for inference")
    snippets = [
        block for language in ("python", "bash", "sh") for block in blocks(ROOT / "docs" / "recipes.md", language)
    ]
    assert len(read("recipes.html", "article div.highlight", "tagName")) == len(snippets)
    assert len(read("peers.html", "article table", "tagName")) == 3
    # Nothing is wider than the window: a page that must be scrolled sideways cannot be read.
    assert all(read(page.name, "html", "scrollWidth")[0] <= 1300 for page in site.glob("*.html"))
    assert "ZenFlowStrategy" in read("api/lightning_zenflow.html", "body", "innerText")[0]
