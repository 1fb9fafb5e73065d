#!/usr/bin/env python3
"""What would change if the overlay were moved to another vLLM: every patch and symbol, version by version.

    python ci/check_drift.py 0.13.0 0.14.1          # these versions
    python ci/check_drift.py --latest 3             # the newest three on the package index
    python ci/check_drift.py 0.14.1 --html out.html # with the diffs, on one page

Exit code: 0 nothing new against the accepted baseline, 1 new drift, 2 and above as in apply.py. Needs no vLLM and
no torch; downloading needs requirements/fetch.txt, which the environment that apply.py makes has.
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
BASELINE = ROOT / "ci" / "drift_baseline.json"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    made.add_argument(
        "versions", nargs="*", metavar="VERSION", help="upstream versions (default: --latest 3)"
    )
    made.add_argument("--latest", type=_count, metavar="N", help="the newest N versions on the package index")
    made.add_argument("--vllm", metavar="TAG", help="the patch set (default: what SUPPORTED_VLLM names)")
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
    made.add_argument(
        "--baseline", type=Path, metavar="FILE", help="what is accepted (default ci/drift_baseline.json)"
    )
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
    except BrokenPipeError:
        raise
    except OSError as problem:  # 1 would say that there is new drift
        say(f"error: {problem.filename or 'a file'}: {problem.strerror or problem}")
        say("hint: name files that can be read and written, on a disk with free space")
        return int(Exit.USAGE)


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _run(args: argparse.Namespace, argv: list[str]) -> int:
    pinned = pin.load(args.patches, args.vllm or pin.current(args.overlay))
    patches = series.load(pinned, manifest.load(pinned))
    baseline = args.baseline or BASELINE
    if args.baseline and not args.accept and not baseline.exists():
        raise PatchsetError(
            Exit.USAGE, f"--baseline {baseline}: no such file", "correct the path, or make one with --accept"
        )
    for option, path in (("--html", args.html), ("--baseline", baseline if args.accept else None)):
        if path is not None:
            _writable(option, path)
    accepted = drift.load_baseline(baseline)
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
    if not found.examined:
        raise PatchsetError(Exit.UPSTREAM, "no version could be examined", "name versions that have an sdist")
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
        drift.save_baseline(baseline, found, accepted)
        say(f"accepted: {baseline}")
        return Exit.DONE
    return Exit.NOT_SO if found.new(accepted) else Exit.DONE


def _writable(option: str, path: Path) -> None:
    """An examination takes minutes, so what it is to write to is looked at before."""
    if path.is_dir():
        why = "it is a folder"
    elif not path.parent.is_dir():
        why = f"there is no folder {path.parent}"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        why = "permission denied"
    else:
        return
    raise PatchsetError(Exit.USAGE, f"{option} {path} cannot be written: {why}", "name another file")


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
