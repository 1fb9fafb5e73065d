"""vLLM 0.12.0 installed from a wheel: patched in place it answers as it should; reverted, it is as before."""

import json
import os
import subprocess
import sys
import sysconfig
from hashlib import sha256
from pathlib import Path

import pytest
from patchset import manifest, pin, source
from patchset.errors import PatchsetError

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.network]

ROOT = Path(__file__).resolve().parents[2]
APPLY = [sys.executable, str(ROOT / "apply.py"), "--vllm", "v0.12.0", "--target", "installed", "--json"]


def run(*command, **more) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False, **more)
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Upstream's sdist as a wheel without compiled kernels."""
    folder = tmp_path_factory.mktemp("wheel")
    pinned = pin.load(ROOT / "patches", "v0.12.0")
    try:
        source.obtain(pinned, manifest.load(pinned), "sdist", folder / "tree")
    except PatchsetError as problem:
        pytest.skip(str(problem))
    build = {"VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": "0.12.0"}
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    run(*pip, "-w", folder, folder / "tree", env={**os.environ, **build})
    return next(folder.glob("*.whl"))


@pytest.fixture
def python(wheel, tmp_path):
    """An environment with that wheel, which sees the other packages of the environment that runs the tests. Not
    its editable installations: Python follows those from a folder of site-packages only."""
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "env with space")
    python = tmp_path / "env with space/bin/python"
    own = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    others = dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    (own / "others.pth").write_text("\n".join(others) + "\n")
    run(python, "-m", "pip", "install", "-q", "--no-deps", "--ignore-installed", "--no-index", wheel)
    where = run(python, "-c", "import importlib.util as u; print(u.find_spec('vllm').origin)")
    assert Path(where.strip()).is_relative_to(own)
    return python


def files(python: Path) -> dict[str, str]:
    """Hash of every file of the environment but bytecode."""
    root = python.parents[1]
    paths = [p for p in root.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    return {str(p.relative_to(root)): sha256(p.read_bytes()).hexdigest() for p in paths}


def test_apply_golden_revert(python, golden, tmp_path):
    before, sources = files(python), sorted(ROOT.glob("overlay/*"))
    done = json.loads(run(*APPLY, "--python", python))
    assert done["state"] == "patched"
    status = json.loads(run(*APPLY, "--python", python, "--status"))
    assert {p["state"] for p in status["patches"]} == {"applied"}
    assert status["overlay"]["installed"]
    assert files(python) != before
    assert sorted(ROOT.glob("overlay/*")) == sources

    report = json.loads(run(python, "-m", "vllm_sfa_cp.cli", "doctor", "--json"))
    assert report["ok"]
    script = Path(__file__).with_name("installed_golden.py")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests"), "OMP_NUM_THREADS": "1"}
    found = json.loads(run(python, script, golden.model, tmp_path, env=environment).splitlines()[-1])
    assert Path(found["vllm"]).is_relative_to(python.parents[1])
    assert found["off@1"] == found["sfa-cp@2"] == golden.tokens

    again = json.loads(run(*APPLY, "--python", python, "--revert"))
    assert again["state"] == "pristine"
    assert files(python) == before
