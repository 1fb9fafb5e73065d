"""`vllm-sfa-cp bench`: the command line of measurements. What is measured, and how: `bench`, `calibrate`."""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from .arguments import names, natural, numbers, positive, prefetch_step
from .bench_report import MODES, PARTITIONS, SOURCES, configurations, table
from .errors import UserError

_FLOOR = "write the report; - for stdout; a file is brought up to date after every cell"


def add_bench_parser(subparsers: Any) -> None:
    """Declare `vllm-sfa-cp bench prefill|decode|serve|calibrate`."""
    parser = subparsers.add_parser("bench", help="measure configurations side by side")
    what = parser.add_subparsers(dest="what", required=True, metavar="prefill|decode|serve|calibrate")
    for name, text in (
        ("prefill", "time to the first token of one prompt"),
        ("decode", "time per output token of a batch"),
        ("serve", "a closed loop of requests over HTTP"),
    ):
        sub = what.add_parser(name, help=text)
        _common(sub)
        sub.add_argument("--ranks", type=numbers, default=(2,), metavar="N,..", help="default 2")
        lengths = {"prefill": (1024, 8192), "decode": (2048,), "serve": (256, 1024)}[name]
        default = ",".join(map(str, lengths))
        sub.add_argument(
            "--prompt", type=numbers, default=lengths, metavar="S,..", help=f"tokens, default {default}"
        )
        sub.add_argument("--modes", type=names(MODES), default=("off", "sfa-cp"), metavar="MODE,..")
        sub.add_argument("--weights", type=names(SOURCES), default=("gather",), metavar="SOURCE,..")
        sub.add_argument("--partition", type=names(PARTITIONS), default=("balanced",), metavar="KIND,..")
        sub.add_argument("--prefetch-step", type=prefetch_step, default=1, metavar="K")
        sub.add_argument("--repeats", type=positive, default=5, help="measured rounds (default 5)")
        sub.add_argument("--warmup", type=natural, default=1, help="rounds before them (default 1)")
        sub.add_argument("--chunk", type=positive, metavar="C", help="tokens per step (default: the prompt)")
        sub.add_argument("--json", nargs="?", const="-", metavar="FILE|-", help=_FLOOR)
        drawn = "speed-up against prompt length" if name == "prefill" else "seconds by configuration"
        sub.add_argument("--plot", type=Path, metavar="OUT.png", help=drawn)
        sub.add_argument("--resume", action="store_true", help="keep the cells that --json FILE already has")
        sub.add_argument("--limit", type=float, default=3600, metavar="S", help="seconds one run may take")
        sub.add_argument("--seed", type=int, default=0, help="of the prompts")
        if name != "serve":
            sub.add_argument(
                "--kernels", action="store_true", help="also CPU seconds of each kernel per rank"
            )
        if name != "prefill":
            sub.add_argument("--batch", type=positive, default=8, help="requests in flight (default 8)")
            sub.add_argument(
                "--steps", type=positive, default=8, help="tokens per request and round (default 8)"
            )
        if name == "prefill":
            sub.add_argument(
                "--device-profile", type=Path, metavar="FILE", help="add the planner's prediction"
            )
    sub = what.add_parser("calibrate", help="measure this machine's rates for `plan --device-profile`")
    _common(sub)
    sub.add_argument("--ranks", type=numbers, default=(2, 4, 8), metavar="N,..", help="default 2,4,8")
    sub.add_argument(
        "--prompt", type=numbers, default=(1024, 4096, 8192), metavar="S,..", help="default 1024,4096,8192"
    )
    sub.add_argument("--repeats", type=positive, default=3)
    sub.add_argument("--limit", type=float, default=3600, metavar="S", help="seconds one engine may take")
    sub.add_argument(
        "--json",
        nargs="?",
        const="-",
        default="-",
        metavar="FILE|-",
        help="write the profile (default stdout)",
    )


def _common(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--model", required=True, help="checkpoint, or a shape such as dsv32-128k/64")
    sub.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))


def run_bench(args: argparse.Namespace) -> int:
    """Measure, print a table to stderr, write what was asked for."""
    if args.what == "calibrate":
        return _calibrate(args)
    from .bench import Plan, run, write
    from .cli_plan import load_model, load_profile

    plan = Plan(
        what=args.what,
        model=args.model,
        ranks=args.ranks,
        prompts=args.prompt,
        configurations=tuple(configurations(args.modes, args.weights, args.partition)),
        repeats=args.repeats,
        warmup=args.warmup,
        dtype=args.dtype,
        chunk=args.chunk,
        prefetch_step=args.prefetch_step,
        kernels=getattr(args, "kernels", False),
        batch=getattr(args, "batch", 1),
        steps=getattr(args, "steps", 1),
        limit_s=args.limit,
        seed=args.seed,
    )
    shape = load_model(args.model)
    plan.check(shape)
    given = getattr(args, "device_profile", None)
    profile = load_profile(given) if given else None
    out = Path(args.json) if args.json and args.json != "-" else None
    if args.plot:
        from .plots import require_matplotlib

        require_matplotlib()  # before the measurement, not after it
    report = run(plan, lambda r: write(out, r) if out else None, profile, _earlier(args.resume, out))
    if out:
        write(out, report)
        print(f"report: {out}", file=sys.stderr)
    print(table(report), file=sys.stderr if args.json == "-" else sys.stdout)
    if args.json == "-":
        print(json.dumps(report, indent=1))
    if args.plot:
        from .plots import draw_speedups, draw_times

        if plan.what == "prefill":
            sized = replace(shape, dtype_bytes=4 if plan.dtype == "float32" else 2)
            draw_speedups(report, sized, args.plot, profile, plan.chunk, plan.prefetch_step)
        else:
            draw_times(report, args.plot)
        print(f"plot: {args.plot}", file=sys.stderr)
    return 0


def _earlier(resume: bool, path: Path | None) -> dict[str, Any] | None:
    if not resume:
        return None
    if path is None:
        raise UserError("--resume continues a file", "give --json FILE", 2)
    if not path.exists():
        return None
    try:
        report = json.loads(path.read_text())
    except (OSError, ValueError) as err:
        raise UserError(f"cannot read {path}: {err}", "give another --json file", 2) from err
    if not isinstance(report, dict) or not isinstance(report.get("runs"), list):
        raise UserError(f"{path} is not a benchmark report", "give another --json file", 2)
    return report


def _calibrate(args: argparse.Namespace) -> int:
    from .bench import write
    from .calibrate import calibrate

    profile = calibrate(args.model, args.dtype, args.ranks, args.prompt, args.repeats, args.limit)
    if args.json == "-":
        print(json.dumps(profile, indent=1))
    else:
        write(Path(args.json), profile)
        print(f"profile: {args.json}", file=sys.stderr)
    return 0
