"""From samples to the benchmark's report: statistics, speed-ups, table. No torch, no vLLM.

A sample is what `rank_engines.measure` returns on one rank; a run of n ranks gives n of them, a configuration
[repeat][rank]. A configuration is compared with mode `off` of the same cell (ranks, prompt) only: a cell is
measured in one go, its configurations taking turns.
"""

import os
import platform
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .device_profile import DeviceProfile
from .planner import Mode, ModelShape, ideal_speedup, predict

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

    def additional_config(self, **section: Any) -> dict[str, Any]:
        """vLLM's `additional_config`; `section` adds keys to "sfa_cp"."""
        if self.mode != "sfa-cp":
            return {"enable_flashcomm1": True} if self.mode == "flashcomm1" else {}
        own = {"weights": self.weights, "partition": self.partition, **section}
        return {"enable_flashcomm1": True, "enable_sfa_cp": True, "sfa_cp": own}

    def planner_mode(self, prefetch_step: int = 1) -> Mode:
        return Mode(self.mode, self.weights, self.partition, prefetch_step)


def configurations(
    modes: Iterable[str], sources: Iterable[str], partitions: Iterable[str]
) -> list[Configuration]:
    """The product of what was asked for, each once; sources and partitions apply to sfa-cp only."""
    found: dict[Configuration, None] = {}
    for mode in modes:
        if mode != "sfa-cp":
            found[Configuration(mode)] = None
            continue
        for source in sources:
            for partition in partitions:
                found[Configuration(mode, source, partition)] = None
    return list(found)


def turns(count: int, repeat: int) -> list[int]:
    """Order in which `count` configurations take their turn in a repeat: each repeat begins one further on and
    every other one runs backwards, so that neither drift nor a fixed neighbour favours anybody."""
    step = -1 if repeat % 2 else 1
    return [(repeat + step * i) % count for i in range(count)]


def summarise(
    configuration: Configuration,
    ranks: int,
    prompt: int,
    samples: list[list[dict[str, Any]]],
    peaks: Iterable[int] = (),
) -> dict[str, Any]:
    """One entry of `runs` from samples [repeat][rank].

    wall_s: median over repeats of the slowest rank's seconds, with the least and the most. cpu_s_*: medians of
    the busiest rank and of the mean. bytes, weight_wait_s: of the rank with most. peak_bytes: of any rank in
    any repeat, `peaks` (of warm-up runs) included. spread: (most - least) / median of wall_s.
    """

    def per_repeat(
        value: Callable[[dict[str, Any]], float], over: Callable[[list[float]], float]
    ) -> list[float]:
        return [over([value(rank) for rank in repeat]) for repeat in samples]

    def median(key: str, over: Callable[[list[float]], float] = max) -> float:
        return statistics.median(per_repeat(lambda rank: rank[key], over))

    walls = per_repeat(lambda rank: rank["wall_s"], max)
    wall = statistics.median(walls)
    last = samples[-1]
    run: dict[str, Any] = {
        "mode": configuration.mode,
        "weights": configuration.weights or None,
        "partition": configuration.partition or None,
        "ranks": ranks,
        "prompt": prompt,
        "repeats": len(samples),
        "wall_s": wall,
        "wall_s_min": min(walls),
        "wall_s_max": max(walls),
        "cpu_s_max_rank": median("cpu_s"),
        "cpu_s_mean_rank": median("cpu_s", statistics.fmean),
        "bytes": round(median("bytes")),
        "weight_wait_s": median("weight_wait_s"),
        "peak_bytes": max([*peaks, *(rank["peak_bytes"] for repeat in samples for rank in repeat)]),
        "spread": (max(walls) - min(walls)) / wall,
        "bytes_by_kind": {
            kind: round(max(rank["bytes_by_kind"].get(kind, 0) for rank in last))
            for kind in sorted({k for rank in last for k in rank["bytes_by_kind"]})
        },
        "samples": {"wall_s": walls, "cpu_s_max_rank": per_repeat(lambda rank: rank["cpu_s"], max)},
    }
    names = sorted({name for rank in last for name in rank["kernels"]})
    if names:
        run["kernels"] = {name: _kernel(name, samples) for name in names}
    return run


def _kernel(name: str, samples: list[list[dict[str, Any]]]) -> dict[str, float]:
    seconds = [[rank["kernels"].get(name, 0.0) for rank in repeat] for repeat in samples]
    return {
        "cpu_s_max_rank": statistics.median(map(max, seconds)),
        "cpu_s_mean_rank": statistics.median(map(statistics.fmean, seconds)),
        "max_over_mean": statistics.median(max(s) / (statistics.fmean(s) or 1.0) for s in seconds),
    }


def configuration_of(run: dict[str, Any]) -> Configuration:
    return Configuration(run["mode"], run["weights"] or "", run["partition"] or "")


def speedups(
    runs: list[dict[str, Any]],
    shape: ModelShape,
    profile: DeviceProfile | None = None,
    chunk: int | None = None,
    prefetch_step: int = 1,
    what: str = "prefill",
) -> list[dict[str, Any]]:
    """Every run against `off` of its own cell: wall, cpu (busiest rank), the ideal by FLOPs, and with a device
    profile the planner's prediction; the last two of a prefill. Decode steps of `gather` run on the TP shards:
    their ideal is 1. What a mixture of both could gain (`serve`) is not known."""
    plain = {(r["ranks"], r["prompt"]): r for r in runs if r["mode"] == "off"}
    rows = []
    for run in runs:
        base = plain.get((run["ranks"], run["prompt"]))
        if base is None or run["mode"] == "off":
            continue
        size, prompt = run["ranks"], run["prompt"]
        row = {
            **{key: run[key] for key in ("mode", "weights", "partition", "ranks", "prompt")},
            "wall": base["wall_s"] / run["wall_s"],
            "cpu": base["cpu_s_max_rank"] / run["cpu_s_max_rank"] if run["cpu_s_max_rank"] else None,
            "ideal": _ideal(shape, run, what),
        }
        if profile is not None and what == "prefill":
            mode = configuration_of(run).planner_mode(prefetch_step)
            row["predicted"] = predicted(shape, mode, size, prompt, profile, chunk)
        rows.append(row)
    return rows


def _ideal(shape: ModelShape, run: dict[str, Any], what: str) -> float | None:
    if run["mode"] != "sfa-cp":
        return 1.0
    if what == "prefill":
        return ideal_speedup(shape, run["ranks"], run["prompt"])
    return 1.0 if (what, run["weights"]) == ("decode", "gather") else None


def predicted(
    shape: ModelShape, mode: Mode, size: int, prompt: int, profile: DeviceProfile, chunk: int | None = None
) -> float:
    """The planner's speed-up of `mode` over plain TP."""
    plain, ours = (predict(shape, m, size, prompt, chunk, profile).seconds for m in (Mode("off"), mode))
    return plain / ours


def machine() -> dict[str, Any]:
    """What the figures were measured on, in words that identify no particular machine."""
    names = [
        line.partition(":")[2].strip()
        for line in (_read("/proc/cpuinfo") or "").splitlines()
        if line.startswith("model name")
    ]
    total = next((x for x in (_read("/proc/meminfo") or "").splitlines() if x.startswith("MemTotal")), "")
    return {
        "cpu": names[0] if names else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(int(total.split()[1]) / 2**20, 1) if total else None,
        "system": f"{platform.system()} {platform.release().split('-')[0]} {platform.machine()}",
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "vllm", "vllm-sfa-cp")},
        "threads_per_rank": 1,
    }


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text()
    except OSError:
        return None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


_KEYS = ("mode", "weights", "partition", "ranks", "prompt")


def table(report: dict[str, Any]) -> str:
    """The report for people."""
    what = report["what"]
    scale, unit = (1e3, "ms") if what == "decode" else (1.0, "s")
    gains = {tuple(s[k] for k in _KEYS): s for s in report["speedup"]}
    header = [
        "configuration",
        "ranks",
        "prompt",
        f"wall {unit}",
        "min .. max",
        f"cpu max {unit}",
        f"cpu mean {unit}",
        "MB in",
        f"wait {unit}",
        "peak MB",
        "wall x",
        "cpu x",
        "ideal",
    ]
    rows = []
    for run in report["runs"]:
        gain = gains.get(tuple(run[k] for k in _KEYS), {})
        rows.append(
            [
                configuration_of(run).label,
                str(run["ranks"]),
                str(run["prompt"]),
                _figure(run["wall_s"], scale),
                f"{_figure(run['wall_s_min'], scale)} .. {_figure(run['wall_s_max'], scale)}",
                _figure(run["cpu_s_max_rank"], scale),
                _figure(run["cpu_s_mean_rank"], scale),
                _figure(run["bytes"], 1e-6),
                _figure(run["weight_wait_s"], scale),
                _figure(run["peak_bytes"], 1e-6),
                *(_figure(gain.get(key), 1, 2) for key in ("wall", "cpu", "ideal")),
            ]
        )
    widths = [max(map(len, column)) for column in zip(header, *rows)]
    return "\n".join(
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths))).rstrip()
        for row in [header, *rows]
    )


def _figure(value: float | None, scale: float, digits: int = 3) -> str:
    return "-" if value is None else f"{value * scale:.{digits}f}"
