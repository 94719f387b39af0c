"""Whether a base class of another library still has what a subclass of this package overrides."""


def missing_overrides(subclass: type, base: type) -> list[str]:
    """Names that `subclass` marks as overrides and that are missing in `base`, which would never call them.

    Args:
        subclass: a class, any of whose bases in this package may mark methods with `override`.
        base: a class of another library among its bases.
    """
    package = __name__.partition(".")[0]
    marked = {
        name
        for owner in subclass.__mro__
        if owner.__module__.partition(".")[0] == package
        for name, member in vars(owner).items()
        if getattr(_function(member), "__override__", False)
    }
    return sorted(name for name in marked if not hasattr(base, name))


def _function(member: object) -> object:
    """What a property or a class method is made of; anything else itself."""
    return getattr(member, "fget", None) or getattr(member, "__func__", member)
