"""What the tests of a real server share."""

import time
from pathlib import Path

from vllm_sfa_cp.serving import Server, group_members


def command_of(pid: int) -> str:
    """Command line of a process; vLLM's processes put their role there. Empty for one that is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def ends(server: Server, seconds: float) -> None:
    """Wait until the server and every process of its group are gone; AssertionError past `seconds`."""
    group, begin = server.pid, time.monotonic()
    while server.alive or group_members(group):
        left = {pid: command_of(pid) for pid in group_members(group)}
        assert time.monotonic() - begin < seconds, f"still there: {left}"
        time.sleep(0.1)
    print(f"gone after {time.monotonic() - begin:.1f} s")
