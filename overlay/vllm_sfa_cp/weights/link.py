"""The communication of shared weights: asynchronous collectives in a process group of their own.

The group has the ranks of the tensor-parallel group (of one pipeline stage, of one data-parallel replica), but
its own sequence of collectives, so that a fetch under way never stands between two collectives of a layer.
"""

from typing import Protocol

import torch
import torch.distributed as dist
from vllm.distributed.parallel_state import (
    GroupCoordinator,
    get_tp_group,
    get_world_group,
    init_model_parallel_group,
)

from vllm_sfa_cp.weights.travel import as_bytes

_ATTRIBUTE = "sfa_weight_group"


class Handle(Protocol):
    """A collective under way; `wait` returns when its result may be read."""

    def wait(self) -> object: ...


class Link:
    """Collectives of one group that return at once. Every rank calls them in the same order."""

    def __init__(self, group: GroupCoordinator) -> None:
        self.group = group
        self.rank, self.size = group.rank_in_group, group.world_size

    def broadcast(self, tensor: torch.Tensor, owner: int) -> Handle:
        """Send `tensor` of group rank `owner` into `tensor` of the others; same shape and strides everywhere."""
        return dist.broadcast(
            as_bytes(tensor), src=self.group.ranks[owner], group=self.group.device_group, async_op=True
        )

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> Handle:
        """Concatenate the ranks' shards along dim 0 into `out`; both contiguous."""
        return dist.all_gather_into_tensor(
            as_bytes(out), as_bytes(shard), group=self.group.device_group, async_op=True
        )


def create_weight_group() -> GroupCoordinator:
    """Make the group once per tensor-parallel group; collective over the whole world, same order on all ranks.

    Called by the worker between the start of torch.distributed and the loading of the model. The group hangs on
    the TP group: models in one process share both, and a new TP group gets a new one.
    """
    tp = get_tp_group()
    if not hasattr(tp, _ATTRIBUTE):
        world = get_world_group()
        mine: list[list[int] | None] = [None] * world.world_size
        dist.all_gather_object(mine, list(tp.ranks), group=world.cpu_group)
        every = sorted({tuple(ranks) for ranks in mine if ranks is not None})
        group = init_model_parallel_group(
            [list(ranks) for ranks in every],
            world.local_rank,
            dist.get_backend(tp.device_group),
            group_name="sfa_weights",
        )
        setattr(tp, _ATTRIBUTE, group)
    return getattr(tp, _ATTRIBUTE)


def weight_link() -> Link:
    """The link of this rank's tensor-parallel group. RuntimeError: `create_weight_group` was not called."""
    group = getattr(get_tp_group(), _ATTRIBUTE, None)
    if group is None:
        raise RuntimeError(
            "the weight group does not exist; shared weights need the overlay's worker (worker_cls)"
        )
    return Link(group)
