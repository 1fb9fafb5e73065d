"""The verb `compare` without engines: what it accepts, what it reports, and when it fails."""

import json
from pathlib import Path

import pytest
import torch
from vllm_sfa_cp import compare
from vllm_sfa_cp.cli import main
from vllm_sfa_cp.errors import UserError
from vllm_sfa_cp.rank_compare import Answer

GOLDEN = Path(__file__).parents[1] / "golden/base"


@pytest.mark.parametrize(
    ("text", "ranks", "config"),
    [
        ("off@1", 1, {}),
        ("flashcomm1@2", 2, {"enable_flashcomm1": True}),
        ('{"sfa_cp": {"ops": "reference"}}@4', 4, {"sfa_cp": {"ops": "reference"}}),
    ],
)
def test_sides(text, ranks, config):
    side = compare.parse_side(text)
    assert (side.ranks, side.additional_config) == (ranks, config)


@pytest.mark.parametrize(
    ("text", "weights", "partition"),
    [
        ("sfa-cp@2", "gather", "balanced"),
        ("sfa-cp/broadcast@2", "broadcast", "balanced"),
        ("sfa-cp/contiguous/replicate@2", "replicate", "contiguous"),
    ],
)
def test_sides_of_sfa_cp(text, weights, partition):
    config = compare.parse_side(text).additional_config
    assert config["enable_sfa_cp"]
    assert config["enable_flashcomm1"]
    assert config["sfa_cp"] == {"weights": weights, "partition": partition, "cp_min_tokens": 0}


@pytest.mark.parametrize(
    "text", ["off", "off@", "off@0", "off@two", "on@2", "off/gather@2", "sfa-cp/gather/broadcast@2", "{@2"]
)
def test_what_is_not_a_side(text):
    with pytest.raises(UserError) as err:
        compare.parse_side(text)
    assert err.value.exit_code == 2
    assert "sfa-cp/gather/balanced@4" in err.value.hint


def answer(tokens, scale=0.0, layers=(0.0, 0.0)):
    logits = torch.arange(1.0, 13.0).view(3, 4)
    return Answer(list(tokens), logits + scale, [torch.ones(5, 2) * (1 + far) for far in layers])


def test_equal_answers():
    found = compare.compare(answer("abc"), answer("abc"), 5, "float32", 2e-4)
    assert found["within"]
    assert (found["parted"], found["tokens"], found["first_layer"], found["error"]) == (None, 3, None, None)
    assert found["logits"] == {"absolute": 0.0, "relative": 0.0, "relative_l2": 0.0}


def test_the_tolerance_is_absolute_in_float32_and_relative_in_bfloat16():
    far, near = answer("abc", 0.25), answer("abc")
    assert not compare.compare(far, near, 5, "float32", 0.2)["within"]
    assert compare.compare(far, near, 5, "float32", 0.3)["within"]
    assert compare.compare(far, near, 5, "bfloat16", 0.05)["within"]
    assert not compare.compare(far, near, 5, "bfloat16", 0.01)["within"]


def test_where_tokens_part_and_which_layer_is_first():
    found = compare.compare(answer("axc", layers=(0.0, 0.5)), answer("abd"), 5, "float32", 2e-4)
    assert (found["parted"], found["tokens"], found["first_layer"]) == (1, 2, 1)
    assert not found["within"]  # although the logits agree


def test_nan_is_an_error_and_not_a_number():
    broken = answer("abc")
    broken.logits[1, 1] = torch.nan
    found = compare.compare(broken, answer("abc"), 5, "float32", 2e-4)
    assert not found["within"]
    assert "NaN" in found["error"]
    report = {
        "a": "x@1",
        "b": "y@1",
        "dtype": "float32",
        "tolerance": 1.0,
        "within": False,
        "prompts": [found],
    }
    assert "NaN" in compare.table(report)
    json.dumps(report)


def run_with(monkeypatch, capsys, sides, *more):
    """Exit code, stdout and stderr of the verb over answers that are given."""
    monkeypatch.setattr(compare, "_answers", lambda *_: sides)
    monkeypatch.setattr(compare, "_prompts", lambda *_: [[1, 2, 3, 4, 5]])
    code = main(["compare", "sfa-cp@2", "off@1", "--model", str(GOLDEN), *more])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_exit_codes_and_json(monkeypatch, capsys):
    near, far = [answer("abc")], [answer("abc", 1.0)]
    code, out, _ = run_with(monkeypatch, capsys, [near, near])
    assert code == 0
    assert "sfa-cp@2 and off@1 agree" in out
    code, out, err = run_with(monkeypatch, capsys, [far, near], "--json")
    assert code == 1
    report = json.loads(out)
    assert not report["within"]
    assert report["prompts"][0]["logits"]["absolute"] == 1.0
    assert "sfa-cp@2 and off@1 part" in err
    assert run_with(monkeypatch, capsys, [far, near], "--tolerance", "2")[0] == 0


@pytest.mark.parametrize(
    "text", ["", "[]", "[[]]", "[[1, 512]]", '[["a"]]', "[[true]]", '{"a": [1]}', "[[1], 2]"]
)
def test_prompts_that_are_none(tmp_path, text):
    path = tmp_path / "prompts.json"
    path.write_text(text)
    with pytest.raises(UserError) as err:
        compare.read_prompts(path, str(tmp_path), 512)
    assert err.value.exit_code == 2


def test_prompts_of_a_file(tmp_path):
    path = tmp_path / "prompts.json"
    path.write_text("[[1, 2], [511]]")
    assert compare.read_prompts(path, str(tmp_path), 512) == [[1, 2], [511]]
    with pytest.raises(UserError, match="cannot read"):
        compare.read_prompts(tmp_path / "none", str(tmp_path), 512)
