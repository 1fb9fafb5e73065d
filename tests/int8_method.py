"""An int8 quantisation method with scale, offset and bias, and shared weights made of its linears. Rank processes
import this; no checkpoint is needed."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from engines import engine
from torch.nn import functional as F
from torch.nn.parameter import Parameter
from vllm.model_executor.layers.linear import LinearMethodBase
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm_sfa_cp.config import SfaCpConfig
from vllm_sfa_cp.layers.replicated import projection_class
from vllm_sfa_cp.weights.assemble import Assembly
from vllm_sfa_cp.weights.travel import register_method

GROUP = 4  # inputs per scale and offset
SIZES = {"q_b_proj": (16, 24), "kv_b_proj": (8, 64), "o_proj": (32, 16)}
LAYERS = 3


def full_tensors(name: str, layer: int, bias: bool = True) -> dict[str, torch.Tensor]:
    """What a checkpoint would hold: the weight is (weight - offset) * scale per group of inputs."""
    gen = torch.Generator().manual_seed(100 * layer + len(name))
    inputs, outputs = SIZES[name]
    tensors = {
        "weight": torch.randint(-128, 128, (outputs, inputs), generator=gen, dtype=torch.int8),
        "scale": torch.rand(outputs, inputs // GROUP, generator=gen) / 100,
        "offset": torch.randint(-9, 10, (outputs, inputs // GROUP), generator=gen, dtype=torch.int8),
    }
    return tensors | ({"bias": torch.rand(outputs, generator=gen)} if bias else {})


def project(x: torch.Tensor, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """The full projection, without any linear layer."""
    scale, offset = (tensors[k].float().repeat_interleave(GROUP, 1) for k in ("scale", "offset"))
    return F.linear(x, (tensors["weight"].float() - offset) * scale, tensors.get("bias"))


class Int8Method(LinearMethodBase):
    """Replaces the Parameter object after loading, by the transposed weight."""

    def create_weights(
        self, layer: Any, input_size_per_partition: int, output_partition_sizes: list[int], *_: Any, **__: Any
    ) -> None:
        rows, cols = sum(output_partition_sizes), input_size_per_partition
        shapes = {"weight": (rows, cols), "scale": (rows, cols // GROUP), "offset": (rows, cols // GROUP)}
        for name, shape in shapes.items():
            dtype = torch.float32 if name == "scale" else torch.int8
            layer.register_parameter(name, Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False))

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.weight = Parameter(layer.weight.data.t(), requires_grad=False)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        tensors = {"weight": layer.weight.t(), "scale": layer.scale, "offset": layer.offset}
        return project(x, tensors if bias is None else tensors | {"bias": bias})


class Int8Config(QuantizationConfig):
    def get_quant_method(self, layer: Any, prefix: str) -> Int8Method:
        return Int8Method()

    def get_name(self) -> str:
        return "int8-test"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Int8Config":
        return cls()


def has_bias(config: SfaCpConfig, name: str) -> bool:
    """A row-parallel linear that leaves its partial sums to the step takes none: upstream refuses it."""
    return config.weights == "broadcast" or name == "q_b_proj"


def _attention(config: SfaCpConfig, layer: int) -> Any:
    """What `Assembly` reads off an attention layer, with loaded projections."""
    held: dict[str, Any] = {}
    for name in config.shared:
        linear = projection_class(config, name)(
            *SIZES[name],
            bias=has_bias(config, name),
            quant_config=Int8Config(),
            prefix=f"model.layers.{layer}.self_attn.{name}",
        )
        if getattr(linear, "present", True):
            for key, param in linear.named_parameters():
                whole = full_tensors(name, layer)[key]
                dims = [d for d in range(whole.dim()) if whole.shape[d] != param.shape[d]]
                param.data.copy_(whole.chunk(linear.tp_size, dims[0])[linear.tp_rank] if dims else whole)
            linear.quant_method.process_weights_after_loading(linear)
        held[name] = linear
    q_in, q_out = SIZES["q_b_proj"]
    sizes = {"q_lora_rank": q_in, "qk_head_dim": q_out // 4, "kv_lora_rank": 8, "qk_nope_head_dim": 8}
    return SimpleNamespace(**held, **sizes, num_heads=4, v_head_dim=8, hidden_size=SIZES["o_proj"][1])


def forwards(model: str, source: str, ahead: int, **kwargs: Any) -> float:
    """Largest error of two forwards through shared int8 projections with bias, and through the TP shards (gather).

    `model` is any that starts: the engine lends its process groups.
    """
    from vllm.config import set_current_vllm_config
    from vllm.distributed import tensor_model_parallel_all_reduce

    register_method(Int8Method)
    config = SfaCpConfig(True, True, weights=source, prefetch_step=ahead)  # type: ignore[arg-type]
    errors = []

    def compare(got: torch.Tensor, want: torch.Tensor) -> None:
        assert got.shape == want.shape
        errors.append(float((got - want).abs().max()))

    with engine(model, **kwargs) as llm:
        vllm_config = llm.llm_engine.vllm_config
        with (
            mock.patch.object(vllm_config, "quant_config", Int8Config()),
            set_current_vllm_config(vllm_config),
        ):
            attentions = {layer: _attention(config, layer) for layer in range(LAYERS)}
            shared = Assembly(config, vllm_config, attentions).finish()
        for _ in range(2):
            shared.begin()
            for layer, attention in attentions.items():
                shared.enter(layer)
                for name in config.shared:
                    x = torch.randn(5, SIZES[name][0])
                    got = shared.apply(name, layer, getattr(attention, name), x)
                    compare(got, project(x, full_tensors(name, layer, has_bias(config, name))))
        if source == "gather":
            for layer, attention in attentions.items():
                x, y = torch.ones(5, SIZES["q_b_proj"][0]), torch.ones(5, SIZES["o_proj"][0])
                rank, size = attention.q_b_proj.tp_rank, attention.q_b_proj.tp_size
                compare(
                    attention.q_b_proj(x)[0], project(x, full_tensors("q_b_proj", layer)).chunk(size, 1)[rank]
                )
                part = attention.o_proj(y.chunk(size, 1)[rank])[0]
                compare(
                    tensor_model_parallel_all_reduce(part),
                    project(y, full_tensors("o_proj", layer, bias=False)),
                )
    return max(errors)
