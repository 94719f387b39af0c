"""Whether a base class of another library still has what a subclass of this package overrides."""


def missing_overrides(subclass: type, base: type) -> list[str]:
    """Methods that `subclass` overrides and `base` does not define, so that the library would never call them.

    Args:
        subclass: a class, any of whose bases in this package may mark methods with `override`. Names that one of these bases defines
            without the mark are the package's own.
        base: a class of another library among its bases.
    """
    package = __name__.partition(".")[0]
    marked: dict[bool, set[str]] = {True: set(), False: set()}
    for owner in subclass.__mro__:
        if owner.__module__.partition(".")[0] == package:
            for name, member in vars(owner).items():
                # A property or a class method is made of a function, which has the mark.
                function = getattr(member, "fget", None) or getattr(member, "__func__", member)
                marked[getattr(function, "__override__", False)].add(name)
    return sorted(name for name in marked[True] - marked[False] if not hasattr(base, name))
