"""`vllm-sfa-cp demo`: a tiny model, a real `vllm serve` with SFA-CP on, one chat and one completion."""

import argparse
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import UserError
from .serving import SFA_CP_ARGS, SFA_CP_ENV, HTTPStatusError, Server, ServerError
from .shapes import SHAPES
from .tiny_model import write_checkpoint


def add_demo_parser(subparsers: Any) -> None:
    """Declare `vllm-sfa-cp demo`."""
    parser = subparsers.add_parser("demo", help="serve a tiny model with SFA-CP and send two requests")
    parser.add_argument("--ranks", type=int, default=2, help="tensor-parallel size (default: 2)")
    parser.add_argument("--port", type=int, default=0, help="port of the server (default: a free one)")
    parser.add_argument("--timeout", type=float, default=600, help="seconds the server may take to start")
    parser.add_argument("--keep", action="store_true", help="keep the model and the server's log")


@dataclass(frozen=True)
class Answer:
    """What one request gave: text, token counts, seconds to the first token and to the end."""

    request: str
    prompt_tokens: int
    tokens: int
    first_s: float | None
    total_s: float
    text: str


def run_demo(args: argparse.Namespace) -> int:
    """Run the demonstration; answers and timings go to stdout, progress to stderr."""
    heads = SHAPES["base"]["num_attention_heads"]
    if args.ranks < 1 or heads % args.ranks:
        raise UserError(
            f"--ranks {args.ranks} does not divide the {heads} heads of the tiny model", "use 1, 2, 4 or 8", 2
        )
    folder = Path(tempfile.mkdtemp(prefix="sfa-cp-demo-"))
    model = folder / "model"
    keep = args.keep
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server is stopped on the way out
    try:
        _say(f"writing a tiny DeepSeek-V3.2 model to {model}")
        write_checkpoint(model, SHAPES["base"])
        server = Server(
            model,
            [
                "--tensor-parallel-size",
                str(args.ranks),
                "--max-model-len",
                "2048",
                "--dtype",
                "float32",  # left to itself vLLM takes bfloat16, whose answers depend on the number of ranks
                *(SFA_CP_ARGS if args.ranks > 1 else ()),
            ],
            SFA_CP_ENV if args.ranks > 1 else {},
            port=args.port,
            log=folder / "server.log",
            ready_timeout=args.timeout,
            progress=_Progress(),
        )
        mode = "SFA-CP" if args.ranks > 1 else "one rank, plain"
        _say(f"starting vllm serve: {args.ranks} rank(s), {mode}, {server.base_url}")
        with server:
            _say(f"ready after {server.ready_seconds:.0f} s")
            answers = [_chat(server), _completion(server)]
        print(_table(answers))
        _say("server stopped, no process left")
        return 0
    except (ServerError, HTTPStatusError, OSError) as err:
        keep = True
        raise UserError(str(err), f"the whole log is {folder / 'server.log'}") from err
    finally:
        if keep:
            _say(f"kept {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _chat(server: Server) -> Answer:
    body = {
        "model": server.name,
        "messages": [{"role": "user", "content": "Who owns which token?"}],
        "max_tokens": 24,
        "temperature": 0,
        "stream_options": {"include_usage": True},
    }
    begin = time.monotonic()
    events = server.stream("/v1/chat/completions", body)
    first, text, usage = _collect(events, begin)
    total = time.monotonic() - begin
    return Answer("chat, streaming", usage["prompt_tokens"], usage["completion_tokens"], first, total, text)


def _collect(events: Iterator[dict[str, Any]], begin: float) -> tuple[float | None, str, dict[str, int]]:
    first, text, usage = None, "", {"prompt_tokens": 0, "completion_tokens": 0}
    for event in events:
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            piece = choice["delta"].get("content")
            if piece and first is None:
                first = time.monotonic() - begin
            text += piece or ""
    return first, text, usage


def _completion(server: Server) -> Answer:
    prompt = "Each rank owns a share of the tokens and all the heads. " * 10
    body = {"model": server.name, "prompt": prompt, "max_tokens": 24, "temperature": 0}
    begin = time.monotonic()
    reply = server.post("/v1/completions", body)
    total = time.monotonic() - begin
    usage = reply["usage"]
    text = reply["choices"][0]["text"]
    return Answer("completion", usage["prompt_tokens"], usage["completion_tokens"], None, total, text)


def _table(answers: list[Answer]) -> str:
    rows = [("request", "prompt", "answer", "first token", "total", "text (random weights)")]
    for a in answers:
        first = "-" if a.first_s is None else f"{a.first_s * 1e3:.0f} ms"
        counts = (f"{a.prompt_tokens} tok", f"{a.tokens} tok")
        rows.append((a.request, *counts, first, f"{a.total_s * 1e3:.0f} ms", ascii(a.text)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths)).rstrip() for row in rows)


class _Progress:
    """One line that counts on a terminal; elsewhere a line every ten seconds."""

    def __init__(self) -> None:
        self.next = 10.0

    def __call__(self, elapsed: float, last_line: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\033[K  {elapsed:4.0f} s  {last_line[:90]}", end="", file=sys.stderr, flush=True)
        elif elapsed >= self.next:
            self.next += 10
            _say(f"  {elapsed:.0f} s  {last_line[:90]}")


def _say(text: str) -> None:
    if sys.stderr.isatty():
        text = f"\r\033[K{text}"
    print(text, file=sys.stderr, flush=True)
