"""Every tensor that the package makes names its type and its device: `torch.set_default_dtype` and `set_default_device` are the user's."""

import ast
from pathlib import Path

import pytest

import lightning_zenflow

PACKAGE = Path(lightning_zenflow.__file__).parent
FACTORIES = {
    "arange", "empty", "empty_strided", "eye", "from_file", "full", "linspace", "logspace", "ones", "rand", "randint",
    "randn", "randperm", "scalar_tensor", "tensor", "zeros"
}  # fmt: skip


def calls(tree: ast.AST) -> list[ast.Call]:
    """Calls of torch's factories."""
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "torch"
        and node.func.attr in FACTORIES
    ]


FILES = sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("file", FILES)
def test_factories_name_type_and_device(file: str) -> None:
    for call in calls(ast.parse((PACKAGE / file).read_text())):
        missing = {"dtype", "device"} - {keyword.arg for keyword in call.keywords}
        assert not missing, f"line {call.lineno}: {ast.unparse(call)}"


def test_nothing_asks_for_the_default() -> None:
    assert not [file for file in FILES if "get_default_dtype" in (PACKAGE / file).read_text()]


def test_the_search_finds_calls() -> None:
    assert [call.lineno for call in calls(ast.parse("torch.zeros(1)\nx.new_zeros(1)\ntorch.arange(3, dtype=d)"))] == [
        1,
        3,
    ]
