"""Vocabularies in the forms of RWKV and of Moonshot: the ids are those of their makers' algorithms, written plainly."""

from __future__ import annotations

import base64
import itertools
import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localllm.errors import TokenizerError
from localllm.text.tokenizer import Tokenizer
from tests.checkpoints import write_checkpoint
from tests.thinning import examples

END = "<|rwkv_tokenizer_end_of_text|>"
# "ab" is found in "abd", though "abc" has more; half a character is a token; a quotation mark, a line feed, a bracket.
TOKENS = [
    *(bytes([value]) for value in range(256)),
    *(
        b"ab",
        b"abcde",
        b"bc",
        b"\n\n",
        b"''",
        b"\"'",
        b"]-[",
        b"  ",
        b"\\n",
        b"\xc3\xa9",
        b"\xe4\xb8",
        b"\xb8\x96a",
        b"<|",
    ),
]
# Of a corpus: the first of two that stand side by side is what the lowest rank says.
RANKED = [
    *TOKENS[:256],
    b"ab",
    b"bc",
    b" a",
    b"abc",
    b"aa",
    b" ab",
    b"aab",
    b"\xe4\xb8",
    b"\xe4\xb8\x96",
    b"whole",
    b"12",
]
TEXTS = st.text(st.sampled_from("abcde 'é世\n\"-[]<|\\n12whole"), max_size=60) | st.text(max_size=20)


def world(folder: Path, tokens: list[bytes] | None = None, **config: Any) -> Tokenizer:
    """The tokenizer of the folder, with the tokens from id 1 on."""
    folder.mkdir(exist_ok=True)
    lines = [f"{index} {text(token)!r} {len(token)}\n" for index, token in enumerate(tokens or TOKENS, 1)]
    (folder / "rwkv_vocab_v20230424.txt").write_text("".join(lines))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "RwkvTokenizer", **config}))
    return Tokenizer.load(folder)


def text(token: bytes) -> str | bytes:
    """The file has text where the bytes are that."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return token


def ranked(folder: Path, tokens: list[bytes], **config: Any) -> Tokenizer:
    folder.mkdir(exist_ok=True)
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)]
    (folder / "tiktoken.model").write_text("".join(lines))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "TikTokenTokenizer", **config}))
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def of_world(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    special = {"0": {"content": END, "special": True}}
    roles = {"bos_token": END, "eos_token": "\n\n", "unk_token": END}
    return world(tmp_path_factory.mktemp("world"), added_tokens_decoder=special, **roles)


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    special: dict[str, Any] = {str(len(RANKED)): {"content": "[BOS]", "special": True}}
    special[str(len(RANKED) + 7)] = {"content": "[tool]"}
    return ranked(tmp_path_factory.mktemp("ranked"), RANKED, added_tokens_decoder=special, bos_token="[BOS]")


@settings(max_examples=examples(300), deadline=None)
@given(content=TEXTS)
def test_the_longest_token_is_taken_from_left_to_right(of_world: Tokenizer, content: str) -> None:
    data, expected = content.encode(errors="replace"), []
    while data:
        longest = max((token for token in TOKENS if data.startswith(token)), key=len)
        expected.append(1 + TOKENS.index(longest))
        data = data[len(longest) :]
    assert of_world.encode(content) == expected
    assert of_world.decode(expected) == content


def test_two_line_feeds_end_an_answer_of_rwkv_and_stay_a_token(of_world: Tokenizer) -> None:
    assert of_world.eos_token_id == 1 + TOKENS.index(b"\n\n")
    assert of_world.encode("a\n\nb") == [98, of_world.eos_token_id, 99]
    assert (of_world.bos_token_id, of_world.adds_bos, of_world.special_ids) == (0, False, {0})


def test_the_end_of_a_text_is_never_made_of_plain_text(of_world: Tokenizer) -> None:
    assert of_world.encode(f"{END}a", special=True) == [0, 98]
    assert 0 not in of_world.encode(f"{END}a")
    assert of_world.decode(of_world.encode(f"{END}a")) == f"{END}a"


def test_a_world_that_names_no_end_of_text_has_one(tmp_path: Path) -> None:
    assert world(tmp_path).encode(END, special=True) == [0]


def merged(word: bytes) -> list[int]:
    """The pair of the lowest rank is merged first, the leftmost of several."""
    parts = [bytes([value]) for value in word]
    while word not in RANKED:
        pairs = [(RANKED.index(a + b), at) for at, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in RANKED]
        if not pairs:
            break
        rank, at = min(pairs)
        parts[at : at + 2] = [RANKED[rank]]
    return [RANKED.index(part) for part in ([word] if word in RANKED else parts)]


@settings(max_examples=examples(300), deadline=None)
@given(word=st.text("abcwhole世é", min_size=1, max_size=12))
def test_ranks_decide_what_is_merged(of_ranks: Tokenizer, word: str) -> None:
    runs = "".join(f" {char} " if char == "世" else char for char in word).split()
    assert all(of_ranks.encode(run) == merged(run.encode()) for run in runs)


def test_words_are_cut_as_kimi_cuts_them(of_ranks: Tokenizer) -> None:
    text = "whole世 aab12"
    expected = [RANKED.index(part) for part in (b"whole", b"\xe4\xb8\x96", b" a", b"ab", b"12")]
    assert of_ranks.encode(text) == expected
    assert of_ranks.decode(expected) == text


def test_ids_behind_the_ranks_are_special_or_what_is_declared(of_ranks: Tokenizer) -> None:
    first = len(RANKED)
    text = f"[BOS]<|reserved_token_{first + 1}|>[tool]"
    assert of_ranks.encode(text, special=True) == [first, first + 1, first + 7]
    assert first + 7 in of_ranks.encode(text) and first not in of_ranks.encode(text)
    assert of_ranks.vocab_size == first + 256
    assert (of_ranks.bos_token_id, of_ranks.adds_bos) == (first, False)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rwkv_vocab_v20230424.txt", ""),
        ("rwkv_vocab_v20230424.txt", "1 'a' 2\n"),
        ("rwkv_vocab_v20230424.txt", "1 __import__('os') 2\n"),
        ("rwkv_vocab_v20230424.txt", "1 '\\x' 1\n"),
        ("rwkv_vocab_v20230424.txt", "1 'a' + 'b' 2\n"),
        ("rwkv_vocab_v20230424.txt", "1 'a','b' 2\n"),
        ("rwkv_vocab_v20230424.txt", "1 'a',{{}},'b' 2\n"),
        ("rwkv_vocab_v20230424.txt", "1 'a' 1\n1 'b' 1\n"),
        ("rwkv_vocab_v20230424.txt", "9999999 'a' 1\n"),
        ("rwkv_vocab_v20230424.txt", "1 'a' 1\n"),  # without the other bytes
        ("rwkv_vocab_v20230424.txt", f"1 {'a' * 300!r} 300\n"),
        ("tiktoken.model", ""),
        ("tiktoken.model", "YQ== 0\nYQ= 1\n"),
        ("tiktoken.model", "YQ== 0\n\nYg== 1\n"),
        ("tiktoken.model", "YQ== 0\nYg== 1\n"),  # without the other bytes
        ("tiktoken.model", "YQ== 0\nYg== 0\n"),
    ],
)
def test_a_file_that_is_no_vocabulary_is_an_error_that_names_it(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "TikTokenTokenizer"}')
    with pytest.raises(TokenizerError, match=name.replace(".", r"\.")) as caught:
        Tokenizer.load(tmp_path)
    assert caught.value.fixes


def test_a_vocabulary_that_would_take_minutes_is_refused(tmp_path: Path) -> None:
    random = Random(0)
    with pytest.raises(TokenizerError, match="rwkv_vocab") as caught:
        world(tmp_path / "world", [*TOKENS[:256], *(random.randbytes(250) for _ in range(5000))])
    assert "bytes together" in caught.value.why
    runs = [bytes([97 + kind]) * length for kind in range(26) for length in range(2, 400)]
    with pytest.raises(TokenizerError, match="tiktoken") as caught:
        ranked(tmp_path / "ranked", [*TOKENS[:256], *runs])
    assert "put together" in caught.value.why


def test_an_ordinary_token_that_is_declared_once_more_stays_one(tmp_path: Path) -> None:
    index = 1 + TOKENS.index(b"\n\n")
    tokenizer = world(tmp_path, added_tokens_decoder={str(index): {"content": "\n\n", "special": True}})
    assert tokenizer.encode("a\n\n") == [98, index] and index not in tokenizer.special_ids


def test_a_vocabulary_that_has_lost_its_end_is_an_error(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "rwkv7", vocab_size=4 * len(TOKENS))
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(TokenizerError, match="is cut") as caught:
        world(tmp_path)
    assert str(len(TOKENS) + 1) in caught.value.why


def test_ranks_of_an_unknown_class_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json") as caught:
        ranked(tmp_path, RANKED, tokenizer_class="QWenTokenizer")
    assert "QWenTokenizer" in caught.value.why
