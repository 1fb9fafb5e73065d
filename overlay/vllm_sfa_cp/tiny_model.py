"""Write a small random DeepSeek-V3.2 checkpoint that vLLM serves like a release.

The same shape, seed, dtype and quantisation give the same bytes on every machine: numbers come from integer
draws and correctly rounded arithmetic, and each tensor has a generator of its own.
"""

import argparse
import hashlib
import json
import math
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import UserError
from .shapes import SHAPES, Param, fp8_tp_sizes, load_shape, parameters, release_config

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "bfloat16")
QUANTISATIONS = ("none", "fp8")
FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def default_shape(quant: str) -> str:
    """Block FP8 needs sizes that are whole blocks; `base` is smaller than one."""
    return "fp8" if quant == "fp8" else "base"


def random_tensor(param: Param, seed: int) -> "torch.Tensor":
    """The float32 value of one parameter: roughly normal, scaled so that activations keep their size."""
    import torch

    digest = hashlib.blake2b(f"{seed}:{param.name}".encode(), digest_size=8).digest()
    gen = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    bits = torch.empty(param.shape, dtype=torch.int64).random_(generator=gen)
    # The sum of four 15-bit draws: exact integers, unlike torch.randn, whose last bit depends on the CPU.
    total = (bits & 0x7FFF) + ((bits >> 15) & 0x7FFF) + ((bits >> 30) & 0x7FFF) + ((bits >> 45) & 0x7FFF)
    noise = (total - 2 * 0x7FFF).float().mul_(math.sqrt(3) / 2**15)
    if param.kind == "norm":
        return noise.mul_(0.1).add_(1)
    if param.kind in ("bias", "router_bias"):
        return noise.mul_(0.1)
    if param.kind == "embed":
        return noise
    noise.mul_(1 / math.sqrt(param.shape[-1]))
    return _printable_head(noise.mul_(4)) if param.kind == "head" else noise


def _printable_head(weight: "torch.Tensor") -> "torch.Tensor":
    # Bytes that are no text on their own are made unlikely, so that answers read and stream like text.
    from .tiny_tokenizer import FIRST_BYTE

    unlikely = [FIRST_BYTE + b for b in range(256) if not 0x20 <= b < 0x7F]
    weight[unlikely] *= 0.05
    return weight


def checkpoint_tensors(shape: dict[str, Any], seed: int, quant: str, dtype: str) -> dict[str, "torch.Tensor"]:
    """All tensors of the checkpoint by release name; with fp8 also each `weight_scale_inv`."""
    import torch

    from .block_fp8 import quantise

    plain = getattr(torch, dtype)
    tensors = {}
    for param in parameters(shape):
        value = random_tensor(param, seed)
        if quant == "fp8" and param.quantised:
            weight, scale = quantise(value)
            tensors[param.name] = weight
            tensors[param.name + "_scale_inv"] = scale
        else:
            tensors[param.name] = value if param.full else value.to(plain)
    return tensors


def checkpoint_bytes(shape: dict[str, Any], quant: str, dtype: str) -> int:
    """Size of the weights, block scales left out."""
    wide = 4 if dtype == "float32" else 2
    return sum(
        p.numel * (1 if quant == "fp8" and p.quantised else 4 if p.full else wide) for p in parameters(shape)
    )


def write_checkpoint(
    out: Path,
    shape: dict[str, Any],
    seed: int = 0,
    quant: str = "none",
    dtype: str | None = None,
) -> None:
    """Write config, weights and tokenizer into `out`, which may hold an earlier checkpoint but nothing else.

    `dtype` is that of unquantised weights: float32 by default, bfloat16 in an FP8 checkpoint.
    """
    from safetensors.torch import save_file

    from .block_fp8 import QUANTIZATION_CONFIG
    from .tiny_tokenizer import write_tokenizer

    dtype = dtype or ("bfloat16" if quant == "fp8" else "float32")
    config = release_config(shape, dtype)
    if quant == "fp8":
        if not fp8_tp_sizes(shape):
            raise UserError(
                "vLLM cannot load this shape in block FP8",
                "q_lora_rank, intermediate_size and moe_intermediate_size must be multiples of 128"
                " (--shape fp8 is such a shape)",
                2,
            )
        config["quantization_config"] = QUANTIZATION_CONFIG
    _check_target(out, checkpoint_bytes(shape, quant, dtype))
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as err:
        raise UserError(
            f"{out} cannot be made: {err.strerror}", "give a folder that can be written", 2
        ) from err
    (out / "config.json").unlink(missing_ok=True)  # written last: without it nobody takes this for a model
    write_tokenizer(out, shape["vocab_size"], shape["max_position_embeddings"])
    tensors = checkpoint_tensors(shape, seed, quant, dtype)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    shutil.copymode(
        out / "tokenizer.json", out / "model.safetensors"
    )  # safetensors writes for its owner only
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def _check_target(out: Path, size: int) -> None:
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is not a folder", "give a new folder", 2)
    foreign = sorted({p.name for p in out.iterdir()} - set(FILES)) if out.exists() else []
    if foreign:
        # vLLM loads every *.safetensors beside config.json.
        raise UserError(f"{out} holds other files: {', '.join(foreign[:3])}", "give a new or empty folder", 2)
    parent = next(p for p in (out, *out.absolute().parents) if p.exists())
    free = shutil.disk_usage(parent).free
    if size > free:
        raise UserError(
            f"the weights need {size / 1e9:.1f} GB and {parent} has {free / 1e9:.1f} GB free",
            "choose a smaller shape",
        )


def add_tiny_model_parser(subparsers: Any) -> None:
    """Declare `vllm-sfa-cp tiny-model`."""
    parser = subparsers.add_parser("tiny-model", help="write a small random DeepSeek-V3.2 checkpoint")
    parser.add_argument("out", type=Path, help="folder to write (new, empty, or an earlier tiny model)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quant", choices=QUANTISATIONS, default="none")
    parser.add_argument(
        "--shape",
        metavar="NAME|config.json",
        help=f"{', '.join(SHAPES)}, or a config.json (default: base; with --quant fp8: fp8)",
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, help="of unquantised weights (default: float32; with fp8: bfloat16)"
    )


def run_tiny_model(args: argparse.Namespace) -> int:
    """Write the checkpoint; its path goes to stdout, the summary to stderr."""
    name = args.shape or default_shape(args.quant)
    shape = load_shape(name)
    write_checkpoint(args.out, shape, args.seed, args.quant, args.dtype)
    count = sum(p.numel for p in parameters(shape))
    size = (args.out / "model.safetensors").stat().st_size
    print(f"{name}: {count / 1e6:.1f} M parameters, {size / 1e6:.1f} MB, seed {args.seed}", file=sys.stderr)
    if args.quant == "fp8":
        sizes = ", ".join(map(str, fp8_tp_sizes(shape)))
        print(f"block FP8 loads at tensor-parallel size {sizes}", file=sys.stderr)
    print(args.out)
    return 0
