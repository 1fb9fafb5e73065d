"""Starting a port: the patches of one release as commits on another one, conflicts left as a normal git
state.
"""

import hashlib
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from . import commits, git, manifest, source
from . import pin as pins
from .environment import Environment
from .errors import Exit, PatchsetError
from .pin import Pin
from .series import Patch, pre_images
from .ui import say
from .workflow import Project, enter

DONE = "sfa-cp.ported"
TEMPLATE = """\
# What this patch set is pinned to. Values keep to JSON syntax (see overlay/patchset/toml.py).
tag = "{tag}"
version = "{version}"
python = "{python}"

[git]
repository = "{repository}"
commit = "{commit}"

[sdist]
project = "{project}"
filename = "{sdist}"
sha256 = "{sdist_sha256}"

[manifest]
sha256 = "{manifest_sha256}"
"""


def start(
    project: Project, patches: Path, version: str, folder: Path, how: str, patched: Path, venv: Path
) -> dict[str, Any]:
    """Port the patch set to `version` in `folder` (obtained from `how` where absent).

    Makes patches/vX.Y.Z with its pin and manifest, then applies patch by patch with git's three-way merge;
    what upstream has already is left out. Stops at the first conflict with instructions. `patched` is a tree
    of the old release, whose originals make three-way merges possible; without it conflicts show as plain
    rejects. Where a download needs libraries that this Python lacks, it goes on in the environment `venv`.
    """
    git.require("--rebase-onto")
    tag = version if version.startswith("v") else f"v{version}"
    if not re.fullmatch(r"v\d+(\.\d+)+\w*", tag):
        raise PatchsetError(Exit.USAGE, f"{version!r} is not a version", "write it like v0.13.0")
    if tag == project.pin.tag:
        raise PatchsetError(Exit.USAGE, f"the patch set is for {tag} already", "name another version")
    new = replace(
        project.pin,
        folder=patches / tag,
        tag=tag,
        version=tag[1:],
        commit="",
        sdist=f"{project.pin.project}-{tag[1:]}.tar.gz",
        sdist_sha256="",
        manifest_sha256="",
    )
    new = _obtain(project, new, how, folder, Environment(venv))
    new = _pin(new, folder)
    _prepare(project, new, folder, patched)
    done = _done(folder)
    applied: list[str] = []
    upstream: list[str] = []
    for patch in project.series.patches:
        if patch.name in done:
            continue
        git.run(folder, "config", "--add", DONE, patch.name)
        data = (project.pin.folder / patch.name).read_bytes()
        if _already(folder, data):
            say(f"{patch.name}: upstream already has it, left out")
            upstream.append(patch.name)
            continue
        try:
            git.run(folder, "am", "--3way", "--keep-cr", "-q", data=data, extra=commits.IDENTITY)
        except git.GitError:
            return _conflict(patch, folder, new, applied, upstream)
        say(f"{patch.name}: applied")
        applied.append(patch.name)
    say(f"every patch is dealt with; next: python apply.py --vllm {tag} --refresh {folder}")
    return {"ok": True, "applied": applied, "upstream": upstream, "conflict": None}


def _conflict(
    patch: Patch, folder: Path, new: Pin, applied: list[str], upstream: list[str]
) -> dict[str, Any]:
    files = git.text(folder, "diff", "--name-only", "--diff-filter=U").splitlines() or [
        f.path for f in patch.files
    ]
    say(f"{patch.name}: conflict in {', '.join(files)}")
    say(
        f"  1. in {folder}: edit the files, git add them, git am --continue (or git am --skip to drop the patch)"
    )
    say(f"  2. python apply.py --rebase-onto {new.tag} {folder}   (goes on with the next patch)")
    say(f"  3. python apply.py --vllm {new.tag} --refresh {folder}   (writes the new series)")
    return {
        "ok": False,
        "exit": int(Exit.PATCH),
        "applied": applied,
        "upstream": upstream,
        "conflict": {"patch": patch.name, "files": files},
    }


def _obtain(project: Project, new: Pin, how: str, folder: Path, env: Environment) -> Pin:
    if folder.is_dir() and any(folder.iterdir()):
        if (folder / ".git" / "rebase-apply").exists():
            raise PatchsetError(
                Exit.TARGET,
                f"{folder} is in the middle of a conflict",
                "finish it with git am --continue or --skip",
            )
        return new
    if source.needs_libraries(how):
        enter(project, env)
    way = how if how != "auto" else "sdist"
    if way == "sdist":
        new = replace(new, sdist_sha256=source.index_digest(new))
    elif (file := Path(way).expanduser()).is_file():
        new = replace(new, sdist_sha256=source.sha256(file))
    source.obtain(new, None, way, folder)
    return new


def _pin(new: Pin, folder: Path) -> Pin:
    """Write patches/vX.Y.Z with pin, manifest and an empty series, unless it is there already."""
    path = new.folder / "upstream.toml"
    if path.is_file():
        return pins.load(new.folder.parent, new.tag)
    claims = manifest.guess_version(folder) or ""
    if claims.partition("+")[0] not in ("", new.version):
        raise PatchsetError(
            Exit.UPSTREAM, f"{folder} is vLLM {claims}, not {new.version}", "name another folder"
        )
    new = _with_digest(new)
    text = manifest.dump(manifest.scan(folder))
    new = replace(new, commit=_commit_of(folder), manifest_sha256=hashlib.sha256(text).hexdigest())
    new.folder.mkdir(parents=True, exist_ok=True)
    (new.folder / manifest.NAME).write_bytes(text)
    (new.folder / "series").write_text(
        "# Order in which the patches apply; one file name per line.\n", encoding="utf-8"
    )
    fields = {name: getattr(new, name) for name in Pin.__dataclass_fields__ if name != "folder"}
    path.write_text(TEMPLATE.format(**fields), encoding="utf-8")
    say(f"{new.folder} is made; check commit and digests in upstream.toml")
    return new


def _with_digest(new: Pin) -> Pin:
    """A folder does not know the sdist's digest; the index may be out of reach, and lint asks for it later."""
    if new.sdist_sha256:
        return new
    try:
        return replace(new, sdist_sha256=source.index_digest(new))
    except PatchsetError as problem:
        say(f"the sha256 of {new.sdist} is left blank: {problem.message}")
        return new


def _prepare(project: Project, new: Pin, folder: Path, patched: Path) -> None:
    """A repository with the base commit, and the old originals as blobs for three-way merges."""
    if not git.is_checkout(folder) or not commits.base_of(folder, new):
        commits.start(folder, new, {})
    try:
        originals = pre_images(project.series, lambda path: (patched / path).read_bytes())
    except (OSError, ValueError, LookupError):
        originals = {}
    for data in originals.values():
        if data is not None:
            git.run(folder, "hash-object", "-w", "--no-filters", "--stdin", data=data)


def _done(folder: Path) -> list[str]:
    """Patches that this port has dealt with, conflicts and left-out ones included."""
    try:
        return git.text(folder, "config", "--get-all", DONE).splitlines()
    except git.GitError:
        return []


def _already(folder: Path, data: bytes) -> bool:
    try:
        git.run(folder, "apply", "--reverse", "--check", "-", data=data)
    except git.GitError:
        return False
    return True


def _commit_of(folder: Path) -> str:
    if git.is_checkout(folder):
        return git.text(folder, "rev-parse", "HEAD")
    try:
        text = (folder / "vllm" / "_version.py").read_text(encoding="utf-8")
    except OSError:
        return ""
    match = re.search(r"commit_id = 'g([0-9a-f]+)'", text)
    return match[1] if match else ""
