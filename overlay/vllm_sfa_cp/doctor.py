"""`vllm-sfa-cp doctor`: what is active in this environment and why, and what is wrong with it."""

import argparse
import json
import sys
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any

from patchset.blob import blob_id
from patchset.store import Store, Unreadable
from patchset.target import STATE

from . import SUPPORTED_VLLM, __version__, config, patching
from .arguments import json_object
from .platforms import OURS, choose

PACKAGES = ("vllm", "torch", "transformers", "torch-npu", "vllm-ascend")
REAPPLY = f"run python apply.py --vllm v{SUPPORTED_VLLM}"


def add_doctor_parser(subparsers: Any) -> None:
    """Options of the verb."""
    parser = subparsers.add_parser("doctor", help="check versions, platform, patches and configuration")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument(
        "--additional-config",
        type=json_object,
        default={},
        metavar="JSON",
        help="also check this configuration",
    )


def run_doctor(args: argparse.Namespace) -> int:
    """Print the report; 0 if nothing is wrong, else 1."""
    report = examine(args.additional_config)
    if args.json:
        print(json.dumps(report))
    else:
        _print(report)
    return 0 if report["ok"] else 1


def examine(additional_config: Any = None) -> dict[str, Any]:
    """The report: ok, problems, versions, platform {name, active, reason}, patches [{name, state}],
    monkey_patches [{target, state, reason}], config {mode, ...} or null."""
    problems: list[str] = []
    versions: dict[str, str | None] = {"vllm-sfa-cp": __version__, "python": sys.version.split()[0]}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    import vllm
    from vllm.platforms import current_platform

    # A build leaves a local suffix in one of the two places.
    public = vllm.__version__.partition("+")[0]
    if public != SUPPORTED_VLLM:
        problems.append(f"vLLM is {vllm.__version__}, this overlay is for {SUPPORTED_VLLM}; {REAPPLY}")
    choice = choose()
    problems += _plugin_problems()
    patches = _patches(Path(vllm.__file__).parents[1], problems)
    monkey = _monkey_patches(choice.active, choice.device, problems)
    settings = None
    try:
        parsed = config.parse(additional_config or {})
        settings = {"mode": parsed.mode, **{k: getattr(parsed, k) for k in parsed.__dataclass_fields__}}
    except config.ConfigError as err:
        problems.append(str(err))
    return {
        "ok": not problems,
        "problems": problems,
        "versions": versions,
        "platform": {
            "name": f"{type(current_platform).__module__}.{type(current_platform).__qualname__}",
            "active": choice.active,
            "reason": choice.reason,
        },
        "patches": patches,
        "monkey_patches": monkey,
        "config": settings,
    }


def _plugin_problems() -> list[str]:
    """vLLM logs a plugin that fails to import and goes on without it; here it is a problem."""
    problems = []
    for group in ("vllm.platform_plugins", "vllm.general_plugins"):
        found = [point for point in entry_points(group=group) if point.name == OURS]
        if len(found) != 1:
            problems.append(f"{len(found)} plugins named {OURS} in {group}, wanted 1; {REAPPLY}")
        for point in found:
            try:
                point.load()
            except ImportError as err:
                problems.append(f"plugin {point.value} does not load: {err}; {REAPPLY}")
    return problems


def _patches(root: Path, problems: list[str]) -> list[dict[str, str]]:
    """Patches that were applied to the vLLM being imported, judged by the files themselves."""
    try:
        state = Store(root / STATE).state()
    except Unreadable as err:
        problems.append(f"the record of applied patches is damaged: {err}; {REAPPLY}")
        return []
    if state is None:
        problems.append(f"the vLLM in {root} is not patched; {REAPPLY}")
        return []
    changed = []
    for path, entry in state.files.items():
        file = root / path
        found = blob_id(file.read_bytes() if file.is_file() else None)
        if entry.kind == "source" and found != entry.after:
            changed.append(path)
    if changed:
        names = ", ".join(sorted(changed)[:3])
        problems.append(f"patched files have changed since ({names}), by a reinstall perhaps; {REAPPLY}")
    return [{"name": name, "state": "changed" if changed else "applied"} for name in state.patches]


def _monkey_patches(active: bool, device: str, problems: list[str]) -> list[dict[str, str]]:
    if active:
        from vllm.plugins import load_general_plugins

        load_general_plugins()
    report = []
    for patch in patching.PATCHES:
        wanted = active and patch.platform in ("any", device)
        state = "not wanted here"
        if wanted:
            try:
                patch.check()
                state = "active" if patch.active else "inactive"
            except patching.PatchError as err:
                state = "refused"
                problems.append(str(err))
            if state == "inactive":
                problems.append(f"monkey patch of {patch.target} is not active; {REAPPLY}")
        report.append({"target": patch.target, "state": state, "reason": patch.reason})
    return report


def _print(report: dict[str, Any]) -> None:
    versions = ", ".join(f"{name} {found}" for name, found in report["versions"].items() if found)
    print(f"versions        {versions}")
    print(f"platform        {report['platform']['name']}")
    print(f"                because {report['platform']['reason']}")
    for kind in ("patches", "monkey_patches"):
        for i, patch in enumerate(report[kind]):
            label = kind.replace("_", " ") if i == 0 else ""
            print(f"{label:15} {patch['state']:10} {patch.get('name') or patch['target']}")
    if report["config"] is not None:
        print(f"mode            {report['config']['mode']}")
    for problem in report["problems"]:
        print(f"problem         {problem}")
    print("ok" if report["ok"] else f"{len(report['problems'])} problems")
