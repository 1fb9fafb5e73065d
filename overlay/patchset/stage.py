"""From a target's present contents to the list of file changes that gives it the patch set, or takes it away."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from . import record
from .blob import ABSENT, blob_id
from .diff import Mismatch
from .errors import Exit, PatchsetError
from .series import Series, post_images, pre_images
from .status import Condition, Inspection
from .store import Entry, State, Store
from .target import STATE, Target


@dataclass(frozen=True)
class Plan:
    """A transaction to be run: entries by path, the bytes they need by blob id, and the state that follows."""

    entries: dict[str, Entry]
    contents: dict[str, bytes]
    final: State | None
    upstream: dict[str, bytes | None]

    @property
    def changed(self) -> list[str]:
        """Source files that change."""
        return [path for path, entry in self.entries.items() if entry.kind == "source"]


def plan(
    target: Target,
    series: Series,
    manifest: Mapping[str, str],
    found: Inspection,
    release: str,
    revert: bool = False,
) -> Plan:
    """The changes from what `target` holds to the patched (or, with `revert`, the upstream) contents.

    Raises PatchsetError where an upstream original cannot be had.
    """
    patched = found.condition is Condition.PATCHED
    old = found.recorded.files if found.recorded and patched else {}
    paths = sorted({*series.ids(), *(p for p, e in old.items() if e.kind == "source")})
    upstream = _originals(target, series, manifest, found, paths)
    images = {path: (data, data) for path, data in upstream.items()}
    if not revert:
        images.update(post_images(series, upstream.__getitem__))
    entries: dict[str, Entry] = {}
    files: dict[str, Entry] = {}
    contents: dict[str, bytes] = {}
    for path, (first, want) in images.items():
        mode, mtime = _stat(target, path)
        now = blob_id(target.read(path))
        origin = old.get(path) or Entry(blob_id(first), "", mode, mtime)
        for data in (first, want):
            if data is not None:
                contents[blob_id(data)] = data
        if now != blob_id(want):
            stamp = origin.mtime_ns if want == first else None
            entries[path] = Entry(now, blob_id(want), origin.mode, mtime, stamp)
        if first != want:
            files[path] = replace(origin, before=blob_id(first), after=blob_id(want))
    _caches(target, entries, files, contents, old, revert)
    if target.record:
        _record(target, images, entries, files, contents, old, patched, revert)
    final = None
    if not revert:
        patches = {p.name: p.digest for p in series.patches}
        final = State(release, series.pin.tag, series.digest, patches, files)
    return Plan(entries, contents, final, upstream)


def _originals(
    target: Target, series: Series, manifest: Mapping[str, str], found: Inspection, paths: list[str]
) -> dict[str, bytes | None]:
    store = Store(target.state_dir)
    out: dict[str, bytes | None] = {}
    lost = []
    for path in paths:
        wanted = manifest.get(path, ABSENT)
        data = target.read(path)
        if blob_id(data) != wanted:
            data = store.get(wanted)
        out[path] = data
        if blob_id(data) != wanted:
            lost.append(path)
    if lost and found.current:
        try:
            out.update(pre_images(series, target.read))
        except Mismatch as problem:
            raise _lost(lost[0]) from problem
        lost = [path for path in lost if blob_id(out[path]) != manifest.get(path, ABSENT)]
    if lost:
        raise _lost(lost[0])
    return out


def _lost(path: str) -> PatchsetError:
    return PatchsetError(
        Exit.TARGET,
        f"the upstream content of {path} is not stored any more",
        "use a fresh tree with --dest, or reinstall vLLM",
    )


def _caches(
    target: Target,
    entries: dict[str, Entry],
    files: dict[str, Entry],
    contents: dict[str, bytes],
    old: Mapping[str, Entry],
    revert: bool,
) -> None:
    """Bytecode of changed files goes (and comes back on revert), or a stale one could be loaded."""
    store = Store(target.state_dir)
    kept = {path: entry for path, entry in old.items() if entry.kind == "cache"}
    present = [cache for path in list(entries) for cache in _bytecode(target, path)]
    for path in sorted({*present, *(kept if revert else ())}):
        mode, mtime = _stat(target, path)
        now = target.read(path)
        back = store.get(kept[path].before) if revert and path in kept else None
        if now is not None:
            contents[blob_id(now)] = now
        if back is not None:
            contents[blob_id(back)] = back
            entries[path] = Entry(
                blob_id(now), blob_id(back), kept[path].mode, mtime, kept[path].mtime_ns, "cache"
            )
        elif now is not None:
            entries[path] = Entry(blob_id(now), ABSENT, mode, mtime, None, "cache")
            if not old:  # made from the upstream file
                files[path] = entries[path]
    for path, entry in kept.items():
        files.setdefault(path, entry)


def _bytecode(target: Target, path: str) -> list[str]:
    folder, _, name = path.rpartition("/")
    stem = name.removesuffix(".py")
    cache = target.root / folder / "__pycache__"
    if stem == name or not cache.is_dir():
        return []
    return [f"{folder}/__pycache__/{p.name}" for p in cache.glob(f"{stem}.*.pyc") if not p.is_symlink()]


def _record(
    target: Target,
    images: Mapping[str, tuple[bytes | None, bytes | None]],
    entries: dict[str, Entry],
    files: dict[str, Entry],
    contents: dict[str, bytes],
    old: Mapping[str, Entry],
    patched: bool,
    revert: bool,
) -> None:
    """Keep the wheel's RECORD right: hashes of changed files, and rows for what we store."""
    path = target.record or ""
    now = target.read(path)
    if now is None:
        return
    mode, mtime = _stat(target, path)
    origin = old.get(path)
    first = Store(target.state_dir).get(origin.before) if origin else None
    if first is None:
        first = record.updated(now, {p: a for p, (a, _) in images.items()}, ()) if patched else now
    if revert:
        want = first if origin and blob_id(now) == origin.after else record.restored(now, first, images)
    else:
        kept = {e.before for e in files.values()} | {blob_id(first)}
        ours = [f"{STATE}/state.json", *(f"{STATE}/objects/{name}" for name in kept if name != ABSENT)]
        want = record.updated(
            record.restored(now, first, images), {p: b for p, (_, b) in images.items()}, ours
        )
    if first is not None:
        contents[blob_id(first)] = first
    contents[blob_id(want)] = want
    stamp = origin.mtime_ns if origin and want == first else None
    if want != now:
        entries[path] = Entry(blob_id(now), blob_id(want), mode, mtime, stamp, "record")
    if not revert:
        start = origin.mtime_ns if origin else mtime
        files[path] = Entry(blob_id(first), blob_id(want), mode, start, None, "record")


def _stat(target: Target, path: str) -> tuple[int, int | None]:
    try:
        found = os.lstat(target.root / path)
    except (FileNotFoundError, NotADirectoryError):
        return 0o644, None
    return found.st_mode & 0o7777, found.st_mtime_ns
