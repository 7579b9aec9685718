"""Encode text to token ids and back, with the tokenizer of a model folder.

Decides which tokens are special, which bytes a token stands for, and if a BOS belongs in front. Knows nothing about
chat templates, models or sampling.

A token is special if its file flags it so, if tokenizer_config.json does, or gives it a role (bos, eos, ...) or a place
among the additional ones, or if it has the shape of a control token (`<|...|>`, `<s>`): some files forget the flag, and
a forgotten flag is a forged role. A single character is none but by its flag: everybody types it.
Other added tokens (`<think>`, `<tool_call>`) are ordinary vocabulary.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from localllm.errors import FETCH_ANEW, TokenizerError
from localllm.gguf.tokenizer import BYTE_ALPHABET
from localllm.text.tokenizer_files import (
    MAX_ADDED_BYTES,
    MAX_VOCAB,
    TokenizerFiles,
    declared_special,
    library_errors,
    special_roles,
    subset,
)

_LONG_TEXT = 1 << 16  # characters, some 20 ms; for these the library lets other threads run
_CONTROL_SHAPE = re.compile(r"<\|.*\|>|<｜.*｜>|</?s>", re.DOTALL)
# White space of the library's regular expressions: Python's \s has four control characters more.
_WHITE_SPACE = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
_FLAGS = ("single_word", "lstrip", "rstrip")
_SURROGATE = re.compile("[\ud800-\udfff]")

# Splits differently where two tokenizers with one vocabulary differ: numbers, white space, capitals, accents.
_PROBE = "In 2024, 12345  Bäume's  HTTPServer\n\tx=1;"


class Tokenizer:
    """The tokenizer of one model. Safe to use from several threads.

    vocab_size: the highest id + 1. bos_token, eos_token: their texts, or None. special_ids: never made from plain text.
    adds_bos: this tokenizer puts a BOS in front of a text by itself. special_tokens: role -> text, as templates see it.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        config: Mapping[str, Any] | None = None,
        *,
        origin: str = "the tokenizer",
    ) -> None:
        """config: what tokenizer_config.json says. origin: the file to name in errors.

        Raises TokenizerError for an unusable vocabulary.
        """
        config = config or {}
        self._backend = backend
        self._origin = origin
        self._lock = threading.Lock()  # `encode_special_tokens` is a switch on the shared backend
        count = backend.get_vocab_size()
        highest = max(backend.get_vocab().values(), default=-1) if count <= MAX_VOCAB else count
        if not 0 <= highest < MAX_VOCAB:
            raise TokenizerError(
                f"the vocabulary of {origin} is unusable",
                why=f"{count} tokens, the highest id is {highest}; at most {MAX_VOCAB}",
                fix=FETCH_ANEW,
            )
        backend.no_truncation()
        backend.no_padding()
        self.vocab_size = highest + 1
        self.special_tokens = {role: valid_unicode(text) for role, text in special_roles(config).items()}
        declared = {valid_unicode(text): flags for text, flags in declared_special(config).items() if len(text) > 1}
        if (size := sum(map(len, declared))) > MAX_ADDED_BYTES:
            why = f"{size} characters together; at most {MAX_ADDED_BYTES}"
            raise TokenizerError(f"{origin}: too many special tokens are declared", why=why, fix=FETCH_ANEW)
        _mark_special(backend, declared)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self._added = {index: token.content for index, token in added.items()}
        self._special = {token.content: (index, token) for index, token in added.items() if token.special}
        self._never_from_text = self.special_ids - {self._id_of(self.special_tokens.get("unk_token"))}
        self._bytes = _ByteReader.of(backend)
        self._byte_cache: dict[int, bytes] = {}
        self._read_bos(config)
        self.eos_token_id = self._eos_id()

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        """Load the tokenizer of a model folder, without tokens that its model has no row for: others spell their texts.

        Raises TokenizerError naming the file that is absent, cut or malformed, or that cannot do without.
        """
        files = TokenizerFiles(directory)
        config, size = files.config(), files.num_ids()
        backend = files.backend(config)
        origin = str(directory / files.name)
        with library_errors(f"{origin} cannot be used"):
            files.add_missing_tokens(backend, config)
            tokenizer = cls(backend, config, origin=origin)
            if size is None or tokenizer.vocab_size <= size:
                return tokenizer
            fitting = json.dumps(subset(json.loads(backend.to_str()), size))
            tokenizer = cls(tokenizers.Tokenizer.from_str(fitting), config, origin=origin)
        if tokenizer.vocab_size > size:
            why = f"its highest id is {tokenizer.vocab_size - 1}, and the model has ids 0 to {size - 1}"
            raise TokenizerError(f"{origin} does not fit to its model", why=why, fix=FETCH_ANEW)
        return tokenizer

    def encode(self, text: str, *, special: bool = False, bos: bool = False) -> list[int]:
        """Return the ids of `text`.

        special: special tokens in the text are meant; else they are ordinary text, and no special id comes out.
        bos: one BOS in front if this tokenizer adds one and the text does not already begin with it.
        """
        text = valid_unicode(text)
        ids = self._encode(text, special).ids if special else self._encode_plain(text)
        return self.with_bos(ids) if bos else ids

    def encode_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids of `text`, as `encode` has them, and which characters each is of. Ids that no text may become
        are left out."""
        encoding = self._encode(valid_unicode(text), special=False)
        pairs = zip(encoding.ids, encoding.offsets, strict=True)
        kept = [(index, span) for index, span in pairs if index not in self._never_from_text]
        return [index for index, _ in kept], [span for _, span in kept]

    def with_bos(self, ids: list[int]) -> list[int]:
        """Return `ids` with a BOS in front if this tokenizer adds one and there is none yet."""
        if self.adds_bos and self.bos_token_id is not None and ids[:1] != [self.bos_token_id]:
            return [self.bos_token_id, *ids]
        return ids

    def encode_pieces(self, pieces: Sequence[tuple[str, bool]]) -> list[int]:
        """Return the ids of texts that follow one another: (text, True) is one special token, (text, False) holds none.

        Otherwise the ids are those of the whole text: a special token may swallow the white space beside it, and only
        the very start is given the space that some tokenizers put in front.
        """
        ids: list[int] = []
        for number, (text, special) in enumerate(pieces):
            if special:
                ids.append(self._special[text][0])
                continue
            if number > 0 and self._special[pieces[number - 1][0]][1].rstrip:
                text = text.lstrip(_WHITE_SPACE)
            if number + 1 < len(pieces) and self._special[pieces[number + 1][0]][1].lstrip:
                text = text.rstrip(_WHITE_SPACE)
            ids += self._encode_plain(valid_unicode(text), first=number == 0)
        return ids

    def difference(self, other: Tokenizer) -> str:
        """Return where the ids of another tokenizer mean something else; "" where they mean the same."""
        own, others = self._backend.get_vocab(), other._backend.get_vocab()
        if own == others:
            return (
                "" if self._backend.encode(_PROBE).ids == other._backend.encode(_PROBE).ids else "it splits otherwise"
            )
        text = min((text for text in own.keys() | others.keys() if own.get(text) != others.get(text)), key=repr)
        ids = [vocabulary.get(text, "no id") for vocabulary in (others, own)]
        sizes = f"{len(others)} tokens, and {len(own)} here; " if len(others) != len(own) else ""
        return f"{sizes}{text[:40]!r} has {ids[0]} there, and {ids[1]} here"

    @property
    def special_texts(self) -> Collection[str]:
        """The texts of the special tokens."""
        return self._special.keys()

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Return the text of `ids`. Bytes that are no UTF-8 become U+FFFD; an id without a token becomes nothing."""
        if self._bytes is None:
            with library_errors(f"{self._origin} cannot decode these ids"):
                return str(self._backend.decode(list(ids), skip_special_tokens=skip_special))
        return self.decode_bytes(ids, skip_special=skip_special).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Iterable[int], *, skip_special: bool = True) -> bytes:
        """Return the bytes of `ids`, which may begin or end within a character."""
        if self._bytes is None:
            return self.decode(list(ids), skip_special=skip_special).encode()
        kept = (index for index in ids if not (skip_special and index in self.special_ids))
        data = b"".join(self.token_bytes(index) for index in kept)
        return data[min(len(data) - len(data.lstrip(b" ")), self._bytes.leading_spaces) :]

    @property
    def leading_spaces(self) -> int | None:
        """The spaces that decoding drops at the very start; None where tokens have no bytes of their own."""
        return None if self._bytes is None else self._bytes.leading_spaces

    def token_bytes(self, index: int) -> bytes:
        """Return the bytes that one token stands for; b"" for an id without a token."""
        known = self._byte_cache.get(index)
        if known is None:
            token = self._backend.id_to_token(index) if 0 <= index < self.vocab_size else None
            if index in self._added:
                known = self._added[index].encode()
            else:
                known = b"" if token is None else token.encode() if self._bytes is None else self._bytes.read(token)
            self._byte_cache[index] = known
        return known

    def token_text(self, index: int) -> str:
        """Return one token for people to read: bytes that are no character by themselves are shown as \\xNN."""
        return self.token_bytes(index).decode("utf-8", errors="backslashreplace")

    def token_id(self, text: str) -> int | None:
        """Return the id of the token that is written exactly so in the vocabulary, or None."""
        index = self._backend.token_to_id(text)
        return None if index is None else int(index)

    def leading_token(self, text: str) -> int | None:
        """Return the id of the longest added token, special or not, that a text begins with."""
        begins = [index for index, content in self._added.items() if content and text.startswith(content)]
        return max(begins, key=lambda index: len(self._added[index]), default=None)

    def _encode(self, text: str, special: bool) -> tokenizers.Encoding:
        with library_errors(f"{self._origin} cannot encode this text"), self._lock:
            self._backend.encode_special_tokens = not special
            if len(text) < _LONG_TEXT:
                return self._backend.encode(text, add_special_tokens=False)
            return self._backend.encode_batch([text], add_special_tokens=False)[0]

    def _encode_plain(self, text: str, *, first: bool = True) -> list[int]:
        ids = self._plain_ids(text, first)
        if self._never_from_text.isdisjoint(ids):
            return ids
        # A model that knows a special token's text as an ordinary piece: cut that text, and it cannot be found.
        cuts = [0, *(found.end() for found in self._special_text.finditer(text)), len(text)]
        pieces = [text[start:end] for start, end in itertools.pairwise(cuts)]
        ids = [index for piece in pieces for index in self._plain_ids(piece, first)]
        return [index for index in ids if index not in self._never_from_text]

    @functools.cached_property
    def _special_text(self) -> re.Pattern[str]:
        """Finds the first character of every special token's text, overlapping ones too."""
        choices = "|".join(re.escape(text) for text in sorted(self._special, key=len, reverse=True))
        return re.compile(f"(?=(?:{choices}))." if choices else "(?!)", re.DOTALL)

    def _plain_ids(self, text: str, first: bool) -> list[int]:
        if first or not self._first_differs:
            return list(self._encode(text, special=False).ids)
        # "\x01" takes the place of what stood before: it never merges, and it has one id or one byte token.
        encoding = self._encode("\x01" + text, special=False)
        return [index for index, (_, end) in zip(encoding.ids, encoding.offsets, strict=True) if end > 1]

    def _id_of(self, token: str | None) -> int | None:
        return None if token is None else self.token_id(token)

    def _eos_id(self) -> int | None:
        """Return the id of the EOS, which may be an ordinary token: RWKV ends an answer with two line feeds."""
        index = self._id_of(self.eos_token)
        if index is None and self.eos_token and self._bytes is not None:
            ids = self._encode(self.eos_token, special=False).ids
            is_one = len(ids) == 1 and self.token_bytes(ids[0]) == self.eos_token.encode()
            index = ids[0] if is_one else None
        return index

    def _read_bos(self, config: Mapping[str, Any]) -> None:
        added = self._backend.encode("", add_special_tokens=True).ids
        if added and "bos_token" not in self.special_tokens:
            first = self._backend.id_to_token(added[0])
            if first is not None and first != self.special_tokens.get("eos_token"):
                self.special_tokens["bos_token"] = first
        self.bos_token = self.special_tokens.get("bos_token")
        self.eos_token = self.special_tokens.get("eos_token")
        self.bos_token_id = self._id_of(self.bos_token)
        flag = config.get("add_bos_token")
        wanted = flag if isinstance(flag, bool) else added[:1] == [self.bos_token_id]
        self.adds_bos = wanted and self.bos_token_id is not None
        pre_tokenizer = self._backend.pre_tokenizer
        self._first_differs = pre_tokenizer is not None and b'"prepend_scheme":"first"' in pre_tokenizer.__getstate__()


def _mark_special(backend: tokenizers.Tokenizer, declared: Mapping[str, Mapping[str, Any]]) -> None:
    """Flag what is special, and match it in the raw text only: no normalizer may turn a user's text into one.

    declared: text -> flags, which go before those of the backend where there are any.
    """
    added = {token.content: token for _, token in sorted(backend.get_added_tokens_decoder().items())}
    special = [text for text, token in added.items() if token.special or _CONTROL_SHAPE.fullmatch(text)]
    special += [text for text in declared if text in added or backend.token_to_id(text) is not None]
    renewed = []
    for text in dict.fromkeys(special):
        token, own = added.get(text), declared.get(text)
        flags = {name: own.get(name) is True if own else getattr(token, name, False) for name in _FLAGS}
        renewed.append(AddedToken(text, **flags, normalized=False, special=True))
    backend.add_special_tokens(renewed)


def valid_unicode(text: str) -> str:
    """`text` with each lone surrogate, which no tokenizer can read, replaced by U+FFFD."""
    return _SURROGATE.sub("\ufffd", text)


@dataclass(frozen=True)
class _ByteReader:
    """Finds the bytes of a token by the decoder of a tokenizer.json."""

    is_byte_level: bool = False
    replaced: tuple[tuple[str, str], ...] = ()
    has_fallback: bool = False
    leading_spaces: int = 0

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer) -> _ByteReader | None:
        """None for a decoder that does not work token by token (WordPiece, CTC): those decode whole windows."""
        if backend.decoder is None:
            return None
        decoder = json.loads(backend.decoder.__getstate__())
        steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
        names = [step["type"] for step in steps]
        if names == ["ByteLevel"]:
            return cls(is_byte_level=True)
        if names == ["Metaspace"]:
            strips = steps[0].get("prepend_scheme", "always") != "never"
            return cls(replaced=((steps[0]["replacement"], " "),), leading_spaces=int(strips))
        replaced: list[tuple[str, str]] = []  # of SentencePiece
        strip = 0
        fused = False
        for step in steps:
            match step:
                case {"type": "Replace", "pattern": {"String": pattern}, "content": content} if not fused:
                    replaced.append((pattern, content))
                case {"type": "ByteFallback"} if not fused:
                    pass
                case {"type": "Fuse"}:
                    fused = True
                case {"type": "Strip", "content": " ", "start": start, "stop": 0} if fused:
                    strip += start
                case _:
                    return None
        return cls(False, tuple(replaced), "ByteFallback" in names, strip) if fused else None

    def read(self, token: str) -> bytes:
        if self.is_byte_level:
            is_spelled = all(char in BYTE_ALPHABET for char in token)
            return bytes(BYTE_ALPHABET[char] for char in token) if is_spelled else token.encode()
        if self.has_fallback and (found := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", token)):
            return bytes.fromhex(found[1])
        for pattern, content in self.replaced:
            token = token.replace(pattern, content)
        return token.encode()
