"""Ask Hugging Face's own DeepSeek-V3.2 what a checkpoint answers, and keep it as golden data.

vLLM v0.12.0 needs transformers < 5 and the reference needs 5.24.0, so this runs in an environment of its own:

    python3.11 -m venv build/golden
    build/golden/bin/pip install torch==2.13.0 transformers==5.24.0 safetensors numpy
    build/golden/bin/python ci/make_golden.py build/base --compare tests/golden/base
    build/golden/bin/python ci/make_golden.py build/deep --variant deep --variant-file ci/golden_variants.json

The first form draws a random checkpoint (`base` with seed 20 is tests/golden/base) and answers for it. A
checkpoint that exists already, for one of block FP8, is answered for by the dequantised weights in float32:

    .venv/bin/vllm-sfa-cp tiny-model build/fp8 --quant fp8 --seed 20
    build/golden/bin/python ci/make_golden.py tests/golden/fp8 --checkpoint build/fp8

OUT receives (config.json and model.safetensors only where the checkpoint was drawn here)

    expected/tokens.json          per prompt: token ids, greedy continuation, smallest top-1/top-2 margin
    expected/logits.safetensors   per prompt i: "logits.i", float32 [vocab], at the last prompt position
    expected/source.json          versions, and the sha256 of model.safetensors
"""

import argparse
import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.deepseek_v32.configuration_deepseek_v32 import DeepseekV32Config
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "overlay"))
from vllm_sfa_cp.block_fp8 import dequantise
from vllm_sfa_cp.shapes import SHAPES, release_config

LENGTHS = "1,2,3,31,32,33,100,257,700"
SCALE_SUFFIX = "_scale_inv"
LOGIT_TOLERANCE = 1e-4


def hf_config(release: dict[str, Any]) -> DeepseekV32Config:
    """transformers' configuration of a release's config.json; rope settings have moved and changed names."""
    values = {k: v for k, v in release.items() if k not in ("rope_scaling", "quantization_config")}
    rope = dict(release.get("rope_scaling") or {"type": "default"})
    rope |= {"rope_type": rope.pop("type"), "rope_theta": values.pop("rope_theta")}
    return DeepseekV32Config(**values | {"torch_dtype": "float32"}, rope_parameters=rope)


def draw_checkpoint(out: Path, shape: dict[str, Any], seed: int) -> None:
    """Write a random float32 checkpoint under the release's names.

    The draws follow the order of the model's own parameters: that order is part of what `seed` means.
    """
    release = release_config(shape)
    model = DeepseekV32ForCausalLM(hf_config(release)).float()
    gen = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(initial(name, torch.randn(p.shape, generator=gen)))
        for name, b in model.named_buffers():
            if "correction_bias" in name:
                b.copy_(0.1 * torch.randn(b.shape, generator=gen))
    with tempfile.TemporaryDirectory() as tmp:
        model.save_pretrained(tmp)  # undoes transformers' fused expert tensors
        tensors = {k: v for f in sorted(Path(tmp).glob("*.safetensors")) for k, v in load_file(f).items()}
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(release, indent=1) + "\n")


def initial(name: str, noise: torch.Tensor) -> torch.Tensor:
    """Scale noise so that activations keep their size and logits spread."""
    if "norm" in name and name.endswith("weight"):
        return 1 + 0.1 * noise
    if name.endswith("bias"):
        return 0.1 * noise
    if "embed_tokens" in name:
        return noise
    gain = 4 if "lm_head" in name else 1
    return gain * noise * noise.shape[-1] ** -0.5


def reference_model(checkpoint: Path) -> DeepseekV32ForCausalLM:
    """The checkpoint as transformers' float32 model; FP8 matrices are dequantised first."""
    release = json.loads((checkpoint / "config.json").read_text())
    stored = load_file(checkpoint / "model.safetensors")
    tensors = {}
    for name, value in stored.items():
        if not name.endswith(SCALE_SUFFIX):
            scale = stored.get(name + SCALE_SUFFIX)
            tensors[name] = value.float() if scale is None else dequantise(value, scale)
    with tempfile.TemporaryDirectory() as tmp:
        save_file(tensors, Path(tmp) / "model.safetensors", metadata={"format": "pt"})
        transformers.GenerationConfig().save_pretrained(tmp)  # or from_pretrained looks for one elsewhere
        model, info = DeepseekV32ForCausalLM.from_pretrained(
            tmp, config=hf_config(release), dtype=torch.float32, output_loading_info=True
        )
    problems = {k: v for k, v in info.items() if v}
    if problems:
        raise SystemExit(f"error: {checkpoint} does not load cleanly: {problems}")
    return model.eval()


@torch.no_grad()
def answer(
    model: DeepseekV32ForCausalLM, lengths: list[int], seed: int, new_tokens: int
) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """Greedy continuations of random prompts, recomputed in whole at every step (no cache to be wrong)."""
    gen = torch.Generator().manual_seed(seed + 1)
    prompts, first_logits = [], {}
    for i, length in enumerate(lengths):
        ids = torch.randint(2, model.config.vocab_size, (1, length), generator=gen)
        margins = []
        for step in range(new_tokens):
            logits = model(ids, use_cache=False).logits[0, -1]
            if step == 0:
                first_logits[f"logits.{i}"] = logits.clone()
            best = logits.topk(2)
            margins.append(float(best.values[0] - best.values[1]))
            ids = torch.cat([ids, best.indices[:1, None]], dim=1)
        prompt, greedy = ids[0, :length].tolist(), ids[0, length:].tolist()
        prompts.append({"prompt_token_ids": prompt, "greedy": greedy, "min_margin": round(min(margins), 5)})
    return prompts, first_logits


def differences(new: Path, old: Path) -> list[str]:
    """What differs between two folders with `expected/`; empty when they agree."""
    found = []
    a, b = (json.loads((d / "expected/tokens.json").read_text()) for d in (new, old))
    keys = ("prompt_token_ids", "greedy")
    if [[p[k] for k in keys] for p in a] != [[p[k] for k in keys] for p in b]:
        found.append("tokens differ")
    x, y = (load_file(d / "expected/logits.safetensors") for d in (new, old))
    if x.keys() != y.keys():
        return [*found, "numbers of prompts differ"]
    worst = max(float((x[k] - y[k]).abs().max()) for k in x)
    print(f"largest logit difference: {worst:.2e}", file=sys.stderr)
    if worst > LOGIT_TOLERANCE:
        found.append(f"logits differ by {worst:.2e}, more than {LOGIT_TOLERANCE:.0e}")
    weights = [d / "model.safetensors" for d in (new, old)]
    if all(w.exists() for w in weights) and weights[0].read_bytes() != weights[1].read_bytes():
        found.append("model.safetensors differs")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--checkpoint", type=Path, help="answer for this checkpoint instead of drawing one")
    parser.add_argument("--variant", default="base", help="a shape's name")
    parser.add_argument("--variant-file", type=Path, help="JSON {name: sizes that differ from base}")
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--lengths", default=LENGTHS, help="prompt lengths")
    parser.add_argument("--new-tokens", type=int, default=8)
    parser.add_argument("--compare", type=Path, help="golden folder; exit code 1 when it disagrees")
    args = parser.parse_args()

    checkpoint = args.checkpoint
    if checkpoint is None:
        shapes = dict(SHAPES)
        if args.variant_file:
            extra = json.loads(args.variant_file.read_text())
            shapes |= {name: {**SHAPES["base"], **sizes} for name, sizes in extra.items()}
        if args.variant not in shapes:
            parser.error(f"unknown variant {args.variant!r}; known: {', '.join(shapes)}")
        draw_checkpoint(args.out, shapes[args.variant], args.seed)
        checkpoint = args.out
    lengths = [int(n) for n in args.lengths.split(",")]
    prompts, logits = answer(reference_model(checkpoint), lengths, args.seed, args.new_tokens)

    expected = args.out / "expected"
    expected.mkdir(parents=True, exist_ok=True)
    (expected / "tokens.json").write_text(json.dumps(prompts) + "\n")
    save_file(logits, expected / "logits.safetensors")
    digest = hashlib.sha256((checkpoint / "model.safetensors").read_bytes()).hexdigest()
    source = {"model_sha256": digest, "transformers": transformers.__version__, "torch": torch.__version__}
    (expected / "source.json").write_text(json.dumps(source, indent=1) + "\n")
    print(f"{args.out}: smallest margins {[p['min_margin'] for p in prompts]}", file=sys.stderr)

    found = differences(args.out, args.compare) if args.compare else []
    for line in found:
        print(f"error: {args.compare}: {line}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
