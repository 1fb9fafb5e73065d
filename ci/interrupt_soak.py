"""Interrupt real runs of apply.py at random moments: `python ci/interrupt_soak.py [--moments 100] [--python PATH]`.

Applies and reverts the real patch set in turn, to an unpacked sdist of its own or, with --python, to the vLLM that is
installed there, and sends SIGINT, SIGTERM or SIGKILL at a random moment: half of them anywhere in the run, a quarter
while it writes, a quarter while its journal is there, which is less than a hundredth of the time. After each,
`--status` must know the state, which only SIGKILL may leave interrupted, and one more run must bring every file of
vLLM to exactly what an undisturbed run leaves. Prints how often which state was found; exit code 1 at the first that
does not hold, with the seed.
"""

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "overlay"))

from patchset.target import STATE  # noqa: E402

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)


class Target:
    """What is applied to. Its files: everything of vllm/ but bytecode, and RECORD where it is installed."""

    def __init__(self, options: list[str]) -> None:
        self.command = [sys.executable, str(ROOT / "apply.py"), "--vllm", "v0.12.0", "--no-install", "--json"]
        self.command += options
        self.root = Path(".")

    def run(self, *more: str) -> dict:
        """The object that a run prints. AssertionError: it fails."""
        done = subprocess.run([*self.command, *more], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{more} ended with {done.returncode}: {done.stderr[-2000:]}"
        return json.loads(done.stdout)

    def files(self) -> dict[str, str]:
        paths = [*self.root.glob("vllm/**/*"), *self.root.glob("vllm*.dist-info/RECORD")]
        kept = [p for p in paths if p.is_file() and "__pycache__" not in p.parts]
        return {str(p.relative_to(self.root)): sha256(p.read_bytes()).hexdigest() for p in kept}

    def start(self, *more: str) -> "subprocess.Popen[bytes]":
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        return subprocess.Popen([*self.command, *more], **quiet)

    def until(self, process: "subprocess.Popen[bytes]", mark: str, there: bool) -> float:
        """Wait until a name in our folder is there, or is gone, or the run has ended; the time then. Does not sleep:
        a journal is there for milliseconds.
        """
        while process.poll() is None and (self.root / STATE / mark).exists() != there:
            pass
        return time.monotonic()

    def measure(self, mark: str) -> float:
        """For how many seconds of an undisturbed apply and revert the name is there, on average."""
        seconds = 0.0
        for more in ((), ("--revert",)):
            process = self.start(*more)
            begin = self.until(process, mark, True)
            seconds += self.until(process, mark, False) - begin
            assert process.wait() == 0
        return seconds / 2

    def interrupt(self, number: int, seconds: float, mark: str, *more: str) -> int | None:
        """Send the signal so many seconds after the start, or after `mark` is there; exit code, None if the run was
        through before.
        """
        process = self.start(*more)
        if mark:
            self.until(process, mark, True)
        try:
            process.wait(seconds)
            return None
        except subprocess.TimeoutExpired:
            process.send_signal(number)
            return process.wait(60)


def soak(target: Target, moments: int, seed: int) -> Counter[str]:
    """How often which state was found after a signal. AssertionError: something does not hold."""
    draw = random.Random(seed)
    target.run()
    target.root = Path(target.run("--status")["target"]["path"])
    patched = target.files()
    begin = time.monotonic()
    target.run("--revert")
    lengths = {"": time.monotonic() - begin}
    pristine = target.files()
    assert pristine != patched
    lengths |= {mark: target.measure(mark) for mark in ("stage", "journal.json")}

    found: Counter[str] = Counter()
    for moment in range(moments):
        forwards = moment % 2 == 0  # from pristine to patched, else back
        number = SIGNALS[draw.randrange(len(SIGNALS))]
        more = () if forwards else ("--revert",)
        mark = ("", "stage", "", "journal.json")[moment // 2 % 4]
        code = target.interrupt(number, draw.uniform(0, lengths[mark]), mark, *more)
        state = "through" if code is None else target.run("--status")["state"]
        assert state in ("through", "pristine", "patched", "interrupted"), state
        assert number == signal.SIGKILL or state != "interrupted", signal.Signals(number).name
        if state in ("pristine", "patched"):
            assert target.files() == (pristine if state == "pristine" else patched), f"{state}, but it is not"
        ended = target.run(*more)["recovered"]
        assert (ended is not None) == (state == "interrupted"), ended
        found[f"{signal.Signals(number).name}: {state}{f', {ended}' if ended else ''}"] += 1
        assert target.files() == (patched if forwards else pristine), f"moment {moment}, seed {seed}"
        if sys.stderr.isatty():
            print(f"\r{moment + 1}/{moments}", end="", file=sys.stderr, flush=True)
    return found


def main() -> None:
    """Parse, soak, report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--moments", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--python", help="patch the vLLM that is installed there")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="interrupts-") as folder:
        installed = ["--target", "installed", "--python", args.python or ""]
        target = Target(installed if args.python else ["--source", "sdist", "--dest", f"{folder}/vLLM ü"])
        try:
            found = soak(target, args.moments, args.seed)
        except AssertionError as problem:
            raise SystemExit(f"error: {problem} (seed {args.seed})") from None
    print(json.dumps({"moments": args.moments, "seed": args.seed, "found": dict(sorted(found.items()))}))


if __name__ == "__main__":
    main()
