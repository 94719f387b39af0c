"""Writes the table of tested versions to README.md, from what CI installs: `python -m docs.versions`."""

import re
from pathlib import Path

from tabulate import tabulate

ROOT = Path(__file__).parents[1]

_FILES = {"tested": "constraints.txt", "lowest": "constraints-lowest.txt"}

_PACKAGES = ("torch", "lightning", "deepspeed", "numpy")

_TABLE = re.compile(r"(<!-- versions -->\n).*?(<!-- end -->)", re.DOTALL)


def pinned(file: str, package: str) -> str:
    """The version that a constraints file gives a package; the first where it depends on Python's."""
    found = re.search(rf"^{package}==([^\s;]+)", (ROOT / file).read_text(), re.MULTILINE | re.IGNORECASE)
    assert found, f"{file} does not pin {package}"
    return found.group(1)


def python_of_ci() -> str:
    """The interpreter of the workflow's first job, which runs all tests."""
    found = re.search(r'python-version: "(3\.\d+)"', (ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert found, "ci.yml names no interpreter"
    return found.group(1)


def table() -> str:
    """Rows: all tests; installation and a training. CUDA is what no machine of CI has."""
    rows = [
        ("all tests", python_of_ci(), *(pinned(_FILES["tested"], package) for package in _PACKAGES), "none"),
        ("install, train", python_of_ci(), *(pinned(_FILES["lowest"], package) for package in _PACKAGES), "none"),
    ]
    return tabulate(rows, headers=("CI runs", "Python", *_PACKAGES, "CUDA"), tablefmt="github", disable_numparse=True)


def with_table(text: str) -> str:
    """The README with the current table."""
    return _TABLE.sub(lambda match: f"{match.group(1)}{table()}\n{match.group(2)}", text)


if __name__ == "__main__":
    path = ROOT / "README.md"
    path.write_text(with_table(path.read_text()))
