"""Speed-up against prompt length: what was measured, the ideal by FLOPs, and a profile's prediction."""

from pathlib import Path
from typing import Any

from .errors import UserError
from .planner import Mode, ModelShape, ideal_speedup, predict


def draw(report: dict[str, Any], shape: ModelShape, out: Path, profile: Path | None = None) -> None:
    """Write a PNG. UserError: matplotlib is missing."""
    try:
        import matplotlib
    except ImportError as err:
        raise UserError(
            "plots need matplotlib", "install it into this environment: python -m pip install matplotlib"
        ) from err
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = [row for row in report["speedup"] if row["mode"] == "sfa-cp"]
    sizes = sorted({row["ranks"] for row in rows})
    figure, axes = plt.subplots(1, max(1, len(sizes)), figsize=(4.2 * max(1, len(sizes)), 3.6), sharey=True)
    for axis, size in zip([axes] if len(sizes) < 2 else axes, sizes):
        lengths = sorted({row["prompt"] for row in rows if row["ranks"] == size})
        axis.plot(lengths, [ideal_speedup(shape, size, s) for s in lengths], "k--", label="ideal (FLOPs)")
        if profile is not None:
            predicted = [_predicted(shape, size, s, profile) for s in lengths]
            axis.plot(lengths, predicted, "k:", label="planner, calibrated")
        for label in sorted({_label(row) for row in rows if row["ranks"] == size}):
            mine = sorted(
                (row for row in rows if row["ranks"] == size and _label(row) == label),
                key=lambda r: r["prompt"],
            )
            axis.plot([r["prompt"] for r in mine], [r["cpu"] for r in mine], "o-", label=f"{label}, CPU")
            axis.plot([r["prompt"] for r in mine], [r["wall"] for r in mine], "x-", label=f"{label}, wall")
        axis.set(title=f"{size} ranks", xlabel="prompt tokens", xscale="log")
        axis.set_xticks(lengths, [f"{s // 1024}k" if s >= 1024 else str(s) for s in lengths])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    first = figure.axes[0]
    first.set_ylabel("speed-up over plain TP")
    first.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(out, dpi=120)
    plt.close(figure)


def _label(row: dict[str, Any]) -> str:
    return f"{row['weights']}/{row['partition']}"


def _predicted(shape: ModelShape, size: int, prompt: int, profile: Path) -> float:
    from .cli_plan import load_profile

    rates = load_profile(profile)
    plain, ours = (
        predict(shape, mode, size, prompt, profile=rates).seconds
        for mode in (Mode("off"), Mode("sfa-cp", "gather", "balanced"))
    )
    return plain / ours
