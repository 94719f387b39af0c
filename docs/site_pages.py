"""Hooks of MkDocs: the README is the first page, and links that leave the site lead to the repository, if its address is known."""

import posixpath
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))

from release import ROOT, with_links


def on_files(files: Files, *, config: Any) -> Files:
    """Adds the README, whose file is outside of the folder of pages."""
    files.append(File.generated(config, "index.md", content=(ROOT / "README.md").read_text()))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Points links of a page at pages of the site, or at the repository."""
    folder = "" if page.file.src_uri == "index.md" else "docs"

    def target_of(target: str, picture: bool) -> str | None:
        path, mark, anchor = target.partition("#")
        in_repository = posixpath.normpath(posixpath.join(folder, path))
        in_site = "index.md" if in_repository == "README.md" else posixpath.relpath(in_repository, "docs")
        if not in_site.startswith(".."):
            return in_site + mark + anchor
        return f"{config.repo_url}/blob/main/{in_repository}{mark}{anchor}" if config.repo_url else None

    return with_links(markdown, target_of)
