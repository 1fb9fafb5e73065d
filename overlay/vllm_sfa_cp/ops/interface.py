"""The one interface behind which every device's sparse-attention kernels sit.

Vocabulary (shapes use these letters everywhere):
    T   rows of this launch (local tokens, padding rows included)
    S   segments: runs of consecutive rows that belong to one request and are consecutive in its context.
        Under TP a segment is a request; under CP a request may have up to three segments per rank.
    H   query heads of the launch, HI index heads, D latent width (kv_lora_rank), R rope width, DI index width
    K   index_topk

A launch is described by `Segments`; rows at or past `cu_query_lens[-1]` are padding: kernels return -1
indices and zero output for them and read no cache block on their behalf.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch


@dataclass(frozen=True)
class Segments:
    """Which rows see which keys. All tensors int32, on the launch's device, and describe the same batch.

    cu_query_lens: [S] inclusive prefix sum of rows per segment (no leading zero); non-decreasing.
    key_lens:      [S] number of keys visible to the segment's LAST row; 0 for a segment without rows. Row j of
                   a segment of c rows sees keys [0, key_len - (c - 1 - j)): right-down causal.
    block_table:   [S, max_blocks] physical cache block of each logical block of the segment's request.
    max_key_len:   host-side upper bound of key_lens (bounds workspaces; no device sync needed).
    """

    cu_query_lens: torch.Tensor
    key_lens: torch.Tensor
    block_table: torch.Tensor
    max_key_len: int


@runtime_checkable
class SparseOps(Protocol):
    """Kernels of one device. Implementations: `reference.ReferenceOps`, `ascend.AscendOps`."""

    name: str

    def write_latent(
        self, kv_cache: torch.Tensor, kv_c: torch.Tensor, k_pe: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Store latents. kv_cache [num_blocks, block_size, D + R]; kv_c [T, D]; k_pe [T, R] (rotated);
        slot_mapping [>= T] int64, slot = block * block_size + offset, -1 writes nothing."""

    def write_indexer_key(self, k_cache: torch.Tensor, k: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Store indexer keys. k_cache [num_blocks, block_size, DI]; k [T, DI]; slot_mapping as above."""

    def indexer_topk(
        self,
        q: torch.Tensor,
        weights: torch.Tensor,
        k_cache: torch.Tensor,
        segments: Segments,
        topk: int,
    ) -> torch.Tensor:
        """Select keys. score[t, s] = sum_h weights[t, h] * relu(q[t, h] . k[s]); q [T, HI, DI]; weights [T, HI]
        with every scale already multiplied in. Returns int32 [T, topk]: positions in the request's own context,
        ascending, padded with -1 at the end. Ties go to the lowest position, and a row's selection does
        not depend on which other rows are in the launch."""

    def sparse_mla(
        self,
        q_latent: torch.Tensor,
        q_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        indices: torch.Tensor,
        segments: Segments,
        scale: float,
    ) -> torch.Tensor:
        """Softmax attention over the selected keys in latent space. q_latent [T, H, D] (W_UK absorbed),
        q_pe [T, H, R] rotated, indices [T, K] from `indexer_topk`. Returns [T, H, D] in q_latent's dtype; rows
        whose indices are all -1 return zeros."""

    def value_up(self, x: torch.Tensor, w_uv: torch.Tensor) -> torch.Tensor:
        """Attended latents to values: x [T, H, D] times w_uv [H, D, V] per head -> [T, H * V]."""
