"""AscendOps over the contract against the reference kernels, and what the contract catches."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ascend import contract
from hypothesis import HealthCheck, given, settings
from kernel_batches import Batch, D, R, batches
from patchset import npu_contract
from vllm_sfa_cp.ops.ascend import AscendOps, planes
from vllm_sfa_cp.ops.interface import Segments, SparseOps
from vllm_sfa_cp.ops.reference import ReferenceOps

pytestmark = pytest.mark.network
ROOT = Path(__file__).resolve().parents[2]
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def ascend() -> AscendOps:
    try:
        return AscendOps(contract.build())
    except npu_contract.Unavailable as problem:
        pytest.skip(str(problem))


def filled(ops: SparseOps, cache: torch.Tensor) -> torch.Tensor:
    """The same content in the layout of `ops`, written in shuffled launches that have rows without a slot."""
    flat = cache.flatten(0, 1)
    slots = (~flat.isnan().any(-1)).nonzero()[:, 0]
    slots = slots[torch.randperm(len(slots))]
    result = torch.full_like(cache, torch.nan)
    for part in (slots[::2], slots[1::2], slots[:0]):
        targets = torch.cat((part, torch.tensor([-1, -1])))
        targets = targets[torch.randperm(len(targets))]
        rows = torch.where(targets[:, None] >= 0, flat[targets.clamp(min=0)], 1e9)
        if cache.shape[-1] == D + R:
            ops.write_latent(result, rows[:, :D], rows[:, D:], targets)
        else:
            ops.write_indexer_key(result, rows, targets)
    return result


def launch(ops: SparseOps, batch: Batch, indices: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices and attention; the attention over `indices` where given."""
    selected = ops.indexer_topk(
        batch.q, batch.weights, filled(ops, batch.k_cache), batch.segments, batch.topk
    )
    output = ops.sparse_mla(
        batch.q_latent,
        batch.q_pe,
        filled(ops, batch.kv_cache),
        selected if indices is None else indices,
        batch.segments,
        0.3,
    )
    return selected, output


FLOAT_BATCHES = batches(heads=(1, 2, 5, 16, 33, 64), dtypes=(torch.float32,))


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batch=FLOAT_BATCHES)
def test_equals_reference(ascend: AscendOps, batch: Batch) -> None:
    torch.manual_seed(0)
    expected, output = launch(ReferenceOps(), batch, None)
    selected, attended = launch(ascend, batch, expected)
    torch.testing.assert_close(attended, output, atol=TOLERANCE, rtol=TOLERANCE)
    assert selected.dtype == torch.int32
    assert torch.equal(selected >= 0, expected >= 0)
    for row in (selected != expected).any(-1).nonzero()[:, 0].tolist():
        keys = batch.k_cache.flatten(0, 1)[batch.visible[row]].double()
        products = (batch.q[row].double() @ keys.T).relu()
        scores = (batch.weights[row].double()[:, None] * products).sum(0)
        ours, theirs = (scores[x[row][x[row] >= 0].long()].sort().values for x in (selected, expected))
        torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=TOLERANCE)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batch=batches(ties=True, heads=(1, 8, 64)))
def test_selects_exactly_what_the_reference_does_where_scores_are_exact(
    ascend: AscendOps, batch: Batch
) -> None:
    expected, _ = launch(ReferenceOps(), batch, None)
    selected, _ = launch(ascend, batch, None)
    assert torch.equal(selected, expected)
    unordered = AscendOps(contract.build(), ordered=False)
    raw, _ = launch(unordered, batch, None)
    assert torch.equal(raw.sort(dim=-1).values, expected.sort(dim=-1).values)


def test_empty_launches_and_unoffered_counts(ascend: AscendOps) -> None:
    segments = Segments(torch.zeros(1).int(), torch.zeros(1).int(), torch.zeros(1, 1).int(), 0)
    k_cache, kv_cache = torch.randn(2, 4, 8), torch.randn(2, 4, D + R)
    indices = ascend.indexer_topk(torch.empty(0, 2, 8), torch.empty(0, 2), k_cache, segments, 4)
    assert indices.shape == (0, 4)
    output = ascend.sparse_mla(torch.empty(0, 3, D), torch.empty(0, 3, R), kv_cache, indices, segments, 1.0)
    assert output.shape == (0, 3, D)
    ascend.write_indexer_key(k_cache, torch.empty(0, 8), torch.empty(0, dtype=torch.long))
    with pytest.raises(ValueError, match="2500"):
        ascend.indexer_topk(torch.empty(1, 2, 8), torch.empty(1, 2), k_cache, segments, 2500)


def rope_angles(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.rand(rows, R // 2) * 6
    return torch.cat((angle.cos(), angle.cos()), -1), torch.cat((angle.sin(), angle.sin()), -1)


def interleaved(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotation of adjacent pairs in place, as vLLM's DeepSeek layers do it."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    turn = torch.complex(cos, sin)[..., : R // 2]
    return torch.view_as_real(pairs * turn).flatten(-2)


def test_fused_norm_rope_cache(ascend: AscendOps) -> None:
    """Both forms store the same, and rotated queries meet those keys as in the unfused path."""
    torch.manual_seed(3)
    rows, epsilon = 6, 1e-6
    kv, gamma = torch.randn(rows, D + R), torch.rand(D)
    cos, sin = rope_angles(rows)
    slots = torch.tensor([5, -1, 0, 11, 3, -1, 9])
    stored, gathered = torch.full((3, 4, D + R), 7.0), torch.full((3, 4, D + R), 7.0)
    ascend.norm_rope_write(kv, gamma, cos, sin, stored, slots, epsilon)
    kv_c, k_pe = ascend.norm_rope(kv, gamma, cos, sin, gathered, epsilon)
    assert bool((gathered == 7).all())
    ascend.write_latent(gathered, kv_c, k_pe, slots)
    assert torch.equal(stored, gathered)
    expected = torch.nn.functional.rms_norm(kv[:, :D], (D,), gamma, epsilon)
    torch.testing.assert_close(kv_c, expected)
    q_pe = torch.randn(rows, 4, R)
    fused = ascend.rotate_query(q_pe, cos, sin) @ k_pe.T
    plain = interleaved(q_pe, cos[:, None], sin[:, None]) @ interleaved(kv[:, D:], cos, sin).T
    torch.testing.assert_close(fused, plain)
    latent, rope = planes(stored, D)
    untouched = [slot for slot in range(12) if slot not in slots.tolist()]
    assert bool((latent.flatten(0, 1)[untouched] == 7).all())
    assert bool((rope.flatten(0, 1)[untouched] == 7).all())


@pytest.mark.parametrize(("heads", "fused"), [(127, 1), (128, 0)])
def test_value_projection_avoids_the_refused_dimension(ascend: AscendOps, heads: int, fused: int) -> None:
    x, w = torch.randn(3, heads, 512), torch.randn(heads, 512, 2)
    before = contract.CALLS["npu_transpose_batchmatmul"]
    result = ascend.value_up(x, w)
    assert contract.CALLS["npu_transpose_batchmatmul"] - before == fused
    torch.testing.assert_close(result, torch.einsum("thd,hdv->thv", x, w).flatten(1), atol=1e-3, rtol=1e-4)


def indexer_call(**changes: object) -> dict[str, object]:
    call: dict[str, object] = {
        "query": torch.randn(4, 2, 8),
        "key": torch.randn(5, 4, 1, 8),
        "weights": torch.randn(4, 2),
        "actual_seq_lengths_query": torch.tensor([1, 3]).int(),
        "actual_seq_lengths_key": torch.tensor([6, 8]).int(),
        "block_table": torch.tensor([[0, 1], [2, 3]]).int(),
        "layout_query": "TND",
        "layout_key": "PA_BSND",
        "sparse_count": 2,
    }
    return {**call, **changes}


def attention_call(**changes: object) -> dict[str, object]:
    key = torch.randn(5, 4, 1, D)
    call = indexer_call()
    for name in ("key", "weights", "layout_key", "sparse_count", "actual_seq_lengths_key"):
        del call[name]
    call |= {
        "query": torch.randn(4, 2, D),
        "key": key,
        "value": key,
        "sparse_indices": torch.tensor([[0, 1], [0, -1], [2, 1], [-1, -1]]).int()[:, None],
        "scale_value": 1.0,
        "actual_seq_lengths_kv": torch.tensor([6, 8]).int(),
        "query_rope": torch.randn(4, 2, R),
        "key_rope": torch.randn(5, 4, 1, R),
        "layout_kv": "PA_BSND",
        "attention_mode": 2,
    }
    return {**call, **changes}


def cache_call(**changes: object) -> dict[str, object]:
    call: dict[str, object] = {
        "kv": torch.randn(3, 1, 1, D + R),
        "gamma": torch.ones(D),
        "cos": torch.ones(3, 1, 1, R),
        "sin": torch.ones(3, 1, 1, R),
        "index": torch.tensor([0, -1, 7]),
        "k_cache": torch.zeros(2, 4, 1, R),
        "ckv_cache": torch.zeros(2, 4, 1, D),
        "cache_mode": "PA",
    }
    return {**call, **changes}


def scatter_call(**changes: object) -> dict[str, object]:
    call: dict[str, object] = {
        "input": torch.zeros(8, 3),
        "indices": torch.tensor([[0], [7]]),
        "updates": torch.ones(2, 3),
    }
    return {**call, **changes}


CALLS = {
    "npu_lightning_indexer": indexer_call,
    "npu_sparse_flash_attention": attention_call,
    "npu_kv_rmsnorm_rope_cache": cache_call,
    "npu_scatter_nd_update_": scatter_call,
}
INT64 = torch.tensor([1, 3])
DECREASING = torch.tensor([3, 1]).int()
NEGATIVE = torch.tensor([6, -1]).int()
NARROW = torch.tensor([[0], [2]]).int()
FOREIGN = torch.tensor([[0, 1], [2, 9]]).int()
UNSEEN = torch.tensor([[0, 6], [0, -1], [2, 1], [-1, -1]]).int()[:, None]
HOLE = torch.tensor([[-1, 1], [0, -1], [2, 1], [-1, -1]]).int()[:, None]
MUTATIONS: list[tuple[str, str, object, str]] = [
    ("npu_lightning_indexer", "query", torch.randn(4, 8, 2).transpose(1, 2), "not contiguous"),
    ("npu_lightning_indexer", "key", torch.randn(5, 8, 1, 4).transpose(1, 3), "not contiguous"),
    ("npu_lightning_indexer", "query", torch.randn(4, 16), r"query is not"),
    ("npu_lightning_indexer", "query", torch.randn(4, 2, 8).double(), "float64"),
    ("npu_lightning_indexer", "weights", torch.randn(4, 2).half(), "weights has type"),
    ("npu_lightning_indexer", "weights", torch.randn(4, 3), "weights is not"),
    ("npu_lightning_indexer", "actual_seq_lengths_query", INT64, "int64"),
    ("npu_lightning_indexer", "actual_seq_lengths_query", DECREASING, "prefix sum"),
    ("npu_lightning_indexer", "actual_seq_lengths_query", None, "missing"),
    ("npu_lightning_indexer", "actual_seq_lengths_query", torch.tensor([1, 5]).int(), "past the query"),
    ("npu_lightning_indexer", "actual_seq_lengths_key", torch.tensor([6, 8]), "int64"),
    ("npu_lightning_indexer", "actual_seq_lengths_key", NEGATIVE, "negative"),
    ("npu_lightning_indexer", "actual_seq_lengths_key", torch.tensor([6]).int(), "differ in number"),
    ("npu_lightning_indexer", "block_table", None, "block_table is missing"),
    ("npu_lightning_indexer", "block_table", NARROW, "narrower"),
    ("npu_lightning_indexer", "block_table", FOREIGN, "does not exist"),
    ("npu_lightning_indexer", "layout_query", "NTD", "layout_query"),
    ("npu_lightning_indexer", "layout_key", "PA_BNSD", "layout_key"),
    ("npu_lightning_indexer", "sparse_count", 0, "sparse_count"),
    ("npu_lightning_indexer", "sparse_count", 2049, "sparse_count"),
    ("npu_lightning_indexer", "sparse_mode", 1, "sparse_mode"),
    ("npu_sparse_flash_attention", "query", torch.randn(4, D, 2).transpose(1, 2), "not contiguous"),
    ("npu_sparse_flash_attention", "query", torch.randn(4, 2 * D), "dimension must be 3"),
    ("npu_sparse_flash_attention", "value", None, "CANN >= 9.2.0"),
    ("npu_sparse_flash_attention", "value", torch.randn(5, 4, 1, D), "one cache"),
    ("npu_sparse_flash_attention", "sparse_indices", UNSEEN.long(), "int64"),
    ("npu_sparse_flash_attention", "sparse_indices", UNSEEN, "does not see"),
    ("npu_sparse_flash_attention", "sparse_indices", HOLE, "behind an invalid"),
    ("npu_sparse_flash_attention", "sparse_indices", UNSEEN[:, 0], "not .T, 1, K."),
    ("npu_sparse_flash_attention", "query_rope", None, "query_rope"),
    ("npu_sparse_flash_attention", "key_rope", torch.randn(5, 4, 1, R + 2), "key_rope"),
    ("npu_sparse_flash_attention", "attention_mode", 0, "attention_mode"),
    ("npu_sparse_flash_attention", "layout_kv", "PA", "layout_kv"),
    ("npu_sparse_flash_attention", "layout_query", "BNSD", "Not support layout"),
    ("npu_sparse_flash_attention", "block_table", None, "block_table is missing"),
    ("npu_sparse_flash_attention", "actual_seq_lengths_query", DECREASING, "prefix sum"),
    ("npu_sparse_flash_attention", "actual_seq_lengths_kv", INT64, "int64"),
    ("npu_kv_rmsnorm_rope_cache", "kv", torch.randn(3, 1, D + R), "4D tensor expected"),
    ("npu_kv_rmsnorm_rope_cache", "cos", torch.ones(3, R), "4D tensor expected"),
    ("npu_kv_rmsnorm_rope_cache", "index", torch.tensor([0, 1, 2]).int(), "int64"),
    ("npu_kv_rmsnorm_rope_cache", "index", torch.tensor([0, 1, 8]), "out of range"),
    ("npu_kv_rmsnorm_rope_cache", "cache_mode", "PAGED", "cache_mode"),
    (
        "npu_kv_rmsnorm_rope_cache",
        "ckv_cache",
        torch.zeros(2, 1, 4, D).transpose(1, 2)[::2],
        "not contig|wrong",
    ),
    ("npu_scatter_nd_update_", "indices", torch.tensor([[0], [-1]]), "out of range"),
    ("npu_scatter_nd_update_", "indices", torch.tensor([[0], [8]]), "out of range"),
    ("npu_scatter_nd_update_", "indices", torch.tensor([0, 1]), "wrong shape"),
    ("npu_scatter_nd_update_", "indices", torch.tensor([[0], [1]]).short(), "int16"),
    ("npu_scatter_nd_update_", "updates", torch.ones(2, 3).half(), "updates has type"),
    ("npu_scatter_nd_update_", "updates", torch.ones(2, 2), "updates is"),
]


@pytest.mark.parametrize(("operator", "argument", "value", "message"), MUTATIONS)
def test_the_contract_catches(
    ascend: AscendOps, operator: str, argument: str, value: object, message: str
) -> None:
    function = getattr(contract.build(), operator)
    function(**CALLS[operator]())
    with pytest.raises(contract.ContractError, match=message):
        function(**CALLS[operator](**{argument: value}))


def test_the_contract_catches_the_refused_dimension(ascend: AscendOps) -> None:
    product: Callable[..., torch.Tensor] = contract.build().npu_transpose_batchmatmul
    x, w = torch.randn(1, 128, 512), torch.randn(128, 512, 1)
    with pytest.raises(contract.ContractError, match="65536"):
        product(x, w, perm_x1=[1, 0, 2], perm_y=[1, 0, 2])
    with pytest.raises(contract.ContractError, match="perm_y should be"):
        product(x[:, :2], w[:2], perm_x1=[1, 0, 2], perm_y=[0, 1, 2])


def test_names_and_arguments_are_those_of_the_wheel(ascend: AscendOps) -> None:
    module = contract.build()
    with pytest.raises(AttributeError, match="exports no npu_made_up"):
        _ = module.npu_made_up
    with pytest.raises(NotImplementedError, match="npu_rms_norm"):
        _ = module.npu_rms_norm
    with pytest.raises(RuntimeError, match="topk"):
        module.npu_lightning_indexer(**indexer_call(topk=4))
    call = attention_call()
    del call["scale_value"]
    with pytest.raises(RuntimeError, match="scale_value"):
        module.npu_sparse_flash_attention(**call)


def test_only_sixteen_bit_types_when_strict(ascend: AscendOps) -> None:
    contract.strict(True)
    try:
        with pytest.raises(contract.ContractError, match="float32"):
            contract.build().npu_lightning_indexer(**indexer_call())
        halves = {name: indexer_call()[name].bfloat16() for name in ("query", "key", "weights")}  # type: ignore[attr-defined]
        contract.build().npu_lightning_indexer(**indexer_call(**halves))
    finally:
        contract.strict(False)


def test_every_called_operator_is_in_the_contract_and_in_the_drift_list() -> None:
    assert set(contract.IMPLEMENTATIONS) == set(npu_contract.CALLED)


def test_the_stand_in_works_in_another_process(ascend: AscendOps) -> None:
    """As an engine's workers use it: by environment only."""
    code = "from vllm_sfa_cp.ops import get_ops; print(get_ops('ascend').name)"
    environment = {
        "PYTHONPATH": f"{ROOT / 'overlay'}:{ROOT / 'tests'}",
        "VLLM_SFA_CP_TORCH_NPU": "ascend.fake_npu",
        "HOME": str(Path.home()),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "ascend", done.stderr
    del environment["VLLM_SFA_CP_TORCH_NPU"]
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert "No module named 'torch_npu'" in done.stderr
