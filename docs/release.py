"""Writes the repository's address into what a release is built from: metadata, and the README's links, which PyPI shows elsewhere.

    python docs/release.py https://github.com/OWNER/NAME v0.1.0

The address is not stored in the repository, since a copy of it has another one.
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]

LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
"""A picture's mark, the text, the target."""


def with_links(text: str, target_of: Callable[[str, bool], str | None]) -> str:
    """The Markdown with other targets of its links to files.

    Args:
        text: the document.
        target_of: maps a relative target, and whether it is a picture, to a new target; None leaves the link's text alone.
    """

    def replace(match: re.Match[str]) -> str:
        mark, label, target = match.groups()
        if "://" in target or target.startswith("#"):
            return match[0]
        new = target_of(target, bool(mark))
        return label if new is None else f"{mark}[{label}]({new})"

    return LINK.sub(replace, text)


def with_absolute_links(text: str, repository: str, revision: str) -> str:
    """A document of the root folder whose links lead to the repository's pages at a revision."""
    return with_links(text, lambda target, picture: f"{repository}/{'raw' if picture else 'blob'}/{revision}/{target}")


def with_addresses(pyproject: str, repository: str) -> str:
    """The project's metadata with the addresses that PyPI shows beside the README."""
    addresses = {
        "Repository": repository,
        "Documentation": f"{repository}/tree/main/docs",
        "Changelog": f"{repository}/blob/main/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }
    head, urls, tail = pyproject.partition("[project.urls]\n")
    assert urls
    return head + urls + "".join(f'{name} = "{address}"\n' for name, address in addresses.items()) + tail


def main(repository: str, revision: str) -> None:
    """Changes README.md and pyproject.toml in place."""
    readme, pyproject = ROOT / "README.md", ROOT / "pyproject.toml"
    (version,) = re.findall(r'^version = "(.+)"$', pyproject.read_text(), re.MULTILINE)
    if re.match(r"v\d", revision) and revision != f"v{version}":
        raise ValueError(f"the tag must be v{version}, after the version in pyproject.toml, got {revision}")
    readme.write_text(with_absolute_links(readme.read_text(), repository, revision))
    pyproject.write_text(with_addresses(pyproject.read_text(), repository))


if __name__ == "__main__":
    if len(sys.argv) != 3 or not sys.argv[1].startswith("https://"):
        sys.exit("usage: python docs/release.py https://github.com/OWNER/NAME REVISION")
    main(sys.argv[1].rstrip("/"), sys.argv[2])
