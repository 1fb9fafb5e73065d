"""How far two answers are apart, as a report and as a table for people. No torch until there are tensors."""

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from .rank_compare import Answer


def compare(a: "Answer", b: "Answer", length: int, dtype: str, tolerance: float) -> dict[str, Any]:
    """What two answers to a prompt of `length` tokens have in common.

    parted: index of the first generated token that differs, None if none does; margin: by how much B's logit of
    its own token leads A's token there, at most twice what the logits differ by; it tells a near-tie only beside
    the rounding of two configurations known to be right. prefill: `distance` of the prompt's last position; logits:
    of all positions up to and with `parted`, since what follows answers another text; layers: of each layer.
    first_layer: the first layer past `tolerance` (relative L2), or that cannot be compared. within: tokens equal,
    logits within `tolerance`, absolute in float32 and relative L2 else.
    """
    parted = next((i for i, (x, y) in enumerate(zip(a.tokens, b.tokens)) if x != y), None)
    seen = len(b.tokens) if parted is None else parted + 1
    margin = None
    if parted is not None:
        margin = float(b.logits[parted, b.tokens[parted]] - b.logits[parted, a.tokens[parted]])
    logits = distance(a.logits[:seen], b.logits[:seen])
    layers = [distance(x, y) for x, y in zip(a.layers, b.layers, strict=True)]
    decides = "absolute" if dtype == "float32" else "relative_l2"
    return {
        "length": length,
        "tokens": seen,
        "parted": parted,
        "margin": margin,
        "prefill": distance(a.logits[0], b.logits[0]),
        "logits": logits,
        "layers": layers,
        "first_layer": next((i for i, far in enumerate(layers) if not far["relative_l2"] <= tolerance), None),
        "error": logits["error"],
        "within": parted is None and logits[decides] <= tolerance,
    }


def distance(a: "Tensor", b: "Tensor") -> dict[str, Any]:
    """Of tensors a and b, b the reference: largest absolute and largest relative difference, and |a - b| / |b|.

    error: why they cannot be compared (NaN, another shape), else None; the figures are then NaN, which is within
    no tolerance.
    """
    from .numerics import MismatchError, check_diff

    try:
        absolute, relative = check_diff(a, b) or (0.0, 0.0)
    except MismatchError as err:
        return {"absolute": math.nan, "relative": math.nan, "relative_l2": math.nan, "error": str(err)}
    x, y = a.double(), b.double()
    l2 = float((x - y).norm() / y.norm().clamp(min=1e-300)) if absolute else 0.0
    return {"absolute": absolute, "relative": relative, "relative_l2": l2, "error": None}


def table(report: dict[str, Any]) -> str:
    """The report for people."""
    rows = [["prompt", "tokens", "prefill abs", "logits abs", "rel", "rel L2", "first layer past", "result"]]
    for found in report["prompts"]:
        tokens = f"{found['tokens']} equal"
        if found["parted"] is not None:
            tokens = f"part at {found['parted']}, margin {found['margin']:.1e}"
        layer = "-" if not found["layers"] else str(found["first_layer"]).lower()
        result = found["error"] or ("within" if found["within"] else "past tolerance")
        figures = [f"{found['prefill']['absolute']:.1e}", *_figures(found["logits"])]
        rows.append([f"{found['length']} tokens", tokens, *figures, layer, result])
    lines = _aligned(rows)
    for found in report["prompts"]:
        if found["layers"]:
            lines.append(f"\n{found['length']} tokens: residual stream after each layer")
            each = [[f"{i:5d}", *_figures(far), ""] for i, far in enumerate(found["layers"])]
            if (first := found["first_layer"]) is not None:
                each[first][-1] = found["layers"][first]["error"] or "first past tolerance"
            lines += _aligned([["layer", "abs", "rel", "rel L2", ""], *each])
    verdict = "agree" if report["within"] else "part"
    unit = "absolute" if report["dtype"] == "float32" else "relative L2"
    return "\n".join(
        [*lines, f"\n{report['a']} and {report['b']} {verdict} ({report['tolerance']:g} {unit})"]
    )


def _figures(far: dict[str, Any]) -> list[str]:
    return [f"{far[key]:.1e}" for key in ("absolute", "relative", "relative_l2")]


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def strict(value: Any) -> Any:
    """JSON has neither infinity nor NaN: null."""
    if isinstance(value, dict):
        return {key: strict(item) for key, item in value.items()}
    if isinstance(value, list):
        return [strict(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
