"""The folder `.sfa-cp-overlay` inside a target: originals by blob id, the state, the journal. All writes are
atomic.
"""

import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .blob import ABSENT, blob_id
from .errors import Exit, PatchsetError

FORMAT = 1


class Unreadable(Exception):
    """A state or journal file is damaged; contents decide then."""


@dataclass(frozen=True)
class Entry:
    """One file's way from `before` to `after`. `kind` is source, record (the wheel's RECORD) or cache (a
    .pyc).

    `mode` holds for both; `mtime_ns` is the time stamp of the file before, `after_mtime_ns` one that the file
    after shall have (None: that of writing).
    """

    before: str
    after: str
    mode: int
    mtime_ns: int | None
    after_mtime_ns: int | None = None
    kind: str = "source"


@dataclass(frozen=True)
class State:
    """What the last finished apply put in place."""

    release: str
    vllm: str
    series: str
    patches: dict[str, str]  # name -> sha256, in order
    files: dict[str, Entry]
    format: int = FORMAT


@dataclass(frozen=True)
class Journal:
    """A transaction under way: go from `before` to `after` for every entry, then `final` becomes the state."""

    verb: str
    entries: dict[str, Entry]
    final: State | None
    format: int = field(default=FORMAT)


class Store:
    """Access to the folder. Nothing is created before the first write."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state_file = folder / "state.json"
        self.journal_file = folder / "journal.json"
        self.objects = folder / "objects"
        self.stage = folder / "stage"
        self.lock = folder / "lock"

    def state(self) -> State | None:
        """The recorded state; None where there is none or it is damaged. Raises on one from a newer release."""
        try:
            return _state(_read(self.state_file))
        except (FileNotFoundError, NotADirectoryError, Unreadable):
            return None

    def journal(self) -> Journal | None:
        """The journal; None where there is none. Raises Unreadable on a damaged one."""
        try:
            data = _read(self.journal_file)
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            final = _state(data["final"]) if data["final"] is not None else None
            return Journal(data["verb"], {p: Entry(**e) for p, e in data["entries"].items()}, final)
        except (KeyError, TypeError, AttributeError) as problem:
            raise Unreadable(str(problem)) from problem

    def stamp(self) -> tuple[tuple[int, int] | None, ...]:
        """Of state and journal: which files they are. Every run that changes the target changes this when its
        changes begin and when they end."""
        return tuple(map(_identity, (self.state_file, self.journal_file)))

    def put(self, data: bytes) -> str:
        """Keep `data` and return its id."""
        name = blob_id(data)
        path = self.objects / name
        if not path.is_file() or blob_id(path.read_bytes()) != name:
            self.objects.mkdir(parents=True, exist_ok=True)
            write(path, data)
        return name

    def get(self, name: str) -> bytes | None:
        """Kept bytes by id, verified; None for `ABSENT`, for an unknown id and for a damaged object."""
        try:
            data = (self.objects / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return data if blob_id(data) == name else None

    def save_state(self, state: State | None) -> None:
        """Write the state, or remove it."""
        if state is None:
            self.state_file.unlink(missing_ok=True)
            sync(self.folder)
        else:
            write(self.state_file, _json(state))

    def save_journal(self, journal: Journal) -> None:
        """Write the journal: from here on the transaction exists."""
        write(self.journal_file, _json(journal))

    @property
    def untidy(self) -> bool:
        """Whether a run is under way here, or one was killed."""
        return self.stage.exists() or self.lock.exists() or self.journal_file.exists()

    def tidy(self) -> None:
        """Drop what neither state nor journal needs; without a state nothing but the lock remains."""
        if self.journal_file.exists():
            return
        for leftover in self.folder.glob("*.tmp"):
            leftover.unlink()
        state = self.state()
        if state is None and not self.state_file.exists():
            shutil.rmtree(self.objects, ignore_errors=True)
        elif state is not None:
            keep = {entry.before for entry in state.files.values()}
            for path in self.objects.glob("*"):
                if path.name not in keep:
                    path.unlink()
        shutil.rmtree(
            self.stage, ignore_errors=True
        )  # last: as long as it is there, a killed run is tidied up


def write(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Write a whole file durably: temporary name, flush, rename, flush the folder."""
    temporary = path.with_name(path.name + ".tmp")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(handle, view) :]
        os.fchmod(handle, mode)
        os.fsync(handle)
    finally:
        os.close(handle)
    os.replace(temporary, path)
    sync(path.parent)


def sync(folder: Path) -> None:
    """Flush a folder's entries to the disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def missing(store: Store, names: Iterable[str]) -> list[str]:
    """Ids that the store should hold and does not."""
    return [name for name in names if name != ABSENT and store.get(name) is None]


def _json(value: State | Journal) -> bytes:
    return json.dumps(asdict(value), indent=1).encode() + b"\n"


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_ino, found.st_mtime_ns


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_bytes())
        made = data["format"]
    except (ValueError, KeyError, TypeError) as problem:
        raise Unreadable(f"{path} is damaged") from problem
    if not isinstance(made, int) or made > FORMAT:
        raise PatchsetError(
            Exit.TARGET,
            f"{path} was written by a newer release (format {made}, this one knows {FORMAT})",
            "revert with that release first, or use a fresh tree with --dest",
        )
    return data


def _state(data: dict[str, Any]) -> State:
    try:
        files = {p: Entry(**e) for p, e in data["files"].items()}
        return State(data["release"], data["vllm"], data["series"], dict(data["patches"]), files)
    except (KeyError, TypeError, AttributeError) as problem:
        raise Unreadable(str(problem)) from problem
