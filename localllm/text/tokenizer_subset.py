"""Leave out of a tokenizer what its model has no row for: the other tokens spell those texts.

Knows the format of tokenizer.json. Knows no model: the caller says how many ids there are.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

_SPLITTERS = ("pre_tokenizer", "normalizer", "decoder")
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


def subset(tokenizer: Mapping[str, Any], size: int, alphabet: Collection[str]) -> dict[str, Any]:
    """Return the content of a tokenizer.json with ids below `size` alone.

    alphabet: of byte-level tokens.
    Raises ValueError where some text could then not be spelled at all.
    """
    added = [token for token in tokenizer.get("added_tokens") or () if token["id"] < size]
    model = dict(tokenizer["model"])
    vocab = model["vocab"]
    if isinstance(vocab, list):  # of Unigram: the id is the place
        model["vocab"], gone = vocab[:size], {text for text, _ in vocab[size:]}
        has_unknown = model.get("unk_id") is None or model["unk_id"] < size
    else:
        model["vocab"] = {text: index for text, index in vocab.items() if index < size}
        gone = vocab.keys() - model["vocab"].keys()
        has_unknown = model.get("unk_token") not in gone
    is_byte_level = any("'ByteLevel'" in repr(tokenizer.get(part)) for part in _SPLITTERS)
    _require_spelling(model, gone, alphabet if is_byte_level else None)
    if not has_unknown:
        if isinstance(vocab, list) or not (is_byte_level or model.get("byte_fallback")):
            raise ValueError("the token for what is unknown is one of them")
        model["unk_token"] = None  # every text has bytes
    if "merges" in model:
        prefix = len(model.get("continuing_subword_prefix") or "")
        model["merges"] = [merge for merge in model["merges"] if gone.isdisjoint(_texts(merge, prefix))]
    return {**tokenizer, "added_tokens": added, "model": model}


def _texts(merge: str | list[str], prefix: int) -> tuple[str, str, str]:
    """Return the two texts that are merged, and the result."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right, left + right[prefix:]


def _require_spelling(model: Mapping[str, Any], gone: Collection[str], alphabet: Collection[str] | None) -> None:
    """Raises ValueError where one of these is the only way to write something."""
    if alphabet is not None:
        needed = [text for text in gone if text in alphabet]
    elif model.get("byte_fallback"):
        needed = [text for text in gone if _BYTE.fullmatch(text)]
    elif model.get("type") == "WordLevel":
        needed = list(gone)
    else:
        needed = [text for text in gone if len(text.removeprefix("##")) == 1]
    if needed:
        raise ValueError(f"{min(needed)!r} is one of them, and cannot be written without it")
