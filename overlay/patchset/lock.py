"""One apply at a time per target: an advisory lock that dies with its owner and says who that is."""

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from . import interrupt
from .errors import Exit, PatchsetError


@contextmanager
def hold(path: Path, what: str) -> Iterator[None]:
    """Hold the lock file `path` or raise, naming the process that holds it.

    Its folder is made where it is missing and removed again where nothing else is left in it. The kernel
    drops the lock when its owner dies, so a crash leaves nothing stale. The owner removes the file; a waiter
    that opened a file removed meanwhile notices by its inode and opens the new one.
    """
    handle = None
    try:
        with interrupt.shield():
            handle = _take(path, what)
            note = {
                "pid": os.getpid(),
                "host": socket.gethostname(),
                "since": time.strftime("%Y-%m-%d %H:%M:%S"),
            }
            with contextlib.suppress(OSError):  # on a full disk the lock holds without its note
                os.ftruncate(handle, 0)
                os.write(handle, json.dumps(note).encode())
        yield
    finally:
        if handle is not None:
            with interrupt.shield():
                path.unlink(missing_ok=True)
                os.close(handle)
                with contextlib.suppress(OSError):
                    path.parent.rmdir()


def _take(path: Path, what: str) -> int:
    while True:
        try:
            path.parent.mkdir(exist_ok=True)
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        except FileNotFoundError:
            if not path.parent.parent.is_dir():
                raise PatchsetError(
                    Exit.TARGET, f"{path.parent.parent} is not a folder", "make it first"
                ) from None
            continue  # another run removed the folder between the two lines
        except OSError as problem:
            raise PatchsetError(
                Exit.TARGET,
                f"{path.parent.parent} cannot be written: {problem.strerror}",
                "check its owner, mount options and free space",
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
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), os.stat(path)):
                return handle
        os.close(handle)


def _describe(note: str) -> str:
    try:
        owner = json.loads(note)
        return f"another apply (pid {owner['pid']} on {owner['host']}, since {owner['since']})"
    except (ValueError, KeyError, TypeError):
        return "another apply"
