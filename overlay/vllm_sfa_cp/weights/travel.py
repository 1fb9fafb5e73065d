"""What belongs to a linear's weight: every tensor its quantisation method keeps, under the method's names."""

import torch
from torch import nn
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

Tensors = dict[str, torch.Tensor]

# Methods whose tensors are plain row/column layouts: a shard of the weight is a slice of each tensor along one
# dimension. A packed or interleaved layout must not be added here without a way to reassemble it.
_KNOWN: set[type] = {UnquantizedLinearMethod}


def register_method(method: type) -> None:
    """Declare a LinearMethod whose tensors may be shared: slices along one dimension make up the whole."""
    _KNOWN.add(method)


class UnknownMethodError(TypeError):
    """A quantisation method whose layout is not known here; sharing it could compute with a wrong weight."""


def tensors_of(linear: nn.Module) -> Tensors:
    """Every tensor of a loaded linear: parameters, buffers and plain attributes, as its method left them."""
    plain = {k: v for k, v in vars(linear).items() if isinstance(v, torch.Tensor)}
    found = {**dict(linear.named_parameters()), **dict(linear.named_buffers()), **plain}
    return {name: found[name].data for name in sorted(found)}


def check_method(method: type) -> None:
    """UnknownMethodError: the quantisation method is not registered."""
    if method not in _KNOWN:
        raise UnknownMethodError(
            f"shared weights do not know the layout of {method.__qualname__}; "
            'use "sfa_cp": {"weights": "replicate"} for this checkpoint'
        )


def nbytes(tensors: Tensors) -> int:
    """Bytes of the distinct storages behind the tensors."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors.values()}
    return sum(storages.values())


def shard_dim(full: torch.Size, shard: torch.Size, size: int) -> int | None:
    """Dimension along which `size` shards make up the full tensor; None if every rank holds all of it.

    ValueError: the shapes do not fit (blocks cut by the sharding, say).
    """
    if full == shard:
        return None
    dims = [d for d in range(len(full)) if full[d] != shard[d]] if len(full) == len(shard) else []
    if len(dims) == 1 and full[dims[0]] == shard[dims[0]] * size:
        return dims[0]
    raise ValueError(f"{size} shards of shape {tuple(shard)} do not make up {tuple(full)}")


def outermost(tensor: torch.Tensor, dim: int | None) -> torch.Tensor:
    """View with `dim` first. Contiguous iff the tensor was laid out by `lay_out(..., dim)`."""
    return tensor if dim is None else tensor.movedim(dim, 0)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory as bytes, in storage order: collectives move every dtype and layout then, 8-bit floats
    and the transposed weights that some methods keep included. RuntimeError: the memory has gaps."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).view(-1).view(torch.uint8)


def lay_out(tensor: torch.Tensor, dim: int | None) -> torch.Tensor:
    """Same values and shape, stored so that shards along `dim` are consecutive in memory: an all-gather of
    them is the full tensor, no rearrangement. Returns the tensor itself if it is stored so already."""
    view = outermost(tensor, dim)
    if view.is_contiguous():
        return tensor
    view = view.contiguous()
    return view if dim is None else view.movedim(0, dim)
