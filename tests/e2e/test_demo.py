"""The README's first experience: `vllm-sfa-cp demo` serves with two ranks, answers, and leaves nothing behind."""

import os
import subprocess
import sys

import pytest
from vllm_sfa_cp.serving import group_members

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_demo(tmp_path):
    demo = subprocess.Popen(
        [sys.executable, "-m", "vllm_sfa_cp.cli", "demo"],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    out, err = demo.communicate(timeout=400)
    assert demo.returncode == 0, err
    header, chat, completion = out.splitlines()
    assert header.startswith("request")
    assert chat.startswith("chat, streaming")
    assert "24 tok" in chat
    assert completion.startswith("completion")
    assert "ready after" in err
    assert "no process left" in err
    assert list(tmp_path.glob("sfa-cp-demo-*")) == []
    assert group_members(demo.pid) == []
