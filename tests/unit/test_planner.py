"""The planner's numbers: DeepSeek-V3.2's own, torch's FLOP count, and bytes counted by hand."""

import argparse
import json
import sys
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import linear
from torch.utils.flop_counter import FlopCounterMode
from vllm_sfa_cp.cli_plan import add_plan_parser, load_model, run_plan
from vllm_sfa_cp.device_profile import CPU_CORE, NOMINAL, PARTS
from vllm_sfa_cp.errors import UserError
from vllm_sfa_cp.planner import (
    BUILT_IN,
    DEEPSEEK_V32,
    Mode,
    ModelShape,
    all_modes,
    collectives,
    ideal_speedup,
    memory,
    predict,
    rank_flops,
    recommend,
    split,
    step_flops,
    token_threshold,
)

V32 = ModelShape.built_in("deepseek-v3.2")
SMALL = ModelShape.built_in("dsv32-128k/64")
OFF, FLASHCOMM1, REPLICATE, BROADCAST, GATHER = all_modes()


@pytest.mark.parametrize(
    ("part", "mflop"),
    [("qkv_a", 30.3), ("indexer_proj", 27.9), ("q_b", 75.5), ("w_uk", 16.8), ("w_uv", 16.8), ("o", 234.9)],
)
def test_flops_per_token_and_layer_of_deepseek_v32(part, mflop):
    assert V32.linear_flops[part] / 1e6 == pytest.approx(mflop, abs=0.05)


def test_attention_scores_and_moe_of_deepseek_v32():
    assert V32.attention_flops * V32.index_topk / 1e6 == pytest.approx(570.4, abs=0.05)
    assert V32.score_flops * 1024 / 1e6 == pytest.approx(16.8, abs=0.05)
    assert (V32.linear_flops["experts"] + V32.linear_flops["router"]) / 1e6 == pytest.approx(796.4, abs=0.05)


def test_repeated_and_other_work_of_the_benchmark_model():
    repeated, rest = split(SMALL, 8192)
    assert repeated / 1e6 == pytest.approx(18.6, abs=0.05)
    assert rest / 1e6 == pytest.approx(28.7, rel=0.005)  # 28.7 counts full top-k from the first token


@pytest.mark.parametrize(
    ("shape", "tokens", "size", "ideal"),
    [(SMALL, 8192, 4, 2.18), (SMALL, 8192, 8, 3.75), (V32, 131072, 4, 2.19), (V32, 131072, 8, 3.79)],
)
def test_ideal_speedup(shape, tokens, size, ideal):
    assert ideal_speedup(shape, size, tokens) == pytest.approx(ideal, abs=0.01)


def test_ideal_speedup_is_the_ratio_of_the_slowest_ranks_up_to_the_router():
    """The router runs on gathered rows everywhere, which the formula leaves out."""
    for shape, tokens in ((SMALL, 8192), (V32, 131072)):
        plain, cp = (sum(rank_flops(shape, mode, 8, tokens).values()) for mode in (OFF, GATHER))
        assert plain / cp == pytest.approx(ideal_speedup(shape, 8, tokens), rel=0.02)


TINY = replace(
    SMALL,
    hidden_size=64,
    num_attention_heads=8,
    q_lora_rank=24,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=12,
    index_n_heads=4,
    index_head_dim=16,
    index_topk=10,
    moe_intermediate_size=32,
    intermediate_size=96,
    vocab_size=40,
)


def layer_in_torch(
    shape: ModelShape, rows: torch.Tensor, shards: int, tokens: int, size: int, moe: bool
) -> None:
    """One layer's matrix products as a rank executes them: attention for `rows` with 1/shards of the heads,
    the MLP for all tokens with 1/size of its width."""
    h, heads = shape.hidden_size, shape.num_attention_heads // shards
    latent, rope, nope = shape.kv_lora_rank, shape.qk_rope_head_dim, shape.qk_nope_head_dim
    x = torch.randn(len(rows), h)
    q_c = linear(x, torch.randn(shape.q_lora_rank + latent + rope, h))[:, : shape.q_lora_rank]
    index_q = linear(q_c, torch.randn(shape.index_n_heads * shape.index_head_dim, shape.q_lora_rank))
    linear(x, torch.randn(shape.index_head_dim, h))
    linear(x, torch.randn(shape.index_n_heads, h))
    q = linear(q_c, torch.randn(heads * (nope + rope), shape.q_lora_rank)).view(len(rows), heads, nope + rope)
    absorbed = torch.bmm(q[..., :nope].transpose(0, 1), torch.randn(heads, nope, latent)).transpose(0, 1)
    q_full = torch.cat([absorbed, q[..., nope:]], dim=-1)
    keys, cache = torch.randn(tokens, shape.index_head_dim), torch.randn(tokens, latent + rope)
    out = []
    for row, position in enumerate(rows.tolist()):
        score = index_q[row].view(shape.index_n_heads, -1) @ keys[: position + 1].T
        chosen = score.relu().sum(0).topk(min(position + 1, shape.index_topk)).indices
        out.append((q_full[row] @ cache[chosen].T).softmax(-1) @ cache[chosen, :latent])
    up = torch.bmm(torch.stack(out, dim=1), torch.randn(heads, latent, shape.v_head_dim))
    linear(up.transpose(0, 1).flatten(1), torch.randn(h, heads * shape.v_head_dim))

    everyone = torch.randn(tokens, h)
    width, times = shape.intermediate_size // size, 1
    if moe:
        linear(everyone, torch.randn(shape.n_routed_experts, h))
        width, times = shape.moe_intermediate_size // size, shape.num_experts_per_tok + shape.n_shared_experts
    for _ in range(times):  # each token's experts, one after another
        linear(linear(everyone, torch.randn(2 * width, h))[:, :width], torch.randn(h, width))


@pytest.mark.parametrize("mode", [OFF, GATHER, replace(GATHER, partition="contiguous")])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_flops_agree_with_torchs_count_within_three_percent(mode, size):
    shape, tokens = replace(TINY, num_hidden_layers=2, first_k_dense_replace=1), 256
    blocks = torch.arange(tokens).view(2 * size, -1)
    rows, shards = torch.arange(tokens), size
    if mode.name == "sfa-cp":
        shards = 1
        rows = (
            rows.view(size, -1)[-1] if mode.partition == "contiguous" else torch.cat([blocks[0], blocks[-1]])
        )
    with FlopCounterMode(display=False) as counter:
        for moe in (False, True):
            layer_in_torch(shape, rows, shards, tokens, size, moe)
        linear(torch.randn(1, shape.hidden_size), torch.randn(shape.vocab_size // size, shape.hidden_size))
    planned = sum(rank_flops(shape, mode, size, tokens).values())
    assert planned == pytest.approx(counter.get_total_flops(), rel=0.03)


@pytest.mark.parametrize("mode", all_modes())
def test_parts_of_all_ranks_cover_the_step_once(mode):
    work = step_flops(SMALL, 4096)
    assert set(work) == set(PARTS)
    assert rank_flops(SMALL, mode, 1, 4096) == pytest.approx(work)
    for part, flops in rank_flops(SMALL, mode, 8, 4096).items():
        assert flops in (pytest.approx(work[part]), pytest.approx(work[part] / 8))


def test_chunks_add_up_to_the_prompt():
    whole, parts = (predict(SMALL, GATHER, 4, 8000, chunk) for chunk in (None, 1000))
    for part, flops in whole.flops.items():
        if part != "lm_head":  # one token per step
            assert parts.flops[part] == pytest.approx(flops)
    assert parts.bytes["packed keys"] == pytest.approx(whole.bytes["packed keys"])
    assert parts.bytes["weights"] == 8 * whole.bytes["weights"]


def test_contiguous_split_gives_the_last_rank_almost_twice_the_mean_scores():
    slow = rank_flops(SMALL, replace(GATHER, partition="contiguous"), 8, 8192)["indexer_scores"]
    assert slow / rank_flops(SMALL, GATHER, 8, 8192)["indexer_scores"] == pytest.approx(1.875, abs=0.001)


@pytest.mark.parametrize(("tokens", "size"), [(255, 8), (300, 256)])
def test_steps_too_short_to_be_dealt_out_are_split_contiguously(tokens, size):
    contiguous = rank_flops(SMALL, replace(GATHER, partition="contiguous"), size, tokens, 1000)
    assert rank_flops(SMALL, GATHER, size, tokens, 1000) == contiguous


def test_step_smaller_than_the_group_costs_a_row_per_rank():
    assert rank_flops(SMALL, GATHER, 8, 3)["q_b"] == 3 * SMALL.linear_flops["q_b"]


def test_attention_stops_growing_at_topk():
    each = SMALL.num_hidden_layers * SMALL.attention_flops
    assert step_flops(SMALL, 1, 5)["attention"] == 6 * each
    assert step_flops(SMALL, 1, 5000)["attention"] == 128 * each
    assert step_flops(SMALL, 130)["attention"] == each * (128 * 129 // 2 + 2 * 128)


def test_weights_are_the_checkpoints():
    """DeepSeek-V3.2 without its MTP layer: 671 G parameters, nearly all in FP8."""
    total = sum(V32.weight_bytes.values()) - 61 * 128 * 256 * 512 * 2
    assert total / 1e9 == pytest.approx(674, rel=0.01)
    q_b = 61 * (1536 * 24576 + 4 * 12 * 192)
    assert V32.weight_bytes["q_b"] == q_b
    assert SMALL.weight_bytes["o"] == 3 * 896 * 2048 * 4
    assert SMALL.weight_bytes["norms"] == 4 * (3 * (2 * 896 + 192 + 256) + 896)


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_resident_bytes_of_shared_linears(size, ahead):
    layer = {group: V32.weight_bytes[group] / 61 for group in ("q_b", "o", "kv_b")}
    pair = layer["q_b"] + layer["o"]

    def shared(mode: Mode) -> float:
        use = memory(V32, replace(mode, prefetch_step=ahead), size, 0)
        return use["q_b"] + use["o"] + use["windows"]

    assert shared(OFF) == pytest.approx(61 / size * pair)
    assert shared(REPLICATE) == pytest.approx(61 * pair)
    assert shared(BROADCAST) == pytest.approx((-(-61 // size) + ahead + 1) * pair)
    assert shared(GATHER) == pytest.approx((61 / size + ahead + 1) * pair)
    assert memory(V32, GATHER, size, 0)["kv_b"] == pytest.approx(61 * layer["kv_b"])
    three = memory(V32, replace(GATHER, shared=("q_b_proj", "kv_b_proj", "o_proj")), size, 0)
    assert three["kv_b"] == pytest.approx(61 / size * layer["kv_b"])


def test_windows_are_never_more_than_layers():
    use = memory(SMALL, replace(GATHER, prefetch_step=8), 4, 0)
    assert use["windows"] == SMALL.weight_bytes["q_b"] + SMALL.weight_bytes["o"]


def test_cache_of_a_prompt():
    assert memory(V32, OFF, 8, 131072)["kv_cache"] == 61 * 131072 * (512 + 64 + 128) * 2


def test_bytes_moved_by_collectives():
    hidden = 1000 * 896 * 4 * 3 / 4
    assert collectives(SMALL, OFF, 4, 1000).bytes == {"all-reduce": 7 * 2 * hidden}
    rows = collectives(SMALL, FLASHCOMM1, 4, 1000)
    assert rows.bytes == {"all-reduce": 2 * hidden, "all-gather": 7 * hidden, "reduce-scatter": 6 * hidden}
    cp = collectives(SMALL, GATHER, 4, 1000)
    assert cp.count == {"all-reduce": 1, "all-gather": 4, "reduce-scatter": 3, "packed keys": 3, "weights": 6}
    assert cp.bytes["packed keys"] == 3 * 1000 * (256 + 32 + 64) * 4 * 3 / 4
    full = SMALL.weight_bytes["q_b"] + SMALL.weight_bytes["o"]
    assert cp.bytes["weights"] == full * 3 / 4
    assert collectives(SMALL, BROADCAST, 4, 1000).bytes["weights"] == full
    assert collectives(SMALL, GATHER, 4, 997).bytes == cp.bytes  # padded rows travel
    assert not any(collectives(SMALL, GATHER, 1, 1000).bytes.values())


def test_times_follow_the_profile():
    fast = predict(V32, GATHER, 8, 131072)
    halved = replace(NOMINAL, flops={"default": 1e14, "indexer_scores": 5e13})
    slow = predict(V32, GATHER, 8, 131072, profile=halved)
    assert slow.compute_s - fast.compute_s == pytest.approx(fast.flops["indexer_scores"] / 1e14)
    late = predict(V32, GATHER, 8, 131072, chunk=65536, profile=replace(NOMINAL, step_overhead=1.0))
    assert late.overhead_s == 2
    narrow = replace(NOMINAL, link_bandwidth=1e8)
    assert predict(V32, REPLICATE, 8, 64, profile=narrow).weight_wait_s == 0
    hidden, exposed = (predict(V32, replace(GATHER, prefetch_step=k), 8, 64, profile=narrow) for k in (1, 0))
    assert 0 < hidden.weight_wait_s < exposed.weight_wait_s
    assert exposed.weight_wait_s == pytest.approx(exposed.bytes["weights"] / 1e8 + 122 * NOMINAL.latency)


def test_threshold_is_where_context_parallelism_starts_to_pay():
    for shape, context in ((V32, 0), (V32, 65536), (SMALL, 0)):
        tokens = token_threshold(shape, GATHER, 8, context=context)
        assert tokens is not None

        def seconds(mode: Mode, count: int, shape: ModelShape = shape, context: int = context) -> float:
            return predict(shape, mode, 8, count, context=context).seconds

        assert seconds(GATHER, tokens) <= seconds(OFF, tokens)
        assert tokens == 1 or seconds(GATHER, tokens - 1) > seconds(OFF, tokens - 1)
    slow_link = replace(NOMINAL, link_bandwidth=1e9)
    assert token_threshold(V32, GATHER, 8, slow_link) > token_threshold(V32, GATHER, 8)


def predictions(shape, size, prompt, profile=NOMINAL):
    return [predict(shape, mode, size, prompt, profile=profile) for mode in all_modes()]


def test_recommendations_and_their_reasons():
    every = predictions(V32, 8, 131072)
    both = recommend(V32, every, 8)
    assert (both.mode.name, both.mode.weights) == ("sfa-cp", "gather")
    assert "repeated on every rank" in both.reason
    assert "decode steps run on the TP shards" in both.reason
    assert recommend(V32, every, 8, decodes=False).mode.weights == "replicate"
    tight = replace(NOMINAL, memory=95 * 2**30)
    lean = recommend(V32, every, 8, tight, decodes=False)
    assert lean.mode.weights == "broadcast"
    assert "full weights on every rank would not fit" in lean.reason
    none = recommend(V32, every, 8, replace(NOMINAL, memory=2**30))
    assert none.mode.name == "off"
    assert "no mode fits" in none.reason
    short = recommend(V32, predictions(V32, 8, 16), 8)
    assert short.mode.name == "off"
    assert recommend(V32, predictions(V32, 1, 4096), 1).reason == "with one rank there is nothing to divide"


def test_configs_that_cannot_be_planned():
    with pytest.raises(UserError, match="'llama' has no lightning indexer"):
        ModelShape.from_config({"model_type": "llama"})
    sizes = {k: v for k, v in DEEPSEEK_V32.items() if k not in ("hidden_size", "vocab_size")}
    with pytest.raises(UserError, match="x lacks hidden_size, vocab_size"):
        ModelShape.from_config(sizes, "x")
    with pytest.raises(UserError, match="quant_method 'awq'"):
        ModelShape.from_config(DEEPSEEK_V32 | {"quantization_config": {"quant_method": "awq"}})
    with pytest.raises(UserError, match="dtype 'int4'"):
        ModelShape.from_config(DEEPSEEK_V32 | {"torch_dtype": "int4"})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers 0"),
        ({"n_routed_experts": -1}, "n_routed_experts -1"),
        ({"hidden_size": True}, "hidden_size True"),
        ({"num_attention_heads": "64"}, "num_attention_heads '64'"),
        ({"first_k_dense_replace": 62}, "more dense layers than layers"),
        ({"quantization_config": "fp8"}, "quantization_config 'fp8'"),
    ],
)
def test_sizes_that_no_model_has(changed, message):
    with pytest.raises(UserError, match=message):
        ModelShape.from_config(DEEPSEEK_V32 | changed)
    assert ModelShape.from_config(DEEPSEEK_V32 | {"n_shared_experts": 0}).n_shared_experts == 0


def test_a_reduce_scatter_over_gloo_moves_twice_the_bytes():
    """And is charged for: the CPU's profile says so, other devices' do not."""
    ring, sliced = (collectives(SMALL, GATHER, 4, 1000, factor).bytes for factor in (1.0, 2.0))
    assert sliced.pop("reduce-scatter") == 2 * ring.pop("reduce-scatter")
    assert sliced == ring
    slow = predict(SMALL, GATHER, 4, 1000, profile=CPU_CORE)
    quick = predict(SMALL, GATHER, 4, 1000, profile=replace(CPU_CORE, reduce_scatter=1.0))
    more = collectives(SMALL, GATHER, 4, 1000).bytes["reduce-scatter"]
    assert slow.bytes["reduce-scatter"] - quick.bytes["reduce-scatter"] == more
    assert slow.seconds - quick.seconds == pytest.approx(more / CPU_CORE.link_bandwidth)


GOOD = {
    "name": "d",
    "flops": {"default": 1e12},
    "memory_bandwidth": 1e11,
    "link_bandwidth": 1e10,
    "latency": 0,
}


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    add_plan_parser(parser.add_subparsers())
    return run_plan(parser.parse_args(["plan", *arguments]))


def test_plan_prints_a_table(capsys):
    assert run("--model", "deepseek-v3.2", "--tp", "8", "--prompt", "131072", "--chunk", "8192") == 0
    out = capsys.readouterr().out
    assert "(nR + P) / (R + P) = 3.79" in out
    assert "recommended: sfa-cp/gather (" in out
    assert len({len(line) for line in out.splitlines()[2:8]}) == 1


def test_plan_as_json_with_a_profile(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(BUILT_IN["dsv32-128k/64"]))
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps(GOOD))
    arguments = ("--model", str(tmp_path), "--tp", "4", "--prompt", "8192", "--json")
    assert run(*arguments, "--device-profile", str(profile)) == 0
    report = json.loads(capsys.readouterr().out)
    assert [(r["mode"], r["weights"]) for r in report["runs"][1:3]] == [
        ("flashcomm1", None),
        ("sfa-cp", "replicate"),
    ]
    assert report["runs"][0]["speedup"] == 1
    assert report["ideal"] == pytest.approx(2.18, abs=0.01)
    assert report["device"] == "d"
    assert load_model(str(tmp_path)).num_hidden_layers == 3


def test_plan_names_what_it_cannot_use(tmp_path):
    with pytest.raises(UserError, match="cannot read"):
        run("--model", str(tmp_path), "--tp", "4", "--prompt", "10")
    with pytest.raises(UserError, match="128 heads do not divide over 3 ranks"):
        run("--model", "deepseek-v3.2", "--tp", "3", "--prompt", "10")
    with pytest.raises(SystemExit):
        run("--model", "deepseek-v3.2", "--tp", "0", "--prompt", "10")


def test_plot_without_matplotlib_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match="matplotlib") as caught:
        run("--model", "dsv32-128k/64", "--tp", "4", "--prompt", "64", "--plot", str(tmp_path / "x.png"))
    assert caught.value.hint == "pip install --no-deps -r requirements/plots.txt"


def test_plot_is_written(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    out = tmp_path / "x.png"
    assert run("--model", "dsv32-128k/64", "--tp", "4", "--prompt", "8192", "--plot", str(out)) == 0
    assert out.read_bytes().startswith(b"\x89PNG")
