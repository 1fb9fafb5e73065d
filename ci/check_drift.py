#!/usr/bin/env python3
"""What would change if the overlay were moved to another vLLM: every patch and symbol, version by version.

    python ci/check_drift.py 0.13.0 0.14.1          # these versions
    python ci/check_drift.py --latest 3             # the newest three on the package index
    python ci/check_drift.py 0.14.1 --html out.html # with the diffs, on one page

Exit code: 0 nothing new against the accepted baseline, 1 new drift, 2 and above as in apply.py. Needs no vLLM and
no torch; downloading needs pypi-simple.
"""

import argparse
import os
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "overlay"))

from patchset import drift, manifest, pin, report, series, snapshot  # noqa: E402
from patchset.errors import Exit, PatchsetError  # noqa: E402
from patchset.ui import say  # noqa: E402

PACKAGE = "vllm_sfa_cp"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    made.add_argument(
        "versions", nargs="*", metavar="VERSION", help="upstream versions (default: --latest 3)"
    )
    made.add_argument("--latest", type=int, metavar="N", help="the newest N versions on the package index")
    made.add_argument("--vllm", metavar="TAG", help="the patch set (default: the newest one)")
    made.add_argument(
        "--source",
        default="sdist",
        help="sdist, git, or a folder with vllm-VERSION/, vllm-VERSION.tar.gz or a checkout that has the tags",
    )
    made.add_argument("--patches", type=Path, default=ROOT / "patches", help=argparse.SUPPRESS)
    made.add_argument("--overlay", type=Path, default=ROOT / "overlay" / PACKAGE, help=argparse.SUPPRESS)
    made.add_argument("--torch-npu", nargs="+", default=[], metavar="V", help="compare operator schemas too")
    shape = made.add_mutually_exclusive_group()
    shape.add_argument("--json", action="store_true", help="one JSON object on stdout")
    shape.add_argument("--markdown", action="store_true", help="Markdown on stdout")
    made.add_argument("--html", type=Path, metavar="FILE", help="also write one self-contained page")
    made.add_argument("--all", action="store_true", help="show the rows without any drift too")
    made.add_argument("--baseline", type=Path, default=ROOT / "ci" / "drift_baseline.json", metavar="FILE")
    made.add_argument("--accept", action="store_true", help="write what was found to the baseline, exit 0")
    return made


def main(argv: list[str] | None = None) -> int:
    """Parse, examine, print. Returns the exit code."""
    args = parser().parse_args(argv)
    try:
        return _run(args, sys.argv[1:] if argv is None else argv)
    except PatchsetError as problem:
        say(f"error: {problem.message}")
        for line in problem.problems[:20]:
            say(f"  {line}")
        if problem.hint:
            say(f"hint: {problem.hint}")
        return int(problem.code)


def _run(args: argparse.Namespace, argv: list[str]) -> int:
    names = pin.supported(args.patches)
    pinned = pin.load(args.patches, args.vllm or (names[-1] if names else "none"))
    patches = series.load(pinned, manifest.load(pinned))
    accepted = drift.load_baseline(args.baseline)
    overlay = snapshot.FolderFiles(args.overlay.parent, f"{args.overlay.name}/")
    found = drift.examine(
        patches,
        overlay,
        _versions(args, pinned),
        lambda version: snapshot.load(version, args.source, pinned.project, pinned.repository),
        args.overlay.name,
    )
    if args.torch_npu:
        found.torch_npu = _torch_npu(args.torch_npu)
    for version, why in found.unavailable.items():
        say(f"{version}: not examined, {why}")
    if args.html:
        args.html.write_text(report.html(found, accepted), encoding="utf-8")
        say(f"wrote {args.html}")
    if args.json:
        print(found.as_json(accepted))
    elif args.markdown:
        command = " ".join(["python ci/check_drift.py", *argv])
        print(report.markdown(found, accepted, command), end="")
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 160
        print(report.text(found, accepted, width, args.all), end="")
    if args.accept:
        drift.save_baseline(args.baseline, found, accepted)
        say(f"accepted: {args.baseline}")
        return Exit.DONE
    if not found.examined:
        raise PatchsetError(Exit.UPSTREAM, "no version could be examined", "name versions that have an sdist")
    return Exit.NOT_SO if found.new(accepted) else Exit.DONE


def _versions(args: argparse.Namespace, pinned: pin.Pin) -> list[str]:
    named = [v.removeprefix("v") for v in args.versions]
    if named and args.latest is None:
        return named
    try:
        known = [v for v in snapshot.versions(pinned.project) if v not in named]
    except snapshot.Unavailable as problem:
        raise PatchsetError(Exit.UPSTREAM, str(problem), "name the versions to examine") from problem
    return [*named, *known[-(3 if args.latest is None else args.latest) :]]


def _torch_npu(versions: list[str]) -> dict | None:
    try:
        from patchset import npu_contract
    except ImportError as problem:
        say(f"torch-npu: not compared, patchset.npu_contract is not there ({problem})")
        return None
    try:
        return npu_contract.compare_schemas(versions)
    except npu_contract.Unavailable as problem:
        say(f"torch-npu: not compared, {problem}")
        return None


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
