"""Comparing tensors of two configurations: how far apart, and never a number where there is none."""

from typing import Literal, NamedTuple

import torch


class Difference(NamedTuple):
    """absolute: max |a - b|. relative: max |a - b| / |b| where they differ; infinite where b is 0."""

    absolute: float
    relative: float


class MismatchError(ValueError):
    """The tensors cannot be compared: shape, dtype, or not-a-number on one side only."""


def check_diff(a: torch.Tensor, b: torch.Tensor) -> Literal[False] | Difference:
    """False if `a` and `b` hold the same values, else their largest absolute and relative difference.

    `b` is the reference. Devices may differ. Any shape (empty included) and any real or boolean dtype, float8
    included; the difference is taken in float64. Equal infinities are equal and -0.0 equals 0.0.

    MismatchError: shapes or dtypes differ, or NaN stands in either tensor, even in the same places: a NaN
    is a fault, and must not pass for agreement.
    """
    if a.shape != b.shape:
        raise MismatchError(f"shapes differ: {tuple(a.shape)} and {tuple(b.shape)}")
    if a.dtype != b.dtype:
        raise MismatchError(f"dtypes differ: {a.dtype} and {b.dtype}")
    if a.dtype.is_complex:
        raise MismatchError(f"{a.dtype} is not supported")
    # float64 is exact for every dtype but 64-bit integers, whose equality is therefore decided on themselves.
    left, right = a.detach().cpu(), b.detach().cpu()
    exact = not a.dtype.is_floating_point
    x, y = left.double(), right.double()
    nans = [int(t.isnan().sum()) for t in (x, y)]
    if any(nans):
        raise MismatchError(f"NaN in {nans[0]} and {nans[1]} of {a.numel()} elements")
    apart = left != right if exact else x != y
    if not apart.any():
        return False
    x, y = x[apart], y[apart]
    absolute = (x - y).abs()
    if exact:
        absolute = absolute.clamp(min=1)  # neighbours among large integers coincide in float64
    # inf / inf only arises where b or the difference is infinite: as far apart as can be.
    relative = (absolute / y.abs()).nan_to_num(nan=torch.inf, posinf=torch.inf)
    return Difference(float(absolute.max()), float(relative.max()))
