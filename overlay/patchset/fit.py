"""How the patch series fits an upstream version that it was not made for, all in memory.

A hunk fits where its old lines stand, or (fuzzy) where they stand but for up to two context lines at either
end, in one place only. A patch is already upstream if the version holds its new lines, or the same statements
written otherwise (comments, layout), or if its header names a release that has it and the code it replaces is
gone. Patches that do not fit leave the files as they are, and the series goes on.
"""

import ast
import difflib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache

from . import diff
from .fingerprint import DEFINITIONS, normalise
from .modules import Code
from .series import Patch, Series

FUZZ = 2  # context lines that may differ at either end of a hunk
TELLING = 8  # characters a line needs to say where it came from


class Fit(str, Enum):
    """The classes, best first."""

    def __str__(self) -> str:
        return self.value

    CLEAN = "clean"
    FUZZY = "fuzzy"
    UPSTREAM = "already upstream"
    MOVED = "file moved"
    CONFLICT = "conflict"
    GONE = "file gone"


@dataclass(frozen=True)
class Result:
    """How one patch fits one version. `detail` is one line, `shown` upstream's lines against the patch's."""

    fit: Fit
    detail: str = ""
    shown: str = ""


@dataclass(frozen=True)
class Place:
    """Where a hunk goes: lines [start, start + len(old)) of the file; `lead` and `tail` lines of context
    differ.
    """

    start: int
    old: tuple[bytes, ...]
    new: tuple[bytes, ...]
    lead: int = 0
    tail: int = 0

    @property
    def fuzz(self) -> int:
        """Context lines that are ignored."""
        return self.lead + self.tail


@dataclass
class _Work:
    """The files of one version while the series goes through them; `moved` maps a path to its new one."""

    files: Mapping[str, bytes]
    changed: dict[str, bytes | None] = field(default_factory=dict)
    moved: dict[str, str] = field(default_factory=dict)

    def get(self, path: str) -> bytes | None:
        path = self.moved.get(path, path)
        return self.changed[path] if path in self.changed else self.files.get(path)

    def put(self, path: str, data: bytes | None) -> None:
        self.changed[self.moved.get(path, path)] = data


def classify(
    series: Series, base: Mapping[str, bytes], code: Code, version: str
) -> tuple[dict[str, Result], dict[str, bytes | None]]:
    """Patch name -> how it fits, in order, and the files as far as the series went in.

    `base` holds the files the series was made for, `code` those of `version`.
    """
    before: dict[str, bytes | None] = {}
    work = _Work(code.files)
    results = {}
    for patch in series.patches:
        images = []
        for change in patch.files:
            old = before.get(change.path, base.get(change.path))
            before[change.path] = diff.apply(old, change)
            images.append((change, old, before[change.path]))
        results[patch.name] = _patch(patch, images, work, code, version)
    return results, work.changed


def _patch(patch: Patch, images: list, work: _Work, code: Code, version: str) -> Result:
    known = _is_upstream(patch, images, work, code, version)
    if known:
        return Result(Fit.UPSTREAM, known)
    results, puts = [], []
    for change, old, _ in images:
        result, data = _file(change, old, work, code)
        results.append(result)
        if result.fit not in (Fit.CONFLICT, Fit.GONE, Fit.UPSTREAM):
            puts.append((change.path, data))
    for path, data in puts:
        work.put(path, data)
    if len(results) == 1:
        return results[0]
    order = list(Fit)
    worst = max(results, key=lambda r: order.index(r.fit))
    rest = [r for r in results if r is not worst and r.fit is not Fit.CLEAN]
    mixed = any(r.fit is Fit.UPSTREAM for r in results) and worst.fit in (Fit.CLEAN, Fit.FUZZY, Fit.UPSTREAM)
    return Result(
        Fit.CONFLICT if mixed else worst.fit,
        "; ".join(r.detail for r in [worst, *rest] if r.detail),
        "\n".join(r.shown for r in [worst, *rest] if r.shown),
    )


def _file(change: diff.FilePatch, old: bytes | None, work: _Work, code: Code) -> tuple[Result, bytes | None]:
    data = work.get(change.path)
    if change.creates:
        if data is not None:
            return Result(Fit.CONFLICT, f"{change.path} exists already"), None
        return Result(Fit.CLEAN), diff.apply(None, change)
    if data is not None:
        return _hunks(change, change.path, old, data)
    target = _new_home(change, old, work, code)
    if target is None:
        return Result(Fit.GONE, f"{change.path} is gone"), None
    work.moved[change.path] = target
    inner, data = _hunks(change, target, old, work.get(change.path) or b"")
    how = "clean" if inner.fit is Fit.CLEAN else f"{inner.fit}: {inner.detail}"
    if inner.fit is Fit.CONFLICT:
        data = work.get(change.path)
    return Result(Fit.MOVED, f"{change.path} is now {target}, there {how}", inner.shown), data


def _hunks(change: diff.FilePatch, path: str, old: bytes | None, data: bytes) -> tuple[Result, bytes | None]:
    lines = diff.split_lines(data)
    places: list[Place] = []
    problems: list[str] = []
    shown: list[str] = []
    done = shift = end = 0
    for number, hunk in enumerate(change.hunks, 1):
        place = locate(lines, hunk, hunk.old_at + shift, end)
        if place is not None:
            places.append(place)
            shift, end = place.start - place.lead - hunk.old_at, place.start + len(place.old)
        elif diff.find(lines, hunk.new, hunk.new_at) is not None:
            done += 1
            problems.append(f"{path} hunk {number} is already upstream")
        else:
            at, now = _nearest(lines, hunk, old)
            where = f"line {at + 1}" if now else "its lines are gone"
            problems.append(f"{path} hunk {number} ({where})")
            shown.append(_against(path, number, hunk, now, at))
    if problems:
        fit = Fit.UPSTREAM if done == len(change.hunks) else Fit.CONFLICT
        return Result(fit, "; ".join(problems), "".join(shown)), None
    out: list[bytes] = []
    at = 0
    for place in places:
        out += [*lines[at : place.start], *place.new]
        at = place.start + len(place.old)
    result = b"".join([*out, *lines[at:]])
    offsets = [p.start - p.lead - h.old_at for p, h in zip(places, change.hunks)]
    fuzz = sum(p.fuzz for p in places)
    if fuzz == 0 and not any(offsets):
        return Result(Fit.CLEAN), None if change.deletes else result
    span = str(offsets[0]) if len(set(offsets)) == 1 else f"{min(offsets)} to {max(offsets)}"
    return Result(Fit.FUZZY, f"{path}: offset {span}, {fuzz} lines"), None if change.deletes else result


def locate(lines: list[bytes], hunk: diff.Hunk, near: int, start: int = 0) -> Place | None:
    """The best place for a hunk at or after line `start`, exact ones first; None where it conflicts.

    Of several exact places the one nearest to `near` is taken; a fuzzy place must be the only one.
    """
    lead = _shared(hunk.old, hunk.new)
    tail = _shared(hunk.old[lead:][::-1], hunk.new[lead:][::-1])
    cuts = [(a, b) for a in range(min(FUZZ, lead) + 1) for b in range(min(FUZZ, tail) + 1)]
    for a, b in sorted(cuts, key=lambda cut: (sum(cut), cut)):
        old, new = hunk.old[a : len(hunk.old) - b], hunk.new[a : len(hunk.new) - b]
        hits = [i for i in _all(lines, old) if i >= start] if old else []
        if hits and (len(hits) == 1 or not a + b):
            at = min(hits, key=lambda i: abs(i - a - near))
            return Place(at, old, new, a, b)
    if not hunk.old and near <= len(lines):  # an insertion without context, into an empty file say
        return Place(near, (), hunk.new)
    return None


def _is_upstream(patch: Patch, images: list, work: _Work, code: Code, version: str) -> str:
    """Why the patch counts as already upstream, or ""."""
    homes: list[bytes | None] = []
    for change, old, _ in images:
        data = work.get(change.path)
        if data is None and not (change.creates or change.deletes):
            data = code.files.get(_new_home(change, old, work, code) or "")
        homes.append(data)
    if all(_verbatim(change, data) for (change, _, _), data in zip(images, homes)):
        return "the same lines"
    if all(data is not None and _same_code(old, new, data) for (_, old, new), data in zip(images, homes)):
        return "the same statements"
    release = patch.status.partition("[")[2].rstrip("]") if patch.status.startswith("Backport [") else ""
    if release and _at_least(version, release):
        pairs = [(old, new, data) for (_, old, new), data in zip(images, homes)]
        if all(data is None or _same_code(old, new, data, added_too=False) for old, new, data in pairs):
            return f"since {release} by its header, and the code it replaces is gone"
    return ""


def _verbatim(change: diff.FilePatch, data: bytes | None) -> bool:
    if data is None or change.deletes:
        return data is None and change.deletes
    lines = diff.split_lines(data)
    return all(
        diff.find(lines, h.new, h.new_at) is not None and diff.find(lines, h.old, h.old_at) is None
        for h in change.hunks
    )


def _same_code(old: bytes | None, new: bytes | None, data: bytes, added_too: bool = True) -> bool:
    """Whether `data` has no statement that the change removes and (`added_too`) all that it adds, each in the
    same definition."""
    try:
        was, wanted, now = (_counted(d or b"") for d in (old, new, data))
    except (SyntaxError, ValueError):
        return False
    added, removed = wanted - was, was - wanted
    if any(now[statement] > wanted[statement] for statement in removed):
        return False
    return bool(added) and not (added - now) if added_too else bool(removed)


@lru_cache(maxsize=32)
def _counted(data: bytes) -> Counter[tuple[str, str]]:
    """The statements of a file, not to be changed. Raises SyntaxError or ValueError."""
    return Counter(_statements(ast.parse(data)))


def _statements(node: ast.AST, scope: str = "") -> Iterator[tuple[str, str]]:
    """(enclosing definition, normalised statement) of every statement; compound ones without their bodies."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            parts = []
            for name, value in ast.iter_fields(child):
                block = (
                    isinstance(value, list) and value and isinstance(value[0], ast.stmt | ast.ExceptHandler)
                )
                if not block:
                    parts.append(f"{name}={normalise(value)}")
            yield scope, f"{type(child).__name__}({','.join(parts)})"
        inner = f"{scope}.{child.name}" if isinstance(child, DEFINITIONS) else scope
        if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from _statements(child, inner)


def _new_home(change: diff.FilePatch, old: bytes | None, work: _Work, code: Code) -> str | None:
    """Where a file went: one that holds most of the telling lines of the hunks, or the definitions they are
    in.
    """
    if old is None:
        return None
    if change.path in work.moved:
        return work.moved[change.path]
    wanted = {line.strip() for h in change.hunks for line in h.old if len(line.strip()) >= TELLING}
    name = change.path.rpartition("/")[2]
    stem = name.removesuffix(".py")
    defined = {p for q in _enclosing(old, change) for p in code.definitions.get(q, [])}
    same_name = [p for p in code.files if p.rpartition("/")[2] == name and stem != "__init__"]
    best, score = None, 0.5
    for path in sorted({*same_name, *defined}):
        have = {line.strip() for line in code.files[path].split(b"\n")}
        share = len(wanted & have) / max(1, len(wanted))
        if share > score:
            best, score = path, share
    return best or (next(iter(defined)) if len(defined) == 1 else None)


def _enclosing(data: bytes, change: diff.FilePatch) -> set[str]:
    """Names of the top-level definitions that the hunks are in."""
    try:
        body = ast.parse(data).body
    except (SyntaxError, ValueError):
        return set()
    spans = [(n.name, n.lineno, n.end_lineno or n.lineno) for n in body if isinstance(n, DEFINITIONS)]
    middles = [h.old_at + 1 + len(h.old) // 2 for h in change.hunks]
    return {name for name, first, last in spans if any(first <= m <= last for m in middles)}


def _nearest(lines: list[bytes], hunk: diff.Hunk, old: bytes | None) -> tuple[int, list[bytes]]:
    """(0-based line, lines) that most resemble a hunk's old lines; no lines where nothing does."""
    size = len(hunk.old)
    wanted = Counter(line.strip() for line in hunk.old if len(line.strip()) >= TELLING)
    best, score = 0, 0
    for start in range(max(1, len(lines) - size + 1)):
        window = Counter(line.strip() for line in lines[start : start + size])
        got = sum((wanted & window).values())
        closer = got == score and abs(start - hunk.old_at) < abs(best - hunk.old_at)
        if got > score or (got and closer):
            best, score = start, got
    return (best, lines[best : best + size]) if score else (hunk.old_at, [])


def _against(path: str, number: int, hunk: diff.Hunk, now: list[bytes], at: int) -> str:
    """A unified diff from the lines the patch was made for to upstream's lines now."""
    was = [line.decode("utf-8", "replace").rstrip("\n") for line in hunk.old]
    has = [line.decode("utf-8", "replace").rstrip("\n") for line in now]
    names = (f"{path} hunk {number}, pinned line {hunk.old_at + 1}", f"upstream now, line {at + 1}")
    made = list(difflib.unified_diff(was, has, *names, lineterm="", n=3))
    return "\n".join(made) + "\n" if made else ""


def _all(lines: list[bytes], block: tuple[bytes, ...]) -> list[int]:
    first, size = block[0], len(block)
    starts = [i for i, line in enumerate(lines) if line == first]
    return [i for i in starts if tuple(lines[i : i + size]) == block]


def _shared(left: tuple[bytes, ...], right: tuple[bytes, ...]) -> int:
    count = 0
    for a, b in zip(left, right):
        if a != b:
            break
        count += 1
    return count


def _at_least(version: str, release: str) -> bool:
    def parts(text: str) -> tuple[int, ...]:
        return tuple(int(p) for p in text.lstrip("v").split(".")[:3] if p.isdigit())

    return parts(version) >= parts(release)
