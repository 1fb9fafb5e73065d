"""Git serves authors and reviewers (cases A9, A10, A23): commits, refresh, worktrees, shallow clones, odd
configuration.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fake_upstream import FILES, HOME, TAG, Case, commit_all, make_pin, write
from patchset import commits, git, manifest, pin
from patchset.errors import PatchsetError

HOSTILE = """
[core]
    autocrlf = true
    hooksPath = /nonexistent
    whitespace = trailing-space
[apply]
    whitespace = fix
[commit]
    gpgsign = true
[diff]
    noprefix = true
    mnemonicPrefix = true
    external = /bin/false
[format]
    signature = mine
    numbered = true
"""


@pytest.fixture
def hostile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A user whose git configuration breaks naive tools, who has no identity, and who is inside another
    repository.
    """
    (tmp_path / "config").write_text(HOSTILE)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "config"))
    monkeypatch.setenv("GIT_DIR", "/nonexistent")
    monkeypatch.setenv("GIT_EXTERNAL_DIFF", "/bin/false")
    for name in ("GIT_AUTHOR_NAME", "GIT_AUTHOR_EMAIL", "GIT_COMMITTER_NAME", "EMAIL"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("hostile")
def test_commit_then_refresh_changes_no_byte(tree: Case) -> None:
    """A9: one commit per patch, the tree reads clean, and refreshing from those commits is a no-op."""
    done = tree.cli("--commit")
    assert done.returncode == 0, done.stderr
    subjects = git.text(tree.root, "log", "--format=%s").splitlines()
    assert subjects == ["Add and remove", "Change a again", "Change a", f"vLLM {TAG}"]
    assert git.text(tree.root, "status", "--porcelain", "--", "vllm") == ""
    before = {p.name: p.read_bytes() for p in tree.folder.iterdir()}
    done = tree.cli("--refresh", str(tree.root))
    assert done.returncode == 0, done.stderr
    assert "nothing changed" in done.stderr
    assert {p.name: p.read_bytes() for p in tree.folder.iterdir()} == before
    assert tree.cli("--revert").returncode == 0
    assert (tree.root / "vllm/a.py").read_bytes() == FILES["vllm/a.py"]


def test_new_commit_becomes_a_patch(tree: Case) -> None:
    tree.cli("--commit")
    write(tree.root, {"vllm/b.py": (tree.root / "vllm/b.py").read_bytes() + b"# more\n"})
    done = tree.cli("--refresh", str(tree.root))
    assert done.returncode == 5
    assert "uncommitted changes" in done.stderr
    commit_all(tree.root, "Isn't it more?")
    assert tree.cli("--refresh", str(tree.root)).returncode == 0
    assert (tree.folder / "series").read_text().splitlines()[-1] == "0004-isnt-it-more.patch"
    assert tree.inspect().current


def test_name_of_a_long_subject(tree: Case) -> None:
    """It is cut where a word ends; a longer name in an older patch set is kept."""
    subject = "Run the CPU fused MoE on local experts and accumulate in place"
    tree.cli("--commit")
    write(tree.root, {"vllm/b.py": (tree.root / "vllm/b.py").read_bytes() + b"# more\n"})
    commit_all(tree.root, subject)
    made = pin.load(tree.patches, TAG)
    assert "0004-run-the-cpu-fused-moe-on-local-experts-and.patch" in commits.refresh(
        tree.root, made, manifest.load(made)
    )
    older = tree.patches / "v9.8.0"
    shutil.copytree(tree.folder, older)
    whole = "run-the-cpu-fused-moe-on-local-experts-and-accumulate-in-place.patch"
    next(older.glob("0004-*")).rename(older / f"0007-{whole}")
    next(tree.folder.glob("0004-*")).unlink()
    assert f"0004-{whole}" in commits.refresh(tree.root, made, manifest.load(made))


def test_unsound_commit_writes_nothing(tree: Case) -> None:
    tree.cli("--commit")
    before = {p.name: p.read_bytes() for p in tree.folder.iterdir()}
    write(tree.root, {"vllm/b.py": b"# other\n"})
    git.run(tree.root, "commit", "-aqm", "No trailers", extra=commits.IDENTITY)
    done = tree.cli("--refresh", str(tree.root))
    assert done.returncode == 4
    assert "Upstream-Status" in done.stderr
    assert {p.name: p.read_bytes() for p in tree.folder.iterdir()} == before


@pytest.mark.usefixtures("hostile")
@pytest.mark.parametrize("shape", ["checkout", "worktree", "shallow"])
def test_checkouts(tree: Case, shape: str, tmp_path: Path) -> None:
    """A checkout, a worktree and a shallow clone are patched by content; HEAD, index and commits stay."""
    origin = tmp_path / "origin"
    shutil.copytree(tree.upstream, origin)
    commits.start(origin, pin.load(tree.patches, TAG), {})
    shutil.rmtree(tree.root)
    if shape == "worktree":
        git.run(origin, "worktree", "add", "-q", "--detach", str(tree.root))
    else:
        depth = ["--depth=1"] if shape == "shallow" else []
        git.run(None, "clone", "-q", *depth, origin.as_uri(), str(tree.root))
    before = (git.text(tree.root, "rev-parse", "HEAD"), tree.snapshot())
    done = tree.cli()
    assert done.returncode == 0, done.stderr
    assert git.text(tree.root, "rev-parse", "HEAD") == before[0]
    assert len(git.text(tree.root, "diff", "--name-only", "HEAD").splitlines()) == 5
    assert tree.cli("--revert").returncode == 0
    assert tree.snapshot() == before[1]


def test_git_source(tree: Case, tmp_path: Path) -> None:
    """The tag is cloned and its commit checked, full or abbreviated; a moved tag is refused with exit 3."""
    origin = tmp_path / "origin"
    shutil.copytree(tree.upstream, origin)
    head = commits.start(origin, pin.load(tree.patches, TAG), {})
    git.run(origin, "tag", TAG)
    for commit in (head, head[:9]):
        shutil.rmtree(tree.root)
        make_pin(tree.folder, tree.upstream, commit, origin.as_uri())
        done = tree.cli("--source", "git")
        assert done.returncode == 0, done.stderr
        assert tree.inspect().current
    shutil.rmtree(tree.root)
    make_pin(tree.folder, tree.upstream, "1" * 40, origin.as_uri())
    done = tree.cli("--source", "git")
    assert done.returncode == 3
    assert "pinned is 111111111111" in done.stderr
    assert not tree.root.exists()


@pytest.mark.parametrize("fake_git", [None, "#!/bin/sh\necho git version 1.8.3\n"])
def test_without_git(case: Case, fake_git: str | None, tmp_path: Path) -> None:
    """A23: applying, reporting and reverting need no git; what needs it says so."""
    folder = tmp_path / "bin"
    folder.mkdir()
    if fake_git:
        (folder / "git").write_text(fake_git)
        (folder / "git").chmod(0o755)
    env = {"PATH": str(folder), "HOME": str(tmp_path)}
    assert case.cli(env=env).returncode == 0
    assert case.cli("--revert", env=env).returncode == 0
    if case.kind == "tree":
        done = case.cli("--commit", env=env)
        assert done.returncode == 1
        assert "--commit needs git" in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a folder to another user")
def test_dubious_ownership(tree: Case, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A10: a checkout of another user: patched by content; git's refusal is explained with its mend."""
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "none"))
    git.run(None, "init", "-q", str(tree.root))
    for path in [tree.root, *tree.root.rglob("*")]:
        os.chown(path, 12345, 12345)
    assert tree.cli().returncode == 0
    assert (tree.root / "vllm/a.py").stat().st_uid == 12345
    done = tree.cli("--commit")
    assert done.returncode == 5
    assert "belongs to user id 12345" in done.stderr
    assert "safe.directory" in done.stderr


def test_rebase(tree: Case, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A port: what applies is applied, what upstream has is left out, a conflict is git's; refresh writes the
    series.
    """
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/")
    tree.apply()
    newer = tmp_path / "newer"
    shutil.copytree(tree.upstream, newer)
    write(
        newer, {"vllm/_version.py": b"__version__ = version = '9.10.0'\n", "PKG-INFO": b"Version: 9.10.0\n"}
    )
    first = FILES["vllm/a.py"].replace(b"line_5 = 5\n", b"line_5 = 55\nline_5b = 1\n")
    write(
        newer,
        {
            "vllm/a.py": b"# moved down\n" + first,
            "vllm/b.py": FILES["vllm/b.py"].replace(b"return 2", b"return 22"),
        },
    )
    done = tree.cli("--rebase-onto", "v9.10.0", str(newer), "--json")
    assert done.returncode == 4, done.stderr
    assert "upstream already has it" in done.stderr
    assert "conflict in vllm/b.py" in done.stderr
    write(newer, {"vllm/b.py": FILES["vllm/b.py"].replace(b"return 2", b"return 33")})
    git.run(newer, "add", "-A", "vllm")
    git.run(newer, "am", "--continue", extra=commits.IDENTITY)
    done = tree.cli("--rebase-onto", "v9.10.0", str(newer))
    assert done.returncode == 0, done.stderr
    command = [sys.executable, str(HOME / "apply.py"), "--patches", str(tree.patches), "--vllm", "v9.10.0"]
    done = subprocess.run([*command, "--refresh", str(newer)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    new = pin.load(tree.patches, "v9.10.0")
    names = [n for n in (new.folder / "series").read_text().splitlines() if not n.startswith("#")]
    assert names == ["0001-change-a-again.patch", "0002-add-and-remove.patch"]
    assert manifest.load(new)


def test_refresh_of_a_plain_folder(tree: Case) -> None:
    with pytest.raises(PatchsetError, match="has no commits on top"):
        commits.refresh(tree.root, pin.load(tree.patches, TAG), {})
