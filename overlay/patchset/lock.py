"""One apply at a time per target: an advisory lock that dies with its owner and says who that is."""

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import Exit, PatchsetError


@contextmanager
def hold(path: Path, what: str) -> Iterator[None]:
    """Hold the lock file `path` (its folder must exist) or raise, naming the process that holds it.

    The kernel drops the lock when its owner dies, so a crash leaves nothing stale. The owner removes the
    file; a waiter that opened a file removed meanwhile notices by its inode and opens the new one.
    """
    while True:
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as problem:
            raise PatchsetError(
                Exit.TARGET,
                f"{path.parent} cannot be written: {problem.strerror}",
                "check its owner and mount options",
            ) from problem
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = os.read(handle, 4096).decode("utf-8", "replace")
            os.close(handle)
            raise PatchsetError(
                Exit.TARGET,
                f"{what} is in use by {_describe(owner)}",
                "wait for it to end, then run this again",
            ) from None
        if path.exists() and os.path.samestat(os.fstat(handle), os.stat(path)):
            break
        os.close(handle)
    try:
        note = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        os.ftruncate(handle, 0)
        os.write(handle, json.dumps(note).encode())
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(handle)


def _describe(note: str) -> str:
    try:
        owner = json.loads(note)
        return f"another apply (pid {owner['pid']} on {owner['host']}, since {owner['since']})"
    except (ValueError, KeyError, TypeError):
        return "another apply"
