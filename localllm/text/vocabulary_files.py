"""Vocabularies as two makers write them, in terms of a GGUF file's metadata, of which `gguf.tokenizer` makes a
tokenizer.json: RWKV's World (a list of the tokens), and Moonshot's tiktoken.model (tokens with their ranks).
"""

from __future__ import annotations

import ast
import base64
import re
from collections.abc import Callable, Mapping
from typing import Any

from localllm.gguf.tokenizer import escaped, spelled

WORLD, RANKED = "rwkv_vocab_v20230424.txt", "tiktoken.model"
_MAX_TOKENS = 1 << 20
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5  # GGUF's numbers
_WORLD_LINE = re.compile(r"""(\d{1,7}) (b?(?:'.{1,1024}'|".{1,1024}")) (\d{1,4})""")
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
        is_plain = literal[0] != "b" and "\\" not in literal and literal[0] not in literal[1:-1]
        value = literal[1:-1] if is_plain else ast.literal_eval(literal)
        token = value.encode() if isinstance(value, str) else bytes(value)
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
    known = set(tokens.values())
    merges = [
        f"{token[:cut]} {token[cut:]}"
        for _, token in sorted(tokens.items())
        for cut in range(1, len(token))
        if token[:cut] in known and token[cut:] in known
    ]
    first = max(tokens) + 1
    reserved = {index: f"<|reserved_token_{index}|>" for index in range(first, first + _NUM_RESERVED)}
    return _metadata("gpt2", tokens, reserved, declared, pre="kimi-k2", merges=merges)


def _tokens(text: str, read: Callable[[str], tuple[int, bytes]]) -> Tokens:
    tokens: Tokens = {}
    for number, line in enumerate(text.splitlines(), 1):
        try:
            index, token = read(line)
        except (ValueError, SyntaxError):
            raise ValueError(f"line {number} is no token with its id: {line[:60]!r}") from None
        if index >= _MAX_TOKENS or index in tokens:
            raise ValueError(f"line {number} has the id {index}, which is too high or another token's")
        tokens[index] = token
    if not tokens:
        raise ValueError("it is empty")
    return tokens


def _metadata(
    model: str, tokens: Mapping[int, str], special: Mapping[int, str], declared: Mapping[int, Any], **more: object
) -> dict[str, object]:
    """special: id -> text of the tokens that are special where `declared` has no other for the id."""
    size = max([*tokens, *special]) + 1
    added = {index: token for index, token in declared.items() if index < size and index not in tokens}
    texts = {**tokens, **special, **{index: token.content for index, token in added.items()}}
    kinds = {**dict.fromkeys(tokens, _NORMAL), **dict.fromkeys(special, _CONTROL)}
    kinds |= {index: _CONTROL if token.special else _USER_DEFINED for index, token in added.items()}
    values = {
        "model": model,
        "tokens": [texts.get(index, "") for index in range(size)],
        "token_type": [kinds.get(index, _UNUSED) for index in range(size)],
        **more,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}
