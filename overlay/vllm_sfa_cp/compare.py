"""`vllm-sfa-cp compare A B`: run two configurations of one model over the same prompts and say where they part.

A and B are run one after the other in real engines, each over its own number of ranks. B is the reference.
"""

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import config as sfa_config
from .arguments import numbers, positive
from .bench import ENGINE_ENV, checkpoint, prompt
from .bench_report import MODES, PARTITIONS, SOURCES, Configuration
from .compare_report import compare, strict, table
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
    """UserError: not one of `FORMS`, or settings that no engine would take."""
    what, at, count = text.strip().rpartition("@")
    if not at or not count.isdecimal() or int(count) == 0:
        raise UserError(f"{text!r} does not say on how many ranks", FORMS, 2)
    if what.startswith("{"):
        try:
            given = json.loads(what)
            sfa_config.parse(given, ENGINE_ENV)
        except sfa_config.ConfigError as err:
            raise UserError(f"{text}: {err}", FORMS, 2) from err
        except ValueError as err:
            raise UserError(f"{what!r} is not JSON: {err}", FORMS, 2) from err
        return Side(text, int(count), given)
    mode, *rest = what.split("/")
    weights = [part for part in rest if part in SOURCES]
    partition = [part for part in rest if part in PARTITIONS]
    known = len(weights) <= 1 and len(partition) <= 1 and len(weights) + len(partition) == len(rest)
    if mode not in MODES or not known or (rest and mode != "sfa-cp"):
        raise UserError(f"{what!r} is not a configuration", FORMS, 2)
    configuration = Configuration(mode, *(weights or ["gather"]), *(partition or ["balanced"]))
    # What is compared is the mode that was asked for, at every length.
    return Side(text, int(count), configuration.additional_config(cp_min_tokens=0))


def add_compare_parser(subparsers: Any) -> None:
    """Declare `vllm-sfa-cp compare`."""
    parser = subparsers.add_parser(
        "compare",
        help="compare outputs and numerics of two configurations",
        description="Greedy tokens and the logits that chose them: of the last position of the prompt, and of every "
        "generated position up to where the tokens part. Exits 0 if all tokens are equal and the logits are within "
        "the tolerance, 1 if not, 2 if the request is wrong. In bfloat16 rounding decides "
        "near-ties between tokens, keys and experts, and right configurations part too: compare off@1 with off@2 "
        "for a yardstick.",
    )
    parser.add_argument("a", metavar="A", help=FORMS)
    parser.add_argument("b", metavar="B", help="the reference, likewise")
    parser.add_argument("--model", required=True, help="checkpoint, or a shape such as dsv32-128k/64")
    parser.add_argument("--model-b", help="another checkpoint for B")
    parser.add_argument("--dtype", default="float32", choices=tuple(TOLERANCE))
    parser.add_argument(
        "--tolerance",
        type=_tolerance,
        metavar="D",
        help="of logits; float32: absolute, default 2e-4; bfloat16: relative L2, default 5e-2",
    )
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="JSON list of lists of token ids, or a text prompt per line",
    )
    prompts.add_argument(
        "--prompt-lengths",
        type=numbers,
        metavar="T,..",
        help="random prompts of so many tokens (default: one, below index_topk, above it)",
    )
    parser.add_argument("--max-tokens", type=positive, default=8, help="generated per prompt (default 8)")
    parser.add_argument(
        "--layers",
        action="store_true",
        help="also the residual stream of the prompt after every layer, and the first whose relative L2 is past D",
    )
    parser.add_argument("--limit", type=float, default=1800, metavar="S", help="seconds one side may take")
    parser.add_argument("--json", action="store_true", help="one object on stdout, the table on stderr")


def _tolerance(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a tolerance")
    return value


def run_compare(args: argparse.Namespace) -> int:
    """Compare and report; 1 past the tolerance."""
    sides = parse_side(args.a), parse_side(args.b)
    tolerance = TOLERANCE[args.dtype] if args.tolerance is None else args.tolerance
    with (
        checkpoint(args.model, args.dtype) as (folder, shape),
        checkpoint(args.model_b or folder, args.dtype) as (folder_b, shape_b),
    ):
        _check(sides, (shape, shape_b))
        prompts = _prompts(args, folder, shape)
        runs = _answers(args, sides, (folder, folder_b), prompts)
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
        print(json.dumps(strict(report), indent=1, allow_nan=False))
    return 0 if report["within"] else 1


def _check(sides: Sequence[Side], shapes: Sequence[ModelShape]) -> None:
    """UserError: ranks that the heads do not divide over, or models whose numbers do not correspond."""
    for side, shape in zip(sides, shapes):
        if (heads := shape.num_attention_heads) % side.ranks:
            raise UserError(
                f"{side.text}: {heads} heads do not divide over {side.ranks} ranks", "change @RANKS", 2
            )
    sizes = ("num_hidden_layers", "hidden_size", "vocab_size")
    if apart := [size for size in sizes if len({getattr(shape, size) for shape in shapes}) > 1]:
        raise UserError(
            f"--model and --model-b differ in {', '.join(apart)}", "give checkpoints of one model", 2
        )


def _prompts(args: argparse.Namespace, folder: str, shape: ModelShape) -> list[list[int]]:
    """What both sides are asked. UserError: prompts that are none, or too long for the model."""
    if args.prompts:
        prompts = read_prompts(args.prompts, folder, shape.vocab_size)
    else:
        # One token; every key selected; a selection, of an odd number of tokens and so padded on any even ranks.
        few = min(shape.index_topk, 256)
        lengths = args.prompt_lengths or (1, max(1, few - 1), shape.index_topk + 3 * few + 1)
        prompts = [prompt(shape.vocab_size, length, length) for length in lengths]
    longest = max(map(len, prompts)) + args.max_tokens
    room = shape.max_position_embeddings
    if room and longest > room:
        raise UserError(
            f"a prompt and its answer take {longest} positions, and the model has {room}",
            "give shorter prompts or fewer --max-tokens",
            2,
        )
    return prompts


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
        progress.say(f"starting {ranks} rank(s), then an engine per configuration")
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
