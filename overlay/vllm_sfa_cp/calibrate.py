"""`vllm-sfa-cp bench calibrate`: this machine's achieved rates, as the planner's device profile.

The layers of real single-rank engines are timed part by part, at several prompt lengths: with the model itself, and
for every n with the model that one of n tensor-parallel ranks computes (1/n of the heads and of the MLP's width).
Parts contain the element-wise work beside their matrix products, which is why the planner need not count it. No mode
is timed here, and no engine of several ranks: how many rows and heads a rank has in which mode is the planner's
arithmetic, and its prediction a prediction.

For n ranks, n processes run at once: ranks that share cores and caches slow each other down, whatever the mode. Of a
prompt of S tokens a rank computes S rows of its share of the heads, or S/n rows of all heads: those are the lengths,
and the two models take turns.
Rates are per CPU second of one thread. Ranks that share cores take n / cores times longer, in every mode.
"""

import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from .bench import ENGINE_ENV, checkpoint
from .bench_report import machine
from .cli_plan import load_model
from .device_profile import ATTENTION_SIDE, PARTS, REPEATED
from .errors import UserError
from .launch import RankError, RankPool
from .planner import ModelShape, step_flops
from .progress import Progress
from .shapes import SHAPES, load_shape

SHORT = 16  # tokens of the run that shows what a step takes whatever its length
#: Keys of a config that a tensor-parallel rank has 1/n of.
_CUT = ("num_attention_heads", "intermediate_size", "moe_intermediate_size")
_RANK = "vllm_sfa_cp.rank_calibration:"


#: CPU seconds by part, for each number of tokens, and the model that took them.
Timed = tuple[ModelShape, dict[int, dict[str, float]]]


def rank_shape(shape: ModelShape, size: int) -> ModelShape:
    """The model that one of `size` tensor-parallel ranks computes. UserError: its sizes do not divide."""
    if odd := [key for key in _CUT if getattr(shape, key) % size]:
        raise UserError(f"{', '.join(odd)} do not divide over {size} ranks", "change --ranks", 2)
    return replace(shape, **{key: getattr(shape, key) // size for key in _CUT})


def calibrate(
    model: str, dtype: str, ranks: Sequence[int], prompts: Sequence[int], repeats: int, limit_s: float = 3600
) -> dict[str, Any]:
    """Measure and return a device profile (`device_profile.DeviceProfile`). UserError: an engine failed."""
    shape = replace(load_model(model), dtype_bytes=4 if dtype == "float32" else 2)
    sizes = [n for n in sorted(set(ranks)) if n > 1]
    cuts = {size: rank_shape(shape, size) for size in sizes}
    largest = max(sizes, default=2)
    alone = min(machine()["cores"] or 1, largest)
    full = sorted({SHORT, *prompts})
    # Ranks, engines at once, models that each of them computes in turn, and their lengths.
    runs = [(1, alone, [(shape, full)])]
    for size in sizes:
        rows = sorted({SHORT, *(max(1, length // size) for length in prompts)})
        runs.append((size, size, [(shape, rows), (cuts[size], full)]))
    work = [count * sum(sum(lengths) for _, lengths in models) for _, count, models in runs]
    with (
        tempfile.TemporaryDirectory(prefix="sfa-cp-calibrate-") as logs,
        RankPool(largest, logs, limit_s) as pool,
        ExitStack() as stack,
        Progress(float(sum(work))) as progress,
    ):
        folders = {
            cut: stack.enter_context(_checkpoint(model, cut, dtype, whole=cut is shape))
            for cut in (shape, *cuts.values())
        }
        try:
            found: list[list[Timed]] = []
            for (size, count, models), share in zip(runs, work):
                progress.begin(f"{size} ranks")
                kwargs = {
                    "models": [(folders[cut], lengths) for cut, lengths in models],
                    "dtype": dtype,
                    "vocab": shape.vocab_size,
                    "repeats": repeats,
                }
                each = pool.run(count, _RANK + "parts", kwargs, ENGINE_ENV)
                means = [
                    {length: _mean([rank[i][length] for rank in each]) for length in lengths}
                    for i, (_, lengths) in enumerate(models)
                ]
                found.append([(cut, times) for (cut, _), times in zip(models, means)])
                took = (f"{times[max(times)]['total']:.2f} s for {max(times):,} tokens" for times in means)
                progress.done(share, f"{size} ranks, CPU seconds of each: {', '.join(took)}")
            links = _links(pool, sizes or [largest], max(prompts), shape, dtype)
            read = statistics.fmean(pool.run(alone, _RANK + "bandwidth"))
        except RankError as err:
            raise UserError(f"calibration failed: {str(err).strip().splitlines()[-1]}", str(err)) from err
    return profile(found[0][0], {size: tuple(pair) for size, pair in zip(sizes, found[1:])}) | {
        "name": f"{machine()['cpu']}, {dtype}",
        "memory_bandwidth": read,
        **links,
        "reduce_scatter": 2.0,  # `cpu_communicator` does it as an all-reduce
        "overlap": 0.0,  # the ranks' own cores move the bytes
    }


def _links(
    pool: RankPool, sizes: Sequence[int], prompt: int, shape: ModelShape, dtype: str
) -> dict[str, dict[str, float]]:
    """byte/s and seconds per collective, by number of ranks: a line through a small and a large message."""
    found: dict[str, dict[str, float]] = {"link_bandwidth": {}, "latency": {}}
    for size in sizes:
        amounts, taken = [], []
        for rows in (SHORT, max(2 * SHORT, prompt // size)):  # of each rank
            given = {"rows": rows, "width": shape.hidden_size, "dtype": dtype, "repeats": 15}
            times = _mean(pool.run(size, _RANK + "collectives", given))
            # An all-gather receives the other ranks' rows, an all-reduce twice as much.
            amounts.append(3 * (size - 1) * rows * shape.hidden_size * shape.dtype_bytes)
            taken.append(times["all_reduce"] + times["all_gather"])
        bandwidth = (amounts[1] - amounts[0]) / max(1e-9, taken[1] - taken[0])
        found["link_bandwidth"][str(size)] = _round(bandwidth)
        found["latency"][str(size)] = _round(max(1e-9, taken[0] - amounts[0] / bandwidth) / 2)
    return found


def profile(alone: Timed, shared: dict[int, tuple[Timed, ...]]) -> dict[str, Any]:
    """The profile's rates and overheads from what the model takes alone and, for numbers of ranks, what they take
    at once: with all heads, and with a rank's share of heads and width."""
    shape, times = alone
    longest, short = times[max(times)], times[min(times)]
    undivided = (*REPEATED, "router")  # a rank's share of the model has the whole of them
    whole, shard = {}, {}
    for size, (every, share) in shared.items():
        rows, cut = _rates(every), _rates(share)
        whole[str(size)] = {
            part: _sorted(table | (cut[part] if part in undivided else {}))
            for part, table in rows.items()
            if part in (*ATTENTION_SIDE, "router")
        }
        shard[str(size)] = {part: table for part, table in cut.items() if part not in undivided}
    timed = sum(v for k, v in short.items() if k != "total")
    return {
        "flops": {
            "default": _round(sum(step_flops(shape, max(times)).values()) / longest["total"]),
            **_rates(alone),
        },
        "shard_flops": shard,
        "whole_flops": whole,
        "step_overhead": max(0.0, short["total"] - timed),
        "layer_overhead": short.get("rest", 0.0) / shape.num_hidden_layers,
    }


def _rates(timed: Timed) -> dict[str, dict[str, float]]:
    """FLOP/s by part and number of tokens."""
    shape, times = timed
    fixed = times[min(times)].get("rest", 0.0)
    found: dict[str, dict[str, float]] = {}
    for tokens, given in sorted(times.items()):
        taken, work = _split(shape, given), step_flops(shape, tokens)
        # Work beside the parts that grows with the rows is the residual stream's, repeated like qkv_a.
        taken["qkv_a"] = taken.get("qkv_a", 0.0) + max(0.0, taken["rest"] - fixed)
        for part in PARTS:
            if part != "lm_head" and taken.get(part, 0.0) > 0 and work[part] > 0:
                found.setdefault(part, {})[str(tokens)] = _round(work[part] / taken[part])
    return found


def _sorted(table: dict[str, float]) -> dict[str, float]:
    return dict(sorted(table.items(), key=lambda item: int(item[0])))


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
def _checkpoint(model: str, shape: ModelShape, dtype: str, whole: bool) -> Iterator[str]:
    """Folder with the model's own weights, or with random ones of a rank's shape."""
    if whole:
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
