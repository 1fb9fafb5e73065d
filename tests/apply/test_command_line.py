"""The command itself: usage errors, JSON, the lock files, fingerprints, and the real sdist once."""

import ast
import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from fake_upstream import FILES, HOME, Case
from patchset import environment, fingerprint, pin, toml
from patchset.errors import PatchsetError


def within(begin: float, seconds: float) -> bool:
    """Whether so little has passed since `begin`, on a machine that has a processor to itself."""
    return time.monotonic() - begin < seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def run(*args: str, **options) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(HOME / "apply.py"), *args]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


@pytest.mark.parametrize(
    "args", [["--what"], ["--status", "--revert"], ["--target", "moon"], ["--vllm", "v0"], ["--write"]]
)
def test_usage_errors(args: list[str]) -> None:
    done = run(*args, "--json")
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "hint: " in done.stderr
    first = done.stderr.splitlines()[0]
    assert not first.endswith(".")
    assert json.loads(done.stdout)["exit"] == 2


@pytest.mark.parametrize("verb", ["--status", "--lint", "--refresh", "--rebase-onto", "--revert"])
def test_options_that_a_verb_would_ignore(tree: Case, verb: str) -> None:
    words = {"--refresh": [str(tree.root)], "--rebase-onto": ["v9.10.0", str(tree.root)]}.get(verb, [])
    before = tree.snapshot(), sorted(tree.patches.rglob("*"))
    for option in ["--commit", "--force", *(["--dry-run"] if verb != "--revert" else [])]:
        done = tree.cli(verb, *words, option)
        assert done.returncode == 2
        assert done.stderr == f"error: {option} does not go with {verb}\nhint: leave {option} out\n"
    assert (tree.snapshot(), sorted(tree.patches.rglob("*"))) == before


def test_help_needs_nothing() -> None:
    done = run("--help", env={"PATH": ""})
    assert done.returncode == 0
    assert "--rebase-onto" in done.stdout


def test_stdout_is_one_object(case: Case) -> None:
    """--json: one object on stdout, whatever the verb; everything for people on stderr."""
    for verb in (["--dry-run"], [], [], ["--status"], ["--revert"], ["--revert"]):
        done = case.cli("--json", *verb)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["ok"] is True
        assert done.stderr
        assert case.cli(*verb).stdout == ""


def test_status_keys(case: Case) -> None:
    case.apply()
    report = case.status()
    assert report["vllm"] == "v9.9.0"
    assert [p["state"] for p in report["patches"]] == ["applied"] * 3
    assert set(report["overlay"]) == {"installed", "version"}


def test_imports_are_standard_library_only() -> None:
    """Applying, reporting and reverting load nothing that must be installed first."""
    code = "import sys; sys.argv = ['apply.py', '--lint']\n" + textwrap.dedent(
        f"""
        import runpy
        try:
            runpy.run_path({str(HOME / "apply.py")!r}, run_name='__main__')
        except SystemExit:
            pass
        roots = {{m.partition('.')[0] for m in sys.modules}} - set(sys.stdlib_module_names)
        print(sorted(r for r in roots if not r.startswith('_')))
        """
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False
    )
    assert ast.literal_eval(done.stdout) == ["patchset"], done.stderr


def test_lock_files_agree() -> None:
    """Exact pins on every supported Python, and no two versions of one package."""
    for minor in (10, 11, 12, 13):
        seen: dict[str, str] = {}
        for name in ("fetch.txt", "engine.txt", "dev.txt"):
            for package, version in environment.read_lock(HOME / "requirements" / name, minor):
                assert seen.setdefault(package, version) == version
        assert seen["torch"] == "2.13.0"
        assert seen["numba"] == "0.61.2"
        assert int(seen["setuptools"].split(".")[0]) < 81


def test_lock_refuses_ranges(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("numpy>=2\n")
    with pytest.raises(PatchsetError, match="not an exact pin"):
        environment.read_lock(tmp_path / "x.txt", 11)


def test_folder_that_is_no_environment(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PatchsetError, match="is not a virtual environment") as caught:
        environment.Environment(tmp_path).make()
    assert caught.value.code == 5


def test_toml_subset() -> None:
    text = (HOME / "patches" / "v0.12.0" / "upstream.toml").read_text()
    assert toml.loads(text)["git"]["commit"].startswith("4fd9d6a85")
    with pytest.raises(ValueError, match="line 2"):
        toml.loads("a = 1\nb = 'x'\n")


SOURCE = '''
"""Module."""
LIMIT: int = 3
try:
    import fast
except ImportError:
    fast = None

class Outer(Base, metaclass=Meta):
    """Doc."""
    @property
    def value(self) -> int:
        """Doc."""
        return 1  # comment

    async def go(self, a, *, b=2): ...

def top():
    def inner(x): return x
    return inner
'''


def digests(text: str, *names: str) -> list[str]:
    tree = ast.parse(text)
    found = [fingerprint.find(tree, name) for name in names]
    return [fingerprint.digest(node) for node in found if node is not None]


def test_fingerprint_ignores_what_is_not_code() -> None:
    names = ("", "LIMIT", "fast", "Outer", "Outer.value", "Outer.go", "top", "top.<locals>.inner")
    other = (
        SOURCE.replace('"""Doc."""', '"""Other\n    text."""')
        .replace("  # comment", "")
        .replace("\n\n", "\n\n\n")
    )
    assert len(digests(SOURCE, *names)) == len(names)
    assert digests(SOURCE, *names) == digests(other, *names)


def test_fingerprint_sees_code() -> None:
    changed = SOURCE.replace("return 1", "return 2").replace("@property\n", "@cached\n").replace("b=2", "b=3")
    for name in ("Outer", "Outer.value", "Outer.go"):
        assert digests(SOURCE, name) != digests(changed, name)
    assert digests(SOURCE, "top") == digests(changed, "top")


def test_fingerprint_of_a_tree(tree: Case) -> None:
    symbol = fingerprint.read(tree.root, "vllm.b:g")
    assert (symbol.path, symbol.line, symbol.signature) == ("vllm/b.py", 5, "()")
    with pytest.raises(fingerprint.SymbolGone, match="no module"):
        fingerprint.fingerprint(tree.root, "vllm.nowhere:g")
    with pytest.raises(fingerprint.SymbolGone, match="has no h"):
        fingerprint.fingerprint(tree.root, "vllm.b:h")
    assert FILES["vllm/b.py"].startswith(b"def f")


def test_second_run_in_this_environment() -> None:
    """The README's first command again, in the environment it made: every package is looked at, in 3 s."""
    env, tree = environment.Environment(Path(sys.prefix)), HOME / "build" / "vllm-v0.12.0"
    pinned = pin.load(HOME / "patches", "v0.12.0")
    if not (env.vllm_is(pinned, tree) and env.overlay_is(HOME / "overlay")):
        pytest.skip("the environment of the tests was not made by apply.py of this checkout")
    started = time.monotonic()
    done = run("--vllm", "v0.12.0", "--venv", sys.prefix, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["changed"] is False
    assert "nothing to do: already applied" in done.stderr
    assert within(started, 3)


@pytest.mark.network
def test_real_sdist(tmp_path: Path) -> None:
    """vLLM v0.12.0 from the index: obtained, verified, patched, unchanged by a second run in 3 s, reverted."""
    pytest.importorskip("pypi_simple")
    fixed = ["--no-install", "--source", "sdist", "--dest", str(tmp_path / "vllm"), "--json"]
    done = run(*fixed)
    if done.returncode == 3 and "cannot be downloaded" in done.stderr:
        pytest.skip("the package index cannot be reached")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["state"] == "patched"
    started = time.monotonic()
    second = run(*fixed)
    assert json.loads(second.stdout)["changed"] is False
    assert within(started, 3)
    assert json.loads(run(*fixed, "--revert").stdout)["state"] == "pristine"
    assert not (tmp_path / "vllm" / ".sfa-cp-overlay").exists()
