"""Cost of building a step's partition metadata, against the obvious loop over requests.

    python ci/bench_metadata.py [--requests 1024] [--ranks 8]

Prints one JSON object of medians in microseconds: `loop_us` (one pass over the requests that reads each
start and length from the tensors), `vectorised_us` per kind, `blocks_us` for a step whose requests balanced
cuts into blocks, and `by_tokens_us` of the first batch for growing T. Exits 1 if a vectorised build is less
than 50 times faster than the loop, or the contiguous one not flat in T.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "overlay"))

from vllm_sfa_cp.partition import KINDS, Kind, Partition, make_partition

FLAT = 1.5  # allowed growth of the contiguous build over a 64-fold growth of T


def batch(requests: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Query starts [requests + 1] and total lengths [requests] of `tokens` over requests with context."""
    generator = torch.Generator().manual_seed(0)
    cuts = torch.randint(0, tokens + 1, (requests - 1,), generator=generator).sort().values
    starts = torch.cat([torch.tensor([0]), cuts, torch.tensor([tokens])]).int()
    context = torch.randint(0, 4096, (requests,), generator=generator)
    return starts, (starts.diff() + context).int()


def loop(starts: torch.Tensor, lens: torch.Tensor, rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The contiguous metadata of one rank, request by request."""
    requests = lens.shape[0]
    query_lens = torch.empty(requests, dtype=torch.int32)
    key_lens = torch.empty(requests, dtype=torch.int32)
    per = -(-starts[-1].item() // size)
    total = 0
    for i in range(requests):
        begin = max(starts[i].item(), rank * per)
        end = min(starts[i + 1].item(), (rank + 1) * per)
        count = max(end - begin, 0)
        total += count
        query_lens[i] = total
        key_lens[i] = lens[i].item() - (starts[i + 1].item() - end) if count else 0
    return query_lens, key_lens


def median_us(call: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e6)
    return round(statistics.median(times), 1)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=1024)
    parser.add_argument("--ranks", type=int, default=8)
    args = parser.parse_args()
    size, rank = args.ranks, args.ranks // 2
    torch.set_num_threads(1)

    def vectorised(starts: torch.Tensor, lens: torch.Tensor, kind: Kind) -> Callable[[], Partition]:
        tokens = int(starts[-1])

        def call() -> Partition:
            part = make_partition(
                starts,
                lens,
                num_tokens=tokens,
                rank=rank,
                size=size,
                kind=kind,
                query_start_loc_cpu=starts,
            )
            if not part.identity:
                _ = part.flat_to_gathered  # what a step with a permutation also needs
            return part

        return call

    starts, lens = batch(args.requests, 8192)
    want = loop(starts, lens, rank, size)
    got = vectorised(starts, lens, "contiguous")()
    assert torch.equal(want[0], got.cu_query_lens)
    assert torch.equal(want[1], got.key_lens)

    flat: dict[str, dict[int, float]] = {}
    fast = {}
    for kind in KINDS:
        median_us(vectorised(starts, lens, kind), 20)  # warm-up
        fast[kind] = median_us(vectorised(starts, lens, kind), 300)
        flat[kind] = {
            tokens: median_us(vectorised(*batch(args.requests, tokens), kind), 300)
            for tokens in (2048, 8192, 32768, 131072)
        }
    blocks = {kind: median_us(vectorised(*batch(8, 8192), kind), 300) for kind in KINDS}
    slow = median_us(lambda: loop(starts, lens, rank, size), 10)
    growth = flat["contiguous"][131072] / flat["contiguous"][2048]
    report = {
        "requests": args.requests,
        "ranks": size,
        "loop_us": slow,
        "vectorised_us": fast,
        "speedup": {kind: round(slow / us, 1) for kind, us in fast.items()},
        "blocks_us": blocks,
        "by_tokens_us": flat,
    }
    print(json.dumps(report, indent=1))
    return 0 if slow / max(fast.values()) >= 50 and growth <= FLAT else 1


if __name__ == "__main__":
    sys.exit(main())
