"""`bench serve`: a closed loop of requests against real `vllm serve` processes.

Every configuration has a server of its own. They are started one after the other and then take turns, round by
round; a server that waits for its turn is stopped (SIGSTOP), because vLLM's idle processes poll and would take
CPU time from the one that is measured.
"""

import contextlib
import json
import os
import re
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from .bench import ENGINE_ENV, Plan, prompt, unit
from .bench_report import Configuration, turns
from .errors import UserError
from .planner import ModelShape
from .progress import Progress
from .serving import HTTPStatusError, Server, ServerError, group_members

_WAIT = re.compile(r"^vllm_sfa_cp_weight_wait_seconds_total\{(.*)\} (\S+)$", re.MULTILINE)
_RANK = re.compile(r'rank="([^"]*)"')


def measure_served(
    plan: Plan,
    folder: str,
    shape: ModelShape,
    ranks: int,
    lengths: Sequence[int],
    finished: Callable[[list[dict[str, Any]]], None],
    progress: Progress,
) -> None:
    """Measure the cells of one number of ranks. In a cell of prompt length S, `batch` clients each send requests
    with S and S/4 tokens in turn, `steps` output tokens each, four requests a round."""
    with ExitStack() as stack:
        servers: dict[Configuration, Server] = {}
        for configuration in plan.configurations:
            progress.begin(f"{ranks} ranks, starting vllm serve, {configuration.label}")
            server = Server(
                folder,
                _arguments(plan, configuration, ranks, max(lengths)),
                ENGINE_ENV,
                ready_timeout=plan.limit_s,
            )
            try:
                servers[configuration] = stack.enter_context(server)
            except ServerError as err:
                raise UserError(f"{configuration.label}: the server did not start", str(err)) from err
            stack.callback(_signal, server, signal.SIGCONT)  # a stopped process would not end
            progress.say(f"{ranks} ranks, {configuration.label}: ready after {server.ready_seconds:.0f} s")
            _signal(server, signal.SIGSTOP)
        for length in lengths:
            finished(_cell(plan, shape, ranks, length, servers, progress))


def _signal(server: Server, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # it died: whoever talks to it next will say why
        os.killpg(server.pid, number)


def _arguments(plan: Plan, configuration: Configuration, ranks: int, longest: int) -> list[str]:
    width = longest + plan.steps
    extra = configuration.additional_config(prefetch_step=plan.prefetch_step)
    options: dict[str, Any] = {
        "--tensor-parallel-size": ranks,
        "--dtype": plan.dtype,
        "--max-model-len": width,
        "--max-num-seqs": max(plan.batch, 4),
        "--max-num-batched-tokens": max(plan.chunk or longest, plan.batch),
        "--block-size": 16,
        "--num-gpu-blocks-override": plan.batch * (-(-width // 16) + 1) + 4,
        "--additional-config": json.dumps(extra),
    }
    return ["--no-enable-prefix-caching", *(str(x) for pair in options.items() for x in pair)]


def _cell(
    plan: Plan,
    shape: ModelShape,
    ranks: int,
    length: int,
    servers: dict[Configuration, Server],
    progress: Progress,
) -> list[dict[str, Any]]:
    rounds: dict[Configuration, list[dict[str, Any]]] = {c: [] for c in servers}
    work = unit(plan, shape, ranks, length)
    every = list(servers)
    for repeat in range(plan.warmup + plan.repeats):
        for index in turns(len(every), repeat):
            configuration, server = every[index], servers[every[index]]
            stage = "warm-up" if repeat < plan.warmup else f"repeat {repeat - plan.warmup + 1}/{plan.repeats}"
            name = f"{ranks} ranks, {length} tokens, {configuration.label}, {stage}"
            progress.begin(name)
            _signal(server, signal.SIGCONT)
            try:
                found = _round(plan, shape, length, server, repeat)
            except (ServerError, HTTPStatusError, OSError) as err:
                raise UserError(f"{configuration.label}: {err}", server.log_tail(20)) from err
            finally:
                _signal(server, signal.SIGSTOP)
            if repeat >= plan.warmup:
                rounds[configuration].append(found)
            progress.done(work, f"{name}: {found['wall_s']:.2f} s, first token {found['first_s']:.2f} s")
    return [_summary(c, ranks, length, plan.batch, found) for c, found in rounds.items()]


def _round(plan: Plan, shape: ModelShape, length: int, server: Server, repeat: int) -> dict[str, Any]:
    sizes = [length, max(1, length // 4)] * 2

    def client(number: int) -> list[tuple[float, float]]:
        times = []
        for i in range(4):
            ids = prompt(
                shape.vocab_size, sizes[(number + i) % 4], plan.seed + 10_000 * repeat + 10 * number + i
            )
            body = {
                "model": server.name,
                "prompt": ids,
                "max_tokens": plan.steps,
                "temperature": 0,
                "ignore_eos": True,
            }
            begin = time.perf_counter()
            first = None
            for event in server.stream("/v1/completions", body, timeout=plan.limit_s):
                if first is None and event["choices"]:
                    first = time.perf_counter() - begin
            times.append((first or 0.0, time.perf_counter() - begin))
        return times

    cpu, wait = _cpu_seconds(server.pid), _weight_wait(server)
    begin = time.perf_counter()
    with ThreadPoolExecutor(plan.batch) as threads:
        times = [pair for one in threads.map(client, range(plan.batch)) for pair in one]
    wall = time.perf_counter() - begin
    spent = [seconds - cpu.get(pid, 0.0) for pid, seconds in _cpu_seconds(server.pid).items()]
    after = _weight_wait(server)
    return {
        "wall_s": wall,
        "first_s": statistics.median(first for first, _ in times),
        "request_s": statistics.median(total for _, total in times),
        "tokens_per_s": len(times) * plan.steps / wall,
        "cpu_s": max(spent),
        "weight_wait_s": max([after[rank] - wait.get(rank, 0.0) for rank in after], default=0.0),
        "peak_bytes": max(map(_peak, group_members(server.pid)), default=0),
    }


def _cpu_seconds(group: int) -> dict[int, float]:
    """CPU seconds so far of each process of the group. Processes of vLLM poll while they wait: not work done."""
    found = {}
    for pid in group_members(group):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # gone between listing and reading
        found[pid] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found


def _peak(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


def _weight_wait(server: Server) -> dict[str, float]:
    """Seconds waited for weights so far, by rank."""
    found: dict[str, float] = {}
    for labels, value in _WAIT.findall(server.get("/metrics")):
        rank = _RANK.search(labels)
        key = rank[1] if rank else ""
        found[key] = found.get(key, 0.0) + float(value)
    return found


def _summary(
    configuration: Configuration, ranks: int, length: int, batch: int, rounds: list[dict[str, Any]]
) -> dict[str, Any]:
    """One entry of `runs`. cpu_s_max_rank is of the busiest process, polling included; bytes are not seen over
    HTTP; peak_bytes is a process's largest resident size, not a step's."""
    walls = [r["wall_s"] for r in rounds]
    wall = statistics.median(walls)
    return {
        "mode": configuration.mode,
        "weights": configuration.weights or None,
        "partition": configuration.partition or None,
        "ranks": ranks,
        "prompt": length,
        "repeats": len(rounds),
        "wall_s": wall,
        "wall_s_min": min(walls),
        "wall_s_max": max(walls),
        "cpu_s_max_rank": statistics.median(r["cpu_s"] for r in rounds),
        "cpu_s_mean_rank": None,
        "bytes": None,
        "weight_wait_s": statistics.median(r["weight_wait_s"] for r in rounds),
        "peak_bytes": max(r["peak_bytes"] for r in rounds),
        "spread": (max(walls) - min(walls)) / wall,
        "batch": batch,
        **{
            key: statistics.median(r[key] for r in rounds) for key in ("first_s", "request_s", "tokens_per_s")
        },
    }
