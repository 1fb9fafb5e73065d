"""SIGINT and SIGTERM as one exception that rolls back, and never at a moment when rolling back is impossible."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_shields = 0
_pending: int | None = None


class Interrupted(BaseException):
    """A signal asked the process to stop. Not an Exception, so that nothing but cleanup meets it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    @property
    def code(self) -> int:
        """The exit code a shell expects: 130 or 143."""
        return 128 + self.number


def install() -> None:
    """From now on the signals raise Interrupted in the main thread."""
    for number in SIGNALS:
        signal.signal(number, _handle)


@contextmanager
def shield() -> Iterator[None]:
    """Hold signals back inside the block; `check` looks at them, and the end of the block raises."""
    global _shields
    _shields += 1
    try:
        yield
    finally:
        _shields -= 1
    if not _shields:
        check()


def check() -> None:
    """Raise Interrupted if a signal is being held back."""
    global _pending
    if _pending is not None:
        number, _pending = _pending, None
        raise Interrupted(number)


def _handle(number: int, frame: FrameType | None) -> None:
    global _pending
    if _shields:
        _pending = number
    else:
        raise Interrupted(number)
