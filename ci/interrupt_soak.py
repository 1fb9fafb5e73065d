"""Interrupt real runs of apply.py at random moments: `python ci/interrupt_soak.py [--moments 100] [--python PATH]`.

Applies and reverts the real patch set in turn, to an unpacked sdist of its own or, with --python, to the vLLM that is
installed there, and sends SIGINT, SIGTERM or SIGKILL at a random moment. After each, `--status` must know the state,
and one more run must bring every file of vLLM to exactly what an undisturbed run leaves. Prints how often which state
was found; exit code 1 at the first that does not hold, with the seed that repeats it.
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

    def interrupt(self, number: int, seconds: float, *more: str) -> int | None:
        """Send the signal after so many seconds; exit code, None if the run was through before."""
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen([*self.command, *more], **quiet)
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
    length = time.monotonic() - begin
    pristine = target.files()
    assert pristine != patched

    found: Counter[str] = Counter()
    for moment in range(moments):
        forwards = moment % 2 == 0  # from pristine to patched, else back
        number = SIGNALS[draw.randrange(len(SIGNALS))]
        more = () if forwards else ("--revert",)
        code = target.interrupt(number, draw.uniform(0, length), *more)
        state = "through" if code is None else target.run("--status")["state"]
        found[f"{signal.Signals(number).name}: {state}"] += 1
        assert state in ("through", "pristine", "patched", "interrupted"), state
        if state in ("pristine", "patched"):
            assert target.files() == (pristine if state == "pristine" else patched), f"{state}, but it is not"
        target.run(*more)
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
        target = Target(installed if args.python else ["--dest", f"{folder}/vLLM tree ü"])
        try:
            found = soak(target, args.moments, args.seed)
        except AssertionError as problem:
            raise SystemExit(f"error: {problem} (seed {args.seed})") from None
    print(json.dumps({"moments": args.moments, "seed": args.seed, "found": dict(sorted(found.items()))}))


if __name__ == "__main__":
    main()
