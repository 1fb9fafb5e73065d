"""Prefill of one rank of our engine against Hugging Face transformers: same weights, cores, threads and prompts.

    python3.11 -m venv build/golden
    build/golden/bin/pip install torch==2.13.0 transformers==5.24.0 safetensors numpy
    .venv/bin/python ci/bench_hf.py --hf-python build/golden/bin/python --json docs/performance/hf.json

vLLM v0.12.0 needs transformers < 5 and DeepSeek-V3.2 in transformers needs 5.24.0, hence two environments. Both
models stay loaded, in float32, and take turns prompt by prompt; each turn is measured by the same code. Ours is
mode `off`: one rank has nothing to divide, so this compares kernels and engine, not context parallelism.
transformers runs as its user would run it: its default attention, use_cache=True, logits of the last position only.
Its attention has a matrix of heads x tokens x keys in memory, so a long prompt does not fit in one call;
`--hf-chunk N` measures it also with N tokens a call, each call seeing the cache of those before.

The report has the keys of `vllm-sfa-cp bench` where they mean the same; `chunk` is transformers' tokens per call,
null where the prompt went in whole. A length that transformers had no memory for has null figures and the `reason`.
`tokens_agree` of `tokens`: prompts whose first token is ours; with random weights, near-ties in a selection or in the
logits may differ without either being wrong.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "overlay"))

from vllm_sfa_cp.arguments import numbers, positive
from vllm_sfa_cp.bench import ENGINE_ENV, checkpoint, prompt, write
from vllm_sfa_cp.bench_report import Configuration, machine, summarise, turns
from vllm_sfa_cp.errors import UserError
from vllm_sfa_cp.launch import RANK_ENV, RankError, RankPool
from vllm_sfa_cp.progress import Progress

MEND = (
    "make it with: python3.11 -m venv build/golden && build/golden/bin/pip install torch==2.13.0 "
    "transformers==5.24.0 safetensors numpy; then give --hf-python build/golden/bin/python"
)
OURS, THEIRS = "vllm-sfa-cp", "transformers"
_RANK = "vllm_sfa_cp.rank_engines:"
Sample = dict[str, Any]


class HuggingFace:
    """hf_prefill.py in its own process. UserError: it does not start, or fails for another reason than memory."""

    def __init__(self, python: Path, folder: str, threads: int, log: Path) -> None:
        self._log = log
        command = [str(python), "-B", str(Path(__file__).with_name("hf_prefill.py"))]
        environment = {key: value for key, value in os.environ.items() if key not in RANK_ENV}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        try:
            with log.open("w") as errors:
                self._process = subprocess.Popen(command, stderr=errors, env=environment, **pipes)
        except OSError as err:
            raise UserError(f"cannot run {python}: {err}", MEND, 2) from err
        setup = {"checkpoint": folder, "threads": threads, "memory_bytes": _available_bytes()}
        self.about = self._ask(setup)
        if self.about is None:
            self.close()
            raise UserError(f"transformers did not start: {self._last_words()}", MEND)

    def prefill(self, ids: list[int], trim: bool, chunk: int | None) -> Sample:
        """A sample, or {"error": reason}, also when the system has killed the process."""
        answer = self._ask({"prompt": ids, "trim": trim, "chunk": chunk})
        if answer is not None:
            return answer
        code = self._process.wait()
        if code == -9:
            return {"error": "killed by the system, which had no memory left"}
        raise UserError(f"transformers ended with {code}: {self._last_words()}")

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()

    def _ask(self, message: dict[str, Any]) -> Sample | None:
        assert self._process.stdin
        assert self._process.stdout
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(message), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        return json.loads(answer) if answer else None

    def _last_words(self) -> str:
        return (self._log.read_text(errors="replace").strip().splitlines() or ["nothing was said"])[-1]


def _available_bytes() -> int:
    """What the machine can still give, with a tenth in reserve."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) * 1024 * 9 // 10
    raise UserError("/proc/meminfo does not say what memory is available", "run this on Linux")


@contextlib.contextmanager
def ours(folder: str, threads: int, longest: int, logs: str) -> Iterator[RankPool]:
    """A pool of one rank that computes with `threads` threads and has the engine `OURS` open."""
    with RankPool(1, logs, limit_s=3600) as pool:
        pool.run(1, _RANK + "threads", {"count": threads}, ENGINE_ENV)
        limits = {
            "dtype": "float32",
            "max_model_len": longest + 1,
            "max_num_batched_tokens": max(longest, 4),
            "max_num_seqs": 4,
            "num_gpu_blocks_override": -(-longest // 16) + 8,
        }
        pool.run(1, _RANK + "open_engine", {"label": OURS, "model": folder, **limits}, ENGINE_ENV)
        if pool.run(1, _RANK + "threads") != [threads]:
            raise UserError("the engine changed its number of threads")
        yield pool
        pool.run(1, _RANK + "close_engines")


@dataclass(frozen=True)
class Side:
    """Who prefills, and how many tokens a call (None: the prompt in one)."""

    engine: str
    chunk: int | None = None

    def __str__(self) -> str:
        return f"{self.engine}, {self.chunk:,} a call" if self.chunk else self.engine


def sides_of(length: int, chunks: Sequence[int | None]) -> list[Side]:
    """Ours first; a chunk as long as the prompt would be the whole prompt again."""
    return [Side(OURS), *(Side(THEIRS, chunk) for chunk in chunks if chunk is None or chunk < length)]


def compare(
    pool: RankPool,
    theirs: HuggingFace,
    vocab: int,
    length: int,
    repeats: int,
    chunks: Sequence[int | None],
    progress: Progress,
) -> list[dict[str, Any]]:
    """Every side's entry of `runs` for one length: a round that does not count, then `repeats` that do."""
    sides = sides_of(length, chunks)
    samples: dict[Side, list[Sample]] = {side: [] for side in sides}
    for repeat in range(repeats + 1):
        ids = prompt(vocab, length, 1000 * length + repeat)
        for side in (sides[i] for i in turns(len(sides), repeat)):
            if samples[side] and "error" in samples[side][-1]:
                continue
            progress.begin(f"{length} tokens, {side}")
            if side.engine == OURS:
                given = {"label": OURS, "prompt": ids, "trim": repeat == 0}
                sample = pool.run(1, _RANK + "prefill", given, ENGINE_ENV)[0]
            else:
                sample = theirs.prefill(ids, repeat == 0, side.chunk)
            took = sample.get("error") or f"{sample['wall_s']:.3f} s"
            progress.done(length, f"{length} tokens, {side}, {repeat or 'warm-up'}: {took}")
            samples[side].append(sample)
    return [_entry(side, length, given, samples[sides[0]]) for side, given in samples.items()]


def _entry(side: Side, length: int, given: list[Sample], ours: list[Sample]) -> dict[str, Any]:
    """An entry of `runs` from a side's samples, the first being the warm-up."""
    entry: dict[str, Any] = {"engine": side.engine, "chunk": side.chunk}
    if reason := given[-1].get("error"):
        figures = ("wall_s", "wall_s_min", "wall_s_max", "cpu_s_max_rank", "peak_bytes")
        return entry | {"prompt": length, **dict.fromkeys(figures), "reason": reason}
    counted = [[one] for one in given[1:]]
    entry |= summarise(Configuration("off"), 1, length, counted, [given[0]["peak_bytes"]])
    if side.engine == THEIRS:
        entry["tokens"] = len(given)
        entry["tokens_agree"] = sum(a["token"] == b["token"] for a, b in zip(given, ours))
    return entry


def speedups(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """transformers' seconds over ours per length and chunk, null where it has none."""
    ours = {run["prompt"]: run for run in runs if run["engine"] == OURS}
    found = []
    for other in (run for run in runs if run["engine"] == THEIRS):
        mine = ours[other["prompt"]]
        row: dict[str, Any] = {"prompt": mine["prompt"], "chunk": other["chunk"], "wall": None, "cpu": None}
        if other["wall_s"] is not None:
            row["wall"] = other["wall_s"] / mine["wall_s"]
            row["cpu"] = other["cpu_s_max_rank"] / mine["cpu_s_max_rank"]
        found.append(row)
    return found


def table(report: dict[str, Any]) -> str:
    """The report for people."""
    lines = [
        f"{'prompt':>7}  {'ours s':>8}  {'transformers s':>14}  {'a call':>6}  {'times':>6}  first token"
    ]
    runs = {(r["engine"], r["chunk"], r["prompt"]): r for r in report["runs"]}
    for row in report["speedup"]:
        mine, other = runs[OURS, None, row["prompt"]], runs[THEIRS, row["chunk"], row["prompt"]]
        start = f"{row['prompt']:>7}  {mine['wall_s']:>8.3f}"
        call = row["chunk"] or "all"
        if row["wall"] is None:
            lines.append(f"{start}  {'-':>14}  {call:>6}  {'-':>6}  {other['reason']}")
        else:
            agree = f"same for {other['tokens_agree']} of {other['tokens']} prompts"
            lines.append(f"{start}  {other['wall_s']:>14.3f}  {call:>6}  {row['wall']:>6.2f}  {agree}")
    return "\n".join(lines)


def measure_all(args: argparse.Namespace) -> dict[str, Any]:
    """The whole comparison; `--json` is brought up to date after every length."""
    here = machine()
    threads = args.threads or here["cores"]
    chunks = [None, *args.hf_chunk]
    work = sum(length * len(sides_of(length, chunks)) for length in args.prompt)
    with (
        tempfile.TemporaryDirectory(prefix="sfa-cp-hf-") as logs,
        checkpoint(args.model, "float32") as (folder, shape),
        ours(folder, threads, max(args.prompt), logs) as pool,
        contextlib.closing(HuggingFace(args.hf_python, folder, threads, Path(logs, "hf.log"))) as theirs,
        Progress(float(work * (args.repeats + 1))) as progress,
    ):
        report: dict[str, Any] = {
            "what": "hf",
            "machine": {**here, "threads_per_rank": threads},
            "model": {"name": shape.name, "dtype": "float32"},
            "transformers": theirs.about,
            "runs": [],
            "speedup": [],
        }
        for length in sorted(args.prompt):  # the one that may be too long comes last
            report["runs"] += compare(pool, theirs, shape.vocab_size, length, args.repeats, chunks, progress)
            report["speedup"] = speedups(report["runs"])
            if args.json:
                write(args.json, report)
        return report


def main(argv: list[str] | None = None) -> int:
    """Parse, measure, print. Exit code 2: something is missing, 1: a side failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hf-python", type=Path, help="interpreter that has transformers 5.24.0")
    parser.add_argument("--model", default="dsv32-128k/64", help="checkpoint (one file) or a named shape")
    parser.add_argument("--prompt", type=numbers, default=(1024, 4096, 8192), metavar="S,..")
    parser.add_argument(
        "--hf-chunk",
        type=numbers,
        default=(1024,),
        metavar="N,..",
        help="tokens a call of transformers, beside the whole prompt in one (default: 1024)",
    )
    parser.add_argument("--repeats", type=positive, default=5)
    parser.add_argument("--threads", type=positive, help="of either side (default: all cores)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    try:
        if args.hf_python is None:
            raise UserError("this needs an environment with transformers 5.24.0", MEND, 2)
        report = measure_all(args)
    except RankError as err:
        print(f"error: our engine failed: {err}", file=sys.stderr)
        return 1
    except UserError as err:
        print(f"error: {err}\nhint: {err.hint}" if err.hint else f"error: {err}", file=sys.stderr)
        return err.exit_code
    print(table(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
