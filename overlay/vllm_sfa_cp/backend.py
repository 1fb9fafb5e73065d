"""The attention backend for sparse MLA: cache layout, and attention of given queries over given indices.

The same implementation serves the TP path (called by vLLM's MLAAttention with this rank's heads) and SFA-CP
(called by `layers.mla` with local rows and all heads).
"""

from typing import ClassVar

import torch
from vllm.attention.backends.abstract import AttentionBackend, MultipleOf
from vllm.config import get_current_vllm_config
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.attention.backends.mla.common import MLACommonBaseImpl

from vllm_sfa_cp.metadata import IndexerMetadataBuilder, SfaMetadata, SfaMetadataBuilder
from vllm_sfa_cp import config as sfa_config
from vllm_sfa_cp.ops import get_ops
from vllm_sfa_cp.ops.interface import Segments


class SfaBackend(AttentionBackend):
    """Sparse MLA over a paged latent cache [num_blocks, block_size, kv_lora + rope]."""

    accept_output_buffer = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.bfloat16, torch.float16]

    @staticmethod
    def get_name() -> str:
        return "SFA_CP"

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int | MultipleOf]:
        return [MultipleOf(1)]

    @staticmethod
    def get_builder_cls() -> type[SfaMetadataBuilder]:
        return SfaMetadataBuilder

    @staticmethod
    def get_impl_cls() -> "type[SfaImpl]":
        return SfaImpl

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return (num_blocks, block_size, head_size)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        return (0, 1, 2, 3) if include_num_layers_dimension else (0, 1, 2)

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        return True


class IndexerBackend(SfaBackend):
    """Gives the indexer's key cache [num_blocks, block_size, index_head_dim] its shape; never attends."""

    @staticmethod
    def get_name() -> str:
        return "SFA_CP_INDEXER"

    @staticmethod
    def get_builder_cls() -> type[IndexerMetadataBuilder]:  # type: ignore[override]
        return IndexerMetadataBuilder


class SfaImpl(MLACommonBaseImpl[SfaMetadata]):
    """Attention in latent space.

    W_UK_T [H, nope, D] and W_UV [H, D, v] come from upstream's `process_weights_after_loading` and cover the
    heads of this implementation: all of them where kv_b_proj is replicated, else this rank's.
    """

    def __init__(self, num_heads: int, *args, kv_b_proj, **kwargs) -> None:
        # A replicated kv_b_proj holds every head, whatever the TP path's share is.
        qk_nope, v = kwargs["qk_nope_head_dim"], kwargs["v_head_dim"]
        self.tp_heads = num_heads
        held = kv_b_proj.output_size_per_partition // (qk_nope + v)
        super().__init__(held, *args, kv_b_proj=kv_b_proj, **kwargs)
        replicated = held != num_heads
        self.first_tp_head = get_tp_group().rank_in_group * num_heads if replicated else 0
        self.ops = get_ops(sfa_config.resolve(get_current_vllm_config()).ops)

    def forward(
        self,
        layer: torch.nn.Module,
        q: torch.Tensor,
        k_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: SfaMetadata | None,
        output: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The TP path. q [rows, H_tp, nope + rope] rotated; k_c_normed [rows, D]; k_pe [rows, 1, rope] rotated;
        output [rows, H_tp * v], where rows >= T and rows past T are padding."""
        assert output is not None
        if attn_metadata is None:  # profile run: nothing is cached yet
            return output.zero_()
        meta, tokens = attn_metadata, attn_metadata.num_actual_tokens
        self.ops.write_latent(kv_cache, k_c_normed[:tokens], k_pe[:tokens].squeeze(1), meta.slot_mapping)
        indices = self.indexer.topk_indices_buffer[:tokens]
        first = self.first_tp_head
        heads = slice(first, first + self.tp_heads)
        output[tokens:].zero_()
        output[:tokens] = self.attend(q[:tokens], kv_cache, indices, meta.segments, heads)
        return output

    def attend(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        indices: torch.Tensor,
        segments: Segments,
        heads: slice = slice(None),
    ) -> torch.Tensor:
        """Absorb W_UK, attend to the selected keys, apply W_UV. q [rows, H, nope + rope] with the rope part
        rotated; `heads`: which of the held heads they are. Returns [rows, H * v]."""
        q_nope, q_pe = q.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        q_latent = torch.bmm(q_nope.transpose(0, 1), self.W_UK_T[heads]).transpose(0, 1)
        latent = self.ops.sparse_mla(q_latent, q_pe, kv_cache, indices, segments, self.scale)
        return torch.bmm(latent.transpose(0, 1), self.W_UV[heads]).transpose(0, 1).flatten(1)
