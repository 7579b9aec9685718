"""The files of a tokenizer in a model folder: tokenizer.json, or vocab.json and merges.txt where that is all there is.

Reads them with limits. Knows their formats, not what the tokens are for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from localllm.errors import TokenizerError

MAX_FILE_BYTES = 48 << 20  # the largest in use (a vocabulary of 262144) has 33 MB
MAX_CONFIG_BYTES = 16 << 20
SPECIAL_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

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
        """The file's text. Raises TokenizerError if it is absent, too large or no UTF-8."""
        path = self.directory / name
        try:
            size = path.stat().st_size
            if size > limit_bytes:
                raise self.error(name, "is too large", f"{size} bytes; at most {limit_bytes}")
            return path.read_text(encoding="utf-8")
        except OSError as error:
            raise self.error(name, "cannot be read", error.strerror or str(error)) from error
        except UnicodeDecodeError as error:
            raise self.error(name, "is no UTF-8 text", f"byte {error.start}: {error.reason}") from error

    def json(self, name: str, limit_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
        """The JSON object in the file; {} if there is no such file."""
        if not self.has(name):
            return {}
        try:
            data = json.loads(self.text(name, limit_bytes))
        except (ValueError, RecursionError) as error:
            raise self.error(name, "is no JSON", f"{error}; the file may be cut short") from error
        if not isinstance(data, dict):
            raise self.error(name, "is not a JSON object", f"it holds a {type(data).__name__}")
        return data

    def config(self) -> dict[str, Any]:
        """tokenizer_config.json over special_tokens_map.json."""
        return self.json("special_tokens_map.json") | self.json("tokenizer_config.json")

    def serialized(self) -> tokenizers.Tokenizer | None:
        """The tokenizer in tokenizer.json, or None if there is no such file."""
        name = "tokenizer.json"
        if not self.has(name):
            return None
        text = self.text(name)
        with _Naming(self, name):
            return tokenizers.Tokenizer.from_str(text)

    def add_missing_tokens(self, backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
        """Give `backend` the added tokens that only tokenizer_config.json or added_tokens.json declares."""
        declared = _declared_tokens(config) or _listed_tokens(self.json("added_tokens.json"))
        present = set(backend.get_added_tokens_decoder())
        for index, token in sorted(declared.items(), key=lambda item: item[0]):
            if index in present:
                continue
            backend.add_tokens([token])
            if (actual := backend.token_to_id(token.content)) != index:
                raise TokenizerError(
                    f"{self.directory} gives the token {token.content!r} an id that it cannot have",
                    why=f"declared as {index}, the vocabulary makes it {actual}",
                    fix="download the model's files again",
                )

    def error(self, name: str, what: str, why: str) -> TokenizerError:
        return TokenizerError(
            f"{self.directory / name} {what}", why=why, fix="download the model's files again: localllm pull MODEL"
        )


class _Naming:
    """Turns whatever the tokenizers library raises, panics included, into a TokenizerError that names the file."""

    def __init__(self, files: TokenizerFiles, name: str) -> None:
        self._files = files
        self._name = name

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None or isinstance(error, (KeyboardInterrupt, SystemExit, TokenizerError)):
            return
        raise self._files.error(self._name, "is no tokenizer that can be read", str(error)[:300]) from error


def byte_level_bpe(files: TokenizerFiles, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """A byte-level BPE from vocab.json and merges.txt, with the words of the tokenizer_class in `config`."""
    _require_vocabulary(files)
    kind = config.get("tokenizer_class") or ""
    if kind not in _QWEN2_CLASSES + _GPT2_CLASSES:
        raise TokenizerError(
            f"{files.directory} has no tokenizer.json",
            why=f"vocab.json and merges.txt alone do not say how a {kind} splits words",
            fix="use a repository with a tokenizer.json",
        )
    with _Naming(files, "merges.txt"):
        merges = [
            (left, right)
            for line in files.text("merges.txt").split("\n")
            if line and not line.startswith("#version")
            for left, _, right in (line.rstrip("\r").partition(" "),)
        ]
        model = models.BPE(vocab=files.json("vocab.json", MAX_FILE_BYTES), merges=merges)
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
    """Role -> text of the special tokens that tokenizer_config.json names."""
    roles: dict[str, str] = {}
    for role in SPECIAL_ROLES:
        token = config.get(role)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str) and text:
            roles[role] = text
    return roles


def _require_vocabulary(files: TokenizerFiles) -> None:
    missing = [name for name in ("vocab.json", "merges.txt") if not files.has(name)]
    if missing:
        known = "only tokenizer.model, which is not read" if files.has("tokenizer.model") else "no tokenizer"
        raise TokenizerError(
            f"{files.directory} has no tokenizer.json",
            why=f"{known}; {' and '.join(missing)} missing as well",
            fix="use a repository with a tokenizer.json",
        )


def _declared_tokens(config: Mapping[str, Any]) -> dict[int, AddedToken]:
    """tokenizer_config.json: {"added_tokens_decoder": {"151643": {"content": ...}}}."""
    declared = config.get("added_tokens_decoder")
    if not isinstance(declared, dict):
        return {}
    tokens = {}
    for index, entry in declared.items():
        content = entry.get("content") if isinstance(entry, dict) else None
        if not (index.isascii() and index.isdigit() and isinstance(content, str) and content):
            raise TokenizerError(
                "tokenizer_config.json declares a malformed added token", why=f"{index[:40]!r}: {str(entry)[:200]}"
            )
        flags = {key: entry.get(key) is True for key in ("single_word", "lstrip", "rstrip", "normalized", "special")}
        tokens[int(index)] = AddedToken(content, **flags)
    return tokens


def _listed_tokens(listed: Mapping[str, Any]) -> dict[int, AddedToken]:
    """added_tokens.json: {"<|im_end|>": 151645}."""
    return {
        index: AddedToken(content, normalized=False)
        for content, index in listed.items()
        if isinstance(index, int) and content
    }
