"""The drift check on a small fake upstream: every class of patch and symbol, as the edits were made."""

import difflib
import importlib.util
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from patchset import diff, drift, fit, git, relied, report, snapshot
from patchset.blob import blob_id
from patchset.errors import PatchsetError
from patchset.fingerprint import digest
from patchset.modules import Code
from patchset.pin import Pin
from patchset.series import Series, read_patch

ROOT = Path(__file__).resolve().parents[2]
LINES = [f"line_{i} = {i}\n" for i in range(60)]
PATCHED = [*LINES[:20], "line_20 = 'ours'\n", *LINES[21:41], "added = True\n", *LINES[41:]]
# (first context line, first changed line, end of the changed lines, end of the context) of each hunk
HUNKS = ((17, 20, 21, 24), (38, 41, 41, 44))


def patch_text(path: str, old: str, new: str, status: str = "Pending", subject: str = "Change it") -> bytes:
    """A patch file in our form."""
    body = "".join(difflib.unified_diff(old.splitlines(True), new.splitlines(True), f"a/{path}", f"b/{path}"))
    index = f"index {blob_id(old.encode())}..{blob_id(new.encode())} 100644"
    return (
        f"From {'0' * 40} Mon Sep 17 00:00:00 2001\nFrom: A <a@example.org>\n"
        f"Date: Tue, 1 Dec 2026 06:00:00 +0000\nSubject: [PATCH] {subject}\n\nBecause.\n\n"
        f"Upstream-Status: {status}\nRemove-when: upstream does it\n\ndiff --git a/{path} b/{path}\n{index}\n{body}"
    ).encode()


def series_of(*texts: bytes) -> Series:
    """A series whose patches are named 0001-p.patch and so on."""
    patches = []
    for number, text in enumerate(texts, 1):
        patch, problems = read_patch(f"{number:04d}-p.patch", text)
        assert not problems
        patches.append(patch)
    pin = Pin(Path("v1.0.0"), "v1.0.0", "1.0.0", "0" * 40, "", "vllm", "", "", "", "")
    return Series(pin, tuple(patches))


def classify(
    now: dict[str, str], *texts: bytes, base: dict[str, str], version: str = "2.0.0"
) -> list[fit.Result]:
    """How the patches fit the files of `now`."""
    files, measure = ({k: v.encode() for k, v in f.items()} for f in (now, base))
    return list(fit.classify(series_of(*texts), measure, Code(files), version)[0].values())


def one(now: list[str]) -> fit.Result:
    """How the two-hunk patch fits the file with these lines."""
    text = patch_text("vllm/a.py", "".join(LINES), "".join(PATCHED))
    return classify({"vllm/a.py": "".join(now)}, text, base={"vllm/a.py": "".join(LINES)})[0]


def expected(kind: str, at: int, count: int) -> tuple[str, int, int]:
    """(class, context lines ignored, number of the hunk in conflict) of one edit, from where it was made."""
    lines = 0
    for number, (start, first, end, stop) in enumerate(HUNKS, 1):
        if kind == "insert":  # before line `at`
            if start < at < stop:
                depth = at - start if at <= first else stop - at if at >= end else fit.FUZZ + 1
                lines, broken = depth, depth > fit.FUZZ
                if broken:
                    return "conflict", 0, number
        elif start <= at < stop:
            depth = at - start + 1 if at < first else stop - at if at >= end else fit.FUZZ + 1
            if depth > fit.FUZZ:
                return "conflict", 0, number
            lines = depth
    shifts = kind != "replace" and at < HUNKS[1][2]
    return ("fuzzy" if lines or shifts else "clean"), lines, 0


@settings(max_examples=150, deadline=None)
@given(kind=st.sampled_from(["replace", "insert", "delete"]), at=st.integers(0, 59), count=st.integers(1, 5))
def test_one_edit_of_the_file_is_classified_by_where_it_was_made(kind: str, at: int, count: int) -> None:
    now = list(LINES)
    new = [f"other_{i} = {i}\n" for i in range(count)]
    now[at : at + (kind != "insert")] = {"replace": new[:1], "insert": new, "delete": []}[kind]
    result = one(now)
    wanted, lines, hunk = expected(kind, at, count)
    assert (str(result.fit), kind, at) == (wanted, kind, at)
    if wanted == "fuzzy":
        assert result.detail.endswith(f"{lines} lines")
    if wanted == "conflict":
        assert f"hunk {hunk} " in result.detail
        assert result.shown.count("hunk") == 1
        if kind == "replace":
            assert "+other_0 = 0" in result.shown


@settings(max_examples=60, deadline=None)
@given(before=st.integers(-3, 6), between=st.integers(-3, 6), at=st.integers(4, 17), then=st.integers(24, 34))
def test_offsets_are_named(before: int, between: int, at: int, then: int) -> None:
    now = list(LINES)
    for where, count in ((then, between), (at, before)):
        if count < 0:
            del now[where + count : where]
        else:
            now[where:where] = [f"x_{where}_{i} = 0\n" for i in range(count)]
    if then + min(between, 0) < 24:
        return  # the edit reached into a hunk
    low, high = sorted((before, before + between))
    result = one(now)
    assert str(result.fit) == ("clean" if low == high == 0 else "fuzzy")
    if result.fit is fit.Fit.FUZZY:
        assert f"offset {low if low == high else f'{low} to {high}'}, 0 lines" in result.detail


def test_a_fuzzy_place_must_be_the_only_one() -> None:
    hunk = one([*LINES[:17], "x = 0\n", *LINES[18:], *LINES[18:24]])
    assert hunk.fit is fit.Fit.CONFLICT


def test_already_upstream_by_lines_by_statements_and_by_header() -> None:
    old = "def f(a):\n    if a.one():\n        return 1\n    return 2\n"
    new = "def f(a):\n    if a.one() or a.two():  # ours\n        return 1\n    return 2\n"
    same = (
        "def f(a):\n    if (\n        a.one()\n        or a.two()\n    ):\n        # theirs\n"
        "        return 1\n    return 2\n"
    )
    gone = "def f(a):\n    return g(a)\n"
    text = patch_text("vllm/a.py", old, new, "Backport [1.5.0]")
    base = {"vllm/a.py": old}

    def state(now: str, version: str = "2.0.0") -> tuple[str, str]:
        result = classify({"vllm/a.py": now}, text, base=base, version=version)[0]
        return str(result.fit), result.detail

    assert state(new) == ("already upstream", "the same lines")
    assert state(same) == ("already upstream", "the same statements")
    assert state(gone)[0] == "already upstream"
    assert "by its header" in state(gone)[1]
    assert state(gone, "1.4.0")[0] == "conflict"  # before the release that the header names
    assert state(old)[0] == "clean"  # the header is not believed where the old code stands


def test_a_file_that_moved_or_is_gone_is_no_conflict() -> None:
    base = {"vllm/a.py": "".join(LINES)}
    text = patch_text("vllm/a.py", "".join(LINES), "".join(PATCHED))
    moved = classify({"vllm/b/c.py": "".join(LINES), "vllm/a/b.py": "x = 1\n"}, text, base=base)[0]
    assert (str(moved.fit), moved.detail) == ("file gone", "vllm/a.py is gone")  # another name, no definition
    moved = classify({"vllm/b/a.py": "".join(LINES)}, text, base=base)[0]
    assert (str(moved.fit), moved.detail) == ("file moved", "vllm/a.py is now vllm/b/a.py, there clean")
    old, new = "class Some:\n    value = 1\n", "class Some:\n    value = 2\n"
    text = patch_text("vllm/a.py", old, new)
    moved = classify({"vllm/z.py": f"import os\n{old}"}, text, base={"vllm/a.py": old})[0]
    assert (str(moved.fit), moved.detail.split(", ")[0]) == ("file moved", "vllm/a.py is now vllm/z.py")


def test_stacked_patches_go_in_as_a_series() -> None:
    second = "".join(PATCHED).replace("'ours'", "'ours, twice'")
    texts = (
        patch_text("vllm/a.py", "".join(LINES), "".join(PATCHED)),
        patch_text("vllm/a.py", "".join(PATCHED), second),
    )
    base = {"vllm/a.py": "".join(LINES)}
    assert [str(r.fit) for r in classify(base, *texts, base=base)] == ["clean", "clean"]
    now = {"vllm/a.py": "".join(PATCHED)}
    assert [str(r.fit) for r in classify(now, *texts, base=base)] == ["already upstream", "clean"]


NAMES = [f"f{i}" for i in range(5)]
EDITS = {
    "none": drift.SAME,
    "comment": drift.SAME,
    "body": drift.BODY,
    "signature": drift.SIGNATURE,
    "rename": drift.GONE,
    "move": drift.MOVED,
}


def function(name: str, edit: str = "none") -> str:
    """A function as it reads after an edit."""
    arguments = "a, b, c=1" if edit == "signature" else "a, b"
    doc = '    """Says what it does."""\n    # and why\n' if edit == "comment" else ""
    value = "a - b" if edit == "body" else "a + b"
    shown = f"{name}_renamed" if edit == "rename" else name
    return f"def {shown}({arguments}):\n{doc}    return {value}\n\n\n"


@settings(max_examples=80, deadline=None)
@given(edits=st.tuples(*[st.sampled_from(sorted(EDITS))] * len(NAMES)), order=st.permutations(NAMES))
def test_edits_of_symbols_are_classified_as_they_were_made(edits: tuple[str, ...], order: list[str]) -> None:
    edit = dict(zip(NAMES, edits))
    base = Code({"vllm/m.py": "".join(map(function, NAMES)).encode()})
    stay = "".join(function(n, edit[n]) for n in order if edit[n] != "move")
    gone = "".join(function(n) for n in order if edit[n] == "move")
    code = Code({"vllm/m.py": stay.encode(), "vllm/other.py": gone.encode()})
    for name in NAMES:
        cell = drift.compare(relied.Need(f"vllm.m:{name}", {"declared"}), base, code)
        assert (name, cell.state) == (name, EDITS[edit[name]])
        assert bool(cell.diff) == (cell.state in (drift.BODY, drift.SIGNATURE))


def test_an_import_may_follow_a_reexport_and_a_monkey_patch_may_not() -> None:
    base = Code({"vllm/m.py": function("f").encode()})
    code = Code({"vllm/m.py": b"from .n import *\n", "vllm/n.py": function("f").encode()})
    imported = drift.compare(relied.Need("vllm.m:f", {"imported"}), base, code)
    patched = drift.compare(relied.Need("vllm.m:f", {"monkey patch"}), base, code)
    assert imported.state == drift.SAME
    assert (patched.state, patched.detail) == (drift.MOVED, "to vllm.n:f")


UPSTREAM = {
    "vllm/__init__.py": "",
    "vllm/config/__init__.py": "from .main import Config, Part\n",
    "vllm/config/main.py": """\
from dataclasses import dataclass


@dataclass
class Part:
    size: int = 1
    name: str | None = None


@dataclass
class Config:
    part: Part
    depth: int = 0
""",
    "vllm/work.py": """\
from vllm.config import Config


class Worker:
    def __init__(self, config: Config):
        self.config = config
        self.rank = 0

    def start(self, level: int = 1) -> None:
        print(level)

    def stop(self):
        print(0)


def make(config: Config, *, rank: int) -> Worker:
    return Worker(config)
""",
}
OVERLAY = {
    "ours/__init__.py": "",
    "ours/relies_on.toml": """\
[names]
loose = "vllm.config:Config"

[symbols]
"vllm.work:Worker.stop" = "by name"
""",
    "ours/patching.py": """\
PATCHES = (P(target="vllm.work:make", fingerprint="FP", reason="so"),)
""",
    "ours/worker.py": """\
from vllm.work import Worker, make


class Ours(Worker):
    def start(self, level=1):
        super().start(level)
        print(self.config.part.size, self.rank, self.missing)


def main(loose, other):
    part = loose.part
    print(part.name, other.unknown)
    make(loose, rank=1)
""",
}


def encoded(files: dict[str, str]) -> dict[str, bytes]:
    """The fake files as bytes, with the fingerprint of the patched function filled in."""
    made = Code({k: v.encode() for k, v in UPSTREAM.items()}).resolve("vllm.work", "make")
    assert made is not None
    return {k: v.replace("FP", digest(made.node)).encode() for k, v in files.items()}


def test_needs_are_collected_from_the_overlays_source() -> None:
    needs, unseen = relied.collect(encoded(OVERLAY), encoded(UPSTREAM), "ours")
    kinds = {n.target: n.kind for n in needs}
    assert kinds == {
        "vllm.work:make": "monkey patch",
        "vllm.work:Worker.start": "overridden",
        "vllm.work:Worker.stop": "declared",
        "vllm.work:Worker": "subclassed",
        "vllm.config.main:Config.part": "attribute",
        "vllm.config.main:Part.name": "attribute",
        "vllm.config.main:Part.size": "attribute",
        "vllm.work:Worker.config": "attribute",
        "vllm.work:Worker.rank": "attribute",
    }
    by_name = {n.target: n for n in needs}
    assert by_name["vllm.work:make"].calls == {relied.Call(1, ("rank",))}
    assert by_name["vllm.work:Worker.start"].calls == {relied.Call(1, ())}
    assert unseen == ["ours/worker.py:7 self.missing"]


def examined(files: dict[str, str], overlay: dict[str, str] = OVERLAY) -> dict[str, drift.Cell]:
    """The cells of version 2.0.0 with `files` laid over the fake upstream."""
    trees = {"1.0.0": encoded(UPSTREAM), "2.0.0": encoded({**UPSTREAM, **files})}
    found = drift.examine(series_of(), encoded(overlay), ["2.0.0"], trees.__getitem__, "ours")
    return {name.removeprefix("symbol:"): cells["2.0.0"] for name, cells in found.cells.items()}


def test_config_attributes_and_calls_drift_by_their_interface() -> None:
    main, work = UPSTREAM["vllm/config/main.py"], UPSTREAM["vllm/work.py"]
    assert {c.state for c in examined({}).values()} == {drift.SAME}
    cells = examined(
        {
            "vllm/config/main.py": main.replace("size: int = 1", "size: int = 2").replace(
                "name: str | None", "name: str"
            ),
            "vllm/work.py": work.replace("*, rank: int)", "*, rank: int, size: int)").replace(
                "level: int", "depth: int"
            ),
        }
    )
    assert (cells["vllm.config.main:Part.size"].state, cells["vllm.config.main:Part.size"].detail) == (
        drift.BODY,
        "default 1 -> 2",
    )
    assert cells["vllm.config.main:Part.name"].state == drift.SIGNATURE
    assert cells["vllm.work:make"].state == drift.SIGNATURE
    assert "our call breaks: wants size, which we do not pass" in cells["vllm.work:make"].detail
    assert "our calls still fit" in cells["vllm.work:Worker.start"].detail
    assert cells["vllm.work:Worker.stop"].state == drift.SAME
    cells = examined({"vllm/config/main.py": main.replace("    part: Part\n", "")})
    assert cells["vllm.config.main:Config.part"].state == drift.GONE


def test_members_follow_a_class_that_moved() -> None:
    cells = examined(
        {"vllm/work.py": "from vllm.config import Config\n", "vllm/job.py": UPSTREAM["vllm/work.py"]}
    )
    assert cells["vllm.work:Worker"].detail == "to vllm.job:Worker"
    assert cells["vllm.work:Worker.start"].state == drift.SAME
    assert cells["vllm.work:make"].state == drift.MOVED


@pytest.mark.parametrize(
    ("name", "old", "new", "says"),
    [
        ("patching.py", "FP", "0", "has fingerprint"),
        ("patching.py", "vllm.work:make", "vllm.work:made", "has no such symbol"),
        ("relies_on.toml", "Worker.stop", "Worker.halt", "has no such symbol"),
        ("relies_on.toml", "vllm.config:Config", "vllm.config:Nothing", "is no class"),
    ],
)
def test_a_wrong_declaration_is_an_error_at_the_pinned_version(
    name: str, old: str, new: str, says: str
) -> None:
    wrong = {**OVERLAY, f"ours/{name}": OVERLAY[f"ours/{name}"].replace(old, new)}
    with pytest.raises(PatchsetError, match=says):
        examined({}, wrong)


def test_torch_npu_drift_counts_and_is_said() -> None:
    found = drift.Report("1.0.0", [], [])
    operators = {"npu_x": {"present": True, "differences": ["breaks: argument q is gone"]}}
    found.torch_npu = {"versions": [{"version": "9.9", "unavailable": None, "operators": operators}]}
    assert found.new({}) == {"torch-npu 9.9": {"torch-npu:npu_x": "breaks"}}
    assert found.new({"torch-npu 9.9": {"torch-npu:npu_x": "breaks"}}) == {}
    assert "npu_x: breaks: argument q is gone" in report.text(found, {}, 100)


def test_sdists_and_tags_read_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tree = tmp_path / "vllm-1.0.0"
    for path, data in encoded(UPSTREAM).items():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_bytes(data)
    (tree / "setup.py").write_text("")
    with tarfile.open(tmp_path / "vllm-1.1.0.tar.gz", "w:gz") as tar:
        tar.add(tree, "vllm-1.1.0")
    one, two = (snapshot.load(v, str(tmp_path), "vllm", "") for v in ("1.0.0", "1.1.0"))
    assert dict(one) == dict(two) == encoded(UPSTREAM)
    who = ("-c", "user.name=A", "-c", "user.email=a@example.org")
    for command in (("init", "-q"), ("add", "-A"), (*who, "commit", "-qm", "all"), ("tag", "v1.3.0")):
        git.run(tree, *command)
    assert dict(snapshot.load("1.3.0", str(tree), "vllm", "")) == dict(one)
    assert dict(snapshot.load("1.3.0", "git", "vllm", tree.as_uri())) == dict(one)
    assert dict(snapshot.load("1.3.0", "git", "vllm", "nowhere")) == dict(one)  # cached
    with pytest.raises(snapshot.Unavailable, match=r"has no tag v1\.4\.0"):
        snapshot.load("1.4.0", str(tree), "vllm", "")
    with pytest.raises(snapshot.Unavailable, match="cannot clone"):
        snapshot.load("1.4.0", "git", "vllm", tree.as_uri())
    (tmp_path / "vllm-1.2.0.tar.gz").write_bytes((tmp_path / "vllm-1.1.0.tar.gz").read_bytes()[:150])
    with pytest.raises(snapshot.Unavailable, match="is damaged"):
        snapshot.load("1.2.0", str(tmp_path), "vllm", "")


def test_what_the_overlay_declares_exists_in_the_installed_vllm() -> None:
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("no vLLM installed")
    files = snapshot.FolderFiles(Path(spec.origin).parents[1])
    overlay = snapshot.FolderFiles(ROOT / "overlay", "vllm_sfa_cp/")
    needs, unseen = relied.collect(overlay, files, "vllm_sfa_cp")
    code = Code(files)
    lost = [n.target for n in needs if code.resolve(*n.target.split(":")) is None]
    assert not lost
    assert not unseen
    targets = {n.target for n in needs}
    assert "vllm.config.parallel:ParallelConfig.tensor_parallel_size" in targets
    assert "vllm.v1.worker.cpu_worker:CPUWorker.init_device" in targets
    for need in needs:
        if need.fingerprint:
            found = code.own(*need.target.split(":"))
            assert found is not None
            assert digest(found.node) == need.fingerprint


def test_hunks_of_the_fixture_are_where_the_oracle_thinks() -> None:
    patch, _ = read_patch("0001-p.patch", patch_text("vllm/a.py", "".join(LINES), "".join(PATCHED)))
    spans = [(h.old_at, h.old_at + len(h.old)) for h in patch.files[0].hunks]
    assert spans == [(start, stop) for start, _, _, stop in HUNKS]
    assert diff.apply("".join(LINES).encode(), patch.files[0]) == "".join(PATCHED).encode()
