"""How one forward moves rows between the ranks of the tensor-parallel group.

Every layer is written once in terms of `gather` and `reduce`; the mode of the step decides what they are:

    mode        residual stream   gather (rows -> MLP/attention input)    reduce (partial sums -> rows)
    tp          all rows          nothing                                 all-reduce
    flashcomm1  local rows        all-gather                              reduce-scatter
    cp          local rows        all-gather                              reduce-scatter

In a `cp` step attention does not gather its input at all: it works on local rows with all heads.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from vllm.distributed.parallel_state import GroupCoordinator, get_tp_group
from vllm.forward_context import get_forward_context

from vllm_sfa_cp.config import SfaCpConfig
from vllm_sfa_cp.metadata import SfaMetadata
from vllm_sfa_cp.partition import Partition, make_dummy_partition

Mode = Literal["tp", "flashcomm1", "cp"]


@dataclass(frozen=True)
class Step:
    """One forward's view. positions: [T_pad] int64, flat order; local_positions: [rows]."""

    mode: Mode
    partition: Partition
    metadata: SfaMetadata | None
    positions: torch.Tensor
    local_positions: torch.Tensor
    group: GroupCoordinator

    @property
    def sharded(self) -> bool:
        """Whether the residual stream holds local rows only."""
        return self.mode != "tp"

    def shard(self, flat: torch.Tensor) -> torch.Tensor:
        """Rows of the residual stream of a flat tensor [T_pad, ...]."""
        return self.partition.shard(flat) if self.sharded else flat

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """All rows, in gathered order: [rows, ...] -> [T_pad, ...]."""
        return self.group.all_gather(rows, dim=0) if self.sharded else rows

    def reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """Sum over ranks: [T_pad, ...] in gathered order -> complete [rows, ...]."""
        if self.sharded:
            return self.group.reduce_scatter(partial, dim=0)
        return self.group.all_reduce(partial)

    def unshard(self, rows: torch.Tensor) -> torch.Tensor:
        """Flat order without padding: [rows, ...] -> [T, ...]."""
        return self.partition.unshard(self.gather(rows)) if self.sharded else rows


def begin(config: SfaCpConfig, layer_name: str, positions: torch.Tensor) -> Step:
    """The step of the current forward context.

    layer_name: any attention layer of this pipeline stage; positions: [T_pad], which the runner padded to a
    multiple of the group size. Without metadata (profile run, idle data-parallel replica) every rank takes
    the same path over rows that belong to no request. An idle replica's step is one padded token: where there is a
    TP path it fetches no weights, or a busy replica that decodes would wait for them in every layer's experts.
    """
    group = get_tp_group()
    padded = positions.shape[0]
    by_layer = get_forward_context().attn_metadata
    metadata = by_layer[layer_name] if isinstance(by_layer, dict) else None
    if metadata is not None and metadata.cp is not None:
        mode: Mode = "cp"
        partition = metadata.cp.partition
    else:
        idle = metadata is None and padded <= group.world_size and config.has_tp_path
        if config.enable_sfa_cp and (metadata is not None or idle):
            mode = "tp"
        else:
            mode = "cp" if config.enable_sfa_cp else "flashcomm1"
        partition = make_dummy_partition(
            padded, rank=group.rank_in_group, size=group.world_size, device=positions.device
        )
    if partition.padded != padded:
        raise RuntimeError(
            f"the step has {padded} rows and its partition {partition.padded}; the runner must pad to a multiple "
            f"of tensor_parallel_size ({group.world_size})"
        )
    local = partition.shard(positions) if mode != "tp" else positions
    return Step(mode, partition, metadata, positions, local, group)
