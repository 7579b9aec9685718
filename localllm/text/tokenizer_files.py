"""Read the tokenizer of a model folder: tokenizer.json, or vocab.json and merges.txt where that is all there is.

Reads with limits, and turns every failure of the tokenizers library into a TokenizerError. Knows the formats of the
files, not the use of the tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from localllm.errors import FETCH_ANEW, CheckpointError, LocalLLMError, TokenizerError
from localllm.models.families import load_config
from localllm.models.strict_json import JsonLimits, parse_json_object, read_bounded, require_few_values
from localllm.text.tokenizer_limits import (
    MAX_ADDED_BYTES,
    MAX_FILE_BYTES,
    MAX_VOCAB,
    SETTINGS,
    VOCABULARY,
    require_readable_keys,
    require_small_search,
    require_sound_charsmaps,
    require_sound_components,
)

SPECIAL_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

_EXTRAS = ("additional_special_tokens", "extra_special_tokens")


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's printable stand-in for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in printable]
    return {chr(value): value for value in printable} | {chr(256 + i): value for i, value in enumerate(others)}


BYTE_ALPHABET = _byte_alphabet()
_TOKEN_ID = re.compile(r"[0-9]{1,9}")

# Qwen2's and Qwen3's words: digits one by one, at most one other character in front of letters.
_QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_CLASSES = ("Qwen2Tokenizer", "Qwen2TokenizerFast", "Qwen3Tokenizer", "Qwen3TokenizerFast")
_GPT2_CLASSES = ("GPT2Tokenizer", "GPT2TokenizerFast", "CodeGenTokenizer", "GPTNeoXTokenizerFast", "")


class TokenizerFiles:
    """Reads tokenizer files from one folder; every error names the file."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def has(self, name: str) -> bool:
        return (self.directory / name).is_file()

    def text(self, name: str, limit_bytes: int = MAX_FILE_BYTES) -> str:
        """Return the file's text. Raises TokenizerError if it is absent, too large or no UTF-8."""
        try:
            return self._bytes(name, limit_bytes).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(name, "is no UTF-8 text", f"byte {error.start}: {error.reason}") from error

    def json(self, name: str, limits: JsonLimits = SETTINGS) -> dict[str, Any]:
        """Return the JSON object in the file; {} if there is no such file."""
        if not self.has(name):
            return {}
        with _as_tokenizer_error():
            return parse_json_object(self._bytes(name, limits.size_bytes), str(self.directory / name), limits)

    def config(self) -> dict[str, Any]:
        """Return tokenizer_config.json over special_tokens_map.json."""
        return self.json("special_tokens_map.json") | self.json("tokenizer_config.json")

    def num_ids(self) -> int | None:
        """Return the number of rows of the model in this folder; None where none is described."""
        with suppress(LocalLLMError):
            return load_config(self.directory).vocab_size
        return None

    def serialized(self) -> tokenizers.Tokenizer | None:
        """Return the tokenizer in tokenizer.json, or None if there is no such file."""
        name = "tokenizer.json"
        if not self.has(name):
            return None
        data = self._bytes(name, VOCABULARY.size_bytes)
        with _as_tokenizer_error():
            require_few_values(data, str(self.directory / name), VOCABULARY)
        with self.naming(name):
            require_readable_keys(data)
            require_sound_charsmaps(data)
            require_small_search(data)
            backend = tokenizers.Tokenizer.from_buffer(data)
            require_sound_components(backend)
            return backend

    def add_missing_tokens(self, backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
        """Give `backend` the added tokens that only tokenizer_config.json or added_tokens.json declares."""
        declared = _declared_tokens(self, config) or _listed_tokens(self.json("added_tokens.json"))
        present = set(backend.get_added_tokens_decoder())
        missing = {index: declared[index] for index in sorted(declared.keys() - present)}
        if (size := sum(len(token.content) for token in missing.values())) > MAX_ADDED_BYTES:
            why = f"{size} characters together; at most {MAX_ADDED_BYTES}"
            raise TokenizerError(
                f"{self.directory}: tokenizer_config.json or added_tokens.json declares too many tokens",
                why=why,
                fix=FETCH_ANEW,
            )
        backend.add_tokens(list(missing.values()))  # at once: each call builds the search for all of them anew
        for index, token in missing.items():
            if (actual := backend.token_to_id(token.content)) != index:
                raise TokenizerError(
                    f"{self.directory} gives the token {token.content[:40]!r} an id that it cannot have",
                    why=f"declared as {index}, the vocabulary makes it {actual}",
                    fix=FETCH_ANEW,
                )

    def naming(self, name: str) -> AbstractContextManager[None]:
        """Name this file in errors of the library."""
        return library_errors(f"{self.directory / name} is no tokenizer that can be read")

    def _bytes(self, name: str, limit_bytes: int) -> bytes:
        with _as_tokenizer_error():
            return read_bounded(self.directory / name, limit_bytes)

    def error(self, name: str, what: str, why: str) -> TokenizerError:
        return TokenizerError(f"{self.directory / name} {what}", why=why, fix=FETCH_ANEW)


@contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Turn any error of the tokenizers library into a TokenizerError: a panic in it is a bare BaseException."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, LocalLLMError):
        raise
    except BaseException as error:
        raise TokenizerError(what, why=str(error)[:300] or type(error).__name__, fix=FETCH_ANEW) from error


@contextmanager
def _as_tokenizer_error() -> Iterator[None]:
    try:
        yield
    except CheckpointError as error:
        raise TokenizerError(error.what, why=error.why, fix=error.fixes) from error


def byte_level_bpe(files: TokenizerFiles, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Return a byte-level BPE from vocab.json and merges.txt, with the words of the tokenizer_class in `config`."""
    _require_vocabulary(files)
    kind = config.get("tokenizer_class") or ""
    if kind not in _QWEN2_CLASSES + _GPT2_CLASSES:
        raise TokenizerError(
            f"{files.directory} has no tokenizer.json",
            why=f"vocab.json and merges.txt alone do not say how a {str(kind)[:60]} splits words",
            fix="use a repository with a tokenizer.json",
        )
    vocab = _read_vocab(files)
    merges = _read_merges(files)
    with files.naming("merges.txt"):
        model = models.BPE(vocab=vocab, merges=merges)
    backend = tokenizers.Tokenizer(model)
    prefix_space = config.get("add_prefix_space") is True
    words = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space, use_regex=kind not in _QWEN2_CLASSES)
    if kind in _QWEN2_CLASSES:
        backend.normalizer = normalizers.NFC()
        split = pre_tokenizers.Split(Regex(_QWEN2_WORDS), behavior="isolated", invert=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, words])
    else:
        backend.pre_tokenizer = words
    backend.decoder = decoders.ByteLevel()
    return backend


def special_roles(config: Mapping[str, Any]) -> dict[str, str]:
    """Return role -> text of the special tokens that tokenizer_config.json names, also with roles of its own."""
    named = {**{name: token for name, token in config.items() if name.endswith("_token")}, **_named_extras(config)}
    return {name: text for name, token in named.items() if (text := _text_of(token))}


def declared_special(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return text -> flags of every token that tokenizer_config.json declares special; {} without flags of its own."""
    found: dict[str, Mapping[str, Any]] = {text: {} for text in special_roles(config).values()}
    for key in _EXTRAS:
        extras = config.get(key)
        found |= {text: {} for token in (extras if isinstance(extras, list) else ()) if (text := _text_of(token))}
    decoder = config.get("added_tokens_decoder")
    for entry in decoder.values() if isinstance(decoder, dict) else ():
        text = _text_of(entry)
        if isinstance(entry, dict) and text and (entry.get("special") is True or text in found):
            found[text] = entry
    return found


def _named_extras(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return {"image_token": "<image>"}, which newer forms of tokenizer_config.json have."""
    extras = config.get("extra_special_tokens")
    return extras if isinstance(extras, dict) else {}


def _text_of(token: object) -> str:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


def _require_vocabulary(files: TokenizerFiles) -> None:
    missing = [name for name in ("vocab.json", "merges.txt") if not files.has(name)]
    if missing:
        known = "only tokenizer.model, which is not read" if files.has("tokenizer.model") else "no tokenizer"
        raise TokenizerError(
            f"{files.directory} has no tokenizer.json",
            why=f"{known}; {' and '.join(missing)} missing as well",
            fix="use a repository with a tokenizer.json",
        )


def _read_vocab(files: TokenizerFiles) -> dict[str, int]:
    vocab = files.json("vocab.json", VOCABULARY)
    wrong = next((item for item in vocab.items() if type(item[1]) is not int or not 0 <= item[1] < MAX_VOCAB), None)
    if wrong is not None:
        raise files.error("vocab.json", "is no vocabulary", f"the id of {wrong[0][:40]!r} is {str(wrong[1])[:40]}")
    return vocab


def _read_merges(files: TokenizerFiles) -> list[tuple[str, str]]:
    text = files.text("merges.txt")
    if (count := text.count("\n")) > MAX_VOCAB:
        raise files.error("merges.txt", "has too many lines", f"{count}; at most {MAX_VOCAB}")
    return [
        (left, right)
        for line in text.split("\n")
        if line and not line.startswith("#version")
        for left, _, right in (line.rstrip("\r").partition(" "),)
    ]


def _declared_tokens(files: TokenizerFiles, config: Mapping[str, Any]) -> dict[int, AddedToken]:
    """Read tokenizer_config.json: {"added_tokens_decoder": {"151643": {"content": ...}}}."""
    declared = config.get("added_tokens_decoder")
    if not isinstance(declared, dict):
        return {}
    tokens = {}
    for index, entry in declared.items():
        content = entry.get("content") if isinstance(entry, dict) else None
        if not (_TOKEN_ID.fullmatch(index) and isinstance(content, str) and content):
            why = f"{index[:40]!r}: {str(entry)[:200]}"
            raise files.error("tokenizer_config.json", "declares a malformed added token", why)
        flags = {key: entry.get(key) is True for key in ("single_word", "lstrip", "rstrip", "normalized", "special")}
        tokens[int(index)] = AddedToken(content, **flags)
    return tokens


def _listed_tokens(listed: Mapping[str, Any]) -> dict[int, AddedToken]:
    """Read added_tokens.json: {"<|im_end|>": 151645}."""
    return {
        index: AddedToken(content, normalized=False)
        for content, index in listed.items()
        if type(index) is int and content
    }
