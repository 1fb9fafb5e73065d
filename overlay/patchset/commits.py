"""Patches as commits, for people: one commit per patch on a branch, and patch files made again from commits.

Git is never the state of a tree: `apply` and `revert` work on contents. This module serves reviewers and
authors.
"""

import email.utils
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from . import diff, git
from .errors import Exit, PatchsetError
from .pin import Pin, supported
from .series import NAME, Patch, Series, examine, read_patch

BASE_REF = "refs/sfa-cp/base"
IDENTITY = {
    "GIT_AUTHOR_NAME": "SFA-CP overlay",
    "GIT_AUTHOR_EMAIL": "sfa-cp@users.noreply.github.com",
    "GIT_COMMITTER_NAME": "SFA-CP overlay",
    "GIT_COMMITTER_EMAIL": "sfa-cp@users.noreply.github.com",
    "GIT_AUTHOR_DATE": "Mon, 1 Dec 2025 00:00:00 +0000",
    "GIT_COMMITTER_DATE": "Mon, 1 Dec 2025 00:00:00 +0000",
}
FORMAT = (
    *("--no-numbered", "--full-index", "--zero-commit", "--no-signature", "--no-stat", "--no-renames"),
    *(
        "--no-ext-diff",
        "--no-textconv",
        "--no-binary",
        "--no-notes",
        "--no-thread",
        "--no-attach",
        "--no-from",
    ),
    *("--no-cover-letter", "--no-to", "--no-cc", "--no-add-header", "--no-encode-email-headers"),
    *("--diff-algorithm=myers", "--src-prefix=a/", "--dst-prefix=b/", "--unified=3"),
)
NOT_UPSTREAM = tuple(
    f":(exclude,glob){pattern}"
    for pattern in (
        "*.egg-info/**",
        "build/**",
        "vllm/_version.py",
        "**/*.so",
        "**/__pycache__/**",
        ".sfa-cp-overlay/**",
    )
)


def branch(pin: Pin) -> str:
    """The branch that carries the patches as commits."""
    return f"sfa-cp/{pin.tag}"


def record(tree: Path, series: Series, upstream: Mapping[str, bytes | None]) -> str:
    """Write one commit per patch onto the branch and return its name.

    `upstream` holds the unpatched bytes of every touched file. A tree without a repository gets one, with the
    unpatched tree as its first commit. The user's index and HEAD stay, except where HEAD sits detached on the
    base (a fresh clone of the tag) or the repository is new: then HEAD moves to the branch, so that the tree
    reads clean.
    """
    git.require("--commit")
    ref = f"refs/heads/{branch(series.pin)}"
    fresh = not git.is_checkout(tree)
    base = start(tree, series.pin, upstream)
    with tempfile.TemporaryDirectory(prefix="sfa-cp-") as scratch:
        index = {"GIT_INDEX_FILE": os.path.join(scratch, "index"), **IDENTITY}
        git.run(tree, "read-tree", base, extra=index)
        head, now = base, dict(upstream)
        for patch in series.patches:
            for change in patch.files:
                now[change.path] = diff.apply(now[change.path], change)
                _put(tree, change.path, now[change.path], index)
            head = _commit(tree, head, f"{patch.subject}\n\n{patch.body}\n", {**index, **_author(patch)})
    attached = _symbolic(tree)
    at_base = not attached and _resolve(tree, "HEAD") == base
    git.run(tree, "update-ref", ref, head)
    if fresh or at_base or attached == ref:
        git.run(tree, "symbolic-ref", "HEAD", ref)
        git.run(tree, "read-tree", ref)
    return branch(series.pin)


def start(tree: Path, pin: Pin, upstream: Mapping[str, bytes | None]) -> str:
    """The base commit in `tree`; where there is none it is made, in a new repository if need be.

    `upstream` holds the unpatched bytes of files that are patched in the working tree.
    """
    fresh = not git.is_checkout(tree)
    if fresh:
        git.run(None, "init", "-q", "-b", branch(pin), os.fspath(tree))
        with (tree / ".git" / "info" / "exclude").open("a", encoding="utf-8") as file:
            file.write("/.sfa-cp-overlay/\n/build/\n*.egg-info/\n/vllm/_version.py\n__pycache__/\n")
    if found := base_of(tree, pin):
        return found
    with tempfile.TemporaryDirectory(prefix="sfa-cp-") as scratch:
        index = {"GIT_INDEX_FILE": os.path.join(scratch, "index"), **IDENTITY}
        base = _make_base(tree, pin, upstream, index)
    if fresh:
        git.run(tree, "update-ref", f"refs/heads/{branch(pin)}", base)
        git.run(tree, "read-tree", base)
    return base


def base_of(tree: Path, pin: Pin) -> str | None:
    """The commit in `tree` that holds the unpatched upstream, or None."""
    pinned = _resolve(tree, f"{pin.commit}^{{commit}}") if pin.commit else None
    return pinned or _resolve(tree, BASE_REF)


def refresh(tree: Path, pin: Pin, manifest: Mapping[str, str]) -> list[str]:
    """Make the patch files of `pin` again from the commits in `tree`; returns the names whose bytes changed.

    The commits are those between the base and HEAD (or the branch, where HEAD is the base). An unchanged
    commit gives unchanged bytes. Names are kept by subject, those of other patch sets included, so that a port
    reads as one; new ones come from the subject. Nothing is written on a problem.
    """
    git.require("--refresh")
    if not git.is_checkout(tree) or not (base := base_of(tree, pin)):
        raise PatchsetError(
            Exit.TARGET,
            f"{tree} has no commits on top of vLLM {pin.tag}",
            f"make such a tree: python apply.py --vllm {pin.tag} --no-install --commit --dest {tree}",
        )
    head = _resolve(tree, "HEAD")
    if head == base:
        head = _resolve(tree, f"refs/heads/{branch(pin)}") or base
    dirty = git.text(tree, "status", "--porcelain", "--untracked-files=normal", "--", "vllm")
    if dirty and head == _resolve(tree, "HEAD"):
        first = dirty.splitlines()[0][3:]
        raise PatchsetError(
            Exit.TARGET,
            f"{tree} has uncommitted changes ({first})",
            "commit or stash them, then refresh again",
        )
    if _resolve(tree, f"{base}^{{commit}}") not in (git.text(tree, "merge-base", base, head or base), None):
        raise PatchsetError(
            Exit.TARGET, f"HEAD of {tree} is not on top of vLLM {pin.tag}", "check out the branch"
        )
    if git.text(tree, "rev-list", "--merges", f"{base}..{head}"):
        raise PatchsetError(
            Exit.TARGET, f"{tree} has merge commits on top of {pin.tag}", "rebase to a linear history"
        )
    slugs = _slugs(pin)
    files: dict[str, bytes] = {}
    for number, commit in enumerate(git.text(tree, "rev-list", "--reverse", f"{base}..{head}").split(), 1):
        data = git.run(tree, "format-patch", "-1", "--stdout", *FORMAT, commit)
        subject = git.text(tree, "log", "-1", "--format=%s", commit)
        files[f"{number:04d}-{slugs.get(subject) or _slug(subject)}.patch"] = data.rstrip(b"\n") + b"\n"
    _check(pin, files, manifest)
    return _write(pin, files)


def _check(pin: Pin, files: Mapping[str, bytes], manifest: Mapping[str, str]) -> None:
    with tempfile.TemporaryDirectory(prefix="sfa-cp-") as scratch:
        folder = Path(scratch)
        for name, data in files.items():
            (folder / name).write_bytes(data)
        (folder / "series").write_text("".join(f"{name}\n" for name in files), encoding="utf-8")
        _, problems = examine(replace(pin, folder=folder), manifest)
    if problems:
        raise PatchsetError(
            Exit.PATCH,
            f"the commits do not make a sound patch set: {problems[0]}",
            "amend the commits (git rebase -i), then refresh again",
            tuple(problems),
        )


def _write(pin: Pin, files: Mapping[str, bytes]) -> list[str]:
    series = pin.folder / "series"
    listed = series.read_text(encoding="utf-8") if series.is_file() else ""
    comments = [line for line in listed.splitlines() if line.startswith("#")]
    changed = []
    for name, data in files.items():
        path = pin.folder / name
        if not path.is_file() or path.read_bytes() != data:
            path.write_bytes(data)
            changed.append(name)
    for path in sorted(pin.folder.glob("*.patch")):
        if path.name not in files:
            path.unlink()
            changed.append(path.name)
    text = "".join(f"{line}\n" for line in [*comments, *files])
    if text != listed:
        series.write_text(text, encoding="utf-8")
        changed.append("series")
    return changed


def _make_base(tree: Path, pin: Pin, upstream: Mapping[str, bytes | None], env: dict[str, str]) -> str:
    git.run(tree, "add", "--all", "--force", "--", ".", *NOT_UPSTREAM, extra=env)
    for path, data in upstream.items():
        _put(tree, path, data, env)
    base = _commit(tree, None, f"vLLM {pin.tag}\n", env)
    git.run(tree, "update-ref", BASE_REF, base)
    return base


def _put(tree: Path, path: str, data: bytes | None, env: dict[str, str]) -> None:
    if data is None:
        git.run(tree, "update-index", "--force-remove", "--", path, extra=env)
        return
    listed = git.text(tree, "ls-files", "--stage", "--", path, extra=env)
    mode = listed.split()[0] if listed else "100644"
    blob = (
        git.run(tree, "hash-object", "-w", "--no-filters", "--stdin", data=data, extra=env).decode().strip()
    )
    git.run(tree, "update-index", "--add", "--cacheinfo", f"{mode},{blob},{path}", extra=env)


def _commit(tree: Path, parent: str | None, message: str, env: dict[str, str]) -> str:
    made = git.text(tree, "write-tree", extra=env)
    parents = ["-p", parent] if parent else []
    return git.run(tree, "commit-tree", made, *parents, data=message.encode(), extra=env).decode().strip()


def _author(patch: Patch) -> dict[str, str]:
    name, address = email.utils.parseaddr(patch.author)
    return {
        "GIT_AUTHOR_NAME": name,
        "GIT_AUTHOR_EMAIL": address,
        "GIT_AUTHOR_DATE": patch.date,
        "GIT_COMMITTER_DATE": patch.date,
    }


def _resolve(tree: Path, name: str) -> str | None:
    try:
        return git.text(tree, "rev-parse", "--verify", "--quiet", name) or None
    except git.GitError:
        return None


def _symbolic(tree: Path) -> str | None:
    try:
        return git.text(tree, "symbolic-ref", "--quiet", "HEAD")
    except git.GitError:
        return None


def _slugs(pin: Pin) -> dict[str, str]:
    """Subject -> name without number and suffix, of every patch here; newer sets win, and this one over all."""
    patches = pin.folder.parent
    folders = [*(patches / tag for tag in supported(patches) if tag != pin.folder.name), pin.folder]
    paths = [p for folder in folders for p in sorted(folder.glob("*.patch")) if NAME.match(p.name)]
    return {read_patch(p.name, p.read_bytes())[0].subject: p.name[5:-6] for p in paths}


def _slug(subject: str) -> str:
    """At most 52 characters, cut where a word ends."""
    words = re.sub(r"[^a-z0-9]+", "-", subject.lower().replace("'", "")).strip("-")
    return words if len(words) <= 52 else words[:53].rpartition("-")[0] or words[:52]
