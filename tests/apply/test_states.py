"""What apply, status and revert do to a target in each state (cases A1-A8, A11-A18, A20, A21, A24, A26), of both
kinds wherever the case can arise there.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_upstream import FILES, TAG, Case, commit_all
from patchset import docs, engine, lock, manifest
from patchset.errors import Exit, PatchsetError
from patchset.status import Condition
from patchset.store import Store
from vllm_sfa_cp import doctor


def edit(path: Path, old: bytes, new: bytes) -> None:
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new))


def test_apply_and_revert_restore_everything(case: Case) -> None:
    """A7, A8, A20: a file that two patches change, mixed line ends, bytes that are not UTF-8."""
    before = case.snapshot(times=True)
    assert case.apply().action == "applied"
    assert (case.root / "vllm/a.py").read_bytes().count(b"line_5b = 2\n") == 1
    assert (case.root / "vllm/sub/crlf.txt").read_bytes() == b"one\r\nzwei\r\nthree\nfour\r\n"
    assert (case.root / "vllm/sub/latin.py").read_bytes() == b"# caf\xe9\nvalue = 1\n# caf\xe9 end"
    assert not (case.root / "vllm/gone.py").exists()
    assert case.revert().action == "reverted"
    assert case.snapshot(times=True) == before


def test_second_apply_writes_nothing(case: Case) -> None:
    """A5: it says so, and not even a time stamp differs."""
    case.apply()
    before = case.snapshot(times=True)
    done = case.cli("--json")
    assert done.returncode == 0
    assert "already applied" in done.stderr
    report = json.loads(done.stdout)
    assert (report["changed"], report["state"], report["action"]) == (False, "patched", "nothing")
    assert case.snapshot(times=True) == before


def test_dry_run_and_status_write_nothing(case: Case) -> None:
    before = case.snapshot(times=True)
    done = case.cli("--dry-run", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["files"] == sorted(
        {p for p in FILES if p in done.stdout} | {"vllm/new/mod.py"}
    )
    report = case.status()
    assert report["state"] == "pristine"
    assert {p["state"] for p in report["patches"]} == {"pending"}
    assert report["overlay"] == {"installed": False, "version": None}
    assert case.snapshot(times=True) == before


def test_a_failing_patch_leaves_nothing(case: Case) -> None:
    """A1, A2, A4, A18: the third patch does not fit where it says; exit 4 each time, nothing written or recorded."""
    before = case.snapshot(times=True)
    patch = next(case.folder.glob("0003-*"))
    edit(patch, b"-    return 2", b"-    return 9")
    for _ in range(2):
        done = case.cli()
        assert done.returncode == 4
        assert patch.name in done.stderr
        assert "hint: " in done.stderr
        assert case.snapshot(times=True) == before
    edit(patch, b"-    return 9", b"-    return 2")
    assert {p["state"] for p in case.status()["patches"]} == {"pending"}
    assert case.apply().action == "applied"


def test_offset_is_refused(case: Case) -> None:
    """A18: a hunk that would fit elsewhere is not moved there."""
    patch = next(case.folder.glob("0001-*"))
    edit(patch, b"@@ -3,7 +3,8 @@", b"@@ -4,7 +4,8 @@")
    with pytest.raises(PatchsetError, match="fits at line 3, not at line 4") as caught:
        case.apply()
    assert caught.value.code is Exit.PATCH


def test_state_file_is_not_the_truth(case: Case) -> None:
    """A2: with the state lost or damaged, contents decide, and revert still works."""
    before = case.snapshot()
    case.apply()
    shutil.rmtree(case.root / ".sfa-cp-overlay")
    assert case.status()["state"] == "patched"
    assert case.revert().action == "reverted"
    assert same_but_for_row_order(case.snapshot(), before)
    case.apply()
    state = Store(case.target.state_dir).state_file
    state.write_bytes(state.read_bytes()[:50])
    assert case.status()["state"] == "patched"
    assert case.apply().action == "recorded"
    assert case.apply().action == "nothing"
    case.revert()
    assert same_but_for_row_order(case.snapshot(), before)


def same_but_for_row_order(now: dict, before: dict) -> bool:
    """Without the stored RECORD, the row of a file that a patch had removed comes back at the end."""

    def sorted_rows(files: dict) -> dict:
        return {k: sorted(v[0].splitlines()) if k.endswith("/RECORD") else v for k, v in files.items()}

    return sorted_rows(now) == sorted_rows(before)


def test_stamp_without_patches_is_pristine(case: Case, fake: Path) -> None:
    """A24: a reinstall drops the patches; status says so, and apply puts them in again."""
    case.apply()
    for path, data in FILES.items():
        (case.root / path).write_bytes(data)
    shutil.rmtree(case.root / "vllm/new")
    assert case.status()["state"] == "pristine"
    assert case.apply().action == "applied"
    assert case.status()["state"] == "patched"


def test_doctor_tells_patched_from_stock(case: Case) -> None:
    """A24: a stock vLLM, a patched one, and one whose patches a reinstall has dropped."""

    def examine() -> tuple[list[str], str]:
        problems: list[str] = []
        states = [entry["state"] for entry in doctor._patches(case.root, problems)]
        return states, "\n".join(problems)

    states, said = examine()
    assert not states
    assert "is not patched; run python apply.py" in said
    case.apply()
    assert examine() == (["applied"] * 3, "")
    for path, data in FILES.items():
        (case.root / path).write_bytes(data)
    states, said = examine()
    assert states == ["changed"] * 3
    assert "patched files have changed since (vllm/a.py" in said


@pytest.mark.parametrize("change", ["changed", "removed", "added"])
def test_patch_set_changed_after_apply(case: Case, change: str, fake: Path) -> None:
    """A6, A7: named by status; apply goes from the stored originals to the new set in one step."""
    before = case.snapshot()
    names = sorted(p.name for p in case.folder.glob("*.patch"))
    order = case.folder / "series"
    full = order.read_text()
    if change == "added":
        order.write_text("".join(f"{n}\n" for n in names[:2]))
        (case.folder / names[2]).rename(case.folder.parent / names[2])
    case.apply()
    if change == "added":
        (case.folder.parent / names[2]).rename(case.folder / names[2])
        order.write_text(full)
        touched = names[2]
    elif change == "removed":
        (case.folder / names[2]).unlink()
        order.write_text("".join(f"{n}\n" for n in names[:2]))
        touched = names[2]
    else:
        touched = names[0]
        edit(case.folder / touched, b"Because.", b"Because of this.")
    report = case.status()
    assert report["state"] == "patched"
    assert {p["name"]: p["state"] for p in report["patches"]}[touched] == (
        change if change != "changed" else "applied"
    )
    outcome = case.apply()
    assert outcome.action in ("reapplied", "nothing")
    assert case.inspect().current
    case.revert()
    assert case.snapshot() == before


def test_changed_hunk_is_reapplied(case: Case, fake: Path, tmp_path: Path) -> None:
    """A6: a patch whose change differs is named `changed`, and replaced from the originals."""
    from patchset import commits, manifest, pin

    before = case.snapshot()
    case.apply()
    checkout = tmp_path / "checkout"
    shutil.copytree(fake / "tree", checkout)
    edit(checkout / "vllm/b.py", b"return 3", b"return 4")
    commit_all(checkout, "One more")
    made = pin.load(case.patches, TAG)
    commits.refresh(checkout, made, manifest.load(made))
    assert case.status()["patches"][-1]["state"] == "added"
    assert case.cli().stderr.count("reapplied") == 1
    assert b"return 4" in (case.root / "vllm/b.py").read_bytes()
    case.revert()
    assert case.snapshot() == before


@pytest.mark.parametrize("path", ["vllm/a.py", "vllm/data.json"])
def test_dirty_target_is_refused(case: Case, path: str) -> None:
    """A11, A12, A14: an edit far from any hunk, or in an untouched file, makes the target foreign, and is
    named.
    """
    with (case.root / path).open("ab") as file:
        file.write(b"# mine\n")
    before = case.snapshot()
    done = case.cli()
    assert done.returncode == 5
    assert f"{path} (changed)" in done.stderr
    assert case.snapshot() == before
    assert case.status()["state"] == "foreign"


def test_edit_after_apply_is_refused_by_revert(case: Case) -> None:
    case.apply()
    with (case.root / "vllm/a.py").open("ab") as file:
        file.write(b"# mine\n")
    before = case.snapshot()
    done = case.cli("--revert")
    assert done.returncode == 5
    assert "vllm/a.py (changed)" in done.stderr
    assert case.snapshot() == before


def test_force_keeps_a_backup(tree: Case) -> None:
    """A11: --force sets the whole foreign tree aside and starts afresh."""
    (tree.root / "vllm/a.py").write_bytes(b"mine\n")
    done = tree.cli("--force", "--source", str(tree.upstream))
    assert done.returncode == 0, done.stderr
    assert (tree.root.with_name("tree.backup-1") / "vllm/a.py").read_bytes() == b"mine\n"
    assert tree.status()["state"] == "patched"


def test_force_is_for_trees(make: Callable[[str], Case]) -> None:
    """A11: an environment is not ours to set aside."""
    case = make("installed")
    (case.root / "vllm/a.py").write_bytes(b"mine\n")
    before = case.snapshot()
    done = case.cli("--force")
    assert done.returncode == 2
    assert "are for trees" in done.stderr
    assert case.snapshot() == before


@pytest.mark.parametrize("version", ["9.9.1", "9.9.0rc1", "9.9.1.dev3+gabc"])
def test_other_version_is_named(case: Case, version: str) -> None:
    """A13: what it is, and what is supported."""
    (case.root / "vllm/a.py").write_bytes(b"other\n")
    if case.kind == "tree":
        (case.root / "vllm/_version.py").write_text(f"__version__ = version = '{version}'\n")
    else:
        edit(next(case.root.glob("*.dist-info/METADATA")), b"9.9.0+cpu", version.encode())
    done = case.cli()
    assert done.returncode == 5
    assert f"is vLLM {version}" in done.stderr
    assert f"supported: {TAG}" in done.stderr


def test_unknown_version_is_a_usage_error(tree: Case) -> None:
    done = tree.cli("--vllm", "v1.2.3")
    assert done.returncode == 2
    assert f"supported: {TAG}" in done.stderr


def test_local_suffix_is_accepted(make: Callable[[str], Case]) -> None:
    """A13: 9.9.0+cpu with upstream's contents is 9.9.0."""
    case = make("installed")
    assert case.target.version == "9.9.0+cpu"
    assert case.apply().action == "applied"


def test_crlf_files_are_explained(case: Case) -> None:
    """A8: a checkout with autocrlf is named as that; a wheel has not seen git."""
    for name in ("a.py", "b.py"):
        path = case.root / "vllm" / name
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    done = case.cli()
    assert done.returncode == 5
    assert "CRLF line ends" in done.stderr
    assert ("core.autocrlf=false" if case.kind == "tree" else "hint: reinstall vLLM") in done.stderr


def test_not_a_tree(tree: Case) -> None:
    shutil.rmtree(tree.root / "vllm")
    done = tree.cli()
    assert done.returncode == 5
    assert "is not a vLLM tree" in done.stderr


@pytest.mark.parametrize("below", ["", "deeper/still"])
def test_a_file_is_no_target(tree: Case, tmp_path: Path, below: str) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for verb in (["--status"], ["--revert"], ["--dry-run"], ["--source", str(tree.upstream)]):
        done = tree.cli(*verb, "--dest", str(file / below))
        assert done.returncode == 5
        assert done.stderr.startswith(f"error: {file} is not a folder\nhint: ")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_missing_and_extra_files_are_named(case: Case) -> None:
    """A21: a file that is gone is `missing`; one too many is `extra` in a tree, and in an environment another
    distribution's.
    """
    (case.root / "vllm/b.py").unlink()
    (case.root / "vllm/more.py").write_bytes(b"")
    done = case.cli()
    assert done.returncode == 5
    assert "vllm/b.py (missing)" in done.stderr
    assert ("vllm/more.py (extra)" in done.stderr) == (case.kind == "tree")


def test_lock_names_its_owner(case: Case) -> None:
    """A16: a live owner is named; one that died leaves nothing in the way."""
    store = Store(case.target.state_dir)
    with lock.hold(store.lock, "x"):
        done = case.cli()
    assert done.returncode == 5
    assert f"pid {os.getpid()}" in done.stderr
    store.folder.mkdir()
    store.lock.write_text('{"pid": 1, "host": "h", "since": "s"}')
    assert case.apply().action == "applied"


def test_applies_at_once(case: Case) -> None:
    """A16: of several runs at once one does the work; the others find it done or name the owner."""
    running = [
        subprocess.Popen(case.arguments(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    results = [(child.communicate()[1], child.returncode) for child in running]
    assert {code for _, code in results} <= {0, 5}
    assert any(code == 0 for _, code in results)
    assert all("in use by another apply" in said for said, code in results if code == 5), results
    assert case.inspect().current
    assert not Store(case.target.state_dir).journal_file.exists()


def test_looked_at_while_another_run_works(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """A16: files read partly before and partly after another run's changes are no foreign tree."""
    scan, calls = manifest.scan, []

    def mixed(root: Path) -> dict[str, str]:
        calls.append(root)
        before = scan(root)
        if len(calls) > 1:
            return before
        assert case.cli().returncode == 0
        return {**before, "vllm/b.py": scan(root)["vllm/b.py"]}

    monkeypatch.setattr(manifest, "scan", mixed)
    found = case.inspect()
    assert (found.condition, found.current, len(calls)) == (Condition.PATCHED, True, 2)


def test_symlink_to_outside(case: Case, tmp_path: Path) -> None:
    """A17: neither a linked file nor a linked folder is written through."""
    outside = tmp_path / "outside.py"
    shutil.copy(case.root / "vllm/b.py", outside)
    (case.root / "vllm/b.py").unlink()
    (case.root / "vllm/b.py").symlink_to(outside)
    kept = outside.read_bytes()
    assert case.cli().returncode == 5
    assert outside.read_bytes() == kept
    (case.root / "vllm/b.py").unlink()
    shutil.copy(outside, case.root / "vllm/b.py")
    shutil.move(case.root / "vllm/sub", tmp_path / "sub")
    (case.root / "vllm/sub").symlink_to(tmp_path / "sub")
    assert case.cli().returncode == 5
    assert (tmp_path / "sub/crlf.txt").read_bytes() == FILES["vllm/sub/crlf.txt"]


def test_link_where_a_new_file_goes(case: Case, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (case.root / "vllm/new").symlink_to(tmp_path / "elsewhere")
    done = case.cli()
    assert done.returncode == 5
    assert "symbolic link" in done.stderr or "extra" in done.stderr
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 256 KiB; skips where one cannot be mounted."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=False)


def move(case: Case, to: Path) -> None:
    """Put a target elsewhere; an environment finds its packages there through a link."""
    shutil.move(case.root, to)
    if case.python:
        case.root.symlink_to(to)
    case.root = to


def test_read_only_file_system(case: Case, small: Path) -> None:
    """A15: said before anything is written."""
    move(case, small / "target")
    before = case.snapshot()
    subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
    done = case.cli()
    assert done.returncode == 5, done.stderr
    assert "cannot be written" in done.stderr
    assert "hint: " in done.stderr
    assert case.snapshot() == before
    assert case.status()["state"] == "pristine"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_folder_without_rights(case: Case) -> None:
    """A15: one folder that cannot be written is enough to write nowhere."""
    (case.root / "vllm/sub").chmod(0o555)
    before = case.snapshot(times=True)
    done = case.cli()
    after = case.snapshot(times=True)
    (case.root / "vllm/sub").chmod(0o755)
    assert done.returncode == 5
    assert "vllm/sub cannot be written" in done.stderr
    assert after == before


def test_full_disk(case: Case, small: Path) -> None:
    """A15: with any amount of space left, either the whole set goes in or nothing changes."""
    move(case, small / "target")
    whole = case.snapshot()
    filler = small / "filler"
    refused = 0
    for spare in range(0, 140, 8):
        free = os.statvfs(small)
        filler.write_bytes(bytes(max(0, free.f_bavail * free.f_frsize - spare * 1024)))
        done = case.cli()
        if done.returncode == 0:
            break
        assert done.returncode == 5, done.stderr
        assert "No space left" in done.stderr
        filler.unlink()
        assert case.snapshot() == whole
        refused += 1
    assert refused > 2
    assert case.inspect().current


def test_older_release_of_ours(case: Case) -> None:
    """A tree applied by an older release: other patches, other release number; brought up to date, then
    reverted.
    """
    before = case.snapshot()
    names = sorted(p.name for p in case.folder.glob("*.patch"))
    order = case.folder / "series"
    full = order.read_text()
    order.write_text(f"{names[0]}\n")
    for name in names[1:]:
        (case.folder / name).rename(case.folder.parent / name)
    release, engine.RELEASE = engine.RELEASE, "0.0.1"
    try:
        case.apply()
    finally:
        engine.RELEASE = release
    for name in names[1:]:
        (case.folder.parent / name).rename(case.folder / name)
    order.write_text(full)
    assert case.apply().action == "reapplied"
    case.revert()
    assert case.snapshot() == before


def test_newer_release_is_left_alone(case: Case) -> None:
    case.apply()
    state = Store(case.target.state_dir).state_file
    data = json.loads(state.read_text())
    state.write_text(json.dumps(data | {"format": 99}))
    before = case.snapshot()
    done = case.cli("--revert")
    assert done.returncode == 5
    assert "newer release" in done.stderr
    assert case.snapshot() == before


def test_modifications_list(tree: Case) -> None:
    """A26: every changed upstream file is listed, with how. The list is the patch set's, not a target's."""
    series, _ = tree.load()
    text = docs.modifications(series)
    assert "| `vllm/new/mod.py` | added | 0003 |" in text
    assert "| `vllm/gone.py` | removed | 0003 |" in text
    assert "| `vllm/a.py` | changed | 0001, 0002 |" in text


def test_absent(tree: Case) -> None:
    shutil.rmtree(tree.root)
    assert tree.status()["state"] == "absent"
    assert tree.cli("--revert").returncode == 0
    done = tree.cli("--dry-run", "--json")
    assert json.loads(done.stdout)["state"] == "absent"
    assert not tree.root.exists()
