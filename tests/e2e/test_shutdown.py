"""C37: a server that is interrupted or loses a rank ends with a named cause and leaves no process behind."""

import os
import signal
import threading

import pytest
from servers import command_of, ends
from vllm_sfa_cp.serving import SFA_CP_ARGS, SFA_CP_ENV, HTTPStatusError, Server, ServerError, group_members
from vllm_sfa_cp.shapes import SHAPES
from vllm_sfa_cp.tiny_model import write_checkpoint

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ARGS = [
    *("--tensor-parallel-size", "2", "--dtype", "float32", "--max-model-len", "2048"),
    *("--block-size", "16", "--num-gpu-blocks-override", "512"),
]


@pytest.fixture
def busy(tmp_path):
    """A server in the middle of a long answer, so that its ranks are between collectives."""
    write_checkpoint(tmp_path / "model", SHAPES["base"])
    with Server(tmp_path / "model", [*ARGS, *SFA_CP_ARGS], SFA_CP_ENV, log=tmp_path / "log") as server:
        body = {"model": server.name, "prompt": "long " * 60, "max_tokens": 1500, "ignore_eos": True}
        under_way = threading.Event()

        def read() -> None:
            try:
                for _ in server.stream("/v1/completions", body):
                    under_way.set()
            except (OSError, ValueError, HTTPStatusError, ServerError):
                return  # how an answer breaks off is up to the HTTP server

        client = threading.Thread(target=read)
        client.start()
        assert under_way.wait(60)
        yield server
    client.join(60)
    assert not client.is_alive()


def test_ctrl_c(busy):
    """A terminal sends SIGINT to the whole process group."""
    os.killpg(busy.pid, signal.SIGINT)
    ends(busy, 30)
    assert "Shutting down" in busy.log.read_text()


def test_a_killed_rank(busy):
    ranks = {command_of(pid): pid for pid in group_members(busy.pid)}
    workers = sorted(name for name in ranks if "Worker_TP" in name)
    assert len(workers) == 2
    os.kill(ranks[workers[1]], signal.SIGKILL)
    ends(busy, 30)
    log = busy.log.read_text()
    assert "died unexpectedly" in log
    assert "VllmWorker-1" in log
