"""Removes the package's waits and events one by one and says which removals no test finds.

    scripts/remove_waits [PATTERN]      # which the fast tests of tests/training/test_device_order.py find

`Waits` finds them in the source: statements that wait or keep memory, events, questions to events, and streams that begin behind an event.
Each is removed in a process of its own, which has imported torch before; a test that fails has found it.
"""

import ast
import contextlib
import importlib.machinery
import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import override

ROOT = Path(__file__).parents[2]
PACKAGE = "lightning_zenflow"
_FOLDERS = ("core", "deferred", "engine", "kernels", "schedule", "step", "topk", "zero", "zero3")
"""Telemetry is left out, whose events order nothing, and the worker, whose waits are of processes."""
_STATEMENTS = re.compile("wait(_stream|_event|_for)?|join|synchronize|keep_for|used")
_TESTS = "tests/training/test_device_order.py"
_TIMEOUT_S = 600


class NoEvent:
    """An event that everything precedes, and that nothing waits for."""

    clock: ClassVar[dict[str, int]] = {}
    number = 0

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


@contextlib.contextmanager
def not_behind(side: Any, event: Any = None, *, reads: Any = None) -> Iterator[None]:
    """`SideStream.behind`, in no order."""
    with side._runtime.on(side._stream):
        yield
    if reads is not None:
        side._runtime.keep_for(side._stream, reads)


class Waits(ast.NodeTransformer):
    """Finds the waits of a module; removes the one with a number, if any."""

    def __init__(self, remove: int | None = None) -> None:
        self.found: list[str] = []
        self._remove = remove

    def _removes(self, node: ast.expr | ast.stmt, how: str = "") -> bool:
        self.found.append(f"{node.lineno}: {ast.unparse(node)}{how}")
        return len(self.found) - 1 == self._remove

    @override
    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        """Not those of other devices."""
        return node if node.name in ("CudaRuntime", "HostRuntime") else self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        call = node.value
        called = call.func if isinstance(call, ast.Call) else None
        waits = isinstance(called, ast.Attribute) and _STATEMENTS.fullmatch(called.attr)
        return ast.Pass() if waits and self._removes(node) else self.generic_visit(node)

    @override
    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.func, ast.Attribute):
            return node
        name, owner = node.func.attr, node.func.value
        if name == "query" and self._removes(node):
            return ast.Constant(True)
        if name == "record_event" and not node.keywords and self._removes(node):
            return _call("NoEvent", [])
        if name == "behind":
            if self._removes(node, "  (in no order)"):
                return _call("not_behind", [owner, *node.args], node.keywords)
            if any(k.arg == "reads" for k in node.keywords) and self._removes(node, "  (without reads)"):
                node.keywords = [k for k in node.keywords if k.arg != "reads"]
        return node


def _call(name: str, arguments: list[ast.expr], keywords: Sequence[ast.keyword] = ()) -> ast.Call:
    function = ast.parse(f"__import__({Path(__file__).stem!r}).{name}", mode="eval").body
    return ast.Call(function, arguments, list(keywords))


def remove(path: Path, number: int) -> None:
    """Makes this process import a module without one of its waits."""
    load = importlib.machinery.SourceFileLoader.get_code

    def get_code(self: Any, fullname: str) -> Any:
        if Path(self.path) != path:
            return load(self, fullname)
        tree = Waits(number).visit(ast.parse(path.read_text()))
        return compile(ast.fix_missing_locations(tree), path, "exec")

    importlib.machinery.SourceFileLoader.get_code = get_code  # type: ignore[method-assign]


def _passes(removed: tuple[Path, int] | None) -> bool:
    """Runs the tests in a child, without a wait; False if one fails, or does not end in time."""
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1] == 0
    signal.alarm(_TIMEOUT_S)
    if removed is not None:
        remove(*removed)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    import pytest

    os._exit(int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", _TESTS])))


def main(pattern: str = "") -> int:
    """Removes the waits whose file, line and source match a pattern; 1 if there are removals that no test finds."""
    os.chdir(ROOT)
    # As in tests/conftest.py, before torch is imported.
    os.environ.update(OMP_NUM_THREADS="1", TRITON_INTERPRET="1")
    import deepspeed  # noqa: F401
    import lightning.pytorch  # noqa: F401

    assert PACKAGE not in sys.modules
    assert _passes(None), "the tests fail as they are"
    survivors = 0
    for path in (p for folder in _FOLDERS for p in sorted((ROOT / PACKAGE / folder).glob("*.py"))):
        waits = Waits()
        waits.visit(ast.parse(path.read_text()))
        for number, wait in enumerate(waits.found):
            name = f"{path.relative_to(ROOT)}:{wait}"
            if re.search(pattern, name):
                survives = _passes((path, number))
                survivors += survives
                print("SURVIVES" if survives else "found   ", name, flush=True)
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
