"""Multi-head latent attention on the rows of a step: TP heads, or local rows and all heads (SFA-CP)."""

from functools import partial

import torch
from vllm.attention.utils.kv_transfer_utils import maybe_transfer_kv_layer
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.linear import RowParallelLinear
from vllm.model_executor.models.deepseek_v2 import DeepseekV2MLAAttention

from vllm_sfa_cp.layers.indexer import SfaIndexer
from vllm_sfa_cp.layers.replicated import FullLinear
from vllm_sfa_cp.layers.step import Step


def pack(parts: list[torch.Tensor | None]) -> tuple[torch.Tensor, list[int]]:
    """Rows of several tensors side by side, for one collective: [rows, w_i] each -> [rows, sum w_i], widths.
    A None part (a layer without an indexer of its own) takes no width. Dtypes must agree: one gather keeps
    bits, a conversion would not."""
    present = [p for p in parts if p is not None]
    if len({p.dtype for p in present}) != 1:
        raise TypeError(f"parts of one gather differ in dtype: {[str(p.dtype) for p in present]}")
    return torch.cat(present, dim=-1), [0 if p is None else p.shape[-1] for p in parts]


class TpMLAAttention(DeepseekV2MLAAttention):
    """Upstream's attention with the device-neutral indexer: mode `off`."""

    indexer_cls = SfaIndexer


class RowsMLAAttention(TpMLAAttention):
    """TP heads inside a sharded residual stream (FlashComm1). o_proj's partial sums are reduced by the step."""

    o_proj_cls = staticmethod(partial(RowParallelLinear, reduce_results=False))

    def forward_rows(self, step: Step, x: torch.Tensor, llama_4_scaling: torch.Tensor | None) -> torch.Tensor:
        """x [rows, hidden], normed -> complete attention output [rows, hidden]."""
        return step.reduce(super().forward(step.positions, step.gather(x), llama_4_scaling))


class CpMLAAttention(RowsMLAAttention):
    """Local rows, all heads, full weights on every rank (source `replicate`).

    q_b_proj, kv_b_proj and o_proj are built replicated: upstream's names and quantisation, loaded by vLLM's
    loader, bias (if any) added once on every rank, no reduction at the end.
    """

    q_b_proj_cls = FullLinear
    kv_b_proj_cls = FullLinear
    o_proj_cls = FullLinear
    head_shards = staticmethod(lambda: 1)

    def forward_rows(self, step: Step, x: torch.Tensor, llama_4_scaling: torch.Tensor | None) -> torch.Tensor:
        """x [rows, hidden], normed -> complete attention output [rows, hidden]. One all-gather of
        kv_lora + rope + index_head_dim values per row, no reduction."""
        assert step.mode == "cp", "replicated projections have no TP path"
        positions = step.local_positions
        if llama_4_scaling is not None:
            raise NotImplementedError("llama_4_scaling is not supported with SFA-CP")
        q_c, kv = self.fused_qkv_a_proj(x)[0].split(
            [self.q_lora_rank, self.kv_lora_rank + self.qk_rope_head_dim], dim=-1
        )
        kv_c, k_pe = kv.split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        kv_c = self.kv_a_layernorm(kv_c)
        q_c = self.q_a_layernorm(q_c)
        q = self.project_q(q_c).view(-1, self.num_heads, self.qk_head_dim)
        q_pe, k_pe = self.rotary_emb(positions, q[..., self.qk_nope_head_dim :], k_pe.unsqueeze(1))
        q[..., self.qk_nope_head_dim :] = q_pe
        k_index = None
        if self.indexer is not None:
            k_index = self.indexer.keys(x, positions, self.indexer_rope_emb)
        rows, widths = pack([kv_c, k_pe.squeeze(1), k_index])
        gathered = step.group.all_gather(rows, dim=0)
        if step.metadata is None:  # profile or dummy run: nothing is cached, every collective still ran
            out = q.new_zeros(q.shape[0], self.num_heads * self.v_head_dim)
        else:
            out = self._attend(self.attn_name, step, x, q_c, q, gathered.split(widths, dim=-1))
        return self.project_o(out)

    @property
    def attn_name(self) -> str:
        """Name of the attention layer, which keys its metadata and cache."""
        return self.mla_attn.mla_attn.layer_name

    def project_q(self, q_c: torch.Tensor) -> torch.Tensor:
        """[rows, q_lora] -> [rows, H * (nope + rope)], all heads."""
        return self.q_b_proj(q_c)[0]

    def project_o(self, out: torch.Tensor) -> torch.Tensor:
        """[rows, H * v] -> complete [rows, hidden]."""
        return self.o_proj(out)[0]

    def _attend(self, layer_name: str, *args) -> torch.Tensor:
        return _attend_layer(self, layer_name, *args)


@maybe_transfer_kv_layer
def _attend_layer(
    attention: CpMLAAttention,
    layer_name: str,
    step: Step,
    x: torch.Tensor,
    q_c: torch.Tensor,
    q: torch.Tensor,
    gathered: tuple[torch.Tensor, ...],
) -> torch.Tensor:
    """Cache every rank's new keys, then index and attend for the local rows. A KV connector is waited for
    before the layer's cache is touched and is given the layer once afterwards."""
    assert step.metadata is not None
    cp = step.metadata.cp
    assert cp is not None
    layer = attention.mla_attn.mla_attn
    impl = layer.impl
    kv_cache = layer.kv_cache[get_forward_context().virtual_engine]
    kv_c, k_pe, k_index = gathered
    impl.ops.write_latent(kv_cache, kv_c, k_pe, cp.slot_mapping)
    indexer = attention.indexer
    k_cache = indexer.cache()
    indexer.ops.write_indexer_key(k_cache, k_index, cp.slot_mapping)
    index_q, weights = indexer.queries(x, q_c, step.local_positions, attention.indexer_rope_emb)
    indices = indexer.select(index_q, weights, k_cache, cp.segments)
    return impl.attend(q, kv_cache, indices, cp.segments)
