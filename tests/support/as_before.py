"""What can be seen of a module besides its values: after training it is what it was before."""

from typing import Any

from torch import nn


def looks(module: nn.Module) -> dict[str, Any]:
    """Attributes, classes, hooks, shapes, and what memory a module's parts have beside their elements."""
    found: dict[str, Any] = {}
    for name, m in module.named_modules():
        # What Lightning adds, under every strategy, and what models here and their optimizers keep themselves.
        own = {key for key in vars(m) if key not in ("_fabric", "_hparams", "_optimizers", "_trainer", "_trained")}
        tables = {key: vars(m)[key] for key in own if "_hooks" in key and isinstance(vars(m)[key], dict)}
        n_hooks = {key: len(table) for key, table in tables.items()}
        found[f"module {name}"] = type(m), type(m._parameters), own, n_hooks
        found[f"identity of hooks of {name}"] = {key: [*map(id, table.values())] for key, table in tables.items()}
    for name, p in module.named_parameters(remove_duplicate=False):
        hooks = {key: len(getattr(p, key) or {}) for key in ("_backward_hooks", "_post_accumulate_grad_hooks")}
        # Those of torch's compiler are its own.
        own = {key for key in vars(p) if not key.startswith("_dynamo")}
        found[f"parameter {name}"] = type(p), p.shape, p.is_leaf, p.device, own, hooks
        found[f"identity of {name}"] = id(p)
        found[f"memory beside {name}"] = p.untyped_storage().nbytes() - p.numel() * p.element_size()
    return found


def assert_as_before(before: dict[str, Any], module: nn.Module) -> None:
    """Compares with what `looks` found before."""
    after = looks(module)
    assert after.keys() == before.keys()
    for name, theirs in before.items():
        # What was a view of something larger has become contiguous.
        assert after[name] == theirs or after[name] == 0 < theirs, name
