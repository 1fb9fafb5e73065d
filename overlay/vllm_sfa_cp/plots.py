"""Plots of plans and benchmark reports. matplotlib is imported when one is drawn, and asked for if missing."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .bench_report import Configuration, configuration_of, predicted
from .device_profile import DeviceProfile
from .errors import UserError
from .planner import ModelShape, ideal_speedup


def require_matplotlib() -> None:
    """UserError: matplotlib is not installed."""
    try:
        import matplotlib
    except ModuleNotFoundError as err:
        hint = "pip install --no-deps -r requirements/plots.txt"
        raise UserError("plots need matplotlib, which is not installed", hint) from err
    matplotlib.use("Agg")


def save(figure: Any, out: Path, note: str = "") -> None:
    """Write and close a figure; `note` becomes a PNG's comment. UserError: the path cannot be written."""
    from matplotlib import pyplot

    try:
        figure.savefig(out, dpi=130, bbox_inches="tight", metadata={"Comment": note} if note else None)
    except (OSError, ValueError) as err:
        raise UserError(f"cannot write {out}: {err}", "give a writable path that ends in .png") from err
    finally:
        pyplot.close(figure)


def draw_speedups(
    report: dict[str, Any],
    shape: ModelShape,
    out: Path,
    profile: DeviceProfile | None = None,
    chunk: int | None = None,
    prefetch_step: int = 1,
    note: str = "",
) -> None:
    """Speed-up over plain TP against prompt length, a panel per number of ranks: wall time (filled), CPU seconds
    of the busiest rank (hollow), the ideal by FLOPs, and with a profile the planner's prediction (dotted).

    UserError: nothing to draw, no matplotlib, or a path that cannot be written.
    """
    require_matplotlib()
    from matplotlib import pyplot

    rows = report["speedup"]
    if not rows:
        raise UserError("there is no speed-up to plot", "measure mode off and another one", 2)
    sizes = sorted({row["ranks"] for row in rows})
    figure, panels = pyplot.subplots(
        1, len(sizes), figsize=(4.6 * len(sizes), 4.2), sharey=True, squeeze=False
    )
    for axes, size in zip(panels[0], sizes):
        here = [row for row in rows if row["ranks"] == size]
        lengths = sorted({row["prompt"] for row in here})
        grid = _grid(lengths)
        axes.plot(
            grid, [ideal_speedup(shape, size, s) for s in grid], "k--", label="ideal (nR + P) / (R + P)"
        )
        for i, configuration in enumerate(dict.fromkeys(map(configuration_of, here))):
            mine = sorted(
                (row for row in here if configuration_of(row) == configuration), key=lambda row: row["prompt"]
            )
            _series(axes, mine, configuration, f"C{i}")
            if profile is not None:
                mode = configuration.planner_mode(prefetch_step)
                line = [predicted(shape, mode, size, s, profile, chunk) for s in grid]
                axes.plot(grid, line, ":", color=f"C{i}", label=f"{configuration.label}, predicted")
        axes.axhline(1, color="grey", linewidth=0.8)
        axes.set(title=f"{size} ranks", xlabel="prompt tokens", xscale="log")
        axes.set_xticks(lengths, [_short(s) for s in lengths])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    panels[0][0].set_ylabel("speed-up over plain TP")
    panels[0][-1].legend(fontsize=7)
    figure.suptitle(f"{report['model']['name']}, {report['model']['dtype']}")
    save(figure, out, note)


def _series(axes: Any, rows: list[dict[str, Any]], configuration: Configuration, color: str) -> None:
    for key, fill, name in (("wall", color, "wall"), ("cpu", "white", "CPU of the busiest rank")):
        points = [(row["prompt"], row[key]) for row in rows if row[key] is not None]
        axes.plot(
            *zip(*points),
            marker="o",
            color=color,
            markerfacecolor=fill,
            linestyle="-" if key == "wall" else "-.",
            label=f"{configuration.label}, {name}",
        )


def _grid(lengths: list[int]) -> list[int]:
    """A dozen lengths between the shortest and the longest, evenly spaced on a logarithmic axis."""
    low, high = lengths[0], lengths[-1]
    return sorted({*lengths, *(round(low * (high / low) ** (i / 12)) for i in range(13))})


def _short(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)


def draw_times(report: dict[str, Any], out: Path) -> None:
    """Wall seconds of every configuration, grouped by ranks and prompt. UserError as `draw_speedups`."""
    groups: dict[str, dict[str, float]] = {}
    for run in report["runs"]:
        cell = f"{run['ranks']} ranks\n{run['prompt']:,} tokens"
        groups.setdefault(cell, {})[configuration_of(run).label] = run["wall_s"]
    if not groups:
        raise UserError("there is nothing to plot", "measure a configuration", 2)
    draw_bars(groups, out, "seconds per step" if report["what"] == "decode" else "seconds", digits=3)


def draw_lines(
    series: Mapping[str, Iterable[tuple[float, float]]],
    out: Path,
    xlabel: str,
    ylabel: str,
    title: str = "",
    note: str = "",
) -> None:
    """Lines over a doubly logarithmic plane, one per entry. UserError as `draw_speedups`."""
    require_matplotlib()
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5.6, 4.2))
    for label, points in series.items():
        axes.plot(*zip(*sorted(points)), marker="o", label=label)
    axes.set(xscale="log", yscale="log", xlabel=xlabel, ylabel=ylabel, title=title)
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8)
    save(figure, out, note)


def draw_bars(
    groups: Mapping[str, Mapping[str, float]],
    out: Path,
    ylabel: str,
    limit: float | None = None,
    note: str = "",
    digits: int = 2,
) -> None:
    """{group on the x axis: {bar's label: height}}, with a dashed line at `limit`. UserError as `draw_speedups`."""
    require_matplotlib()
    from matplotlib import pyplot

    labels = list(dict.fromkeys(label for bars in groups.values() for label in bars))
    width = 0.8 / len(labels)
    figure, axes = pyplot.subplots(figsize=(1.6 + 1.5 * len(groups), 4.2))
    for i, label in enumerate(labels):
        here = [(x, bars[label]) for x, bars in enumerate(groups.values()) if label in bars]
        places = [x + (i - (len(labels) - 1) / 2) * width for x, _ in here]
        bar = axes.bar(places, [height for _, height in here], width, label=label)
        axes.bar_label(bar, fmt=f"%.{digits}f", fontsize=7)
    if limit is not None:
        axes.axhline(limit, color="k", linestyle="--", linewidth=0.8, label=f"{limit}")
    axes.set_xticks(range(len(groups)), list(groups))
    axes.set_ylabel(ylabel)
    axes.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(labels) + 1)
    save(figure, out, note)
