"""A pool of rank processes that have vLLM imported and run one function after the other.

An engine start costs 20 to 60 s, nearly all of it imports. Here each rank imports once; an engine (vLLM's own
LLM over its `external_launcher` executor: real scheduler, workers, loader and gloo groups) then takes a second.
What a function leaves in its module stays there for the next one, engines included.

    with RankPool(4, "logs") as pool:
        results = pool.run(2, "module:function", {"any": "picklable"})   # one result per rank

The function runs in every rank as `function(**kwargs)`, with torchrun's environment set.
"""

import gc
import importlib
import os
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_any
from typing import Any

from .serving import free_port

#: What every rank's process starts with: the engine in the process itself, one thread per rank, local links.
RANK_ENV = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}

EXIT_S = 10  # for the ranks of a pool to end by themselves


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
    """`size` processes, started by the first `run`, which uses the first n of them.

    limit_s: seconds after which a call counts as hanging. Each rank writes to `log_dir`/rankN.log.
    """

    def __init__(self, size: int, log_dir: str, limit_s: float = 240) -> None:
        self.size, self.log_dir, self.limit_s = size, log_dir, limit_s
        self._procs: list[Any] = []
        self._conns: list[Connection] = []
        self._busy = False

    def __enter__(self) -> "RankPool":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _start(self) -> None:
        context = get_context("spawn")
        os.environ.update(RANK_ENV)
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            proc = context.Process(
                target=_serve,
                args=(theirs, f"{self.log_dir}/rank{rank}.log"),
                daemon=True,
                name=f"rank{rank}",
            )
            proc.start()
            theirs.close()  # so that the end of the process is the end of the pipe
            self._procs.append(proc)
            self._conns.append(ours)
        for rank, conn in enumerate(self._conns):
            try:
                assert conn.recv() == "ready"
            except EOFError:
                self.close()
                raise RankError(f"rank {rank} died while importing vLLM; see its log") from None

    def close(self) -> None:
        """Stop every process: one that waits for work ends by itself, one that does not is killed."""
        for conn in self._conns if not self._busy else []:
            with suppress(OSError):
                conn.send(None)
        deadline = time.monotonic() + (0 if self._busy else EXIT_S)
        for proc in self._procs:
            proc.join(max(0.0, deadline - time.monotonic()))
            proc.kill()
            proc.join()
        self._procs, self._conns, self._busy = [], [], False

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
        self._busy = True
        for rank in range(ranks):
            self._conns[rank].send(
                ({**base, "RANK": str(rank), "LOCAL_RANK": str(rank)}, target, kwargs or {})
            )
        results = self._collect(ranks)
        self._busy = False
        return results

    def _collect(self, ranks: int) -> list[Any]:
        results: dict[int, Any] = {}
        deadline = time.monotonic() + self.limit_s
        while len(results) < ranks:
            waiting: Sequence[Any] = [self._conns[r] for r in range(ranks) if r not in results]
            ready = wait_any(waiting, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                self.close()
                raise RankError(
                    f"ranks {sorted(set(range(ranks)) - results.keys())} hang after {self.limit_s} s"
                )
            for conn in ready:
                rank = self._conns.index(conn)  # type: ignore[arg-type]
                try:
                    state, value = self._conns[rank].recv()
                except EOFError:
                    state, value = "error", "the process died; see its log"
                if state == "error":
                    self.close()
                    raise RankError(f"rank {rank} failed:\n{value}")
                results[rank] = value
        return [results[r] for r in range(ranks)]


@contextmanager
def engine(model: str, **kwargs: Any) -> Iterator[Any]:
    """vLLM's LLM on `model`, torn down with its process groups afterwards."""
    from vllm import LLM
    from vllm.config import get_cached_compilation_config
    from vllm.distributed import cleanup_dist_env_and_memory

    # Something asked for it outside any engine: the next engine must not be built under that answer.
    get_cached_compilation_config.cache_clear()
    defaults = {
        "skip_tokenizer_init": True,
        "distributed_executor_backend": "external_launcher",
        "seed": 0,
    }
    llm = LLM(model, **{**defaults, **kwargs})
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()
        gc.collect()
