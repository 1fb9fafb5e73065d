"""One error class for everything a user can meet, and the exit codes it carries."""

from enum import IntEnum


class Exit(IntEnum):
    """Exit codes of `apply.py`; the numbers are part of its interface."""

    DONE = 0
    NOT_SO = 1  # the thing asked for does not hold
    USAGE = 2
    UPSTREAM = 3  # upstream could not be obtained or verified
    PATCH = 4  # a patch is broken or does not apply
    TARGET = 5  # the target is not in a state we may touch


class PatchsetError(Exception):
    """A failure with its exit code and the mend.

    `problems` holds one line per finding where there are several (lint, differing files); `message` is one
    line.
    """

    def __init__(self, code: Exit, message: str, hint: str = "", problems: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.hint = hint
        self.problems = problems
