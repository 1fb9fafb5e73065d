"""A pool of rank processes that have vLLM imported and build one engine after the other.

An engine start costs 20 to 60 s, nearly all of it imports. Here each rank imports once; an engine (vLLM's own
LLM over its `external_launcher` executor: real scheduler, workers, loader and gloo groups) then takes a second.

    with RankPool(4) as pool:
        results = pool.run(2, "tests_module:function", {"any": "picklable"})   # one result per rank

The function runs in every rank as `function(**kwargs)`, with torchrun's environment set.
"""

import importlib
import os
import socket
import time
import traceback
from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_any
from typing import Any

LIMIT_S = 240


def free_port() -> int:
    """A TCP port nobody listens on right now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class RankError(AssertionError):
    """A rank failed; the message holds its traceback."""


def _serve(conn: Connection, log_path: str) -> None:
    log = open(log_path, "a")  # noqa: SIM115  held for the life of the process
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    import torch  # noqa: F401
    import vllm  # noqa: F401
    from vllm import LLM  # noqa: F401

    conn.send("ready")
    while (task := conn.recv()) is not None:
        env, target, kwargs = task
        saved = dict(os.environ)
        os.environ.update(env)
        try:
            module, name = target.split(":")
            answer: Any = ("ok", getattr(importlib.import_module(module), name)(**kwargs))
        except BaseException:
            answer = ("error", traceback.format_exc())
        os.environ.clear()
        os.environ.update(saved)
        conn.send(answer)


class RankPool:
    """`size` processes; `run` uses the first n of them."""

    def __init__(self, size: int, log_dir: str) -> None:
        self.size, self.log_dir = size, log_dir
        self._procs: list[Any] = []
        self._conns: list[Connection] = []

    def __enter__(self) -> "RankPool":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _start(self) -> None:
        context = get_context("spawn")
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["OMP_NUM_THREADS"] = "1"
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            proc = context.Process(
                target=_serve,
                args=(theirs, f"{self.log_dir}/rank{rank}.log"),
                daemon=True,
                name=f"rank{rank}",
            )
            proc.start()
            self._procs.append(proc)
            self._conns.append(ours)
        for conn in self._conns:
            assert conn.recv() == "ready"

    def close(self) -> None:
        """Stop every process, whatever it is doing."""
        for proc in self._procs:
            proc.kill()
            proc.join()
        self._procs, self._conns = [], []

    def run(
        self, ranks: int, target: str, kwargs: dict[str, Any] | None = None, env: dict[str, str] | None = None
    ) -> list[Any]:
        """Call `target` ("module:function") in ranks 0..n-1 and return their results in rank order.

        A rank that raises, dies or hangs is a RankError; the pool is then restarted on next use, because the
        other ranks may be stuck in a collective.
        """
        if not self._procs:
            self._start()
        base = {
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            **(env or {}),
        }
        for rank in range(ranks):
            self._conns[rank].send(
                ({**base, "RANK": str(rank), "LOCAL_RANK": str(rank)}, target, kwargs or {})
            )
        return self._collect(ranks)

    def _collect(self, ranks: int) -> list[Any]:
        results: dict[int, Any] = {}
        deadline = time.monotonic() + LIMIT_S
        while len(results) < ranks:
            waiting: Sequence[Any] = [self._conns[r] for r in range(ranks) if r not in results]
            ready = wait_any(waiting, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                self.close()
                raise RankError(f"ranks {sorted(set(range(ranks)) - results.keys())} hang after {LIMIT_S} s")
            for conn in ready:
                rank = self._conns.index(conn)  # type: ignore[arg-type]
                try:
                    state, value = conn.recv()  # type: ignore[union-attr]
                except EOFError:
                    state, value = "error", "the process died; see its log"
                if state == "error":
                    self.close()
                    raise RankError(f"rank {rank} failed:\n{value}")
                results[rank] = value
        return [results[r] for r in range(ranks)]
