"""Broken patch files (cases A8, A17, A19, A20): refused with their reason, all at once, and nothing is
written.
"""

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_upstream import HOME, Case, make_pin
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from patchset import diff, pin, workflow
from patchset.blob import blob_id
from patchset.errors import PatchsetError


def rewrite(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        assert old in data, old
        return data.replace(old, new)

    return change


GOOD_INDEX = b"index " + b"1" * 40 + b".." + b"2" * 40 + b" 100644\n"
BREAKS = {
    "truncated": (lambda d: d[: len(d) - 30], "no newline at the end"),
    "cut at a line": (lambda d: d[: d.rindex(b"\n", 0, -1) + 1], "truncated or its counts are wrong"),
    "no final newline": (lambda d: d[:-1], "no newline at the end"),
    "lying count": (rewrite(b"@@ -3,7 +3,8 @@", b"@@ -3,6 +3,8 @@"), "more lines than its counts say"),
    "stripped blank": (rewrite(b"\n line_2 = 2\n", b"\n\n"), "stripped trailing whitespace"),
    "empty": (lambda d: b"", "the file is empty"),
    "garbage": (lambda d: bytes(range(256)), "not a patch"),
    "crlf": (lambda d: d.replace(b"\n", b"\r\n"), "CRLF line ends"),
    "no status": (rewrite(b"Upstream-Status: Pending\n", b""), "'Upstream-Status:' line is wanted"),
    "bad status": (rewrite(b"Status: Pending", b"Status: Soon"), "'Soon' is none of"),
    "backport of old": (
        rewrite(b"Status: Pending", b"Status: Backport [v9.9]"),
        "Backport [v9.9]: the pinned vLLM 9.9.0 has it already",
    ),
    "backport of this": (rewrite(b"Status: Pending", b"Status: Backport [9.9.0]"), "has it already"),
    "backport of what": (rewrite(b"Status: Pending", b"Status: Backport [main]"), "names no version"),
    "no remove-when": (rewrite(b"Remove-when: upstream does it\n", b""), "'Remove-when:' line is wanted"),
    "short remove-when": (rewrite(b"upstream does it", b"x"), "Remove-when 'x' is no condition"),
    "no why": (rewrite(b"Because.\n", b""), "does not say why"),
    "signature": (lambda d: d + b"-- \n2.39.5\n\n", "carries a git signature"),
    "dotdot": (rewrite(b"vllm/a.py", b"vllm/../a.py"), "'..' path component"),
    "absolute": (rewrite(b"a/vllm/a.py b/vllm/a.py", b"a//etc/passwd b//etc/passwd"), "absolute path"),
    "drive": (rewrite(b"a/vllm/a.py b/vllm/a.py", b"a/C:/x b/C:/x"), "drive letter"),
    "nul": (rewrite(b"vllm/a.py", b"vllm/a\0.py"), "control character"),
    ".git": (rewrite(b"vllm/a.py", b"vllm/.git/config"), "path inside .git"),
    "outside": (rewrite(b"vllm/a.py", b"setup.py"), "outside vllm/"),
    "no prefix": (rewrite(b"a/vllm/a.py b/vllm/a.py", b"vllm/a.py vllm/a.py"), "no other prefix"),
    "rename": (rewrite(b"index ", b"rename from vllm/a.py\nindex "), "renames a file"),
    "mode": (rewrite(b"index ", b"old mode 100644\nnew mode 100755\nindex "), "changes a file mode"),
    "binary": (rewrite(b"--- a/vllm/a.py", b"GIT binary patch\n--- a/vllm/a.py"), "binary hunk"),
    "symlink": (rewrite(b" 100644\n", b" 120000\n"), "a symbolic link is not accepted"),
    "short index": (
        lambda d: re.sub(rb"index .*", b"index 1234567..89abcde 100644", d, count=1),
        "no index line with full blob ids",
    ),
    "version file": (rewrite(b"vllm/a.py", b"vllm/_version.py"), "written by builds"),
    "gone": (rewrite(b"vllm/a.py", b"vllm/nowhere.py"), "upstream has no such file"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_broken_patch_is_refused_by_name(tree: Case, name: str) -> None:
    change, reason = BREAKS[name]
    path = next(tree.folder.glob("0001-*"))
    path.write_bytes(change(path.read_bytes()))
    before = tree.snapshot()
    with pytest.raises(PatchsetError) as caught:
        tree.apply()
    assert caught.value.code == 4
    assert any(reason in line and line.startswith(path.name) for line in caught.value.problems), (
        caught.value.problems
    )
    assert tree.snapshot() == before


def test_backport_of_what_comes_later(tree: Case) -> None:
    path = next(tree.folder.glob("0001-*"))
    path.write_bytes(path.read_bytes().replace(b"Pending", b"Backport [9.10.0]"))
    assert tree.apply().action == "applied"


def test_every_problem_at_once(tree: Case) -> None:
    """A19: a missing file, a stray one, a duplicate, a bad name, and a broken patch, in one error."""
    names = sorted(p.name for p in tree.folder.glob("*.patch"))
    (tree.folder / "0009-stray.patch").write_text("x")
    (tree.folder / names[0]).write_bytes(b"")
    order = [names[0], "0002-missing.patch", names[2], names[2], "Bad Name.patch", names[1]]
    (tree.folder / "series").write_text("".join(f"{n}\n" for n in order))
    done = tree.cli()
    assert done.returncode == 4
    for part in (
        "the file is empty",
        "0002-missing.patch has no file",
        "listed twice",
        "'Bad Name.patch' is not",
    ):
        assert part in done.stderr
    assert "0009-stray.patch is not in series" in done.stderr
    assert "do not ascend" in done.stderr


def test_supported_is_in_order_of_version(tmp_path: Path) -> None:
    tags = ["v0.9.2", "v0.12.0rc1", "v0.12.0", "v0.12.0.post1", "v0.12.1", "v1.0"]
    for tag in sorted(tags):
        (tmp_path / tag).mkdir()
        (tmp_path / tag / "upstream.toml").touch()
    assert pin.supported(tmp_path) == tags


def test_lint_generates_for_the_current_set(tree: Case, tmp_path: Path) -> None:
    """SUPPORTED_VLLM says which one is current: a port, which is newer, is not until then."""
    made = make_pin(tree.folder, tree.upstream, "0" * 40)
    port = tree.patches / "v9.10.0"
    shutil.copytree(made.folder, port)
    (port / "upstream.toml").write_text((port / "upstream.toml").read_text().replace("9.9.0", "9.10.0"))
    init = tmp_path / "overlay" / workflow.PACKAGE / "__init__.py"
    init.parent.mkdir(parents=True)
    for version in ("9.9.0", "9.10.0"):
        init.write_text(f'"""Doc."""\nSUPPORTED_VLLM = "{version}"\n')
        workflow.lint(tmp_path, tree.patches, True)
        assert f"vLLM v{version} " in (tmp_path / "MODIFICATIONS.md").read_text()
    init.write_text('SUPPORTED_VLLM = "9.11.0"\n')
    with pytest.raises(PatchsetError, match=r"v9\.11\.0 has no patch set here \(v9\.9\.0, v9\.10\.0\)"):
        workflow.lint(tmp_path, tree.patches, False)
    init.write_text("")
    with pytest.raises(PatchsetError, match="has no line SUPPORTED_VLLM"):
        workflow.lint(tmp_path, tree.patches, False)


def test_default_is_the_current_set() -> None:
    done = subprocess.run(
        ["python3", str(HOME / "apply.py"), "--help"], capture_output=True, text=True, check=True
    )
    assert f"(default {pin.current(HOME / 'overlay' / workflow.PACKAGE)})" in done.stdout


def test_lint_of_this_repository() -> None:
    """The patches in this repository are sound, and the text generated from them is up to date."""
    done = subprocess.run(
        ["python3", str(HOME / "apply.py"), "--lint"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


LINES = st.lists(
    st.sampled_from([b"a\n", b"b\n", b"\n", b"c\r\n", b"\xff\xfe\n", b"x\x0cy\n", b"  \n"]), max_size=30
)
TAIL = st.sampled_from([b"", b"end", b"end\r"])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(LINES, LINES, TAIL, TAIL)
def test_git_diff_applies_and_reverts(
    tmp_path: Path, old: list, new: list, tail: bytes, new_tail: bytes
) -> None:
    """Whatever git makes of two contents, our applier brings one to the other and back, byte for byte."""
    before, after = b"".join(old) + tail, b"".join(new) + new_tail
    if before == after:
        return
    for side, data in (("a", before), ("b", after)):
        (tmp_path / side / "vllm").mkdir(parents=True, exist_ok=True)
        (tmp_path / side / "vllm" / "f").write_bytes(data)
    command = ["git", "diff", "--no-index", "--full-index", "--text", "--no-prefix", "a/vllm/f", "b/vllm/f"]
    text = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).stdout
    change = next(iter(diff.parse(text)))
    assert isinstance(change, diff.FilePatch), change
    assert (change.before, change.after) == (blob_id(before), blob_id(after))
    assert diff.apply(before, change) == after
    assert diff.apply(after, change, reverse=True) == before


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=400))
def test_parser_never_crashes(noise: bytes) -> None:
    list(
        diff.parse(
            b"diff --git a/vllm/f b/vllm/f\n"
            + GOOD_INDEX
            + b"--- a/vllm/f\n+++ b/vllm/f\n@@ -1 +1 @@\n"
            + noise
        )
    )
