"""Obtaining upstream (case A22): a damaged, wrong, escaping or bloated download never becomes a tree."""

import hashlib
import http.server
import io
import json
import shutil
import socket
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from fake_upstream import HOME, Case, make_pin
from patchset import environment, git, pin, source
from patchset.errors import PatchsetError

NAME = "fake_vllm-9.9.0.tar.gz"


def pack(root: Path, into: Path, extra: Callable[[tarfile.TarFile], None] | None = None) -> str:
    """An sdist of `root`; returns its sha256."""
    with tarfile.open(into, "w:gz") as tar:
        tar.add(root, "fake_vllm-9.9.0")
        if extra:
            extra(tar)
    return hashlib.sha256(into.read_bytes()).hexdigest()


def member(name: str, **fields: object) -> Callable[[tarfile.TarFile], None]:
    def add(tar: tarfile.TarFile) -> None:
        info = tarfile.TarInfo(name)
        for key, value in fields.items():
            setattr(info, key, value)
        tar.addfile(info, io.BytesIO(bytes(info.size)))

    return add


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "vllm-sfa-cp"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package index on this machine; returns the folder it serves. Files go beside their entry in
    index.json.
    """
    folder = tmp_path / "index"
    (folder / "fake-vllm").mkdir(parents=True)

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    yield folder
    server.shutdown()
    server.server_close()


def publish(folder: Path, digest: str) -> None:
    page = f'<!doctype html><a href="/{NAME}#sha256={digest}">{NAME}</a>'
    (folder / "fake-vllm" / "index.html").write_text(page)


def test_path_sources(tree: Case, tmp_path: Path) -> None:
    """A checkout and an sdist file, both verified; the source itself is not touched."""
    archive = tmp_path / NAME
    digest = pack(tree.upstream, archive)
    make_pin(tree.folder, tree.upstream, sdist_sha256=digest)
    for way in (str(tree.upstream), str(archive)):
        shutil.rmtree(tree.root)
        done = tree.cli("--source", way, "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["state"] == "patched"
    assert not list(tree.root.parent.glob(".tree*"))


def test_destination_inside_the_source(tree: Case) -> None:
    """Refused before anything is written, but for the source's build folder, which is not copied."""
    before = tree.snapshot()
    for inside in ("x/y", "build"):
        done = tree.cli("--source", str(tree.root), "--dest", str(tree.root / inside))
        assert done.returncode == 2
        assert "lies inside --source" in done.stderr
    assert tree.snapshot() == before
    done = tree.cli("--source", str(tree.root), "--dest", str(tree.root / "build" / "y"))
    assert done.returncode == 0, done.stderr
    shutil.rmtree(tree.root)
    done = tree.cli("--source", str(tree.root), "--dest", str(tree.root / "x" / "y"))
    assert done.returncode == 3
    assert "no such checkout or file" in done.stderr
    assert not tree.root.exists()


def test_no_digest_pinned(tree: Case, cache: Path, tmp_path: Path) -> None:
    """A port from a folder knows no digest: one error, before the cached file is touched; lint tells too."""
    pinned = make_pin(tree.folder, tree.upstream, sdist_sha256="")
    cache.mkdir(parents=True)
    pack(tree.upstream, cache / NAME)
    for how in ("sdist", str(cache / NAME)):
        with pytest.raises(PatchsetError, match="pins no sha256") as caught:
            source.obtain(pinned, None, how, tmp_path / "out")
        assert caught.value.code == 3
        assert (cache / NAME).is_file()
    done = tree.cli("--lint")
    assert done.returncode == 4
    assert "sha256 '' is not 64 hex digits; mend upstream.toml" in done.stderr
    assert "commit '' is not 7 to 40 hex digits; mend upstream.toml" in done.stderr


def test_port_from_an_sdist_file(tree: Case, tmp_path: Path) -> None:
    """The file's own digest is pinned; its commit comes from setuptools-scm's note, abbreviated."""
    newer = tmp_path / "newer"
    shutil.copytree(tree.upstream, newer)
    (newer / "PKG-INFO").write_text("Version: 9.10.0\n")
    version = "__version__ = version = '9.10.0'\n__commit_id__ = commit_id = 'g0123abcde'\n"
    (newer / "vllm/_version.py").write_text(version)
    digest = pack(newer, tmp_path / "any.tar.gz")
    archive = str(tmp_path / "any.tar.gz")
    done = tree.cli("--rebase-onto", "v9.10.0", str(tmp_path / "port"), "--source", archive)
    assert done.returncode == 0, done.stderr
    new = pin.load(tree.patches, "v9.10.0")
    assert (new.sdist_sha256, new.commit) == (digest, "0123abcde")
    assert pin.problems(new) == []


def test_port_from_a_folder(tree: Case, index: Path, tmp_path: Path) -> None:
    """The index says the sdist's digest; one that it does not know is left blank, which is said."""
    pytest.importorskip("pypi_simple")
    digest = "5" * 64
    name = "fake-vllm-9.10.0.tar.gz"
    page = f'<!doctype html><a href="/{name}#sha256={digest}">{name}</a>'
    (index / "fake-vllm" / "index.html").write_text(page)
    for version, pinned in (("9.10.0", digest), ("9.11.0", "")):
        newer = tmp_path / version
        shutil.copytree(tree.upstream, newer)
        (newer / "vllm/_version.py").write_text(f"__version__ = version = '{version}'\n")
        done = tree.cli("--rebase-onto", version, str(tmp_path / f"port-{version}"), "--source", str(newer))
        assert done.returncode == 0, done.stderr
        assert pin.load(tree.patches, version).sdist_sha256 == pinned
        left = f"the sha256 of fake-vllm-{version}.tar.gz is left blank: the package index has no"
        assert (left in done.stderr) == (not pinned)


LIBRARIES = {
    "requests": "class RequestException(Exception): pass",
    "pypi_simple": """
import sys
PYPI_SIMPLE_ENDPOINT = ""
class NoSuchProjectError(Exception): pass
class UnsupportedContentTypeError(Exception): pass
class PyPISimple:
    def __init__(self, url): raise NoSuchProjectError(f"asked from {sys.prefix}")
""",
}


def test_port_by_a_python_without_libraries(
    tree: Case, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It goes on in the environment that --venv names, where they are (or are installed)."""
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/")
    venv = tree.root.parent / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    site = next(venv.glob("lib/python3.*/site-packages"))
    for name, version in environment.read_lock(HOME / "requirements" / "fetch.txt", sys.version_info[1]):
        (site / f"{name}-{version}.dist-info").mkdir()
    for name, text in LIBRARIES.items():
        (site / f"{name}.py").write_text(text)
    python, *command = tree.arguments("--rebase-onto", "v9.10.0", str(tmp_path / "port"))
    done = subprocess.run([python, "-S", *command], capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert f"the package index cannot be read: asked from {venv}" in done.stderr


def test_no_libraries(tree: Case, cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pypi_simple", None)
    pinned = make_pin(tree.folder, tree.upstream)
    for ask in (source.index_digest, lambda p: source.obtain(p, None, "sdist", tmp_path / "out")):
        with pytest.raises(PatchsetError, match="downloading needs pypi_simple"):
            ask(pinned)


def test_foreign_source_names_the_file(tree: Case, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(tree.upstream, other)
    (other / "vllm/b.py").write_bytes(b"fork\n")
    shutil.rmtree(tree.root)
    done = tree.cli("--source", str(other))
    assert done.returncode == 3
    assert "vllm/b.py (changed)" in done.stderr
    assert not tree.root.exists()
    assert not list(tree.root.parent.glob(".tree*"))
    assert tree.cli("--source", str(tmp_path / "nothing")).returncode == 3


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        (member("../evil"), "escapes"),
        (member("fake_vllm-9.9.0/../../evil"), "escapes"),
        (member("/tmp/evil"), "escapes"),
        (
            member("fake_vllm-9.9.0/link", type=tarfile.SYMTYPE, linkname="/etc/passwd"),
            "neither a file nor a folder",
        ),
        (member("fake_vllm-9.9.0/hard", type=tarfile.LNKTYPE, linkname="x"), "neither a file nor a folder"),
        (member("fake_vllm-9.9.0/pipe", type=tarfile.FIFOTYPE), "neither a file nor a folder"),
        (member("fake_vllm-9.9.0/bomb", size=2 << 20), "unpacks to more than"),
    ],
)
def test_bad_archives(
    tree: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extra, reason: str
) -> None:
    monkeypatch.setattr(source, "MAX_UNPACKED", 1 << 20)
    archive = tmp_path / NAME
    pack(tree.upstream, archive, extra)
    with pytest.raises(PatchsetError, match=reason) as caught:
        source.unpack(archive, tmp_path / "out")
    assert caught.value.code == 3
    assert not (tmp_path / "evil").exists()


def test_truncated_archive(tree: Case, tmp_path: Path) -> None:
    archive = tmp_path / NAME
    pack(tree.upstream, archive)
    archive.write_bytes(archive.read_bytes()[:300])
    with pytest.raises(PatchsetError, match="is not a sound sdist"):
        source.unpack(archive, tmp_path / "out")
    shutil.rmtree(tree.root)
    done = tree.cli("--source", str(archive))
    assert done.returncode == 3
    assert "pinned is" in done.stderr


def test_index(tree: Case, index: Path, cache: Path, tmp_path: Path) -> None:
    """Downloaded, verified, cached; a damaged cache is fetched again; a cut or swapped download is refused."""
    pytest.importorskip("pypi_simple")
    digest = pack(tree.upstream, index / NAME)
    publish(index, digest)
    pinned = make_pin(tree.folder, tree.upstream, sdist_sha256=digest)
    known = tree.load()[1]
    source.obtain(pinned, known, "sdist", tmp_path / "one")
    assert (cache / NAME).is_file()
    (cache / NAME).write_bytes(b"damaged")
    source.obtain(pinned, known, "sdist", tmp_path / "two")
    whole = (index / NAME).read_bytes()
    for bad in (whole[:200], whole[::-1]):
        (cache / NAME).unlink(missing_ok=True)
        (index / NAME).write_bytes(bad)
        with pytest.raises(PatchsetError) as caught:
            source.obtain(pinned, known, "sdist", tmp_path / "three")
        assert caught.value.code == 3
        assert not list(cache.iterdir())
        assert not (tmp_path / "three").exists()


@pytest.mark.parametrize("how", ["refused", "silent"])
def test_unreachable_repository(
    tree: Case, index: Path, cache: Path, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No git server, or one that takes the connection and says nothing: auto has the sdist within seconds, git by
    name ends with exit 3, and git's helper does not stay behind.
    """
    pytest.importorskip("pypi_simple")
    if why := git.available():
        pytest.skip(why)
    monkeypatch.setattr(source, "PATIENT_SECONDS", 1.0)
    digest = pack(tree.upstream, index / NAME)
    publish(index, digest)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if how == "silent":
            server.listen()
        address = f"http://127.0.0.1:{server.getsockname()[1]}/vllm.git"
        pinned = make_pin(tree.folder, tree.upstream, repository=address, sdist_sha256=digest)
        begin = time.monotonic()
        assert source.obtain(pinned, tree.load()[1], "auto", tmp_path / "out") == "sdist"
        assert time.monotonic() - begin < source.REACH_SECONDS + 3 < 10
        with pytest.raises(PatchsetError, match="git cannot clone") as caught:
            source.obtain(pinned, None, "git", tmp_path / "other")
        assert caught.value.code == 3
        assert "--source sdist" in caught.value.hint
        for _ in range(2 if how == "silent" else 0):
            connection, _ = server.accept()
            with connection:
                connection.settimeout(5)
                while connection.recv(4096):  # until its other end is closed
                    pass


def test_offline(tree: Case, cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("pypi_simple")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/")
    with pytest.raises(PatchsetError, match="cannot be downloaded") as caught:
        source.obtain(make_pin(tree.folder, tree.upstream), tree.load()[1], "sdist", tmp_path / "out")
    assert caught.value.code == 3
    assert "--source PATH" in caught.value.hint
