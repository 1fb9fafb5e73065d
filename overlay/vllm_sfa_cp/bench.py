"""`vllm-sfa-cp bench`: measure configurations of one model side by side, in real engines, in one run.

A *cell* is one number of ranks and one prompt length. Its configurations are all alive at the same time, as
engines in the same rank processes, and take turns: every repeat goes round all of them, in another order, with
the same fresh prompt. Whatever else happens on the machine happens to all alike, and figures of different cells
or runs are never compared.

Ranks share the machine's cores, so wall time compares total work; the CPU seconds of the busiest rank are what
separate devices would feel. Both are reported.
"""

import json
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from .bench_report import Configuration, configuration_of, machine, speedups, summarise, turns
from .cli_plan import load_model
from .config import ENV_FLASHCOMM1
from .device_profile import DeviceProfile
from .errors import UserError
from .launch import RankError, RankPool
from .planner import ModelShape, memory, step_flops
from .progress import Progress
from .shapes import SHAPES, load_shape

#: The environment must not switch a mode on behind the configurations' back.
ENGINE_ENV = {ENV_FLASHCOMM1: "0"}
_ENGINES = "vllm_sfa_cp.rank_engines:"
_PROCESS_BYTES = 900 << 20  # a rank process with vLLM imported


@dataclass(frozen=True)
class Plan:
    """What to measure. prompts: tokens of the prompt, or of the cached context for `decode`. chunk: tokens per
    step (default: the whole prompt). batch, steps: requests in flight and tokens per repeat, `decode` only."""

    what: Literal["prefill", "decode", "serve"]
    model: str
    ranks: tuple[int, ...]
    prompts: tuple[int, ...]
    configurations: tuple[Configuration, ...]
    repeats: int = 5
    warmup: int = 1
    dtype: str = "float32"
    chunk: int | None = None
    prefetch_step: int = 1
    kernels: bool = False
    batch: int = 8
    steps: int = 8
    limit_s: float = 3600
    seed: int = 0

    def check(self, shape: ModelShape) -> None:
        """UserError: something that no engine could run."""
        for size in self.ranks:
            if shape.num_attention_heads % size:
                heads = shape.num_attention_heads
                raise UserError(f"{heads} heads do not divide over {size} ranks", "change --ranks", 2)
        if self.ranks and min(self.ranks) < 2:
            raise UserError("one rank has nothing to divide", "give --ranks of at least 2", 2)
        room = shape.max_position_embeddings
        if room and self.positions > room:
            raise UserError(
                f"{self.positions} positions are needed, and the model has {room}",
                "give a shorter --prompt",
                2,
            )

    @property
    def positions(self) -> int:
        """The longest context of any request, its new tokens included."""
        if self.what == "decode":
            return max(length + decode_tokens(self, length) for length in self.prompts)
        return max(self.prompts) + (self.steps if self.what == "serve" else 1)

    def identity(self) -> dict[str, Any]:
        """What a report must have in common with this plan to be continued."""
        keys = ["what", "dtype", "chunk", "prefetch_step", "repeats"]
        return {key: getattr(self, key) for key in keys + ["batch", "steps"] * (self.what != "prefill")}


@contextmanager
def checkpoint(spec: str, dtype: str) -> Iterator[tuple[str, ModelShape]]:
    """(folder, shape) of a checkpoint or a named proportion, whose random weights live as long as the context."""
    shape = replace(load_model(spec), dtype_bytes=4 if dtype == "float32" else 2)
    if spec not in SHAPES:
        path = Path(spec)
        if not path.is_dir():
            raise UserError(
                f"{spec} is not a checkpoint folder", f"give one, or one of {', '.join(SHAPES)}", 2
            )
        yield str(path), replace(shape, name=path.name)
        return
    from .tiny_model import write_checkpoint

    with tempfile.TemporaryDirectory(prefix="sfa-cp-model-") as folder:
        out = Path(folder, "model")
        print(f"writing {spec} with random weights", file=sys.stderr, flush=True)
        write_checkpoint(out, load_shape(spec), dtype=dtype)
        yield str(out), shape


def prompt(vocab: int, length: int, seed: int) -> list[int]:
    """Random token ids, without the first two (begin and end of text)."""
    generator = random.Random(seed)
    return [generator.randrange(2, vocab) for _ in range(length)]


def run(
    plan: Plan,
    save: Callable[[dict[str, Any]], None] = lambda report: None,
    profile: DeviceProfile | None = None,
    earlier: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Measure every cell and return the report; `save` gets it after each cell.

    earlier: a report to continue; its finished cells are kept as they are. UserError: the model or a rank
    failed, or `earlier` measured something else.
    """
    with checkpoint(plan.model, plan.dtype) as (folder, shape):
        plan.check(shape)
        report: dict[str, Any] = {
            "what": plan.what,
            "machine": machine(),
            "model": {"name": shape.name, "dtype": plan.dtype},
            "options": plan.identity(),
            "runs": [],
            "speedup": [],
        }
        _continue(report, earlier)

        def gains() -> list[dict[str, Any]]:
            return speedups(report["runs"], shape, profile, plan.chunk, plan.prefetch_step, plan.what)

        def finished(runs: list[dict[str, Any]]) -> None:
            cell = {(r["ranks"], r["prompt"]) for r in runs}
            kept = [r for r in report["runs"] if (r["ranks"], r["prompt"]) not in cell]
            report["runs"] = sorted(kept + runs, key=lambda r: (r["ranks"], r["prompt"]))
            report["speedup"] = gains()
            save(report)

        cells = [
            (ranks, length)
            for ranks in plan.ranks
            for length in plan.prompts
            if not _has(report, plan, ranks, length)
        ]
        total = sum(_work(plan, shape, ranks, length) for ranks, length in cells)
        with Progress(total) as progress:
            for ranks in plan.ranks:
                lengths = [length for n, length in cells if n == ranks]
                if lengths and plan.what == "serve":
                    from .bench_http import measure_served

                    measure_served(plan, folder, shape, ranks, lengths, finished, progress)
                elif lengths:
                    _measure(plan, folder, shape, ranks, lengths, finished, progress)
        report["speedup"] = gains()
        return report


def _continue(report: dict[str, Any], earlier: dict[str, Any] | None) -> None:
    if earlier is None:
        return
    for key in ("what", "machine", "model", "options"):
        if earlier.get(key) != report[key]:
            raise UserError(
                f"the report to resume has another {key!r}: {earlier.get(key)}, now {report[key]}",
                "give the same options on the same machine, or another --json file",
                2,
            )
    report["runs"] = list(earlier["runs"])


def _has(report: dict[str, Any], plan: Plan, ranks: int, length: int) -> bool:
    there = {configuration_of(r) for r in report["runs"] if (r["ranks"], r["prompt"]) == (ranks, length)}
    return there >= set(plan.configurations)


def _work(plan: Plan, shape: ModelShape, ranks: int, length: int) -> float:
    """Rough FLOPs of a cell, over all its runs: what the remaining time is guessed from."""
    return len(plan.configurations) * (plan.warmup + plan.repeats) * unit(plan, shape, ranks, length)


def unit(plan: Plan, shape: ModelShape, ranks: int, length: int) -> float:
    """Rough FLOPs of one run."""
    if plan.what == "decode":
        return plan.steps * plan.batch * sum(step_flops(shape, 1, length).values())
    return sum(step_flops(shape, length).values()) * (1 + ranks / 4)


def _measure(
    plan: Plan,
    folder: str,
    shape: ModelShape,
    ranks: int,
    lengths: Sequence[int],
    finished: Callable[[list[dict[str, Any]]], None],
    progress: Progress,
) -> None:
    _warn_if_large(plan, shape, ranks, max(lengths), progress)
    with (
        tempfile.TemporaryDirectory(prefix="sfa-cp-bench-") as logs,
        RankPool(ranks, logs, plan.limit_s) as pool,
    ):

        def call(name: str, **kwargs: Any) -> list[Any]:
            return pool.run(ranks, _ENGINES + name, kwargs, ENGINE_ENV)

        try:
            progress.say(f"{ranks} ranks: importing vLLM, then {len(plan.configurations)} engines")
            for configuration in plan.configurations:
                progress.begin(f"{ranks} ranks, starting {configuration.label}")
                seconds = max(
                    call(
                        "open_engine",
                        label=configuration.label,
                        model=folder,
                        tensor_parallel_size=ranks,
                        **engine_limits(plan, configuration, max(lengths)),
                    )
                )
                progress.say(f"{ranks} ranks, {configuration.label}: engine in {seconds:.1f} s")
            for length in lengths:
                cell = _prefill_cell if plan.what == "prefill" else _decode_cell
                finished(cell(plan, shape, ranks, length, call, progress))
            call("close_engines")
        except RankError as err:
            log = Path(logs, "rank0.log")
            tail = log.read_text(errors="replace")[-1500:] if log.exists() else ""
            raise UserError(
                f"{ranks} ranks: {str(err).strip().splitlines()[-1]}",
                f"the first rank's log ends with:\n{tail}\n{err}",
            ) from err


def engine_limits(plan: Plan, configuration: Configuration, longest: int) -> dict[str, Any]:
    """Arguments of the engine: room for the longest prompt and no more, one step per prompt unless chunked."""
    decode = plan.what == "decode"
    requests = plan.batch if decode else 1
    width = plan.positions if decode else longest + 1
    section: dict[str, Any] = {"prefetch_step": plan.prefetch_step}
    if not decode:
        section["cp_min_tokens"] = 0  # what is measured is the mode that was asked for, at every length
    return {
        "dtype": plan.dtype,
        "additional_config": configuration.additional_config(**section),
        "max_model_len": width,
        "max_num_seqs": max(requests, 4),
        "max_num_batched_tokens": max(plan.chunk or longest, requests, 4),
        "num_gpu_blocks_override": requests * (-(-width // 16) + 1) + 4,
    }


def decode_tokens(plan: Plan, length: int) -> int:
    """Tokens of each request of a batch, so that all are in flight in every measured step: the first request is
    given one in each step that prefills the last ones, and so takes up to `batch` of a step's tokens."""
    budget = max(plan.chunk or length, plan.batch, 4)
    begin = -(-plan.batch * length // max(1, budget - plan.batch)) + 1
    return begin + (plan.warmup + plan.repeats) * plan.steps + 1


def _prefill_cell(
    plan: Plan,
    shape: ModelShape,
    ranks: int,
    length: int,
    call: Callable[..., list[Any]],
    progress: Progress,
) -> list[dict[str, Any]]:
    def one(configuration: Configuration, repeat: int) -> list[dict[str, Any]]:
        return call(
            "prefill",
            label=configuration.label,
            prompt=prompt(shape.vocab_size, length, plan.seed + 1000 * length + repeat),
            kernels=plan.kernels,
            trim=repeat == 0,
        )

    return _rounds(plan, shape, ranks, length, one, progress)


def _decode_cell(
    plan: Plan,
    shape: ModelShape,
    ranks: int,
    length: int,
    call: Callable[..., list[Any]],
    progress: Progress,
) -> list[dict[str, Any]]:
    prompts = [prompt(shape.vocab_size, length, plan.seed + 1000 * length + i) for i in range(plan.batch)]
    tokens = decode_tokens(plan, length)
    for configuration in plan.configurations:
        progress.begin(f"{ranks} ranks, {configuration.label}: prefill of {plan.batch} x {length}")
        call("decode_start", label=configuration.label, prompts=prompts, max_tokens=tokens)

    def one(configuration: Configuration, repeat: int) -> list[dict[str, Any]]:
        label = configuration.label
        return call("decode_steps", label=label, steps=plan.steps, kernels=plan.kernels, trim=repeat == 0)

    runs = _rounds(plan, shape, ranks, length, one, progress)
    for configuration in plan.configurations:
        call("decode_stop", label=configuration.label, requests=plan.batch)
    return [{**r, "batch": plan.batch} for r in runs]


def _rounds(
    plan: Plan,
    shape: ModelShape,
    ranks: int,
    length: int,
    one: Callable[[Configuration, int], list[dict[str, Any]]],
    progress: Progress,
) -> list[dict[str, Any]]:
    """Let the configurations take turns; the first `warmup` rounds count for peak memory only."""
    samples: dict[Configuration, list[list[dict[str, Any]]]] = {c: [] for c in plan.configurations}
    peaks: dict[Configuration, list[int]] = {c: [] for c in plan.configurations}
    work = unit(plan, shape, ranks, length)
    for repeat in range(plan.warmup + plan.repeats):
        for index in turns(len(plan.configurations), repeat):
            configuration = plan.configurations[index]
            name = f"{ranks} ranks, {length} tokens, {configuration.label}"
            stage = "warm-up" if repeat < plan.warmup else f"repeat {repeat - plan.warmup + 1}/{plan.repeats}"
            progress.begin(f"{name}, {stage}")
            found = one(configuration, repeat)
            peaks[configuration] += [rank["peak_bytes"] for rank in found]
            if repeat >= plan.warmup:
                samples[configuration].append(found)
            wall, cpu = (max(rank[key] for rank in found) for key in ("wall_s", "cpu_s"))
            progress.done(work, f"{name}, {stage}: {wall:.3f} s, busiest rank {cpu:.3f} CPU s")
    return [summarise(c, ranks, length, samples[c], peaks[c]) for c in plan.configurations]


def _warn_if_large(plan: Plan, shape: ModelShape, ranks: int, longest: int, progress: Progress) -> None:
    """All engines of a cell are alive at once; say so before the machine's memory is full."""
    cached = longest * (plan.batch if plan.what == "decode" else 1)
    kept = sum(
        sum(memory(shape, c.planner_mode(plan.prefetch_step), ranks, cached).values())
        for c in plan.configurations
    )
    # The largest activation: the indexer's queries of all rows, a few copies of it, in one engine at a time.
    rows = min(plan.chunk or longest, longest)
    active = 6 * rows * max(shape.index_n_heads * shape.index_head_dim, shape.hidden_size) * shape.dtype_bytes
    need = ranks * (kept + active + _PROCESS_BYTES)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if need > 0.9 * total:
        progress.say(
            f"warning: {ranks} ranks x {len(plan.configurations)} engines need about {need / 2**30:.1f} GiB and "
            f"the machine has {total / 2**30:.1f} GiB; fewer --weights or --partition per run would be safer"
        )


def write(path: Path, report: dict[str, Any]) -> None:
    """Replace the file in one step: an interrupted run leaves the last finished cells."""
    temporary = path.with_name(path.name + ".part")
    try:
        temporary.write_text(json.dumps(report, indent=1) + "\n")
        temporary.replace(path)
    except OSError as err:
        raise UserError(f"cannot write {path}: {err}", "give --json a writable path") from err
