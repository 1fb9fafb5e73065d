"""Device-neutral lightning indexer: projections, rope and key cache here, scoring and top-k in `ops`."""

import torch
from torch import nn
from vllm.attention.backends.abstract import AttentionBackend
from vllm.config import CacheConfig, VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.layernorm import LayerNorm
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.quantization import QuantizationConfig
from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache

from vllm_sfa_cp import config as sfa_config
from vllm_sfa_cp.backend import IndexerBackend
from vllm_sfa_cp.metadata import SfaMetadata
from vllm_sfa_cp.ops import get_ops
from vllm_sfa_cp.ops.interface import Segments


class SfaIndexerCache(DeepseekV32IndexerCache):
    """Key cache [num_blocks, block_size, index_head_dim] in the model's own dtype."""

    def get_attn_backend(self) -> type[AttentionBackend]:
        return IndexerBackend


class SfaIndexer(nn.Module):
    """Same parameters and names as upstream's `Indexer`, no CUDA-only step: keys are cached in 16 or 32 bits.

    score(t, s) = sum_h w(t, h) * relu(q(t, h) . k(s)), with w = weights_proj(x) * n_head^-0.5 * head_dim^-0.5;
    the `index_topk` best-scoring visible keys are kept.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        config,
        hidden_size: int,
        q_lora_rank: int,
        quant_config: QuantizationConfig | None,
        cache_config: CacheConfig | None,
        topk_indices_buffer: torch.Tensor,
        prefix: str = "",
    ) -> None:
        super().__init__()
        self.topk_tokens = config.index_topk
        self.n_head = config.index_n_heads
        self.head_dim = config.index_head_dim
        self.rope_dim = config.qk_rope_head_dim
        self.scale = self.head_dim**-0.5 * self.n_head**-0.5
        self.wq_b = ReplicatedLinear(
            q_lora_rank,
            self.head_dim * self.n_head,
            bias=False,
            quant_config=quant_config,
            prefix=f"{prefix}.wq_b",
        )
        self.wk = ReplicatedLinear(
            hidden_size, self.head_dim, bias=False, quant_config=quant_config, prefix=f"{prefix}.wk"
        )
        self.k_norm = LayerNorm(self.head_dim, eps=1e-6)
        self.weights_proj = ReplicatedLinear(
            hidden_size, self.n_head, bias=False, quant_config=None, prefix=f"{prefix}.weights_proj"
        )
        self.topk_indices_buffer = topk_indices_buffer
        self.k_cache = SfaIndexerCache(
            head_dim=self.head_dim,
            dtype=vllm_config.model_config.dtype,
            prefix=f"{prefix}.k_cache",
            cache_config=cache_config,
        )
        # The attention layer beside this indexer: its metadata describes the step for both.
        self.attn_name = prefix.removesuffix(".indexer") + ".attn"
        self.ops = get_ops(sfa_config.resolve(vllm_config).ops)

    def keys(self, x: torch.Tensor, positions: torch.Tensor, rotary_emb: nn.Module) -> torch.Tensor:
        """Rotated keys [rows, head_dim] of hidden states x [rows, hidden]; rope leads, neox style."""
        k = self.k_norm(self.wk(x)[0]).unsqueeze(1)
        return self._rotate(k, positions, rotary_emb).squeeze(1)

    def queries(
        self, x: torch.Tensor, q_c: torch.Tensor, positions: torch.Tensor, rotary_emb: nn.Module
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated queries [rows, n_head, head_dim] and head weights [rows, n_head], every scale included."""
        q = self.wq_b(q_c)[0].view(-1, self.n_head, self.head_dim)
        return self._rotate(q, positions, rotary_emb), self.weights_proj(x)[0] * self.scale

    def _rotate(self, t: torch.Tensor, positions: torch.Tensor, rotary_emb: nn.Module) -> torch.Tensor:
        pe, nope = t.split([self.rope_dim, self.head_dim - self.rope_dim], dim=-1)
        # The helper wants a key beside the query and may add a leading dimension.
        pe, _ = rotary_emb(positions, pe.contiguous(), pe[:, :1].contiguous())
        return torch.cat([pe.view(*t.shape[:-1], self.rope_dim), nope], dim=-1)

    def select(
        self, q: torch.Tensor, weights: torch.Tensor, k_cache: torch.Tensor, segments: Segments
    ) -> torch.Tensor:
        """Top-k positions int32 [rows, index_topk], see `SparseOps.indexer_topk`."""
        return self.ops.indexer_topk(q, weights, k_cache, segments, self.topk_tokens)

    def cache(self) -> torch.Tensor:
        """The key cache of the current virtual engine."""
        return self.k_cache.kv_cache[get_forward_context().virtual_engine]

    def forward(
        self, hidden_states: torch.Tensor, qr: torch.Tensor, positions: torch.Tensor, rotary_emb: nn.Module
    ) -> torch.Tensor:
        """The TP path: cache this step's keys, select for every row, leave the result in the shared buffer."""
        metadata = get_forward_context().attn_metadata
        if metadata is None:  # profile run
            return self.topk_indices_buffer
        assert isinstance(metadata, dict)
        step: SfaMetadata = metadata[self.attn_name]
        tokens = step.num_actual_tokens
        x, qr, positions = hidden_states[:tokens], qr[:tokens], positions[:tokens]
        k_cache = self.cache()
        self.ops.write_indexer_key(k_cache, self.keys(x, positions, rotary_emb), step.slot_mapping)
        q, weights = self.queries(x, qr, positions, rotary_emb)
        self.topk_indices_buffer[:tokens] = self.select(q, weights, k_cache, step.segments)
        return self.topk_indices_buffer
