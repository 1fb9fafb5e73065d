"""Write docs/performance.md and its pictures from the reports in docs/performance/*.json.

    python ci/performance_doc.py            # needs matplotlib: requirements/plots.txt
    python ci/performance_doc.py --check    # exit code 1 if the document or a picture is not what the reports say

Every figure, also whether a bar holds, is computed here from reports; a report that is not there is named, with
the command that makes it. Each comparison stays inside one report, whose configurations took turns.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "overlay"))

from performance_reports import (
    COMMANDS,
    DEFAULT,
    MODEL,
    Reports,
    Run,
    balance,
    bars,
    command,
    doublings,
    percent,
)
from vllm_sfa_cp.bench_report import Configuration, configuration_of
from vllm_sfa_cp.errors import UserError
from vllm_sfa_cp.plots import draw_bars, draw_lines, draw_speedups

DOCS = Path(__file__).resolve().parents[1] / "docs"
OURS, THEIRS = "vllm-sfa-cp", "transformers"


@dataclass(frozen=True)
class Picture:
    """A PNG whose comment, `note`, is a digest of what it shows."""

    name: str
    alt: str
    note: str
    draw: Callable[[Path, str], None]


def _figure(value: float | None, scale: float = 1.0) -> str:
    """Three significant digits."""
    if value is None:
        return "-"
    scaled = value * scale
    return f"{scaled:.0f}" if abs(scaled) >= 100 else f"{scaled:#.3g}".rstrip(".")


def _range(run: Run, scale: float = 1.0) -> str:
    return " .. ".join(_figure(run[key], scale) for key in ("wall_s_min", "wall_s_max"))


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Markdown; the first column left, the others right aligned."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return ["| " + " | ".join(line) + " |" for line in lines] + [""]


_KEYS = ("mode", "weights", "partition", "ranks", "prompt")


def _key(run: Run) -> tuple[Any, ...]:
    return tuple(run[key] for key in _KEYS)


def _order(run: Run) -> tuple[int, int]:
    return run["ranks"], run["prompt"]


def _cell(run: Run) -> list[str]:
    return [configuration_of(run).label, str(run["ranks"]), f"{run['prompt']:,}"]


def _prefill(reports: Reports) -> list[str]:
    gains = {_key(row): row for row in reports.speedups("prefill")}
    rows = []
    for run in reports.runs("prefill"):
        gain = gains.get(_key(run), {})
        rows.append(
            [
                *_cell(run),
                _figure(run["wall_s"]),
                _range(run),
                _figure(run["cpu_s_max_rank"]),
                _figure(run["cpu_s_mean_rank"]),
                *(_times(gain.get(key)) for key in ("wall", "cpu", "ideal", "predicted")),
            ]
        )
    if not rows:
        return []
    header = [*_CELL, "wall s", "min .. max", "CPU s, busiest", "CPU s, mean"]
    return [
        "## Prefill",
        "",
        "Time to the first token of one prompt. The last four columns are speed-ups over `off` of the same cell:",
        "measured (wall, CPU of the busiest rank), ideal by FLOPs, and the planner's prediction.",
        "",
        *_table([*header, "wall x", "CPU x", "ideal", "planned"], rows),
    ]


_CELL = ["configuration", "ranks", "prompt"]


def _planner(reports: Reports) -> list[str]:
    rows = [
        [
            *_cell(r),
            _times(r["predicted"]),
            *(text for key in ("wall", "cpu") for text in _against(r["predicted"], r[key])),
        ]
        for r in reports.speedups("prefill")
        if "predicted" in r
    ]
    if not rows:
        return []
    return [
        "## The planner's prediction",
        "",
        "`vllm-sfa-cp plan --device-profile docs/performance/profile.json` against what was measured. The profile",
        "was made from single-rank engines: it has seen no mode.",
        "",
        *_table([*_CELL, "planned", "wall x", "off by", "CPU x", "off by"], rows),
    ]


def _against(planned: float, measured: float | None) -> tuple[str, str]:
    return ("-", "-") if not measured else (_times(measured), f"{(planned / measured - 1) * 100:+.1f} %")


def _modes(reports: Reports) -> list[str]:
    rows = []
    for name in ("modes", "balance"):
        gains = {_key(row): row for row in reports.speedups(name)}
        for run in reports.runs(name):
            gain = gains.get(_key(run), {})
            figures = (_figure(run["wall_s"]), _range(run), _figure(run["cpu_s_max_rank"]))
            waited = _figure(run["weight_wait_s"], 1e3) if run["weights"] not in (None, "replicate") else "-"
            gained = (_times(gain.get(key)) for key in ("wall", "cpu"))
            rows.append([*_cell(run), name, *figures, *gained, _figure(run["bytes"], 1e-6), waited])
    if not rows:
        return []
    header = [*_CELL, "report", "wall s", "min .. max", "CPU s, busiest", "wall x", "CPU x", "MB received"]
    return [
        "## Every mode, source and partition",
        "",
        "Speed-ups over `off` of the same report. Five engines are alive in every rank process here, two in the",
        "table above: they share caches, and the report `balance` also times kernels. `balanced` is the default",
        "because of the CPU seconds of the busiest rank, which devices of their own would feel: wall seconds of",
        "ranks that share cores compare total work, and both partitions do the same.",
        "",
        *_table([*header, "wait ms"], rows),
    ]


def _kernels(reports: Reports) -> list[str]:
    report = reports.found.get("kernels")
    if not report:
        return []
    peak = report["gemm_gflops"]
    rows = []
    for run in report["runs"]:
        shares = sorted(run["parts"].items(), key=lambda item: -item[1])
        rows.append(
            [
                run["kernel"] + (f", {run['heads']} heads" if "heads" in run else ""),
                run["launch"],
                _figure(run["ms"]),
                _figure(run["gflops"]),
                percent(run["gflops"] / peak),
                ", ".join(f"{name} {share:.0%}" for name, share in shares if share >= 0.03),
            ]
        )
    deals = {
        run["launch"].rpartition(" ")[2]: run["ms"]
        for run in report["runs"]
        if run["kernel"] == "indexer_topk" and run["launch"].startswith("one prompt")
    }
    dealt = []
    if {"zigzag", "round-robin"} <= deals.keys():
        ratio = deals["round-robin"] / deals["zigzag"]
        dealt = [
            "- **zigzag or round-robin**: both deal causal work out evenly. Rows that follow each other share",
            "  their keys in one product; dealt out in turn they share none, and the indexer takes",
            f"  {ratio:.1f} times as long for as much work. So `balanced` is zigzag.",
        ]
    header = ["kernel", "launch", "ms", "useful GFLOP/s", "of a square product", "CPU time goes to"]
    return [
        "## Kernels",
        "",
        f"One thread, the sizes of {MODEL}, top-k {report['topk']}; a product of square matrices (2048) reaches",
        f"{peak:.0f} GFLOP/s.",
        "",
        *_table(header, rows),
        "What bounds them:",
        "",
        "- **indexer_topk** is bound by its matrix products, whose inner dimension is one index head (64): each",
        "  product is written and read once, in tiles of 1 MiB that stay in the L2 cache. Weighting and summing the",
        "  heads (`weighted_relu_sum`) and selecting (`select_topk`) follow. Tiles are whole, 256 keys: at short",
        "  contexts some of the work is on keys that a row may not see.",
        "- **sparse_mla** is bound by products of one token's heads with the keys that it selected (`bmm`): 64 heads",
        "  keep them busy, the 8 of a tensor-parallel rank do not, and gathering the latents (`index_select`), the",
        "  same bytes for any number of heads, shows. That is a gain of SFA-CP that FLOPs do not count.",
        "- **decode** of few rows pays for the calls themselves (`rest`), the more the fewer heads there are.",
        *dealt,
        "",
    ]


def _balance_section(reports: Reports) -> list[str]:
    found = [run for kind in ("contiguous", "balanced") for run in balance(reports, kind)]
    if not found:
        return []
    rows = []
    for run in sorted(found, key=_order):
        kernels = run["kernels"]
        rows.append(
            [
                *_cell(run),
                *(_figure(run[key]) for key in ("cpu_s_max_rank", "cpu_s_mean_rank")),
                f"{run['imbalance']:.3f}",
                f"{kernels['sparse_mla']['max_over_mean']:.3f}" if "sparse_mla" in kernels else "-",
                _figure(run["wall_s"]),
            ]
        )
    header = [*_CELL, "indexer CPU s, busiest", "mean", "busiest / mean", "attention's", "wall s"]
    return [
        "## Balance of the indexer",
        "",
        "CPU seconds that ranks spend in the indexer. Where ranks share cores, wall time hides the imbalance: the",
        "core of a rank that is done works for the others.",
        "",
        *_table(header, rows),
    ]


def _traffic(reports: Reports) -> list[str]:
    rows = [
        [
            *_cell(run),
            _figure(run["bytes"], 1e-6),
            _figure(run["weight_wait_s"], 1e3),
            percent(run["weight_wait_s"] / run["wall_s"]),
        ]
        for run in reports.runs("prefill")
    ]
    if not rows:
        return []
    return [
        "## Bytes and waiting for weights",
        "",
        "Received in collectives by the rank that receives most, counted at every call; and the longest that a",
        "rank waited for shared weights.",
        "",
        *_table([*_CELL, "MB received", "wait ms", "of wall"], rows),
    ]


def _memory(reports: Reports) -> list[str]:
    pairs = sorted(doublings(reports), key=_order)
    if not pairs:
        return []
    rows = [
        [*_cell(p), *(_figure(p[key], 1e-6) for key in ("peak_bytes", "twice_bytes")), _times(p["growth"])]
        for p in pairs
    ]
    return [
        "## Peak memory",
        "",
        "The most that a rank's resident memory grew in a step, beyond weights and cache.",
        "",
        *_table([*_CELL, "MB", "MB at twice the prompt", "growth"], rows),
    ]


def _decode(reports: Reports) -> list[str]:
    gains = {_key(row): row for row in reports.speedups("decode")}
    rows = []
    for run in reports.runs("decode"):
        wall, cpu = (gains.get(_key(run), {}).get(key) for key in ("wall", "cpu"))
        rows.append(
            [
                *_cell(run),
                str(run["batch"]),
                _figure(run["wall_s"], 1e3),
                _range(run, 1e3),
                _figure(run["cpu_s_max_rank"], 1e3),
                *(f"{1 / value:.3f}" if value else "-" for value in (wall, cpu)),
            ]
        )
    if not rows:
        return []
    header = [
        *_CELL,
        "batch",
        "ms per step",
        "min .. max",
        "CPU ms, busiest",
        "wall of off's",
        "CPU of off's",
    ]
    return ["## Decode", "", "A step gives every request of the batch one token.", "", *_table(header, rows)]


def _transformers(reports: Reports) -> list[str]:
    report = reports.found.get("hf")
    if not report:
        return []
    runs = {(r["engine"], r["chunk"], r["prompt"]): r for r in report["runs"]}
    rows, failures = [], []
    for row in report["speedup"]:
        mine, other = runs[OURS, None, row["prompt"]], runs[THEIRS, row["chunk"], row["prompt"]]
        if reason := other.get("reason"):
            failures += [f"{row['prompt']:,} tokens, {row['chunk'] or 'all'} a call: {reason}.", ""]
        rows.append(
            [
                f"{row['prompt']:,}",
                *(_figure(mine["wall_s"]), _range(mine)),
                f"{row['chunk']:,}" if row["chunk"] else "all",
                *((_figure(other["wall_s"]), _range(other)) if not reason else ("no memory", "-")),
                *(_times(row[key]) for key in ("wall", "cpu")),
                *(_figure(run["peak_bytes"], 1e-6) for run in (mine, other)),
                "-" if reason else f"{other['tokens_agree']} of {other['tokens']}",
            ]
        )
    about = report["transformers"]
    header = ["prompt", "ours s", "min .. max", "tokens a call", "theirs s", "min .. max", "wall x", "CPU x"]
    return [
        "## Against Hugging Face transformers",
        "",
        "Prefill in one process each, float32, the same cores, weights and prompts, in turn: this engine at one rank",
        f"(mode `off`); transformers {about['transformers']} with its default attention ({about['attention']}),",
        "cache on, logits of the last position. Peak is memory beyond weights. Its attention holds a matrix",
        "of heads x tokens x keys; `tokens a call` says how many it got at once, each call seeing the cache so far.",
        "",
        *_table([*header, "peak MB, ours", "peak MB, transformers", "same first token"], rows),
        *failures,
    ]


def _serve(reports: Reports) -> list[str]:
    rows = [
        [
            *_cell(run),
            str(run["batch"]),
            *(_figure(run[key]) for key in ("first_s", "request_s", "tokens_per_s", "wall_s")),
            _range(run),
        ]
        for run in reports.runs("serve")
    ]
    if not rows:
        return []
    header = [*_CELL, "clients", "first token s", "request s", "tokens/s", "wall s", "min .. max"]
    return [
        "## Served over HTTP",
        "",
        "A closed loop against `vllm serve`: each client sends prompts of the given length and of a quarter of it.",
        "",
        *_table(header, rows),
    ]


def _machines(reports: Reports) -> list[str]:
    """A line per machine, with the reports made on it."""
    places: dict[str, list[str]] = {}
    for name, report in reports.found.items():
        if here := report.get("machine"):
            versions = ", ".join(f"{key} {here[key]}" for key in ("python", "torch", "vllm", "vllm-sfa-cp"))
            model, threads = report["model"], here["threads_per_rank"]
            text = (
                f"{here['cpu']}, {here['cores']} cores, {here['memory_gib']} GiB, {here['system']}, {versions}, "
                f"{threads} thread{'s' if threads > 1 else ''} per rank; {model['name']}, {model['dtype']}"
            )
            places.setdefault(text, []).append(name)
    return [f"- {', '.join(names)}: {text}" for text, names in places.items()]


def _digest(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def pictures(reports: Reports) -> list[Picture]:
    """What can be drawn from the reports that are there."""
    found = []
    rows = reports.speedups("prefill")
    if rows:
        shown = (DEFAULT, Configuration("flashcomm1"))
        report = reports.found["prefill"]
        drawn = {**report, "speedup": [r for r in rows if configuration_of(r) in shown] or rows}
        chunk = report["options"]["chunk"]

        def speed(out: Path, note: str) -> None:
            draw_speedups(drawn, reports.shape("prefill"), out, reports.profile, chunk, note=note)

        note = _digest(drawn["speedup"], reports.found.get("profile"))
        found.append(Picture("speedup", "Speed-up over plain TP against prompt length", note, speed))
    groups: dict[str, dict[str, float]] = {}
    for kind in ("contiguous", "balanced"):
        for run in sorted(balance(reports, kind), key=_order):
            group = f"{run['ranks']} ranks\n{run['prompt']:,} tokens"
            groups.setdefault(group, {}).setdefault(kind, run["imbalance"])
    if groups:

        def bars_of(out: Path, note: str) -> None:
            draw_bars(groups, out, "indexer CPU seconds, busiest rank / mean", 1.1, note)

        found.append(Picture("balance", "Imbalance of the indexer by partition", _digest(groups), bars_of))
    series: dict[str, list[tuple[float, float]]] = {}
    for run in reports.runs("hf"):
        if run["wall_s"] is not None:
            name = f"{run['engine']}, {run['chunk']:,} a call" if run["chunk"] else run["engine"]
            series.setdefault(name, []).append((run["prompt"], run["wall_s"]))
    if series:

        def lines(out: Path, note: str) -> None:
            draw_lines(series, out, "prompt tokens", "seconds to the first token", "one process", note)

        found.append(Picture("hf", "Seconds against prompt length", _digest(series), lines))
    return found


_MEANING = """\
Ranks are processes that share this machine's cores, one thread each, and talk over gloo.

- **Wall seconds** are the slowest rank's, from a common barrier until it is through. Because ranks take turns on the
  cores, they compare the *total* work of all ranks.
- **CPU seconds of the busiest rank** are what ranks with a device of their own would feel: work, copying in
  collectives included, waiting not.
- Figures are medians over rounds, `min .. max` their extremes. All configurations of a cell (ranks, prompt) are alive
  at once and take turns in every round, in changing order, with the same fresh prompt. Nothing is compared across
  cells or reports.
- **Ideal** is (nR + P) / (R + P), with R the FLOPs that plain TP repeats on every rank and P the rest
  (`overlay/vllm_sfa_cp/planner.py`)."""


def document(reports: Reports) -> str:
    """docs/performance.md."""
    drawn = {picture.name: picture for picture in pictures(reports)}

    def image(name: str) -> list[str]:
        picture = drawn.get(name)
        return [f"![{picture.alt}](performance/{name}.png)", ""] if picture else []

    lines = [
        "<!-- Generated by `python ci/performance_doc.py`; do not edit. -->",
        "",
        "# Performance",
        "",
        *(_machines(reports) or ["Nothing has been measured yet."]),
        "",
        "## Bars",
        "",
        f"Of `{DEFAULT.label}` unless another configuration is named; the worst case where there are several. The",
        "report made for a bar decides; what the same cell gave in another report stands beside it.",
        "",
        *_table(["bar", "measured", "holds"], [bar.cells() for bar in bars(reports)]),
        "## What the figures mean",
        "",
        _MEANING,
        "",
    ]
    for section, name in (
        (_prefill, "speedup"),
        (_planner, ""),
        (_modes, ""),
        (_balance_section, "balance"),
        (_kernels, ""),
        (_traffic, ""),
        (_memory, ""),
        (_decode, ""),
        (_transformers, "hf"),
        (_serve, ""),
    ):
        lines += section(reports)
        lines += image(name)
    lines += [
        "## How to repeat",
        "",
        "On a machine that does nothing else, one after the other:",
        "",
        "```",
        *(command(name, reports.found.get(name)) for name in COMMANDS),
        "python ci/performance_doc.py",
        "```",
        "",
    ]
    if reports.missing:
        lines += [f"Not measured: {', '.join(reports.missing)}.", ""]
    return "\n".join(lines)


def stale(reports: Reports, docs: Path) -> list[str]:
    """Names of files that are not what the reports say."""
    path = docs / "performance.md"
    text = path.read_text() if path.exists() else ""
    found = [] if text == document(reports) else [path.name]
    for picture in pictures(reports):
        image = reports.folder / f"{picture.name}.png"
        if not image.exists() or picture.note.encode() not in image.read_bytes():
            found.append(image.name)
    return found


def main(argv: list[str] | None = None) -> int:
    """Write, or check. Exit code 1: stale, or something cannot be read or drawn."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit code 1 if anything is stale"
    )
    parser.add_argument("--docs", type=Path, default=DOCS, help="folder of performance.md and performance/")
    args = parser.parse_args(argv)
    try:
        reports = Reports(args.docs / "performance")
        if args.check:
            for name in (names := stale(reports, args.docs)):
                print(f"error: {name} is stale\nhint: python ci/performance_doc.py", file=sys.stderr)
            return 1 if names else 0
        for picture in pictures(reports):
            picture.draw(reports.folder / f"{picture.name}.png", picture.note)
        (args.docs / "performance.md").write_text(document(reports))
    except UserError as err:
        print(f"error: {err}\nhint: {err.hint}", file=sys.stderr)
        return 1
    for bar in bars(reports):
        print(" | ".join(bar.cells()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
