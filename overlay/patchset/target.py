"""What is patched: a source tree, or the vLLM installed in an environment, found by import location."""

import json
import os
import stat
import subprocess
from dataclasses import dataclass
from pathlib import Path

from . import manifest
from .errors import Exit, PatchsetError

STATE = ".sfa-cp-overlay"
FIND = """
import importlib.metadata as m, importlib.util as u, json, os, sys
try:
    spec = u.find_spec("vllm")
except (ImportError, ValueError):
    spec = None
init = spec.origin if spec else None
dist = record = version = None
if init:
    root = os.path.dirname(os.path.dirname(os.path.realpath(init)))
    for d in m.distributions():
        rows = [f for f in (d.files or []) if str(f) == "vllm/__init__.py"]
        if rows and os.path.realpath(d.locate_file(rows[0])) == os.path.realpath(init):
            dist, version = d.metadata["Name"], d.version
            record = str(d.locate_file([f for f in d.files if str(f).endswith(".dist-info/RECORD")][0]))
print(json.dumps({"init": init, "dist": dist, "version": version, "record": record}))
"""


@dataclass(frozen=True)
class Target:
    """`root` holds `vllm/`. An installed target also has the RECORD of the distribution that owns it."""

    root: Path
    record: str | None = None  # relative to root
    distribution: str | None = None
    version: str | None = None
    python: Path | None = None

    @property
    def kind(self) -> str:
        """ "installed" for a wheel in an environment, else "tree"."""
        return "installed" if self.record else "tree"

    @property
    def state_dir(self) -> Path:
        """Where originals, journal, state and lock live."""
        return self.root / STATE

    def read(self, path: str) -> bytes | None:
        """The bytes of a file below root; None where there is none."""
        try:
            return (self.root / path).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None


def tree(root: Path) -> Target:
    """The target for a source tree (which need not exist yet). Raises where something else is in its place."""
    path = Path(os.path.abspath(root))
    there = next(at for at in (path, *path.parents) if os.path.lexists(at))
    if not there.is_dir():
        raise PatchsetError(Exit.TARGET, f"{there} is not a folder", "name a vLLM tree with --dest")
    return Target(path)


def installed(python: Path) -> Target:
    """The vLLM that `python` would import, found without importing it."""
    try:
        done = subprocess.run(
            [os.fspath(python), "-I", "-c", FIND], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as problem:
        raise PatchsetError(
            Exit.USAGE, f"{python} cannot be run: {problem}", "name a Python with --python"
        ) from problem
    try:
        found = json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        said = (done.stderr.strip().splitlines() or ["no answer"])[-1]
        raise PatchsetError(
            Exit.USAGE, f"{python} cannot look for vLLM: {said}", "name a Python with --python"
        ) from None
    if not found["init"]:
        raise PatchsetError(
            Exit.TARGET,
            f"{python} has no vLLM installed",
            "install vLLM there, or name another Python with --python",
        )
    init = Path(os.path.realpath(found["init"]))
    root = init.parent.parent
    if not found["record"]:
        return Target(root, python=python, version=manifest.guess_version(root))
    record = os.path.relpath(os.path.realpath(found["record"]), root)
    return Target(root, record, found["dist"], found["version"], python)


def check_path(target: Target, path: str) -> None:
    """Refuse `path` where it, or a folder on the way to it, is a symbolic link or not a regular file."""
    at = target.root
    for part in Path(path).parts:
        at = at / part
        try:
            mode = at.lstat().st_mode
        except FileNotFoundError:
            return
        except OSError as problem:
            raise PatchsetError(
                Exit.TARGET, f"{at}: {problem.strerror}", "repair the tree, then run again"
            ) from problem
        if stat.S_ISLNK(mode):
            raise PatchsetError(
                Exit.TARGET,
                f"{at} is a symbolic link to {os.readlink(at)}, and patches write regular files only",
                "replace the link by the file, or use a fresh tree with --dest",
            )
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise PatchsetError(Exit.TARGET, f"{at} is not a regular file", "use a fresh tree with --dest")
