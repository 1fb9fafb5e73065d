"""What one process of `bench calibrate` does: time the parts of a model's layers, and collectives. For `RankPool`."""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import zip_longest
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from . import rank_engines
from .serving import free_port


class PartTimer:
    """CPU seconds by part of the model, each second in the innermost part only."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._stack: list[str] = []
        self._since = 0.0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self.enter(name)
        try:
            yield
        finally:
            self.leave()

    def enter(self, name: str) -> None:
        self._charge()
        # A rotary embedding belongs to whatever rotates.
        inside = bool(self._stack) and self._stack[-1] == "indexer_proj" and name == "q_b"
        self._stack.append("indexer_proj" if inside else name)

    def leave(self) -> None:
        self._charge()
        self._stack.pop()

    def _charge(self) -> None:
        now = time.thread_time()
        if self._stack:
            self.seconds[self._stack[-1]] += now - self._since  # type: ignore[assignment]
        self._since = now

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                return function(*args, **kwargs)

        return call

    def watch(self, module: torch.nn.Module, name: str) -> None:
        module.register_forward_pre_hook(lambda *_: self.enter(name))
        module.register_forward_hook(lambda *_: self.leave(), always_call=True)


def _watch_model(timer: PartTimer, model: Any) -> None:
    """Name the part of every module. What has no part of its own (residual stream, cache writes) is `rest`."""
    timer.watch(model.model, "rest")
    rotary = set()
    for layer in model.model.layers:
        attention = layer.self_attn
        for module in (layer.input_layernorm, layer.post_attention_layernorm, attention.fused_qkv_a_proj):
            timer.watch(module, "qkv_a")
        for module in (attention.q_a_layernorm, attention.kv_a_layernorm):
            timer.watch(module, "qkv_a")
        rotary |= {attention.rotary_emb, attention.indexer_rope_emb}
        timer.watch(attention.q_b_proj, "q_b")
        timer.watch(attention.o_proj, "o")
        timer.watch(attention.indexer, "indexer_proj")
        impl = attention.mla_attn.mla_attn.impl
        impl.attend = timer.around("w_ukv", impl.attend)
        routed = hasattr(layer.mlp, "gate")
        timer.watch(layer.mlp, "experts" if routed else "dense_mlp")
        if routed:
            timer.watch(layer.mlp.gate, "router")
    for module in rotary:
        timer.watch(module, "q_b")


def parts(
    models: list[tuple[str, list[int]]], dtype: str, vocab: int, repeats: int
) -> list[dict[int, dict[str, float]]]:
    """Build single-rank engines of `models` (folder, prompt lengths) and let them prefill in turns, so that what
    slows the machine slows all. Per model and length the median repeat's CPU seconds by part, and `total` of the
    whole step. Each process has engines of its own, whatever the others do."""
    import random

    os.environ.update(WORLD_SIZE="1", RANK="0", LOCAL_RANK="0", MASTER_PORT=str(free_port()))
    timer = PartTimer()
    for i, (folder, lengths) in enumerate(models):
        rank_engines.open_engine(
            str(i),
            folder,
            dtype=dtype,
            max_model_len=max(lengths) + 1,
            max_num_batched_tokens=max(lengths),
            max_num_seqs=4,
            num_gpu_blocks_override=-(-max(lengths) // 16) + 8,
        )
        _watch_model(timer, rank_engines.model_of(str(i)))
    generator = random.Random(0)
    runs: list[dict[int, list[dict[str, float]]]] = [{length: [] for length in each} for _, each in models]
    with ExitStack() as stack:
        ops = type(rank_engines.get_ops("reference"))
        for name, part in (("indexer_topk", "indexer_scores"), ("sparse_mla", "attention")):
            stack.enter_context(mock.patch.object(ops, name, timer.around(part, getattr(ops, name))))
        for name in ("write_latent", "write_indexer_key"):
            stack.enter_context(mock.patch.object(ops, name, timer.around("rest", getattr(ops, name))))
        for _ in range(repeats + 1):
            for turn in zip_longest(*(lengths for _, lengths in models)):
                for i, length in enumerate(turn):
                    if length is None:
                        continue
                    timer.seconds.clear()
                    ids = [generator.randrange(2, vocab) for _ in range(length)]
                    sample = rank_engines.prefill(str(i), ids)
                    runs[i][length].append({**timer.seconds, "total": sample["cpu_s"]})
    rank_engines.close_engines()
    return [{length: _median(given[1:]) for length, given in each.items()} for each in runs]


def _median(runs: list[dict[str, float]]) -> dict[str, float]:
    return sorted(runs, key=lambda run: run["total"])[len(runs) // 2]


def collectives(rows: int, width: int, dtype: str, repeats: int) -> dict[str, float]:
    """CPU seconds of this rank per collective over [rows x ranks, width], medians."""
    size = int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method="env://")
    share = torch.zeros(rows, width, dtype=getattr(torch, dtype))
    whole = torch.zeros(rows * size, width, dtype=share.dtype)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, share),
    }
    found = {}
    for name, call in calls.items():
        call()
        seconds = []
        for _ in range(repeats):
            dist.barrier()
            begin = time.process_time()
            call()
            seconds.append(time.process_time() - begin)
        found[name] = sorted(seconds)[len(seconds) // 2]
    dist.destroy_process_group()
    return found


def bandwidth(size: int = 1 << 26) -> float:
    """byte/s at which a matrix-vector product reads its weights."""
    side = int((size // 4) ** 0.5)
    weight, x = torch.zeros(side, side), torch.zeros(1, side)
    torch.nn.functional.linear(x, weight)
    begin, cpu = time.perf_counter(), time.thread_time()
    while time.perf_counter() - begin < 0.5:
        torch.nn.functional.linear(x, weight)
        cpu_each = time.thread_time() - cpu
        cpu = time.thread_time()
    return weight.nbytes / cpu_each
