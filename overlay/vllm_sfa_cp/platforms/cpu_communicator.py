"""Collectives over gloo that vLLM's CPU communicator lacks or does slowly."""

import torch
import torch.distributed as dist
from vllm.distributed.device_communicators.all2all import AgRsAll2AllManager
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator


class SfaCpuCommunicator(CpuCommunicator):
    """Adds variable-size gather and reduce-scatter, and through them the MoE dispatch between replicas."""

    def __init__(self, cpu_group, device=None, device_group=None, unique_name: str = "") -> None:
        super().__init__(cpu_group, device, device_group, unique_name)
        if self.use_all2all:
            self.all2all_manager = AgRsAll2AllManager(self.cpu_group)

    def reduce_scatter(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """This rank's share of the sum along `dim`. gloo's own reduce-scatter takes longer than its all-reduce,
        and summing the way the TP path does keeps the two paths' results bit-equal."""
        dim = dim % input_.dim()
        total = self.all_reduce(input_.contiguous())
        share = input_.shape[dim] // self.world_size
        return total.narrow(dim, self.rank_in_group * share, share).contiguous()

    def all_gatherv(
        self, input_: torch.Tensor | list[torch.Tensor], dim: int = 0, sizes: list[int] | None = None
    ) -> torch.Tensor | list[torch.Tensor]:
        """Concatenate rows of every rank; rank r contributes sizes[r] rows (equal shares if None)."""
        if isinstance(input_, list):
            return [self.all_gatherv(t, dim, sizes) for t in input_]  # type: ignore[misc]
        if dim != 0:
            raise NotImplementedError("all_gatherv gathers along dim 0")
        sizes = sizes or [input_.shape[0]] * self.world_size
        # gloo needs equal shares: pad to the largest, drop the padding afterwards.
        most = max(sizes)
        share = input_.new_zeros(most, *input_.shape[1:])
        share[: input_.shape[0]] = input_
        out = input_.new_empty(self.world_size * most, *input_.shape[1:])
        dist.all_gather_into_tensor(out, share, group=self.device_group)
        return torch.cat([out[r * most : r * most + size] for r, size in enumerate(sizes)])

    def reduce_scatterv(
        self, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None
    ) -> torch.Tensor:
        """This rank's sizes[rank] rows of the sum."""
        if dim != 0 or sizes is None:
            return self.reduce_scatter(input_, dim)
        total = self.all_reduce(input_.contiguous())
        start = sum(sizes[: self.rank_in_group])
        return total[start : start + sizes[self.rank_in_group]]

    def dispatch(
        self, hidden_states: torch.Tensor, router_logits: torch.Tensor, is_sequence_parallel: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of every replica, for MoE layers under data parallelism."""
        assert self.all2all_manager is not None
        return self.all2all_manager.dispatch(hidden_states, router_logits, is_sequence_parallel)

    def combine(self, hidden_states: torch.Tensor, is_sequence_parallel: bool = False) -> torch.Tensor:
        """Summed rows of this replica."""
        assert self.all2all_manager is not None
        return self.all2all_manager.combine(hidden_states, is_sequence_parallel)
