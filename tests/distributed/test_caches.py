"""What SFA-CP leaves in the caches, against tensor parallelism: same rows in the same blocks, nothing else."""

import random

import pytest
import torch
from vllm_sfa_cp.numerics import check_diff
from vllm_sfa_cp.serving import SFA_CP_ENV as FLASHCOMM1
from vllm_sfa_cp.shapes import SHAPES

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ROPE = SHAPES["base"]["rope_scaling"] | {"rope_type": "yarn", "rope_theta": 10000}
BLOCK = {"block_size": 16, "num_gpu_blocks_override": 256}
PARTITIONS = ["contiguous", "balanced"]


def sfa_cp(**section) -> dict:
    return {"additional_config": {"enable_sfa_cp": True, "sfa_cp": {"weights": "replicate", **section}}}


def random_prompt(length: int) -> list[int]:
    draw = random.Random(length)
    return [draw.randrange(2, 512) for _ in range(length)]


def short_prompts(size: int) -> list[list[int]]:
    """C2, C4: n - 1, n and n + 1 tokens, so that ranks are left without a token."""
    return [random_prompt(n) for n in (size - 1, size, size + 1)]


@pytest.fixture(scope="module")
def tensor_parallel(pool, golden):
    """Caches of mode off, by number of ranks."""
    made = {}

    def run(size: int):
        if size not in made:
            kwargs = {"model": golden.model, "prompts": golden.prompts, "alone": short_prompts(size)}
            kwargs |= {"tensor_parallel_size": size, **BLOCK}
            made[size] = pool.run(size, "scenarios:caches", kwargs)[0]
        return made[size]

    return run


def check_blocks(caches, tokens: int) -> None:
    """Every prompt token left a row in every cache, and nothing else did: not the null block (0), not the last
    block, where a slot of -1 would land, no row past a prompt's end."""
    assert len(caches) == 8  # latents and indexer keys of four layers
    for name, cache in caches.items():
        written = cache.ne(0).any(-1)
        assert int(written.sum()) == tokens, name
        assert not written[0].any(), name
        assert not written[-1].any(), name


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("mode", ["flashcomm1", *PARTITIONS])
def test_caches_are_those_of_tensor_parallelism(pool, golden, tensor_parallel, size, mode):
    alone = short_prompts(size)
    options = {} if mode == "flashcomm1" else sfa_cp(partition=mode)
    kwargs = {"model": golden.model, "prompts": golden.prompts, "alone": alone, "tensor_parallel_size": size}
    reports = pool.run(size, "scenarios:caches", {**kwargs, **BLOCK, **options}, FLASHCOMM1)
    want = tensor_parallel(size)
    tokens = [*map(len, alone), sum(map(len, golden.prompts))]
    for report in [want, *reports]:
        assert report["tokens"] == tokens
        check_blocks(report["caches"], sum(tokens))
    assert set(reports[0]["kinds"]) == {None if mode == "flashcomm1" else mode}

    first, worst = reports[0]["caches"], {}
    for name, cache in want["caches"].items():
        for report in reports[1:]:
            assert torch.equal(report["caches"][name], first[name]), f"ranks differ in {name}"
        difference = check_diff(first[name], cache)
        worst[name] = difference.absolute if difference else 0.0
    print({name.removeprefix("model.layers."): f"{x:.1e}" for name, x in worst.items()})
    assert max(worst.values()) <= 1e-5


@pytest.mark.parametrize("size", [2, 4])
def test_prompts_of_one_to_n_tokens(pool, golden, size):
    """C4: tokens of TP, and no NaN from ranks without a token (a NaN logit would be the greedy choice)."""
    prompts = [random_prompt(n) for n in range(1, size + 2)]
    kwargs = {"model": golden.model, "prompts": prompts, "plan": ["alone"], **BLOCK}
    off = pool.run(1, "scenarios:rounds", kwargs)[0]["alone"]
    kwargs |= {"tensor_parallel_size": size, **sfa_cp()}
    for report in pool.run(size, "scenarios:rounds", kwargs, FLASHCOMM1):
        assert [a["tokens"] for a in report["alone"]] == [a["tokens"] for a in off]
        for answer, want in zip(report["alone"], off, strict=True):
            assert float((answer["logits"] - want["logits"]).abs().max()) < 2e-4
        # Ranks really were without a token: prompts and decodes both have fewer than n.
        assert min(sum(step.segment_rows) for step in report["steps"]["alone"]) <= 1


@pytest.mark.parametrize("partition", PARTITIONS)
def test_a_decode_and_two_prefills_in_one_step(pool, golden, partition):
    """C5: 1, 7 and 5,000 tokens. A rank without tokens of a request reads none of its blocks."""
    prompts = [random_prompt(n) for n in (900, 7, 5000)]
    common = {
        "model": golden.model,
        "prompts": prompts,
        "max_model_len": 6000,
        "max_num_batched_tokens": 6000,
        "hf_overrides": {"max_position_embeddings": 8192, "rope_parameters": ROPE | {"factor": 8}},
        "block_size": 16,
        "num_gpu_blocks_override": 512,
    }
    off = pool.run(2, "scenarios:arrivals", {**common, "tensor_parallel_size": 2})[0]
    options = {"tensor_parallel_size": 4, "blind": True, **sfa_cp(partition=partition)}
    reports = pool.run(4, "scenarios:arrivals", {**common, **options}, FLASHCOMM1)
    without = 0
    for report in reports:
        assert report["tokens"] == off["tokens"]
        mixed = report["steps"][1]
        assert mixed.query_lens == [1, 7, 5000]
        assert mixed.mixed
        for rows, keys in zip(mixed.segment_rows, mixed.segment_keys, strict=True):
            assert (keys > 0) == (rows > 0)
            without += rows == 0
        assert report["launches"]
    assert without > 0
