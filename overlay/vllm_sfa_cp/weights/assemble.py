"""Build the series of a model stage: windows while the model is built, contents once it is loaded."""

import torch
from torch import nn
from vllm.config import VllmConfig

from vllm_sfa_cp.config import SfaCpConfig
from vllm_sfa_cp.layers.mla import CpMLAAttention
from vllm_sfa_cp.layers.replicated import FullLinear, method_of
from vllm_sfa_cp.weights.broadcast import Broadcast
from vllm_sfa_cp.weights.gather import Gather
from vllm_sfa_cp.weights.link import Link, weight_link
from vllm_sfa_cp.weights.metrics import Counters
from vllm_sfa_cp.weights.series import Schedule
from vllm_sfa_cp.weights.shared import Series, SharedWeights
from vllm_sfa_cp.weights.travel import Tensors, UnknownMethodError, check_method, tensors_of


class Assembly:
    """The windows of a stage's series, and how to fill them.

    Built inside the model's constructor, so that the memory is there before weights load and while the engine
    profiles; `finish` runs after loading. Not a module: windows are not parameters of the model.
    UnknownMethodError: a projection cannot be shared; raised on every rank, before anything is loaded.
    """

    def __init__(
        self, config: SfaCpConfig, vllm_config: VllmConfig, attentions: dict[int, CpMLAAttention]
    ) -> None:
        self.config, self.attentions = config, attentions
        self.schedule = Schedule(min(attentions), len(attentions), config.prefetch_step)
        self.names = config.shared if config.weights != "replicate" else ()
        for name in self.names:
            methods = {method_of(getattr(attention, name)) for attention in attentions.values()}
            if len(methods) > 1:
                found = ", ".join(sorted(method.__qualname__ for method in methods))
                raise UnknownMethodError(
                    f"shared weights need one quantisation method for every layer's {name}, not {found}; "
                    'use "sfa_cp": {"weights": "replicate"} for this checkpoint'
                )
            check_method(*methods)
        first = next(iter(attentions.values()))
        quant = vllm_config.quant_config
        sizes = {
            "q_b_proj": (first.q_lora_rank, first.num_heads * first.qk_head_dim),
            "kv_b_proj": (first.kv_lora_rank, first.num_heads * (first.qk_nope_head_dim + first.v_head_dim)),
            "o_proj": (first.num_heads * first.v_head_dim, first.hidden_size),
        }
        count = self.schedule.num_windows
        self.modules: dict[str, list[FullLinear]] = {
            name: [
                FullLinear(
                    *sizes[name], bias=linear.bias is not None, quant_config=quant, prefix=linear.prefix
                )
                for _ in range(count)
            ]
            for name, linear in ((name, getattr(first, name)) for name in self.names)
            if name != "kv_b_proj"
        }
        # What a window of kv_b holds is the derived, dequantised weight: that is what attention uses.
        self.kv_b: list[torch.Tensor] = []
        if "kv_b_proj" in self.names:
            width, heads = sizes["kv_b_proj"]
            self.kv_b = [torch.empty(heads, width) for _ in range(count)]

    def finish(self) -> SharedWeights:
        """Connect the loaded tensors, the windows and the group. Same order on every rank."""
        if not self.names:
            return SharedWeights()
        link = weight_link()
        series = {name: self._series(name, link) for name in self.names}
        return SharedWeights(series, self.modules, self.kv_b)

    def _own(self, name: str) -> dict[int, Tensors | None]:
        own: dict[int, Tensors | None] = {}
        for layer, attention in self.attentions.items():
            linear = getattr(attention, name)
            if not getattr(linear, "present", True):
                own[layer] = None
            elif name == "kv_b_proj":
                assert attention.impl.kv_b is not None
                own[layer] = {"weight": attention.impl.kv_b}
            else:
                own[layer] = tensors_of(linear)
        return own

    def _windows(self, name: str) -> list[Tensors]:
        if name == "kv_b_proj":
            return [{"weight": t} for t in self.kv_b]
        for module in self.modules[name]:
            for param in module.parameters():
                param.data.zero_()
            module.quant_method.process_weights_after_loading(module)
        return [tensors_of(module) for module in self.modules[name]]

    def _series(self, name: str, link: Link) -> Series:
        own, windows = self._own(name), self._windows(name)
        source: Broadcast | Gather
        if self.config.weights == "broadcast":
            source = Broadcast(self.schedule, link)
        else:
            source = Gather(link)
            # One by one, and no name for an old one: each is let go before the next is laid out.
            for i in range(len(windows)):
                windows[i] = source.window_layout(own[self.schedule.start], windows[i])
                if name in self.modules:
                    put_back(self.modules[name][i], windows[i])
        for layer in self.schedule.layers:
            own[layer] = source.prepare(layer, own[layer], windows[0])
            if self.config.weights == "gather" and name != "kv_b_proj":
                put_back(getattr(self.attentions[layer], name), own[layer])
        return Series(name, self.schedule, source, own, windows, Counters(name, str(link.group.rank)))


def put_back(linear: nn.Module, tensors: Tensors | None) -> None:
    """Make a linear compute with these tensors, under the names they came from."""
    for name, tensor in (tensors or {}).items():
        held = getattr(linear, name)
        if isinstance(held, nn.Parameter):
            held.data = tensor
        else:
            setattr(linear, name, tensor)
