"""`vllm-sfa-cp bench calibrate`: this machine's achieved rates, as the planner's device profile.

The layers of real single-rank engines are timed part by part: once with the model itself, and for every n with
the model that one of n tensor-parallel ranks computes (1/n of the heads and of the MLP's width). Parts contain
the element-wise work beside their matrix products, which is why the planner need not count it. No mode is timed
here: how many rows and heads a rank has in which mode is the planner's arithmetic, and its prediction a
prediction. As many engines run at once as the machine has cores, since that is how it will be used.

Rates are per CPU second of one thread. Ranks that share cores take n / cores times longer, in every mode.
"""

import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from .bench import ENGINE_ENV, checkpoint
from .bench_report import machine
from .cli_plan import load_model
from .errors import UserError
from .launch import RankError, RankPool
from .planner import PARTS, REPEATED, ModelShape, step_flops
from .progress import Progress
from .shapes import SHAPES, load_shape

SHORT = 16  # tokens of the run that shows what does not grow with the prompt
#: Keys of a config that a tensor-parallel rank has 1/n of.
_CUT = ("num_attention_heads", "intermediate_size", "moe_intermediate_size")
_RANK = "vllm_sfa_cp.rank_calibration:"


def rank_shape(shape: ModelShape, size: int) -> ModelShape:
    """The model that one of `size` tensor-parallel ranks computes. UserError: its sizes do not divide."""
    if odd := [key for key in _CUT if getattr(shape, key) % size]:
        raise UserError(f"{', '.join(odd)} do not divide over {size} ranks", "change --ranks", 2)
    return replace(shape, **{key: getattr(shape, key) // size for key in _CUT})


def calibrate(
    model: str,
    dtype: str,
    ranks: Sequence[int],
    prompt: int,
    repeats: int,
    processes: int | None = None,
    limit_s: float = 3600,
) -> dict[str, Any]:
    """Measure and return a device profile (`planner.DeviceProfile`). UserError: an engine failed."""
    shape = replace(load_model(model), dtype_bytes=4 if dtype == "float32" else 2)
    sizes = [1, *(n for n in sorted(set(ranks)) if n > 1)]
    shapes = {size: rank_shape(shape, size) for size in sizes}
    count = processes or machine()["cores"] or 1
    largest = max(sizes)
    with (
        tempfile.TemporaryDirectory(prefix="sfa-cp-calibrate-") as logs,
        RankPool(max(count, largest if largest > 1 else 2), logs, limit_s) as pool,
        Progress(float(len(sizes) + 1)) as progress,
    ):
        try:
            seconds: dict[int, list[dict[str, float]]] = {}
            for size, cut in shapes.items():
                progress.begin(f"one rank of {size}")
                with _checkpoint(model, cut, dtype, size) as folder:
                    kwargs = {
                        "model": folder,
                        "dtype": dtype,
                        "lengths": [SHORT, prompt],
                        "vocab": shape.vocab_size,
                        "repeats": repeats,
                    }
                    found = pool.run(count, _RANK + "parts", kwargs, ENGINE_ENV)
                seconds[size] = [_mean([one[i] for one in found]) for i in range(2)]
                progress.done(1, f"one rank of {size}: {seconds[size][1]['total']:.2f} s for {prompt} tokens")
            progress.begin("collectives")
            width = {"rows": prompt, "width": shape.hidden_size, "dtype": dtype, "repeats": 10}
            moved = _mean(pool.run(max(largest, 2), _RANK + "collectives", width))
            read = statistics.fmean(pool.run(count, _RANK + "bandwidth"))
            progress.done(1, "collectives and memory")
        except RankError as err:
            raise UserError(f"calibration failed: {str(err).strip().splitlines()[-1]}", str(err)) from err
    size = max(largest, 2)
    amount = 3 * (size - 1) / size * (prompt // size * size) * shape.hidden_size * shape.dtype_bytes
    return profile(shapes, seconds, prompt) | {
        "name": f"{machine()['cpu']}, {dtype}",
        "memory_bandwidth": read,
        "link_bandwidth": amount / max(1e-9, moved["all_reduce"] + moved["all_gather"] - 2 * moved["tiny"]),
        "latency": moved["tiny"],
    }


def profile(
    shapes: dict[int, ModelShape], seconds: dict[int, list[dict[str, float]]], prompt: int
) -> dict[str, Any]:
    """The profile's rates and overheads from CPU seconds by part, [of SHORT tokens, of `prompt` tokens] per number
    of ranks (1 among them)."""
    rates: dict[int, dict[str, float]] = {}
    for size, shape in shapes.items():
        short, long = (_split(shape, times) for times in seconds[size])
        # Work beside the parts that grows with the rows is the residual stream's, repeated like qkv_a.
        long["qkv_a"] += max(0.0, long["rest"] - short["rest"])
        work, less = step_flops(shape, prompt), step_flops(shape, SHORT)
        rates[size] = {
            part: (work[part] - less[part]) / took
            for part in PARTS
            if part != "lm_head" and (took := long.get(part, 0.0) - short.get(part, 0.0)) > 0
        }
    short, long = seconds[1]
    cut = [part for part in PARTS if part not in (*REPEATED, "router", "lm_head")]
    timed = sum(v for k, v in short.items() if k != "total")
    layers = shapes[1].num_hidden_layers
    return {
        "flops": {
            "default": sum(step_flops(shapes[1], prompt).values()) / long["total"],
            **{part: _round(rate) for part, rate in rates[1].items()},
        },
        "shard_flops": {
            str(size): {part: _round(rates[size][part]) for part in cut if part in rates[size]}
            for size in shapes
            if size > 1
        },
        "step_overhead": max(0.0, short["total"] - timed),
        "layer_overhead": short.get("rest", 0.0) / layers,
    }


def _split(shape: ModelShape, times: dict[str, float]) -> dict[str, float]:
    """Seconds by the planner's parts: W_UK and W_UV are timed together and work at the same rate."""
    found = {part: taken for part, taken in times.items() if part != "w_ukv"}
    flops = shape.linear_flops
    whole = flops["w_uk"] + flops["w_uv"]
    for part in ("w_uk", "w_uv"):
        found[part] = times.get("w_ukv", 0.0) * flops[part] / whole
    found.setdefault("rest", 0.0)
    return found


def _mean(found: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.fmean(one[key] for one in found) for key in found[0]}


def _round(rate: float) -> float:
    return float(f"{rate:.4g}")


@contextmanager
def _checkpoint(model: str, shape: ModelShape, dtype: str, size: int) -> Iterator[str]:
    """Folder with the model's own weights, or with random ones of a rank's shape."""
    if size == 1:
        with checkpoint(model, dtype) as (folder, _):
            yield folder
        return
    from .tiny_model import write_checkpoint

    sizes = load_shape(model if model in SHAPES else str(Path(model, "config.json")))
    sizes |= {key: getattr(shape, key) for key in _CUT}
    sizes["num_key_value_heads"] = shape.num_attention_heads
    with tempfile.TemporaryDirectory(prefix="sfa-cp-model-") as folder:
        write_checkpoint(Path(folder, "model"), sizes, dtype=dtype)
        yield str(Path(folder, "model"))
