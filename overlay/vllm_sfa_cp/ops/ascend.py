"""Kernels on Ascend NPUs: the interface over torch_npu's operators.

Every call hands the operators what their contract asks: TND queries, PA_BSND caches, int32 prefix sums,
lengths and block tables, contiguous tensors. Nothing here waits for the device. Checked on a CPU against the
operators' schemas and documented semantics (tests/ascend); not yet run on hardware.

Cache layout, private to this class: the sparse attention operator takes latent and rope keys as two caches,
both contiguous, so the storage of kv_cache [num_blocks, block_size, D + R] is used as two planes, all latents
first. A connector that moves single blocks of this tensor between machines would tear them apart.
"""

import importlib
import os
from types import ModuleType

import torch

from vllm_sfa_cp.ops.interface import Segments

# Another module with torch_npu's functions, by import path: the contract tests put theirs here.
ENV_MODULE = "VLLM_SFA_CP_TORCH_NPU"
# The batched matrix product refuses a batch * inner dimension from here on.
_DIMENSION_LIMIT = 65536
_MLA_ABSORBED = 2
_RIGHT_DOWN_CAUSAL = 3
_COUNTS = frozenset((*range(1, 2049), *range(3072, 8193, 1024)))


class AscendOps:
    """`SparseOps` over torch_npu, and the fused operators that the interface does not have.

    `ordered`: sort the selected positions as the interface promises. The operators do not need it.
    """

    name = "ascend"

    def __init__(self, module: ModuleType | None = None, ordered: bool = True) -> None:
        """ImportError where torch_npu (or what the environment names in its place) cannot be imported."""
        self._npu = module or importlib.import_module(os.environ.get(ENV_MODULE) or "torch_npu")
        self._ordered = ordered

    def write_latent(
        self, kv_cache: torch.Tensor, kv_c: torch.Tensor, k_pe: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        latent, rope = planes(kv_cache, kv_c.shape[-1])
        self._scatter(latent, kv_c, slot_mapping)
        self._scatter(rope, k_pe, slot_mapping)

    def write_indexer_key(self, k_cache: torch.Tensor, k: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        self._scatter(k_cache, k, slot_mapping)

    def indexer_topk(
        self,
        q: torch.Tensor,
        weights: torch.Tensor,
        k_cache: torch.Tensor,
        segments: Segments,
        topk: int,
    ) -> torch.Tensor:
        """As the interface says. ValueError: a `topk` that the operator does not offer."""
        if topk not in _COUNTS:
            raise ValueError(
                f"npu_lightning_indexer selects 1..2048 or 3072, 4096, ..., 8192 keys, not {topk}"
            )
        rows = q.shape[0]
        if rows == 0:
            return torch.empty(0, topk, dtype=torch.int32, device=q.device)
        selected, _ = self._npu.npu_lightning_indexer(
            q.contiguous(),
            k_cache.unsqueeze(2),
            weights.to(q.dtype).contiguous(),
            actual_seq_lengths_query=_int32(segments.cu_query_lens),
            actual_seq_lengths_key=_int32(segments.key_lens),
            block_table=_int32(segments.block_table),
            layout_query="TND",
            layout_key="PA_BSND",
            sparse_count=topk,
            sparse_mode=_RIGHT_DOWN_CAUSAL,
        )
        selected = selected.view(rows, topk)
        selected = selected.masked_fill(_padding(segments, rows)[:, None], -1)
        if not self._ordered:
            return selected
        last = torch.iinfo(torch.int32).max  # missing ones sort to the end
        selected = selected.masked_fill(selected < 0, last).sort(dim=-1).values
        return selected.masked_fill(selected == last, -1)

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
        if rows == 0:
            return torch.empty_like(q_latent)
        latent, rope = planes(kv_cache, width)
        latent, rope = latent.unsqueeze(2), rope.unsqueeze(2)
        output, _, _ = self._npu.npu_sparse_flash_attention(
            q_latent.contiguous(),
            latent,
            latent,  # value=None means the same, from CANN 9.2 on
            indices.unsqueeze(1).contiguous(),
            scale,
            block_table=_int32(segments.block_table),
            actual_seq_lengths_query=_int32(segments.cu_query_lens),
            actual_seq_lengths_kv=_int32(segments.key_lens),
            query_rope=q_pe.contiguous(),
            key_rope=rope,
            sparse_block_size=1,
            layout_query="TND",
            layout_kv="PA_BSND",
            sparse_mode=_RIGHT_DOWN_CAUSAL,
            attention_mode=_MLA_ABSORBED,
        )
        # Rows that select nothing are outside the operator's contract: whatever it left there goes.
        nothing = _padding(segments, rows) | (indices[:, 0] < 0)
        return output.masked_fill(nothing[:, None, None], 0)

    def norm_rope_write(
        self,
        kv: torch.Tensor,
        gamma: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        epsilon: float,
    ) -> None:
        """Normalise, rotate and store latents in one operator.

        kv [T, D + R] as projected, gamma [D], cos and sin [T, R] (each half of R holds the same angles),
        kv_cache [num_blocks, block_size, D + R], slot_mapping [>= T], -1 writes nothing.
        The operator rotates pairs (2i, 2i + 1) and stores them as (i, i + R/2): queries for this cache come
        from `rotate_query`, which does the same.
        """
        self._norm_rope(kv, gamma, cos, sin, *planes(kv_cache, gamma.shape[0]), slot_mapping, epsilon, False)

    def norm_rope(
        self,
        kv: torch.Tensor,
        gamma: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        kv_cache: torch.Tensor,
        epsilon: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same for context parallelism: nothing is stored, the local rows (kv_c [T, D], k_pe [T, R]) come
        back, to be gathered and then stored once by `write_latent`. Arguments as `norm_rope_write`."""
        width = gamma.shape[0]
        nowhere = torch.full((kv.shape[0],), -1, dtype=torch.int64, device=kv.device)
        k_pe, kv_c = self._norm_rope(
            kv, gamma, cos, sin, *planes(kv_cache, width), nowhere, epsilon, output=True
        )
        return kv_c.view(-1, width), k_pe.view(kv.shape[0], -1)

    def rotate_query(self, q_pe: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """q_pe [T, H, R] rotated into the order that `norm_rope*` give keys. cos, sin [T, R]."""
        if q_pe.shape[0] == 0:
            return torch.empty_like(q_pe)
        rotated = self._npu.npu_interleave_rope(
            q_pe.contiguous().unsqueeze(2), cos[:, None, None].contiguous(), sin[:, None, None].contiguous()
        )
        return rotated.squeeze(2)

    def value_up(self, x: torch.Tensor, w_uv: torch.Tensor) -> torch.Tensor:
        """As the interface says. A plain batched product where H * D reaches 65536, which the fused one refuses:
        DeepSeek-V3.2's 128 heads * 512 is exactly that."""
        rows, heads, width = x.shape
        if rows == 0 or heads * width >= _DIMENSION_LIMIT:
            return torch.bmm(x.transpose(0, 1), w_uv).transpose(0, 1).reshape(rows, heads * w_uv.shape[2])
        product = self._npu.npu_transpose_batchmatmul(
            x.contiguous(), w_uv.contiguous(), perm_x1=[1, 0, 2], perm_y=[1, 0, 2]
        )
        return product.view(rows, heads * w_uv.shape[2])

    def _norm_rope(
        self,
        kv: torch.Tensor,
        gamma: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        latent: torch.Tensor,
        rope: torch.Tensor,
        slot_mapping: torch.Tensor,
        epsilon: float,
        output: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(k_pe, kv_c) as the operator returns them; empty where `output` is false."""
        rows = kv.shape[0]
        if rows == 0:
            return kv.new_empty(0, rope.shape[-1]), kv.new_empty(0, latent.shape[-1])
        _, _, k_pe, kv_c = self._npu.npu_kv_rmsnorm_rope_cache(
            kv.contiguous().view(rows, 1, 1, -1),
            gamma,
            cos[:, None, None].contiguous(),
            sin[:, None, None].contiguous(),
            slot_mapping[:rows].to(torch.int64).contiguous(),
            rope.unsqueeze(2),
            latent.unsqueeze(2),
            epsilon=epsilon,
            cache_mode="PA",
            is_output_kv=output,
        )
        return k_pe, kv_c

    def _scatter(self, cache: torch.Tensor, rows: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Store rows [T, width] at slots of cache [num_blocks, block_size, width]; slot -1 writes nothing.

        The operator forbids indices out of range, and dropping rows needs their number on the host. So a row
        without a slot repeats the row with the highest slot, or, where no row has one, what slot 0 holds.
        """
        if rows.shape[0] == 0:
            return
        flat = cache.view(-1, cache.shape[-1])
        slots = slot_mapping[: rows.shape[0]]
        top, row = slots.max(dim=0, keepdim=True)
        kept = (slots >= 0)[:, None]
        spare = torch.where(top[:, None] >= 0, rows.index_select(0, row).to(cache.dtype), flat[:1])
        updates = torch.where(kept, rows.to(cache.dtype), spare)
        targets = torch.where(kept, slots[:, None], top.clamp(min=0)[:, None])
        self._npu.npu_scatter_nd_update_(flat, targets, updates)


def planes(kv_cache: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(latent [num_blocks, block_size, width], rope [num_blocks, block_size, rest]): the contiguous planes in
    the storage of kv_cache [num_blocks, block_size, width + rest]. RuntimeError unless that is contiguous."""
    blocks, block_size, full = kv_cache.shape
    flat = kv_cache.view(-1)
    cut = blocks * block_size * width
    return flat[:cut].view(blocks, block_size, width), flat[cut:].view(blocks, block_size, full - width)


def _int32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.int32).contiguous()


def _padding(segments: Segments, rows: int) -> torch.Tensor:
    """[rows] bool: at or past the last segment's end. The operators leave such rows as they find them."""
    row = torch.arange(rows, dtype=torch.int32, device=segments.cu_query_lens.device)
    return row >= segments.cu_query_lens[-1]
