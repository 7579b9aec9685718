"""Vocabularies as two makers write them, in terms of a GGUF file's metadata, of which `gguf.tokenizer` makes a
tokenizer.json: RWKV's World (a list of the tokens), and Moonshot's tiktoken.model (tokens with their ranks).
"""

from __future__ import annotations

import ast
import base64
import itertools
import re
from collections.abc import Callable, Mapping
from typing import Any

from localllm.gguf.tokenizer import (
    BYTE_ALPHABET,
    CONTROL,
    MAX_MERGES,
    MAX_PIECE_CHARACTERS,
    MAX_TOKENS,
    NORMAL,
    UNUSED,
    USER_DEFINED,
    escaped,
    spelled,
)

_WORLD_LINE = re.compile(r"""(\d{1,7}) (b?(?:'(?:[^'\\]|\\.){1,1024}'|"(?:[^"\\]|\\.){1,1024}")) (\d{1,4})""")
_RANKED_LINE = re.compile(r"([A-Za-z0-9+/=]{1,1024}) (\d{1,7})")
_NUM_RESERVED = 256  # ids of special tokens behind the ranked ones
_END_OF_TEXT = "<|rwkv_tokenizer_end_of_text|>"

Tokens = dict[int, bytes]


def world(text: str, declared: Mapping[int, Any]) -> dict[str, object]:
    """Read lines such as "257 '\\t\\t' 2": an id, a literal, its bytes. The longest match decides.

    declared: id -> added token. Raises ValueError for what is no such list.
    """

    def read(line: str) -> tuple[int, bytes]:
        found = _WORLD_LINE.fullmatch(line)
        if found is None:
            raise ValueError(line)
        literal = found[2]
        is_plain = literal[0] != "b" and "\\" not in literal
        value = literal[1:-1] if is_plain else ast.literal_eval(literal)
        token = value.encode() if isinstance(value, str) else value
        if len(token) != int(found[3]):
            raise ValueError(line)
        return int(found[1]), token

    tokens = _tokens(text, read)
    special = {} if 0 in tokens or 0 in declared else {0: _END_OF_TEXT}
    return _metadata("rwkv", {index: escaped(token) for index, token in tokens.items()}, special, declared)


def ranked(text: str, declared: Mapping[int, Any]) -> dict[str, object]:
    """Read lines such as "IGE= 257": a token in base64, its id, by which it is merged: the lowest first.

    declared: id -> added token. Raises ValueError for what is no such list.
    """

    def read(line: str) -> tuple[int, bytes]:
        found = _RANKED_LINE.fullmatch(line)
        if found is None:
            raise ValueError(line)
        return int(found[2]), base64.b64decode(found[1], validate=True)

    tokens = {index: spelled(token) for index, token in _tokens(text, read).items()}
    if missing := BYTE_ALPHABET.keys() - tokens.values():
        raise ValueError(f"it has no token for the byte {BYTE_ALPHABET[min(missing)]}")
    first = max(tokens) + 1
    reserved = {index: f"<|reserved_token_{index}|>" for index in range(first, first + _NUM_RESERVED)}
    return _metadata("gpt2", tokens, reserved, declared, pre="kimi-k2", merges=_merges(tokens))


def _merges(tokens: Mapping[int, str]) -> list[str]:
    """Return every way to put a token together of two, those of the lowest ids first."""
    known = set(tokens.values())
    found = (
        f"{token[:cut]} {token[cut:]}"
        for _, token in sorted(tokens.items())
        for cut in range(1, min(len(token), MAX_PIECE_CHARACTERS))
        if token[:cut] in known and token[cut:] in known
    )
    merges = list(itertools.islice(found, MAX_MERGES + 1))
    if len(merges) > MAX_MERGES:
        raise ValueError(f"its tokens can be put together in more than {MAX_MERGES} ways")
    return merges


def _tokens(text: str, read: Callable[[str], tuple[int, bytes]]) -> Tokens:
    tokens: Tokens = {}
    for number, line in enumerate(text.removesuffix("\n").split("\n"), 1):
        try:
            index, token = read(line.removesuffix("\r"))
        except (ValueError, SyntaxError):
            raise ValueError(f"line {number} is no token with its id: {line[:60]!r}") from None
        if index >= MAX_TOKENS or index in tokens:
            raise ValueError(f"line {number} has the id {index}, which is too high or another token's")
        tokens[index] = token
    return tokens


def _metadata(
    model: str, tokens: Mapping[int, str], special: Mapping[int, str], declared: Mapping[int, Any], **more: object
) -> dict[str, object]:
    """special: id -> text of the tokens that are special where `declared` has no other for the id."""
    size = max([*tokens, *special]) + 1
    added = {index: token for index, token in declared.items() if index < size and index not in tokens}
    texts = {**tokens, **special, **{index: token.content for index, token in added.items()}}
    kinds = {**dict.fromkeys(tokens, NORMAL), **dict.fromkeys(special, CONTROL)}
    kinds |= {index: CONTROL if token.special else USER_DEFINED for index, token in added.items()}
    values = {
        "model": model,
        "tokens": [texts.get(index, "") for index in range(size)],
        "token_type": [kinds.get(index, UNUSED) for index in range(size)],
        **more,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}
