"""A small fake upstream with a real patch set, as a source tree and as a wheel installed in an environment."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from patchset import commits, engine, git, manifest, pin, rebase, record, series
from patchset import target as targets
from patchset.status import inspect

HOME = Path(__file__).resolve().parents[1]
TAG = "v9.9.0"
FILES = {
    "vllm/__init__.py": b"__version__ = '9.9.0'\n",
    "vllm/a.py": b"".join(b"line_%d = %d\n" % (i, i) for i in range(40)),
    "vllm/b.py": b"def f():\n    return 1\n\n\ndef g():\n    return 2\n",
    "vllm/sub/__init__.py": b"",
    "vllm/sub/crlf.txt": b"one\r\ntwo\r\nthree\nfour\r\n",
    "vllm/sub/latin.py": b"# caf\xe9\nvalue = 1\n# end",
    "vllm/gone.py": b"old = True\n",
    "vllm/data.json": b'{"a": 1}\n',
}
EXTRA = {
    "PKG-INFO": b"Name: vllm\nVersion: 9.9.0\n",
    "setup.py": b"# nothing\n",
    "vllm/_version.py": b"__version__ = version = '9.9.0'\n",
}
EDITS: list[tuple[str, dict[str, tuple[bytes, bytes] | bytes | None]]] = [
    ("Change a", {"vllm/a.py": (b"line_5 = 5\n", b"line_5 = 55\nline_5b = 1\n")}),
    (
        "Change a again",
        {
            "vllm/a.py": (b"line_5b = 1\n", b"line_5b = 2\n"),
            "vllm/sub/crlf.txt": (b"two\r\n", b"zwei\r\n"),
            "vllm/sub/latin.py": (b"# end", b"# caf\xe9 end"),
        },
    ),
    (
        "Add and remove",
        {"vllm/new/mod.py": b"added = 1\n", "vllm/gone.py": None, "vllm/b.py": (b"return 2", b"return 3")},
    ),
]
TRAILERS = "Because.\n\nUpstream-Status: Pending\nRemove-when: upstream does it\n"
DATE = {
    "GIT_AUTHOR_DATE": "Tue, 1 Dec 2026 06:00:00 +0000",
    "GIT_COMMITTER_DATE": "Tue, 1 Dec 2026 06:00:00 +0000",
}


def write(root: Path, files: dict[str, bytes]) -> None:
    """Put files below root."""
    for path, data in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)


def commit_all(tree: Path, subject: str) -> None:
    """Commit everything below vllm/ with our trailers."""
    git.run(tree, "add", "-A", "--", "vllm")
    message = f"{subject}\n\n{TRAILERS}".encode()
    git.run(tree, "commit", "-q", "-F", "-", data=message, extra={**commits.IDENTITY, **DATE})


def make_pin(
    folder: Path, root: Path, commit: str = "", repository: str = "", sdist_sha256: str = "0" * 64
) -> pin.Pin:
    """Write upstream.toml and manifest of a fake upstream."""
    text = manifest.dump(manifest.scan(root))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / manifest.NAME).write_bytes(text)
    fields = {
        "tag": TAG,
        "version": TAG[1:],
        "python": ">=3.10",
        "repository": repository or "file:///nowhere",
        "commit": commit,
        "project": "fake-vllm",
        "sdist": "fake_vllm-9.9.0.tar.gz",
        "sdist_sha256": sdist_sha256,
        "manifest_sha256": hashlib.sha256(text).hexdigest(),
    }
    (folder / "upstream.toml").write_text(rebase.TEMPLATE.format(**fields))
    return pin.load(folder.parent, TAG)


@pytest.fixture(scope="session")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `upstream/` (pristine), `tree/` (a checkout with one commit per patch) and `patches/`."""
    root = tmp_path_factory.mktemp("fake")
    write(root / "upstream", FILES | EXTRA)
    shutil.copytree(root / "upstream", root / "tree")
    made = make_pin(root / "patches" / TAG, root / "upstream")
    (made.folder / "series").write_text("# order\n")
    commits.start(root / "tree", made, {})
    for subject, edits in EDITS:
        for path, edit in edits.items():
            full = root / "tree" / path
            if edit is None:
                full.unlink()
            elif isinstance(edit, bytes):
                write(root / "tree", {path: edit})
            else:
                data = full.read_bytes()
                assert data.count(edit[0]) == 1
                full.write_bytes(data.replace(*edit))
        commit_all(root / "tree", subject)
    commits.refresh(root / "tree", made, manifest.load(made))
    return root


@dataclass
class Case:
    """One target of one kind, with its own copy of the patch set."""

    kind: str
    root: Path
    patches: Path
    upstream: Path
    python: Path | None
    found: targets.Target | None = None

    @property
    def folder(self) -> Path:
        return self.patches / TAG

    @property
    def target(self) -> targets.Target:
        if self.python and not self.found:
            self.found = targets.installed(self.python)
        return self.found or targets.tree(self.root)

    def load(self) -> tuple[series.Series, dict[str, str]]:
        made = pin.load(self.patches, TAG)
        known = manifest.load(made)
        return series.load(made, known), known

    def apply(self) -> engine.Outcome:
        return engine.apply(self.target, *self.load())

    def revert(self) -> engine.Outcome:
        return engine.revert(self.target, *self.load())

    def inspect(self):
        return inspect(self.target, *self.load())

    def arguments(self, *args: str) -> list[str]:
        where = (
            ["--target", "installed", "--python", str(self.python)]
            if self.python
            else ["--dest", str(self.root)]
        )
        fixed = [
            "--patches",
            str(self.patches),
            "--vllm",
            TAG,
            "--no-install",
            "--venv",
            str(self.root.parent / "venv"),
        ]
        return [sys.executable, str(HOME / "apply.py"), *fixed, *where, *args]

    def cli(self, *args: str, **options) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.arguments(*args), capture_output=True, text=True, check=False, **options)

    def status(self) -> dict:
        done = self.cli("--status", "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def snapshot(self, times: bool = False) -> dict[str, object]:
        return snapshot(self.root, times)

    def is_whole(self) -> bool:
        """Exactly upstream, or exactly patched."""
        found = self.inspect()
        return found.condition.value == "pristine" or (found.condition.value == "patched" and found.current)


def snapshot(root: Path, times: bool = False) -> dict[str, object]:
    """Everything below root: bytes (or link text), mode and, if asked, the time stamp of files."""
    out: dict[str, object] = {}
    for path in sorted(root.rglob("*")):
        key = path.relative_to(root).as_posix()
        if path.is_symlink():
            out[key] = os.readlink(path)
        elif path.is_file():
            info = path.stat()
            out[key] = (path.read_bytes(), info.st_mode, info.st_mtime_ns if times else 0)
        else:
            out[key] = "folder"
    return out


def make_installed(base: Path, source: Path, files: dict[str, bytes] | None = None) -> tuple[Path, Path]:
    """A bare environment with the fake wheel in it: (site-packages, python)."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(base)], check=True)
    site = next(base.glob("lib/python3.*/site-packages"))
    shutil.copytree(source / "vllm", site / "vllm")
    info = site / "vllm-9.9.0+cpu.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 9.9.0+cpu\n")
    (info / "INSTALLER").write_text("pip\n")
    listed = [p for p in sorted(site.rglob("*")) if p.is_file() and "vllm" in p.parts[len(site.parts)]]
    contents = {p.relative_to(site).as_posix(): p.read_bytes() for p in listed}
    rows = record.updated(b"", contents, ()) + f"{info.name}/RECORD,,\n".encode()
    (info / "RECORD").write_bytes(rows)
    return site, base / "bin" / "python"


@pytest.fixture
def make(fake: Path, tmp_path: Path) -> Iterator[Callable[[str], Case]]:
    """Make a target of a kind, in a folder whose name has a space and a non-ASCII letter (in memory, where
    possible).
    """
    memory = Path("/dev/shm")
    fast = Path(tempfile.mkdtemp(dir=memory if os.access(memory, os.W_OK) else tmp_path))
    count = 0

    def build(kind: str) -> Case:
        nonlocal count
        count += 1
        base = fast / f"with space é {count}"
        base.mkdir()
        shutil.copytree(fake / "patches", base / "patches")
        if kind == "installed":
            root, python = make_installed(base / "env", fake / "upstream")
        else:
            root, python = base / "tree", None
            shutil.copytree(fake / "upstream", root)
        return Case(kind, root, base / "patches", fake / "upstream", python)

    yield build
    shutil.rmtree(fast, ignore_errors=True)


@pytest.fixture(params=["tree", "installed"])
def case(request: pytest.FixtureRequest, make: Callable[[str], Case]) -> Case:
    """A fresh target of each kind."""
    return make(request.param)


@pytest.fixture
def tree(make: Callable[[str], Case]) -> Case:
    """A fresh source tree."""
    return make("tree")
