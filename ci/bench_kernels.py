"""Time the sparse-attention kernels of one kernel set, and what they spend it on; one JSON object.

    python ci/bench_kernels.py --threads 1 --dtype float32 [--json FILE]

Each entry: median and minimum wall time over `--repeats` runs, CPU time of the cheapest run, and the useful
multiply-adds per second (keys that a row may see, or has selected; padding does not count). `gemm_gflops` is the
rate of a 2048 x 2048 x 2048 matrix product in the same process: the bound to compare with. `parts`, of the
reference kernels, are shares of the CPU time of one more run, its calls timed one by one; "rest" is what is left.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "overlay"))

from vllm_sfa_cp.bench import write
from vllm_sfa_cp.bench_report import machine
from vllm_sfa_cp.ops import get_ops
from vllm_sfa_cp.ops.interface import Segments
from vllm_sfa_cp.rank_engines import call_timers

MODEL = "dsv32-128k/64"  # whose sizes these are, as are topk 128 and 64 heads
INDEX_HEADS, INDEX_WIDTH, LATENT, ROPE, BLOCK = 32, 64, 256, 32, 16
LAUNCHES = {  # name: rows per segment, visible keys of its last row
    "prefill 1024 rows at 1024": ([1024], [1024]),
    "prefill 1024 rows at 8192": ([1024], [8192]),
    "prefill 1024 rows at 16384": ([1024], [16384]),
    "prefill 8192 rows at 8192": ([8192], [8192]),
    "32 chunks of 32 rows at 600": ([32] * 32, [600] * 32),
    "decode 8 rows at 2048": ([1] * 8, [2048] * 8),
    # What the first of eight ranks has of one prompt, whose blocks all its segments share.
    "one prompt of 8192, 1024 rows in zigzag": ([512, 512], [512, 8192]),
    "one prompt of 8192, 1024 rows in round-robin": ([1] * 1024, list(range(1, 8193, 8))),
}


def measure(run: Callable[[], object], repeats: int) -> dict[str, float]:
    """Milliseconds: median and minimum wall time, CPU time of the run with the least of it."""
    run()
    wall, cpu = [], []
    for _ in range(repeats):
        wall_start, cpu_start = time.perf_counter(), time.process_time()
        run()
        wall.append((time.perf_counter() - wall_start) * 1e3)
        cpu.append((time.process_time() - cpu_start) * 1e3)
    return {
        "ms": round(statistics.median(wall), 3),
        "ms_min": round(min(wall), 3),
        "cpu_ms_min": round(min(cpu), 3),
    }


def parts(ops: Any, run: Callable[[], object]) -> dict[str, float]:
    """Share of a run's CPU time in each of the calls that the reference kernels are made of."""
    owners = [(torch, name) for name in ("mm", "bmm", "index_select", "softmax")]
    loops = getattr(ops, "_loops", None)
    owners += [
        (loops, name) for name in ("weighted_relu_sum", "weighted_relu_sum_bf16", "select_topk") if loops
    ]
    with call_timers(owners, time.process_time) as spent:
        begin = time.process_time()
        run()
        whole = time.process_time() - begin
    shares = {name: round(seconds / whole, 3) for name, seconds in spent.items()}
    return shares | {"rest": round(1 - sum(shares.values()), 3)}


def with_rate(entry: dict[str, object], times: dict[str, float], flops: int) -> dict[str, object]:
    return {**entry, **times, "gflops": round(flops / times["ms_min"] / 1e6, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ops", default="reference")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--heads", type=int, nargs="+", default=[64, 8], help="query heads of the attention")
    parser.add_argument("--topk", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write there instead of stdout")
    parser.add_argument("--only", default="", help="run the launches whose name contains this")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    dtype, topk, ops = getattr(torch, options.dtype), options.topk, get_ops(options.ops)

    square = torch.randn(2048, 2048).to(dtype)
    gemm = measure(lambda: square @ square, options.repeats)
    runs: list[dict[str, object]] = []
    for name, (counts, lengths) in LAUNCHES.items():
        if options.only not in name:
            continue
        rows, width = sum(counts), -(-max(lengths) // BLOCK)
        alone = name.startswith("one prompt")
        blocks = width if alone else len(counts) * width
        table = torch.randperm(blocks).view(-1, width).expand(len(counts), -1)
        segments = Segments(
            torch.tensor(counts).cumsum(0).int(),
            torch.tensor(lengths).int(),
            table.int().contiguous(),
            max(lengths),
        )
        q, weights = torch.randn(rows, INDEX_HEADS, INDEX_WIDTH).to(dtype), torch.rand(rows, INDEX_HEADS)
        k_cache = torch.randn(blocks, BLOCK, INDEX_WIDTH).to(dtype)
        seen = sum(
            v for c, k in zip(counts, lengths) for v in range(max(k - c + 1, topk + 1), k + 1)
        )  # rows that see at most topk keys are not scored
        indices = ops.indexer_topk(q, weights, k_cache, segments, topk)

        def index() -> object:
            return ops.indexer_topk(q, weights, k_cache, segments, topk)  # noqa: B023

        entry = {"kernel": "indexer_topk", "launch": name}
        flops = 2 * seen * INDEX_HEADS * INDEX_WIDTH
        runs.append(with_rate(entry, measure(index, options.repeats), flops) | {"parts": parts(ops, index)})
        kv_cache = torch.randn(blocks, BLOCK, LATENT + ROPE).to(dtype)
        selected = int((indices >= 0).sum())
        for heads in options.heads:
            q_latent, q_pe = (torch.randn(rows, heads, d).to(dtype) for d in (LATENT, ROPE))

            def attend() -> object:
                return ops.sparse_mla(q_latent, q_pe, kv_cache, indices, segments, 0.1)  # noqa: B023

            entry = {"kernel": "sparse_mla", "heads": heads, "launch": name}
            flops = 2 * selected * heads * (2 * LATENT + ROPE)
            runs.append(
                with_rate(entry, measure(attend, options.repeats), flops) | {"parts": parts(ops, attend)}
            )
    report = {
        "machine": machine() | {"threads_per_rank": options.threads},
        "model": {"name": f"kernels of {MODEL}", "dtype": options.dtype},
        "ops": options.ops,
        "topk": topk,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "gemm_gflops": round(2 * 2048**3 / gemm["ms_min"] / 1e6, 1),
        "runs": runs,
    }
    if options.json:
        write(options.json, report)
    else:
        print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
