"""What one rank of a benchmark or comparison does: keep engines, run requests, report their cost. For `RankPool`.

Engines stay open between calls. All engines of a process have the same tensor-parallel size and share its
process groups (vLLM makes them once per process), so any number of configurations can take turns, run by run.
"""

import contextlib
import ctypes
import gc
import inspect
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from .ops import get_ops
from .weights import metrics

Sample = dict[str, Any]
#: Methods of a kernel set that are timed.
KERNELS = ("indexer_topk", "sparse_mla", "write_latent", "write_indexer_key")

_ENGINES: dict[str, Any] = {}


def open_engine(label: str, model: str, **kwargs: Any) -> float:
    """Build vLLM's LLM under a name; returns the seconds that it took."""
    from vllm import LLM
    from vllm.config import get_cached_compilation_config

    # Something asked for it outside any engine: the next engine must not be built under that answer.
    get_cached_compilation_config.cache_clear()
    defaults: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "distributed_executor_backend": "external_launcher",
        "enable_prefix_caching": False,
        "block_size": 16,
        "seed": 0,
    }
    begin = time.perf_counter()
    _ENGINES[label] = LLM(model, **{**defaults, **kwargs})
    return time.perf_counter() - begin


def close_engines() -> None:
    """Tear every engine down, and the process groups with them."""
    from vllm.distributed import cleanup_dist_env_and_memory

    for llm in _ENGINES.values():
        llm.llm_engine.engine_core.shutdown()
    _ENGINES.clear()
    cleanup_dist_env_and_memory()
    gc.collect()


def engine(label: str) -> Any:
    """The LLM that was opened under this name."""
    return _ENGINES[label]


def model_of(label: str) -> Any:
    """The loaded model of this rank."""
    return engine(label).collective_rpc(lambda worker: worker.model_runner.get_model())[0]


def prefill(label: str, prompt: list[int], kernels: bool = False, trim: bool = False) -> Sample:
    """Time to the first token of one prompt, and that `token`. See `measure`."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    llm = engine(label)
    outputs: list[Any] = []

    def run() -> None:
        outputs.extend(llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False))

    return measure(run, kernels, trim) | {"token": outputs[0].outputs[0].token_ids[0]}


def decode_start(label: str, prompts: list[list[int]], max_tokens: int) -> int:
    """Prefill a batch and leave it in flight; returns the engine steps that it took."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    core = engine(label).llm_engine
    for i, prompt in enumerate(prompts):
        core.add_request(f"decode-{i}", {"prompt_token_ids": prompt}, params)
    begun: set[str] = set()
    steps = 0
    while len(begun) < len(prompts):
        begun |= {out.request_id for out in core.step() if out.outputs[0].token_ids}
        steps += 1
    return steps


def decode_steps(label: str, steps: int, kernels: bool = False, trim: bool = False) -> Sample:
    """`steps` more tokens of every request of the batch; all figures are per step. See `measure`."""
    core = engine(label).llm_engine

    def run() -> None:
        for _ in range(steps):
            core.step()

    sample = measure(run, kernels, trim)
    for key in ("wall_s", "cpu_s", "bytes", "weight_wait_s"):
        sample[key] /= steps
    for counts in (sample["bytes_by_kind"], sample["kernels"]):
        for key in counts:
            counts[key] /= steps
    return sample


def decode_stop(label: str, requests: int) -> None:
    """Take the batch out of the engine."""
    core = engine(label).llm_engine
    core.abort_request([f"decode-{i}" for i in range(requests)])
    while core.has_unfinished_requests():
        core.step()


def measure(function: Callable[[], object], kernels: bool, trim: bool) -> Sample:
    """What this rank spends on `function`, which every rank enters together.

    wall_s: seconds until this rank is through. cpu_s: of all its threads. bytes, bytes_by_kind: received in
    collectives, by torch.distributed's names. weight_wait_s: waited for full weights. peak_bytes: most memory
    above what was resident at the start. kernels: CPU seconds by kernel (empty unless asked for).
    trim: give freed memory back to the system first, so that peak_bytes counts what the step takes anew.
    """
    gc.collect()
    resident = _start_peak(trim)
    before = metrics.snapshot()
    with received() as counts, ExitStack() as stack:
        times = stack.enter_context(kernel_timers()) if kernels else {}
        if dist.is_initialized():
            dist.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        function()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    after = metrics.snapshot()
    return {
        "wall_s": wall,
        "cpu_s": cpu,
        "bytes": sum(counts.values()),
        "bytes_by_kind": dict(counts),
        "weight_wait_s": after["wait_seconds"] - before["wait_seconds"],
        "peak_bytes": max(0, _peak() - resident),
        "kernels": dict(times),
    }


def _all_reduce(a: dict[str, Any], n: int) -> float:
    return 2 * (n - 1) / n * a["tensor"].nbytes


#: torch.distributed function -> bytes that a rank of n receives in it (rings; a broadcast's sender gets none).
_RECEIVED: dict[str, Callable[[dict[str, Any], int], float]] = {
    "all_reduce": _all_reduce,
    "all_gather_into_tensor": lambda a, n: (n - 1) / n * a["output_tensor"].nbytes,
    "reduce_scatter_tensor": lambda a, n: (n - 1) / n * a["input"].nbytes,
    "all_gather": lambda a, n: (n - 1) * a["tensor"].nbytes,
    "broadcast": lambda a, n: 0 if a.get("src") == dist.get_rank() else a["tensor"].nbytes,
    "gather": lambda a, n: (n - 1) * a["tensor"].nbytes if a.get("gather_list") else 0,
    "recv": lambda a, n: a["tensor"].nbytes,
}


@contextmanager
def received() -> Iterator[Counter[str]]:
    """Count the bytes that this rank receives in collectives, by function of torch.distributed."""
    counts: Counter[str] = Counter()

    def counting(name: str) -> Callable[..., Any]:
        original = getattr(dist, name)
        signature, amount = inspect.signature(original), _RECEIVED[name]

        def call(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            counts[name] += amount(given, dist.get_world_size(given.get("group")))  # type: ignore[assignment]
            return original(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for name in _RECEIVED:
            stack.enter_context(mock.patch.object(dist, name, counting(name)))
        yield counts


@contextmanager
def kernel_timers(ops: str = "reference") -> Iterator[Counter[str]]:
    """CPU seconds of the calling thread in each kernel of a set (a rank has one thread)."""
    cls = type(get_ops(ops))
    with call_timers([(cls, name) for name in KERNELS], time.thread_time) as times:
        yield times


@contextmanager
def call_timers(functions: Iterable[tuple[Any, str]], clock: Callable[[], float]) -> Iterator[Counter[str]]:
    """Seconds of `clock`, by name, in each (owner, name): functions of modules or methods of classes."""
    times: Counter[str] = Counter()

    def timed(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            begin = clock()
            try:
                return original(*args, **kwargs)
            finally:
                times[name] += clock() - begin  # type: ignore[assignment]

        return call

    with ExitStack() as stack:
        for owner, name in functions:
            stack.enter_context(mock.patch.object(owner, name, timed(name, getattr(owner, name))))
        yield times


_STATUS = Path("/proc/self/status")


def _status(field: str) -> int:
    """Bytes in a VmXXX line of /proc/self/status."""
    line = next(row for row in _STATUS.read_text().splitlines() if row.startswith(field + ":"))
    return int(line.split()[1]) * 1024


def _start_peak(trim: bool) -> int:
    """Begin to watch for the largest resident size; returns the present one. Where the system does not let a
    process reset its peak, only growth beyond an earlier peak is seen."""
    if trim and sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # a libc other than glibc
            ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS") if _STATUS.exists() else _peak()


def _peak() -> int:
    if _STATUS.exists():
        return _status("VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS


def threads(count: int | None = None) -> int:
    """Threads that this rank computes with, from now on `count` of them if given."""
    if count is not None:
        torch.set_num_threads(count)
    return torch.get_num_threads()
