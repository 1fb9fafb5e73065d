"""Named proportions of DeepSeek-V3.2 and the parameters that a checkpoint of such a model holds.

No torch here: the planner and the command line read sizes without paying for an import of it.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import UserError

#: What every release's config.json says besides the sizes.
COMMON: dict[str, Any] = {
    "moe_layer_freq": 1,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}


def _yarn(factor: int, original: int) -> dict[str, Any]:
    return {
        "type": "yarn",
        "factor": factor,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": original,
    }


_BASE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "rope_scaling": _yarn(4, 1024),
}

SHAPES: dict[str, dict[str, Any]] = {
    "base": _BASE,
    # The smallest sizes whose shards stay whole 128-blocks up to four ranks, with several blocks per matrix
    # and ragged last blocks in the latent projections.
    "fp8": _BASE
    | {
        "hidden_size": 256,
        "intermediate_size": 512,
        "moe_intermediate_size": 512,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": 256,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32,
        "v_head_dim": 32,
        "index_head_dim": 64,
    },
    # One sixty-fourth of DeepSeek-V3.2's work per token; a prompt of 8,192 tokens stands for 128k.
    "dsv32-128k/64": _BASE
    | {
        "hidden_size": 896,
        "intermediate_size": 2304,
        "moe_intermediate_size": 576,
        "num_hidden_layers": 3,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "q_lora_rank": 192,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32,
        "v_head_dim": 32,
        "index_n_heads": 32,
        "index_head_dim": 64,
        "index_topk": 128,
        "n_routed_experts": 16,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "max_position_embeddings": 32768,
        "rope_scaling": _yarn(8, 4096),
    },
}


def load_shape(spec: str) -> dict[str, Any]:
    """The sizes behind a name of `SHAPES` or a path to a config.json."""
    if spec in SHAPES:
        return dict(SHAPES[spec])
    known = ", ".join(SHAPES)
    path = Path(spec)
    if path.suffix != ".json":
        raise UserError(f"unknown shape {spec!r}", f"use one of: {known}, or a path to a config.json", 2)
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as err:
        raise UserError(
            f"cannot read {path}: {err}", "give a config.json of a DeepSeek-V3.2 model", 2
        ) from err
    if not isinstance(config, dict):
        raise UserError(f"{path} is not a JSON object", "give a config.json of a DeepSeek-V3.2 model", 2)
    missing = [key for key in _BASE if key not in config and key != "rope_scaling"]
    if missing:
        raise UserError(
            f"{path} lacks {', '.join(missing)}", "give a config.json of a DeepSeek-V3.2 model", 2
        )
    return {key: config[key] for key in _BASE if key in config}


def release_config(shape: dict[str, Any], dtype: str = "float32") -> dict[str, Any]:
    """config.json of a model of this shape, as a DeepSeek-V3.2 release writes it (without quantisation)."""
    return {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "torch_dtype": dtype,
        "rope_theta": 10000,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        **COMMON,
        **shape,
    }


@dataclass(frozen=True)
class Param:
    """One tensor of a checkpoint: `kind` is linear, norm, bias, embed, head or router_bias.

    `quantised` marks what a block-FP8 release stores in FP8; `full` what it keeps in float32 always.
    """

    name: str
    shape: tuple[int, ...]
    kind: str = "linear"
    quantised: bool = False
    full: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def parameters(shape: dict[str, Any]) -> Iterator[Param]:
    """Every tensor of a checkpoint, under the release's names, in the order of the forward pass."""
    hidden, vocab = shape["hidden_size"], shape["vocab_size"]
    yield Param("model.embed_tokens.weight", (vocab, hidden), "embed")
    for i in range(shape["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        yield Param(layer + "input_layernorm.weight", (hidden,), "norm")
        yield from _attention(layer + "self_attn.", shape)
        yield Param(layer + "post_attention_layernorm.weight", (hidden,), "norm")
        if i < shape["first_k_dense_replace"]:
            yield from _mlp(layer + "mlp.", hidden, shape["intermediate_size"])
        else:
            yield from _moe(layer + "mlp.", shape)
    yield Param("model.norm.weight", (hidden,), "norm")
    yield Param("lm_head.weight", (vocab, hidden), "head")


def _attention(prefix: str, s: dict[str, Any]) -> Iterator[Param]:
    hidden, heads, q_lora, kv_lora = (
        s["hidden_size"],
        s["num_attention_heads"],
        s["q_lora_rank"],
        s["kv_lora_rank"],
    )
    nope, rope, v = s["qk_nope_head_dim"], s["qk_rope_head_dim"], s["v_head_dim"]
    index_heads, index_dim = s["index_n_heads"], s["index_head_dim"]
    yield Param(prefix + "q_a_proj.weight", (q_lora, hidden), quantised=True)
    yield Param(prefix + "q_a_layernorm.weight", (q_lora,), "norm")
    yield Param(prefix + "q_b_proj.weight", (heads * (nope + rope), q_lora), quantised=True)
    yield Param(prefix + "kv_a_proj_with_mqa.weight", (kv_lora + rope, hidden), quantised=True)
    yield Param(prefix + "kv_a_layernorm.weight", (kv_lora,), "norm")
    yield Param(prefix + "kv_b_proj.weight", (heads * (nope + v), kv_lora), quantised=True)
    yield Param(prefix + "o_proj.weight", (hidden, heads * v), quantised=True)
    yield Param(prefix + "indexer.wq_b.weight", (index_heads * index_dim, q_lora), quantised=True)
    yield Param(prefix + "indexer.wk.weight", (index_dim, hidden), quantised=True)
    yield Param(prefix + "indexer.k_norm.weight", (index_dim,), "norm", full=True)
    yield Param(prefix + "indexer.k_norm.bias", (index_dim,), "bias", full=True)
    yield Param(prefix + "indexer.weights_proj.weight", (index_heads, hidden))


def _mlp(prefix: str, hidden: int, intermediate: int) -> Iterator[Param]:
    yield Param(prefix + "gate_proj.weight", (intermediate, hidden), quantised=True)
    yield Param(prefix + "up_proj.weight", (intermediate, hidden), quantised=True)
    yield Param(prefix + "down_proj.weight", (hidden, intermediate), quantised=True)


def _moe(prefix: str, s: dict[str, Any]) -> Iterator[Param]:
    hidden, width = s["hidden_size"], s["moe_intermediate_size"]
    yield Param(prefix + "gate.weight", (s["n_routed_experts"], hidden))
    yield Param(prefix + "gate.e_score_correction_bias", (s["n_routed_experts"],), "router_bias", full=True)
    for j in range(s["n_routed_experts"]):
        yield from _mlp(f"{prefix}experts.{j}.", hidden, width)
    yield from _mlp(prefix + "shared_experts.", hidden, width * s["n_shared_experts"])


def fp8_tp_sizes(shape: dict[str, Any], block: int = 128) -> list[int]:
    """The tensor-parallel sizes at which vLLM loads this shape in block FP8 (empty: none).

    Parts of fused projections and shards must be whole blocks: vLLM's loader cuts scales at block borders.
    """
    s = shape
    heads, nope, v = s["num_attention_heads"], s["qk_nope_head_dim"], s["v_head_dim"]
    mlp = [s["intermediate_size"], s["moe_intermediate_size"]]
    mlp.append(s["moe_intermediate_size"] * s["n_shared_experts"])
    sharded = [heads * (nope + s["qk_rope_head_dim"]), heads * (nope + v), heads * v]
    if s["q_lora_rank"] % block:
        return []
    return [
        n
        for n in (1, 2, 4, 8, 16)
        if heads % n == 0
        and not any(width % (n * block) for width in mlp)
        and (n == 1 or not any(width % (n * block) for width in sharded))
    ]
