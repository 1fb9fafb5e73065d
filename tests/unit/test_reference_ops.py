"""Reference kernels against a per-token oracle that knows nothing of blocks, tiles or batches."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_batches import DI, Batch, D, R, batches
from torch.profiler import ProfilerActivity, profile
from vllm_sfa_cp.ops import get_ops
from vllm_sfa_cp.ops.interface import Segments, SparseOps
from vllm_sfa_cp.ops.reference import ReferenceOps, select_topk

KINDS = [pytest.param(True, id="fused"), pytest.param(False, id="torch")]


def oracle_scores(batch: Batch, row: int) -> torch.Tensor:
    keys = batch.k_cache.flatten(0, 1)[batch.visible[row]].double()
    products = (batch.q[row].double() @ keys.T).relu()
    return (batch.weights[row].double()[:, None] * products).sum(0)


def oracle_attention(batch: Batch, row: int, chosen: list[int], scale: float) -> torch.Tensor:
    latent = batch.kv_cache.flatten(0, 1)[batch.visible[row][chosen]].double()
    query = torch.cat((batch.q_latent[row], batch.q_pe[row]), -1).double()
    return (query @ latent.T * scale).softmax(-1) @ latent[:, :D]


def check(ops: SparseOps, batch: Batch, exact: bool) -> None:
    indices = ops.indexer_topk(batch.q, batch.weights, batch.k_cache, batch.segments, batch.topk)
    output = ops.sparse_mla(batch.q_latent, batch.q_pe, batch.kv_cache, indices, batch.segments, scale := 0.3)
    assert indices.dtype == torch.int32
    assert indices.shape == (batch.rows, batch.topk)
    assert output.dtype == batch.q_latent.dtype
    tolerance = 1e-4 if batch.q.dtype == torch.float32 else 0.05
    for row in range(batch.rows):
        listed = indices[row].tolist()
        chosen = [p for p in listed if p >= 0]
        assert listed == sorted(set(chosen)) + [-1] * (batch.topk - len(chosen))
        if not len(batch.visible[row]):
            assert not chosen
            assert not output[row].any()
            continue
        scores = oracle_scores(batch, row)
        assert len(chosen) == min(batch.topk, len(scores))
        assert chosen[-1] < len(scores)
        expected = sorted(scores.argsort(descending=True, stable=True)[: batch.topk].tolist())
        if exact:
            assert chosen == expected
        else:  # rounding may swap two keys whose scores are this close
            assert scores[chosen].sum() >= scores[expected].sum() - tolerance * scores.abs().sum()
        reference = oracle_attention(batch, row, chosen, scale)
        torch.testing.assert_close(output[row].double(), reference, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("fused", KINDS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_matches_a_dense_oracle(fused: bool, data: st.DataObject) -> None:
    check(ReferenceOps(fused), data.draw(batches()), exact=False)


@pytest.mark.parametrize("fused", KINDS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_ties_go_to_the_lowest_position(fused: bool, data: st.DataObject) -> None:
    """Scores are small integers, exact in every dtype: the selection must equal a stable sort's."""
    check(ReferenceOps(fused), data.draw(batches(ties=True)), exact=True)


def slice_of(segments: Segments, start: int, stop: int) -> Segments:
    """The segments of rows [start, stop) alone."""
    ends = segments.cu_query_lens.clamp(min=start, max=stop) - start
    tail = (segments.cu_query_lens - stop).clamp(min=0)  # rows of the segment that the slice leaves out
    counts = torch.diff(ends, prepend=torch.zeros(1, dtype=ends.dtype))
    lengths = torch.where(counts > 0, segments.key_lens - tail, 0)
    return Segments(ends.int(), lengths.int(), segments.block_table, segments.max_key_len)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fused", KINDS)
@pytest.mark.parametrize(
    ("heads", "width", "threads"),
    [(1, 64, 1), (4, 32, 1), (20, 48, 1), (32, 64, 1), (64, 128, 1), (1, 64, 2), (32, 64, 2)],
)
def test_a_row_selects_the_same_whatever_is_launched_with_it(
    heads: int, width: int, dtype: torch.dtype, fused: bool, threads: int
) -> None:
    """Case C12, down to the bits of the scores: among many near-ties a changed bit selects another key."""
    torch.manual_seed(heads)
    counts, lengths, topk, block_size = [70, 1, 3, 40], [600, 900, 513, 40], 32, 16
    rows, width_in_blocks = sum(counts), -(-max(lengths) // block_size)
    table = torch.randperm(4 * width_in_blocks).view(4, -1).int()
    segments = Segments(torch.tensor(counts).cumsum(0).int(), torch.tensor(lengths).int(), table, 900)
    q = torch.randn(rows, heads, width).to(dtype)
    weights = torch.randn(rows, heads).to(dtype)
    base = torch.randn(1, width)  # keys that differ in the last bits only
    k_cache = (base + 1e-6 * torch.randn(table.numel() * block_size, width)).to(dtype)
    k_cache[::7] = torch.randn(len(k_cache[::7]), width).to(dtype)
    k_cache = k_cache.view(-1, block_size, width)
    ops = ReferenceOps(fused)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = ops.indexer_topk(q, weights, k_cache, segments, topk)
        cuts = [(0, 1), (0, 16), (5, 70), (33, 34), (60, 73), (66, 71), (70, 74), (70, 114), (113, 114)]
        for start, stop in cuts:
            part = ops.indexer_topk(
                q[start:stop], weights[start:stop], k_cache, slice_of(segments, start, stop), topk
            )
            assert torch.equal(part, whole[start:stop]), (start, stop)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kind", ["random", "ramp", "few", "equal", "special"])
def test_selection_equals_a_stable_sort(kind: str) -> None:
    torch.manual_seed(1)
    scores = torch.randn(5, 700)
    if kind == "ramp":
        scores = torch.arange(700.0).expand(5, -1).contiguous()
    elif kind == "few":
        scores = torch.randint(-2, 3, (5, 700)).float()
    elif kind == "equal":
        scores = torch.zeros(5, 700)
        scores[:, ::2] = -0.0
    elif kind == "special":
        scores[0, 3:650] = math.nan
        scores[1, 5] = math.inf
        scores[1, 9] = -math.inf
        scores[2, :] = math.nan
    clean = scores.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
    for topk in (1, 64, 699):
        expected = clean.sort(descending=True, stable=True).indices[:, :topk].sort().values
        assert torch.equal(select_topk(scores.clone(), topk), expected)
        loops = pytest.importorskip("vllm_sfa_cp.ops.cpu_loops")
        chosen = torch.empty(5, topk, dtype=torch.int32)
        loops.select_topk(scores.numpy(), torch.full((5,), 700).numpy(), chosen.numpy())
        assert torch.equal(chosen.long(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_writes_skip_negative_slots_and_surplus_mapping(dtype: torch.dtype) -> None:
    ops = ReferenceOps()
    kv_cache = torch.full((4, 3, D + R), -7.0, dtype=dtype)
    k_cache = torch.full((4, 3, DI), -7.0, dtype=dtype)
    slots = torch.tensor([11, -1, 0, 4, -1, 2])  # longer than the rows written
    kv_c, k_pe, k = torch.randn(4, D), torch.randn(4, R), torch.randn(4, DI)
    ops.write_latent(kv_cache, kv_c.to(dtype), k_pe.to(dtype), slots)
    ops.write_indexer_key(k_cache, k.to(dtype), slots)
    for slot, row in ((11, 0), (0, 2), (4, 3)):
        assert torch.equal(kv_cache.flatten(0, 1)[slot], torch.cat((kv_c[row], k_pe[row])).to(dtype))
        assert torch.equal(k_cache.flatten(0, 1)[slot], k[row].to(dtype))
    untouched = torch.ones(12, dtype=torch.bool)
    untouched[[11, 0, 4]] = False
    assert (kv_cache.flatten(0, 1)[untouched] == -7).all()
    assert (k_cache.flatten(0, 1)[untouched] == -7).all()


def test_rows_whose_indices_are_all_missing_return_zeros() -> None:
    ops = ReferenceOps()
    segments = Segments(torch.tensor([3]).int(), torch.tensor([3]).int(), torch.tensor([[1]]).int(), 3)
    indices = torch.tensor([[0, -1], [-1, -1], [0, 2]]).int()
    kv_cache = torch.randn(2, 4, D + R)
    kv_cache[0] = math.nan
    q_latent, q_pe = torch.randn(4, 2, D), torch.randn(4, 2, R)
    indices = torch.cat((indices, torch.full((1, 2), -1).int()))
    output = ops.sparse_mla(q_latent, q_pe, kv_cache, indices, segments, 1.0)
    assert not output[1].any()
    assert not output[3].any()
    torch.testing.assert_close(output[0], kv_cache[1, 0, :D].expand(2, -1))
    assert output[2].isfinite().all()


def peak_bytes(rows: int, context: int) -> int:
    """Peak of torch's live allocations during one launch of both kernels, outputs included."""
    heads, topk, block_size = 8, 64, 16
    blocks = context // block_size
    segments = Segments(
        torch.tensor([rows]).int(), torch.tensor([context]).int(), torch.arange(blocks)[None].int(), context
    )
    q, weights = torch.randn(rows, heads, DI), torch.rand(rows, heads)
    k_cache, kv_cache = torch.randn(blocks, block_size, DI), torch.randn(blocks, block_size, D + R)
    q_latent, q_pe = torch.randn(rows, 2, D), torch.randn(rows, 2, R)
    ops = ReferenceOps(fused=False)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        indices = ops.indexer_topk(q, weights, k_cache, segments, topk)
        ops.sparse_mla(q_latent, q_pe, kv_cache, indices, segments, 1.0)
    assert run.profiler is not None
    live = peak = 0
    for event in run.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


def test_peak_memory_is_linear_in_rows_and_in_context() -> None:
    base = peak_bytes(512, 4096)
    per_row = (peak_bytes(1024, 4096) - base) / 512
    again = (peak_bytes(2048, 4096) - base) / 1536
    assert 0 < per_row < 4096 * 4  # far from one float per row and key
    assert again <= per_row * 1.1
    assert peak_bytes(512, 8192) - base < 4096 * 1024  # keys and a block of scores, not 512 rows of scores


def test_unknown_kernel_set_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="ascend, reference"):
        get_ops("cuda")
    assert isinstance(get_ops("reference"), SparseOps)
