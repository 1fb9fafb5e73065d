"""Mode off is upstream's path, and every documented switch changes what runs."""

import itertools

import pytest
import torch
from vllm_sfa_cp import config as sfa_config
from vllm_sfa_cp.serving import SFA_CP_ENV as FLASHCOMM1

pytestmark = [pytest.mark.engine, pytest.mark.slow]

BLOCK = {"block_size": 16, "num_gpu_blocks_override": 128}


@pytest.mark.parametrize("size", [1, 2])
def test_off_is_upstreams_path_byte_for_byte(pool, golden, size):
    """C33. Upstream's sparse attention has no CPU kernels, so unpatched vLLM has no answer to compare with. What
    can be shown: nothing of the other modes runs, and upstream's own model, decoder layer, attention and CPU
    worker, with only the indexer and the attention backend replaced, compute the same bytes."""
    kwargs = {"model": golden.model, "prompts": golden.prompts, "tensor_parallel_size": size, **BLOCK}
    off, poisoned, upstream = (
        pool.run(size, "scenarios:upstream_path", {**kwargs, "share": share})
        for share in ("off", "poisoned", "upstream")
    )
    for rank in range(size):
        assert off[rank]["classes"] == [
            "SfaCpuWorker",
            "SfaDeepseekV32ForCausalLM",
            "SfaDeepseekV2Model",
            "TpDecoderLayer",
            "TpMLAAttention",
        ]
        assert upstream[rank]["classes"] == [
            "CPUWorker",
            "DeepseekV3ForCausalLM",
            "DeepseekV2Model",
            "DeepseekV2DecoderLayer",
            "DeepseekV2MLAAttention",
        ]
        for other in (poisoned[rank], upstream[rank]):
            for ours, theirs in zip(off[rank]["answers"], other["answers"], strict=True):
                assert ours["tokens"] == theirs["tokens"]
                assert torch.equal(ours["logits"], theirs["logits"])
            for name, cache in off[rank]["caches"].items():
                assert torch.equal(cache, other["caches"][name]), name


ON = {"enable_sfa_cp": True}
#: name -> (environment, additional_config). Two ranks each.
SWITCHES = {
    "off": ({}, {}),
    "env": (FLASHCOMM1, {}),
    "enable_flashcomm1": ({}, {"enable_flashcomm1": True}),
    "enable_sfa_cp": (FLASHCOMM1, ON),
    "enable_flashcomm1, sfa_cp": ({}, {"enable_flashcomm1": True, **ON}),
    "partition": (FLASHCOMM1, {**ON, "sfa_cp": {"partition": "contiguous", "cp_min_tokens": 0}}),
    "weights replicate": (FLASHCOMM1, {**ON, "sfa_cp": {"weights": "replicate"}}),
    "weights broadcast": (FLASHCOMM1, {**ON, "sfa_cp": {"weights": "broadcast"}}),
    "prefetch_step": (FLASHCOMM1, {**ON, "sfa_cp": {"prefetch_step": 2, "cp_min_tokens": 0}}),
    "shared": (FLASHCOMM1, {**ON, "sfa_cp": {"shared": ["kv_b_proj", "o_proj"], "weights": "broadcast"}}),
    "layer_sharding": (FLASHCOMM1, {**ON, "layer_sharding": ["o_proj"]}),
    "cp_min_tokens": (FLASHCOMM1, {**ON, "sfa_cp": {"cp_min_tokens": 300}}),
    "cp_min_tokens 0": (FLASHCOMM1, {**ON, "sfa_cp": {"cp_min_tokens": 0}}),
}


@pytest.fixture(scope="module")
def built(pool, golden):
    """What an engine with a switch is made of, and the kinds of its steps: prefills of 40 and 700 tokens."""
    made = {}

    def run(name: str) -> dict:
        if name not in made:
            env, additional = SWITCHES[name]
            prompts = [golden.prompts[8][-40:], golden.prompts[8]]  # no common prefix
            kwargs = {"model": golden.model, "prompts": prompts, "tensor_parallel_size": 2, **BLOCK}
            made[name] = pool.run(2, "scenarios:shape_of", {**kwargs, "additional_config": additional}, env)[
                0
            ]
        return made[name]

    return run


def projections(q: str, kv: str, o: str) -> dict[str, str]:
    return {"q_b_proj": q, "kv_b_proj": kv, "o_proj": o}


COLUMN, ROW, FULL, OWNED = "ColumnParallelLinear", "RowParallelLinear", "FullLinear", "OwnedLinear"


def test_modes_by_environment_and_by_configuration(built):
    off, flashcomm1 = built("off"), built("env")
    assert (off["layer"], off["attention"]) == ("TpDecoderLayer", "TpMLAAttention")
    assert (flashcomm1["layer"], flashcomm1["attention"]) == ("RowsDecoderLayer", "RowsMLAAttention")
    assert flashcomm1["projections"] == off["projections"] == projections(COLUMN, COLUMN, ROW)
    assert built("enable_flashcomm1") == flashcomm1
    cp = built("enable_sfa_cp")
    assert (cp["layer"], cp["attention"]) == ("CpDecoderLayer", "CpMLAAttention")
    assert built("enable_flashcomm1, sfa_cp") == cp
    assert {*off["kinds"], *flashcomm1["kinds"]} == {None}


def test_partition(built):
    assert set(built("partition")["kinds"]) == {"contiguous", None}
    assert set(built("cp_min_tokens 0")["kinds"]) == {"balanced", None}


def test_weights(built):
    replicate, broadcast, gather = (
        built(n) for n in ("weights replicate", "weights broadcast", "cp_min_tokens 0")
    )
    assert replicate["projections"] == projections(FULL, FULL, FULL)
    assert replicate["series"] == {}
    assert broadcast["projections"] == projections(OWNED, FULL, OWNED)
    assert broadcast["series"] == {"q_b_proj": ("Broadcast", 2), "o_proj": ("Broadcast", 2)}
    assert gather["projections"] == projections(COLUMN, FULL, ROW)
    assert gather["series"] == {"q_b_proj": ("Gather", 2), "o_proj": ("Gather", 2)}
    # Decode steps take the TP path where there are shards for it.
    assert None in gather["kinds"]
    assert None not in replicate["kinds"] + broadcast["kinds"]


def test_prefetch_step(built):
    assert built("prefetch_step")["series"] == {"q_b_proj": ("Gather", 3), "o_proj": ("Gather", 3)}


def test_shared_and_layer_sharding(built):
    shared = built("shared")
    assert shared["series"] == {"kv_b_proj": ("Broadcast", 2), "o_proj": ("Broadcast", 2)}
    assert shared["projections"] == projections(FULL, OWNED, OWNED)
    sharding = built("layer_sharding")
    assert sharding["series"] == {"o_proj": ("Broadcast", 2)}
    assert sharding["projections"] == projections(FULL, FULL, OWNED)


def test_cp_min_tokens(built, golden):
    """Both prompts are one step of 740 tokens with the threshold at 300; the tokens that follow are decodes."""
    assert built("cp_min_tokens")["tokens"] == built("cp_min_tokens 0")["tokens"] == [740, 2, 2]
    assert built("cp_min_tokens")["kinds"] == built("cp_min_tokens 0")["kinds"] == ["balanced", None, None]


@pytest.mark.parametrize(("threshold", "kind"), [(740, "balanced"), (741, None)])
def test_cp_min_tokens_is_the_first_size_that_takes_cp(pool, golden, threshold, kind):
    prompts = [golden.prompts[8][-40:], golden.prompts[8]]  # no common prefix
    section = {"cp_min_tokens": threshold}
    kwargs = {"model": golden.model, "prompts": prompts, "tensor_parallel_size": 2, **BLOCK}
    kwargs["additional_config"] = {**ON, "sfa_cp": section}
    for report in pool.run(2, "scenarios:shape_of", kwargs, FLASHCOMM1):
        assert report["kinds"] == [kind, None, None]


def test_ops(pool, golden, built):
    assert built("off")["ops"] == "ReferenceOps"
    additional = {"sfa_cp": {"ops": "ascend"}}
    kwargs = {"model": golden.model, "tensor_parallel_size": 1, "additional_config": additional}
    [text] = pool.run(1, "scenarios:starts", kwargs)
    assert "torch_npu" in text


def test_every_documented_switch_is_among_these():
    used = set(itertools.chain.from_iterable(additional for _, additional in SWITCHES.values()))
    assert used == set(sfa_config._TOP)
    section = set(itertools.chain.from_iterable(a.get("sfa_cp", {}) for _, a in SWITCHES.values()))
    assert section | {"ops"} == set(sfa_config._SECTION)


def test_errors_reach_whoever_starts_the_engine(pool, golden, tmp_path):
    """A setting that is refused stops the start before a worker exists. All of them: tests/unit/test_config.py."""
    common = {"model": golden.model, "tensor_parallel_size": 2}
    for additional, env, says in (
        (ON, {}, "needs FlashComm1"),
        ({**ON, "sfa_cp": {"prefetch": 1}}, FLASHCOMM1, "valid keys: cp_min_tokens"),
    ):
        kwargs = {**common, "additional_config": additional}
        assert says in pool.run(1, "scenarios:starts", kwargs, env)[0]


def test_one_rank_runs_as_off(pool, golden):
    kwargs = {"model": golden.model, "prompts": golden.prompts[:3], "plan": ["alone"], **BLOCK}
    off = pool.run(1, "scenarios:rounds", kwargs)[0]
    one = pool.run(1, "scenarios:rounds", {**kwargs, "additional_config": ON}, FLASHCOMM1)[0]
    for ours, theirs in zip(one["alone"], off["alone"], strict=True):
        assert torch.equal(ours["logits"], theirs["logits"])


def test_c7_every_max_num_seqs_is_a_valid_configuration(pool, golden):
    """1..130 at 1, 2, 4, 8 and 16 ranks: a full step of decodes, rounded up, fits the runner's buffers."""
    found = pool.run(1, "scenarios:configurations", {"model": golden.model, "most": 130}, FLASHCOMM1)[0]
    assert sorted({size for size, *_ in found}) == [1, 2, 4, 8, 16]
    assert len(found) == 5 * 130
    for size, seqs, tokens, mode in found:
        assert mode == ("off" if size == 1 else "sfa-cp")
        assert tokens % size == 0
        assert tokens >= -(-seqs // size) * size
