"""Reference kernels in plain torch: exact, blocked, causal-only. The CPU's kernels and every device's oracle.

Guarantees
- Memory: beyond inputs and outputs a launch holds one segment's keys (linear in its context), one score
  tile and one block of gathered latents; nothing of size T x context, no gather of the whole step.
- Work: a block of rows scores keys up to its own largest visible key, rounded up to `_KEY_TILE`.
- Selection: given scores, ties go to the lowest position. Scores are reproducible bit for bit, whatever
  else is in the launch: products are formed over tiles of fixed key count at fixed positions, and a row's
  heads are padded to a multiple of `_HEAD_PAD`, below which BLAS adds in another order.
- A cache block is read only on behalf of a row that may see a key in it.
"""

import torch

from vllm_sfa_cp.ops.interface import Segments

_ROW_BLOCK = 16
_KEY_TILE = 512
_HEAD_PAD = 8
_ATTEND_ROWS = 16


class ReferenceOps:
    """`SparseOps` in torch. float32 or bfloat16; scores, softmax and their sums are float32."""

    name = "reference"

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
        pad = -q.shape[1] % _HEAD_PAD
        if pad:
            q = torch.nn.functional.pad(q, (0, 0, 0, pad))
            weights = torch.nn.functional.pad(weights, (0, pad))
        weights = weights.float()
        scored = (visible > topk).nonzero().flatten()
        for segment, count in zip(*torch.unique_consecutive(segment_of_row[scored], return_counts=True)):
            last = int(segments.cu_query_lens[segment])
            first = last - int(count)
            keys = _segment_keys(k_cache, segments.block_table[segment], int(segments.key_lens[segment]))
            for start in range(first, last, _ROW_BLOCK):
                block = slice(start, min(start + _ROW_BLOCK, last))
                scores = _scores(q[block], weights[block], keys, int(visible[block.stop - 1]))
                hidden = torch.arange(scores.shape[1], device=q.device) >= visible[block, None]
                out[block] = select_topk(scores.masked_fill_(hidden, -torch.inf), topk)
        return out

    def sparse_mla(
        self,
        q_latent: torch.Tensor,
        q_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        indices: torch.Tensor,
        segments: Segments,
        scale: float,
    ) -> torch.Tensor:
        rows, _, width = q_latent.shape
        out = torch.zeros_like(q_latent)
        block_size = kv_cache.shape[1]
        flat_cache = kv_cache.flatten(0, 1)
        segment_of_row, visible = row_view(segments, rows)
        attending = ((visible > 0) & (indices[:, 0] >= 0)).nonzero().flatten()
        query = torch.cat((q_latent, q_pe), dim=-1)
        for chosen in attending.split(_ATTEND_ROWS):
            position = indices[chosen].long()
            missing = position < 0
            position = torch.where(missing, position[:, :1], position)
            table = segments.block_table[segment_of_row[chosen]].long()
            slot = table.gather(1, position // block_size) * block_size + position % block_size
            latent = flat_cache[slot]
            scores = torch.bmm(query[chosen], latent.transpose(1, 2)).float().mul_(scale)
            scores.masked_fill_(missing[:, None], -torch.inf)
            probability = scores.softmax(-1).to(latent.dtype)
            out[chosen] = torch.bmm(probability, latent[..., :width])
        return out


def row_view(segments: Segments, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """([rows] int64 segment, [rows] int32 visible keys); padding rows: the last segment and 0."""
    cu = segments.cu_query_lens
    row = torch.arange(rows, dtype=torch.int32, device=cu.device)
    segment = torch.searchsorted(cu, row, right=True).clamp_(max=cu.shape[0] - 1)
    visible = segments.key_lens[segment] - (cu[segment] - 1 - row)
    return segment, torch.where(row < cu[-1], visible, 0).clamp_(min=0)


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


def _scores(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, limit: int) -> torch.Tensor:
    """float32 [rows, limit rounded up to whole key tiles] of sum_h w_h relu(q_h . k)."""
    rows, heads, width = q.shape
    flat_q = q.reshape(rows * heads, width)
    tiles = -(-limit // _KEY_TILE)
    out = torch.empty(rows, tiles * _KEY_TILE, device=q.device)
    for tile in range(tiles):
        cut = slice(tile * _KEY_TILE, (tile + 1) * _KEY_TILE)
        product = torch.mm(flat_q, keys[cut].t()).relu_().float()
        out[:, cut] = torch.bmm(weights[:, None], product.view(rows, heads, -1))[:, 0]
    return out


def _segment_keys(cache: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
    """One request's rows in context order, [length rounded up to whole key tiles, width], zero-padded."""
    block_size, width = cache.shape[1:]
    keys = cache.new_zeros(-(-length // _KEY_TILE) * _KEY_TILE, width)
    keys[:length] = cache[table[: -(-length // block_size)].long()].flatten(0, 1)[:length]
    return keys


def _write_rows(cache: torch.Tensor, rows: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    slots = slot_mapping[: rows.shape[0]]
    block_size = cache.shape[1]
    keep = slots >= 0
    slots = slots[keep]
    cache[slots // block_size, slots % block_size] = rows[keep].to(cache.dtype)
