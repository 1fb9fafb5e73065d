"""A byte-level tokenizer for random models: no download, one token per byte, and every id has a text."""

import itertools
import json
from pathlib import Path
from typing import Any

from .errors import UserError

BOS, EOS, USER, ASSISTANT = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
)
SPECIAL = (BOS, EOS, USER, ASSISTANT)
FIRST_BYTE = len(SPECIAL)  # id of byte b is FIRST_BYTE + b
_LETTERS = "etaoinshrdlucmfw"

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}" + USER + "{{ message['content'] }}"
    "{% elif message['role'] == 'assistant' %}" + ASSISTANT + "{{ message['content'] }}{{ eos_token }}"
    "{% else %}{{ message['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}" + ASSISTANT + "{% endif %}"
)


def byte_symbols() -> list[str]:
    """The printable character that stands for each byte in byte-level BPE vocabularies, by byte value."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = itertools.count(0x100)
    return [chr(b) if b in printable else chr(next(spare)) for b in range(256)]


def vocabulary(size: int) -> dict[str, int]:
    """Text of every id below `size`: special tokens, the 256 bytes, then words of two and more letters.

    Nothing merges into the words, so encoding gives one token per byte; a model may still answer with them.
    """
    words = ("".join(w) for n in itertools.count(2) for w in itertools.product(_LETTERS, repeat=n))
    tokens = itertools.chain(SPECIAL, byte_symbols(), words)
    return {token: i for i, token in enumerate(itertools.islice(tokens, size))}


def write_tokenizer(out: Path, vocab_size: int, max_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json (with a chat template) into `out`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    least = FIRST_BYTE + 256
    if vocab_size < least:
        raise UserError(
            f"vocab_size {vocab_size} is too small for a byte tokenizer", f"use {least} or more", 2
        )
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary(vocab_size), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[BOS, "$A"], pair=[BOS, "$A", "$B"], special_tokens=[(BOS, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer.save(str(out / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": EOS,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "chat_template": CHAT_TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=1, ensure_ascii=False) + "\n")
