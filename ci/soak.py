#!/usr/bin/env python3
"""Random requests on shared weights, with random idle steps and a watchdog: `python ci/soak.py`.

Two replicas of two ranks each get loads of their own, so that one idles while the other works, and fetches of
weights run beside the collectives of layers and of experts. Every answer to a prompt must be the one that it got
before. A step that hangs ends the run; the stacks of the rank's threads are then in its log.
"""

import argparse
import os
import random
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "overlay")]

from ranks import RankPool  # noqa: E402
from vllm_sfa_cp.serving import SFA_CP_ENV  # noqa: E402
from vllm_sfa_cp.shapes import SHAPES  # noqa: E402
from vllm_sfa_cp.tiny_model import write_checkpoint  # noqa: E402

PROMPTS = 12


def check(reports: list[dict]) -> str:
    """One line of figures; AssertionError names the prompt whose answers differ."""
    answers: dict[tuple[int, int], list[list[int]]] = {}
    for report in reports:
        for key, found in report["answers"].items():
            known = answers.setdefault(key, found)
            assert found == known[:1], f"prompt {key} was answered {known} and {found}"
    for prompt, length in answers:  # a shorter answer is the beginning of a longer one
        longest = max(n for p, n in answers if p == prompt)
        assert answers[prompt, longest][0][:length] == answers[prompt, length][0], f"prompt {prompt}"
    first = reports[0]
    return (
        f"{first['requests']} requests in {first['rounds']} rounds, {sum(len(v) for v in answers.values())} "
        f"different answers, {first['idle']} idle steps, {first['fetches']} fetches per rank"
    )


def soak(pool: RankPool, model: Path, requests: int, seed: int, source: str, limit_s: float) -> str:
    """Run it in four ranks of `pool`; see `check`."""
    draw = random.Random(seed)
    vocab = SHAPES["base"]["vocab_size"]
    lengths = [1, 2, 3, 5, 9, 30, 64, 150, 151, 400]
    prompts = [[draw.randrange(2, vocab) for _ in range(draw.choice(lengths))] for _ in range(PROMPTS)]
    section = {"weights": source, "shared": ["q_b_proj", "kv_b_proj", "o_proj"]}
    kwargs = {
        "model": str(model),
        "pool": prompts,
        "requests": requests,
        "seed": seed,
        "limit_s": limit_s,
        "replicas": 2,
        "tensor_parallel_size": 2,
        "additional_config": {"enable_sfa_cp": True, "sfa_cp": section},
    }
    return check(pool.run(4, "weight_ranks:soak", kwargs, SFA_CP_ENV))


def main() -> None:
    """Parse, soak, report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--source", choices=["broadcast", "gather"], default="gather")
    parser.add_argument("--limit", type=float, default=120, help="seconds that one round may take")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        write_checkpoint(Path(folder, "model"), SHAPES["base"])
        begin = time.monotonic()
        with RankPool(4, folder, limit_s=3600) as pool:
            print(soak(pool, Path(folder, "model"), args.requests, args.seed, args.source, args.limit))
        print(f"{time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
