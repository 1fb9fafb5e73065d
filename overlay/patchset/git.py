"""One way to run git: found late, under a scrubbed environment, with the user's habits switched off."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

from .errors import Exit, PatchsetError

PINNED = {
    "core.hooksPath": os.devnull,
    "core.autocrlf": "false",
    "core.attributesFile": os.devnull,
    "core.fsmonitor": "false",
    "core.quotepath": "true",
    "commit.gpgsign": "false",
    "tag.gpgsign": "false",
    "diff.noprefix": "false",
    "diff.mnemonicPrefix": "false",
    "diff.renames": "false",
    "advice.detachedHead": "false",
    "gc.auto": "0",
}
OLDEST = (2, 25)


class GitError(Exception):
    """git ended with an error; `args[0]` is the last line it said."""


def available() -> str | None:
    """Why git cannot be used, or None."""
    if not shutil.which("git"):
        return "git is not installed"
    said = subprocess.run(["git", "--version"], capture_output=True, text=True, check=False).stdout
    match = re.search(r"(\d+)\.(\d+)", said)
    if match and (int(match[1]), int(match[2])) < OLDEST:
        return f"git {match[0]} is older than {OLDEST[0]}.{OLDEST[1]}"
    return None


def require(what: str) -> None:
    """Raise unless git is there; `what` is the thing that needs it."""
    if why := available():
        raise PatchsetError(
            Exit.NOT_SO,
            f"{what} needs git: {why}",
            f"install git {OLDEST[0]}.{OLDEST[1]} or newer, or do without it",
        )


def environment(user_config: bool = False, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment git runs under: no GIT_* of the caller, no user or system configuration unless asked
    for.
    """
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_") or k.startswith("GIT_SSL_")}
    env.update(LC_ALL="C", GIT_TERMINAL_PROMPT="0", GIT_ASKPASS="", GIT_PAGER="cat")
    if not user_config:
        env.update(GIT_CONFIG_GLOBAL=os.devnull, GIT_CONFIG_SYSTEM=os.devnull, GIT_CONFIG_NOSYSTEM="1")
    env.update(extra or {})
    return env


def run(
    tree: Path | None,
    *args: str,
    data: bytes | None = None,
    extra: Mapping[str, str] | None = None,
    user_config: bool = False,
    timeout: float | None = None,
) -> bytes:
    """Run `git ARGS` in `tree` (which must itself be a checkout; no repository above it is ever used).

    Returns stdout. Raises GitError, or PatchsetError where git refuses because of who owns the tree.
    """
    command = ["git"]
    if tree is not None:
        extra = {"GIT_CEILING_DIRECTORIES": os.fspath(tree.resolve().parent), **(extra or {})}
        command += ["-C", os.fspath(tree)]
    for key, value in PINNED.items():
        command += ["-c", f"{key}={value}"]
    for trusted in _trusted():
        command += ["-c", f"safe.directory={trusted}"]
    with subprocess.Popen(
        [*command, *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(user_config, extra),
        start_new_session=True,
    ) as child:
        try:
            out, err = child.communicate(data, timeout)
        except BaseException as problem:
            with contextlib.suppress(ProcessLookupError):  # git's helpers too: they would go on connecting
                os.killpg(child.pid, signal.SIGKILL)
            if isinstance(problem, subprocess.TimeoutExpired):
                raise GitError(f"git {args[0]} took longer than {timeout:g} s") from None
            raise
    if child.returncode:
        said = err.decode("utf-8", "replace").strip()
        if "dubious ownership" in said and tree is not None:
            owner = tree.stat().st_uid
            raise PatchsetError(
                Exit.TARGET,
                f"git refuses {tree}: it belongs to user id {owner}, this process runs as {os.geteuid()}",
                f"run as its owner, or trust it: git config --global --add safe.directory {tree.resolve()}",
            )
        raise GitError(said.splitlines()[-1] if said else f"git {args[0]} failed")
    return out


def text(tree: Path | None, *args: str, extra: Mapping[str, str] | None = None) -> str:
    """`run`, decoded and stripped."""
    return run(tree, *args, extra=extra).decode("utf-8", "replace").strip()


def is_checkout(tree: Path) -> bool:
    """Whether `tree` is itself the top of a checkout or a worktree."""
    return (tree / ".git").exists()


def _trusted() -> list[str]:
    """The user's own safe.directory entries, which the scrubbed environment would hide."""
    done = subprocess.run(
        ["git", "config", "--global", "--get-all", "safe.directory"],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.split("\n")[:-1]
