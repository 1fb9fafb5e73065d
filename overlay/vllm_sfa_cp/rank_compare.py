"""What one rank of a comparison does: answer prompts, and say what it computed on the way. For `RankPool`."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from .launch import engine

if TYPE_CHECKING:  # whoever reads an answer need not have vLLM imported, which writes to stdout
    from .layers.step import Step


@dataclass
class Answer:
    """Of one prompt of T tokens: greedy tokens [N]; logits [N, vocab] float32 that chose them; the residual stream
    after every layer, [T, hidden] each, in the prompt's order (empty unless asked for)."""

    tokens: list[int]
    logits: torch.Tensor
    layers: list[torch.Tensor] = field(default_factory=list)


def answers(
    model: str, prompts: list[list[int]], max_tokens: int, layers: bool, **kwargs: Any
) -> list[Answer]:
    """One engine, the prompts one after the other, each prefilled in one step. kwargs: of vLLM's LLM.

    Ranks other than the first return nothing: they hold the same.
    """
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, logprobs=-1
    )
    given = {"max_logprobs": -1, "logprobs_mode": "raw_logits", "enable_prefix_caching": False, **kwargs}
    found = []
    with engine(model, **given) as llm:
        inner = llm.collective_rpc(lambda worker: worker.model_runner.get_model())[0].model
        for prompt in prompts:
            with _layers(inner, len(prompt), layers) as streams:
                [out] = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
            steps = out.outputs[0].logprobs
            logits = torch.tensor([[step[i].logprob for i in range(len(step))] for step in steps])
            found.append(Answer(list(out.outputs[0].token_ids), logits, streams))
        return found if torch.distributed.get_rank() == 0 else []


@contextmanager
def _layers(inner: Any, tokens: int, wanted: bool) -> Iterator[list[torch.Tensor]]:
    """Collect the residual stream of the first forward, whole and in order. Every rank enters: it communicates."""
    streams: list[torch.Tensor] = []
    blocks = list(inner.layers[inner.start_layer : inner.end_layer])

    def keep(hidden_states: torch.Tensor, residual: torch.Tensor, step: "Step | None") -> None:
        if len(streams) < len(blocks):
            stream = hidden_states + residual
            streams.append((step.unshard(stream) if step else stream)[:tokens].float())

    def rows(block: Any) -> Any:
        original = type(block).forward_rows

        def forward_rows(step: "Step", *args: Any, **kwargs: Any) -> Any:
            out = original(block, step, *args, **kwargs)
            keep(out[0], out[1], step)
            return out

        return forward_rows

    if not wanted:
        yield streams
        return
    hooks = []
    for block in blocks:
        if hasattr(block, "forward_rows"):
            block.forward_rows = rows(block)
        else:
            hooks.append(block.register_forward_hook(lambda module, args, out: keep(out[0], out[1], None)))
    try:
        yield streams
    finally:
        for hook in hooks:
            hook.remove()
        for block in blocks:
            block.__dict__.pop("forward_rows", None)
