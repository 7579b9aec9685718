"""The tokenizer in a GGUF file's metadata, as the contents of its model's tokenizer.json and tokenizer_config.json.

Four kinds are read: SentencePiece's BPE with scores ("llama"), the same with merges ("gemma4"), BPE over bytes
("gpt2"), whose words are cut by regular expressions that GGUF names and does not hold, and the longest match ("rwkv").
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeGuard

from localllm.errors import FETCH_ANEW, TokenizerError, show

Json = dict[str, object]


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's printable stand-in for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in printable]
    return {chr(value): value for value in printable} | {chr(256 + i): value for i, value in enumerate(others)}


BYTE_ALPHABET = _byte_alphabet()
_STAND_INS = {value: char for char, value in BYTE_ALPHABET.items()}
_KEY = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5
_ADDED = (UNKNOWN, CONTROL, USER_DEFINED)
_PHI3 = ("phi3", "phimoe")  # whose special tokens swallow white space, which the format cannot say
_ROLES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",  # so spelled in the format
    "pad_token": "padding_token_id",
    "mask_token": "mask_token_id",
}
_SPACE = "▁"  # SentencePiece's
# The pieces of the largest vocabulary have 1.9 million characters together, the longest of them 31.
MAX_PIECES_CHARACTERS = 6_000_000
MAX_PIECE_CHARACTERS = 256
MAX_MERGES = 1_500_000
_MAX_TREE_CHARACTERS = 1 << 20  # of which one expression is made; the World vocabulary has 373,358
MAX_TOKENS = 1 << 20
_MAX_ADDED_CHARACTERS = 1 << 20  # of the added tokens, which a text is searched for all at once
_UNREAD = {
    "bert": "a WordPiece tokenizer",
    "t5": "a Unigram model",
    "plamo2": "the table of PLaMo 2",
    "none": "no tokenizer at all",
}

# Ways to cut a text into words. Each expression cuts what those before it have left, and keeps what lies between.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_DIGITS_BY_THREE = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}"
_DIGITS_ALONE = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}"
_WITH_MARKS = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*"
    + (r"|\s*[\r\n]+|\s+(?!\S)|\s+")
)
_PATHS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _by_case(behind: str, digits: str, tail: str = _PATHS, without: str = "") -> str:
    """Return words that end where a capital follows a small letter. behind: what may follow the letters of a word.
    without: letters that are none of them."""
    letters = rf"\p{{Lm}}\p{{Lo}}\p{{M}}{without}]"
    upper, lower = r"[\p{Lu}\p{Lt}" + letters, r"[\p{Ll}" + letters
    start = r"[^\r\n\p{L}\p{N}]?"
    return rf"{start}{upper}*{lower}+{behind}|{start}{upper}+{lower}*{behind}|{digits}|{tail}"


_DEEPSEEK_WORDS = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Letters that have a capital and a small form, without Armenian, Georgian and the mathematical ones.
_CASED_LETTERS = (
    "A-Za-z"
    "\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_HAN_AND_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK_MARKS = r"\s?[!-/:-~" + "\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"


@dataclass(frozen=True)
class _Words:
    """How a text becomes words, and words tokens.

    whole: a word that is a token is never built of merges. adds_bos, composes: where the file does not say: a BOS goes
    in front; characters are composed first (Unicode's NFC).
    """

    patterns: tuple[str, ...]
    whole: bool = False
    adds_bos: bool = False
    composes: bool = False


_ANY_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_BAILING = rf"'(?i:[sdmt]|ll|ve|re)|{_ANY_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_SEED_CODER = rf"{_CONTRACTIONS}|{_ANY_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_DEEPSEEK = (r"[\r\n]", rf"\s?[{_CASED_LETTERS}]+", _DEEPSEEK_MARKS, r"\s+$", _CJK, r"\p{N}+")
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")
# GGUF's names, and what each of them stands for.
_NAMED_WORDS = (
    ("default", _Words((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))),
    ("gpt-2 phi-2 jais trillion granite-docling exaone4 gigachat a.x-4.0 mellum", _Words((_GPT2,))),
    ("mpt olmo", _Words((_GPT2,), composes=True)),
    ("starcoder refact smollm codeshell exaone minerva-7b mellum2", _Words((r"\p{N}", _GPT2))),
    ("command-r", _Words((r"\p{N}", _GPT2), composes=True)),
    ("falcon", _Words((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]"))),
    (
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
        _Words((_DIGITS_BY_THREE,), whole=True, adds_bos=True),
    ),
    ("dbrx smaug-bpe chatglm-bpe", _Words((_DIGITS_BY_THREE,))),
    ("glm4 glm5", _Words((_DIGITS_BY_THREE,), whole=True)),
    ("qwen2", _Words((_DIGITS_ALONE,), composes=True)),
    ("qwen35", _Words((_WITH_MARKS,), composes=True)),
    ("deepseek-r1-qwen kormo megrez hunyuan stablelm2 solar-open grok-2", _Words((_DIGITS_ALONE,))),
    ("gpt-4o llama4 kanana2 minimax-m2", _Words((_by_case(f"{_CONTRACTIONS}?", r"\p{N}{1,3}"),))),
    (
        "kimi-k2",
        _Words((r"\p{Han}+|" + _by_case(f"{_CONTRACTIONS}?", r"\p{N}{1,3}", _TAIL, r"&&[^\p{Han}]"),), whole=True),
    ),
    ("tekken", _Words((_by_case("", r"\p{N}"),), whole=True, adds_bos=True)),
    ("deepseek-v3 hunyuan-dense joyai-llm", _Words((r"\p{N}{1,3}", _HAN_AND_KANA, _DEEPSEEK_WORDS))),
    ("deepseek-llm", _Words(_DEEPSEEK)),
    ("deepseek-coder", _Words(_DEEPSEEK_CODER)),
    ("bailingmoe bailingmoe2 llada-moe", _Words((_BAILING,))),
    ("seed-coder", _Words((_SEED_CODER,))),
)
_WORDS: Mapping[str, _Words] = MappingProxyType(
    {name: words for names, words in _NAMED_WORDS for name in names.split()}
)


def hf_tokenizer(metadata: Mapping[str, object], source: str = "the GGUF file") -> tuple[Json, Json]:
    """Return the contents of tokenizer.json and of tokenizer_config.json. source: the file in errors.

    Raises TokenizerError for a kind of tokenizer that is not read here, and for tables that do not fit together.
    """
    kind = metadata.get(f"{_KEY}model")
    if kind not in ("llama", "gemma4", "gpt2", "rwkv"):
        known = _UNREAD.get(str(kind), f"a tokenizer of the kind {show(kind)}")
        why = 'kinds that are read: "llama" and "gemma4" (SentencePiece\'s BPE), "gpt2" (BPE over bytes), "rwkv"'
        raise TokenizerError(f"{source} has {known}, which is not read", why=why, fix="choose another file or model")
    vocabulary = _Vocabulary.of(metadata, source)
    if kind == "rwkv":
        content, adds_bos = _longest_match(vocabulary), False
    elif kind != "gpt2":
        is_gemma4 = "gemma4" in (kind, metadata.get(f"{_KEY}pre"))  # Ollama's files say it otherwise
        content, adds_bos = _sentencepiece(metadata, vocabulary, is_gemma4=is_gemma4), True
    else:
        words = _words(metadata, source)
        content, adds_bos = _byte_level(metadata, vocabulary, words), words.adds_bos
    return content, _config(metadata, vocabulary, adds_bos)


@dataclass(frozen=True)
class _Vocabulary:
    """The tokens by their ids.

    kinds: see the numbers above. ids: by their texts, of the tokens that can be written; of two with one text the first
    can. source: the file in errors.
    """

    tokens: Sequence[str]
    kinds: Sequence[float]
    ids: Mapping[str, int]
    source: str

    @classmethod
    def of(cls, metadata: Mapping[str, object], source: str) -> _Vocabulary:
        tokens = metadata.get(f"{_KEY}tokens")
        if not _are_texts(tokens) or not 1 <= len(tokens) <= MAX_TOKENS:
            raise _unusable(source, "tokens", f"a list of 1 to {MAX_TOKENS} texts", tokens)
        kinds = metadata.get(f"{_KEY}token_type", [NORMAL] * len(tokens))
        if not _are_numbers(kinds, len(tokens)):
            raise _unusable(source, "token_type", f"a list of {len(tokens)} numbers, one for each token", kinds)
        ids: dict[str, int] = {}
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
            if kind != UNUSED and token:  # which fill the vocabulary up to the rows of the model
                ids.setdefault(token, index)
        return cls(tokens, kinds, ids, source)

    def text(self, index: object) -> str | None:
        """Return the token of an id; None where it is no id of one."""
        return self.tokens[index] if type(index) is int and 0 <= index < len(self.tokens) else None

    def added(self, *, stripping: bool = False) -> list[Json]:
        """Return the tokens that are cut out of a text before any other is looked for: the special ones, and those of
        the model's users. stripping: all but the plainest swallow white space behind them."""
        marked = [(index, text) for text, index in self.ids.items() if self.kinds[index] in _ADDED]
        if (size := sum(len(text) for _, text in marked)) > _MAX_ADDED_CHARACTERS:
            wanted = f"special tokens of at most {_MAX_ADDED_CHARACTERS} characters together, not {size},"
            raise _unusable(self.source, "tokens", wanted, self.tokens)
        return [
            {
                "id": index,
                "content": text,
                "single_word": False,
                "lstrip": False,
                "rstrip": stripping and text not in ("<unk>", "<s>", "<|endoftext|>"),
                "normalized": False,
                "special": self.kinds[index] != USER_DEFINED,
            }
            for index, text in sorted(marked)
        ]


# SentencePiece's BPE


def _sentencepiece(metadata: Mapping[str, object], vocabulary: _Vocabulary, *, is_gemma4: bool) -> Json:
    """is_gemma4: merges are listed, and no space goes in front of a text."""
    vocabulary = _with_spaces_as_pieces(vocabulary)
    prefixes = not is_gemma4 and metadata.get(f"{_KEY}add_space_prefix", True) is not False
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    prepend = [{"type": "Prepend", "prepend": _SPACE}] if prefixes else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefixes else []
    spaces = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    unknown = vocabulary.text(metadata.get(f"{_KEY}unknown_token_id", 0))
    is_listed = is_gemma4 or _are_texts(metadata.get(f"{_KEY}merges"))
    pairs = (_listed_merges if is_listed else _scored_merges)(metadata, vocabulary)
    return _tokenizer(
        added=vocabulary.added(stripping=metadata.get("general.architecture") in _PHI3),
        normalizer={"type": "Sequence", "normalizers": [*prepend, replace]},
        decoder={"type": "Sequence", "decoders": [spaces, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        model=_bpe(vocabulary, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True),
    )


def _with_spaces_as_pieces(vocabulary: _Vocabulary) -> _Vocabulary:
    """Return the vocabulary with tokens of spaces alone, which count as user-defined, as the pieces that they were: a
    text is searched for those after its spaces are replaced."""
    tokens, kinds = list(vocabulary.tokens), list(vocabulary.kinds)
    for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
        if kind == USER_DEFINED and token and not token.strip(f" {_SPACE}"):
            tokens[index], kinds[index] = token.replace(" ", _SPACE), NORMAL
    return _Vocabulary.of({f"{_KEY}tokens": tokens, f"{_KEY}token_type": kinds}, vocabulary.source)


def _scored_merges(metadata: Mapping[str, object], vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Return every way to put a piece together of two, those of the best pieces first, and of pieces that are as good
    those with the longest left part first: so runs of spaces, which are, grow from the left as SentencePiece has it."""
    scores = metadata.get(f"{_KEY}scores")
    if not _are_numbers(scores, len(vocabulary.tokens)):
        wanted = f"a list of {len(vocabulary.tokens)} numbers, one for each token"
        raise _unusable(vocabulary.source, "scores", wanted, scores)
    pieces = {text: index for text, index in vocabulary.ids.items() if vocabulary.kinds[index] == NORMAL}
    if (size := sum(map(len, pieces))) > MAX_PIECES_CHARACTERS:
        wanted = f"pieces of at most {MAX_PIECES_CHARACTERS} characters together, not {size},"
        raise _unusable(vocabulary.source, "tokens", wanted, vocabulary.tokens)
    found: list[tuple[float, int, int, str, str]] = []  # the last two are the parts
    for piece, index in pieces.items():
        if len(piece) > MAX_PIECE_CHARACTERS:
            continue
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in pieces and right in pieces:
                found.append((-scores[index], -cut, cut - len(piece), left, right))
        if len(found) > MAX_MERGES:
            raise _unusable(vocabulary.source, "tokens", f"at most {MAX_MERGES} merges of pieces", vocabulary.tokens)
    found.sort(key=lambda merge: merge[:3])
    return [(left, right) for *_, left, right in found]


# BPE over bytes


def _byte_level(metadata: Mapping[str, object], vocabulary: _Vocabulary, words: _Words) -> Json:
    cuts = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in words.patterns
    ]
    byte_level = _byte_level_step()
    return _tokenizer(
        added=vocabulary.added(),
        normalizer={"type": "NFC"} if words.composes else None,
        pre_tokenizer={"type": "Sequence", "pretokenizers": [*cuts, byte_level]},
        decoder=byte_level,
        model=_bpe(vocabulary, _listed_merges(metadata, vocabulary), ignore_merges=words.whole),
    )


def _words(metadata: Mapping[str, object], source: str) -> _Words:
    name = metadata.get(f"{_KEY}pre", "default")
    if not isinstance(name, str) or name not in _WORDS:
        what = f"{source} cuts words in a way that is not known here"
        why = f"{_KEY}pre is {show(name)}; known are {', '.join(_WORDS)}"
        raise TokenizerError(what, why=why, fix="choose another file or model")
    return _WORDS[name]


def _listed_merges(metadata: Mapping[str, object], vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Return "left right" as pairs, without those that make no token."""
    merges, ids = metadata.get(f"{_KEY}merges"), vocabulary.ids
    if not _are_texts(merges):
        raise _unusable(vocabulary.source, "merges", "a list of pairs of tokens", merges)
    cuts = ((merge, merge.find(" ", 1)) for merge in merges)
    pairs = ((merge[:cut], merge[cut + 1 :]) for merge, cut in cuts if cut > 0)
    return [(left, right) for left, right in pairs if left in ids and right in ids and left + right in ids]


# The longest match


def _longest_match(vocabulary: _Vocabulary) -> Json:
    """Return a tokenizer that takes, from left to right, the longest token that the bytes ahead begin with.

    The library has no such model for a text without words: a single expression, a tree of all tokens, cuts the text
    into its tokens, and each of these "words" is looked up.
    """
    source, is_normal = vocabulary.source, {text: vocabulary.kinds[i] == NORMAL for text, i in vocabulary.ids.items()}
    ids = {spelled(_unescaped(text, source)): index for text, index in vocabulary.ids.items() if is_normal[text]}
    if missing := [value for value, char in _STAND_INS.items() if char not in ids]:
        raise _unusable(source, "tokens", f"a token for each byte, thus for {missing[0]},", vocabulary.tokens)
    if (size := sum(map(len, ids))) > _MAX_TREE_CHARACTERS:
        wanted = f"tokens of at most {_MAX_TREE_CHARACTERS} bytes together, not {size},"
        raise _unusable(source, "tokens", wanted, vocabulary.tokens)
    others = {text: index for text, index in vocabulary.ids.items() if not is_normal[text]}
    if doubles := others.keys() & ids.keys():
        raise _unusable(source, "tokens", f"one token for {min(doubles)!r}", vocabulary.tokens)
    byte_level = _byte_level_step()
    cut = {"type": "Split", "pattern": {"Regex": _expression(_tree(ids))}, "behavior": "Isolated", "invert": False}
    return _tokenizer(
        added=vocabulary.added(),
        pre_tokenizer={"type": "Sequence", "pretokenizers": [byte_level, cut]},
        decoder=byte_level,
        model={"type": "WordLevel", "vocab": {**others, **ids}, "unk_token": ""},
    )


def spelled(token: bytes) -> str:
    """Return a token's bytes as the characters that stand in for them."""
    return "".join(map(_STAND_INS.__getitem__, token))


def escaped(token: bytes) -> str:
    """Return a token as GGUF has it for RWKV: the inside of a Python literal of bytes."""
    return repr(token)[2:-1]


def _unescaped(text: str, source: str) -> bytes:
    try:
        token = text.encode("ascii")
        if "\\" in text:
            token = token.decode("unicode_escape").encode("latin-1")
    except ValueError:
        raise _unusable(source, "tokens", "tokens with escapes for bytes", [text]) from None
    if len(token) > MAX_PIECE_CHARACTERS:
        raise _unusable(source, "tokens", f"tokens of at most {MAX_PIECE_CHARACTERS} bytes", [text])
    return token


_Tree = dict[str, "_Tree"]  # what may follow, by the next character; "" where a token ends


def _tree(tokens: Iterable[str]) -> _Tree:
    root: _Tree = {}
    for token in tokens:
        node = root
        for char in token:
            node = node.setdefault(char, {})
        node[""] = {}
    return root


def _expression(tree: _Tree) -> str:
    """Return an expression for the longest token of a tree: what is behind a character comes before its end."""
    followed = [_literal(char) + _expression(node) for char, node in tree.items() if char and node.keys() != {""}]
    if last := [_literal(char) for char, node in tree.items() if node.keys() == {""}]:
        followed.append(f"[{''.join(last)}]")
    return f"(?:{'|'.join(followed)}){'?' if '' in tree else ''}" if followed else ""


def _literal(char: str) -> str:
    return char if char.isalnum() else rf"\x{{{ord(char):x}}}"


# All of them


def _byte_level_step() -> Json:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def _bpe(vocabulary: _Vocabulary, merges: Sequence[tuple[str, str]], **more: object) -> Json:
    options: Json = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
    }
    return {**options, **more, "vocab": dict(vocabulary.ids), "merges": merges}


def _tokenizer(*, added: list[Json], **parts: object) -> Json:
    empty = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"))
    return {"version": "1.0", **empty, "added_tokens": added, **parts}


def _config(metadata: Mapping[str, object], vocabulary: _Vocabulary, adds_bos: bool) -> Json:
    ids = {role: metadata.get(f"{_KEY}{key}") for role, key in _ROLES.items()}
    flag = metadata.get(f"{_KEY}add_bos_token")
    config: Json = {
        "add_bos_token": flag if isinstance(flag, bool) else adds_bos,
        "clean_up_tokenization_spaces": False,
        **{role: text for role, index in ids.items() if (text := vocabulary.text(index))},
    }
    template = _chat_template(metadata)
    return config if template is None else {**config, "chat_template": template}


def _chat_template(metadata: Mapping[str, object]) -> str | list[Json] | None:
    """Return the model's template, or all of them by their names where there are several."""
    key = "tokenizer.chat_template"
    names = [name for name in metadata if name == key or name.startswith(f"{key}.")]
    texts = {name[len(key) + 1 :] or "default": text for name in names if isinstance(text := metadata[name], str)}
    if texts.keys() == {"default"}:
        return texts["default"]
    return [{"name": name, "template": text} for name, text in texts.items()] or None


def _are_texts(value: object) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _are_numbers(value: object, count: int) -> TypeGuard[Sequence[float]]:
    are_numbers = isinstance(value, list) and all(isinstance(each, int | float) for each in value)
    return isinstance(value, list | array) and (are_numbers or isinstance(value, array)) and len(value) == count


def _unusable(source: str, key: str, wanted: str, value: object) -> TokenizerError:
    found = "it is absent" if value is None else f"it is {show(value)}"
    why = f"{found}; {wanted} is needed"
    return TokenizerError(f"{source}: {_KEY}{key} is not usable", why=why, fix=FETCH_ANEW)
