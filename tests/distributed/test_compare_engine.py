"""`vllm-sfa-cp compare` over real engines."""

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file
from vllm_sfa_cp.cli import main

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def compare(capsys, *arguments) -> tuple[int, dict]:
    code = main(["compare", *arguments, "--layers", "--max-tokens", "4", "--json"])
    out = capsys.readouterr()
    print(out.err)
    return code, json.loads(out.out)


def test_configurations_agree_layer_by_layer(golden, capsys):
    arguments = ["sfa-cp/balanced@2", "off@1", "--model", golden.model, "--prompt-lengths", "1,3,131"]
    code, report = compare(capsys, *arguments)
    assert code == 0
    assert [p["length"] for p in report["prompts"]] == [1, 3, 131]
    for found in report["prompts"]:
        assert found["parted"] is None
        assert found["logits"]["absolute"] < 2e-4
        assert len(found["layers"]) == 4
        assert max(layer["relative_l2"] for layer in found["layers"]) < 1e-5
        assert found["prefill"]["absolute"] <= found["logits"]["absolute"]
    assert any(layer["absolute"] for layer in report["prompts"][2]["layers"])  # they are different sums


def test_it_names_the_layer_that_is_wrong(golden, capsys, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(golden.model, broken)
    tensors = load_file(broken / "model.safetensors")
    tensors["model.layers.2.self_attn.o_proj.weight"] *= 1.1
    save_file(tensors, broken / "model.safetensors")
    arguments = ["flashcomm1@2", "off@2", "--model", golden.model, "--model-b", str(broken)]
    code, report = compare(capsys, *arguments, "--prompt-lengths", "40")
    assert code == 1
    [found] = report["prompts"]
    assert found["first_layer"] == 2
    assert found["layers"][1]["relative_l2"] < 1e-5
    assert found["logits"]["absolute"] > 2e-4
