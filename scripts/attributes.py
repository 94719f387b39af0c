"""No class reads an attribute of `self` that neither it nor a base with types defines: neither a reader nor mypy would find its owner.

Methods and properties of a base without types, such as DeepSpeed's, may be used; what else is read of it must be declared in the class that
reads it.
Classes whose packages are not installed are left out.

    python scripts/attributes.py     exits with 1, and names them, where there are some
"""

import ast
import functools
import importlib
import inspect
import sys
import textwrap
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGE = "lightning_zenflow"


@functools.cache
def has_types(package: str) -> bool:
    """Whether a package says that it has types."""
    spec = find_spec(package)
    folders = [] if spec is None else spec.submodule_search_locations or []
    return package in (*sys.stdlib_module_names, PACKAGE) or any(Path(f, "py.typed").exists() for f in folders)


def of_self(tree: ast.AST, context: type[ast.expr_context]) -> Iterator[ast.Attribute]:
    """Attributes of `self` and `cls` that are read (`ast.Load`) or assigned (`ast.Store`)."""
    for node in ast.walk(tree):
        is_attribute = isinstance(node, ast.Attribute) and isinstance(node.ctx, context)
        if is_attribute and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
            yield node


@functools.cache
def defined_by(kind: type) -> frozenset[str]:
    """Names that a class defines by itself."""
    names = {*vars(kind), *inspect.get_annotations(kind), "__dict__"}
    if not has_types(kind.__module__.partition(".")[0]):
        return frozenset(name for name, value in vars(kind).items() if callable(value) or isinstance(value, property))
    try:
        source = textwrap.dedent(inspect.getsource(kind))
    except (OSError, TypeError):  # of C
        return frozenset(names)
    return frozenset(names | {node.attr for node in of_self(ast.parse(source), ast.Store)})


def bases_of(node: ast.ClassDef, kind: type, tree: ast.Module, module: Any) -> Iterator[type]:
    """A class and its bases, those that are only there for the type checker as well."""
    yield from kind.__mro__
    names = dict(vars(module))
    for statement in tree.body:
        if (
            isinstance(statement, ast.If)
            and isinstance(statement.test, ast.Name)
            and statement.test.id == "TYPE_CHECKING"
        ):
            exec(compile(ast.Module(statement.body, []), module.__file__, "exec"), names)
    for base in node.bases:
        found = eval(compile(ast.Expression(base), module.__file__, "eval"), names)
        yield from getattr(found, "__mro__", ())


def undefined() -> Iterator[str]:
    """Lines about attributes that nothing with types defines."""
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        tree = ast.parse(path.read_text())
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
        try:
            module: Any = importlib.import_module(name)
        except ImportError:
            continue
        for node in classes:
            bases = bases_of(node, getattr(module, node.name), tree, module)
            known = frozenset[str]().union(*map(defined_by, bases))
            for read in of_self(node, ast.Load):
                if read.attr not in known:
                    yield f"{path.relative_to(ROOT)}:{read.lineno}: {node.name} reads self.{read.attr}"


if __name__ == "__main__":
    lines = list(undefined())
    for line in lines:
        sys.stderr.write(f"{line}, which neither it nor a base with types defines\n")
    sys.exit(bool(lines))
