"""What state a target is in, judged from contents: manifest, series and (only as a help) what we recorded."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from . import manifest as manifests
from .blob import ABSENT
from .pin import Pin
from .series import Series
from .store import State, Store, Unreadable
from .target import Target


class Condition(str, Enum):
    """The states of a target."""

    ABSENT = "absent"
    PRISTINE = "pristine"
    PATCHED = "patched"
    INTERRUPTED = "interrupted"
    FOREIGN = "foreign"


@dataclass(frozen=True)
class Inspection:
    """`current` says whether exactly this patch set is in; `differing` names what makes a tree foreign.

    `patches` maps names to applied | pending | changed | added | removed | unknown; `files` is the scan.
    """

    condition: Condition
    current: bool
    recorded: State | None
    differing: tuple[tuple[str, str], ...]
    patches: dict[str, str]
    files: Mapping[str, str]
    claims: str | None
    pin: Pin
    upstream: Mapping[str, str]

    @property
    def first_differing(self) -> str:
        """The first few differing files with how they differ, for a message."""
        shown = ", ".join(f"{path} ({how})" for path, how in self.differing[:3])
        more = len(self.differing) - 3
        return f"{shown} and {more} more" if more > 0 else shown


def inspect(target: Target, series: Series, manifest: Mapping[str, str]) -> Inspection:
    """Look at `target` without changing anything. Raises PatchsetError only for a state from a newer release.

    No lock is held: where another run began or ended meanwhile, what was read is a mixture, and is read again.
    """
    store = Store(target.state_dir)
    while True:
        stamp = store.stamp()
        found = _inspect(target, series, manifest, store)
        if store.stamp() == stamp:
            return found


def _inspect(target: Target, series: Series, manifest: Mapping[str, str], store: Store) -> Inspection:
    recorded = store.state()
    names = [p.name for p in series.patches]
    if not target.root.exists() or (target.root.is_dir() and not any(target.root.iterdir())):
        return Inspection(
            Condition.ABSENT,
            False,
            None,
            (),
            _patches(series, Condition.ABSENT, False, None),
            {},
            None,
            series.pin,
            manifest,
        )
    claims = target.version or manifests.guess_version(target.root)
    try:
        interrupted = store.journal() is not None
    except Unreadable:
        interrupted = True
    found = manifests.scan(target.root)
    if (
        target.kind == "installed"
    ):  # other distributions may put files into the package; that is not our business
        known = manifest.keys() | series.ids().keys() | (recorded.files.keys() if recorded else set())
        found = {path: blob for path, blob in found.items() if path in known}
    expected = series.expected(manifest)
    was = _recorded(manifest, recorded)
    base = manifests.differing(found, manifest)
    current = not manifests.differing(found, expected)
    stale = recorded is not None and not manifests.differing(found, was)
    if interrupted:
        condition = Condition.INTERRUPTED
    elif current and (base or not names):
        condition = Condition.PATCHED
    elif stale and base:
        condition, current = Condition.PATCHED, False
    elif not base:
        condition, current = Condition.PRISTINE, False
    else:
        condition, current = Condition.FOREIGN, False
    differing: tuple[tuple[str, str], ...] = ()
    if condition is Condition.FOREIGN:
        candidates = [base, manifests.differing(found, expected), manifests.differing(found, was)]
        differing = tuple(min(candidates, key=lambda pairs: len(list(pairs))))
    patches = _patches(series, condition, current, recorded)
    return Inspection(condition, current, recorded, differing, patches, found, claims, series.pin, manifest)


def _recorded(manifest: Mapping[str, str], recorded: State | None) -> dict[str, str]:
    out = dict(manifest)
    for path, entry in (recorded.files if recorded else {}).items():
        if entry.kind == "source":
            out[path] = entry.after
            if entry.after == ABSENT:
                del out[path]
    return out


def _patches(series: Series, condition: Condition, current: bool, recorded: State | None) -> dict[str, str]:
    names = [p.name for p in series.patches]
    if condition is Condition.PATCHED and current:
        return dict.fromkeys(names, "applied")
    if condition in (Condition.PRISTINE, Condition.ABSENT):
        return dict.fromkeys(names, "pending")
    if condition is not Condition.PATCHED or recorded is None:
        return dict.fromkeys(names, "unknown")
    out = {}
    for patch in series.patches:
        was = recorded.patches.get(patch.name)
        out[patch.name] = "added" if was is None else "applied" if was == patch.digest else "changed"
    out.update({name: "removed" for name in recorded.patches if name not in out})
    return out
