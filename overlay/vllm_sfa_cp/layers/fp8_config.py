"""Block-scaled FP8 checkpoints where upstream's `fp8` method has no kernels: the quantisation config and its
registration. The linear and MoE methods are imported when the first layer asks: registering costs no imports.
"""

from typing import Any

import torch
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase

NAME = "fp8_block_reference"


class BlockFp8Config(QuantizationConfig):
    """Takes checkpoints that say `quant_method: fp8` with a `weight_block_size`; others stay upstream's."""

    def __init__(self, block: tuple[int, int], ignored_layers: list[str]) -> None:
        super().__init__()
        self.block = block
        self.ignored_layers = ignored_layers

    @classmethod
    def get_name(cls) -> str:  # type: ignore[override]  # upstream lists its own names only
        return NAME

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg: dict[str, Any], user_quant: str | None) -> Any:
        is_block_fp8 = hf_quant_cfg.get("quant_method") == "fp8" and hf_quant_cfg.get("weight_block_size")
        return NAME if is_block_fp8 and user_quant in (None, "fp8", NAME) else None

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "BlockFp8Config":
        block = config["weight_block_size"]
        if len(block) != 2:
            raise ValueError(f"weight_block_size must have two entries, not {block}")
        scheme = config.get("activation_scheme", "dynamic")
        if scheme != "dynamic":
            raise ValueError(f"block FP8 needs activation_scheme dynamic, not {scheme!r}")
        ignored = config.get("ignored_layers") or config.get("modules_to_not_convert") or []
        return cls((int(block[0]), int(block[1])), list(ignored))

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        self.ignored_layers = hf_to_vllm_mapper.apply_list(self.ignored_layers)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        from vllm.model_executor.layers.fused_moe import FusedMoE
        from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
        from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped

        from .fp8 import BlockFp8LinearMethod, BlockFp8MoEMethod

        if not isinstance(layer, (LinearBase, FusedMoE)):
            return None
        skipped = is_layer_skipped(
            prefix=prefix, ignored_layers=self.ignored_layers, fused_mapping=self.packed_modules_mapping
        )
        if isinstance(layer, LinearBase):
            return UnquantizedLinearMethod() if skipped else BlockFp8LinearMethod(self.block)
        return None if skipped else BlockFp8MoEMethod(self.block, layer.moe_config)


def register() -> None:
    """Make vLLM choose this config. For platforms without FP8 kernels only; may be called repeatedly."""
    if NAME not in QUANTIZATION_METHODS:
        register_quantization_config(NAME)(BlockFp8Config)
