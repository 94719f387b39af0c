"""Writes the table of tested versions to CONTRIBUTING.md, from what CI installs: `python -m docs.versions`."""

import re
from pathlib import Path

from tabulate import tabulate

ROOT = Path(__file__).parents[1]

DOCUMENT = ROOT / "CONTRIBUTING.md"

_FILES = {"tested": "constraints.txt", "lowest": "constraints-lowest.txt"}

_PACKAGES = ("torch", "lightning", "deepspeed", "numpy")

_TABLE = re.compile(r"(<!-- versions -->\n).*?(<!-- end -->)", re.DOTALL)


def pinned(file: str, package: str) -> str:
    """The version that a constraints file gives a package; the first where it depends on Python's."""
    found = re.search(rf"^{package}==([^\s;]+)", (ROOT / file).read_text(), re.MULTILINE | re.IGNORECASE)
    assert found, f"{file} does not pin {package}"
    return found.group(1)


def of_ci(pattern: str) -> list[str]:
    """What the workflow has between quotes in the first line of a pattern with one group."""
    found = re.search(pattern, (ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert found, f"ci.yml has no {pattern}"
    return re.findall(r'"([^"]+)"', found.group(1))


def table() -> str:
    """Rows: the jobs of the workflow. CUDA is what no machine of CI has."""
    (python,) = of_ci(r'python-version: ("3\.\d+")')
    (newest,) = of_ci(r'python-version: ("3\.13")')
    tested, lowest = ([pinned(_FILES[name], package) for package in _PACKAGES] for name in ("tested", "lowest"))
    torches = [re.sub("^torch(==)?", "", torch) or "newest" for torch in of_ci(r"torch: (\[.*\])")]
    rows = [
        ("all tests", python, *tested, "none"),
        ("fast tests", ", ".join(of_ci(r"python: (\[.*\])")), *tested, "none"),
        ("fast tests", newest, ", ".join(torches), *tested[1:], "none"),
        ("install, train", python, *lowest, "none"),
    ]
    return tabulate(rows, headers=("CI runs", "Python", *_PACKAGES, "CUDA"), tablefmt="github", disable_numparse=True)


def with_table(text: str) -> str:
    """The document with the current table."""
    return _TABLE.sub(lambda match: f"{match.group(1)}{table()}\n{match.group(2)}", text)


if __name__ == "__main__":
    DOCUMENT.write_text(with_table(DOCUMENT.read_text()))
