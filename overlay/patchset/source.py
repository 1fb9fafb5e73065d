"""Obtaining upstream: a shallow clone of the tag, the sdist from the package index, or something on disk.

Whatever the way, the result is checked against the pin and the manifest, and appears under its final name
only when it is whole.
"""

import hashlib
import importlib.util
import os
import shutil
import tarfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from . import git, index, lock
from . import manifest as manifests
from .errors import Exit, PatchsetError
from .pin import Pin
from .target import STATE
from .ui import progress, say

REACH_SECONDS = 5.0  # after which `auto` takes the sdist
PATIENT_SECONDS = 20.0  # for who asks for git by name
MAX_UNPACKED = 512 << 20
MAX_MEMBERS = 20_000
OFFLINE = "give a checkout or the sdist file with --source PATH, or try again later"


def obtain(pin: Pin, manifest: Mapping[str, str] | None, how: str, dest: Path) -> str:
    """Put verified upstream at `dest` (absent or empty). `how`: auto, git, sdist or a path. Returns the way
    taken.
    """
    if how not in ("auto", "git", "sdist"):
        _check_path(how, dest)
    dest.parent.mkdir(parents=True, exist_ok=True)
    partial = dest.parent / f".{dest.name}.partial"
    with lock.hold(dest.parent / f".{dest.name}.lock", str(dest)):
        if dest.is_dir() and any(dest.iterdir()):
            return "present"
        shutil.rmtree(partial, ignore_errors=True)
        try:
            way = _fetch(pin, how, partial)
            if manifest is not None:
                _verify(pin, manifest, partial, way)
            if dest.is_dir():
                dest.rmdir()
            os.rename(partial, dest)
        except OSError as problem:
            raise PatchsetError(
                Exit.UPSTREAM,
                f"{dest} cannot be written: {problem.strerror or problem}",
                "free space or use another --dest",
            ) from problem
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return way


def needs_libraries(how: str) -> bool:
    """Whether `how` may use the package index, and what that needs is not installed here."""
    return how in ("auto", "sdist") and importlib.util.find_spec("pypi_simple") is None


def cache_dir() -> Path:
    """Where downloads are kept."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "vllm-sfa-cp"


def _check_path(how: str, dest: Path) -> None:
    """Before anything is written: the source is there, and copying it to `dest` does not copy the copy."""
    path = Path(how).expanduser()
    if not (path.is_dir() or path.is_file()):
        raise PatchsetError(Exit.UPSTREAM, f"--source {how}: no such checkout or file", OFFLINE)
    real, into = path.resolve(), dest.resolve().parent
    skipped = real / "build"
    if real in (into, *into.parents) and skipped not in (into, *into.parents):
        raise PatchsetError(
            Exit.USAGE, f"--dest {dest} lies inside --source {how}", f"name one outside, or below {skipped}"
        )


def _fetch(pin: Pin, how: str, into: Path) -> str:
    if how == "auto":
        how = "git" if _git_answers(pin) else "sdist"
    if how == "git":
        _clone(pin, into)
    elif how == "sdist":
        unpack(_download(pin), into)
    else:
        path = Path(how).expanduser()
        if path.is_dir():
            _copy(path, into)
        else:
            _check_digest(pin, path)
            unpack(path, into)
        how = "path"
    return how


def _verify(pin: Pin, manifest: Mapping[str, str], tree: Path, way: str) -> None:
    different = manifests.differing(manifests.scan(tree), manifest)
    if not different:
        return
    names = ", ".join(f"{path} ({how})" for path, how in different[:3])
    raise PatchsetError(
        Exit.UPSTREAM,
        f"what came from {way} is not vLLM {pin.tag}: {len(different)} file(s) differ, first {names}",
        "use --source sdist, or a clean checkout of the tag",
        tuple(f"{path}: {how}" for path, how in different[:200]),
    )


def _git_answers(pin: Pin) -> bool:
    if git.available():
        return False
    try:
        _reach(pin, REACH_SECONDS)
    except git.GitError:
        say("the git repository does not answer, taking the sdist")
        return False
    return True


def _reach(pin: Pin, seconds: float) -> None:
    """GitError where the repository does not answer in time. Left alone, git waits minutes for a connection."""
    git.run(None, "ls-remote", pin.repository, f"refs/tags/{pin.tag}", user_config=True, timeout=seconds)


def _clone(pin: Pin, into: Path) -> None:
    git.require("--source git")
    slow = ("-c", "http.lowSpeedLimit=1000", "-c", "http.lowSpeedTime=20")
    try:
        _reach(pin, PATIENT_SECONDS)
        with progress(f"cloning vLLM {pin.tag}", None):
            git.run(
                None,
                *slow,
                "clone",
                "-q",
                "--depth=1",
                "--branch",
                pin.tag,
                pin.repository,
                os.fspath(into),
                user_config=True,
            )
        head = git.text(into, "rev-parse", "HEAD")
    except git.GitError as problem:
        raise PatchsetError(
            Exit.UPSTREAM, f"git cannot clone {pin.tag}: {problem}", "use --source sdist, or --source PATH"
        ) from problem
    if not head.startswith(pin.commit):  # a port from an sdist knows an abbreviated one
        raise PatchsetError(
            Exit.UPSTREAM,
            f"tag {pin.tag} is commit {head[:12]}, pinned is {pin.commit[:12]}",
            "use --source sdist",
        )


def _download(pin: Pin) -> Path:
    """The cached sdist, downloaded when absent or damaged."""
    _require_digest(pin)
    path = cache_dir() / pin.sdist
    if path.is_file():
        if sha256(path) == pin.sdist_sha256:
            return path
        say(f"the cached {pin.sdist} is damaged, fetching it again")
        path.unlink()
    _require_libraries()
    import pypi_simple
    import requests

    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with index.client() as client:
            page = client.get_project_page(pin.project, timeout=30)
            found = [p for p in page.packages if p.filename == pin.sdist]
            if not found:
                raise PatchsetError(Exit.UPSTREAM, f"the package index has no {pin.sdist}", OFFLINE)
            client.download_package(found[0], part, verify=True, progress=_Bar, timeout=30)
        _check_digest(pin, part)
        os.replace(part, path)
    except (requests.RequestException, pypi_simple.NoSuchProjectError) as problem:
        raise PatchsetError(
            Exit.UPSTREAM, f"{pin.sdist} cannot be downloaded: {_short(problem)}", OFFLINE
        ) from problem
    except (
        pypi_simple.DigestMismatchError,
        pypi_simple.NoDigestsError,
        pypi_simple.UnsupportedContentTypeError,
    ) as problem:
        raise PatchsetError(
            Exit.UPSTREAM,
            f"{pin.sdist} arrived damaged: {_short(problem)}",
            "run this again, or use --source PATH",
        ) from problem
    finally:
        part.unlink(missing_ok=True)
    return path


def index_digest(pin: Pin) -> str:
    """The sha256 that the package index states for the sdist of a release that is not pinned yet."""
    _require_libraries()
    import pypi_simple
    import requests

    try:
        with index.client() as client:
            packages = client.get_project_page(pin.project, timeout=30).packages
    except (
        requests.RequestException,
        pypi_simple.NoSuchProjectError,
        pypi_simple.UnsupportedContentTypeError,
    ) as problem:
        raise PatchsetError(
            Exit.UPSTREAM, f"the package index cannot be read: {_short(problem)}", OFFLINE
        ) from problem
    for package in packages:
        if package.filename == pin.sdist and package.digests.get("sha256"):
            return str(package.digests["sha256"])
    raise PatchsetError(Exit.UPSTREAM, f"the package index has no {pin.sdist}", OFFLINE)


class _Bar:
    """pypi-simple's progress tracker on ours."""

    def __init__(self, size: int | None) -> None:
        self._context = progress("downloading vLLM", size, "bytes")

    def __enter__(self) -> "_Bar":
        self._tick = self._context.__enter__()
        return self

    def __exit__(self, *details: object) -> None:
        self._context.__exit__(None, None, None)

    def update(self, amount: int) -> None:
        """`amount` more bytes arrived."""
        self._tick(amount)


def unpack(archive: Path, into: Path) -> None:
    """Unpack the single top folder of an sdist as `into`. Members that escape, link or bloat are refused."""
    total = 0
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for count, member in enumerate(tar):
                parts = PurePosixPath(member.name).parts
                total += member.size
                if member.name.startswith("/") or ".." in parts or "\\" in member.name or "\0" in member.name:
                    raise _bad(archive, f"member {member.name!r} escapes")
                if not (member.isreg() or member.isdir()):
                    raise _bad(archive, f"member {member.name!r} is neither a file nor a folder")
                if total > MAX_UNPACKED or count > MAX_MEMBERS:
                    raise _bad(
                        archive, f"it unpacks to more than {MAX_UNPACKED >> 20} MiB or {MAX_MEMBERS} files"
                    )
                if len(parts) < 2:
                    continue
                path = into.joinpath(*parts[1:])
                if member.isdir():
                    path.mkdir(parents=True, exist_ok=True)
                    continue
                path.parent.mkdir(parents=True, exist_ok=True)
                content = tar.extractfile(member)
                if content is None:
                    raise _bad(archive, f"member {member.name!r} cannot be read")
                with content, path.open("wb") as file:
                    shutil.copyfileobj(content, file)
                path.chmod(0o755 if member.mode & 0o100 else 0o644)
    except (tarfile.TarError, EOFError, OSError) as problem:
        if isinstance(problem, OSError) and problem.errno:
            raise
        raise _bad(archive, str(problem)) from problem
    if not into.is_dir():
        raise _bad(archive, "it is empty")


def _copy(source: Path, into: Path) -> None:
    """Copy a checkout without its repository, builds and state."""

    def skipped(folder: str, names: list[str]) -> set[str]:
        top = Path(folder) == source
        return {
            name
            for name in names
            if name in ("__pycache__", STATE)
            or (top and (name in (".git", "build", ".venv") or name.endswith(".egg-info")))
            or name.endswith((".so", ".pyc"))
        }

    shutil.copytree(source, into, symlinks=True, ignore=skipped)


def _require_libraries() -> None:
    for name in ("pypi_simple", "requests"):
        if importlib.util.find_spec(name) is None:
            raise PatchsetError(
                Exit.UPSTREAM,
                f"downloading needs {name}",
                "install pypi-simple, or use --source PATH",
            )


def _require_digest(pin: Pin) -> None:
    if not pin.sdist_sha256:
        raise PatchsetError(
            Exit.UPSTREAM,
            f"{pin.folder / 'upstream.toml'} pins no sha256 of {pin.sdist}",
            "write the one that the package index states there, or use --source git or a checkout",
        )


def _check_digest(pin: Pin, path: Path) -> None:
    _require_digest(pin)
    found = sha256(path)
    if found != pin.sdist_sha256:
        raise PatchsetError(
            Exit.UPSTREAM,
            f"{path.name} has sha256 {found[:16]}, pinned is {pin.sdist_sha256[:16]}",
            "get the file again; an sdist never changes once it is published",
        )


def sha256(path: Path) -> str:
    """The digest of a file's bytes, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _bad(archive: Path, why: str) -> PatchsetError:
    return PatchsetError(Exit.UPSTREAM, f"{archive.name} is not a sound sdist: {why}", "get the file again")


def _short(problem: Exception) -> str:
    return str(problem).splitlines()[0][:160] if str(problem) else type(problem).__name__
