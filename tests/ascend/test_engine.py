"""The whole engine on the Ascend kernels, over the contract: device cpu, every operator call checked."""

import pytest
from patchset import npu_contract
from vllm_sfa_cp.serving import SFA_CP_ENV

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.network]

STAND_IN = {"VLLM_SFA_CP_TORCH_NPU": "ascend.fake_npu"}
CACHE = {"block_size": 16, "num_gpu_blocks_override": 256, "max_num_seqs": 9}
SFA_CP = {"enable_sfa_cp": True, "sfa_cp": {"ops": "ascend"}}


@pytest.fixture(scope="module", autouse=True)
def wheel():
    """Fetched here, so that the ranks find it in the cache."""
    try:
        return npu_contract.wheel(npu_contract.PINNED)
    except npu_contract.Unavailable as problem:
        pytest.skip(str(problem))


@pytest.mark.parametrize(
    ("size", "env", "additional", "more"),
    [
        (2, SFA_CP_ENV, SFA_CP, {}),
        (2, SFA_CP_ENV, SFA_CP, {"max_num_batched_tokens": 64}),
        (1, {}, {"sfa_cp": {"ops": "ascend"}}, {}),
    ],
    ids=["sfa-cp-2", "sfa-cp-2-chunked", "off-1"],
)
def test_golden(pool, golden, size, env, additional, more):
    kwargs = {
        "model": golden.model,
        "prompts": golden.prompts,
        "tensor_parallel_size": size,
        "additional_config": additional,
        **CACHE,
        **more,
    }
    reports = pool.run(size, "ascend_ranks:rounds", kwargs, {**env, **STAND_IN})
    for report in reports:
        assert [a["tokens"] for a in report["together"]] == golden.tokens
        for entry in ("together", "together again"):
            worst = max(
                float((answer["logits"] - logits).abs().max())
                for answer, logits in zip(report[entry], golden.logits, strict=True)
            )
            print(f"{entry}: logits within {worst:.1e}")
            assert worst < 2e-4
        layers, calls = 4, report["calls"]
        steps = [step for log in report["steps"].values() for step in log]
        kinds = {step.kind for step in steps}
        assert kinds == ({None} if size == 1 else {"balanced", None})
        # Every layer of every step that has rows here: one selection, one attention, and the projection to values.
        busy = sum(step.kind is None or sum(step.segment_rows) > 0 for step in steps)
        for name in ("npu_lightning_indexer", "npu_sparse_flash_attention", "npu_transpose_batchmatmul"):
            assert calls[name] == layers * busy, name
        # Latent, rotated key and indexer key are each written once per layer and step, whoever owns the rows.
        assert calls["npu_scatter_nd_update_"] == 3 * layers * len(steps)
