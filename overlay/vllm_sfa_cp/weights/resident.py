"""What a rank keeps for weights, by category, beside what plain tensor parallelism would keep."""

from collections.abc import Iterable
from itertools import islice

import torch
from torch import nn
from vllm.distributed.parallel_state import get_tp_group
from vllm.logger import init_logger

from vllm_sfa_cp.config import SHAREABLE
from vllm_sfa_cp.layers.replicated import FullLinear
from vllm_sfa_cp.model import SfaDeepseekV32ForCausalLM

logger = init_logger("vllm.sfa_cp")

ATTENTION, MLP, WINDOWS, OTHER = "other attention", "MLP and experts", "windows", "embeddings and head"
CATEGORIES = (*SHAREABLE, WINDOWS, ATTENTION, MLP, OTHER)


def resident(model: SfaDeepseekV32ForCausalLM, size: int) -> dict[str, tuple[float, float]]:
    """Category -> (bytes on this rank, bytes under plain TP of `size` ranks) of a loaded stage with SFA-CP.

    Measured from storages, each counted once; what other ranks hold for this one does not count. The second
    figure is the same except for the projections, of which plain TP keeps one shard, and the windows.
    """
    here, plain = dict.fromkeys(CATEGORIES, 0.0), dict.fromkeys(CATEGORIES, 0.0)
    seen: set[int] = set()

    def take(tensors: Iterable[torch.Tensor]) -> int:
        new = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if not t.is_meta}
        fresh = new.keys() - seen
        seen.update(fresh)
        return sum(new[pointer] for pointer in fresh)

    inner = model.model
    series = inner.shared.series if inner.shared else {}
    for layer in islice(inner.layers, inner.start_layer, inner.end_layer):
        for name in SHAREABLE:
            linear = getattr(layer.self_attn, name)
            tensors = list(linear.parameters())
            # A parameter on the meta device, which another rank owns, has a size too.
            whole = sum(t.nbytes for t in tensors)
            if name == "kv_b_proj":
                derived = layer.self_attn.mla_attn.mla_attn.impl.kv_b
                tensors += [] if derived is None else [derived]
                # A quantised weight is kept beside what attention uses; on other ranks than the owner's neither is.
                used = series[name].windows[0]["weight"] if derived is None else derived
                whole += used.nbytes if used.dtype != linear.weight.dtype else 0
            plain[name] += whole / size if isinstance(linear, FullLinear) else whole
            own = series[name].own[layer.layer_idx] if name in series else None
            here[name] += take([*tensors, *(own or {}).values()])
    here[WINDOWS] = take(t for s in series.values() for window in s.windows for t in window.values())
    for path, tensor in (*model.named_parameters(), *model.named_buffers()):
        category = ATTENTION if ".self_attn." in path else MLP if ".mlp." in path else OTHER
        size_here = take([tensor])
        here[category] += size_here
        plain[category] += size_here
    return {name: (here[name], plain[name]) for name in CATEGORIES}


def log_resident(model: nn.Module) -> None:
    """One line at start-up, in MiB, for a model with SFA-CP."""
    if not isinstance(model, SfaDeepseekV32ForCausalLM) or not model.model.sfa.enable_sfa_cp:
        return
    found = resident(model, get_tp_group().world_size)
    mib = 1 / (1 << 20)
    logger.info(
        "weights %s, resident per rank in MiB (plain TP): %s; together %.1f (%.1f)",
        model.model.sfa.weights,
        ", ".join(f"{name} {a * mib:.1f} ({b * mib:.1f})" for name, (a, b) in found.items()),
        *(sum(figures) * mib for figures in zip(*found.values())),
    )
