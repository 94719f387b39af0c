"""Files as the kernel shows them, of machines that are not at hand."""

from pathlib import Path


def write(root: Path, files: dict[str, str]) -> Path:
    """Writes files below `root`, which is returned."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root
