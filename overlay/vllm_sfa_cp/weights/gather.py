"""Source `gather`: every rank keeps its tensor-parallel shard; the full weight is all-gathered into a window.

Memory is plain TP's plus the windows, and decode-only steps run on the shards without any fetch.
"""

from vllm_sfa_cp.weights.link import Handle, Link
from vllm_sfa_cp.weights.travel import Tensors, lay_out, outermost, shard_dim


class Gather:
    """Fetches by all-gather of the ranks' shards."""

    def __init__(self, link: Link) -> None:
        self.link = link

    def owns(self, layer: int) -> bool:
        """No rank has the full weight."""
        return False

    def prepare(self, layer: int, own: Tensors | None, window: Tensors) -> Tensors:
        """Lay the shard out for gathering (see `lay_out`); the caller puts the result back into the linear."""
        assert own is not None
        if own.keys() != window.keys():
            raise ValueError(f"layer {layer}: shard has {sorted(own)}, window {sorted(window)}")
        return {
            name: lay_out(shard, shard_dim(window[name].shape, shard.shape, self.link.size))
            for name, shard in own.items()
        }

    def window_layout(self, own: Tensors | None, window: Tensors) -> Tensors:
        """The window's tensors, stored so that gathered shards land in place."""
        assert own is not None
        return {
            name: lay_out(full, shard_dim(full.shape, own[name].shape, self.link.size))
            for name, full in window.items()
        }

    def fetch(self, layer: int, own: Tensors | None, window: Tensors) -> tuple[list[Handle], int]:
        """Start the layer's collectives; returns their handles and the bytes that this rank receives."""
        assert own is not None
        handles, received = [], 0
        for name in sorted(own):
            shard, full = own[name], window[name]
            dim = shard_dim(full.shape, shard.shape, self.link.size)
            if dim is None:  # the same on every rank
                full.copy_(shard)
                continue
            handles.append(self.link.all_gather(outermost(full, dim), outermost(shard, dim)))
            received += full.nbytes - shard.nbytes
        return handles, received
