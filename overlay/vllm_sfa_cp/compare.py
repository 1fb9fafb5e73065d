"""`vllm-sfa-cp compare A B`: run two configurations of one model over the same prompts and say where they part.

A and B are run one after the other in real engines, each over its own number of ranks. B is the reference.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .bench import ENGINE_ENV, checkpoint, prompt
from .bench_report import MODES, PARTITIONS, SOURCES, Configuration
from .errors import UserError
from .planner import ModelShape
from .progress import Progress

if TYPE_CHECKING:
    from .rank_compare import Answer

FORMS = (
    "MODE[/WEIGHTS][/PARTITION]@RANKS, for example off@1, flashcomm1@2 or sfa-cp/gather/balanced@4; "
    "or a JSON object of additional_config followed by @RANKS"
)
#: Largest difference by dtype: float32 absolute, bfloat16 relative L2 (a near-tie may select another key there).
TOLERANCE = {"float32": 2e-4, "bfloat16": 5e-2}


@dataclass(frozen=True)
class Side:
    """One of the two configurations."""

    text: str
    ranks: int
    additional_config: dict[str, Any]


def parse_side(text: str) -> Side:
    """UserError: not one of `FORMS`."""
    what, at, count = text.rpartition("@")
    if not at or not count.isdecimal() or int(count) == 0:
        raise UserError(f"{text!r} does not say on how many ranks", FORMS, 2)
    if what.startswith("{"):
        try:
            return Side(text, int(count), json.loads(what))
        except ValueError as err:
            raise UserError(f"{what!r} is not JSON: {err}", FORMS, 2) from err
    mode, *rest = what.split("/")
    weights = [part for part in rest if part in SOURCES]
    partition = [part for part in rest if part in PARTITIONS]
    known = len(weights) <= 1 and len(partition) <= 1 and len(weights) + len(partition) == len(rest)
    if mode not in MODES or not known or (rest and mode != "sfa-cp"):
        raise UserError(f"{what!r} is not a configuration", FORMS, 2)
    configuration = Configuration(mode, *(weights or ["gather"]), *(partition or ["balanced"]))
    return Side(text, int(count), configuration.additional_config(cp_min_tokens=0))


def add_compare_parser(subparsers: Any) -> None:
    """Declare `vllm-sfa-cp compare`."""
    parser = subparsers.add_parser("compare", help="compare outputs and numerics of two configurations")
    parser.add_argument("a", metavar="A", help=FORMS)
    parser.add_argument("b", metavar="B", help="the reference, likewise")
    parser.add_argument("--model", required=True, help="checkpoint, or a shape such as dsv32-128k/64")
    parser.add_argument("--model-b", help="another checkpoint for B")
    parser.add_argument("--dtype", default="float32", choices=tuple(TOLERANCE))
    parser.add_argument(
        "--tolerance", type=float, help="float32: absolute, default 2e-4; bfloat16: relative L2, default 5e-2"
    )
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="JSON list of lists of token ids, or a text prompt per line",
    )
    parser.add_argument(
        "--prompt-lengths",
        metavar="T,..",
        help="random prompts of so many tokens (default: around index_topk)",
    )
    parser.add_argument("--max-tokens", type=int, default=8, help="generated per prompt (default 8)")
    parser.add_argument("--layers", action="store_true", help="also the residual stream after every layer")
    parser.add_argument("--limit", type=float, default=1800, metavar="S", help="seconds one side may take")
    parser.add_argument("--json", action="store_true", help="one object on stdout, the table on stderr")


def run_compare(args: argparse.Namespace) -> int:
    """Compare and report; 1 past the tolerance."""
    sides = parse_side(args.a), parse_side(args.b)
    if args.max_tokens < 1:
        raise UserError("--max-tokens must be at least 1", exit_code=2)
    tolerance = TOLERANCE[args.dtype] if args.tolerance is None else args.tolerance
    with checkpoint(args.model, args.dtype) as (folder, shape):
        prompts = _prompts(args, folder, shape)
        folders = folder, args.model_b or folder
        runs = _answers(args, sides, folders, prompts)
    report = {
        "a": args.a,
        "b": args.b,
        "model": shape.name,
        "dtype": args.dtype,
        "tolerance": tolerance,
        "prompts": [
            compare(a, b, len(ids), args.dtype, tolerance) for a, b, ids in zip(*runs, prompts, strict=True)
        ],
    }
    report["within"] = all(found["within"] for found in report["prompts"])
    print(table(report), file=sys.stderr if args.json else sys.stdout)
    if args.json:
        print(json.dumps(report, indent=1))
    return 0 if report["within"] else 1


def compare(a: "Answer", b: "Answer", length: int, dtype: str, tolerance: float) -> dict[str, Any]:
    """What two answers to a prompt of `length` tokens have in common.

    parted: index of the first generated token that differs, None if none does. Logits are compared up to and
    with that token, since what follows answers another text. first_layer: the first layer whose stream differs
    by more than `tolerance` of its size (relative L2), None if none does or streams were not collected.
    within: tokens equal and logits within `tolerance`, absolute in float32 and relative L2 else. A NaN or
    another shape on either side is an `error`.
    """
    pairs = zip(a.tokens, b.tokens)
    parted = next((i for i, (x, y) in enumerate(pairs) if x != y), None)
    seen = len(b.tokens) if parted is None else parted + 1
    found: dict[str, Any] = {"length": length, "tokens": seen, "parted": parted, "error": None}
    from .numerics import MismatchError

    try:
        found["logits"] = distance(a.logits[:seen], b.logits[:seen])
        found["layers"] = [distance(x, y) for x, y in zip(a.layers, b.layers, strict=True)]
    except MismatchError as err:
        return {
            **found,
            "logits": None,
            "layers": [],
            "first_layer": None,
            "error": str(err),
            "within": False,
        }
    past = [i for i, layer in enumerate(found["layers"]) if layer["relative_l2"] > tolerance]
    found["first_layer"] = past[0] if past else None
    decides = "absolute" if dtype == "float32" else "relative_l2"
    found["within"] = parted is None and found["logits"][decides] <= tolerance
    return found


def distance(a: Any, b: Any) -> dict[str, float]:
    """Of tensors a and b, b the reference: largest absolute and relative difference, and |a - b| / |b|."""
    from .numerics import check_diff

    difference = check_diff(a, b)
    if not difference:
        return {"absolute": 0.0, "relative": 0.0, "relative_l2": 0.0}
    l2 = float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-300))
    return {"absolute": difference.absolute, "relative": difference.relative, "relative_l2": l2}


def _prompts(args: argparse.Namespace, folder: str, shape: ModelShape) -> list[list[int]]:
    if args.prompts and args.prompt_lengths:
        raise UserError("--prompts and --prompt-lengths exclude each other", exit_code=2)
    if args.prompts:
        return read_prompts(args.prompts, folder, shape.vocab_size)
    if args.prompt_lengths:
        parts = args.prompt_lengths.split(",")
        if not all(part.isdecimal() and int(part) for part in parts):
            raise UserError(f"--prompt-lengths {args.prompt_lengths}", "give numbers such as 1,300", 2)
        lengths = [int(part) for part in parts]
    else:  # one token; everything selected; a selection, at no multiple of any number of ranks
        topk = min(shape.index_topk, 256)
        lengths = [1, topk - 1, 4 * topk + 1]
    return [prompt(shape.vocab_size, length, length) for length in lengths]


def read_prompts(path: Path, folder: str, vocab: int) -> list[list[int]]:
    """Prompts of a file. UserError: it cannot be read, is empty, or names tokens that the model has not."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as err:
        raise UserError(f"cannot read {path}: {err}", "give a readable file", 2) from err
    try:
        prompts = json.loads(text)
    except ValueError:
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(folder)
        except Exception as err:  # what is raised for a folder without one changes from release to release
            raise UserError(
                f"{folder} has no tokenizer for text prompts", "give lists of token ids", 2
            ) from err
        prompts = [tokenizer(line)["input_ids"] for line in text.splitlines() if line.strip()]
    shaped = isinstance(prompts, list) and all(isinstance(ids, list) and ids for ids in prompts)
    if (
        not shaped
        or not prompts
        or not all(type(i) is int and 0 <= i < vocab for ids in prompts for i in ids)
    ):
        raise UserError(
            f"{path} does not hold prompts of this model",
            f"give a JSON list of lists of token ids below {vocab}, or one text prompt per line",
            2,
        )
    return prompts


def _answers(
    args: argparse.Namespace, sides: Sequence[Side], models: Sequence[str], prompts: Sequence[Sequence[int]]
) -> "list[list[Answer]]":
    """Per side and prompt, what its first rank says. UserError: an engine failed."""
    from .launch import RankError, RankPool

    longest = max(map(len, prompts))
    common = {
        "prompts": prompts,
        "max_tokens": args.max_tokens,
        "layers": args.layers,
        "dtype": args.dtype,
        "max_model_len": longest + args.max_tokens,
        "max_num_batched_tokens": max(longest, 4),
        "max_num_seqs": 4,
        "block_size": 16,
        "num_gpu_blocks_override": -(-(longest + args.max_tokens) // 16) + 8,
    }
    found = []
    logs = tempfile.TemporaryDirectory(prefix="sfa-cp-compare-")
    ranks = max(side.ranks for side in sides)
    with Progress(2) as progress, logs as folder, RankPool(ranks, folder, args.limit) as pool:
        for side, model in zip(sides, models):
            progress.begin(f"{side.text}: {len(prompts)} prompts")
            own = {
                "model": model,
                "tensor_parallel_size": side.ranks,
                "additional_config": side.additional_config,
            }
            try:
                answers = pool.run(
                    side.ranks, "vllm_sfa_cp.rank_compare:answers", {**common, **own}, ENGINE_ENV
                )
            except RankError as err:
                raise UserError(f"{side.text}: {str(err).strip().splitlines()[-1]}", str(err)) from err
            found.append(answers[0])
            progress.done(1, side.text)
    return found


def table(report: dict[str, Any]) -> str:
    """The report for people."""
    rows = [["prompt", "tokens", "logits abs", "rel", "rel L2", "first layer past tolerance", "result"]]
    for found in report["prompts"]:
        tokens = f"{found['tokens']} equal"
        if found["parted"] is not None:
            tokens = f"part at {found['parted']}"
        far = found["logits"]
        figures = ["-"] * 3 if far is None else [f"{far[key]:.1e}" for key in far]
        layer = "-" if found["first_layer"] is None else str(found["first_layer"])
        result = found["error"] or ("within" if found["within"] else "past tolerance")
        rows.append([f"{found['length']} tokens", tokens, *figures, layer, result])
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    for found in report["prompts"]:
        if found["layers"]:
            lines.append(f"\n{found['length']} tokens, residual stream after layer: abs, rel L2")
            lines += [
                f"  {i:3d}  {layer['absolute']:.1e}  {layer['relative_l2']:.1e}"
                for i, layer in enumerate(found["layers"])
            ]
    verdict = "agree" if report["within"] else "part"
    unit = "absolute" if report["dtype"] == "float32" else "relative L2"
    return "\n".join(
        [*lines, f"\n{report['a']} and {report['b']} {verdict} ({report['tolerance']:g} {unit})"]
    )
