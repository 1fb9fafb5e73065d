"""All or nothing: a set of file changes goes in whole, or the target is as it was.

Order: originals and new contents are stored and flushed; the journal is written; each file is renamed into
place; the state is written; the journal is removed. A failure or a signal before the state is written undoes
what was placed. After a kill the journal tells the next run: everything in place -> finish, else -> undo.
"""

import errno
import os
from collections.abc import Mapping
from pathlib import Path

from . import interrupt
from .blob import ABSENT, blob_id
from .errors import Exit, PatchsetError
from .store import Entry, Journal, State, Store, Unreadable, sync, write
from .target import Target, check_path

MARGIN = 1 << 16


def run(
    target: Target,
    verb: str,
    entries: Mapping[str, Entry],
    contents: Mapping[str, bytes],
    final: State | None,
) -> None:
    """Carry out `entries` (path -> Entry) as one transaction. The caller holds the lock and has recovered.

    `contents` maps blob ids to bytes for everything that is written. Raises PatchsetError with the target
    unchanged (full disk, missing rights, a file that changed meanwhile), Interrupted likewise.
    """
    store = Store(target.state_dir)
    _preflight(target, entries)
    with interrupt.shield():
        try:
            interrupt.check()
            _prepare(store, target, entries, contents, final)
            store.save_journal(Journal(verb, dict(entries), final))
        except BaseException as problem:
            store.journal_file.unlink(missing_ok=True)
            store.tidy()
            raise _told(problem, target) from problem
        try:
            for number, (path, entry) in enumerate(entries.items()):
                interrupt.check()
                _verify(target, path, entry)
                _place(target, path, entry.after, entry.mode, entry.after_mtime_ns, store.stage / str(number))
            for folder in sorted({(target.root / path).parent for path in entries}):
                if folder.is_dir():
                    sync(folder)
            interrupt.check()
        except BaseException as problem:
            _undo(store, target, entries)
            raise _told(problem, target) from problem
        _finish(store, final)


def recover(target: Target, manifest: Mapping[str, str]) -> str | None:
    """Bring an interrupted transaction to an end. Returns what was done, or None where there was nothing to
    do.

    Raises PatchsetError where a file was edited since: nothing is touched then.
    """
    store = Store(target.state_dir)
    try:
        journal = store.journal()
    except Unreadable:
        return _recover_by_content(store, target, manifest)
    if journal is None:
        with interrupt.shield():
            if store.stage.exists() or (store.objects.exists() and not store.state_file.exists()):
                store.tidy()
        return None
    now = {path: blob_id(target.read(path)) for path in journal.entries}
    for path, entry in journal.entries.items():
        if entry.kind != "cache" and now[path] not in (entry.before, entry.after):
            raise PatchsetError(
                Exit.TARGET,
                f"an interrupted {journal.verb} left {target.root}, and {path} was edited since",
                f"move your edit aside (restore {path}), then run this again",
            )
    with interrupt.shield():
        if all(now[p] == e.after for p, e in journal.entries.items() if e.kind != "cache"):
            for path, entry in journal.entries.items():
                if entry.kind == "cache" and now[path] != entry.after:
                    _remove(target, path)
            _finish(store, journal.final)
            return f"finished an interrupted {journal.verb}"
        _undo(store, target, journal.entries)
        return f"rolled back an interrupted {journal.verb}"


def _prepare(
    store: Store,
    target: Target,
    entries: Mapping[str, Entry],
    contents: Mapping[str, bytes],
    final: State | None,
) -> None:
    store.stage.mkdir(parents=True, exist_ok=True)
    largest = 0
    for path in entries:
        data = target.read(path)
        if data is not None:
            largest = max(largest, len(data))
            store.put(data)
    for entry in final.files.values() if final else ():
        if entry.before in contents:
            store.put(contents[entry.before])
    for number, entry in enumerate(entries.values()):
        if entry.after != ABSENT:
            write(store.stage / str(number), contents[entry.after])
    write(store.stage / "reserve", bytes(2 * largest + MARGIN))  # what undoing would need on a full disk


def _preflight(target: Target, entries: Mapping[str, Entry]) -> None:
    device = _existing(target.state_dir).stat().st_dev
    for path in entries:
        check_path(target, path)
        folder = _existing((target.root / path).parent)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PatchsetError(
                Exit.TARGET, f"{folder} cannot be written", "check its owner and mount options, or use --dest"
            )
        if folder.stat().st_dev != device:
            raise PatchsetError(
                Exit.TARGET,
                f"{folder} is on another file system than {target.root}",
                "unmount it there, or use a fresh tree with --dest",
            )


def _verify(target: Target, path: str, entry: Entry) -> None:
    check_path(target, path)
    if entry.kind != "cache" and blob_id(target.read(path)) != entry.before:
        raise PatchsetError(
            Exit.TARGET,
            f"{path} changed while the patches went in",
            "stop what writes there, then run this again",
        )


def _place(target: Target, path: str, wanted: str, mode: int, mtime_ns: int | None, staged: Path) -> None:
    full = target.root / path
    if wanted == ABSENT:
        _remove(target, path)
        return
    full.parent.mkdir(parents=True, exist_ok=True)
    os.chmod(staged, mode)
    if os.geteuid() == 0:
        owner = (full if full.exists() else full.parent).stat()
        os.chown(staged, owner.st_uid, owner.st_gid)
    if mtime_ns is not None:
        os.utime(staged, ns=(mtime_ns, mtime_ns))
    os.replace(staged, full)


def _remove(target: Target, path: str) -> None:
    full = target.root / path
    full.unlink(missing_ok=True)
    for folder in full.parents:
        if folder == target.root:
            return
        try:
            folder.rmdir()
        except OSError:
            return


def _undo(store: Store, target: Target, entries: Mapping[str, Entry]) -> None:
    """Put back every original. The reserve is freed first, so that a full disk does not stop it."""
    (store.stage / "reserve").unlink(missing_ok=True)
    for number, (path, entry) in enumerate(entries.items()):
        now = blob_id(target.read(path))
        if now == entry.before or (now != entry.after and entry.kind != "cache"):
            continue  # not placed yet, or edited by somebody else meanwhile: theirs
        if entry.before == ABSENT:
            _remove(target, path)
            continue
        data = store.get(entry.before)
        if data is None:
            raise PatchsetError(
                Exit.TARGET,
                f"the stored original of {path} is damaged",
                "use a fresh tree with --dest, or reinstall vLLM",
            )
        staged = store.stage / f"{number}.back"
        staged.parent.mkdir(parents=True, exist_ok=True)
        write(staged, data)
        _place(target, path, entry.before, entry.mode, entry.mtime_ns, staged)
    store.journal_file.unlink(missing_ok=True)
    sync(store.folder)
    store.tidy()


def _finish(store: Store, final: State | None) -> None:
    store.save_state(final)
    store.journal_file.unlink(missing_ok=True)
    sync(store.folder)
    store.tidy()


def _recover_by_content(store: Store, target: Target, manifest: Mapping[str, str]) -> str:
    """The journal itself is damaged: put back every stored original whose upstream content we know."""
    state = store.state()
    with interrupt.shield():
        for path, upstream in manifest.items():
            data = store.get(upstream)
            if data is None or (state is not None and path in state.files):
                continue
            now = target.root / path
            if blob_id(target.read(path)) != upstream:
                staged = store.stage / "content.back"
                staged.parent.mkdir(parents=True, exist_ok=True)
                write(staged, data)
                mode = now.stat().st_mode & 0o777 if now.exists() else 0o644
                _place(target, path, upstream, mode, None, staged)
        store.journal_file.unlink(missing_ok=True)
        store.tidy()
    return "rolled back an interrupted run whose journal was damaged"


def _existing(folder: Path) -> Path:
    while not folder.is_dir():
        folder = folder.parent
    return folder


def _told(problem: BaseException, target: Target) -> BaseException:
    if not isinstance(problem, OSError):
        return problem
    hint = {
        errno.ENOSPC: "free some space, then run this again",
        errno.EDQUOT: "free some space, then run this again",
        errno.EROFS: "remount the file system writable, or use --dest",
    }.get(problem.errno or 0, "check the owner and mount options of the tree, or use --dest")
    reason = problem.strerror or str(problem)
    return PatchsetError(Exit.TARGET, f"{target.root} cannot be patched: {reason}; nothing was changed", hint)
