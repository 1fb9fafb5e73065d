"""Defaults that make any number of ranks fit a CPU machine. Imports no vLLM."""

import functools
import os
from collections.abc import Callable
from typing import Any

GIB = 1 << 30
UPSTREAM_SWAP_GIB = 4


def cache_bytes(total_memory: int, ranks: int) -> int:
    """KV-cache bytes per rank where the user sets none: a quarter of the machine's memory, shared by its ranks,
    between 256 MiB and upstream's 4 GiB. Eight ranks on 24 GiB get 768 MiB each."""
    return max(256 << 20, min(4 * GIB, total_memory // 4 // ranks))


def set_thread_variables(ranks: int) -> None:
    """Share the cores among the ranks and bind none of them (that takes compiled kernels); what the user set
    stays. Environment variables, because workers read them before any of our code runs."""
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // ranks)))


def without_swap_space(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `CacheConfig.verify_with_parallel_config`: upstream's default swap space counts as none."""

    @functools.wraps(original)
    def verify_with_parallel_config(self: Any, parallel_config: Any) -> Any:
        if self.swap_space == UPSTREAM_SWAP_GIB:
            self.swap_space = 0
        return original(self, parallel_config)

    return verify_with_parallel_config
