"""A patch set: the order in `series`, the patches with their headers, and what lint has to say about them."""

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from . import diff
from .blob import ABSENT, blob_id
from .errors import Exit, PatchsetError
from .manifest import covers
from .pin import Pin, order

NAME = re.compile(r"^(\d{4})-[a-z0-9][a-z0-9.-]*\.patch$")
STATUS = re.compile(r"^(Pending|Submitted \[[^\]]+\]|Backport \[[^\]]+\]|Inappropriate \[[^\]]+\])$")
FIRST_LINE = b"From " + b"0" * 40 + b" Mon Sep 17 00:00:00 2001"


@dataclass(frozen=True)
class Patch:
    """One patch file. `digest` is the sha256 of its bytes."""

    name: str
    digest: str
    author: str
    date: str
    subject: str
    body: str
    status: str
    remove_when: str
    files: tuple[diff.FilePatch, ...]

    @property
    def lines(self) -> int:
        """Added plus removed lines, the figure that should stay small."""
        return sum(h.changed for f in self.files for h in f.hunks)


@dataclass(frozen=True)
class Series:
    """The patches of one pin in order."""

    pin: Pin
    patches: tuple[Patch, ...]

    @property
    def digest(self) -> str:
        """Changes when any patch, or the order, changes."""
        return hashlib.sha256("".join(f"{p.digest} {p.name}\n" for p in self.patches).encode()).hexdigest()

    def ids(self) -> dict[str, tuple[str, str]]:
        """path -> (upstream blob id, patched blob id) over the whole series."""
        out: dict[str, tuple[str, str]] = {}
        for change in (f for p in self.patches for f in p.files):
            first = out[change.path][0] if change.path in out else change.before
            out[change.path] = (first, change.after)
        return out

    def expected(self, manifest: Mapping[str, str]) -> dict[str, str]:
        """The manifest as it reads once the whole series is in."""
        out = dict(manifest)
        for path, (_, after) in self.ids().items():
            if after == ABSENT:
                out.pop(path, None)
            else:
                out[path] = after
        return out


def load(pin: Pin, manifest: Mapping[str, str]) -> Series:
    """Read a patch set that must be flawless. Raises one error that carries every problem lint finds."""
    found, problems = examine(pin, manifest)
    if problems:
        count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
        raise PatchsetError(
            Exit.PATCH,
            f"the patch set {pin.folder.name} is broken ({count}): {problems[0]}",
            "mend the patch files (python apply.py --lint lists all) or restore them from version control",
            tuple(problems),
        )
    return found


def examine(pin: Pin, manifest: Mapping[str, str]) -> tuple[Series, list[str]]:
    """The patch set as far as it can be read, and all problems, in order."""
    problems: list[str] = []
    names = _order(pin.folder, problems)
    patches = []
    for name in names:
        path = pin.folder / name
        if path.is_file():
            patch, own = read_patch(name, path.read_bytes())
            problems += [f"{name}: {p}" for p in [*own, *_backport(patch, pin)]]
            patches.append(patch)
    known = dict(manifest)
    for patch in patches:
        for change in patch.files:
            if not covers(change.path):
                problems.append(f"{patch.name}: {change.path}: written by builds, so no patch may touch it")
            have = known.get(change.path, ABSENT)
            if have != change.before:
                why = (
                    "upstream has no such file"
                    if have == ABSENT
                    else "the file exists already"
                    if change.before == ABSENT
                    else f"starts from blob {change.before[:12]}, but the file is {have[:12]} at this point"
                )
                problems.append(f"{patch.name}: {change.path}: {why}")
            known[change.path] = change.after
    return Series(pin, tuple(patches)), problems


def _backport(patch: Patch, pin: Pin) -> list[str]:
    if not (match := re.fullmatch(r"Backport \[(.*)\]", patch.status)):
        return []
    if not re.fullmatch(r"v?\d+(\.\d+)+[\w.]*", match[1]):
        return [f"{patch.status} names no version; write it like Backport [0.13.0]"]
    if order(match[1]) <= order(pin.version):
        return [f"{patch.status}: the pinned vLLM {pin.version} has it already; drop the patch"]
    return []


def _order(folder: Path, problems: list[str]) -> list[str]:
    path = folder / "series"
    if not path.is_file():
        problems.append(f"{folder.name}/series is missing")
        return []
    names: list[str] = []
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").split("\n"), 1):
        name = line.strip()
        if not name or name.startswith("#"):
            continue
        if name != line:
            problems.append(f"series line {number}: stray whitespace around {name!r}")
        if name in names:
            problems.append(f"series line {number}: {name} is listed twice")
            continue
        if not NAME.match(name):
            problems.append(f"series line {number}: {name!r} is not NNNN-lower-case-name.patch")
            if "/" in name or name.startswith("."):
                continue
        elif not (folder / name).is_file():
            problems.append(f"series line {number}: {name} has no file")
        names.append(name)
    numbers = [int(m[1]) for m in map(NAME.match, names) if m]
    if numbers != sorted(set(numbers)):
        problems.append("series: the numbers of the patches do not ascend")
    for stray in sorted(p.name for p in folder.glob("*.patch") if p.name not in names):
        problems.append(f"{stray} is not in series")
    return names


def read_patch(name: str, data: bytes) -> tuple[Patch, list[str]]:
    """Parse one patch file; everything wrong with it comes back as lines, never as an exception."""
    problems: list[str] = []
    if not data.strip():
        return Patch(name, hashlib.sha256(data).hexdigest(), "", "", "", "", "", "", ()), [
            "the file is empty"
        ]
    if not data.endswith(b"\n"):
        problems.append("no newline at the end (truncated?)")
        data_for_parse = data + b"\n"
    else:
        data_for_parse = data
    head, marker, _ = data_for_parse.partition(b"\ndiff --git ")
    author, date, subject, body = _message(head, problems)
    status, remove = _trailer(body, "Upstream-Status", problems), _trailer(body, "Remove-when", problems)
    if status and not STATUS.match(status):
        problems.append(
            f"Upstream-Status {status!r} is none of Pending, Submitted [where], "
            "Backport [version], Inappropriate [reason]"
        )
    if remove and len(remove.split()) < 3:
        problems.append(f"Remove-when {remove!r} is no condition; say in three words or more when it can go")
    if not marker:
        problems.append("not a patch: no 'diff --git' section")
    if re.search(rb"\n-- \n[^\n]*\n\s*$", data_for_parse):
        problems.append("carries a git signature; make it with --no-signature")
        data_for_parse = re.sub(rb"\n-- \n[^\n]*\n\s*$", b"\n", data_for_parse)
    files: list[diff.FilePatch] = []
    for part in diff.parse(data_for_parse):
        if isinstance(part, diff.BrokenPatch):
            problems.append(str(part))
        elif any(f.path == part.path for f in files):
            problems.append(f"{part.path}: two sections for one file")
        else:
            files.append(part)
    digest = hashlib.sha256(data).hexdigest()
    return Patch(name, digest, author, date, subject, body, status, remove, tuple(files)), problems


def _message(head: bytes, problems: list[str]) -> tuple[str, str, str, str]:
    """(author, date, subject, body) of the part before the first diff."""
    if b"\r" in head:
        problems.append("CRLF line ends (was the file converted?)")
        head = head.replace(b"\r\n", b"\n")
    try:
        text = head.decode("utf-8")
    except UnicodeDecodeError:
        problems.append("the message is not UTF-8")
        text = head.decode("utf-8", "replace")
    fields, _, body = text.partition("\n\n")
    if not head.startswith(FIRST_LINE):
        problems.append("not in deterministic format-patch form: the first line is not 'From 000...'")
    lines = fields.replace("\n ", " ").split("\n")
    values = {k: v.strip() for k, _, v in (line.partition(":") for line in lines[1:])}
    problems += [f"no {key}: field" for key in ("From", "Date", "Subject") if not values.get(key)]
    subject = values.get("Subject", "")
    if subject and not subject.startswith("[PATCH] "):
        problems.append("Subject does not start with '[PATCH] ' (make it with --no-numbered)")
    body, _, stat = body.partition("\n---\n")
    if stat.strip():
        problems.append("carries a diffstat; make it with --no-stat")
    body = body.removesuffix("\n---").strip("\n")
    if not re.sub(r"^[A-Z][A-Za-z-]+: .*$", "", body, flags=re.M).strip():
        problems.append("the message does not say why (no text between subject and trailers)")
    return values.get("From", ""), values.get("Date", ""), subject.removeprefix("[PATCH] "), body


def _trailer(body: str, key: str, problems: list[str]) -> str:
    values: list[str] = re.findall(rf"^{key}:[ \t]*(.*)$", body, flags=re.M)
    if len(values) != 1 or not values[0].strip():
        problems.append(f"exactly one '{key}:' line is wanted, found {len(values)}")
        return ""
    return values[0].strip()


def post_images(
    series: Series, upstream: Callable[[str], bytes | None]
) -> dict[str, tuple[bytes | None, bytes | None]]:
    """path -> (upstream bytes, patched bytes) with the whole series applied in memory.

    `upstream(path)` gives the unpatched content. Every step is checked against the blob ids of its index
    line.
    """
    images: dict[str, tuple[bytes | None, bytes | None]] = {}
    for patch in series.patches:
        for change in patch.files:
            if change.path not in images:
                data = upstream(change.path)
                images[change.path] = (data, data)
            first, now = images[change.path]
            try:
                after = diff.apply(now, change)
            except diff.Mismatch as problem:
                raise PatchsetError(
                    Exit.PATCH,
                    f"{patch.name} does not apply to {change.path}: {explain(now, change, problem)}",
                    "restore the patch from version control, or refresh it (python apply.py --refresh TREE)",
                ) from problem
            if blob_id(now) != change.before or blob_id(after) != change.after:
                raise PatchsetError(
                    Exit.PATCH,
                    f"{patch.name}: {change.path} does not come out as the patch's index line predicts",
                    "restore the patch from version control, or refresh it (python apply.py --refresh TREE)",
                )
            images[change.path] = (first, after)
    return images


def pre_images(series: Series, patched: Callable[[str], bytes | None]) -> dict[str, bytes | None]:
    """path -> upstream bytes, by taking the whole series back from patched content."""
    images: dict[str, bytes | None] = {}
    for patch in reversed(series.patches):
        for change in reversed(patch.files):
            now = images[change.path] if change.path in images else patched(change.path)
            images[change.path] = diff.apply(now, change, reverse=True)
    return images


def explain(data: bytes | None, change: diff.FilePatch, problem: diff.Mismatch) -> str:
    """Why a change does not fit, as its own kind: gone, already there, moved, or conflict with the lines
    found.
    """
    if data is None:
        return "the file is gone"
    if change.creates:
        return "the file exists already"
    try:
        diff.apply(data, change, reverse=True)
        return "upstream already has it"
    except diff.Mismatch:
        pass
    hunk = change.hunks[problem.hunk - 1]
    at = diff.find(diff.split_lines(data), hunk.old, hunk.old_at)
    if at is not None:
        return f"hunk {problem.hunk} fits at line {at + 1}, not at line {hunk.old_at + 1}"
    found = (
        "end of file"
        if problem.found is None
        else repr(problem.found.decode("utf-8", "replace").rstrip("\n"))
    )
    return f"hunk {problem.hunk} conflicts at line {problem.line}, which now reads {found}"
