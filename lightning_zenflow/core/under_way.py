"""A change of several records that an exception must not cut unnoticed."""

from types import TracebackType


class UnderWay:
    """Context of a change: entered before it, left after it. One that an exception cuts stays under way.

    `KeyboardInterrupt` and the exceptions of other signal handlers may be raised between any two instructions. Records that belong together
    are changed in one short context, and nothing waits in it. Outside of it they are whole, whatever is raised there.
    """

    def __init__(self) -> None:
        self._depth = 0

    @property
    def is_cut(self) -> bool:
        """Whether an exception has cut a change; to be asked outside of the context."""
        return self._depth > 0

    def mended(self) -> None:
        """Notes that the records are whole again."""
        self._depth = 0

    def __enter__(self) -> None:
        self._depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self._depth -= 1
