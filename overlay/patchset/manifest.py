"""The manifest: every file of `vllm/**` with its blob id; the same for the tag, the sdist and the wheel.

Left out is what builds write: `_version.py`, compiled files, caches, and two folders that CUDA builds fill.
One line per file, `<blob id>  <path>`, sorted by path, so that it compares with `git ls-tree -r TAG vllm`.
"""

import contextlib
import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

from .blob import blob_id
from .errors import Exit, PatchsetError
from .pin import Pin

NAME = "manifest.txt"
BUILT_DIRS = ("vllm/vllm_flash_attn/", "vllm/third_party/triton_kernels/")
BUILT_FILES = ("vllm/_version.py",)
COMPILED = (".so", ".pyd", ".dylib", ".pyc", ".pyo")


def covers(path: str) -> bool:
    """Whether the manifest speaks about `path` (relative, '/'-separated)."""
    return (
        path not in BUILT_FILES
        and not path.startswith(BUILT_DIRS)
        and not path.endswith(COMPILED)
        and "/__pycache__/" not in path
    )


def scan(root: Path) -> dict[str, str]:
    """Blob id of every covered file below `root`/vllm. Symbolic links read as `link:<text>`: never equal to a
    file.
    """
    found: dict[str, str] = {}
    base = os.fspath(root)
    for folder, dirs, files in os.walk(os.path.join(base, "vllm")):
        dirs[:] = [d for d in dirs if d != "__pycache__"]
        links = [d for d in dirs if os.path.islink(os.path.join(folder, d))]
        for name in files + links:
            full = os.path.join(folder, name)
            path = os.path.relpath(full, base).replace(os.sep, "/")
            if not covers(path):
                continue
            if os.path.islink(full):
                found[path] = f"link:{os.readlink(full)}"
            elif os.path.isfile(full):
                with contextlib.suppress(FileNotFoundError), open(full, "rb") as file:  # a run may remove it
                    found[path] = blob_id(file.read())
            else:
                found[path] = "special"
    return found


def dump(files: Mapping[str, str]) -> bytes:
    """The manifest's text."""
    return "".join(f"{files[path]}  {path}\n" for path in sorted(files)).encode()


def load(pin: Pin) -> dict[str, str]:
    """Read and verify the pinned manifest."""
    path = pin.folder / NAME
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        data = b""
    if hashlib.sha256(data).hexdigest() != pin.manifest_sha256:
        raise PatchsetError(
            Exit.UPSTREAM,
            f"{path} does not have the digest upstream.toml pins",
            "restore it from version control",
        )
    lines = data.decode().splitlines()
    return {line[42:]: line[:40] for line in lines}


def differing(actual: Mapping[str, str], wanted: Mapping[str, str]) -> list[tuple[str, str]]:
    """(path, "changed"|"missing"|"extra") for every path on which the two disagree, sorted by path."""
    out = []
    for path in sorted(actual.keys() | wanted.keys()):
        a, b = actual.get(path), wanted.get(path)
        if a != b:
            out.append((path, "missing" if a is None else "extra" if b is None else "changed"))
    return out


def crlf_only(root: Path, path: str, wanted: str) -> bool:
    """Whether the file would equal the manifest but for CRLF line ends (a checkout with autocrlf)."""
    try:
        data = (root / path).read_bytes()
    except OSError:
        return False
    return b"\r\n" in data and blob_id(data.replace(b"\r\n", b"\n")) == wanted


def guess_version(root: Path) -> str | None:
    """The version a tree or installation claims, for messages only."""
    sources = (
        (root / "vllm" / "_version.py", r"__version__ = version = '([^']+)'"),
        (root / "PKG-INFO", r"^Version: (.+)$"),
    )
    for path, pattern in sources:
        try:
            match = re.search(pattern, path.read_text(encoding="utf-8", errors="replace"), re.M)
        except OSError:
            continue
        if match:
            return match[1].strip()
    return None
