"""Source `broadcast`: a layer's full weight lives on one rank of the group, which sends it to the others."""

from vllm_sfa_cp.weights.link import Handle, Link
from vllm_sfa_cp.weights.series import Schedule
from vllm_sfa_cp.weights.travel import Tensors


class Broadcast:
    """Fetches by broadcast from `schedule.owner(layer)`. The owner uses its own tensors, no window."""

    def __init__(self, schedule: Schedule, link: Link) -> None:
        self.schedule, self.link = schedule, link

    def owns(self, layer: int) -> bool:
        """Whether this rank keeps the layer's full weight."""
        return self.schedule.owner(layer, self.link.size) == self.link.rank

    def prepare(self, layer: int, own: Tensors | None, window: Tensors) -> Tensors | None:
        """Check after loading that what the owner will send fits the window. Nothing is copied: the owner sends
        what its linear computes with, also after a reload."""
        if not self.owns(layer):
            return None
        assert own is not None
        sent, fits = (
            {name: (t.shape, t.stride(), t.dtype) for name, t in tensors.items()} for tensors in (own, window)
        )
        if sent != fits:
            raise ValueError(f"layer {layer}: the loaded tensors {sent} do not fit the windows {fits}")
        return own

    def fetch(self, layer: int, own: Tensors | None, window: Tensors) -> tuple[list[Handle], int]:
        """Start the layer's collectives; returns their handles and the bytes that this rank receives."""
        owner = self.schedule.owner(layer, self.link.size)
        source = own if own is not None else window
        handles = [self.link.broadcast(source[name], owner) for name in sorted(source)]
        return handles, 0 if own is not None else sum(t.nbytes for t in source.values())
