"""Sparse-attention kernels behind one interface; nothing is imported before a set is asked for."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_sfa_cp.ops.interface import SparseOps

OPS = {"reference": "ReferenceOps", "ascend": "AscendOps"}


def get_ops(name: str) -> "SparseOps":
    """The kernel set called `name`. ValueError: unknown name, or a library that it needs is missing."""
    if name not in OPS:
        raise ValueError(f"unknown kernel set {name!r}; known: {', '.join(sorted(OPS))}")
    try:
        return getattr(import_module(f"{__name__}.{name}"), OPS[name])()
    except ModuleNotFoundError as err:
        raise ValueError(
            f'"ops": "{name}" needs the package {err.name}, which is not installed; install it or leave "ops" out'
        ) from err
