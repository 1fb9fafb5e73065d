"""Tiny models: names and config as a release, bytes decided by the seed, real-format FP8, tokenizer."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from vllm_sfa_cp.block_fp8 import dequantise
from vllm_sfa_cp.cli import main
from vllm_sfa_cp.errors import UserError
from vllm_sfa_cp.shapes import SHAPES, fp8_tp_sizes, load_shape, parameters, release_config
from vllm_sfa_cp.tiny_model import checkpoint_bytes, random_tensor, write_checkpoint
from vllm_sfa_cp.tiny_tokenizer import FIRST_BYTE, SPECIAL, vocabulary

GOLDEN = Path(__file__).parents[1] / "golden"


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    out = tmp_path_factory.mktemp("models") / "base"
    assert main(["tiny-model", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def fp8(tmp_path_factory):
    out = tmp_path_factory.mktemp("models") / "fp8"
    assert main(["tiny-model", str(out), "--quant", "fp8", "--seed", "20"]) == 0
    return out


class TestCheckpoint:
    def test_base_is_the_golden_checkpoint_in_names_shapes_and_config(self, base):
        ours, theirs = (load_file(d / "model.safetensors") for d in (base, GOLDEN / "base"))
        assert {k: (v.shape, v.dtype) for k, v in ours.items()} == {
            k: (v.shape, v.dtype) for k, v in theirs.items()
        }
        read = [json.loads((d / "config.json").read_text()) for d in (base, GOLDEN / "base")]
        assert read[0] == read[1]

    def test_seed_decides_every_byte(self, base, tmp_path):
        for name, seed in (("same", 0), ("other", 1)):
            write_checkpoint(tmp_path / name, SHAPES["base"], seed)
        assert all(digest(p) == digest(tmp_path / "same" / p.name) for p in base.iterdir())
        assert digest(base / "model.safetensors") != digest(tmp_path / "other" / "model.safetensors")

    def test_bytes_do_not_depend_on_threads(self):
        param = next(p for p in parameters(SHAPES["base"]) if "gate_proj" in p.name)
        before = torch.get_num_threads()
        try:
            torch.set_num_threads(1)
            one = random_tensor(param, 3)
            torch.set_num_threads(4)
            assert torch.equal(one, random_tensor(param, 3))
        finally:
            torch.set_num_threads(before)

    def test_a_layer_keeps_its_weights_when_others_are_added(self):
        names = {}
        for layers in (2, 3):
            params = parameters({**SHAPES["base"], "num_hidden_layers": layers})
            names[layers] = {p.name: random_tensor(p, 0) for p in params if "layers.1." in p.name}
        assert all(torch.equal(v, names[3][k]) for k, v in names[2].items())

    def test_noise_is_centred_with_unit_variance(self):
        embed = random_tensor(next(parameters(SHAPES["dsv32-128k/64"])), 0)
        assert abs(float(embed.mean())) < 5e-3
        assert abs(float(embed.std()) - 1) < 5e-3

    def test_bfloat16(self, tmp_path):
        write_checkpoint(tmp_path, SHAPES["base"], dtype="bfloat16")
        dtypes = {k: v.dtype for k, v in load_file(tmp_path / "model.safetensors").items()}
        wide = {k for k, v in dtypes.items() if v == torch.float32}
        assert all("k_norm" in k or "correction_bias" in k for k in wide)
        assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"

    def test_benchmark_shape_does_the_stated_work(self):
        """Indexer 18.6, rest 28.7 MFLOP per token and MoE layer at 4,096 keys, as at DeepSeek-V3.2's 128k."""
        s = SHAPES["dsv32-128k/64"]
        flops = {p.name: 2 * p.numel for p in parameters(s) if "layers.1." in p.name}
        indexer = sum(v for k, v in flops.items() if "indexer.w" in k)
        indexer += 2 * 4096 * s["index_n_heads"] * s["index_head_dim"]
        assert indexer / 1e6 == pytest.approx(18.6, abs=1.0)
        experts = s["num_experts_per_tok"] + s["n_shared_experts"]
        moe = experts * 2 * 3 * s["hidden_size"] * s["moe_intermediate_size"]
        attention = sum(v for k, v in flops.items() if "self_attn" in k and "indexer" not in k)
        latent, rope = s["kv_lora_rank"], s["qk_rope_head_dim"]
        sparse = 2 * s["num_attention_heads"] * s["index_topk"] * (2 * latent + rope)
        assert (moe + attention + sparse) / 1e6 == pytest.approx(28.7, abs=1.0)

    def test_size_is_known_beforehand(self, base, fp8):
        for folder, shape, quant, dtype in (
            (base, "base", "none", "float32"),
            (fp8, "fp8", "fp8", "bfloat16"),
        ):
            size = (folder / "model.safetensors").stat().st_size
            assert checkpoint_bytes(SHAPES[shape], quant, dtype) == pytest.approx(size, rel=0.01)


class TestFp8:
    def test_golden_digest(self, fp8):
        """The golden answers of tests/golden/fp8 are for exactly these bytes, on every machine."""
        source = json.loads((GOLDEN / "fp8/expected/source.json").read_text())
        assert digest(fp8 / "model.safetensors") == source["model_sha256"]

    def test_format(self, fp8):
        tensors = load_file(fp8 / "model.safetensors")
        config = json.loads((fp8 / "config.json").read_text())
        assert config["quantization_config"]["weight_block_size"] == [128, 128]
        scaled = {k for k, v in tensors.items() if v.dtype == torch.float8_e4m3fn}
        assert {k + "_scale_inv" for k in scaled} == {k for k in tensors if k.endswith("_scale_inv")}
        plain = ("embed_tokens", "norm", "mlp.gate.", "lm_head", "weights_proj")
        for name in tensors:
            assert (name in scaled or name.endswith("_scale_inv")) != any(part in name for part in plain)
        for name in scaled:
            rows, cols = tensors[name].shape
            scale = tensors[name + "_scale_inv"]
            assert scale.dtype == torch.float32
            assert scale.shape == (-(-rows // 128), -(-cols // 128))

    def test_stands_for_the_float_weights(self, fp8):
        tensors = load_file(fp8 / "model.safetensors")
        param = next(
            p for p in parameters(SHAPES["fp8"]) if p.name.endswith("layers.0.self_attn.o_proj.weight")
        )
        weight = dequantise(tensors[param.name], tensors[param.name + "_scale_inv"])
        exact = random_tensor(param, 20)
        assert float((weight - exact).norm() / exact.norm()) < 0.04

    def test_tensor_parallel_sizes(self):
        assert fp8_tp_sizes(SHAPES["fp8"]) == [1, 2, 4]
        assert fp8_tp_sizes(SHAPES["base"]) == []

    def test_shape_that_cannot_be_loaded_is_refused(self, tmp_path, capsys):
        code = main(["tiny-model", str(tmp_path / "m"), "--quant", "fp8", "--shape", "base"])
        assert code == 2
        assert "hint: q_lora_rank" in capsys.readouterr().err
        assert not (tmp_path / "m").exists()


@pytest.fixture(scope="module")
def tokenizer(base):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(base)


class TestTokenizer:
    @pytest.mark.parametrize("text", ["Hello, world", "  two  spaces\n", "Grüße 世界 🚀", "the teeth", ""])
    def test_one_token_per_byte_and_back(self, tokenizer, text):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert ids == [FIRST_BYTE + b for b in text.encode()]
        assert tokenizer.decode(ids) == text

    def test_begin_token_is_added(self, tokenizer):
        assert tokenizer("a")["input_ids"] == [0, FIRST_BYTE + ord("a")]
        assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)

    def test_every_id_has_a_text(self, tokenizer):
        assert len(tokenizer) == 512
        assert all(tokenizer.decode([i]) for i in range(512))

    def test_chat_template(self, tokenizer):
        messages = [
            {"role": "system", "content": "S"},
            {"role": "user", "content": "U"},
            {"role": "assistant", "content": "A"},
            {"role": "user", "content": "V"},
        ]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        bos, eos, user, assistant = SPECIAL
        assert text == f"{bos}S{user}U{assistant}A{eos}{user}V{assistant}"
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        assert [i for i in ids if i < FIRST_BYTE] == [0, 2, 3, 1, 2, 3]

    def test_large_vocabularies_are_filled(self):
        assert len(vocabulary(20_000)) == 20_000


class TestTarget:
    def test_rewriting_our_own_folder_is_fine(self, tmp_path):
        for _ in range(2):
            write_checkpoint(tmp_path / "m", SHAPES["base"])

    def test_foreign_files_are_left_alone(self, tmp_path):
        (tmp_path / "extra.safetensors").write_bytes(b"x")
        with pytest.raises(UserError, match=r"extra\.safetensors"):
            write_checkpoint(tmp_path, SHAPES["base"])
        assert [p.name for p in tmp_path.iterdir()] == ["extra.safetensors"]

    def test_too_large_for_the_disk(self, tmp_path):
        with pytest.raises(UserError, match="GB free"):
            write_checkpoint(tmp_path / "m", {**SHAPES["base"], "intermediate_size": 10**12})

    def test_file_is_readable_by_others(self, base):
        modes = {(base / n).stat().st_mode for n in ("config.json", "model.safetensors")}
        assert len(modes) == 1

    def test_metadata_says_torch(self, base):
        with safe_open(base / "model.safetensors", "pt") as f:
            assert f.metadata() == {"format": "pt"}


class TestShapes:
    def test_config_json(self, tmp_path):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(release_config({**SHAPES["base"], "index_topk": 8}) | {"other": 1}))
        assert load_shape(str(path)) == {**SHAPES["base"], "index_topk": 8}

    @pytest.mark.parametrize(
        ("text", "says"), [("{", "cannot read"), ("[]", "not a JSON object"), ("{}", "lacks hidden_size")]
    )
    def test_bad_config_json(self, tmp_path, text, says):
        path = tmp_path / "config.json"
        path.write_text(text)
        with pytest.raises(UserError, match=says):
            load_shape(str(path))

    def test_unknown_name_lists_the_known_ones(self):
        with pytest.raises(UserError, match="unknown shape") as err:
            load_shape("huge")
        assert "dsv32-128k/64" in err.value.hint
