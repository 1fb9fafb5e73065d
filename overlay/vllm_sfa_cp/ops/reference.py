"""Reference kernels in torch: exact, blocked, causal-only. The CPU's kernels and every device's oracle.

Guarantees
- Memory: beyond inputs and outputs a launch holds one segment's keys (linear in its context), one tile of
  products, one block of scores and one block of gathered latents; nothing of size T x context, and no gather
  of the whole step.
- Work: a block of rows scores keys up to its own largest visible key, rounded up to `_KEY_TILE`. Rows that
  see no more than topk keys select all of them unscored.
- Selection: given scores, ties go to the lowest position. Scores are the same bits whatever else is in the
  launch: products come from tiles of fixed key count at fixed positions, the heads of a row are padded to a
  multiple of `_HEAD_PAD` (below that BLAS adds in another order), the weighted sum has a fixed order.
- A cache block is read only on behalf of a row that may see a key in it.

What bounds them: docs/performance.md, section "Kernels".
"""

from types import ModuleType

import torch

from vllm_sfa_cp.ops.interface import Segments

_ROW_BLOCK = 32  # rows per product tile: 32 x 32 heads x 256 keys x 4 bytes is the 1 MiB of a usual L2 cache
_KEY_TILE = 256
_SLOT_SPAN = 8 * _KEY_TILE  # keys of unrelated rows whose cache slots are computed at a time
_HEAD_PAD = 8
_BATCHED_ROWS = 4  # a segment with at most this many rows to score shares batched calls with others
_ATTEND_ELEMENTS = 16 * 128 * 288  # latents gathered at a time: twice a usual L2 cache, few calls
_ATTEND_SPAN = 256  # rows whose cache slots are computed at a time


class ReferenceOps:
    """`SparseOps` in torch. float32 or bfloat16; sums over heads, softmax and selection are float32."""

    name = "reference"

    def __init__(self, fused: bool = True) -> None:
        """`fused=False`: torch only, also on the CPU (otherwise numba fuses what torch cannot)."""
        self._loops = _load_loops() if fused else None

    def write_latent(
        self, kv_cache: torch.Tensor, kv_c: torch.Tensor, k_pe: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        _write_rows(kv_cache, torch.cat((kv_c, k_pe), dim=-1), slot_mapping)

    def write_indexer_key(self, k_cache: torch.Tensor, k: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        _write_rows(k_cache, k, slot_mapping)

    def indexer_topk(
        self,
        q: torch.Tensor,
        weights: torch.Tensor,
        k_cache: torch.Tensor,
        segments: Segments,
        topk: int,
    ) -> torch.Tensor:
        rows = q.shape[0]
        segment_of_row, visible = row_view(segments, rows)
        positions = torch.arange(topk, dtype=torch.int32, device=q.device)
        out = torch.where(positions < visible[:, None], positions, -1).to(torch.int32)
        if segments.max_key_len <= topk:
            return out
        if pad := -q.shape[1] % _HEAD_PAD:
            q = torch.nn.functional.pad(q, (0, 0, 0, pad))
            weights = torch.nn.functional.pad(weights, (0, pad))
        scorer = _Scorer(q, weights, k_cache, visible, topk, self._loops)

        scored = torch.zeros_like(segments.key_lens, dtype=torch.long)
        scored.index_add_(0, segment_of_row, (visible > topk).long())
        few: list[int] = []
        for segment, (end, count) in enumerate(zip(segments.cu_query_lens.tolist(), scored.tolist())):
            if count <= _BATCHED_ROWS:
                few.extend(range(end - count, end))
                continue
            keys = scorer.keys(segments.block_table[segment, None], visible[end - 1, None])[0]
            for start in range(end - count, end, _ROW_BLOCK):
                block = slice(start, min(start + _ROW_BLOCK, end))
                scorer.score_block(block, keys)
                scorer.select(block, out[block])
        if few:
            rows_left = torch.tensor(few, device=q.device)
            rows_left = rows_left[visible[rows_left].argsort(stable=True)]  # similar contexts share a call
            for group in rows_left.split(_ROW_BLOCK):
                scorer.score_batch(group, segments.block_table[segment_of_row[group]])
                chosen = torch.empty(len(group), topk, dtype=torch.int32, device=q.device)
                out[group] = scorer.select(group, chosen)
        return out

    def value_up(self, x: torch.Tensor, w_uv: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x.transpose(0, 1), w_uv).transpose(0, 1).flatten(1)

    def sparse_mla(
        self,
        q_latent: torch.Tensor,
        q_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        indices: torch.Tensor,
        segments: Segments,
        scale: float,
    ) -> torch.Tensor:
        segment_of_row, visible = row_view(segments, q_latent.shape[0])
        attends = (visible > 0) & (indices[:, 0] >= 0)
        count = int(attends.sum())
        rows: slice | torch.Tensor = slice(0, count)
        if not bool(attends[:count].all()):  # a row that selects nothing sits between others
            rows = attends.nonzero()[:, 0]
        out = torch.empty_like(q_latent, memory_format=torch.contiguous_format)
        result = out[:count]
        _attend(
            q_latent[rows],
            q_pe[rows],
            kv_cache,
            indices[rows],
            segment_of_row[rows],
            segments.block_table,
            scale,
            result,
        )
        if isinstance(rows, slice):
            out[count:] = 0
            return out
        return torch.zeros_like(out).index_copy_(0, rows, result)


class _Scorer:
    """Indexer scores of one launch, a block of rows at a time, in buffers that every block reuses."""

    def __init__(
        self,
        q: torch.Tensor,
        weights: torch.Tensor,
        k_cache: torch.Tensor,
        visible: torch.Tensor,
        topk: int,
        loops: ModuleType | None,
    ) -> None:
        """q [T, HI, DI] and weights [T, HI] with HI a multiple of `_HEAD_PAD`; visible [T]."""
        self._q, self._weights, self._cache, self._topk = q, weights.float().contiguous(), k_cache, topk
        self._visible = visible.long()
        self._longest = _whole_tiles(int(visible.max()))
        self._scores = torch.empty(_ROW_BLOCK, self._longest, device=q.device)
        self._products = q.new_empty(_ROW_BLOCK, q.shape[1], _KEY_TILE)
        supported = q.is_cpu and q.dtype in (torch.float32, torch.bfloat16)
        self._loops = loops if supported else None

    def keys(self, table: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """[n, whole tiles, DI] cached keys in context order; past its length a row repeats its last key."""
        position = torch.arange(_whole_tiles(int(lengths.max())), device=table.device)
        position = position.minimum(lengths.long()[:, None] - 1)
        row = torch.arange(len(table), device=table.device)
        slots = cache_slots(table, row, position, self._cache.shape[1])
        return self._cache.flatten(0, 1).index_select(0, slots.flatten()).view(*position.shape, -1)

    def score_block(self, rows: slice, keys: torch.Tensor) -> None:
        """Consecutive rows of one segment against its keys [whole tiles, DI]."""
        q, weights = self._q[rows].flatten(0, 1), self._weights[rows]
        products = self._products[: len(weights)]
        for start in range(0, int(self._visible[rows.stop - 1]), _KEY_TILE):
            torch.mm(q, keys[start : start + _KEY_TILE].t(), out=products.flatten(0, 1))
            self._reduce(products, weights, start)

    def score_batch(self, rows: torch.Tensor, table: torch.Tensor) -> None:
        """Unrelated rows, each against the keys of its own block table row."""
        q, weights, visible = self._q[rows], self._weights[rows], self._visible[rows]
        products = self._products[: len(rows)]
        row = torch.arange(len(rows), device=rows.device)
        flat_cache = self._cache.flatten(0, 1)
        keys = self._cache.new_empty(len(rows), _KEY_TILE, flat_cache.shape[1])
        longest = _whole_tiles(int(visible.max()))
        for first in range(0, longest, _SLOT_SPAN):
            position = torch.arange(first, min(first + _SLOT_SPAN, longest), device=rows.device)
            position = position.minimum(visible[:, None] - 1)
            slots = cache_slots(table, row, position, self._cache.shape[1])
            for tile, part in enumerate(slots.split(_KEY_TILE, dim=1)):
                torch.index_select(flat_cache, 0, part.flatten(), out=keys.flatten(0, 1))
                torch.bmm(q, keys.transpose(1, 2), out=products)
                self._reduce(products, weights, first + tile * _KEY_TILE)

    def select(self, rows: slice | torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Fill and return chosen [n, topk] int32 from the scores of the n rows scored last."""
        visible = self._visible[rows]
        if self._loops is not None:
            self._loops.select_topk(self._scores.numpy(), visible.numpy(), chosen.numpy())
            return chosen
        scores = self._scores[: len(visible), : _whole_tiles(int(visible.max()))]
        hidden = torch.arange(scores.shape[1], device=scores.device) >= visible[:, None]
        return chosen.copy_(select_topk(scores.masked_fill(hidden, -torch.inf), self._topk))

    def _reduce(self, products: torch.Tensor, weights: torch.Tensor, start: int) -> None:
        if self._loops is None:
            total = torch.bmm(weights[:, None], products.relu_().float())
            self._scores[: len(weights), start : start + _KEY_TILE] = total[:, 0]
        elif products.dtype == torch.float32:
            self._loops.weighted_relu_sum(products.numpy(), weights.numpy(), self._scores.numpy(), start)
        else:
            bits = products.view(torch.uint16).numpy()
            self._loops.weighted_relu_sum_bf16(bits, weights.numpy(), self._scores.numpy(), start)


def _attend(
    q_latent: torch.Tensor,
    q_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    indices: torch.Tensor,
    segment_of_row: torch.Tensor,
    block_table: torch.Tensor,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Attention of n rows that all have indices[:, 0] >= 0 into out [n, H, D]; arguments as `sparse_mla`."""
    (rows, heads, width), topk = q_latent.shape, indices.shape[1]
    full = kv_cache.shape[-1]
    step = max(1, min(rows, _ATTEND_ELEMENTS // (topk * full)))
    flat_cache = kv_cache.flatten(0, 1)
    query = q_latent.new_empty(step, heads, full)
    latent = kv_cache.new_empty(step, topk, full)
    scores = q_latent.new_empty(step, heads, topk)
    for first in range(0, rows, _ATTEND_SPAN):
        span = slice(first, first + _ATTEND_SPAN)
        position = indices[span].long()
        missing = position < 0
        masked = bool(missing[:, -1].any())
        position = torch.where(missing, position[:, :1], position)  # a key the row may read; weight 0
        slots = cache_slots(block_table, segment_of_row[span], position, kv_cache.shape[1])
        for start in range(first, min(first + _ATTEND_SPAN, rows), step):
            block = slice(start, min(start + step, first + _ATTEND_SPAN, rows))
            inner = slice(block.start - first, block.stop - first)
            count = block.stop - block.start
            query[:count, :, :width] = q_latent[block]
            query[:count, :, width:] = q_pe[block]
            gathered, score = latent[:count], scores[:count]
            torch.index_select(flat_cache, 0, slots[inner].flatten(), out=gathered.flatten(0, 1))
            torch.bmm(query[:count], gathered.transpose(1, 2), out=score)
            logits = score.float().mul_(scale)  # in place when already float32
            if masked:
                logits.masked_fill_(missing[inner, None], -torch.inf)
            probability = torch.softmax(logits, -1).to(gathered.dtype)
            torch.bmm(probability, gathered[..., :width], out=out[block])


def row_view(segments: Segments, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """([rows] int64 segment, [rows] int32 visible keys); padding rows: the last segment and 0."""
    cu = segments.cu_query_lens
    row = torch.arange(rows, dtype=torch.int32, device=cu.device)
    segment = torch.searchsorted(cu, row, right=True).clamp_(max=cu.shape[0] - 1)
    visible = segments.key_lens[segment] - (cu[segment] - 1 - row)
    return segment, torch.where(row < cu[-1], visible, 0).clamp_(min=0)


def cache_slots(
    block_table: torch.Tensor, segment_of_row: torch.Tensor, position: torch.Tensor, block_size: int
) -> torch.Tensor:
    """[n, m] int64 rows of the flattened cache that hold position [n, m] of each row's request."""
    entry = position // block_size + (segment_of_row * block_table.shape[1])[:, None]
    return block_table.flatten()[entry].long() * block_size + position % block_size


def select_topk(scores: torch.Tensor, topk: int) -> torch.Tensor:
    """Positions of the `topk` largest of each row of scores [rows, keys > topk], ascending, int64.

    Equal scores: the lowest position is taken. NaN counts as the lowest score.
    """
    scores.nan_to_num_(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    threshold = scores.topk(topk, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    chosen = scores >= threshold
    if int(chosen.sum()) != topk * scores.shape[0]:  # ties at the threshold: keep the first that fit
        above = scores > threshold
        tied = chosen & ~above
        room = topk - above.sum(-1, keepdim=True)
        chosen = above | (tied & (tied.cumsum(-1) <= room))
    return chosen.nonzero()[:, 1].view(-1, topk)


def _whole_tiles(length: int) -> int:
    return -(-length // _KEY_TILE) * _KEY_TILE


def _write_rows(cache: torch.Tensor, rows: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    slots = slot_mapping[: rows.shape[0]]
    block_size = cache.shape[1]
    keep = slots >= 0
    slots = slots[keep]
    cache[slots // block_size, slots % block_size] = rows[keep].to(cache.dtype)


def _load_loops() -> ModuleType | None:
    try:
        from vllm_sfa_cp.ops import cpu_loops
    except ImportError:  # numba is vLLM's dependency, not ours
        return None
    return cpu_loops
