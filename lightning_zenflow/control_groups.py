"""The control groups that this process is in, as the kernel shows them in files."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal


def control_groups(controller: str, root: Path) -> Iterator[tuple[Literal["v1", "v2"], Path]]:
    """Folders in which limits of this process may be written, its own group's before its ancestors'.

    In a container the path that the kernel names may be the host's, and only its end or its root exist: a folder may be missing.

    Args:
        controller: "memory" or "cpu".
        root: where the machine's files lie, "/" but for tests.

    Yields:
        The version of control groups, which decides on the names of the files, and the folder.
    """
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        groups = []
    for line in groups:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            for folder in _with_ancestors(root / "sys/fs/cgroup", path):
                yield "v2", folder
        elif controller in controllers.split(","):
            for folder in _with_ancestors(root / "sys/fs/cgroup" / controller, path):
                yield "v1", folder


def _with_ancestors(mount: Path, path: str) -> Iterator[Path]:
    folder = mount / path.strip("/")
    for group in [folder, *folder.parents]:
        yield group
        if group == mount:
            return
