"""Fixtures that several test modules share. torch comes late: the apply tests run where it is not installed."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from ranks import RankPool

if TYPE_CHECKING:
    import torch

GOLDEN = Path(__file__).parent / "golden/base"


@dataclass(frozen=True)
class Golden:
    """A checkpoint, and what Hugging Face's model says about it: greedy tokens, logits of the last position."""

    model: str
    prompts: list[list[int]]
    tokens: list[list[int]]
    logits: "list[torch.Tensor]"


@pytest.fixture(scope="session")
def pool(tmp_path_factory):
    """Four rank processes; they start with the first `run`."""
    with RankPool(4, str(tmp_path_factory.mktemp("ranks"))) as pool:
        yield pool


@pytest.fixture(scope="session")
def golden() -> Golden:
    from safetensors.torch import load_file

    cases = json.loads((GOLDEN / "expected/tokens.json").read_text())
    logits = load_file(GOLDEN / "expected/logits.safetensors")
    return Golden(
        str(GOLDEN),
        [case["prompt_token_ids"] for case in cases],
        [case["greedy"] for case in cases],
        [logits[f"logits.{i}"] for i in range(len(cases))],
    )
