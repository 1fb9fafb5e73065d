"""`vllm-sfa-cp plan`: predict work, memory and speed-up of every mode."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from .arguments import positive, prefetch_step
from .device_profile import NOMINAL, DeviceProfile
from .errors import UserError
from .planner import (
    BUILT_IN,
    ModelShape,
    Prediction,
    all_modes,
    ideal_speedup,
    predict,
    recommend,
    split,
    token_threshold,
)

GiB = 2**30


def add_plan_parser(subparsers: Any) -> None:
    """Declare `vllm-sfa-cp plan`."""
    parser = subparsers.add_parser(
        "plan",
        help="predict work, memory and speed-up of every mode",
        description="Figures are per rank, for one prompt, on the rank that does most; planner.py has the "
        "formulas. Without a device profile, times assume 100 TFLOP/s, 100 GB/s links and 20 us latency.",
    )
    parser.add_argument(
        "--model", required=True, help=f"folder, config.json, or one of {', '.join(BUILT_IN)}"
    )
    parser.add_argument("--tp", type=positive, required=True, metavar="N", help="ranks of the TP group")
    parser.add_argument("--prompt", type=positive, required=True, metavar="S", help="tokens of the prompt")
    parser.add_argument("--chunk", type=positive, metavar="C", help="tokens per step (default: the prompt)")
    parser.add_argument("--partition", choices=["balanced", "contiguous"], default="balanced")
    parser.add_argument(
        "--prefetch-step", type=prefetch_step, default=1, metavar="K", help="layers fetched ahead"
    )
    parser.add_argument(
        "--prefill-only", action="store_true", help="the server does not decode (KV producer)"
    )
    parser.add_argument("--device-profile", type=Path, metavar="FILE", help="JSON with the device's rates")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument(
        "--plot", type=Path, metavar="OUT.png", help="also draw speed-up against prompt length"
    )


def run_plan(args: argparse.Namespace) -> int:
    """Print the plan. UserError: a model, profile or plot that cannot be read or written."""
    shape = load_model(args.model)
    if shape.num_attention_heads % args.tp:
        raise UserError(
            f"{shape.num_attention_heads} heads do not divide over {args.tp} ranks", "change --tp", 2
        )
    profile = load_profile(args.device_profile)
    report = plan(shape, args, profile)
    if args.plot:
        draw(shape, args, profile, args.plot)
        print(f"plot: {args.plot}", file=sys.stderr)
    print(json.dumps(report, indent=1) if args.json else table(report))
    return 0


def load_model(spec: str) -> ModelShape:
    """The shape behind a built-in name, a model folder or a config.json."""
    if spec in BUILT_IN:
        return ModelShape.built_in(spec)
    path = Path(spec)
    if path.is_dir():
        path /= "config.json"
    hint = f"give a folder with a config.json, or one of {', '.join(BUILT_IN)}"
    config = _read_json(path, hint)
    if not isinstance(config, dict):
        raise UserError(f"{path} is not a JSON object", hint, 2)
    return ModelShape.from_config(config, spec)


def load_profile(path: Path | None) -> DeviceProfile:
    if path is None:
        return NOMINAL
    return DeviceProfile.from_dict(_read_json(path, "give a JSON file with the device's rates"), str(path))


def _read_json(path: Path, hint: str) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as err:
        raise UserError(f"cannot read {path}: {err}", hint, 2) from err


def plan(shape: ModelShape, args: argparse.Namespace, profile: DeviceProfile) -> dict[str, Any]:
    """The whole plan as a JSON object. FLOPs, bytes and seconds are per rank and prompt."""
    modes = all_modes(args.partition, args.prefetch_step)
    predictions = [predict(shape, mode, args.tp, args.prompt, args.chunk, profile) for mode in modes]
    best = recommend(shape, predictions, args.tp, profile, decodes=not args.prefill_only)
    repeated, rest = split(shape, args.prompt)
    gather = next(mode for mode in modes if mode.weights == "gather")
    return {
        "model": shape.name,
        "tp": args.tp,
        "prompt": args.prompt,
        "chunk": min(args.chunk or args.prompt, args.prompt),
        "device": profile.name,
        "repeated_flops": repeated,
        "rest_flops": rest,
        "ideal": ideal_speedup(shape, args.tp, args.prompt),
        "runs": [_run(p, predictions[0].seconds) for p in predictions],
        "threshold_tokens": token_threshold(shape, gather, args.tp, profile) if args.tp > 1 else None,
        "recommended": {
            "mode": best.mode.name,
            "weights": best.mode.weights or None,
            "partition": best.mode.partition or None,
            "reason": best.reason,
        },
    }


def _run(p: Prediction, plain_seconds: float) -> dict[str, Any]:
    return {
        "mode": p.mode.name,
        "weights": p.mode.weights or None,
        "partition": p.mode.partition or None,
        "flops": sum(p.flops.values()),
        "flops_by_part": p.flops,
        "bytes": sum(p.bytes.values()),
        "bytes_by_kind": p.bytes,
        "resident_bytes": p.resident,
        "resident_by_group": p.memory,
        "seconds": p.seconds,
        "compute_s": p.compute_s,
        "collective_s": p.collective_s,
        "weight_wait_s": p.weight_wait_s,
        "speedup": plain_seconds / p.seconds,
    }


def _label(run: dict[str, Any]) -> str:
    return f"{run['mode']}/{run['weights']}" if run["weights"] else str(run["mode"])


def table(report: dict[str, Any]) -> str:
    """The plan for people."""
    runs = report["runs"]
    lines = [
        f"{report['model']}: prompt of {report['prompt']} tokens in steps of {report['chunk']}, "
        f"{report['tp']} ranks, {report['device']}",
        "",
        *_columns(
            [
                "per rank",
                "GFLOP",
                "MB moved",
                "GiB kept",
                "compute s",
                "collect. s",
                "wait s",
                "total s",
                "speed-up",
            ],
            [
                [
                    _label(run),
                    f"{run['flops'] / 1e9:.1f}",
                    f"{run['bytes'] / 1e6:.1f}",
                    f"{run['resident_bytes'] / GiB:.3f}",
                    *(f"{run[key]:.4g}" for key in ("compute_s", "collective_s", "weight_wait_s", "seconds")),
                    f"{run['speedup']:.2f}",
                ]
                for run in runs
            ],
        ),
        "",
        *_columns(
            ["MiB kept", *map(_label, runs)],
            [
                [group, *(f"{run['resident_by_group'][group] / 2**20:.1f}" for run in runs)]
                for group in runs[0]["resident_by_group"]
            ],
        ),
        "",
        f"per token and layer: R = {report['repeated_flops'] / 1e6:.1f} MFLOP that TP repeats on every rank, "
        f"P = {report['rest_flops'] / 1e6:.1f} MFLOP that it divides",
        f"ideal speed-up (nR + P) / (R + P) = {report['ideal']:.2f}",
    ]
    if report["threshold_tokens"]:
        lines.append(f"SFA-CP pays from {report['threshold_tokens']} new tokens per step (no cached context)")
    best = report["recommended"]
    lines.append(f"recommended: {_label(best)} ({best['reason']})")
    return "\n".join(lines)


def _columns(header: list[str], rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(header, *rows)]
    return [
        "  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths)))
        for row in [header, *rows]
    ]


def draw(shape: ModelShape, args: argparse.Namespace, profile: DeviceProfile, out: Path) -> None:
    """Speed-up over plain TP against prompt length, with the ideal line."""
    from .plots import require_matplotlib, save

    require_matplotlib()
    from matplotlib import pyplot

    top = max(args.prompt, 16)
    lengths = sorted({max(1, top >> shift) for shift in range(9)})
    modes = all_modes(args.partition, args.prefetch_step)
    series: dict[str, list[float]] = {mode.label: [] for mode in modes[1:]}
    for length in lengths:
        plain = predict(shape, modes[0], args.tp, length, args.chunk, profile).seconds
        for mode in modes[1:]:
            seconds = predict(shape, mode, args.tp, length, args.chunk, profile).seconds
            series[mode.label].append(plain / seconds)
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    axes.plot(
        lengths, [ideal_speedup(shape, args.tp, n) for n in lengths], "k--", label="ideal (nR + P) / (R + P)"
    )
    for label, values in series.items():
        axes.plot(lengths, values, marker="o", label=label)
    axes.set(
        xscale="log",
        xlabel="prompt tokens",
        ylabel="speed-up over plain TP",
        title=f"{shape.name}, {args.tp} ranks",
    )
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.legend()
    save(figure, out)
