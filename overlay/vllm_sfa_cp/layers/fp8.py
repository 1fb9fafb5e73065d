"""Plain block-FP8 linear and MoE layers: dequantise, then multiply in the input's precision.

Weights stay FP8 in memory, under upstream's parameter names and shapes (`weight`, `weight_scale_inv`; for
experts `w13_*`, `w2_*`), before and after loading: what loads, moves or shares them sees the checkpoint's.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.parameter import Parameter
from vllm.model_executor.layers import linear
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, FusedMoeWeightScaleSupported
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.cpu_fused_moe import select_experts
from vllm.model_executor.layers.linear import LinearMethodBase
from vllm.model_executor.layers.quantization.utils.fp8_utils import validate_fp8_block_shape
from vllm.model_executor.parameter import BlockQuantScaleParameter, ModelWeightParameter
from vllm.model_executor.utils import set_weight_attrs

from vllm_sfa_cp.block_fp8 import dequantise

Block = tuple[int, int]

#: Elements dequantised at a time: bounds the float copy of a large matrix at 64 MB.
CHUNK_ELEMENTS = 1 << 24
#: An FP8 NaN and a scale no checkpoint holds: what a parameter keeps when the checkpoint misses it.
_UNSET_WEIGHT = 0x7F
_UNSET_SCALE = torch.finfo(torch.float32).min


def fp8_linear(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, block: Block) -> torch.Tensor:
    """x [..., in] times the transpose of block-FP8 `weight` [out, in] -> [..., out] in x's dtype."""
    rows, cols = weight.shape
    step = max(1, CHUNK_ELEMENTS // (cols * block[0]))  # in rows of blocks
    out = x.new_empty(*x.shape[:-1], rows)
    for i in range(0, scale.shape[0], step):
        part = slice(i * block[0], (i + step) * block[0])
        out[..., part] = F.linear(x, dequantise(weight[part], scale[i : i + step], x.dtype, block))
    return out


def routed_experts(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    num_experts: int,
    expert: Callable[[int, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Sum over each token's experts of weight * expert(id, token); x [T, hidden], weights and ids [T, k].

    Ids outside [0, num_experts), those of other ranks' experts, add nothing. Sums are float32, in id order.
    """
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for i in range(num_experts):
        rows, slots = (topk_ids == i).nonzero(as_tuple=True)
        if rows.numel():
            y = expert(i, x[rows]).float() * topk_weights[rows, slots, None]
            out.index_add_(0, rows, y)
    return out.to(x.dtype)


class BlockFp8LinearMethod(LinearMethodBase):
    """For replicated, column-, merged-column- and row-parallel linears."""

    #: Every tensor of a layer that this method owns, named for code that moves or shares weights.
    weight_tensors = ("weight", "weight_scale_inv")

    def __init__(self, block: Block) -> None:
        self.block = block
        # Upstream chooses between two loader protocols by the method's class name; block scales in merged
        # linears need the second.
        if type(self).__name__ not in linear.WEIGHT_LOADER_V2_SUPPORTED:
            linear.WEIGHT_LOADER_V2_SUPPORTED.append(type(self).__name__)

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        block = list(self.block)
        try:
            validate_fp8_block_shape(
                layer, input_size, output_size, input_size_per_partition, output_partition_sizes, block
            )
        except ValueError as err:
            mend = (
                'use fewer tensor-parallel ranks, or "sfa_cp": {"weights": "broadcast"} for whole projections'
            )
            raise ValueError(f"{err}; {mend}") from err
        layer.weight_block_size = block  # read by the merged linear's loader
        rows, cols = sum(output_partition_sizes), input_size_per_partition
        dims = {"input_dim": 1, "output_dim": 0, "weight_loader": extra_weight_attrs.get("weight_loader")}
        layer.register_parameter("weight", ModelWeightParameter(data=_unset_weight(rows, cols), **dims))
        scale = _unset_scale(*_blocks(rows, cols, self.block))
        layer.register_parameter("weight_scale_inv", BlockQuantScaleParameter(data=scale, **dims))

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        _check_loaded(layer, self.weight_tensors)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        out = fp8_linear(x, layer.weight, layer.weight_scale_inv, self.block)
        return out if bias is None else out + bias


class BlockFp8MoEMethod(FusedMoEMethodBase):
    """For routed experts under tensor parallelism and expert parallelism."""

    weight_tensors = ("w13_weight", "w13_weight_scale_inv", "w2_weight", "w2_weight_scale_inv")

    def __init__(self, block: Block, moe: FusedMoEConfig) -> None:
        super().__init__(moe)
        self.block = block
        if not moe.is_act_and_mul or moe.has_bias:
            raise NotImplementedError("block FP8 experts are gated and have no bias")

    def create_weights(
        self,
        layer: torch.nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        width = intermediate_size_per_partition
        if width % self.block[0] or width % self.block[1]:
            raise ValueError(
                f"experts have {width} intermediate columns per rank, not a multiple of the FP8 block "
                f"{self.block}; use fewer tensor-parallel ranks or --enable-expert-parallel"
            )
        scale_attrs = {**extra_weight_attrs, "quant_method": FusedMoeWeightScaleSupported.BLOCK.value}
        for name, rows, cols in (("w13", 2 * width, hidden_size), ("w2", hidden_size, width)):
            weight = Parameter(_unset_weight(num_experts, rows, cols), requires_grad=False)
            blocks = _blocks(rows, cols, self.block)
            scale = Parameter(_unset_scale(num_experts, *blocks), requires_grad=False)
            set_weight_attrs(weight, extra_weight_attrs)
            set_weight_attrs(scale, scale_attrs)
            layer.register_parameter(f"{name}_weight", weight)
            layer.register_parameter(f"{name}_weight_scale_inv", scale)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        _check_loaded(layer, self.weight_tensors)

    def maybe_make_prepare_finalize(self, routing_tables: Any = None) -> None:
        return None  # FusedMoE's own dispatch and combine serve data parallelism

    def get_fused_moe_quant_config(self, layer: torch.nn.Module) -> FusedMoEQuantConfig | None:
        return None

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        router_logits: torch.Tensor,
        top_k: int,
        renormalize: bool,
        use_grouped_topk: bool = False,
        topk_group: int | None = None,
        num_expert_group: int | None = None,
        global_num_experts: int = -1,
        expert_map: torch.Tensor | None = None,
        custom_routing_function: Callable | None = None,
        scoring_func: str = "softmax",
        routed_scaling_factor: float = 1.0,
        e_score_correction_bias: torch.Tensor | None = None,
        apply_router_weight_on_input: bool = False,
        activation: str = "silu",
        enable_eplb: bool = False,
        expert_load_view: torch.Tensor | None = None,
        logical_to_physical_map: torch.Tensor | None = None,
        logical_replica_count: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if activation != "silu" or apply_router_weight_on_input or enable_eplb:
            raise NotImplementedError(
                "block FP8 experts support silu, router weights on the output and no EPLB"
            )
        if x.shape[0] == 0:
            return x  # upstream's grouped top-k cannot reshape nothing
        topk_weights, topk_ids = select_experts(
            hidden_states=x,
            router_logits=router_logits,
            top_k=top_k,
            use_grouped_topk=use_grouped_topk,
            renormalize=renormalize,
            topk_group=topk_group,
            num_expert_group=num_expert_group,
            custom_routing_function=custom_routing_function,
            scoring_func=scoring_func,
            routed_scaling_factor=routed_scaling_factor,
            e_score_correction_bias=e_score_correction_bias,
        )
        if expert_map is not None:
            topk_ids = expert_map[topk_ids]

        def expert(i: int, rows: torch.Tensor) -> torch.Tensor:
            gate_up = fp8_linear(rows, layer.w13_weight[i], layer.w13_weight_scale_inv[i], self.block)
            gate, up = gate_up.chunk(2, dim=-1)
            return fp8_linear(F.silu(gate) * up, layer.w2_weight[i], layer.w2_weight_scale_inv[i], self.block)

        return routed_experts(x, topk_weights, topk_ids, layer.w13_weight.shape[0], expert)


def _blocks(rows: int, cols: int, block: Block) -> Block:
    return -(-rows // block[0]), -(-cols // block[1])


def _unset_weight(*shape: int) -> torch.Tensor:
    return torch.full(shape, _UNSET_WEIGHT, dtype=torch.uint8).view(torch.float8_e4m3fn)


def _unset_scale(*shape: int) -> torch.Tensor:
    return torch.full(shape, _UNSET_SCALE, dtype=torch.float32)


def _check_loaded(layer: torch.nn.Module, names: tuple[str, ...]) -> None:
    """Refuse a layer whose tensors the checkpoint missed: upstream checks unquantised checkpoints only."""
    for name in names:
        tensor = getattr(layer, name).data
        if tensor.dtype == torch.float8_e4m3fn:
            missing = bool((tensor.view(torch.uint8) & 0x7F == _UNSET_WEIGHT).any())
        else:
            missing = bool((tensor == _UNSET_SCALE).any())
        if missing:
            where = getattr(layer, "prefix", "") or getattr(layer, "layer_name", "")
            raise ValueError(f"the checkpoint misses {where}.{name}, or part of it")
