#!/usr/bin/env python3
"""Open at most one GitHub issue with the drift that no issue, open or closed, has named before.

    python ci/check_drift.py --latest 3 --json > drift.json
    python ci/report_drift.py drift.json [--dry-run]

Uses the `gh` command with its own credentials. A (version, item) pair is reported once and never again, also when
its issue was closed: closing is how a maintainer says that it is known. Exit code: 0 done, 2 what was given or `gh`
does not serve.
"""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

LABEL = "drift"
MARK = re.compile(r"<!-- drift (\{.*?\}) -->", re.S)
LARGEST = 60_000  # characters; the body of an issue ends at 65,536

Pairs = dict[str, dict[str, str]]  # version -> item id -> state


def unreported(new: Pairs, bodies: list[str]) -> Pairs:
    """The part of `new` that the bodies of earlier issues do not name."""
    known: set[tuple[str, str]] = set()
    for body in bodies:
        for found in MARK.findall(body):
            known |= {(version, item) for version, items in json.loads(found).items() for item in items}
    left = {v: {i: s for i, s in items.items() if (v, i) not in known} for v, items in new.items()}
    return {version: items for version, items in left.items() if items}


def issue(pairs: Pairs, pinned: str, details: dict[str, dict[str, dict[str, str]]]) -> tuple[str, str]:
    """(title, body) that names as many of the pairs as fit; the rest is for the next run."""
    lines, named = (
        [f"Against vLLM {pinned}; run `python ci/check_drift.py VERSION --html drift.html` for diffs.", ""],
        {},
    )
    size = len(lines[0])
    for version, items in pairs.items():
        rows = [f"## {version}", ""]
        for item, state in items.items():
            detail = details.get(item, {}).get(version, {}).get("detail", "")
            row = f"- `{item}`: {state}{f', {detail}' if detail else ''}"[:400]
            size += len(row) + len(item) + 8
            if size > LARGEST:
                break
            rows.append(row)
            named.setdefault(version, []).append(item)
        if version in named:
            lines += [*rows, ""]
    mark = f"<!-- drift {json.dumps(named)} -->"
    return f"Drift: {', '.join(named)}", "\n".join([*lines, mark])


class Unusable(Exception):
    """What was given does not serve; `args` are the error and the hint that names the mend."""


def load(path: Path) -> dict:
    """What check_drift.py --json printed. Raises Unusable."""
    hint = "make it with: python ci/check_drift.py --latest 3 --json > drift.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise Unusable(f"{path} cannot be read: {problem.strerror}", hint) from problem
    except ValueError as problem:
        raise Unusable(f"{path} is not JSON: {problem}", hint) from problem
    kinds = {"new": dict, "pinned": str, "cells": dict}
    lacks = [k for k, kind in kinds.items() if not (isinstance(data, dict) and isinstance(data.get(k), kind))]
    if lacks:
        raise Unusable(f"{path} is no report of drift: it has no {', '.join(lacks)}", hint)
    return data


def gh(*arguments: str, text: str | None = None) -> str:
    """Run gh and return what it prints. Raises Unusable."""
    try:
        return subprocess.run(
            ["gh", *arguments], input=text, text=True, check=True, stdout=subprocess.PIPE
        ).stdout
    except OSError as problem:
        raise Unusable(
            f"gh cannot be run: {problem.strerror}", "install GitHub's command line, or use --dry-run"
        ) from problem
    except subprocess.CalledProcessError as problem:
        raise Unusable(
            f"gh {' '.join(arguments[:2])} ended with {problem.returncode}", "its output above says why"
        ) from problem


def main() -> None:
    """Compare with earlier issues, then open one or none."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("report", type=Path, help="what check_drift.py --json printed")
    parser.add_argument("--dry-run", action="store_true", help="print the issue, ask and open nothing")
    args = parser.parse_args()
    report = load(args.report)
    bodies = []
    if not args.dry_run:
        listed = gh("issue", "list", "--label", LABEL, "--state", "all", "--limit", "1000", "--json", "body")
        bodies = [entry["body"] for entry in json.loads(listed)]
    pairs = unreported(report["new"], bodies)
    if not pairs:
        print("nothing that has not been reported")
        return
    title, body = issue(pairs, report["pinned"], report["cells"])
    if args.dry_run:
        print(f"{title}\n\n{body}")
        return
    gh("label", "create", LABEL, "--force", "--description", "upstream changed under the overlay")
    print(gh("issue", "create", "--label", LABEL, "--title", title, "--body-file", "-", text=body).strip())


if __name__ == "__main__":
    try:
        main()
    except Unusable as problem:
        print("error: {}\nhint: {}".format(*problem.args), file=sys.stderr)
        sys.exit(2)
