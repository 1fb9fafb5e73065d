"""Which collectives a forward makes, between whom, and how much they carry; and how often a cache is written."""

import pytest
from vllm_sfa_cp.serving import SFA_CP_ENV as FLASHCOMM1
from vllm_sfa_cp.shapes import SHAPES

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SHAPE = SHAPES["base"]
LAYERS = SHAPE["num_hidden_layers"]
#: Elements per row of the one packed all-gather.
PACKED = SHAPE["kv_lora_rank"] + SHAPE["qk_rope_head_dim"] + SHAPE["index_head_dim"]
BLOCK = {"block_size": 16, "num_gpu_blocks_override": 64}


def run(pool, golden, size, stages=1, **section):
    kwargs = {"model": golden.model, "prompt": golden.prompts[7], "tensor_parallel_size": size, **BLOCK}
    kwargs["pipeline_parallel_size"] = stages
    if section:
        kwargs["additional_config"] = {"enable_sfa_cp": True, "sfa_cp": section}
    return pool.run(size * stages, "scenarios:communication", kwargs, FLASHCOMM1)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("partition", ["contiguous", "balanced"])
def test_one_packed_gather_per_layer_and_no_reduction(pool, golden, size, partition):
    for report in run(pool, golden, size, weights="replicate", partition=partition):
        [step] = report["steps"]
        assert (step.kind, step.tokens) == (partition, 257)
        padded = -(-257 // size) * size
        attention = [call for call in report["calls"] if call.attention is not None]
        assert [(c.attention, c.name, c.elements) for c in attention] == [
            (layer, "all_gather_into_tensor", PACKED * padded) for layer in range(LAYERS)
        ]
        # C31: each of the layer's two caches is written once.
        assert sorted(name for name, _ in report["writes"]) == sorted(
            ["write_latent", "write_indexer_key"] * LAYERS
        )
        assert set(report["writes"].values()) == {1}


def test_flashcomm1_gathers_hidden_rows_and_reduces(pool, golden):
    """The counter sees what SFA-CP avoids: the attention's whole input, and its output's reduction."""
    hidden = SHAPE["hidden_size"]
    for report in run(pool, golden, 2):
        attention = [call for call in report["calls"] if call.attention is not None]
        assert [(c.attention, c.name, c.elements) for c in attention] == [
            (layer, name, hidden * 258)
            for layer in range(LAYERS)
            for name in ("all_gather_into_tensor", "all_reduce")
        ]
        assert set(report["writes"].values()) == {1}
        assert len(report["writes"]) == 2 * LAYERS


@pytest.mark.parametrize("weights", ["replicate", "gather", "broadcast"])
def test_every_collective_is_of_the_group_of_the_partition(pool, golden, weights):
    """C35, with two pipeline stages, so that the group is not the world. Fetches of weights are among them."""
    # One window for a stage's two layers: every forward fetches.
    reports = run(pool, golden, 2, stages=2, weights=weights, prefetch_step=0, cp_min_tokens=0)
    for rank, report in enumerate(reports):
        assert report["group"] == ((0, 1) if rank < 2 else (2, 3))
        assert {call.ranks for call in report["calls"]} == {report["group"]}
        fetches = [c for c in report["calls"] if c.attention is not None and c.elements != PACKED * 258]
        assert (len(fetches) > 0) == (weights != "replicate")
        assert [c.name for c in report["calls"]] == [c.name for c in reports[rank // 2 * 2]["calls"]]
    whole = run(pool, golden, 1)[0]["answer"]
    for report in reports:
        assert report["answer"]["tokens"] == whole["tokens"] == golden.tokens[7][:1]


def test_c11_a_layer_without_an_indexer_sends_less(pool):
    report = pool.run(1, "scenarios:packed_without_indexer")[0]
    assert report["whole"] == ((3, 56), [32, 8, 16])
    assert report["without"] == ((3, 40), [32, 8, 0])
    assert report["parts"] == [True, True]
    assert report["mixed"].startswith("parts of one gather differ in dtype")
