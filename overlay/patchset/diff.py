"""Parsing and exact application of git patches, on bytes.

Only what a reviewed patch set needs is accepted: text hunks that change, create or delete regular files below
`vllm/`. Everything else (renames, copies, mode changes, binary hunks, odd paths) is refused by name. A hunk
applies at exactly the line it names or not at all.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

HUNK = re.compile(rb"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@(?: .*)?\r?\n?$")
INDEX = re.compile(r"^index ([0-9a-f]+)\.\.([0-9a-f]+)(?: (\d{6}))?$")
REFUSED = {
    "rename from": "renames a file",
    "rename to": "renames a file",
    "copy from": "copies a file",
    "copy to": "copies a file",
    "similarity index": "is similarity-based",
    "dissimilarity index": "is similarity-based",
    "old mode": "changes a file mode",
    "new mode": "changes a file mode",
    "GIT binary patch": "holds a binary hunk",
    "Binary files": "holds a binary hunk",
}


class BrokenPatch(Exception):
    """The patch text itself is unusable; `args[0]` says where and why."""


class Mismatch(Exception):
    """A hunk does not fit: 1-based `hunk` number and `line` of the file, what the patch wants and what is
    there.
    """

    def __init__(self, hunk: int, line: int, wanted: bytes, found: bytes | None) -> None:
        super().__init__(f"hunk {hunk} does not fit at line {line}")
        self.hunk, self.line, self.wanted, self.found = hunk, line, wanted, found


@dataclass(frozen=True)
class Hunk:
    """`old` and `new` hold whole lines with their ends, context included; positions are 0-based line indexes.

    `changed` counts the added and removed lines.
    """

    old_at: int
    new_at: int
    old: tuple[bytes, ...]
    new: tuple[bytes, ...]
    changed: int


@dataclass(frozen=True)
class FilePatch:
    """The changes of one patch to one file. `before`/`after` are full blob ids, `ABSENT` for create/delete."""

    path: str
    before: str
    after: str
    hunks: tuple[Hunk, ...]
    creates: bool = False
    deletes: bool = False


def split_lines(data: bytes) -> list[bytes]:
    """Lines with their ends, split at LF only: CR and form feeds are content here."""
    lines = data.split(b"\n")
    tail = lines.pop()
    return [line + b"\n" for line in lines] + ([tail] if tail else [])


def path_problem(path: str) -> str | None:
    """Why `path` may not be touched by a patch, or None."""
    parts = path.split("/")
    if path.startswith("/"):
        return "absolute path"
    if re.match(r"^[A-Za-z]:", path):
        return "drive letter"
    if "\\" in path or any(ord(c) < 32 for c in path):
        return "backslash or control character in the path"
    if any(p in ("", ".", "..") for p in parts):
        return "empty, '.' or '..' path component"
    if any(p.lower() == ".git" for p in parts):
        return "path inside .git"
    if parts[0] != "vllm" or len(parts) < 2:
        return "outside vllm/"
    return None


def parse(data: bytes) -> Iterator[FilePatch | BrokenPatch]:
    """Yield each `diff --git` section, or what is wrong with it, in order of appearance."""
    lines = split_lines(data)
    starts = [i for i, line in enumerate(lines) if line.startswith(b"diff --git ")]
    for start, end in zip(starts, [*starts[1:], len(lines)]):
        try:
            yield _section(lines[start:end], start)
        except BrokenPatch as problem:
            yield problem


def _section(lines: list[bytes], offset: int) -> FilePatch:
    title = _text(lines[0], offset)
    path, i = _path_of(title), 1
    if why := path_problem(path):
        raise BrokenPatch(f"{path!r}: {why}")
    before = after = ""
    creates = deletes = False
    while i < len(lines) and not lines[i].startswith((b"--- ", b"@@")):
        line = _text(lines[i], offset + i)
        for prefix, why in REFUSED.items():
            if line.startswith(prefix):
                raise BrokenPatch(f"{path}: the patch {why}, which is not accepted")
        if line.startswith("new file mode "):
            creates = True
            _regular(path, line[-6:])
        elif line.startswith("deleted file mode "):
            deletes = True
            _regular(path, line[-6:])
        elif match := INDEX.match(line):
            before, after = match[1], match[2]
            if match[3]:
                _regular(path, match[3], executable=True)
        else:
            raise BrokenPatch(f"{path}: line {offset + i + 1}: unexpected {line!r}")
        i += 1
    if len(before) != 40 or len(after) != 40:
        raise BrokenPatch(f"{path}: no index line with full blob ids")
    if i >= len(lines):
        if creates or deletes:  # an empty file has no hunks
            return FilePatch(path, before, after, (), creates, deletes)
        raise BrokenPatch(f"{path}: truncated before the hunks")
    wanted = (
        "--- " + ("/dev/null" if creates else f"a/{path}"),
        "+++ " + ("/dev/null" if deletes else f"b/{path}"),
    )
    for want in wanted:
        if i >= len(lines) or _text(lines[i], offset + i).rstrip("\t") != want:
            raise BrokenPatch(f"{path}: line {offset + i + 1}: expected {want!r}")
        i += 1
    hunks = tuple(_hunks(lines, i, offset, path))
    if not hunks:
        raise BrokenPatch(f"{path}: no hunks")
    return FilePatch(path, before, after, hunks, creates, deletes)


def _hunks(lines: list[bytes], i: int, offset: int, path: str) -> Iterator[Hunk]:
    old_end = 0
    while i < len(lines):
        head = HUNK.match(lines[i])
        if not head:
            shown = lines[i][:60].decode("utf-8", "replace").rstrip()
            raise BrokenPatch(f"{path}: line {offset + i + 1}: expected a hunk header, found {shown!r}")
        where, i = offset + i + 1, i + 1
        old_start, new_start = int(head[1]), int(head[3])
        counts = [int(head[2] or 1), int(head[4] or 1)]
        sides: tuple[list[bytes], list[bytes]] = ([], [])
        last: tuple[int, ...] = ()
        changed = 0
        while counts[0] or counts[1] or (i < len(lines) and lines[i].startswith(b"\\")):
            if i >= len(lines):
                raise BrokenPatch(f"{path}: hunk at line {where} is truncated or its counts are wrong")
            kind, text = lines[i][:1], lines[i][1:]
            if kind == b"\\":
                if not last:
                    raise BrokenPatch(f"{path}: line {offset + i + 1}: stray '\\ No newline' marker")
                for side in last:
                    sides[side][-1] = sides[side][-1][:-1]
                last, i = (), i + 1
                continue
            if kind in (b"\n", b"\r"):
                raise BrokenPatch(
                    f"{path}: line {offset + i + 1}: empty line inside a hunk "
                    "(an editor stripped trailing whitespace)"
                )
            if kind not in (b" ", b"-", b"+") or not text.endswith(b"\n"):
                raise BrokenPatch(f"{path}: hunk at line {where} is truncated or its counts are wrong")
            last = {b" ": (0, 1), b"-": (0,), b"+": (1,)}[kind]
            changed += len(last) == 1
            for side in last:
                sides[side].append(text)
                counts[side] -= 1
            if min(counts) < 0:
                raise BrokenPatch(f"{path}: hunk at line {where} holds more lines than its counts say")
            i += 1
        old_at = old_start - 1 if sides[0] else old_start
        new_at = new_start - 1 if sides[1] else new_start
        if old_at < old_end:
            raise BrokenPatch(f"{path}: hunk at line {where} overlaps the one before it")
        old_end = old_at + len(sides[0])
        yield Hunk(old_at, new_at, tuple(sides[0]), tuple(sides[1]), changed)


def apply(data: bytes | None, change: FilePatch, reverse: bool = False) -> bytes | None:
    """`data` with `change` applied (or taken back) exactly; None stands for an absent file.

    Raises Mismatch where a hunk's old lines are not at the very position it names.
    """
    creates, deletes = (change.deletes, change.creates) if reverse else (change.creates, change.deletes)
    if creates != (data is None):
        raise Mismatch(0, 0, b"", data)
    lines, out, at = split_lines(data or b""), [], 0
    for number, hunk in enumerate(change.hunks, 1):
        start, old, new = (hunk.new_at, hunk.new, hunk.old) if reverse else (hunk.old_at, hunk.old, hunk.new)
        out += lines[at:start]
        for k, wanted in enumerate(old):
            found = lines[start + k] if start + k < len(lines) else None
            if found != wanted:
                raise Mismatch(number, start + k + 1, wanted, found)
        if start > len(lines):
            raise Mismatch(number, start, b"", None)
        out += new
        at = start + len(old)
    out += lines[at:]
    if deletes:
        if out:
            raise Mismatch(len(change.hunks), 1, b"", out[0])
        return None
    return b"".join(out)


def find(lines: list[bytes], block: tuple[bytes, ...], near: int) -> int | None:
    """Index of `block` in `lines` nearest to `near`, or None. An empty block is found nowhere."""
    if not block:
        return None
    hits = [i for i in range(len(lines) - len(block) + 1) if tuple(lines[i : i + len(block)]) == block]
    return min(hits, key=lambda i: abs(i - near), default=None)


def _text(line: bytes, at: int) -> str:
    if line.endswith(b"\r\n"):
        raise BrokenPatch(f"line {at + 1}: CRLF line end in a patch header (was the file converted?)")
    try:
        return line.rstrip(b"\n").decode("utf-8")
    except UnicodeDecodeError:
        raise BrokenPatch(f"line {at + 1}: a patch header is not UTF-8") from None


def _path_of(title: str) -> str:
    rest = title.removeprefix("diff --git ")
    if rest.startswith('"'):
        raise BrokenPatch(f"{rest}: quoted paths are not accepted")
    half = len(rest) // 2
    left, right = rest[:half], rest[half + 1 :]
    if rest[half : half + 1] != " " or not left.startswith("a/") or right != "b/" + left[2:]:
        raise BrokenPatch(f"{rest!r}: expected 'a/PATH b/PATH' with one path (no rename, no other prefix)")
    return left[2:]


def _regular(path: str, mode: str, executable: bool = False) -> None:
    if mode == "100644" or (executable and mode == "100755"):
        return
    kind = {"120000": "a symbolic link", "160000": "a submodule", "100755": "an executable"}.get(mode, mode)
    raise BrokenPatch(f"{path}: {kind} is not accepted")
