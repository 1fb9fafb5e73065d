#!/usr/bin/env python3
"""Every check and test of this repository, on a fresh machine too: `python ci/test.py [--fast]`.

Makes the environment with apply.py where that has not been done, installs the test tools, then lints and runs
the suites. `--fast` leaves out everything that starts an engine. Needs only Python and git to begin with.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BIN = "Scripts" if os.name == "nt" else "bin"


def run(title: str, *command: object) -> None:
    """Run one step; leave with its exit code if it fails."""
    start = time.monotonic()
    print(f"== {title}", flush=True)
    code = subprocess.run([str(part) for part in command], cwd=ROOT, check=False).returncode
    print(
        f"== {title}: {'ok' if code == 0 else f'failed ({code})'}, {time.monotonic() - start:.0f} s",
        flush=True,
    )
    if code:
        raise SystemExit(code)


def main() -> None:
    """Parse, prepare, check, test."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--fast", action="store_true", help="no engine starts")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    args = parser.parse_args()
    python = args.venv / BIN / "python"
    run("apply", sys.executable, "apply.py", "--vllm", "v0.12.0", "--venv", args.venv)
    run(
        "test tools",
        *(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
        *("--no-deps", "-r", "requirements/dev.txt", "-r", "requirements/plots.txt"),
    )
    code = ("apply.py", "overlay", "tests", "ci")
    run("ruff", python, "-m", "ruff", "check", *code)
    run("format", python, "-m", "ruff", "format", "--check", *code)
    run("mypy", python, "-m", "mypy")
    run("patches", python, "apply.py", "--lint")
    run("performance document", python, "ci/performance_doc.py", "--check")
    run("tests without an engine", python, "-m", "pytest", "-q", "-n", "2", "-m", "not engine", "tests")
    if not args.fast:
        run(
            "tests with an engine", python, "-m", "pytest", "-q", "-m", "engine", "--durations", "15", "tests"
        )


if __name__ == "__main__":
    main()
