"""`bench serve`: concurrent requests against a real `vllm serve`, one configuration after the other."""

import argparse
import json
import random
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from .bench import Configuration
from .serving import Server


def serve(args: argparse.Namespace, model: str, asked: list[Configuration]) -> list[dict[str, Any]]:
    """Latency of `repeats` rounds of `batch` concurrent completions. cpu_s and bytes are not seen over HTTP: 0."""
    rows = []
    for ranks in args.ranks:
        for configuration in asked:
            print(f"{ranks} ranks, {configuration.label}: starting the server", file=sys.stderr, flush=True)
            extra = configuration.engine_args(args.prefetch_step).get("additional_config")
            options = ["--tensor-parallel-size", str(ranks), "--dtype", args.dtype]
            options += ["--max-model-len", str(args.context + args.steps + 16), "--no-enable-prefix-caching"]
            options += ["--additional-config", json.dumps(extra)] if extra else []
            with Server(model, options, configuration.env) as server:
                walls = [_round(server, args, seed) for seed in range(args.warmup + args.repeats)]
            walls = walls[args.warmup :]
            rows.append(
                {
                    "mode": configuration.mode,
                    "weights": configuration.weights,
                    "partition": configuration.partition,
                    "ranks": ranks,
                    "prompt": args.context,
                    "repeats": len(walls),
                    "wall_s": statistics.median(walls),
                    "wall_s_min": min(walls),
                    "wall_s_max": max(walls),
                    **dict.fromkeys(("cpu_s_max_rank", "cpu_s_mean_rank", "bytes"), 0.0),
                    **dict.fromkeys(("weight_wait_s", "peak_bytes"), 0.0),
                }
            )
    return rows


def _round(server: Server, args: argparse.Namespace, seed: int) -> float:
    """Seconds until `batch` concurrent completions are all answered."""
    generator = random.Random(seed)
    bodies = [
        {
            "model": server.name,
            "prompt": [generator.randrange(2, 256) for _ in range(args.context)],
            "max_tokens": args.steps,
            "temperature": 0,
            "ignore_eos": True,
        }
        for _ in range(args.batch)
    ]
    start = time.perf_counter()
    with ThreadPoolExecutor(args.batch) as threads:
        list(threads.map(lambda body: server.post("/v1/completions", body), bodies))
    return time.perf_counter() - start
