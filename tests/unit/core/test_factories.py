"""Every tensor that the package makes names its type and its device: `torch.set_default_dtype` and `set_default_device` are the user's."""

import ast
from pathlib import Path

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


def test_factories_name_type_and_device() -> None:
    assert [call.lineno for call in calls(ast.parse("torch.zeros(1)\nx.new_zeros(1)\ntorch.arange(3)"))] == [1, 3]
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        assert "get_default_dtype" not in text, path
        for call in calls(ast.parse(text)):
            missing = {"dtype", "device"} - {keyword.arg for keyword in call.keywords}
            assert not missing, f"{path}:{call.lineno}: {ast.unparse(call)}"
