"""What each verb of `apply.py` does, step by step. Returns plain dicts for `--json`; talks through `ui`."""

import os
import shutil
import subprocess
import sys
import tempfile
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import commits, docs, engine, lock, source, toml
from . import manifest as manifests
from . import pin as pins
from . import series as sets
from . import target as targets
from .environment import OVERLAY, Environment, digest_of, overlay_version, pip_run, self_check
from .errors import Exit, PatchsetError
from .status import Condition, inspect
from .ui import say

Report = dict[str, Any]
PACKAGE = "vllm_sfa_cp"  # in the overlay


@dataclass(frozen=True)
class Project:
    """This repository with one patch set loaded."""

    home: Path
    pin: pins.Pin
    manifest: dict[str, str]
    series: sets.Series

    @property
    def overlay(self) -> Path:
        """The distribution that gets installed."""
        return self.home / "overlay"

    @property
    def locks(self) -> tuple[Path, Path]:
        """The lock files: what apply.py needs itself, and what vLLM needs."""
        return self.home / "requirements" / "fetch.txt", self.home / "requirements" / "engine.txt"


def load(home: Path, patches: Path, version: str) -> Project:
    """Load a patch set that must be flawless."""
    pin = pins.load(patches, version)
    manifest = manifests.load(pin)
    return Project(home, pin, manifest, sets.load(pin, manifest))


def apply(project: Project, args: Namespace) -> Report:
    """Obtain, verify, patch, install, check."""
    if args.target == "installed":
        return _apply_installed(project, args)
    env = Environment(args.venv)
    target = targets.tree(args.dest)
    found = inspect(target, project.series, project.manifest)
    if found.condition is Condition.FOREIGN:
        if not args.force:
            raise engine.foreign(target, found)
        if not args.dry_run:
            aside = _set_aside(target.root)
            say(f"{target.root} was set aside as {aside}")
            found = inspect(target, project.series, project.manifest)
    absent = found.condition is Condition.ABSENT
    if args.dry_run:
        return _dry(project, target, absent)
    _enter(project, env, args, absent)
    obtained = None
    if absent:
        obtained = source.obtain(project.pin, project.manifest, args.source, target.root)
        say(f"vLLM {project.pin.tag} is in {target.root} ({obtained}), verified")
    outcome = engine.apply(target, project.series, project.manifest)
    _tell(outcome, target, project)
    branch = None
    if args.commit:
        upstream = engine.upstream_of(target, project.series, project.manifest)
        branch = commits.record(target.root, project.series, upstream)
        say(f"one commit per patch on branch {branch}")
    changed = bool(obtained) or outcome.action != "nothing" or bool(outcome.recovered)
    if not args.no_install:
        changed = _install(project, env, target.root) or changed
    if not changed:
        say("nothing to do: already applied")
    report = status(project, args)
    report |= {"action": outcome.action, "changed": changed, "recovered": outcome.recovered, "branch": branch}
    if not args.no_install:
        report["next"] = command = (
            f"VLLM_ASCEND_ENABLE_FLASHCOMM1=1 {_short(env.bin / 'vllm')} serve MODEL "
            "--tensor-parallel-size 2 --additional-config '{\"enable_sfa_cp\": true}'"
        )
        say(f"next: {command}")
    return report


def status(project: Project, args: Namespace) -> Report:
    """What state the target is in; changes nothing."""
    if args.target == "installed":
        python = _python(args)
        target = targets.installed(python)
        env = Environment(python.parent.parent)
    else:
        target, env = targets.tree(args.dest), Environment(args.venv)
    found = inspect(target, project.series, project.manifest)
    version = env.installed().get(OVERLAY)
    return {
        "ok": True,
        "state": found.condition.value,
        "current": found.current,
        "vllm": project.pin.tag,
        "target": {"kind": target.kind, "path": str(target.root), "distribution": target.distribution},
        "patches": [{"name": name, "state": state} for name, state in found.patches.items()],
        "overlay": {"installed": version is not None, "version": version},
        "differing": [{"path": path, "how": how} for path, how in found.differing[:200]],
    }


def tell_status(report: Report) -> None:
    """The status for people."""
    say(f"{report['target']['path']}: {report['state']} (vLLM {report['vllm']}, {report['target']['kind']})")
    for patch in report["patches"]:
        say(f"  {patch['state']:8} {patch['name']}")
    for entry in report["differing"][:5]:
        say(f"  {entry['how']:8} {entry['path']}")
    overlay = report["overlay"]
    say(f"overlay: {overlay['version'] if overlay['installed'] else 'not installed'}")


def revert(project: Project, args: Namespace) -> Report:
    """Every file back to upstream; the overlay uninstalled."""
    if args.target == "installed":
        python = _python(args)
        target, env = targets.installed(python), Environment(python.parent.parent)
        env.log = _log_of(target)
    else:
        target, env = targets.tree(args.dest), Environment(args.venv)
    outcome = engine.revert(target, project.series, project.manifest, args.dry_run)
    _tell(outcome, target, project)
    removed = False
    if not args.dry_run and not args.no_install:
        removed = env.uninstall_overlay()
        say("the overlay is uninstalled" if removed else "the overlay was not installed")
    if outcome.action == "nothing" and not removed:
        say("nothing to do: no patch of ours is in")
    return status(project, args) | {"action": outcome.action, "recovered": outcome.recovered}


def demo(project: Project, args: Namespace) -> bool:
    """Run the overlay's demo; whether it succeeded. Its table goes to stderr under --json."""
    program = Environment(args.venv).bin / OVERLAY
    say(f"demo: {_short(program)} demo")
    done = subprocess.run([os.fspath(program), "demo"], stdout=sys.stderr if args.json else None, check=False)
    return done.returncode == 0


def lint(home: Path, patches: Path, write: bool) -> Report:
    """All problems of all patch sets and of the text generated from them. Raises where there are any."""
    tags, current = pins.supported(patches), pins.current(home / "overlay" / PACKAGE)
    known = ", ".join(tags) or "none"
    problems = [] if current in tags else [f"SUPPORTED_VLLM: {current} has no patch set here ({known})"]
    for tag in tags:
        pin = pins.load(patches, tag)
        series, found = sets.examine(pin, manifests.load(pin))
        problems += [f"{tag}: {line}" for line in [*found, *pins.problems(pin)]]
        problems += _toml_problems(pin)
        if not found and tag == current:
            problems += docs.check(home, series, write)
    if problems:
        count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
        raise PatchsetError(Exit.PATCH, f"lint found {count}: {problems[0]}", "mend them", tuple(problems))
    say(f"{', '.join(tags)}: patches and generated text are sound")
    return {"ok": True, "sets": tags, "problems": []}


def refresh(home: Path, patches: Path, version: str, tree: Path) -> Report:
    """Patch files from commits."""
    pin = pins.load(patches, version)
    changed = commits.refresh(tree, pin, manifests.load(pin))
    say(
        f"changed: {', '.join(changed)}"
        if changed
        else "every patch file is as the commits say; nothing changed"
    )
    return {"ok": True, "changed": changed}


def _apply_installed(project: Project, args: Namespace) -> Report:
    python = _python(args)
    target = targets.installed(python)
    if args.commit or args.force:
        raise PatchsetError(
            Exit.USAGE, "--commit and --force are for trees", "leave them out for an installed vLLM"
        )
    if args.dry_run:
        return _dry(project, target, False)
    outcome = engine.apply(target, project.series, project.manifest)
    _tell(outcome, target, project)
    changed = outcome.action != "nothing" or bool(outcome.recovered)
    if target.kind == "tree":
        say(f"that vLLM is installed editable: its tree {target.root} is what is patched")
    program = python.parent / OVERLAY
    if not args.no_install:
        env = Environment(python.parent.parent)
        if env.installed().get(OVERLAY) != overlay_version(project.overlay):
            _copy_overlay(project, python, _log_of(target))
            changed = True
        if changed:
            self_check(program)
    if not changed:
        say("nothing to do: already applied")
    return status(project, args) | {
        "action": outcome.action,
        "changed": changed,
        "recovered": outcome.recovered,
    }


def _copy_overlay(project: Project, python: Path, log: Path) -> None:
    """Install the overlay, not editable. A build leaves files in its source and takes in what an older one left."""
    with tempfile.TemporaryDirectory(prefix="sfa-cp-") as scratch:
        copy = os.path.join(scratch, "overlay")
        ignored = shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
        shutil.copytree(project.overlay, copy, ignore=ignored)
        pip_run(python, "installing the overlay", ["install", "--no-deps", copy], log)


def _log_of(target: targets.Target) -> Path:
    """Where pip's output goes for an installed target: outside of site-packages."""
    folder = source.cache_dir()
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"install-{target.version or 'vllm'}.log"


def _install(project: Project, env: Environment, tree: Path) -> bool:
    """Fill the environment; whether anything had to be done."""
    digest = digest_of(
        [project.series.digest, project.pin.manifest_sha256, str(tree.resolve())],
        [*project.locks, project.overlay / "pyproject.toml"],
    )
    if (
        env.exists
        and env.checked(digest)
        and not env.lacks(*project.locks)
        and env.vllm_is(project.pin, tree)
        and env.overlay_is(project.overlay)
    ):
        return False
    with lock.hold(env.root.parent / f"{env.root.name}.lock", str(env.root)):
        env.make()
        env.install("installing what vLLM needs", *project.locks)
        if why := env.torch_problem():
            raise PatchsetError(
                Exit.NOT_SO,
                f"{why}; the CPU build is wanted",
                f"point PIP_EXTRA_INDEX_URL at PyTorch's CPU wheels, remove {env.root}, then run this again",
            )
        if not env.vllm_is(project.pin, tree):
            env.install_vllm(project.pin, tree)
        if not env.overlay_is(project.overlay) or not env.checked(digest):
            env.install_overlay(project.overlay)
        report = self_check(env.bin / OVERLAY)
        _list_active(report)
        env.note_check(digest)
    return True


def _list_active(report: Any) -> None:
    for key, title in (("patches", "patch"), ("monkey_patches", "monkey patch")):
        for entry in report.get(key) or ():
            name = entry.get("name") or entry.get("target") or entry
            say(f"  {title} {name}: {entry.get('state', 'active')}")
    say("self-check passed")


def _enter(project: Project, env: Environment, args: Namespace, absent: bool) -> None:
    download = absent and source.needs_libraries(args.source)
    if download or (not args.no_install and (not env.exists or bool(env.lacks(*project.locks)))):
        enter(project, env)


def enter(project: Project, env: Environment) -> None:
    """Go on in our own environment, with the libraries that downloads need, unless this Python is it."""
    if env.active:
        return
    with lock.hold(env.root.parent / f"{env.root.name}.lock", str(env.root)):
        env.make()
        env.install("installing what apply.py needs", project.locks[0])
    os.execve(env.python, [os.fspath(env.python), *sys.argv], {**os.environ, "PYTHONNOUSERSITE": "1"})


def _dry(project: Project, target: targets.Target, absent: bool) -> Report:
    if absent:
        say(
            f"would obtain vLLM {project.pin.tag} into {target.root} and apply {len(project.series.patches)} patches"
        )
        return {"ok": True, "action": "would-apply", "state": "absent", "files": sorted(project.series.ids())}
    outcome = engine.apply(target, project.series, project.manifest, dry_run=True)
    _tell(outcome, target, project)
    state = inspect(target, project.series, project.manifest).condition.value
    return {"ok": True, "action": outcome.action, "state": state, "files": list(outcome.files)}


def _tell(outcome: engine.Outcome, target: targets.Target, project: Project) -> None:
    if outcome.recovered:
        say(f"{target.root}: {outcome.recovered}")
    count = len(project.series.patches)
    text = {
        "applied": f"{count} patches applied to {target.root}",
        "reapplied": f"the patch set had changed: reverted and reapplied {count} patches from the stored originals",
        "recorded": f"{target.root} is patched already; its state was recorded anew",
        "reverted": f"{target.root} is upstream again",
        "would-apply": f"would change {len(outcome.files)} files of {target.root}",
        "would-revert": f"would restore {len(outcome.files)} files of {target.root}",
    }.get(outcome.action)
    if text:
        say(text)
    for path in outcome.files if outcome.action.startswith("would") else ():
        say(f"  {path}")


def _set_aside(root: Path) -> Path:
    number = 1
    while (aside := root.with_name(f"{root.name}.backup-{number}")).exists():
        number += 1
    os.rename(root, aside)
    return aside


def _python(args: Namespace) -> Path:
    return Path(args.python or sys.executable)


def _short(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def _toml_problems(pin: pins.Pin) -> list[str]:
    text = (pin.folder / "upstream.toml").read_text(encoding="utf-8")
    try:
        import tomllib
    except ImportError:
        return []
    if tomllib.loads(text) != toml.loads(text):
        return [f"{pin.tag}: upstream.toml leaves the subset that every Python here can read"]
    return []
