"""Server handling against a stand-in that is a real process with real children, and no vLLM."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from vllm_sfa_cp.serving import HTTPStatusError, Server, ServerError, free_port, group_members

FAKE = """
import http.server, json, signal, subprocess, sys, time
mode, port = sys.argv[1], int(sys.argv[2])
print("starting", mode, flush=True)
if mode == "dies":
    print("RuntimeError: no memory", flush=True); sys.exit(3)
if mode == "slow":
    time.sleep(60)
if mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"
subprocess.Popen([sys.executable, "-c", child])

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(200, b"ok")
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body.get("bad"):
            self.answer(400, b"bad request")
        elif body.get("stream"):
            events = [b": comment", b'data: {"i": 1}', b'data: {"i": 2}', b"data: [DONE]", b'data: {"i": 3}']
            self.answer(200, b"\\n\\n".join(events))
        else:
            self.answer(200, json.dumps({"echo": body}).encode())
    def answer(self, status, data):
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
    def log_message(self, *args):
        pass

http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


class FakeServer(Server):
    grace = 0.5  # its child ignores SIGTERM

    @property
    def command(self):
        return [sys.executable, "-c", FAKE, self.model, str(self.port)]


def test_starts_answers_and_leaves_nothing(tmp_path):
    seen = []
    with FakeServer("good", log=tmp_path / "log", progress=lambda *a: seen.append(a)) as server:
        group = server.pid
        assert len(group_members(group)) == 2
        assert server.get("/health") == "ok"
        assert server.post("/v1/x", {"a": 1}) == {"echo": {"a": 1}}
        assert list(server.stream("/v1/x", {})) == [{"i": 1}, {"i": 2}]
        with pytest.raises(HTTPStatusError, match="400") as err:
            server.post("/v1/x", {"bad": True})
        assert err.value.status == 400
        begin = time.monotonic()
        server.stop()
        assert time.monotonic() - begin < 8
    assert group_members(group) == []
    assert "starting good" in (tmp_path / "log").read_text()
    assert server.ready_seconds is not None


def test_a_server_that_ignores_sigterm_is_killed():
    with FakeServer("stubborn") as server:
        group, log = server.pid, server.log
        server.stop()
        server.stop()
    assert group_members(group) == []
    assert not log.exists()


def test_death_shows_the_log():
    with pytest.raises(ServerError, match="exit code 3: RuntimeError: no memory"), FakeServer("dies"):
        pytest.fail("became ready")


def test_time_limit():
    server = FakeServer("slow", ready_timeout=1)
    with pytest.raises(ServerError, match="not ready after 1 s"), server:
        pytest.fail("became ready")
    assert not server.alive


def test_exception_inside_still_stops():
    server = FakeServer("good")
    with pytest.raises(KeyError), server:
        {}["absent"]
    assert not server.alive
    assert server.log.exists()
    server.log.unlink()


def test_zombies_do_not_count():
    child = subprocess.Popen([sys.executable, "-c", ""], start_new_session=True)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert Path(f"/proc/{child.pid}").exists()
    assert group_members(child.pid) == []
    child.wait()


def test_the_real_command_is_vllm_serve():
    server = Server("model", ["--x"], port=free_port())
    assert server.command[1:4] == ["-m", "vllm.entrypoints.cli.main", "serve"]
    assert server.command[-1] == "--x"
    server.log.unlink()


def test_interrupting_the_holder_stops_its_server(tmp_path):
    """SIGTERM to a program that holds a server ends the server too."""
    code = (
        "import signal, sys, time; from tests_fake import FakeServer\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
        "with FakeServer('good') as s:\n    print(s.pid, flush=True)\n    time.sleep(60)"
    )
    (tmp_path / "tests_fake.py").write_text(Path(__file__).read_text())
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=env)
    assert holder.stdout is not None
    group = int(holder.stdout.readline())
    holder.send_signal(signal.SIGTERM)
    assert holder.wait(60) == 143
    assert group_members(group) == []
