"""Schema comparison between versions of torch-npu, without any network."""

from pathlib import Path

import pytest
from patchset import npu_contract
from patchset.npu_contract import arguments, differences

OLD = 'op(Tensor a, Tensor? b, *, int[2] c=[0, 1], str layout="B,S", float e=1e-5) -> (Tensor, Tensor)'


def test_arguments_keep_types_defaults_and_kinds() -> None:
    found = arguments(OLD)
    assert list(found) == ["a", "b", "c", "layout", "e"]
    assert found["c"] == npu_contract.Argument("int[2]", "[0, 1]", True)
    assert found["layout"].default == '"B,S"'
    assert not found["b"].keyword_only
    assert arguments("op() -> ()") == {}
    assert list(arguments("op(Tensor(a!) input, Tensor x) -> Tensor(a!)")) == ["input", "x"]


@pytest.mark.parametrize(
    ("new", "expected"),
    [
        (OLD, []),
        (OLD.replace("Tensor? b", "Tensor b"), ["argument b was Tensor?, is Tensor"]),
        (OLD.replace(", float e=1e-5", ""), ["argument e is gone"]),
        (OLD.replace("Tensor? b, ", ""), ["breaks: argument b is gone"]),
        (OLD.replace("e=1e-5", "e=1e-6"), ["default of e was 1e-5, is 1e-6"]),
        (OLD.replace("e=1e-5", "e=1e-5, int n=0"), ["new argument int n"]),
        (OLD.replace("*, ", "*, int n, "), ["breaks: new argument int n"]),
        (OLD.replace("int[2] c", "int c"), ["breaks: argument c was int[2], is int"]),
        (OLD.replace("(Tensor, Tensor)", "Tensor"), ["breaks: returned (Tensor, Tensor), returns Tensor"]),
        (OLD.replace("Tensor a, Tensor? b", "Tensor? b, Tensor a"), ["breaks: the positional arguments changed"]),
    ],
)  # fmt: skip
def test_differences_know_what_breaks_our_calls(new: str, expected: list[str]) -> None:
    assert differences(OLD, new, ("a", "b", "c")) == expected


def test_report_lists_versions_that_differ_or_are_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {
        npu_contract.PINNED: {"op": OLD},
        "1": {"op": OLD},
        "2": {},
        "3": {"op": OLD.replace("int[2] c", "int c")},
    }

    def wheel(version: str) -> Path:
        if version not in texts:
            raise npu_contract.Unavailable(f"torch-npu {version}: no such release")
        return Path(version)

    monkeypatch.setattr(npu_contract, "wheel", wheel)
    monkeypatch.setattr(npu_contract, "schemas", lambda path: texts[path.name])
    monkeypatch.setattr(npu_contract, "_sha256", lambda path: "0" * 64)
    report = npu_contract.compare_schemas(["1", "9"], {"op": ("a", "b", "c")})
    assert not report["breaking"]
    first, missing = report["versions"]  # type: ignore[misc]
    assert first["operators"] == {}
    assert missing["unavailable"] == "torch-npu 9: no such release"
    report = npu_contract.compare_schemas(["2", "3"], {"op": ("a", "b", "c")})
    assert report["breaking"]
    gone, changed = report["versions"]  # type: ignore[misc]
    assert gone["operators"]["op"] == {
        "present": False,
        "differences": ["breaks: the operator is not registered"],
    }
    assert changed["operators"]["op"]["differences"] == ["breaks: argument c was int[2], is int"]


def test_a_cached_wheel_that_is_damaged_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(npu_contract, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(npu_contract, "_TAGS", ("--no-index",))
    folder = tmp_path / "torch-npu" / npu_contract.PINNED
    folder.mkdir(parents=True)
    (folder / "damaged.whl").write_bytes(b"not a wheel")
    with pytest.raises(npu_contract.Unavailable, match=npu_contract.PINNED):
        npu_contract.wheel()
    assert not list(folder.glob("*.whl"))
