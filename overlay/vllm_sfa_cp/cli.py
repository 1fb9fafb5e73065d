"""`vllm-sfa-cp`: one verb per job. Data goes to stdout, everything meant for people to stderr.

Only the chosen verb's module is imported, so that `--help` and a usage error answer at once.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NoReturn

from . import SUPPORTED_VLLM, __version__
from .errors import UserError


@dataclass(frozen=True)
class Verb:
    """A subcommand: `module` defines `run_NAME(args) -> int` and may define `add_NAME_parser(subparsers)`."""

    module: str
    help: str
    add: Callable[[Any], None] | None = None

    def function(self, prefix: str, name: str, suffix: str = "") -> str:
        return f"{prefix}_{name.replace('-', '_')}{suffix}"


def _add_doctor(subparsers: Any) -> None:
    parser = subparsers.add_parser("doctor", help=VERBS["doctor"].help)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


VERBS: dict[str, Verb] = {
    "tiny-model": Verb("tiny_model", "write a small random DeepSeek-V3.2 checkpoint"),
    "doctor": Verb("doctor", "check versions, platform, patches and configuration", _add_doctor),
    "demo": Verb("demo", "serve a tiny model with SFA-CP and send two requests"),
    "plan": Verb("cli_plan", "predict work, memory and speed-up of every mode"),
    "compare": Verb("compare", "compare outputs and numerics of two configurations"),
    "bench": Verb("cli_bench", "measure configurations side by side"),
}


class _Parser(argparse.ArgumentParser):
    """argparse with this project's error lines."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message, f"see {self.prog} --help", 2)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb. Exit code: 0 done, 1 the thing asked for does not hold, 2 usage."""
    # vLLM's own log goes to stdout otherwise.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    arguments = list(sys.argv[1:] if argv is None else argv)
    chosen = next((a for a in arguments if not a.startswith("-")), None)
    try:
        module = _load(chosen) if chosen in VERBS else None
        args = _parser(chosen, module).parse_args(arguments)
        if args.verb is None:
            raise UserError("no command given", "see vllm-sfa-cp --help", 2)
        assert module is not None
        return _run(args, getattr(module, VERBS[args.verb].function("run", args.verb)))
    except UserError as err:
        print(f"error: {err}", file=sys.stderr)
        if err.hint:
            print(f"hint: {err.hint}", file=sys.stderr)
        return err.exit_code
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130


def _load(name: str) -> ModuleType:
    target = f"{__package__}.{VERBS[name].module}"
    try:
        return importlib.import_module(target)
    except ModuleNotFoundError as err:
        if err.name == target:
            raise UserError(f"this build has no {name!r} command") from err
        raise _missing(name, err) from err


def _run(args: argparse.Namespace, verb: Callable[[argparse.Namespace], int]) -> int:
    try:
        return int(verb(args))
    except ModuleNotFoundError as err:
        if (err.name or "").partition(".")[0] == __package__:
            raise
        raise _missing(args.verb, err) from err


def _missing(verb: str, err: ModuleNotFoundError) -> UserError:
    hint = "run inside the environment that apply.py made, for example .venv/bin/vllm-sfa-cp"
    return UserError(f"{verb} needs the module {err.name}, which is not installed", hint)


def _parser(chosen: str | None, module: ModuleType | None) -> argparse.ArgumentParser:
    parser = _Parser(prog="vllm-sfa-cp", description=f"SFA-CP for DeepSeek-V3.2 on vLLM v{SUPPORTED_VLLM}")
    parser.add_argument("--version", action="version", version=f"vllm-sfa-cp {__version__}")
    subparsers = parser.add_subparsers(dest="verb", metavar="COMMAND")
    for name, verb in VERBS.items():
        if name == chosen and (add := getattr(module, verb.function("add", name, "_parser"), verb.add)):
            add(subparsers)
        else:
            subparsers.add_parser(name, help=verb.help)
    return parser


if __name__ == "__main__":
    sys.exit(main())
