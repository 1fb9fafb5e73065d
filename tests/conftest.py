"""Fixtures that several test modules share."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from ranks import RankPool
from safetensors.torch import load_file

GOLDEN = Path(__file__).parent / "golden/base"


@dataclass(frozen=True)
class Golden:
    """A checkpoint, and what Hugging Face's model says about it: greedy tokens, logits of the last position."""

    model: str
    prompts: list[list[int]]
    tokens: list[list[int]]
    logits: list[torch.Tensor]


@pytest.fixture(scope="session")
def pool(tmp_path_factory):
    """Four rank processes; they start with the first `run`."""
    with RankPool(4, str(tmp_path_factory.mktemp("ranks"))) as pool:
        yield pool


@pytest.fixture(scope="session")
def golden() -> Golden:
    cases = json.loads((GOLDEN / "expected/tokens.json").read_text())
    logits = load_file(GOLDEN / "expected/logits.safetensors")
    return Golden(
        str(GOLDEN),
        [case["prompt_token_ids"] for case in cases],
        [case["greedy"] for case in cases],
        [logits[f"logits.{i}"] for i in range(len(cases))],
    )
