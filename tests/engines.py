"""What rank processes do in engine tests: build an engine, run prompts, report. Imported inside `RankPool`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm_sfa_cp import launch


@contextmanager
def engine(model: str, **kwargs: Any) -> Iterator[Any]:
    """`launch.engine` with defaults fit for tests."""
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 2048,
        "max_logprobs": -1,
        "logprobs_mode": "raw_logits",
        "num_gpu_blocks_override": 96,
    }
    # Short test prompts are meant to take the CP path; the planner would send them down the TP path.
    extra = kwargs.get("additional_config", {})
    if extra.get("enable_sfa_cp"):
        kwargs["additional_config"] = {**extra, "sfa_cp": {"cp_min_tokens": 0, **extra.get("sfa_cp", {})}}
    with launch.engine(model, **{**defaults, **kwargs}) as llm:
        yield llm


def generate(llm: Any, prompts: list[list[int]], max_tokens: int = 8, logits: bool = True) -> list[dict]:
    """Of every prompt, all in flight at once: greedy `tokens`, the first step's `logits` [vocab], and how many
    of its tokens came from the prefix cache (`cached`)."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0,
        max_tokens=max_tokens,
        logprobs=-1 if logits else None,
        ignore_eos=True,
        detokenize=False,
    )
    outs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    results = []
    for out in outs:
        result: dict[str, Any] = {"tokens": list(out.outputs[0].token_ids), "cached": out.num_cached_tokens}
        if logits:
            first = out.outputs[0].logprobs[0]
            result["logits"] = torch.tensor([first[i].logprob for i in range(len(first))])
        results.append(result)
    return results


def run(model: str, prompts: list[list[int]], max_tokens: int = 8, rounds: int = 1, **kwargs: Any) -> list:
    """One engine, `rounds` times the same prompts; returns [round][prompt]."""
    with engine(model, **kwargs) as llm:
        return [generate(llm, prompts, max_tokens) for _ in range(rounds)]
