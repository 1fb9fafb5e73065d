"""Multi-head latent attention on the rows of a step: TP heads, or local rows and all heads (SFA-CP)."""

import torch
from vllm.attention.utils.kv_transfer_utils import maybe_transfer_kv_layer
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.forward_context import get_forward_context
from vllm.model_executor.models.deepseek_v2 import DeepseekV2MLAAttention
from vllm.model_executor.models.utils import extract_layer_index

from vllm_sfa_cp import config as sfa_config
from vllm_sfa_cp.backend import HeadWeights, SfaImpl
from vllm_sfa_cp.layers.indexer import SfaIndexer
from vllm_sfa_cp.layers.replicated import PartialSumLinear, projection_class
from vllm_sfa_cp.layers.step import Step
from vllm_sfa_cp.weights.shared import SharedWeights


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

    o_proj_cls = staticmethod(PartialSumLinear)

    def forward_rows(
        self,
        step: Step,
        x: torch.Tensor,
        llama_4_scaling: torch.Tensor | None,
        shared: SharedWeights | None = None,
    ) -> torch.Tensor:
        """x [rows, hidden], normed -> complete attention output [rows, hidden]."""
        return step.reduce(self.forward(step.positions, step.gather(x), llama_4_scaling))


class CpMLAAttention(RowsMLAAttention):
    """Local rows and all heads in a CP step; this rank's TP heads in a TP step, where the shards allow it.

    q_b_proj, kv_b_proj and o_proj are built as the weight source wants them (see `projection_class`): upstream's
    names and quantisation, loaded by vLLM's loader, bias (if any) added once on every rank, no reduction.
    """

    def __init__(self, *args, vllm_config: VllmConfig, prefix: str = "", **kwargs) -> None:
        # Read by the class hooks below while the base class builds the layer.
        object.__setattr__(self, "sfa", sfa_config.resolve(vllm_config))
        super().__init__(*args, vllm_config=vllm_config, prefix=prefix, **kwargs)
        self.layer_index = extract_layer_index(prefix)

    # Class hooks of the base class (patch 0003), read while it builds the layer.
    @property
    def q_b_proj_cls(self):  # type: ignore[override]
        return projection_class(self.sfa, "q_b_proj")

    @property
    def kv_b_proj_cls(self):  # type: ignore[override]
        return projection_class(self.sfa, "kv_b_proj")

    @property
    def o_proj_cls(self):  # type: ignore[override]
        return projection_class(self.sfa, "o_proj")

    def head_shards(self) -> int:
        """Into how many shards the heads of the TP path are cut; 1 where there is no TP path."""
        return get_tensor_model_parallel_world_size() if self.sfa.has_tp_path else 1

    def forward_rows(
        self,
        step: Step,
        x: torch.Tensor,
        llama_4_scaling: torch.Tensor | None,
        shared: SharedWeights | None = None,
    ) -> torch.Tensor:
        """x [rows, hidden], normed -> complete attention output [rows, hidden]. In a CP step: one all-gather of
        kv_lora + rope + index_head_dim values per row, no reduction."""
        if step.mode == "tp":
            return super().forward_rows(step, x, llama_4_scaling)
        if llama_4_scaling is not None:
            raise NotImplementedError("llama_4_scaling is not supported with SFA-CP")
        assert shared is not None
        shared.enter(self.layer_index)
        positions = step.local_positions
        q_c, kv = self.fused_qkv_a_proj(x)[0].split(
            [self.q_lora_rank, self.kv_lora_rank + self.qk_rope_head_dim], dim=-1
        )
        kv_c, k_pe = kv.split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        kv_c = self.kv_a_layernorm(kv_c)
        q_c = self.q_a_layernorm(q_c)
        q = shared.apply("q_b_proj", self.layer_index, self.q_b_proj, q_c)
        q = q.view(-1, self.num_heads, self.qk_head_dim)
        q_pe, k_pe = self.rotary_emb(positions, q[..., self.qk_nope_head_dim :], k_pe.unsqueeze(1))
        q[..., self.qk_nope_head_dim :] = q_pe
        k_index = None
        if self.indexer is not None:
            k_index = self.indexer.keys(x, positions, self.indexer_rope_emb)
        rows, widths = pack([kv_c, k_pe.squeeze(1), k_index])
        gathered = step.group.all_gather(rows, dim=0).split(widths, dim=-1)
        out = shared.attend(
            self.layer_index,
            self.impl,
            lambda held: _attend_layer(self, self.attn_name, step, x, q_c, q, gathered, held),
        )
        return shared.apply("o_proj", self.layer_index, self.o_proj, out)

    @property
    def impl(self) -> SfaImpl:
        """The attention implementation, which holds this layer's W_UK and W_UV."""
        return self.mla_attn.mla_attn.impl

    @property
    def attn_name(self) -> str:
        """Name of the attention layer, which keys its metadata and cache."""
        return self.mla_attn.mla_attn.layer_name


@maybe_transfer_kv_layer
def _attend_layer(
    attention: CpMLAAttention,
    layer_name: str,
    step: Step,
    x: torch.Tensor,
    q_c: torch.Tensor,
    q: torch.Tensor,
    gathered: tuple[torch.Tensor, ...],
    held: HeadWeights,
) -> torch.Tensor:
    """Cache every rank's new keys, then index and attend for the local rows; [rows, H * v]. A KV connector is
    waited for before the layer's cache is touched and is given the layer once afterwards."""
    if step.metadata is None:  # profile or dummy run: nothing is cached, every collective still runs
        return q.new_zeros(q.shape[0], attention.num_heads * attention.v_head_dim)
    cp = step.metadata.cp
    assert cp is not None
    layer, impl, indexer = attention.mla_attn.mla_attn, attention.impl, attention.indexer
    kv_cache = layer.kv_cache[get_forward_context().virtual_engine]
    kv_c, k_pe, k_index = gathered
    impl.ops.write_latent(kv_cache, kv_c, k_pe, cp.slot_mapping)
    k_cache = indexer.cache()
    indexer.ops.write_indexer_key(k_cache, k_index, cp.slot_mapping)
    index_q, weights = indexer.queries(x, q_c, step.local_positions, attention.indexer_rope_emb)
    indices = indexer.select(index_q, weights, k_cache, cp.segments)
    return impl.attend(q, kv_cache, indices, cp.segments, held)
