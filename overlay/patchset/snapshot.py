"""The files of one upstream version, for reading only: no tree is unpacked.

A snapshot is a mapping from path to bytes of everything below `vllm/`. Sdists and tags are read once and kept
as one zip file each in the cache, so that a second run needs neither network nor unpacking.
"""

import io
import os
import tarfile
import tempfile
import zipfile
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from . import git, index
from .source import MAX_MEMBERS, MAX_UNPACKED, cache_dir
from .ui import say

TOP = "vllm/"
LARGEST = 1 << 20  # bytes; larger files are data that no patch and no symbol lives in


class Unavailable(Exception):
    """A version cannot be read from the source asked for; `args[0]` says why. Not a failure of the run."""


class ZipFiles(Mapping[str, bytes]):
    """The members of a zip file."""

    def __init__(self, path: Path) -> None:
        self._zip = zipfile.ZipFile(path)
        self._names = dict.fromkeys(self._zip.namelist())

    def __getitem__(self, path: str) -> bytes:
        if path not in self._names:
            raise KeyError(path)
        return self._zip.read(path)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class FolderFiles(Mapping[str, bytes]):
    """The regular files of `root` below `top`."""

    def __init__(self, root: Path, top: str = TOP) -> None:
        self._root = root
        self._names = {
            path.relative_to(root).as_posix(): None
            for path in sorted((root / top).rglob("*"))
            if path.is_file() and not path.is_symlink() and "__pycache__" not in path.parts
        }

    def __getitem__(self, path: str) -> bytes:
        if path not in self._names:
            raise KeyError(path)
        return (self._root / path).read_bytes()

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def layers(*files: Mapping[str, bytes]) -> Mapping[str, bytes]:
    """Several mappings as one; the first that has a path wins."""
    return ChainMap(*files)  # type: ignore[arg-type]  # reading works on any mapping


def load(version: str, source: str, project: str, repository: str) -> Mapping[str, bytes]:
    """The files of `version`. `source`: sdist, git, or a folder (see `_from_folder`). Raises Unavailable."""
    if source not in ("sdist", "git"):
        return _from_folder(Path(source).expanduser(), version, project)
    kept = cache_dir() / "drift" / f"{project}-{version}-{source}.zip"
    if not zipfile.is_zipfile(kept):
        kept.parent.mkdir(parents=True, exist_ok=True)
        say(f"reading {project} {version} ({source}) ...")
        fetch = _sdist if source == "sdist" else _tag
        fetch(version, project, repository, lambda archive: _keep(archive, kept))
    return ZipFiles(kept)


def versions(project: str) -> dict[str, bool]:
    """Every released version on the index, oldest first, and whether it has an sdist. Raises Unavailable."""
    from packaging.version import InvalidVersion, Version

    found: dict[Version, bool] = {}
    for package in _packages(project):
        try:
            version = Version(package.version or "")
        except InvalidVersion:
            continue
        if not (version.is_prerelease or package.is_yanked):
            found[version] = found.get(version, False) or package.package_type == "sdist"
    return {str(version): found[version] for version in sorted(found)}


def _packages(project: str) -> list:
    try:
        import pypi_simple
        import requests
    except ImportError as problem:
        raise Unavailable(f"downloading needs {problem.name} (pip install pypi-simple)") from problem
    try:
        with index.client() as client:
            return client.get_project_page(project, timeout=30).packages
    except (requests.RequestException, pypi_simple.NoSuchProjectError) as problem:
        raise Unavailable(f"the package index cannot be read: {type(problem).__name__}") from problem


def _sdist(version: str, project: str, _: str, keep: Callable[[Path], None]) -> None:
    local = cache_dir() / f"{project}-{version}.tar.gz"
    if local.is_file():
        keep(local)
        return
    packages = _packages(project)
    found = [p for p in packages if p.version == version and p.package_type == "sdist"]
    if not found:
        known = any(p.version == version for p in packages)
        raise Unavailable("no sdist on the index" if known else "no such version on the index")
    import pypi_simple
    import requests

    with tempfile.TemporaryDirectory(prefix="sfa-cp-") as scratch, index.client() as client:
        path = Path(scratch) / found[0].filename
        try:
            client.download_package(found[0], path, verify=True, timeout=60)
        except (requests.RequestException, pypi_simple.DigestMismatchError) as problem:
            raise Unavailable(f"the download failed: {type(problem).__name__}") from problem
        keep(path)


def _tag(version: str, _: str, repository: str, keep: Callable[[Path], None]) -> None:
    git.require("--source git")
    with tempfile.TemporaryDirectory(prefix="sfa-cp-") as scratch:
        clone, archive = Path(scratch) / "clone", Path(scratch) / "tag.tar"
        options = ("--quiet", "--bare", "--depth=1", f"--branch=v{version}")
        try:
            git.run(None, "clone", *options, repository, os.fspath(clone), user_config=True)
        except git.GitError as problem:
            raise Unavailable(f"git cannot clone the tag: {problem}") from problem
        archive.write_bytes(_archive(clone, version))
        keep(archive)


def _archive(repository: Path, version: str) -> bytes:
    try:
        return git.run(repository, "archive", "--format=tar", f"--prefix={version}/", f"v{version}", TOP)
    except git.GitError as problem:
        raise Unavailable(f"{repository} has no tag v{version}: {problem}") from problem


def _from_folder(folder: Path, version: str, project: str) -> Mapping[str, bytes]:
    """`folder` holds PROJECT-VERSION/, PROJECT-VERSION.tar.gz or the tag vVERSION of a checkout."""
    if (folder / f"{project}-{version}" / TOP).is_dir():
        return FolderFiles(folder / f"{project}-{version}")
    archive = folder / f"{project}-{version}.tar.gz"
    if archive.is_file():
        return _members(archive.read_bytes(), archive.name)
    if git.is_checkout(folder):
        return _members(_archive(folder, version), f"tag v{version}")
    raise Unavailable(f"{folder} has no {project}-{version}, no {archive.name} and is no checkout")


def _members(data: bytes, name: str) -> dict[str, bytes]:
    """What is below `vllm/` in a tar file with one top folder."""
    files: dict[str, bytes] = {}
    total = 0
    try:
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            for count, member in enumerate(tar):
                total += member.size
                if total > MAX_UNPACKED or count > MAX_MEMBERS:
                    raise Unavailable(f"{name} unpacks to too much")
                path = member.name.partition("/")[2]
                if member.isreg() and path.startswith(TOP) and member.size <= LARGEST:
                    content = tar.extractfile(member)
                    if content is not None:
                        files[path] = content.read()
    except (tarfile.TarError, EOFError, OSError) as problem:
        raise Unavailable(f"{name} is damaged: {problem}") from problem
    return files


def _keep(archive: Path, kept: Path) -> None:
    files = _members(archive.read_bytes(), archive.name)
    if not files:
        raise Unavailable(f"{archive.name} has no {TOP}")
    part = kept.with_name(f"{kept.name}.{os.getpid()}.part")
    try:
        with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED, compresslevel=3) as out:
            for path, data in files.items():
                out.writestr(path, data)
        os.replace(part, kept)
    finally:
        part.unlink(missing_ok=True)
