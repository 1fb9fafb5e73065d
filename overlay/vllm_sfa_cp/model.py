"""DeepSeek-V3.2 with the overlay's layers, registered in place of upstream's class for the architecture."""

from collections.abc import Iterable, Iterator
from itertools import islice

import torch
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_pp_group
from vllm.model_executor.models.deepseek_v2 import DeepseekV2Model, DeepseekV2MoE, DeepseekV3ForCausalLM
from vllm.model_executor.models.utils import make_empty_intermediate_tensors_factory
from vllm.sequence import IntermediateTensors

from vllm_sfa_cp import config as sfa_config
from vllm_sfa_cp.layers import step as steps
from vllm_sfa_cp.layers.decoder import decoder_layer_class
from vllm_sfa_cp.weights.assemble import Assembly
from vllm_sfa_cp.weights.shared import SharedWeights


class SfaDeepseekV2Model(DeepseekV2Model):
    """Mode `off` is upstream's forward; the other modes run the layers on the rows of a step.

    Between pipeline stages one tensor travels, `residual` [rows, 2 * hidden]: hidden states and residual side by
    side. vLLM's sequence parallelism already sends that name unsliced, with T_pad / n rows.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        self.decoder_layer_cls = decoder_layer_class()
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.sfa = sfa_config.resolve(vllm_config)
        if self.sfa.mode != "off":
            self.make_empty_intermediate_tensors = make_empty_intermediate_tensors_factory(
                ["residual"], 2 * self.config.hidden_size
            )
        self._assembly: Assembly | None = None
        self._shared: SharedWeights | None = None
        if self.sfa.enable_sfa_cp:
            attentions = {i: self.layers[i].self_attn for i in range(self.start_layer, self.end_layer)}
            self._assembly = Assembly(self.sfa, vllm_config, attentions)

    @property
    def shared(self) -> SharedWeights | None:
        """The stage's shared weights, connected on first use after loading; None without SFA-CP."""
        if self._shared is None and self._assembly is not None:
            self._shared = self._assembly.finish()
        return self._shared

    def weights_changed(self) -> None:
        """Call when weights were replaced or are about to go away: windows are fetched anew afterwards, and what
        was derived from the weights is derived again in place."""
        if self._shared is not None:
            self._shared.invalidate()
        for layer in islice(self.layers, self.start_layer, self.end_layer):
            impl = layer.self_attn.mla_attn.mla_attn.impl
            if impl.kv_b is not None:  # else the engine is still loading
                impl.process_weights_after_loading(layer.input_layernorm.weight.dtype)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        """See upstream. input_ids, positions [T_pad] -> hidden states [T, hidden], or the stage's output."""
        if self.sfa.mode == "off":
            return super().forward(input_ids, positions, intermediate_tensors, inputs_embeds)
        layers = list(islice(self.layers, self.start_layer, self.end_layer))
        step = steps.begin(self.sfa, layers[0].self_attn.mla_attn.mla_attn.layer_name, positions)
        if get_pp_group().is_first_rank:
            embeds = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
            hidden_states, residual = step.shard(embeds), None
        else:
            assert intermediate_tensors is not None
            rows = intermediate_tensors["residual"]
            hidden_states, residual = self._unpack(step, rows)
        shared = self.shared
        if shared is not None and step.mode == "cp":
            shared.begin()
        for layer in layers:
            hidden_states, residual = layer.forward_rows(step, hidden_states, residual, shared)
        assert residual is not None  # a stage has at least one layer
        if not get_pp_group().is_last_rank:
            return IntermediateTensors({"residual": self._pack(step, hidden_states, residual)})
        hidden_states, _ = self.norm(hidden_states, residual)
        return step.unshard(hidden_states)

    def _pack(self, step: steps.Step, hidden_states: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        both = torch.cat([hidden_states, residual], dim=-1)
        # A TP step holds all rows everywhere; its ranks send a share each.
        return both if step.sharded else step.partition.shard(both)

    def _unpack(self, step: steps.Step, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        both = rows if step.sharded else step.group.all_gather(rows, dim=0)
        hidden_states, residual = both.chunk(2, dim=-1)
        return hidden_states.contiguous(), residual.contiguous()


class SfaDeepseekV32ForCausalLM(DeepseekV3ForCausalLM):
    """Upstream's model with the overlay's layers; same parameters, same loader."""

    model_cls = SfaDeepseekV2Model

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """See upstream. Also the way a running engine's weights are replaced, all or some of them.

        ValueError: the engine's own load did not bring every tensor. (Upstream checks unquantised models only, and
        no model's experts one by one: the missing ones would keep uninitialised memory.)
        """
        seen: set[str] = set()

        def watch() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in weights:
                seen.add(name)
                yield name, tensor

        loaded = super().load_weights(watch())
        if not self._complete:
            self._check_complete(seen, loaded)
        self.model.weights_changed()
        return loaded

    _complete = False

    def loading_ended(self) -> None:
        """The worker has loaded the engine's weights, from a checkpoint or as dummies: later loads may be parts."""
        self._complete = True

    def _check_complete(self, seen: set[str], loaded: set[str]) -> None:
        missing = [
            name
            for name, param in self.named_parameters()
            # A tensor on the meta device lives on another rank; scales are checked by their own methods.
            if name not in loaded and not param.is_meta and "scale" not in name.rpartition(".")[2]
        ]
        for layer in islice(self.model.layers, self.model.start_layer, self.model.end_layer):
            if isinstance(layer.mlp, DeepseekV2MoE):
                prefix = f"model.layers.{layer.layer_idx}.mlp.experts"
                missing += [
                    name
                    for expert in range(layer.mlp.n_routed_experts)
                    for part in ("gate_proj", "up_proj", "down_proj")
                    if (name := f"{prefix}.{expert}.{part}.weight") not in seen
                ]
        if missing:
            more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            raise ValueError(
                f"the checkpoint lacks {', '.join(missing[:5])}{more}; download it again or check its index file"
            )
