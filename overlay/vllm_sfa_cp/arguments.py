"""Types of command-line arguments, shared by the verbs. Each refuses a wrong value in words."""

import argparse
import json
from collections.abc import Callable
from typing import Any

from .config import MAX_PREFETCH_STEP


def natural(text: str) -> int:
    """A whole number from 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0")
    return int(text)


def positive(text: str) -> int:
    """A whole number from 1."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def prefetch_step(text: str) -> int:
    """Layers fetched ahead, as `"sfa_cp": {"prefetch_step": k}` takes them."""
    if not text.isdecimal() or int(text) > MAX_PREFETCH_STEP:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to {MAX_PREFETCH_STEP}")
    return int(text)


def numbers(text: str) -> tuple[int, ...]:
    """Whole numbers from 1 between commas, each once."""
    return tuple(dict.fromkeys(positive(part) for part in text.split(",")))


def names(allowed: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
    """Names out of `allowed` between commas, each once."""

    def parse(text: str) -> tuple[str, ...]:
        found = tuple(dict.fromkeys(text.split(",")))
        if wrong := [name for name in found if name not in allowed]:
            raise argparse.ArgumentTypeError(f"{', '.join(wrong)}: choose from {', '.join(allowed)}")
        return found

    return parse


def json_object(text: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        value = json.loads(text)
    except ValueError as err:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {err}") from err
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value
