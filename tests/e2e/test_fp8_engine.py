"""A real-format block-FP8 checkpoint in the engine, against Hugging Face on the dequantised weights."""

import json
from pathlib import Path

import pytest
from ranks import RankPool
from safetensors.torch import load_file
from vllm_sfa_cp.serving import SFA_CP_ENV
from vllm_sfa_cp.shapes import SHAPES
from vllm_sfa_cp.tiny_model import write_checkpoint

pytestmark = [pytest.mark.engine, pytest.mark.slow]
EXPECTED = Path(__file__).parents[1] / "golden/fp8/expected"
TOPK = SHAPES["fp8"]["index_topk"]


@pytest.fixture(scope="module")
def golden():
    prompts = json.loads((EXPECTED / "tokens.json").read_text())
    logits = load_file(EXPECTED / "logits.safetensors")
    return [{**p, "logits": logits[f"logits.{i}"]} for i, p in enumerate(prompts)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    out = tmp_path_factory.mktemp("fp8") / "model"
    write_checkpoint(out, SHAPES["fp8"], seed=20, quant="fp8")  # digest: tests/unit/test_tiny_model.py
    return out


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    with RankPool(4, str(tmp_path_factory.mktemp("logs"))) as pool:
        yield pool


def answers(pool, model, golden, ranks, env=None, **kwargs):
    prompts = [g["prompt_token_ids"] for g in golden]
    kwargs |= {"model": str(model), "prompts": prompts, "tensor_parallel_size": ranks}
    return pool.run(ranks, "engines:run", kwargs, env)[0][0]


def sfa_cp(weights):
    return {"additional_config": {"enable_sfa_cp": True, "sfa_cp": {"weights": weights}}}


@pytest.mark.parametrize(
    ("ranks", "env", "options"),
    [
        (1, {}, {}),
        (2, {}, {}),
        (4, {}, {}),
        (2, {}, {"enable_expert_parallel": True}),
        (2, {}, {"max_num_batched_tokens": 64, "max_num_seqs": 16}),
        (4, SFA_CP_ENV, sfa_cp("replicate")),
        (2, SFA_CP_ENV, sfa_cp("broadcast")),
        (4, SFA_CP_ENV, sfa_cp("gather")),
    ],
    ids=["tp1", "tp2", "tp4", "ep2", "chunked", "replicate4", "broadcast2", "gather4"],
)
def test_tokens_and_logits(pool, model, golden, ranks, env, options):
    outs = answers(pool, model, golden, ranks, env, **options)
    for got, want in zip(outs, golden, strict=True):
        assert got["tokens"] == want["greedy"]
        assert float((got["logits"] - want["logits"]).abs().max()) < 2e-4


def test_bfloat16_stays_near(pool, model, golden):
    outs = answers(pool, model, golden, 1, dtype="bfloat16")
    for got, want in zip(outs, golden, strict=True):
        if len(want["prompt_token_ids"]) <= TOPK:
            assert float((got["logits"] - want["logits"]).norm() / want["logits"].norm()) < 5e-2


def test_a_checkpoint_without_a_scale_is_refused_by_name(pool, model, golden, tmp_path):
    from safetensors.torch import save_file

    name = "model.layers.1.self_attn.o_proj.weight_scale_inv"
    tensors = load_file(model / "model.safetensors")
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((model / "config.json").read_text())
    with pytest.raises(AssertionError, match=name.replace(".", r"\.")):
        answers(pool, tmp_path, golden, 1)
