"""The projections of context-parallel attention: the full weight on every rank, on its owner, or as TP shards."""

from functools import partial

import torch
from vllm.config import get_current_vllm_config
from vllm.distributed.parallel_state import get_pp_group
from vllm.distributed.utils import get_pp_indices
from vllm.model_executor.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.models.utils import extract_layer_index

from vllm_sfa_cp.config import SfaCpConfig
from vllm_sfa_cp.weights.link import weight_link
from vllm_sfa_cp.weights.series import Schedule

#: RowParallelLinear whose partial sums the step reduces.
PartialSumLinear = partial(RowParallelLinear, reduce_results=False)


class FullLinear(ReplicatedLinear):
    """vLLM's ReplicatedLinear under the attribute names that MLA reads off a parallel linear."""

    def __init__(self, input_size: int, output_size: int, *args, **kwargs) -> None:
        super().__init__(input_size, output_size, *args, **kwargs)
        self.input_size_per_partition = input_size
        self.output_size_per_partition = output_size


class AbsentMethod(QuantizeMethodBase):
    """Stands for the quantisation method where another rank owns the weight: nothing to load or compute."""

    def __init__(self, stands_for: type) -> None:
        self.stands_for = stands_for

    def create_weights(self, layer: torch.nn.Module, *weight_args, **extra_weight_attrs) -> None:
        raise NotImplementedError("an absent weight is created by its own method on the meta device")

    def apply(self, layer: torch.nn.Module, *args, **kwargs) -> torch.Tensor:
        raise RuntimeError("this rank does not own the layer's weight; it must come from a window")

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        return None


class OwnedLinear(FullLinear):
    """A full linear that has memory on its owner only; elsewhere its parameters are names and shapes.

    The other ranks never allocate the weight and their loader skips it, so that loading peaks no higher than
    serving does.
    """

    quant_method: QuantizeMethodBase | None

    def __init__(self, *args, prefix: str, **kwargs) -> None:
        config = get_current_vllm_config()
        stage = stage_layers(config)
        schedule = Schedule(stage.start, len(stage), 0)
        link = weight_link()
        self.present = schedule.owner(extract_layer_index(prefix), link.size) == link.rank
        if self.present:
            super().__init__(*args, prefix=prefix, **kwargs)
            return
        with torch.device("meta"):
            super().__init__(*args, prefix=prefix, **kwargs)
        self.quant_method = AbsentMethod(type(self.quant_method))

    def weight_loader(self, param: torch.nn.Parameter, loaded_weight: torch.Tensor) -> None:
        """See ReplicatedLinear; a weight that lives elsewhere is skipped."""
        if self.present:
            super().weight_loader(param, loaded_weight)


def method_of(linear: torch.nn.Module) -> type:
    """Class of a linear's quantisation method, also where another rank owns the weight."""
    method = linear.quant_method
    return method.stands_for if isinstance(method, AbsentMethod) else type(method)


def stage_layers(vllm_config) -> range:
    """Layers of this pipeline stage; the MTP layer is not one of them."""
    total = vllm_config.model_config.hf_config.num_hidden_layers
    group = get_pp_group()
    return range(*get_pp_indices(total, group.rank_in_group, group.world_size))


def projection_class(config: SfaCpConfig, name: str):
    """Constructor of projection `name` (one of `config.SHAREABLE`) for the weight source in force."""
    if name not in config.shared or config.weights == "replicate":
        return FullLinear
    if config.weights == "broadcast":
        return OwnedLinear
    return PartialSumLinear if name == "o_proj" else ColumnParallelLinear
