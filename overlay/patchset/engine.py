"""Apply and revert: inspect, lock, recover, plan, and run one transaction."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from . import journal, lock
from . import manifest as manifests
from .errors import Exit, PatchsetError
from .pin import supported
from .series import Series
from .stage import Plan, plan
from .status import Condition, Inspection, inspect
from .store import Store
from .target import Target

RELEASE = "0.1.0"


@dataclass(frozen=True)
class Outcome:
    """What a run did. `action` is nothing | applied | reapplied | reverted | recorded | would-apply | would-
    revert.

    `recovered` says how an earlier, interrupted run was ended; `files` are the source files that changed.
    """

    action: str
    recovered: str | None = None
    files: tuple[str, ...] = ()
    upstream: Mapping[str, bytes | None] = field(default_factory=dict)


def apply(target: Target, series: Series, manifest: Mapping[str, str], dry_run: bool = False) -> Outcome:
    """Make `target` hold exactly this patch set. All or nothing; nothing is written where nothing is to be
    done.
    """
    found = inspect(target, series, manifest)
    done = found.condition is Condition.PATCHED and found.current and found.recorded is not None
    if done and not Store(target.state_dir).untidy:
        return Outcome("nothing")
    if dry_run:
        if found.condition is Condition.INTERRUPTED:
            return Outcome("would-apply", "an interrupted run would be ended first")
        _touchable(target, found)
        return Outcome("would-apply", None, tuple(plan(target, series, manifest, found, RELEASE).changed))
    with lock.hold(Store(target.state_dir).lock, str(target.root)):
        recovered = journal.recover(target, manifest)
        found = inspect(target, series, manifest)
        if found.condition is Condition.PATCHED and found.current and found.recorded is not None:
            return Outcome("nothing", recovered)
        _touchable(target, found)
        change = plan(target, series, manifest, found, RELEASE)
        again = found.condition is Condition.PATCHED
        journal.run(target, "apply", change.entries, change.contents, change.final)
        _proved(target, series, manifest, Condition.PATCHED)
    action = "applied" if not again else "reapplied" if change.changed else "recorded"
    return Outcome(action, recovered, tuple(change.changed), change.upstream)


def revert(target: Target, series: Series, manifest: Mapping[str, str], dry_run: bool = False) -> Outcome:
    """Bring every file of `target` back to upstream; what is left of us goes with it."""
    found = inspect(target, series, manifest)
    if found.condition is Condition.ABSENT:
        return Outcome("nothing")
    if found.condition is Condition.PRISTINE and not target.state_dir.exists():
        return Outcome("nothing")
    if dry_run:
        if found.condition is Condition.INTERRUPTED:
            return Outcome("would-revert", "an interrupted run would be ended first")
        _touchable(target, found)
        return Outcome("would-revert", None, tuple(_back(target, series, manifest, found).changed))
    with lock.hold(Store(target.state_dir).lock, str(target.root)):
        recovered = journal.recover(target, manifest)
        found = inspect(target, series, manifest)
        _touchable(target, found)
        if found.condition is Condition.PRISTINE and found.recorded is None:
            return Outcome("nothing", recovered)
        change = _back(target, series, manifest, found)
        journal.run(target, "revert", change.entries, change.contents, None)
        _proved(target, series, manifest, Condition.PRISTINE)
    return Outcome("reverted", recovered, tuple(change.changed))


def upstream_of(target: Target, series: Series, manifest: Mapping[str, str]) -> dict[str, bytes | None]:
    """The unpatched bytes of every touched file of a patched target."""
    found = inspect(target, series, manifest)
    return plan(target, series, manifest, found, RELEASE).upstream


def _back(target: Target, series: Series, manifest: Mapping[str, str], found: Inspection) -> Plan:
    return plan(target, series, manifest, found, RELEASE, revert=True)


def _touchable(target: Target, found: Inspection) -> None:
    if found.condition is Condition.ABSENT:
        raise PatchsetError(Exit.TARGET, f"{target.root} does not exist", "name a vLLM tree with --dest")
    if found.condition is not Condition.FOREIGN:
        return
    raise foreign(target, found)


def foreign(target: Target, found: Inspection) -> PatchsetError:
    """The error for a tree that is neither upstream nor ours; says what it is as exactly as contents tell."""
    root, pin = target.root, found.pin
    known = ", ".join(supported(pin.folder.parent))
    if not any(found.files):
        return PatchsetError(Exit.TARGET, f"{root} is not a vLLM tree", "name another folder with --dest")
    public = (found.claims or "").partition("+")[0]
    if public and public != pin.version:
        return PatchsetError(
            Exit.TARGET,
            f"{root} is vLLM {found.claims}, and this patch set is for {pin.version}",
            f"use vLLM {pin.version}, or --vllm with another version (supported: {known})",
            problems(found),
        )
    again = (
        "reinstall vLLM"
        if target.kind == "installed"
        else "restore them, name another --dest, or set the tree aside with --force"
    )
    if all(manifests.crlf_only(root, path, found.upstream.get(path, "")) for path, _ in found.differing):
        return PatchsetError(
            Exit.TARGET,
            f"{root} has CRLF line ends in {len(found.differing)} files ({found.first_differing})",
            again
            if target.kind == "installed"
            else "check the tree out again with: git -c core.autocrlf=false",
            problems(found),
        )
    edited = "the patched vLLM" if found.recorded else "vLLM"
    return PatchsetError(
        Exit.TARGET,
        f"{root} differs from {edited} {pin.tag} in {len(found.differing)} file(s): {found.first_differing}",
        again,
        problems(found),
    )


def problems(found: Inspection) -> tuple[str, ...]:
    """Every differing file as a line."""
    return tuple(f"{path}: {how}" for path, how in found.differing[:200])


def _proved(target: Target, series: Series, manifest: Mapping[str, str], wanted: Condition) -> None:
    found = inspect(target, series, manifest)
    if found.condition is not wanted:
        raise PatchsetError(
            Exit.TARGET,
            f"{target.root} is {found.condition.value} after the run: {found.first_differing}",
            "something else writes to this tree; stop it and run this again",
        )
