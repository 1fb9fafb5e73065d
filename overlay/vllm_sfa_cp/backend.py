"""The attention backend for sparse MLA: cache layout, and attention of given queries over given indices.

The same implementation serves the TP path (called by vLLM's MLAAttention with this rank's heads) and SFA-CP
(called by `layers.mla` with local rows and all heads).
"""

from typing import ClassVar, NamedTuple

import torch
from vllm.attention.backends.abstract import AttentionBackend, MultipleOf
from vllm.config import get_current_vllm_config
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.v1.attention.backends.mla.common import MLACommonBaseImpl

from vllm_sfa_cp import config as sfa_config
from vllm_sfa_cp.metadata import IndexerMetadataBuilder, SfaMetadata, SfaMetadataBuilder
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


class HeadWeights(NamedTuple):
    """Up-projections of some heads, views of one kv_b weight [H * (nope + v), D].

    uk_t: [H, nope, D] absorbs a query's nope part. uv: [H, D, v] turns an attended latent into values.
    """

    uk_t: torch.Tensor
    uv: torch.Tensor

    @classmethod
    def of(cls, kv_b: torch.Tensor, nope: int, v: int) -> "HeadWeights":
        """Split a kv_b weight; nothing is copied."""
        uk_t, uv = kv_b.view(-1, nope + v, kv_b.shape[-1]).split([nope, v], dim=1)
        return cls(uk_t, uv.transpose(1, 2))

    def heads(self, first: int, count: int) -> "HeadWeights":
        """The weights of some of the heads."""
        return HeadWeights(self.uk_t[first : first + count], self.uv[first : first + count])


class SfaImpl(MLACommonBaseImpl[SfaMetadata]):
    """Attention in latent space.

    kv_b: weight [H * (nope + v), D] of the heads held here (all of them where kv_b_proj is replicated, else this
    rank's), or None where another rank owns the layer. kv_b_proj's own tensor if unquantised, a copy otherwise.
    """

    kv_b: torch.Tensor | None = None

    def __init__(self, num_heads: int, *args, kv_b_proj, **kwargs) -> None:
        self.tp_heads = num_heads
        # A replicated kv_b_proj holds every head, whatever the TP path's share is.
        held = kv_b_proj.output_size_per_partition // (kwargs["qk_nope_head_dim"] + kwargs["v_head_dim"])
        super().__init__(held, *args, kv_b_proj=kv_b_proj, **kwargs)
        self.first_tp_head = get_tp_group().rank_in_group * num_heads if held != num_heads else 0
        self.ops = get_ops(sfa_config.resolve(get_current_vllm_config()).ops)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Take kv_b_proj's weight, dequantised if need be, into `kv_b`. On a second call (reload) the tensor
        keeps its address."""
        layer = self.kv_b_proj
        if layer.weight.is_meta:
            return
        if isinstance(layer.quant_method, UnquantizedLinearMethod):
            weight = layer.weight.data
        else:
            eye = torch.eye(self.kv_lora_rank, dtype=act_dtype, device=layer.weight.device)
            weight = layer.quant_method.apply(layer, eye, bias=None).t().contiguous()
        if self.kv_b is None or weight.data_ptr() == self.kv_b.data_ptr():
            self.kv_b = weight
        else:
            self.kv_b.copy_(weight)

    def head_weights(self, kv_b: torch.Tensor | None = None) -> HeadWeights:
        """Up-projections out of `kv_b`, by default those held here."""
        kv_b = self.kv_b if kv_b is None else kv_b
        assert kv_b is not None
        return HeadWeights.of(kv_b, self.qk_nope_head_dim, self.v_head_dim)

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
        held = self.head_weights().heads(self.first_tp_head, self.tp_heads)
        output[tokens:].zero_()
        output[:tokens] = self.attend(q[:tokens], kv_cache, indices, meta.segments, held)
        return output

    def attend(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        indices: torch.Tensor,
        segments: Segments,
        held: HeadWeights,
    ) -> torch.Tensor:
        """Absorb W_UK, attend to the selected keys, apply W_UV. q [rows, H, nope + rope] with the rope part
        rotated; `held`: up-projections of those H heads. Returns [rows, H * v]."""
        q_nope, q_pe = q.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        q_latent = torch.bmm(q_nope.transpose(0, 1), held.uk_t).transpose(0, 1)
        latent = self.ops.sparse_mla(q_latent, q_pe, kv_cache, indices, segments, self.scale)
        return self.ops.value_up(latent, held.uv)
