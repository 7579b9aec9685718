"""Read the tokenizer of a model folder: tokenizer.json, or, where there is none, a vocabulary in another form.

Limits sizes before anything is built, refuses components that would panic or explode, and turns every failure of the
tokenizers library, which checks the formats, into a TokenizerError. Knows the formats of the files, not the use of the
tokens.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from localllm.errors import FETCH_ANEW, CheckpointError, LocalLLMError, TokenizerError
from localllm.gguf.tokenizer import BYTE_ALPHABET, hf_tokenizer, spelled
from localllm.hub.repo_cache import RANKED, WORLD
from localllm.models.families import load_config
from localllm.models.strict_json import JsonLimits, parse_json_object, read_bounded, require_few_values
from localllm.text.vocabulary_files import ranked, world

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
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")

SPECIAL_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

_EXTRAS = ("additional_special_tokens", "extra_special_tokens")

_TOKEN_ID = re.compile(r"[0-9]{1,9}")

# Qwen2's and Qwen3's words: digits one by one, at most one other character in front of letters.
_QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_CLASSES = ("Qwen2Tokenizer", "Qwen2TokenizerFast", "Qwen3Tokenizer", "Qwen3TokenizerFast")
_GPT2_CLASSES = ("GPT2Tokenizer", "GPT2TokenizerFast", "CodeGenTokenizer", "GPTNeoXTokenizerFast", "")


_UNREAD = "tokenizer.model"  # of SentencePiece
_VOCABULARIES: Mapping[str, Callable[..., dict[str, object]]] = MappingProxyType({WORLD: world, RANKED: ranked})
_LEAST_SHARE = 0.5  # of a model's rows: a file that has fewer tokens has lost its end
_RANKED_CLASS = "TikTokenTokenizer"  # which splits words as Kimi's


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
            raise self.error(name, "is not UTF-8 text", f"byte {error.start}: {error.reason}") from error

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

    @property
    def name(self) -> str:
        """The file that has the vocabulary."""
        return next(filter(self.has, ("tokenizer.json", *_VOCABULARIES)), "vocab.json")

    def backend(self, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
        """Return the tokenizer in tokenizer.json, or of the vocabulary that is there instead."""
        name = self.name
        if name in _VOCABULARIES:
            return self._of_vocabulary(name, config)
        if name != "tokenizer.json":
            return self._byte_level_bpe(config)
        data = self._bytes(name, VOCABULARY.size_bytes)
        with _as_tokenizer_error():
            require_few_values(data, str(self.directory / name), VOCABULARY)
        with self._naming(name):
            _require_bounded(data)
            backend = tokenizers.Tokenizer.from_buffer(data)
            _require_sound_components(backend)
            return backend

    def add_missing_tokens(self, backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
        """Give `backend` the added tokens that only tokenizer_config.json or added_tokens.json declares."""
        declared = self._declared_tokens(config) or {
            index: AddedToken(content, normalized=False)
            for content, index in self.json("added_tokens.json").items()  # {"<|im_end|>": 151645}
            if type(index) is int and content
        }
        present = set(backend.get_added_tokens_decoder())
        missing = {index: declared[index] for index in sorted(declared.keys() - present)}
        missing = {index: token for index, token in missing.items() if not _is_ordinary(backend, index, token.content)}
        if (size := sum(len(token.content) for token in missing.values())) > MAX_ADDED_BYTES:
            what = f"{self.directory}: tokenizer_config.json or added_tokens.json declares too many tokens"
            raise TokenizerError(what, why=f"{size} characters together; at most {MAX_ADDED_BYTES}", fix=FETCH_ANEW)
        backend.add_tokens(list(missing.values()))  # at once: each call builds the search for all of them anew
        for index, token in missing.items():
            if (actual := backend.token_to_id(token.content)) != index:
                what = f"{self.directory} gives the token {token.content[:40]!r} an id that it cannot have"
                raise TokenizerError(what, why=f"declared as {index}, the vocabulary makes it {actual}", fix=FETCH_ANEW)

    def error(self, name: str, what: str, why: str) -> TokenizerError:
        return TokenizerError(f"{self.directory / name} {what}", why=why, fix=FETCH_ANEW)

    def _naming(self, name: str) -> AbstractContextManager[None]:
        return library_errors(f"{self.directory / name} is not a tokenizer that can be read")

    def _bytes(self, name: str, limit_bytes: int) -> bytes:
        with _as_tokenizer_error():
            return read_bounded(self.directory / name, limit_bytes)

    def _of_vocabulary(self, name: str, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
        """Return the tokenizer of a vocabulary in the form of its maker."""
        read, kind = _VOCABULARIES[name], config.get("tokenizer_class")
        if name == RANKED and kind != _RANKED_CLASS:
            what = f"{self.directory} has no tokenizer.json"
            why = f"{name} alone does not say how a {str(kind)[:60]} splits words"
            raise TokenizerError(what, why=why, fix="use a repository with a tokenizer.json")
        try:
            metadata = read(self.text(name), self._declared_tokens(config))
        except ValueError as error:
            raise self.error(name, "is not a vocabulary", str(error)) from error
        tokens, size = metadata["tokenizer.ggml.tokens"], self.num_ids()
        if size is not None and isinstance(tokens, list) and len(tokens) < _LEAST_SHARE * size:
            why = f"{len(tokens)} tokens, where the model has {size} rows"
            raise self.error(name, "is cut, or another model's", why)
        content, _ = hf_tokenizer(metadata, str(self.directory / name))
        with self._naming(name):
            return tokenizers.Tokenizer.from_str(json.dumps(content))

    def _byte_level_bpe(self, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
        """Return a tokenizer with the words of the tokenizer_class in `config`."""
        kind = config.get("tokenizer_class") or ""
        is_qwen = kind in _QWEN2_CLASSES
        why = ""
        if missing := [name for name in ("vocab.json", "merges.txt") if not self.has(name)]:
            known = f"only {_UNREAD}, which is not read" if self.has(_UNREAD) else "no tokenizer"
            others = ", ".join(_VOCABULARIES)
            why = f"{known}; {' and '.join(missing)} missing as well, and so are {others}"
        elif not (is_qwen or kind in _GPT2_CLASSES):
            why = f"vocab.json and merges.txt alone do not say how a {str(kind)[:60]} splits words"
        if why:
            fix = "use a repository with a tokenizer.json"
            raise TokenizerError(f"{self.directory} has no tokenizer.json", why=why, fix=fix)
        vocab, merges = self.json("vocab.json", VOCABULARY), self.text("merges.txt")
        for text, index in vocab.items():
            if type(index) is not int or not 0 <= index < MAX_VOCAB:
                raise self.error("vocab.json", "is not a vocabulary", f"the id of {text[:40]!r} is {str(index)[:40]}")
        if (count := merges.count("\n")) > MAX_VOCAB:
            raise self.error("merges.txt", "has too many lines", f"{count}; at most {MAX_VOCAB}")
        lines = [line.rstrip("\r") for line in merges.split("\n") if line and not line.startswith("#version")]
        pairs = [(left, right) for left, _, right in (line.partition(" ") for line in lines)]
        with self._naming("merges.txt"):
            backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=pairs))
        prefix_space = config.get("add_prefix_space") is True
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space, use_regex=not is_qwen)
        if is_qwen:
            backend.normalizer = normalizers.NFC()
            split = pre_tokenizers.Split(Regex(_QWEN2_WORDS), behavior="isolated", invert=False)
            backend.pre_tokenizer = pre_tokenizers.Sequence([split, backend.pre_tokenizer])
        backend.decoder = decoders.ByteLevel()
        return backend

    def _declared_tokens(self, config: Mapping[str, Any]) -> dict[int, AddedToken]:
        """Read tokenizer_config.json: {"added_tokens_decoder": {"151643": {"content": ...}}}."""
        declared = config.get("added_tokens_decoder")
        tokens = {}
        for index, entry in declared.items() if isinstance(declared, dict) else ():
            content = entry.get("content") if isinstance(entry, dict) else None
            if not (_TOKEN_ID.fullmatch(index) and isinstance(content, str) and content):
                why = f"{index[:40]!r}: {str(entry)[:200]}"
                raise self.error("tokenizer_config.json", "declares a malformed added token", why)
            flags = {
                key: entry.get(key) is True for key in ("single_word", "lstrip", "rstrip", "normalized", "special")
            }
            tokens[int(index)] = AddedToken(content, **flags)
        return tokens


def _is_ordinary(backend: tokenizers.Tokenizer, index: int, content: str) -> bool:
    """Return whether the vocabulary has this text at this id, spelled in bytes: no added token can be spelled so."""
    in_bytes = spelled(content.encode(errors="replace"))
    return in_bytes != content and backend.id_to_token(index) == in_bytes


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


def special_roles(config: Mapping[str, Any]) -> dict[str, str]:
    """Return role -> text of the special tokens that tokenizer_config.json names, also with roles of its own."""
    extras = config.get("extra_special_tokens")  # {"image_token": "<image>"} in newer forms
    named = {name: token for name, token in config.items() if name.endswith("_token")}
    named |= extras if isinstance(extras, dict) else {}
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


def _text_of(token: object) -> str:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


def _require_bounded(data: bytes) -> None:
    """Raise ValueError for more text than can be searched in time and memory, and for a bad character map."""
    if found := _LETTER_AS_ESCAPE.search(data):  # keys could not be searched for
        raise ValueError(f"it writes a letter as {found[0][-6:].decode()} at byte {found.end() - 6}")
    for pattern, name, limit_bytes in (
        (_PIECE, "pieces", _MAX_PIECES_BYTES),
        (_ADDED, "added tokens", MAX_ADDED_BYTES),
    ):
        size_bytes = sum(found.end(1) - found.start(1) for found in pattern.finditer(data))
        if size_bytes > limit_bytes:
            raise ValueError(f"its {name} have {size_bytes} bytes together; at most {limit_bytes}")
    for found in _CHARSMAP.finditer(data):
        try:
            charsmap = base64.b64decode(found[1], validate=True)
        except binascii.Error as error:
            raise ValueError(f"its precompiled_charsmap is not base64: {error}") from None
        trie_end = 4 + int.from_bytes(charsmap[:4], "little")
        if not 4 < trie_end <= len(charsmap) or trie_end % 4:
            raise ValueError(f"its precompiled_charsmap of {len(charsmap)} bytes is cut")
        longest = max(map(len, charsmap[trie_end:].split(b"\0")))
        if longest > _MAX_CHARSMAP_RULE_BYTES:
            raise ValueError(f"its precompiled_charsmap makes {longest} bytes of one character")


def _require_sound_components(backend: tokenizers.Tokenizer) -> None:
    """Raise ValueError for a component that would panic or fill the memory once text comes in."""
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        component = getattr(backend, name)
        parts = [] if component is None else list(_parts(json.loads(component.__getstate__())))
        growth = prod(map(_growth, parts))
        if growth > _MAX_GROWTH:
            raise ValueError(f"its {name} can make {growth:.4g} characters of one; at most {_MAX_GROWTH}")
        for part in parts:
            match part:
                case {"type": "FixedLength", "length": 0}:
                    raise ValueError("its pre_tokenizer cuts text into pieces of no length")
                case {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": declared}:
                    used = {piece["SpecialToken"]["id"] for piece in [*single, *pair] if "SpecialToken" in piece}
                    for token in sorted(used - declared.keys()):
                        raise ValueError(
                            f"its post_processor uses a special token that it does not declare: {token!r:.80}"
                        )
    prefix = getattr(backend.model, "continuing_subword_prefix", None) or ""
    if len(prefix) > _MAX_PREFIX:
        raise ValueError(f"its continuing_subword_prefix has {len(prefix)} characters; at most {_MAX_PREFIX}")


def _parts(value: Any) -> Iterator[dict[str, Any]]:
    """Yield a component and every component in it."""
    if isinstance(value, dict) and "type" in value:
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
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


def subset(tokenizer: Mapping[str, Any], size: int) -> dict[str, Any]:
    """Return the content of a tokenizer.json with ids below `size` alone: the other tokens spell those texts.

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
    splitters = (tokenizer.get(part) for part in ("pre_tokenizer", "normalizer", "decoder"))
    is_byte_level = any("'ByteLevel'" in repr(part) for part in splitters)
    # Some of these are the only way to write something.
    if is_byte_level:
        needed = [text for text in gone if text in BYTE_ALPHABET]
    elif model.get("byte_fallback"):
        needed = [text for text in gone if _BYTE.fullmatch(text)]
    else:
        is_words = model.get("type") == "WordLevel"
        needed = [text for text in gone if is_words or len(text.removeprefix("##")) == 1]
    if needed:
        raise ValueError(f"{min(needed)!r} is one of them, and cannot be written without it")
    if not has_unknown:
        if isinstance(vocab, list) or not (is_byte_level or model.get("byte_fallback")):
            raise ValueError("the token for what is unknown is one of them")
        model["unk_token"] = None  # every text has bytes
    if "merges" in model:
        prefix = len(model.get("continuing_subword_prefix") or "")
        pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
        model["merges"] = [
            merge
            for merge, (left, right) in zip(model["merges"], pairs, strict=True)
            if gone.isdisjoint((left, right, left + right[prefix:]))
        ]
    return {**tokenizer, "added_tokens": added, "model": model}
