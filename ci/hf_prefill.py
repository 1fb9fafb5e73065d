"""The transformers side of bench_hf.py: keeps one model and prefills on request, one JSON line for another.

Runs in an environment with torch and transformers 5.24.0, where neither vLLM nor this repository is installed.
stdin: first {"checkpoint", "threads", "memory_bytes"}, then {"prompt": [token ids], "trim": bool, "chunk": tokens
or null} a line.
stdout: first {"transformers", "torch", "attention", "threads"}, then a line per prompt: `rank_engines.measure`'s
figures and `token`, or {"error": what torch said} where the memory did not suffice.
"""

import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from make_golden import reference_model
from vllm_sfa_cp.rank_engines import measure  # make_golden puts overlay/ on the path


def prefill(model: Any, prompt: list[int], trim: bool, chunk: int | None) -> dict[str, Any]:
    """Figures and first token; the cache is filled, as it would be for the tokens to come. `chunk`: tokens per
    call, each call seeing the cache of those before; None: all in one."""
    ids = torch.tensor([prompt])
    tokens: list[int] = []

    def run() -> None:
        cache = None
        for piece in ids.split(chunk or len(prompt), dim=1):
            with torch.inference_mode():
                output = model(input_ids=piece, cache=cache, use_cache=True, logits_to_keep=1)
            cache = output.cache
        tokens.append(int(output.logits[0, -1].argmax()))

    try:
        return measure(run, kernels=False, trim=trim) | {"token": tokens[0]}
    except (MemoryError, RuntimeError) as err:
        if isinstance(err, MemoryError) or "can't allocate memory" in str(err):
            return {"error": str(err).splitlines()[0] if str(err) else "out of memory"}
        raise


def main() -> None:
    """Load, introduce, serve until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else prints must not look like an answer
    setup = json.loads(sys.stdin.readline())
    torch.set_num_threads(setup["threads"])
    model = reference_model(Path(setup["checkpoint"]))
    # An allocation that the machine cannot back must fail here, not take other processes with it.
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (setup["memory_bytes"], hard))
    about = {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "attention": model.config._attn_implementation,
        "threads": torch.get_num_threads(),
    }
    print(json.dumps(about), file=answers)
    for line in sys.stdin:
        print(json.dumps(prefill(model, **json.loads(line))), file=answers)


if __name__ == "__main__":
    main()
