"""The RECORD of an installed wheel, edited row by row so that untouched rows keep their bytes."""

import base64
import csv
import hashlib
from collections.abc import Iterable, Mapping

from .target import STATE


def updated(record: bytes, changes: Mapping[str, bytes | None], ours: Iterable[str]) -> bytes:
    """`record` with the hash and size of changed files, rows for new ones, none for removed ones.

    `ours` are paths below `.sfa-cp-overlay` that uninstalling shall remove too; they get rows without a hash.
    """
    end = b"\r\n" if b"\r\n" in record else b"\n"
    left = dict(changes)
    rows = []
    for line in record.splitlines(keepends=True):
        path = _path(line)
        if path.startswith(f"{STATE}/"):
            continue
        if path in left:
            data = left.pop(path)
            if data is None:
                continue
            line = _row(path, data) + line[len(line.rstrip(b"\r\n")) :]
        rows.append(line)
    if rows and not rows[-1].endswith(b"\n"):
        rows[-1] += end
    rows += [_row(path, data) + end for path, data in sorted(left.items()) if data is not None]
    rows += [_join([path, "", ""]) + end for path in sorted(ours)]
    return b"".join(rows)


def restored(record: bytes, original: bytes, touched: Iterable[str]) -> bytes:
    """`record` (which another tool may have changed meanwhile) with the rows of `touched` as in `original`."""
    before = {_path(line): line for line in original.splitlines(keepends=True)}
    paths = set(touched)
    rows = []
    for line in record.splitlines(keepends=True):
        path = _path(line)
        if path in paths:
            if path in before:
                rows.append(before[path])
            paths.discard(path)
        elif not path.startswith(f"{STATE}/"):
            rows.append(line)
    rows += [before[path] for path in sorted(paths) if path in before]
    return b"".join(rows)


def paths(record: bytes) -> set[str]:
    """Every path the RECORD lists."""
    return {_path(line) for line in record.splitlines() if line.strip()}


def _path(line: bytes) -> str:
    row = next(csv.reader([line.decode("utf-8").strip("\r\n")]), [""])
    return row[0] if row else ""


def _row(path: str, data: bytes) -> bytes:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return _join([path, f"sha256={digest}", str(len(data))])


def _join(fields: list[str]) -> bytes:
    quoted = [f'"{f.replace(chr(34), chr(34) * 2)}"' if any(c in f for c in ',"') else f for f in fields]
    return ",".join(quoted).encode("utf-8")
