#!/usr/bin/env python3
"""Fetch, verify and patch a pinned vLLM, and install it with the overlay. See `python apply.py --help`.

Data goes to stdout (`--json`), everything for people to stderr. Exit codes: 0 done, 1 the thing asked for
does not hold, 2 usage, 3 upstream could not be obtained or verified, 4 a patch does not apply, 5 the target
is not in a state we may touch; 130 and 143 after SIGINT and SIGTERM.
"""

import argparse
import json
import sys
from pathlib import Path

HOME = Path(__file__).resolve().parent
if not (3, 10) <= sys.version_info[:2] < (3, 14):
    print("error: Python 3.10 to 3.13 is needed, this is %d.%d" % sys.version_info[:2], file=sys.stderr)  # noqa: UP031
    print("hint: run it with another one, for example python3.12 apply.py", file=sys.stderr)
    sys.exit(2)
sys.dont_write_bytecode = True
sys.path.insert(0, str(HOME / "overlay"))

from patchset import interrupt, pin, rebase, workflow  # noqa: E402
from patchset.errors import Exit, PatchsetError  # noqa: E402

# What a verb has no use for. --no-install goes with all: where nothing is installed anyway, it holds.
UNUSED = {
    **dict.fromkeys(("status", "lint", "refresh", "rebase_onto"), ("commit", "force", "dry_run")),
    "revert": ("commit", "force"),
}


class Parser(argparse.ArgumentParser):
    """Reports usage errors like every other error."""

    def error(self, message: str) -> "NoReturn":  # type: ignore[name-defined]  # noqa: F821
        raise PatchsetError(Exit.USAGE, message, "python apply.py --help lists the options")


def parser() -> Parser:
    """The command line."""
    out = Parser(
        prog="apply.py", description="Fetch, verify and patch a pinned vLLM, and install it with SFA-CP."
    )
    current = pin.current(HOME / "overlay" / workflow.PACKAGE)
    out.add_argument(
        "--vllm", default=current, metavar="VERSION", help="the patch set to use (default %(default)s)"
    )
    out.add_argument("--dest", type=Path, metavar="DIR", help="the vLLM tree (default build/vllm-VERSION)")
    out.add_argument(
        "--venv", type=Path, default=HOME / ".venv", metavar="DIR", help="environment (default .venv)"
    )
    out.add_argument(
        "--source",
        default="auto",
        metavar="HOW",
        help="auto, git, sdist, or a checkout or sdist file (default auto)",
    )
    out.add_argument(
        "--target", choices=("tree", "installed"), default="tree", help="what is patched (default tree)"
    )
    out.add_argument(
        "--python", metavar="PATH", help="with --target installed: the Python whose vLLM is meant"
    )
    out.add_argument("--no-install", action="store_true", help="leave every environment alone")
    out.add_argument("--commit", action="store_true", help="also record one commit per patch on a branch")
    out.add_argument(
        "--force", action="store_true", help="set a foreign tree aside (as a backup) and start afresh"
    )
    out.add_argument("--dry-run", action="store_true", help="say what would happen, write nothing")
    out.add_argument("--json", action="store_true", help="one JSON object on stdout")
    out.add_argument("--patches", type=Path, default=HOME / "patches", metavar="DIR", help=argparse.SUPPRESS)
    out.add_argument("--write", action="store_true", help="with --lint: write the generated text")
    verbs = out.add_mutually_exclusive_group()
    verbs.add_argument("--status", action="store_true", help="report the state of the target")
    verbs.add_argument(
        "--revert", action="store_true", help="every file back to upstream, overlay uninstalled"
    )
    verbs.add_argument(
        "--demo", action="store_true", help="apply, then serve a tiny model on two ranks and ask it"
    )
    verbs.add_argument("--lint", action="store_true", help="check every patch set and the generated text")
    verbs.add_argument(
        "--refresh", type=Path, metavar="TREE", help="make the patch files again from commits in TREE"
    )
    verbs.add_argument(
        "--rebase-onto", nargs=2, metavar=("VERSION", "DIR"), help="start a port to another vLLM in DIR"
    )
    return out


def check(args: argparse.Namespace) -> None:
    """Refuse options that would be ignored: who asks for a dry run must not get a real one."""
    if args.write and not args.lint:
        raise PatchsetError(Exit.USAGE, "--write goes with --lint", "add --lint, or leave --write out")
    for verb, unused in UNUSED.items():
        if found := [name for name in unused if getattr(args, verb) and getattr(args, name)]:
            verb, option = (f"--{name.replace('_', '-')}" for name in (verb, found[0]))
            raise PatchsetError(Exit.USAGE, f"{option} does not go with {verb}", f"leave {option} out")


def run(args: argparse.Namespace) -> dict:
    """Carry out one verb and return its report."""
    check(args)
    tag = args.vllm if args.vllm.startswith("v") else f"v{args.vllm}"
    args.dest = args.dest or HOME / "build" / f"vllm-{tag}"
    if args.lint:
        return workflow.lint(HOME, args.patches, args.write)
    if args.refresh:
        return workflow.refresh(HOME, args.patches, args.vllm, args.refresh)
    project = workflow.load(HOME, args.patches, args.vllm)
    if args.rebase_onto:
        version, folder = args.rebase_onto
        return rebase.start(project, args.patches, version, Path(folder), args.source, args.dest, args.venv)
    if args.status:
        report = workflow.status(project, args)
        workflow.tell_status(report)
        return report
    if args.revert:
        return workflow.revert(project, args)
    report = workflow.apply(project, args)
    if args.demo and not args.dry_run and not workflow.demo(project, args):
        raise PatchsetError(Exit.NOT_SO, "the demo did not succeed", "its output above says why")
    return report


def main(argv: "list[str]") -> int:
    """Parse, run, print; returns the exit code."""
    interrupt.install()
    wants_json = "--json" in argv
    try:
        report = run(parser().parse_args(argv))
    except PatchsetError as problem:
        print(f"error: {problem.message}", file=sys.stderr)
        for line in problem.problems[:20]:
            print(f"  {line}", file=sys.stderr)
        if problem.hint:
            print(f"hint: {problem.hint}", file=sys.stderr)
        report = {
            "ok": False,
            "error": problem.message,
            "hint": problem.hint,
            "problems": list(problem.problems),
        }
        report["exit"] = int(problem.code)
    except interrupt.Interrupted as stop:
        print("error: interrupted", file=sys.stderr)
        print("hint: run the same command again; it goes on from a whole state", file=sys.stderr)
        report = {"ok": False, "error": "interrupted", "exit": stop.code}
    if wants_json:
        print(json.dumps(report, indent=1))
    return int(report.get("exit", 0))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
