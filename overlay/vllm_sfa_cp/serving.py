"""Start, watch, ask and stop a real `vllm serve`, leaving no process behind. Standard library only."""

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

#: Environment and options that switch SFA-CP on.
SFA_CP_ENV = {"VLLM_ASCEND_ENABLE_FLASHCOMM1": "1"}
SFA_CP_ARGS = ("--additional-config", '{"enable_sfa_cp": true}')

_EXCEPTION = re.compile(r"(?:^|\s)([\w.]*(?:Error|Exception)(?:: .+)?)$")


class ServerError(RuntimeError):
    """The server died, broke off or did not get ready in time; the message ends with the tail of its log."""


class HTTPStatusError(RuntimeError):
    """The server answered with an error status."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"HTTP {status}: {body}")
        self.status = status
        self.body = body


class Server:
    """A `vllm serve MODEL` in a process group of its own; use as a context manager.

    with Server(model, ["--tensor-parallel-size", "2"]) as server:   # started and ready
        server.post("/v1/completions", {"model": server.name, "prompt": "Hello"})

    `env` is laid over this process's environment. Output goes to `log` (default: a temporary file that is
    removed unless the server failed).
    """

    name = "tiny"
    grace = 20.0  #: seconds between SIGTERM and SIGKILL

    def __init__(
        self,
        model: str | Path,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        *,
        port: int = 0,
        log: Path | None = None,
        ready_timeout: float = 600,
        progress: Callable[[float, str], None] | None = None,
    ) -> None:
        self.model = str(model)
        self.args = list(args)
        self.env = dict(env or {})
        self.host = "127.0.0.1"
        self.port = port or free_port()
        self.ready_timeout = ready_timeout
        self.progress = progress
        self.ready_seconds: float | None = None
        self._own_log = log is None
        self.log = log or _temporary_log()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Server":
        self.start()
        try:
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if kind is None and self._own_log:
            self.log.unlink(missing_ok=True)

    @property
    def base_url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def command(self) -> list[str]:
        module = "vllm.entrypoints.cli.main"  # what the `vllm` script runs, under this interpreter
        where = ["--host", self.host, "--port", str(self.port), "--served-model-name", self.name]
        return [sys.executable, "-m", module, "serve", self.model, *where, *self.args]

    @property
    def pid(self) -> int:
        """Process id of the API server; also the id of the process group."""
        assert self._process is not None, "not started"
        return self._process.pid

    def start(self) -> None:
        """Start the process; returns at once."""
        env = {**os.environ, "PYTHONUNBUFFERED": "1", "NO_COLOR": "1", **self.env}
        with self.log.open("wb") as out:
            self._process = subprocess.Popen(
                self.command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_ready(self) -> None:
        """Block until /health answers 200; ServerError when the server dies or `ready_timeout` passes."""
        begin = time.monotonic()
        while True:
            elapsed = time.monotonic() - begin
            if not self.alive:
                end = f"the server ended with exit code {self.exit_code}"
                raise ServerError(f"{end}: {self.first_error()}\n{self.log_tail()}")
            if elapsed > self.ready_timeout:
                raise ServerError(f"the server was not ready after {elapsed:.0f} s\n{self.log_tail()}")
            if self.healthy():
                self.ready_seconds = elapsed
                return
            if self.progress:
                self.progress(elapsed, self.log_tail(1).strip())
            time.sleep(0.5)

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        return self._process.poll() if self._process else None

    def healthy(self) -> bool:
        """Whether /health answers 200 now."""
        try:
            self.get("/health", timeout=5)
        except (OSError, http.client.HTTPException, HTTPStatusError):
            return False
        return True

    def log_tail(self, lines: int = 40) -> str:
        """The last lines that the server printed."""
        with self.log.open("rb") as f:
            f.seek(max(0, f.seek(0, os.SEEK_END) - 400 * lines))
            return "\n".join(f.read().decode(errors="replace").splitlines()[-lines:])

    def first_error(self) -> str:
        """The first exception in the log: later ones report that a process is gone, not why."""
        with self.log.open(errors="replace") as f:
            matches = (_EXCEPTION.search(line) for line in f if "WARNING" not in line)
            return next((m[1] for m in matches if m), "no exception in its log")

    def stop(self) -> None:
        """End the whole process group: SIGTERM, then SIGKILL after `grace` seconds. Safe to call twice."""
        if self._process is None:
            return
        group = self._process.pid
        for sig, wait in ((signal.SIGTERM, self.grace), (signal.SIGKILL, 10.0)):
            _signal_group(group, sig)
            deadline = time.monotonic() + wait
            while time.monotonic() < deadline:
                if self._process.poll() is not None and not group_members(group):
                    self._process = None
                    return
                time.sleep(0.05)
        raise ServerError(f"processes of group {group} survived SIGKILL: {group_members(group)}")

    def get(self, path: str, timeout: float = 60) -> str:
        """Body of a GET request."""
        with _open(self.base_url + path, None, timeout) as response:
            return response.read().decode()

    def post(self, path: str, body: Mapping[str, Any], timeout: float = 600) -> dict[str, Any]:
        """Send JSON, return the JSON that comes back."""
        with _open(self.base_url + path, body, timeout) as response:
            return json.loads(response.read())

    def stream(self, path: str, body: Mapping[str, Any], timeout: float = 600) -> Iterator[dict[str, Any]]:
        """Send JSON with `stream: true` and yield each server-sent event until [DONE].

        An error after the first byte comes as an event, not as a status: it raises ServerError.
        """
        with _open(self.base_url + path, {**body, "stream": True}, timeout) as response:
            for line in response:
                if not line.startswith(b"data:"):
                    continue
                data = line.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return
                event = json.loads(data)
                if "error" in event:
                    raise ServerError(f"the stream broke off: {self.first_error()}\n{self.log_tail()}")
                yield event


def _temporary_log() -> Path:
    fd, name = tempfile.mkstemp(prefix="vllm-serve-", suffix=".log")
    os.close(fd)
    return Path(name)


def free_port() -> int:
    """A TCP port that nobody uses at the moment."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def group_members(group: int) -> list[int]:
    """Process ids of a process group that still run; zombies do not count."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # pid (name, may hold spaces) state ppid pgrp ...
            state, _, pgrp = stat.read_text().rpartition(")")[2].split()[:3]
        except (OSError, ValueError):
            continue  # gone between listing and reading
        if int(pgrp) == group and state not in "ZX":
            members.append(int(stat.parent.name))
    return members


def _signal_group(group: int, sig: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, sig)


def _open(url: str, body: Mapping[str, Any] | None, timeout: float) -> http.client.HTTPResponse:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    # The server is on this machine: a proxy from the environment must not get between.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        return opener.open(request, timeout=timeout)
    except urllib.error.HTTPError as err:
        with err:
            raise HTTPStatusError(err.code, err.read().decode(errors="replace")) from None
