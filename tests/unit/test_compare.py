"""The verb `compare` without engines: what it accepts, what it reports, and when it fails."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from vllm_sfa_cp import compare, compare_report
from vllm_sfa_cp.cli import main
from vllm_sfa_cp.errors import UserError
from vllm_sfa_cp.rank_compare import Answer
from vllm_sfa_cp.tiny_tokenizer import write_tokenizer

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


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ('{"sfa_cp": {"weights": "borrow"}}', '"weights" must be one of replicate, broadcast, gather'),
        ('{"enable_sfa_cp": true}', '"enable_flashcomm1": true'),
        ('{"enable_sfa_pc": true}', 'did you mean "enable_sfa_cp"'),
    ],
)
def test_settings_are_checked_before_an_engine_starts(config, message):
    with pytest.raises(UserError, match=message) as err:
        compare.parse_side(config + "@2")
    assert err.value.exit_code == 2


def test_importing_the_verb_imports_nothing_heavy():
    code = "import sys, vllm_sfa_cp.compare; print({'torch', 'vllm', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def answer(*tokens, scale=0.0, layers=(0.0, 0.0)):
    logits = torch.arange(1.0, 13.0).view(3, 4)
    return Answer(list(tokens), logits + scale, [torch.ones(5, 2) * (1 + far) for far in layers])


def compared(a, b, dtype="float32", tolerance=2e-4):
    return compare_report.compare(a, b, 5, dtype, tolerance)


SAME = {"absolute": 0.0, "relative": 0.0, "relative_l2": 0.0, "error": None}


def test_equal_answers():
    found = compared(answer(0, 1, 2), answer(0, 1, 2))
    assert found == {
        "length": 5,
        "tokens": 3,
        "parted": None,
        "margin": None,
        "prefill": SAME,
        "logits": SAME,
        "layers": [SAME, SAME],
        "first_layer": None,
        "error": None,
        "within": True,
    }


def test_the_tolerance_is_absolute_in_float32_and_relative_in_bfloat16():
    far, near = answer(0, 1, 2, scale=0.25), answer(0, 1, 2)
    assert not compared(far, near, tolerance=0.2)["within"]
    assert compared(far, near, tolerance=0.3)["within"]
    assert compared(far, near, "bfloat16", 0.05)["within"]
    assert not compared(far, near, "bfloat16", 0.01)["within"]


def test_where_tokens_part_by_how_much_and_which_layer_is_first():
    found = compared(answer(0, 3, 2, layers=(0.0, 0.5)), answer(0, 1, 3))
    assert (found["parted"], found["tokens"], found["first_layer"]) == (1, 2, 1)
    assert found["margin"] == -2.0  # logits of tokens 1 and 3 at position 1 are 6 and 8
    assert not found["within"]  # although the logits agree


def test_logits_after_the_parting_answer_another_text():
    far = answer(0, 3, 2)
    far.logits[2] += 100
    assert compared(far, answer(0, 1, 2))["logits"]["absolute"] == 0.0


def test_the_prefill_has_figures_of_its_own():
    far = answer(0, 1, 2)
    far.logits[0, 0] += 0.5
    far.logits[2, 0] += 2
    found = compared(far, answer(0, 1, 2))
    assert (found["prefill"]["absolute"], found["prefill"]["relative"]) == (0.5, 0.5)
    assert found["logits"]["absolute"] == 2.0


def test_nan_is_an_error_and_the_layer_it_comes_from_is_named():
    broken = answer(0, 1, 2)
    broken.logits[1, 1] = torch.nan
    broken.layers[1][4, 1] = torch.nan
    found = compared(broken, answer(0, 1, 2), tolerance=1e9)
    assert not found["within"]
    assert found["first_layer"] == 1
    assert found["error"] == "NaN in 1 and 0 of 12 elements"
    report = {"a": "x@1", "b": "y@1", "dtype": "float32", "tolerance": 1.0, "within": False}
    text = compare_report.table({**report, "prompts": [found]})
    assert "NaN in 1 and 0 of 12 elements" in text
    assert "NaN in 1 and 0 of 10 elements" in text


def test_table():
    a, b = answer(0, 1, 2, scale=0.5, layers=(0.0, 0.5)), answer(0, 1, 2)
    report = {"a": "x@1", "b": "y@2", "dtype": "float32", "tolerance": 2e-4, "within": False}
    lines = compare_report.table({**report, "prompts": [compared(a, b), compared(b, b)]}).splitlines()
    assert [line.split() for line in lines[1:3]] == [
        ["5", "tokens", "3", "equal", "5.0e-01", "5.0e-01", "5.0e-01", "6.8e-02", "1", "past", "tolerance"],
        ["5", "tokens", "3", "equal", "0.0e+00", "0.0e+00", "0.0e+00", "0.0e+00", "none", "within"],
    ]
    assert lines[6].split() == ["0", "0.0e+00", "0.0e+00", "0.0e+00"]
    assert lines[7].split() == ["1", "5.0e-01", "5.0e-01", "5.0e-01", "first", "past", "tolerance"]
    assert lines[-1] == "x@1 and y@2 part (0.0002 absolute)"


def run_with(monkeypatch, capsys, sides, *more):
    """Exit code, stdout and stderr of the verb over answers that are given."""
    monkeypatch.setattr(compare, "_answers", lambda *_: sides)
    code = main(["compare", "sfa-cp@2", "off@1", "--model", str(GOLDEN), "--prompt-lengths", "5", *more])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_exit_codes_and_json(monkeypatch, capsys):
    near, far = [answer(0, 1, 2)], [answer(0, 1, 2, scale=1.0)]
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


def test_json_is_json_where_figures_are_infinite(monkeypatch, capsys):
    zero = answer(0, 1, 2)
    zero.logits[0, 0] = 0
    code, out, _ = run_with(monkeypatch, capsys, [[answer(0, 1, 2)], [zero]], "--json")

    def refuse(constant):
        raise AssertionError(constant)

    report = json.loads(out, parse_constant=refuse)
    assert code == 1
    assert report["prompts"][0]["logits"] == {
        "absolute": 1.0,
        "relative": None,
        "relative_l2": pytest.approx(1 / (650 - 1) ** 0.5),
        "error": None,
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tolerance", "nan"], "nan is not a tolerance"),
        (["--tolerance", "-1"], "-1 is not a tolerance"),
        (["--max-tokens", "0"], "is not a whole number from 1"),
        (["--prompt-lengths", "1,x"], "is not a whole number from 1"),
        (["--prompts", "p.json"], "not allowed with argument"),
        (["--prompt-lengths", "4090"], "4098 positions, and the model has 4096"),
    ],
)
def test_usage_errors(monkeypatch, capsys, options, message):
    code, out, err = run_with(monkeypatch, capsys, None, *options)
    assert (code, out) == (2, "")
    assert message in err.splitlines()[0]


def test_ranks_that_the_heads_do_not_divide_over(capsys):
    assert main(["compare", "sfa-cp@2", "off@3", "--model", str(GOLDEN)]) == 2
    assert "off@3: 8 heads do not divide over 3 ranks" in capsys.readouterr().err


def test_two_checkpoints_must_be_of_one_model(capsys, tmp_path):
    config = json.loads((GOLDEN / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 9, "vocab_size": 7}))
    arguments = ["compare", "off@1", "off@2", "--model", str(GOLDEN), "--model-b"]
    assert main([*arguments, str(tmp_path)]) == 2
    assert "differ in num_hidden_layers, vocab_size" in capsys.readouterr().err
    assert main([*arguments, str(tmp_path / "none")]) == 2


@pytest.mark.parametrize("topk", [1, 32, 2048])
def test_default_prompts_lie_on_both_sides_of_a_selection(monkeypatch, tmp_path, topk):
    config = {**json.loads((GOLDEN / "config.json").read_text()), "index_topk": topk}
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = []

    def record(args, sides, folders, prompts):
        asked.append(prompts)
        return [[answer(0, 1, 2)] * len(prompts)] * 2

    monkeypatch.setattr(compare, "_answers", record)
    for _ in range(2):
        assert main(["compare", "sfa-cp@2", "off@1", "--model", str(tmp_path)]) == 0
    one, below, above = map(len, asked[0])
    assert (one, above % 2) == (1, 1)
    assert below <= topk < above
    assert asked[0] == asked[1]


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


def test_prompts_of_text(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("one prompt\n\nanother\n")
    with pytest.raises(UserError, match="no tokenizer"):
        compare.read_prompts(path, str(GOLDEN), 512)
    write_tokenizer(tmp_path, 512, 4096)
    (tmp_path / "config.json").write_text((GOLDEN / "config.json").read_text())
    first, second = compare.read_prompts(path, str(tmp_path), 512)
    assert len(first) > len(second) > 0
