"""One server with SFA-CP over vLLM's own HTTP interface: answers, errors, and its end.

The tests share the server and run in order; the last one stops it.
"""

import http.client
import json
import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from servers import ends
from vllm_sfa_cp.serving import SFA_CP_ENV, HTTPStatusError, Server, ServerError, group_members
from vllm_sfa_cp.shapes import SHAPES
from vllm_sfa_cp.tiny_model import write_checkpoint

pytestmark = [pytest.mark.engine, pytest.mark.slow]

MAX_LEN = 1024
ARGS = [
    *("--tensor-parallel-size", "2", "--dtype", "float32", "--max-model-len", str(MAX_LEN)),
    *("--block-size", "16", "--num-gpu-blocks-override", "1024", "--max-num-batched-tokens", "512"),
]
#: Every step with a prefill is a CP step, however small the model.
SFA_CP = ["--additional-config", '{"enable_sfa_cp": true, "sfa_cp": {"cp_min_tokens": 0}}']


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    out = tmp_path_factory.mktemp("tiny") / "model"
    write_checkpoint(out, SHAPES["base"])
    return out


@pytest.fixture(scope="module")
def server(model):
    with Server(model, [*ARGS, *SFA_CP], SFA_CP_ENV) as server:
        yield server


def complete(server, prompt, **more):
    return server.post("/v1/completions", {"model": server.name, "prompt": prompt, "temperature": 0, **more})


def works(server) -> None:
    """The server still answers a request of its own."""
    assert server.healthy()
    assert complete(server, "still there?", max_tokens=2)["usage"]["completion_tokens"] == 2


def test_health_models_and_metrics(server):
    assert server.get("/health") == ""
    [card] = json.loads(server.get("/v1/models"))["data"]
    assert (card["id"], card["max_model_len"]) == ("tiny", MAX_LEN)
    complete(server, "a prompt that prefills", max_tokens=2)
    metrics = server.get("/metrics")
    assert 'vllm:generation_tokens_total{engine="0",model_name="tiny"}' in metrics
    fetches = [line for line in metrics.splitlines() if line.startswith("vllm_sfa_cp_weight_fetches_total{")]
    assert len(fetches) == 4  # two series on two ranks
    assert all(float(line.split()[-1]) > 0 for line in fetches)


def test_completions_stream_and_whole(server):
    body = {"model": server.name, "prompt": "Who owns which token? " * 9, "max_tokens": 16, "temperature": 0}
    whole = server.post("/v1/completions", body)
    assert whole["usage"]["prompt_tokens"] == 1 + 22 * 9
    assert whole["choices"][0]["finish_reason"] == "length"
    pieces = [event["choices"][0]["text"] for event in server.stream("/v1/completions", body)]
    assert "".join(pieces) == whole["choices"][0]["text"] != ""
    assert len(pieces) > 8


def test_chat_stream_and_whole(server):
    body = {
        "model": server.name,
        "messages": [
            {"role": "system", "content": "Be brief. "},
            {"role": "user", "content": "Which ranks hold this?"},
        ],
        "max_tokens": 12,
        "temperature": 0,
    }
    whole = server.post("/v1/chat/completions", body)["choices"][0]["message"]
    assert whole["role"] == "assistant"
    deltas = [e["choices"][0]["delta"] for e in server.stream("/v1/chat/completions", body)]
    assert "".join(d.get("content") or "" for d in deltas) == whole["content"] != ""


def tokens_and_margins(server, prompt, salt):
    """Greedy tokens, and how far each stood above the second best."""
    reply = complete(
        server,
        prompt,
        max_tokens=8,
        ignore_eos=True,
        logprobs=2,
        return_tokens_as_token_ids=True,
        cache_salt=salt,
    )
    found = reply["choices"][0]["logprobs"]
    best = [sorted(top.values(), reverse=True)[:2] for top in found["top_logprobs"]]
    return found["tokens"], [a - b for a, b in best]


def test_32_concurrent_requests_answer_like_one_by_one(server):
    draw = random.Random(7)
    lengths = [1, 2, 3, 600, *(draw.randint(1, 600) for _ in range(28))]
    prompts = [[draw.randrange(4, 512) for _ in range(n)] for n in lengths]
    with ThreadPoolExecutor(32) as threads:
        together = list(threads.map(lambda p: tokens_and_margins(server, p, "together")[0], prompts))
    compared = 0
    for prompt, tokens in zip(prompts, together, strict=True):
        alone, margins = tokens_and_margins(server, prompt, "alone")
        clear = next((i for i, m in enumerate(margins) if m < 1e-3), len(margins))
        assert tokens[:clear] == alone[:clear], f"prompt of {len(prompt)} tokens"
        compared += clear
    assert compared > 0.9 * 8 * 32


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/v1/completions", b'{"model": "tiny", "prompt": ', (400, 422), "json"),
        (
            "/v1/completions",
            b'{"model": "tiny", "prompt": "x", "max_tokens": "many"}',
            (400, 422),
            "max_tokens",
        ),
        ("/v1/completions", b'{"model": "tiny", "prompt": "x", "temperature": -1}', (400,), "temperature"),
        ("/v1/completions", b'{"model": "other", "prompt": "x"}', (404,), "other"),
        ("/v1/completions", b'{"model": "tiny", "prompt": [1, 99999]}', (400,), "99999"),
        ("/v1/chat/completions", b'{"model": "tiny", "messages": "hello"}', (400, 422), "messages"),
    ],
    ids=["truncated", "wrong-type", "out-of-range", "unknown-model", "unknown-token", "chat"],
)
def test_malformed_requests_are_refused_and_do_no_harm(server, path, body, status, says):
    connection = http.client.HTTPConnection(server.host, server.port, timeout=60)
    connection.request("POST", path, body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    assert response.status in status
    assert says in text.lower()
    works(server)


def test_a_prompt_longer_than_the_model_is_refused(server):
    with pytest.raises(HTTPStatusError, match=f"maximum context length is {MAX_LEN - 1} tokens") as err:
        complete(server, [5] * (MAX_LEN + 1), max_tokens=1)
    assert err.value.status == 400
    works(server)
    assert complete(server, [5] * (MAX_LEN - 1), max_tokens=1)["usage"]["prompt_tokens"] == MAX_LEN - 1


def test_a_client_that_goes_away_does_no_harm(server):
    body = {"model": server.name, "prompt": "long " * 60, "max_tokens": 600, "ignore_eos": True}
    events = server.stream("/v1/completions", body)
    next(events)
    events.close()  # closes the connection: the server aborts the request
    works(server)
    deadline = time.monotonic() + 30
    while 'vllm:num_requests_running{engine="0",model_name="tiny"} 0.0' not in server.get("/metrics"):
        assert time.monotonic() < deadline, "the abandoned request still runs"
        time.sleep(0.2)


def test_sigterm_ends_it_within_seconds(server):
    """C37. Sent to the server's process alone, as an operator or a supervisor does."""
    assert len(group_members(server.pid)) >= 4
    os.kill(server.pid, signal.SIGTERM)
    ends(server, 30)
    assert "Shutting down" in server.log_tail(60)


def test_bad_configuration_is_a_start_up_error_with_the_mend(model):
    """The other errors: tests/unit/test_config.py."""
    says = r"(?s)ended with exit code \d+: .*needs FlashComm1; set VLLM_ASCEND_ENABLE_FLASHCOMM1=1"
    with pytest.raises(ServerError, match=says), Server(model, [*ARGS, *SFA_CP]):
        pytest.fail("it starts")
