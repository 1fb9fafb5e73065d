"""FlashComm1: the decoder layer on a residual stream whose rows are sharded over the TP group."""

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.models.deepseek_v2 import DeepseekV2DecoderLayer, DeepseekV2MLP

from vllm_sfa_cp import config as sfa_config
from vllm_sfa_cp.layers.mla import CpMLAAttention, RowsMLAAttention, TpMLAAttention
from vllm_sfa_cp.layers.step import Step
from vllm_sfa_cp.weights.shared import SharedWeights


class TpDecoderLayer(DeepseekV2DecoderLayer):
    """Upstream's layer with the device-neutral indexer: mode `off`."""

    mla_attention_cls = TpMLAAttention


class RowsDecoderLayer(DeepseekV2DecoderLayer):
    """Norms and residual on local rows; the MLP or MoE between a gather and a reduce, as the step defines them."""

    mla_attention_cls = RowsMLAAttention

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        # The step reduces what these leave as partial sums.
        if isinstance(self.mlp, DeepseekV2MLP):
            self.mlp.down_proj.reduce_results = False
            self.complete_mlp = False
        else:
            # Upstream's sequence-parallel MoE (expert parallel over several replicas) completes its own output.
            self.complete_mlp = self.mlp.is_sequence_parallel
            self.mlp.reduce_results = False

    def forward_rows(
        self,
        step: Step,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None,
        shared: SharedWeights | None = None,
        llama_4_scaling: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden_states, residual [rows, hidden] -> the same, one layer later."""
        if residual is None:
            residual = hidden_states.clone()
            hidden_states = self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn.forward_rows(step, hidden_states, llama_4_scaling, shared)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        hidden_states = self.mlp(step.gather(hidden_states))
        if self.complete_mlp:
            rows = step.partition
            hidden_states = (
                hidden_states[rows.local_start : rows.local_end] if step.sharded else hidden_states
            )
        else:
            hidden_states = step.reduce(hidden_states)
        return hidden_states, residual


class CpDecoderLayer(RowsDecoderLayer):
    """The sharded layer with context-parallel attention."""

    mla_attention_cls = CpMLAAttention


def decoder_layer_class() -> type[DeepseekV2DecoderLayer]:
    """The layer class for the mode of the engine that is being built."""
    mode = sfa_config.resolve(get_current_vllm_config()).mode
    return {"off": TpDecoderLayer, "flashcomm1": RowsDecoderLayer, "sfa-cp": CpDecoderLayer}[mode]
