"""What one rank of the benchmark does: build an engine, run requests, report what they cost. Runs in `RankPool`."""

import os
import random
import resource
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from vllm_sfa_cp.launch import engine
from vllm_sfa_cp.weights import metrics


class Meter:
    """Bytes that this rank receives in collectives, and CPU seconds per kernel. Wraps classes of the process
    once; `take` returns and clears.

    An all-gather of b bytes in all brings (n - 1) / n * b, a reduce-scatter too, an all-reduce is both.
    """

    _installed: "Meter | None" = None

    def __init__(self) -> None:
        self.bytes = 0.0
        self.kernels: defaultdict[str, float] = defaultdict(float)

    @classmethod
    def install(cls) -> "Meter":
        """The process's meter."""
        if cls._installed is None:
            cls._installed = meter = cls()
            meter._wrap_collectives()
            meter._wrap_kernels()
        return cls._installed

    def take(self) -> tuple[float, dict[str, float]]:
        """(bytes, CPU seconds by kernel) since the last call."""
        result = self.bytes, dict(self.kernels)
        self.bytes = 0.0
        self.kernels.clear()
        return result

    def _wrap_collectives(self) -> None:
        from vllm.distributed.parallel_state import GroupCoordinator

        def counted(name: str, shares: Callable[[int], float]) -> None:
            original = getattr(GroupCoordinator, name)

            def method(group: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
                self.bytes += tensor.nbytes * shares(group.world_size)
                return original(group, tensor, *args, **kwargs)

            setattr(GroupCoordinator, name, method)

        counted("all_reduce", lambda n: 2 * (n - 1) / n)
        counted("reduce_scatter", lambda n: (n - 1) / n)
        counted("all_gather", lambda n: n - 1)

    def _wrap_kernels(self) -> None:
        from vllm_sfa_cp.ops.reference import ReferenceOps

        for name in ("indexer_topk", "sparse_mla"):
            original = getattr(ReferenceOps, name)

            def method(*args: Any, _name: str = name, _original: Any = original, **kwargs: Any) -> Any:
                start = time.thread_time()
                result = _original(*args, **kwargs)
                self.kernels[_name] += time.thread_time() - start
                return result

            setattr(ReferenceOps, name, method)


def _reset_peak() -> None:
    """Forget this process's peak memory (Linux; elsewhere the peak is the process's)."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        return


def _peak_bytes() -> int:
    """Peak resident bytes since `_reset_peak`."""
    try:
        with open("/proc/self/status") as file:
            for line in file:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(function: Callable[[], object], meter: Meter) -> dict[str, Any]:
    """Run once: wall_s, cpu_s (all threads of this process), bytes, weight_wait_s, peak_bytes, kernels."""
    meter.take()
    before = metrics.snapshot()
    _reset_peak()
    cpu, wall = time.process_time(), time.perf_counter()
    function()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    after = metrics.snapshot()
    moved, kernels = meter.take()
    return {
        "wall_s": wall,
        "cpu_s": cpu,
        "bytes": moved + after["bytes"] - before["bytes"],
        "weight_wait_s": after["wait_seconds"] - before["wait_seconds"],
        "peak_bytes": _peak_bytes(),
        "kernels": kernels,
    }


def _tokens(vocab: int, length: int, seed: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(2, vocab) for _ in range(length)]


def prefill(
    model: str, prompts: list[int], repeats: int, warmup: int, chunk: int | None, **kwargs: Any
) -> dict[int, list[dict[str, Any]]]:
    """One engine; for every prompt length, `repeats` prefills of fresh random tokens, one at a time."""
    from vllm import SamplingParams

    meter = Meter.install()
    longest = max(prompts)
    limits = {
        "max_model_len": longest + 16,
        "max_num_batched_tokens": chunk or longest,
        "enable_prefix_caching": False,
        "num_gpu_blocks_override": longest // 128 + 4,
    }
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    results: dict[int, list[dict[str, Any]]] = {}
    with engine(model, **{**limits, **kwargs}) as llm:
        vocab = llm.llm_engine.model_config.get_vocab_size()
        for length in prompts:
            for i in range(warmup + repeats):
                ids = _tokens(vocab, length, seed=1000 * length + i)
                found = measure(
                    lambda ids=ids: llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False),  # type: ignore[misc]
                    meter,
                )
                if i >= warmup:
                    results.setdefault(length, []).append(found)
    return results


def decode(
    model: str, batch: int, context: int, steps: int, repeats: int, warmup: int, **kwargs: Any
) -> list[dict[str, Any]]:
    """One engine; `batch` requests over `context` cached tokens, `steps` tokens each. wall_s and cpu_s are per
    output token of a request: the time of `steps` + 1 tokens less that of one, over `steps`."""
    from vllm import SamplingParams

    meter = Meter.install()
    limits = {
        "max_model_len": context + steps + 16,
        "max_num_batched_tokens": max(context, 2048),
        "max_num_seqs": batch,
        "enable_prefix_caching": True,
        "num_gpu_blocks_override": batch * ((context + steps) // 128 + 3),
    }
    results = []
    with engine(model, **{**limits, **kwargs}) as llm:
        vocab = llm.llm_engine.model_config.get_vocab_size()
        prompts = [{"prompt_token_ids": _tokens(vocab, context, seed=i)} for i in range(batch)]

        def run(tokens: int) -> Callable[[], object]:
            params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
            return lambda: llm.generate(prompts, params, use_tqdm=False)

        run(1)()  # fills the prefix cache
        for i in range(warmup + repeats):
            one, many = measure(run(1), meter), measure(run(steps + 1), meter)
            if i >= warmup:
                found = {**many}
                for key in ("wall_s", "cpu_s", "bytes", "weight_wait_s"):
                    found[key] = (many[key] - one[key]) / steps
                results.append(found)
    return results


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    import torch

    name = "unknown"
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as file:
            name = next((line.split(":")[1].strip() for line in file if line.startswith("model name")), name)
    return {
        "cpu": name,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "torch": torch.__version__,
        "threads_per_rank": 1,
    }
