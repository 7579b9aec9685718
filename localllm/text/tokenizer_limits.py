"""Limit the files of a tokenizer: sizes before anything is built, and components that neither panic nor explode.

Owns the numbers. The tokenizers library checks the formats; what it would panic about, or fill the memory with, is
refused here. Knows no file names and no tokens.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterator
from math import prod
from typing import Any

import tokenizers

from localllm.models.strict_json import JsonLimits

MAX_VOCAB = 1 << 20  # four times the largest vocabulary in use
MAX_FILE_BYTES = 48 << 20  # the largest in use (a vocabulary of 262144) has 33 MB
# A vocabulary of MAX_VOCAB with a merge for each, all as lists; objects are few, but braces are also in tokens.
VOCABULARY = JsonLimits(MAX_FILE_BYTES, objects=200_000, containers=3 << 19, elements=6 << 20)
SETTINGS = JsonLimits(16 << 20, objects=100_000, containers=200_000, elements=2_000_000)

_MAX_GROWTH = 16  # what all steps together may make of one character
_MAX_CHARSMAP_RULE_BYTES = 64  # twice what NFKC makes of one character
_MAX_PREFIX = 16
_MAX_PIECES_BYTES = 5 << 19  # of a Unigram model: its search takes 340 bytes of memory for each
MAX_ADDED_BYTES = 1 << 20  # of the added tokens: their search takes a second for each million
_TEXT = rb'"((?:[^"\\]|\\.)*+)"'
_PIECE = re.compile(rb"\[\s*" + _TEXT + rb"\s*,\s*[-0-9]", re.DOTALL)
_ADDED = re.compile(rb'"content"\s*:\s*' + _TEXT, re.DOTALL)
_CHARSMAP = re.compile(rb'"precompiled_charsmap"\s*:\s*' + _TEXT, re.DOTALL)
_LETTER_AS_ESCAPE = re.compile(rb"(?<!\\)(?:\\\\)*+\\u00(?:5f|6[1-9a-f]|7[0-9a])", re.IGNORECASE)


def require_readable_keys(data: bytes) -> None:
    """Raises ValueError for a tokenizer.json that writes letters as escapes: its keys could not be searched for."""
    if found := _LETTER_AS_ESCAPE.search(data):
        raise ValueError(f"it writes a letter as {found[0][-6:].decode()} at byte {found.end() - 6}")


def require_small_search(data: bytes) -> None:
    """Raises ValueError if a tokenizer.json has more text than can be searched for in time and memory."""
    for pattern, name, limit_bytes in (
        (_PIECE, "pieces", _MAX_PIECES_BYTES),
        (_ADDED, "added tokens", MAX_ADDED_BYTES),
    ):
        size_bytes = sum(found.end(1) - found.start(1) for found in pattern.finditer(data))
        if size_bytes > limit_bytes:
            raise ValueError(f"its {name} have {size_bytes} bytes together; at most {limit_bytes}")


def require_sound_charsmaps(data: bytes) -> None:
    """Raises ValueError for a character map in a tokenizer.json that cannot be read, or that makes much of little."""
    for found in _CHARSMAP.finditer(data):
        try:
            charsmap = base64.b64decode(found[1], validate=True)
        except binascii.Error as error:
            raise ValueError(f"its precompiled_charsmap is no base64: {error}") from None
        trie_end = 4 + int.from_bytes(charsmap[:4], "little")
        if not 4 < trie_end <= len(charsmap) or trie_end % 4:
            raise ValueError(f"its precompiled_charsmap of {len(charsmap)} bytes is cut")
        longest = max(map(len, charsmap[trie_end:].split(b"\0")))
        if longest > _MAX_CHARSMAP_RULE_BYTES:
            raise ValueError(f"its precompiled_charsmap makes {longest} bytes of one character")


def require_sound_components(backend: tokenizers.Tokenizer) -> None:
    """Raises ValueError for a component that would panic or fill the memory once text comes in."""
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        component = getattr(backend, name)
        parts = [] if component is None else list(_parts(json.loads(component.__getstate__())))
        growth = prod(map(_growth, parts))
        if growth > _MAX_GROWTH:
            raise ValueError(f"its {name} can make {growth:.4g} characters of one; at most {_MAX_GROWTH}")
        for part in parts:
            _require_sound(part)
    prefix = getattr(backend.model, "continuing_subword_prefix", None) or ""
    if len(prefix) > _MAX_PREFIX:
        raise ValueError(f"its continuing_subword_prefix has {len(prefix)} characters; at most {_MAX_PREFIX}")


def _parts(value: Any) -> Iterator[dict[str, Any]]:
    """Yield a component and every component in it."""
    if isinstance(value, dict):
        if "type" in value:
            yield value
        for item in value.values():
            yield from _parts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _parts(item)


def _growth(part: dict[str, Any]) -> float:
    """Return the most characters that one character can become."""
    match part:
        case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)} if pattern:
            return max(1.0, len(content) / len(pattern))
        case {"type": "Replace", "content": str(content)}:
            return 1 + len(content)  # a pattern that matches nothing puts it before every character
        case {"type": "Prepend", "prepend": str(text)}:
            return 1 + len(text)
        case {"type": "ByteLevel" | "Precompiled"}:
            return 2
    return 1


def _require_sound(part: dict[str, Any]) -> None:
    match part:
        case {"type": "FixedLength", "length": 0}:
            raise ValueError("its pre_tokenizer cuts text into pieces of no length")
        case {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": declared}:
            used = {piece["SpecialToken"]["id"] for piece in [*single, *pair] if "SpecialToken" in piece}
            if missing := sorted(used - declared.keys()):
                raise ValueError(
                    f"its post_processor uses a special token that it does not declare: {missing[0]!r:.80}"
                )
