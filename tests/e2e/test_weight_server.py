"""Shared weights in a real server: counters on /metrics, and the end of a server whose owner rank is killed."""

import contextlib
import http.client
import os
import re
import signal
import time

import pytest
from servers import command_of, ends
from vllm_sfa_cp.serving import SFA_CP_ENV, Server, ServerError, group_members
from vllm_sfa_cp.shapes import SHAPES
from vllm_sfa_cp.tiny_model import write_checkpoint

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ARGS = [
    *("--tensor-parallel-size", "2", "--dtype", "float32", "--max-model-len", "1024"),
    *("--block-size", "16", "--num-gpu-blocks-override", "256"),
    *(
        "--additional-config",
        '{"enable_sfa_cp": true, "sfa_cp": {"weights": "broadcast", "prefetch_step": 1}}',
    ),
]
RESIDENT = re.compile(r"(\w[\w ]*) ([\d.]+) \(([\d.]+)\)")


def counters(server):
    """Values of the weight counters, (name, rank) -> {series: value}."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for line in server.get("/metrics").splitlines():
        if line.startswith("vllm_sfa_cp_weight_"):
            name, _, rest = line.removeprefix("vllm_sfa_cp_weight_").partition("{")
            labels, value = rest.rsplit("} ", 1)
            pairs = dict(part.split("=") for part in labels.replace('"', "").split(","))
            found.setdefault((name, pairs["rank"]), {})[pairs["series"]] = float(value)
    return found


def test_counters_grow_and_a_killed_owner_ends_the_server(tmp_path):
    write_checkpoint(tmp_path / "model", SHAPES["base"])
    with Server(tmp_path / "model", ARGS, SFA_CP_ENV, log=tmp_path / "log") as server:
        before = counters(server)
        server.post("/v1/completions", {"model": server.name, "prompt": "Hello " * 50, "max_tokens": 4})
        after = counters(server)
        for rank in "01":
            for series in ("q_b_proj", "o_proj"):
                assert after["windows", rank][series] == 2
                for name in ("fetches_total", "bytes_total", "wait_seconds_total"):
                    assert after[name, rank][series] > before[name, rank][series], name
        # Four layers a step on either rank, of which each receives the two that the other owns.
        steps = (after["fetches_total", "0"]["o_proj"] - before["fetches_total", "0"]["o_proj"]) / 4
        size = 4 * SHAPES["base"]["hidden_size"] * 8 * SHAPES["base"]["v_head_dim"]
        grown = after["bytes_total", "1"]["o_proj"] - before["bytes_total", "1"]["o_proj"]
        assert grown == steps * 2 * size
        [line] = {
            log.partition("] ")[2]
            for log in server.log.read_text().splitlines()
            if "resident per rank" in log
        }
        figures = {name: (float(a), float(b)) for name, a, b in RESIDENT.findall(line)}
        # Owned by two ranks in turn, each keeps half of the layers whole: plain TP's bytes, and the windows more.
        for name in ("q_b_proj", "o_proj", "other attention", "MLP and experts", "embeddings and head"):
            assert figures[name][0] == figures[name][1] > 0
        assert figures["kv_b_proj"][0] == pytest.approx(2 * figures["kv_b_proj"][1], abs=0.1)
        windows = 2 * (figures["q_b_proj"][0] + figures["o_proj"][0]) / 2
        assert figures["windows"] == (pytest.approx(windows, abs=0.1), 0)

        # Both ranks own layers; the first owns the first. The other is waiting for it when it is killed.
        ranks = {command_of(pid): pid for pid in group_members(server.pid)}
        owner = min(name for name in ranks if "Worker_TP" in name)
        body = {"model": server.name, "prompt": "long", "max_tokens": 900, "ignore_eos": True}
        answer = server.stream("/v1/completions", body)
        next(answer)
        os.kill(ranks[owner], signal.SIGKILL)
        killed = time.monotonic()
        with contextlib.suppress(OSError, ValueError, http.client.HTTPException, ServerError):
            for _ in answer:  # how an answer breaks off is up to the HTTP server
                pass
        ends(server, 30 - (time.monotonic() - killed))
        assert "VllmWorker-0 died unexpectedly" in server.log.read_text()
