"""`vllm-sfa-cp bench`: measure configurations of one model side by side, in real engines, in one run.

Ranks share the machine's cores, so wall time compares total work, while the CPU seconds of the busiest rank are
what separate devices would feel. Both are reported; figures of different runs are never compared.

Every configuration is visited twice, the second time in reverse order, and its repeats are divided between the
visits: a machine that slows down or speeds up during the run touches all of them alike.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .config import ENV_FLASHCOMM1
from .errors import UserError
from .launch import RankError, RankPool

MODES = ("off", "flashcomm1", "sfa-cp")
SOURCES = ("replicate", "broadcast", "gather")
PARTITIONS = ("contiguous", "balanced")


@dataclass(frozen=True)
class Configuration:
    """One way to run; `weights` and `partition` are empty where they mean nothing."""

    mode: str
    weights: str = ""
    partition: str = ""

    @property
    def label(self) -> str:
        return "/".join(part for part in (self.mode, self.weights, self.partition) if part)

    def engine_args(self, prefetch_step: int) -> dict[str, Any]:
        """What the engine is given, beside the environment of `env`."""
        if self.mode != "sfa-cp":
            return {}
        section = {
            "weights": self.weights,
            "partition": self.partition,
            "prefetch_step": prefetch_step,
        }
        return {"additional_config": {"enable_sfa_cp": True, "sfa_cp": section}}

    @property
    def env(self) -> dict[str, str]:
        return {ENV_FLASHCOMM1: "0" if self.mode == "off" else "1"}


def add_bench_parser(subparsers: Any) -> None:
    """Declare `vllm-sfa-cp bench prefill|decode`."""
    parser = subparsers.add_parser("bench", help="measure configurations side by side")
    what = parser.add_subparsers(dest="what", required=True, metavar="prefill|decode|serve")
    for name, text in (
        ("prefill", "time to the first token of one prompt"),
        ("decode", "time per output token of a batch"),
        ("serve", "latency of concurrent requests over HTTP"),
    ):
        sub = what.add_parser(name, help=text)
        sub.add_argument("--model", required=True, help="checkpoint, or a shape such as dsv32-128k/64")
        sub.add_argument("--ranks", type=_numbers, default=[2], metavar="N,..", help="default 2")
        sub.add_argument("--modes", type=_names(MODES), default=["off", "sfa-cp"], metavar="MODE,..")
        sub.add_argument("--weights", type=_names(SOURCES), default=["gather"], metavar="SOURCE,..")
        sub.add_argument("--partition", type=_names(PARTITIONS), default=["balanced"], metavar="KIND,..")
        sub.add_argument("--prefetch-step", type=int, default=1, metavar="K")
        sub.add_argument("--repeats", type=int, default=5, help="measured runs of each case (default 5)")
        sub.add_argument("--warmup", type=int, default=1, help="runs before them, per visit (default 1)")
        sub.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
        sub.add_argument("--json", type=Path, metavar="FILE", help="write the report; - for stdout")
        sub.add_argument("--limit", type=float, default=1800, metavar="S", help="seconds one visit may take")
        if name == "prefill":
            sub.add_argument("--prompt", type=_numbers, default=[1024], metavar="S,..", help="default 1024")
            sub.add_argument("--chunk", type=int, metavar="C", help="tokens per step (default: the prompt)")
            sub.add_argument("--device-profile", type=Path, metavar="FILE", help="also plot its prediction")
            sub.add_argument("--plot", type=Path, metavar="OUT.png", help="speed-up against prompt length")
        else:
            sub.add_argument("--batch", type=int, default=8, help="requests in flight (default 8)")
            sub.add_argument("--context", type=int, default=2048, help="prompt tokens each (default 2048)")
            sub.add_argument("--steps", type=int, default=32, help="output tokens each (default 32)")


def _numbers(text: str) -> list[int]:
    values = [int(part) for part in text.split(",")]
    if not values or min(values) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a list of positive numbers")
    return values


def _names(allowed: tuple[str, ...]) -> Any:
    def parse(text: str) -> list[str]:
        names = text.split(",")
        if wrong := [name for name in names if name not in allowed]:
            raise argparse.ArgumentTypeError(f"{', '.join(wrong)}: choose from {', '.join(allowed)}")
        return names

    return parse


def configurations(modes: list[str], sources: list[str], partitions: list[str]) -> list[Configuration]:
    """The product of what was asked for, each once, plain modes first."""
    plain = [Configuration(mode) for mode in modes if mode != "sfa-cp"]
    cp = [Configuration("sfa-cp", w, p) for w in sources for p in partitions] if "sfa-cp" in modes else []
    return plain + cp


def run_bench(args: argparse.Namespace) -> int:
    """Measure, print a table, write what was asked for."""
    if args.repeats < 1 or args.warmup < 0:
        raise UserError("--repeats must be at least 1 and --warmup at least 0", "see --help", 2)
    asked = configurations(args.modes, args.weights, args.partition)
    with tempfile.TemporaryDirectory(prefix="sfa-cp-bench-") as folder:
        model, shape = _model(args.model, folder, args.dtype)
        if args.what == "serve":
            from .bench_serve import serve

            runs = serve(args, model, asked)
        else:
            runs = [run for ranks in args.ranks for run in _visit(args, model, asked, ranks, folder)]
    from .bench_ranks import machine

    report = {
        "what": args.what,
        "machine": machine(),
        "model": args.model,
        "dtype": args.dtype,
        "runs": runs,
        "speedup": speedups(runs, shape) if args.what == "prefill" else [],
    }
    print(table(report), file=sys.stderr if str(args.json) == "-" else sys.stdout)
    if args.json is not None:
        text = json.dumps(report, indent=1)
        if str(args.json) == "-":
            print(text)
        else:
            args.json.write_text(text + "\n")
    if getattr(args, "plot", None):
        from .bench_plot import draw

        draw(report, shape, args.plot, args.device_profile)
        print(f"plot: {args.plot}", file=sys.stderr)
    return 0


def _model(name: str, folder: str, dtype: str) -> tuple[str, Any]:
    """(checkpoint folder, planner shape) of a checkpoint or a named shape, which is written on the fly."""
    from .cli_plan import load_model
    from .shapes import SHAPES, load_shape

    shape = load_model(name)
    if name not in SHAPES:
        return name, shape
    from .tiny_model import write_checkpoint

    out = Path(folder, "model")
    print(f"writing {name} with random weights", file=sys.stderr, flush=True)
    write_checkpoint(out, load_shape(name), seed=0, quant="none", dtype=dtype)
    return str(out), shape


def _visit(
    args: argparse.Namespace, model: str, asked: list[Configuration], ranks: int, folder: str
) -> list[dict[str, Any]]:
    """Measure every configuration on `ranks` ranks."""
    halves = [args.repeats - args.repeats // 2, args.repeats // 2]
    plan = [(c, halves[0]) for c in asked] + [(c, halves[1]) for c in reversed(asked) if halves[1]]
    cases = args.prompt if args.what == "prefill" else [args.context]
    found: dict[tuple[Configuration, int], list[list[dict[str, Any]]]] = {}
    with RankPool(ranks, folder, args.limit) as pool:
        for i, (configuration, repeats) in enumerate(plan):
            print(
                f"[{i + 1}/{len(plan)}] {ranks} ranks, {configuration.label}: {repeats} x {cases}",
                file=sys.stderr,
                flush=True,
            )
            common = {
                "model": model,
                "repeats": repeats,
                "warmup": args.warmup,
                "dtype": args.dtype,
                "tensor_parallel_size": ranks,
                **configuration.engine_args(args.prefetch_step),
            }
            try:
                if args.what == "prefill":
                    more = {"prompts": args.prompt, "chunk": args.chunk}
                    by_rank = pool.run(
                        ranks, "vllm_sfa_cp.bench_ranks:prefill", {**common, **more}, configuration.env
                    )
                else:
                    more = {"batch": args.batch, "context": args.context, "steps": args.steps}
                    by_rank = pool.run(
                        ranks, "vllm_sfa_cp.bench_ranks:decode", {**common, **more}, configuration.env
                    )
                    by_rank = [{args.context: rows} for rows in by_rank]
            except RankError as err:
                cause = str(err).strip().splitlines()[-1]
                raise UserError(
                    f"{configuration.label} on {ranks} ranks failed: {cause}", "see the log"
                ) from err
            for case in cases:
                samples = [list(sample) for sample in zip(*(rank[case] for rank in by_rank))]
                found.setdefault((configuration, case), []).extend(samples)
    return [summarise(c, ranks, case, samples) for (c, case), samples in found.items()]


def summarise(
    configuration: Configuration, ranks: int, prompt: int, samples: list[list[dict[str, Any]]]
) -> dict[str, Any]:
    """One row of the report from samples [repeat][rank]: medians over repeats; wall and CPU of the slowest rank."""
    walls = [max(rank["wall_s"] for rank in sample) for sample in samples]

    def median(key: str, over: Any) -> float:
        return statistics.median(over(rank[key] for rank in sample) for sample in samples)

    def mean(values: Iterable[float]) -> float:
        return statistics.fmean(list(values))

    def kernel(name: str, over: Any) -> float:
        return statistics.median(over(rank["kernels"].get(name, 0.0) for rank in s) for s in samples)

    return {
        "mode": configuration.mode,
        "weights": configuration.weights,
        "partition": configuration.partition,
        "ranks": ranks,
        "prompt": prompt,
        "repeats": len(samples),
        "wall_s": statistics.median(walls),
        "wall_s_min": min(walls),
        "wall_s_max": max(walls),
        "cpu_s_max_rank": median("cpu_s", max),
        "cpu_s_mean_rank": median("cpu_s", mean),
        "bytes": median("bytes", max),
        "weight_wait_s": median("weight_wait_s", max),
        "peak_bytes": max(rank["peak_bytes"] for sample in samples for rank in sample),
        "indexer_cpu_s_max_rank": kernel("indexer_topk", max),
        "indexer_cpu_s_mean_rank": kernel("indexer_topk", mean),
    }


def speedups(runs: list[dict[str, Any]], shape: Any) -> list[dict[str, Any]]:
    """Every run against mode `off` of the same ranks and prompt: wall, cpu (slowest rank) and the ideal by FLOPs."""
    from .planner import ideal_speedup

    plain = {(r["ranks"], r["prompt"]): r for r in runs if r["mode"] == "off"}
    rows = []
    for run in runs:
        base = plain.get((run["ranks"], run["prompt"]))
        if base is None or run["mode"] == "off":
            continue
        ideal = ideal_speedup(shape, run["ranks"], run["prompt"]) if run["mode"] == "sfa-cp" else 1.0
        rows.append(
            {
                **{key: run[key] for key in ("mode", "weights", "partition", "ranks", "prompt")},
                "wall": base["wall_s"] / run["wall_s"],
                "cpu": base["cpu_s_max_rank"] / run["cpu_s_max_rank"],
                "ideal": ideal,
            }
        )
    return rows


def table(report: dict[str, Any]) -> str:
    """The report as aligned text."""
    scale, unit = (1000.0, "ms/token") if report["what"] == "decode" else (1.0, "s")
    gain = {tuple(s[k] for k in _KEYS): s for s in report["speedup"]}
    header = ("ranks", "prompt", "configuration", f"wall {unit}", "min..max", "cpu max", "cpu mean", "MiB in")
    rows = [(*header, "wait s", "peak MiB", "wall x", "cpu x", "ideal x")]
    for r in report["runs"]:
        s = gain.get(tuple(r[k] for k in _KEYS))
        label = Configuration(r["mode"], r["weights"], r["partition"]).label
        rows.append(
            (
                str(r["ranks"]),
                str(r["prompt"]),
                label,
                f"{r['wall_s'] * scale:.2f}",
                f"{r['wall_s_min'] * scale:.2f}..{r['wall_s_max'] * scale:.2f}",
                f"{r['cpu_s_max_rank'] * scale:.2f}",
                f"{r['cpu_s_mean_rank'] * scale:.2f}",
                f"{r['bytes'] / 2**20:.1f}",
                f"{r['weight_wait_s']:.3f}",
                f"{r['peak_bytes'] / 2**20:.0f}",
                *((f"{s['wall']:.2f}", f"{s['cpu']:.2f}", f"{s['ideal']:.2f}") if s else ("", "", "")),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in rows)


_KEYS = ("mode", "weights", "partition", "ranks", "prompt")
