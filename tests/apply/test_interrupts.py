"""Killed or interrupted at every single moment (case A3): the target is whole again, and the next run says
how.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
from fake_upstream import HOME, Case
from patchset import engine, interrupt
from patchset.store import Store

WRITES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod", "os.chown", "os.utime", "os.truncate")


def run_until(case: Case, verb: str, moment: int, number: int) -> int:
    """Run a verb in a child that sends itself a signal just before its `moment`-th write; returns the wait
    status.
    """
    target, (series, manifest) = case.target, case.load()
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    code = 99
    try:
        interrupt.install()
        count = 0

        def hook(event: str, arguments: tuple) -> None:
            nonlocal count
            writing = event in WRITES or (event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR))
            count += bool(writing)
            if writing and count == moment:
                os.kill(os.getpid(), number)

        sys.addaudithook(hook)
        getattr(engine, verb)(target, series, manifest)
        code = 0
    except interrupt.Interrupted as stop:
        code = stop.code
    finally:
        os._exit(code)


@pytest.mark.parametrize("verb", ["apply", "revert"])
def test_killed_at_every_write(case: Case, verb: str) -> None:
    """SIGKILL before each write of a run; the next run rolls back or finishes, says which, and completes."""
    pristine = case.snapshot()
    case.apply()
    patched = case.snapshot()
    said = set()
    for moment in range(1, 1000):
        if verb == "apply":
            case.revert()
        else:
            case.apply()
        status = run_until(case, verb, moment, signal.SIGKILL)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            break
        journal = Store(case.target.state_dir).journal_file.exists()
        assert (case.inspect().condition.value == "interrupted") == journal
        outcome = getattr(case, verb)()
        if journal:
            assert outcome.recovered is not None
            said.add(outcome.recovered.split(" an ")[0])
        assert case.snapshot() == (patched if verb == "apply" else pristine)
    assert moment > 30
    assert said == {"rolled back", "finished"}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("verb", ["apply", "revert"])
def test_interrupted_at_every_write(case: Case, verb: str, number: int, code: int) -> None:
    """SIGINT and SIGTERM roll back at once: no journal stays, the exit code is the shell's."""
    pristine = case.snapshot()
    case.apply()
    patched = case.snapshot()
    rolled_back = 0
    for moment in range(1, 1000, 2):
        before, after = (pristine, patched) if verb == "apply" else (patched, pristine)
        getattr(case, "revert" if verb == "apply" else "apply")()
        status = run_until(case, verb, moment, number)
        if os.WEXITSTATUS(status) == 0:
            break
        assert os.WEXITSTATUS(status) == code
        now = case.snapshot()
        assert now in (before, after)
        rolled_back += now == before
    assert rolled_back > 10


def test_interrupted_reapply_keeps_the_old_set(case: Case) -> None:
    """Killed while a changed set replaces an older one: back to the older one, whose originals are still
    stored.
    """
    pristine = case.snapshot()
    names = sorted(p.name for p in case.folder.glob("*.patch"))
    order = case.folder / "series"
    full = order.read_text()
    for moment in range(1, 1000, 3):
        order.write_text(f"{names[0]}\n")
        for name in names[1:]:
            (case.folder / name).rename(case.folder.parent / name)
        case.apply()
        for name in names[1:]:
            (case.folder.parent / name).rename(case.folder / name)
        order.write_text(full)
        status = run_until(case, "apply", moment, signal.SIGKILL)
        case.apply()
        assert case.inspect().current
        case.revert()
        assert case.snapshot() == pristine
        if os.WIFEXITED(status):
            break


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_real_run_at_random_moments(case: Case, number: int) -> None:
    """The command itself, stopped from outside at random moments, start-up included."""
    pristine = case.snapshot()
    dice = random.Random(number)
    started = time.monotonic()
    assert case.cli().returncode == 0
    typical = time.monotonic() - started
    patched = case.snapshot()
    for _ in range(12):
        case.revert()
        child = subprocess.Popen(case.arguments(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        time.sleep(dice.uniform(0.2, 1.1) * typical)
        child.send_signal(number)
        said = child.communicate()[1]
        if number == signal.SIGKILL:
            assert case.apply().action in ("applied", "nothing")
            assert case.snapshot() == patched
        else:  # before our handler is there, Python ends by the signal, or with 1 where it still reads site.py
            early = child.returncode == -number or b"KeyboardInterrupt" in said
            assert early or child.returncode in (0, 128 + number), said
            assert case.snapshot() in (pristine, patched)


@pytest.mark.slow
@pytest.mark.network
def test_soak_of_the_real_vllm() -> None:
    """The short form of ci/interrupt_soak.py: each kind of moment in an apply and in a revert."""
    pytest.importorskip("pypi_simple")
    command = [sys.executable, HOME / "ci" / "interrupt_soak.py", "--moments", "8"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "cannot be downloaded" in done.stderr:
        pytest.skip("the package index cannot be reached")
    assert done.returncode == 0, done.stderr
    print(done.stdout)


@pytest.mark.parametrize("damage", ["journal", "state"])
def test_truncated_files(case: Case, damage: str) -> None:
    """A3: a journal or state cut short does not break the next run."""
    pristine = case.snapshot()
    for moment in range(1, 1000):
        run_until(case, "apply", moment, signal.SIGKILL)
        store = Store(case.target.state_dir)
        if store.journal_file.exists() and (case.root / "vllm/a.py").read_bytes() != case_original(case):
            break
    path = store.journal_file if damage == "journal" else store.state_file
    path.write_bytes(path.read_bytes()[:40] if path.exists() else b"{")
    assert case.status()["state"] == "interrupted"
    assert case.apply().recovered
    assert case.inspect().current
    case.revert()
    if damage == "state" or case.kind == "tree":
        assert case.snapshot() == pristine


def case_original(case: Case) -> bytes:
    return (case.upstream / "vllm/a.py").read_bytes()


def test_edit_after_a_kill_is_kept(case: Case) -> None:
    """A file edited between the kill and the next run is named, and nothing is touched."""
    for moment in range(1, 1000):
        run_until(case, "apply", moment, signal.SIGKILL)
        if Store(case.target.state_dir).journal_file.exists():
            break
        shutil.rmtree(case.root / ".sfa-cp-overlay", ignore_errors=True)
    (case.root / "vllm/b.py").write_bytes(b"mine\n")
    before = case.snapshot()
    done = case.cli()
    assert done.returncode == 5
    assert "vllm/b.py was edited since" in done.stderr
    assert {k: v for k, v in case.snapshot().items() if not k.endswith("lock")} == {
        k: v for k, v in before.items() if not k.endswith("lock")
    }
