"""The measurements behind docs/performance.md, the commands that make them, and what was promised of them."""

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "overlay"))

from vllm_sfa_cp.bench_report import Configuration, configuration_of, speedups
from vllm_sfa_cp.device_profile import DeviceProfile
from vllm_sfa_cp.errors import UserError
from vllm_sfa_cp.planner import BUILT_IN, ModelShape

MODEL = "dsv32-128k/64"
DEFAULT = Configuration("sfa-cp", "gather", "balanced")
Report = dict[str, Any]
Run = dict[str, Any]

_BENCH = f"vllm-sfa-cp bench {{}} --model {MODEL} --ranks {{}}"
#: Report -> the command that makes it, without --json.
COMMANDS = {
    "prefill": _BENCH.format("prefill", "2,4,8 --prompt 1024,2048,4096,8192,16384 --modes off,sfa-cp"),
    "balance": _BENCH.format("prefill", "4,8 --prompt 8192 --partition balanced,contiguous --kernels")
    + " --weights replicate,gather",
    "modes": _BENCH.format("prefill", "4,8 --prompt 8192 --modes off,flashcomm1,sfa-cp")
    + " --weights replicate,broadcast,gather",
    "again": _BENCH.format("prefill", "4,8 --prompt 8192"),
    "memory": _BENCH.format("prefill", "8 --prompt 4096,8192,16384 --modes sfa-cp"),
    "decode": _BENCH.format("decode", "2,4,8 --prompt 2048"),
    "kernels": "python ci/bench_kernels.py",
    "profile": f"vllm-sfa-cp bench calibrate --model {MODEL} --ranks 2,4,8",
    "hf": "python ci/bench_hf.py --hf-python build/golden/bin/python",
    "serve": _BENCH.format("serve", "2 --prompt 256,1024"),
}


@dataclass(frozen=True)
class Bar:
    """A promise, what was measured, and whether it holds (None: not measured)."""

    text: str
    measured: str = ""
    holds: bool | None = None

    def cells(self) -> list[str]:
        return [
            self.text,
            self.measured or "-",
            {True: "yes", False: "**no**", None: "not measured"}[self.holds],
        ]


class Reports:
    """The reports of `folder` that are there. UserError: a file cannot be read, or is of no named shape."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.found: dict[str, Report] = {}
        for name in COMMANDS:
            path = folder / f"{name}.json"
            if not path.exists():
                continue
            try:
                self.found[name] = json.loads(path.read_text())
            except (OSError, ValueError) as err:
                raise UserError(f"cannot read {path}: {err}", "measure it again") from err
        given = self.found.get("profile")
        self.profile = DeviceProfile.from_dict(given, "profile.json") if given else None

    @property
    def missing(self) -> list[str]:
        return [name for name in COMMANDS if name not in self.found]

    def runs(self, *names: str) -> list[Run]:
        return [run for name in names for run in self.found.get(name, {}).get("runs", [])]

    def shape(self, name: str) -> ModelShape:
        model = self.found[name]["model"]
        if model["name"] not in BUILT_IN:
            raise UserError(f"{name}.json is of {model['name']!r}", f"measure one of {', '.join(BUILT_IN)}")
        return replace(
            ModelShape.built_in(model["name"]), dtype_bytes=4 if model["dtype"] == "float32" else 2
        )

    def speedups(self, name: str) -> list[Run]:
        """Against `off` of the same cell, with today's planner."""
        report = self.found.get(name)
        if report is None:
            return []
        options = report["options"]
        return speedups(
            report["runs"],
            self.shape(name),
            self.profile,
            options["chunk"],
            options["prefetch_step"],
            report["what"],
        )


def bars(reports: Reports) -> list[Bar]:
    """Every promise about speed, balance, waiting and memory."""
    return [
        *_gain_bars(reports),
        _planner_bar(reports),
        _balance_bar(reports),
        *_transformers_bars(reports),
        _wait_bar(reports),
        *_decode_bars(reports),
        _memory_bar(reports),
    ]


def _gain_bars(reports: Reports) -> Iterator[Bar]:
    """The default configuration decides, in the report `prefill`; what it reached in others stands beside."""
    for ranks, least in ((8, 3.36), (4, 2.1)):
        cells = {
            name: row
            for name in ("prefill", "again", "balance", "modes")
            for row in reports.speedups(name)
            if (row["ranks"], row["prompt"], configuration_of(row)) == (ranks, 8192, DEFAULT)
        }
        ours = cells.pop("prefill", None)
        for key, label in (("wall", "wall"), ("cpu", "CPU of the busiest rank")):
            text = f"prefill of 8,192 tokens on {ranks} ranks: at least {least} x plain TP, {label}"
            if ours is None:
                yield Bar(text)
                continue
            beside = "".join(f"; {name}: {row[key]:.2f} x" for name, row in cells.items())
            yield Bar(text, f"{ours[key]:.2f} x{beside}", ours[key] >= least)


def _planner_bar(reports: Reports) -> Bar:
    text = "planner's speed-up within 10 % of the measured one (wall) for every number of ranks and prompt"
    rows = [r for r in reports.speedups("prefill") if configuration_of(r) == DEFAULT and "predicted" in r]
    return _worst(text, rows, lambda r: abs(r["predicted"] / r["wall"] - 1), 0.10, percent)


def _balance_bar(reports: Reports) -> Bar:
    text = "indexer's CPU seconds, busiest rank over mean: at most 1.1 with `balanced`"
    found = {kind: list(balance(reports, kind)) for kind in ("balanced", "contiguous")}
    bar = _worst(text, found["balanced"], lambda r: r["imbalance"], 1.1, "{:.3f}".format)
    if bar.holds is None or not found["contiguous"]:
        return bar
    beside = max(run["imbalance"] for run in found["contiguous"])
    return replace(bar, measured=f"{bar.measured}; `contiguous`: {beside:.3f}")


def _transformers_bars(reports: Reports) -> Iterator[Bar]:
    """Against the faster of transformers' ways to be fed, at each length."""
    best: dict[int, float] = {}
    for row in reports.found.get("hf", {}).get("speedup", []):
        if row["wall"] is not None:
            best[row["prompt"]] = min(row["wall"], best.get(row["prompt"], row["wall"]))
    first, second = best.get(4096), best.get(8192)
    text = "one rank at 4,096 tokens: at least 3 x transformers, wall"
    yield Bar(text) if first is None else Bar(text, f"{first:.2f} x", first >= 3)
    text = "at 8,192 tokens: more than at 4,096"
    if first is not None and second is not None:
        yield Bar(text, f"{second:.2f} x", second > first)
    else:
        why = [r["reason"] for r in reports.runs("hf") if r["prompt"] == 8192 and r.get("reason")]
        yield Bar(text, f"transformers: {why[0]}" if why else "")


def _wait_bar(reports: Reports) -> Bar:
    text = "waiting for shared weights: at most 2 % of the time from 4,096 tokens on"
    runs = reports.runs("prefill", "modes")
    rows = [r for r in runs if r["weights"] in ("gather", "broadcast") and r["prompt"] >= 4096]
    return _worst(text, rows, lambda r: r["weight_wait_s"] / r["wall_s"], 0.02, percent)


def _decode_bars(reports: Reports) -> Iterator[Bar]:
    rows = [r for r in reports.speedups("decode") if r["weights"] == "gather"]
    for key, label in (("wall", "wall"), ("cpu", "CPU of the busiest rank")):
        text = f"decode step: at most 1.05 x plain TP's, {label}"
        yield _worst(text, rows, lambda r: 1 / r[key], 1.05, "{:.3f} x".format)  # noqa: B023


def _memory_bar(reports: Reports) -> Bar:
    text = "memory of a step linear in its tokens T: at most T^1.1 from 4,096 tokens to the longest prompt"
    return _worst(text, list(exponents(reports)), lambda r: r["exponent"], 1.1, "T^{:.2f}".format)


def _worst(
    text: str, rows: Sequence[Run], value: Callable[[Run], float], most: float, show: Callable[[float], str]
) -> Bar:
    """The row with the largest value stands for all."""
    if not rows:
        return Bar(text)
    worst = max(rows, key=value)
    return Bar(text, f"{show(value(worst))} ({_place(worst)})", value(worst) <= most)


def balance(reports: Reports, partition: str) -> Iterator[Run]:
    """SFA-CP runs of a partition whose kernels were timed, with the indexer's seconds and `imbalance`."""
    for run in reports.runs("balance", "prefill"):
        kernel = run.get("kernels", {}).get("indexer_topk")
        if kernel and run["mode"] == "sfa-cp" and run["partition"] == partition:
            yield {**run, **kernel, "imbalance": kernel["max_over_mean"]}


def doublings(reports: Reports) -> Iterator[Run]:
    """Pairs of prompts, the second twice the first, of one configuration in one report."""
    for name in ("memory", "prefill"):
        runs = {(configuration_of(r), r["ranks"], r["prompt"]): r for r in reports.runs(name)}
        for (configuration, ranks, prompt), run in runs.items():
            other = runs.get((configuration, ranks, 2 * prompt))
            if other and run["peak_bytes"]:
                growth = other["peak_bytes"] / run["peak_bytes"]
                yield {**run, "twice_bytes": other["peak_bytes"], "growth": growth}


def exponents(reports: Reports) -> Iterator[Run]:
    """The longest prompt of every SFA-CP configuration with the `exponent` at which peak memory grows to it from
    4,096 tokens: 1 where it is linear in a step's tokens, 2 where tokens x context is kept."""
    for name in ("memory", "prefill"):
        cells: dict[Any, list[Run]] = {}
        for run in reports.runs(name):
            if run["mode"] == "sfa-cp" and run["prompt"] >= 4096 and run["peak_bytes"]:
                cells.setdefault((configuration_of(run), run["ranks"]), []).append(run)
        for runs in cells.values():
            first, last = (pick(runs, key=lambda r: r["prompt"]) for pick in (min, max))
            if last["prompt"] > first["prompt"]:
                growth = math.log(last["peak_bytes"] / first["peak_bytes"])
                yield {**last, "exponent": growth / math.log(last["prompt"] / first["prompt"])}


def _place(run: Run) -> str:
    label = configuration_of(run)
    name = "" if label == DEFAULT else f"{label.label}, "
    return f"{name}{run['ranks']} ranks, {run['prompt']:,} tokens"


def percent(value: float) -> str:
    """0.123 as 12.3 %."""
    return f"{value * 100:.1f} %"


def command(name: str, report: Report | None) -> str:
    """The command that made a report, as far as it says; else the usual one."""
    out = f" --json docs/performance/{name}.json"
    if report is None or "runs" not in report:
        return COMMANDS[name] + out
    if name == "kernels":
        return f"{COMMANDS[name]} --threads {report['machine']['threads_per_rank']}{out}"
    runs, model = report["runs"], report["model"]
    distinct = {
        key: ",".join(str(v) for v in dict.fromkeys(r[key] for r in runs) if v is not None)
        for key in ("ranks", "prompt", "mode", "weights", "partition", "chunk")
        if all(key in r for r in runs)
    }
    if name == "hf":
        repeats = max(r.get("repeats", 0) for r in runs)
        words = f"{COMMANDS[name]} --model {model['name']} --prompt {distinct['prompt']} --repeats {repeats}"
        if distinct["chunk"]:
            words += f" --hf-chunk {distinct['chunk']}"
        return words + f" --threads {report['machine']['threads_per_rank']}" + out
    flags = {"mode": "modes"}
    words = f"vllm-sfa-cp bench {report['what']} --model {model['name']}"
    words += "".join(f" --{flags.get(key, key)} {value}" for key, value in distinct.items() if value)
    options = {"dtype": model["dtype"], **report["options"]}
    usual = {"dtype": "float32", "chunk": None, "prefetch_step": 1, "repeats": 5, "batch": 8, "steps": 8}
    for key, value in usual.items():
        if options.get(key, value) != value:
            words += f" --{key.replace('_', '-')} {options[key]}"
    return words + (" --kernels" if any("kernels" in r for r in runs) else "") + out
