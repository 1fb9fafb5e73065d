"""What changed upstream under the overlay's feet: every patch and every symbol it depends on, per version.

The pinned version is the measure. Symbols whose code matters (monkey-patch targets, overridden members, base
classes, declared ones) are compared whole; of the others the interface is compared: that they exist, their
signature or annotation, and whether our calls still fit it.
"""

import ast
import difflib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from . import relied
from .errors import Exit, PatchsetError
from .fingerprint import digest, signature
from .fit import Fit, classify
from .modules import FUNCTIONS, Code, Found
from .relied import Need
from .series import Series, post_images
from .snapshot import Unavailable, layers

SAME, MOVED, SIGNATURE, BODY, GONE, UNREADABLE = (
    "same",
    "moved",
    "signature changed",
    "body changed",
    "gone",
    "unreadable",
)
FINE = (str(Fit.CLEAN), SAME)
SHORT = 60  # lines of a diff that are shown
FORMAT = 1


@dataclass(frozen=True)
class Cell:
    """The state of one item in one version; `detail` is one line, `diff` may be many."""

    state: str
    detail: str = ""
    diff: str = ""


@dataclass(frozen=True)
class Item:
    """A row: `id` is stable (`patch:NAME`, `symbol:MODULE:QUALNAME`), `kind` is "patch" or one of relied.WAYS."""

    id: str
    kind: str
    title: str
    uses: tuple[str, ...] = ()
    reason: str = ""


@dataclass
class Report:
    """`cells` maps item id -> version -> cell; `unavailable` says why a version was not examined. `unseen` lists
    expressions of the overlay on upstream objects that the analysis could not follow."""

    pinned: str
    versions: list[str]
    items: list[Item]
    cells: dict[str, dict[str, Cell]] = field(default_factory=dict)
    unavailable: dict[str, str] = field(default_factory=dict)
    unseen: list[str] = field(default_factory=list)
    torch_npu: dict[str, Any] | None = None

    @property
    def examined(self) -> list[str]:
        """The versions that could be read, in order."""
        return [v for v in self.versions if v not in self.unavailable]

    def drift(self) -> dict[str, dict[str, str]]:
        """version -> item id -> state, for everything that is not fine."""
        out: dict[str, dict[str, str]] = {}
        for version in self.examined:
            states = {i.id: self.cells[i.id][version].state for i in self.items}
            out[version] = {name: state for name, state in states.items() if state not in FINE}
        for entry in (self.torch_npu or {}).get("versions", []):
            differing = {
                f"torch-npu:{name}": "breaks"
                if any(d.startswith("breaks") for d in o["differences"])
                else "differs"
                for name, o in entry["operators"].items()
            }
            if not entry["unavailable"]:
                out[f"torch-npu {entry['version']}"] = differing
        return out

    def new(self, accepted: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
        """The part of `drift` that a baseline does not have."""
        out = {}
        for version, states in self.drift().items():
            known = accepted.get(version, {})
            fresh = {name: state for name, state in states.items() if known.get(name) != state}
            if fresh:
                out[version] = fresh
        return out

    def as_json(self, accepted: Mapping[str, Mapping[str, str]]) -> str:
        """One object with everything in it."""
        data = {"format": FORMAT, **asdict(self), "new": self.new(accepted)}
        return json.dumps(data, indent=1, sort_keys=False)


def examine(
    series: Series,
    overlay: Mapping[str, bytes],
    versions: Iterable[str],
    load: Callable[[str], Mapping[str, bytes]],
    package: str = "vllm_sfa_cp",
) -> Report:
    """Compare `versions` with the pinned one. `load(version)` gives its files or raises snapshot.Unavailable.

    Raises PatchsetError where the measure itself is wrong: the pinned files cannot be had, a declared or
    patched symbol is not in them, or a fingerprint is not theirs.
    """
    pin = series.pin
    try:
        pinned = load(pin.version)
    except Unavailable as problem:
        raise PatchsetError(
            Exit.UPSTREAM, f"the pinned vLLM {pin.version} cannot be read: {problem}", "use another --source"
        ) from problem
    patched = {p: after for p, (_, after) in post_images(series, pinned.get).items() if after is not None}
    base = Code(pinned)
    needs, unseen = relied.collect(overlay, layers(patched, pinned), package)
    needs = [need for need in needs if _in_base(need, base)]
    items = [
        Item(f"patch:{p.name}", "patch", p.name.removesuffix(".patch"), reason=p.status)
        for p in series.patches
    ]
    items += [Item(f"symbol:{n.target}", n.kind, n.target, tuple(sorted(n.uses)), n.reason) for n in needs]
    report = Report(pin.version, list(versions), items, {i.id: {} for i in items}, unseen=unseen)
    for version in report.versions:
        try:
            code = Code(load(version), like=base)
        except Unavailable as problem:
            report.unavailable[version] = str(problem)
            continue
        fits, _ = classify(series, pinned, code, version)
        for name, result in fits.items():
            report.cells[f"patch:{name}"][version] = Cell(
                str(result.fit), result.detail, shorten(result.shown)
            )
        for need in needs:
            report.cells[f"symbol:{need.target}"][version] = compare(need, base, code)
    return report


def compare(need: Need, base: Code, code: Code) -> Cell:
    """The state of one symbol in `code`, measured by `base`, which has it."""
    module, _, qualname = need.target.partition(":")
    strict = need.kind == "monkey patch"
    old = base.own(module, qualname) if strict else base.resolve(module, qualname)
    assert old is not None, need.target
    new = code.own(module, qualname) if strict else code.resolve(module, qualname)
    where = ""
    if new is None:
        path = code.path_of(module)
        if path is not None and code.tree(path) is None:
            return Cell(UNREADABLE, f"{path} cannot be parsed by this Python")
        new, where = _elsewhere(need, old, code)
    if new is None:
        return Cell(GONE, f"was {old.path}:{_line(old)}")
    state, detail = _difference(need, old, new, base, code)
    diff = shorten(_diff(old, new, base, code)) if state != SAME else ""
    if where:
        return Cell(MOVED, f"{where}{f'; {state}: {detail}' if state != SAME else ''}", diff)
    return Cell(state, detail, diff)


def load_baseline(path: Path) -> dict[str, dict[str, str]]:
    """The accepted drift, version -> item -> state; empty where there is no file. Raises PatchsetError."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != FORMAT:
            raise ValueError(f"format {data['format']}")
        return {v: dict(states) for v, states in data["accepted"].items()}
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        raise PatchsetError(
            Exit.USAGE,
            f"{path} is no drift baseline: {problem}",
            "restore it, or make it again with --accept",
        ) from problem


def save_baseline(path: Path, report: Report, accepted: Mapping[str, Mapping[str, str]]) -> None:
    """Accept what the report found; versions that it did not examine stay as they were."""
    merged = {**accepted, **report.drift()}
    data = {
        "format": FORMAT,
        "pinned": report.pinned,
        "accepted": {v: merged[v] for v in sorted(merged, key=_order)},
    }
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def shorten(diff: str, lines: int = SHORT) -> str:
    """The first lines of a diff and how many more there are."""
    rows = diff.splitlines()
    if len(rows) <= lines:
        return "\n".join(rows)
    return "\n".join([*rows[:lines], f"... {len(rows) - lines} more lines"])


def _in_base(need: Need, base: Code) -> bool:
    """Whether the unpatched pinned version has the symbol; what only our patches add is theirs to answer for."""
    module, _, qualname = need.target.partition(":")
    found = base.own(module, qualname) if need.kind == "monkey patch" else base.resolve(module, qualname)
    if need.kind in ("monkey patch", "declared") and found is None:
        raise PatchsetError(
            Exit.PATCH,
            f"{need.kind} {need.target}: the pinned vLLM has no such symbol",
            f"correct it in {min(need.uses)}",
        )
    if found and need.fingerprint and digest(found.node) != need.fingerprint:
        raise PatchsetError(
            Exit.PATCH,
            f"monkey patch {need.target}: the pinned code has fingerprint {digest(found.node)}, "
            f"not {need.fingerprint}",
            f"read the code again, then correct it in {min(need.uses)}",
        )
    return found is not None


def _elsewhere(need: Need, old: Found, code: Code) -> tuple[Found | None, str]:
    """Where a symbol went and how to say it. A member follows its class; only the class is said to have moved."""
    if isinstance(old.node, ast.Module):
        return None, ""
    owner, _, name = old.qualname.rpartition(".")
    if owner:
        home = code.resolve(old.module, owner) or code.resolve(need.target.partition(":")[0], owner)
        home = home or code.elsewhere(owner)
        found = code.member(home, name) if home else None
        if found is not None and need.kind != "monkey patch":
            return found, ""
    else:
        found = code.resolve(old.module, old.qualname) or code.elsewhere(old.qualname)
    return found, f"to {found.module}:{found.qualname}" if found else ""


def _difference(need: Need, old: Found, new: Found, base: Code, code: Code) -> tuple[str, str]:
    was, now = _interface(need, old, base), _interface(need, new, code)
    breaks = sorted(
        {why for call in need.calls if (why := relied.mismatch(call, new, code))}
        if not any(relied.mismatch(call, old, base) for call in need.calls)
        else ()
    )
    if was != now or breaks:
        fits = (
            f"; our call breaks: {'; '.join(breaks)}"
            if breaks
            else "; our calls still fit"
            if need.calls
            else ""
        )
        return SIGNATURE, f"{_clip(was)} -> {_clip(now)}{fits}"
    if need.deep and digest(old.node) != digest(new.node):
        return BODY, f"now {new.path}:{_line(new)}"
    if not need.deep and _default(old) != _default(new):
        return BODY, f"default {_clip(_default(old))} -> {_clip(_default(new))}"
    return SAME, ""


def _interface(need: Need, found: Found, code: Code) -> str:
    node = found.node
    if isinstance(node, ast.ClassDef):
        parts = [signature(node)] if need.deep else []
        if need.calls:
            init = code.member(found, "__init__")
            of_init = signature(init.node) if init and isinstance(init.node, FUNCTIONS) else ""
            parts.append(of_init or f"fields {', '.join(relied.fields(found, code))}")
        return " ".join(parts)
    if isinstance(node, FUNCTIONS):
        kinds = [ast.unparse(d) for d in node.decorator_list]
        marks = "".join(f"@{k} " for k in kinds if k in ("staticmethod", "classmethod", "property"))
        return marks + signature(node)
    if isinstance(node, ast.AnnAssign):
        return ast.unparse(node.annotation)
    return ""


def _default(found: Found) -> str:
    """The value of a class-level or module-level assignment; values given in methods are not an interface."""
    node = found.node
    if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        return ast.unparse(node.value) if isinstance(target, ast.Name) else ""
    return ""


def _diff(old: Found, new: Found, base: Code, code: Code) -> str:
    names = (f"{old.path}:{_line(old)} (pinned)", f"{new.path}:{_line(new)}")
    return "\n".join(difflib.unified_diff(base.source(old), code.source(new), *names, lineterm="", n=2))


def _line(found: Found) -> int:
    return getattr(found.node, "lineno", 1)


def _clip(text: str, size: int = 160) -> str:
    return (text if len(text) <= size else f"{text[: size - 3]}...") or "nothing"


def _order(label: str) -> tuple[str, tuple[int, ...]]:
    name, _, version = label.rpartition(" ")
    return name, tuple(int(part) for part in version.split(".") if part.isdigit())
