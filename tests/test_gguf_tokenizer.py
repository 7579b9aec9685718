"""Tokenizers of GGUF files: metadata made of real tokenizers must give their ids, and llama.cpp's."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from localllm.errors import TokenizerError
from localllm.gguf.header import read_header
from localllm.gguf.tokenizer import BYTE_ALPHABET, hf_tokenizer
from localllm.text.chat_template import ChatTemplate
from localllm.text.tokenizer import Tokenizer
from tests.thinning import examples

Locate = Callable[[str], Path]
Metadata = dict[str, Any]

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
CHAT = {
    "phi": "<|system|>\nBe brief.<|end|>\n<|user|>\n Why is the sky  blue?<|end|>\n<|assistant|>\n",
    "qwen": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n<tool_call>{}</tool_call> a<|im_end|>\n",
}


def tokenizer_of(metadata: Mapping[str, object]) -> Tokenizer:
    content, config = hf_tokenizer(metadata)
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(content)), config)


def table(texts: list[str], types: list[int], **more: object) -> Metadata:
    keys = {"tokens": texts, "token_type": types, **more}
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


@pytest.fixture(scope="session")
def phi_metadata(shared_data: Locate) -> Metadata:
    """What llama.cpp's conversion writes of Phi-3. Scores fall by one from piece to piece; runs of spaces, which
    sentencepiece was told to know, come last."""
    content = json.loads(shared_data("tokenizers/phi-3-mini/tokenizer.json").read_text(encoding="utf-8"))
    config = json.loads(shared_data("tokenizers/phi-3-mini/tokenizer_config.json").read_text(encoding="utf-8"))
    rows = 32064
    tokens, types, scores = [f"[PAD{index}]" for index in range(rows)], [UNUSED] * rows, [-10000.0] * rows
    for text, index in content["model"]["vocab"].items():
        tokens[index], types[index] = text, BYTE if 3 <= index < 259 else NORMAL
        scores[index] = 0.0 if index < 259 else float(259 - index) if text.strip("▁") else -1e9
    for token in content["added_tokens"]:
        index = token["id"]
        tokens[index], types[index] = token["content"], CONTROL if token["special"] else USER_DEFINED
        scores[index] = -1000.0
    ids = {"bos_token_id": 1, "eos_token_id": 32000, "unknown_token_id": 0, "padding_token_id": 32000}
    more = {"model": "llama", "pre": "default", "scores": scores, "add_bos_token": False, **ids}
    metadata = table(tokens, types, **more)
    return {"general.architecture": "phi3", "tokenizer.chat_template": config["chat_template"], **metadata}


@pytest.fixture(scope="session")
def qwen_metadata(shared_data: Locate) -> Metadata:
    folder = shared_data("tokenizers/qwen2.5-0.5b-instruct")
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    rows = 151936
    tokens, types = [f"[PAD{index}]" for index in range(rows)], [UNUSED] * rows
    for text, index in json.loads((folder / "vocab.json").read_text(encoding="utf-8")).items():
        tokens[index], types[index] = text, NORMAL
    for index, token in config["added_tokens_decoder"].items():
        tokens[int(index)], types[int(index)] = token["content"], CONTROL if token["special"] else USER_DEFINED
    lines = (folder / "merges.txt").read_text(encoding="utf-8").split("\n")
    merges = [line for line in lines if line and not line.startswith("#version")]
    more = {"model": "gpt2", "pre": "qwen2", "merges": merges, "eos_token_id": 151645, "padding_token_id": 151643}
    metadata = table(tokens, types, **more)
    return {"general.architecture": "qwen2", "tokenizer.chat_template": config["chat_template"], **metadata}


@pytest.fixture(scope="module", params=["phi", "qwen"])
def both(request: pytest.FixtureRequest) -> tuple[str, Metadata, Tokenizer, Tokenizer]:
    """A tokenizer's name, its metadata, what is made of that, and the original."""
    metadata: Metadata = request.getfixturevalue(f"{request.param}_metadata")
    return request.param, metadata, tokenizer_of(metadata), request.getfixturevalue(request.param)


Both = tuple[str, Metadata, Tokenizer, Tokenizer]


def test_ids_are_those_of_llama_cpp(both: Both, shared_data: Locate) -> None:
    stem = "tokenizers/expected/ggml-vocab-{}.gguf".format({"phi": "phi-3", "qwen": "qwen2"}[both[0]])
    texts = shared_data(f"{stem}.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    expected = [[int(word) for word in line.split()] for line in shared_data(f"{stem}.out").read_text().split("\n")]
    assert len(texts) == 47  # 46, and nothing after the last separator
    assert [both[2].encode(text) for text in texts] == expected


def test_naughty_strings_have_the_ids_and_the_texts_of_the_original(both: Both, shared_data: Locate) -> None:
    _, _, made, original = both
    naughty = json.loads(shared_data("adversarial/naughty_strings.json").read_text(encoding="utf-8"))
    encoded = [made.encode(text) for text in naughty]
    assert encoded == [original.encode(text) for text in naughty]
    assert [made.decode(ids) for ids in encoded] == [original.decode(ids) for ids in encoded] == naughty
    assert made.special_ids.isdisjoint(index for ids in encoded for index in ids)


@pytest.mark.parametrize("special", [False, True])
def test_texts_with_spaces_bytes_and_added_tokens_have_the_ids_of_the_original(both: Both, special: bool) -> None:
    name, _, made, original = both
    texts = [CHAT[name], " a", "   a", "a   ", "\n\n  a\t\tb", "▁a ▁", "<unk><s></s>", "\x00\x07é\U0001f9ff\ue000", ""]
    texts += [CHAT[name] * 3, f"  {CHAT[name]}  ", "<|endoftext|>a<|endoftext|> b", "<0x41><0x0A>", "नमस्ते 你好吗"]
    for text in texts:
        ids = original.encode(text, special=special)
        assert made.encode(text, special=special) == ids
        for skip in (False, True):
            assert made.decode(ids, skip_special=skip) == original.decode(ids, skip_special=skip)
            assert made.decode_bytes(ids, skip_special=skip) == original.decode_bytes(ids, skip_special=skip)


def test_tokens_are_as_special_as_in_the_original(both: Both) -> None:
    name, _, made, original = both
    assert made.special_ids == original.special_ids
    assert made.special_tokens.items() <= {**original.special_tokens, "bos_token": original.bos_token}.items()
    assert (made.eos_token, made.adds_bos) == (original.eos_token, original.adds_bos)
    assert made.vocab_size == original.vocab_size
    assert [made.token_bytes(index) for index in range(made.vocab_size)] == [
        original.token_bytes(index) for index in range(original.vocab_size)
    ], name


def test_merges_are_those_that_transformers_derives(phi_metadata: Metadata, shared_data: Locate) -> None:
    from transformers.tokenization_utils_base import generate_merges

    original = json.loads(shared_data("tokenizers/phi-3-mini/tokenizer.json").read_text(encoding="utf-8"))["model"]
    scores = phi_metadata["tokenizer.ggml.scores"]
    pieces = {text: index for text, index in original["vocab"].items() if index >= 259}
    theirs = generate_merges(pieces, {text: scores[index] for text, index in pieces.items()})
    model: Any = hf_tokenizer(phi_metadata)[0]["model"]
    assert model["merges"] == theirs
    # The published file is of an older version, which put the merges into one and the same piece in another order.
    assert sorted(" ".join(pair) for pair in model["merges"]) == sorted(original["merges"])
    # Where a file has merges of its own, those count, and not the scores.
    merges = original["merges"][:100]
    own: Any = hf_tokenizer({**phi_metadata, "tokenizer.ggml.merges": merges})[0]["model"]
    assert [" ".join(pair) for pair in own["merges"]] == merges


def test_a_written_file_gives_the_same_tokenizer(phi_metadata: Metadata, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    path, writer = tmp_path / "model.gguf", gguf.GGUFWriter(tmp_path / "model.gguf", "phi3")
    for key, value in phi_metadata.items():
        if isinstance(value, str) and key != "general.architecture":
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert hf_tokenizer(read_header(path).metadata) == hf_tokenizer(phi_metadata)


# Small vocabularies


def pieces(*texts: str, **more: object) -> Metadata:
    """A vocabulary of sentencepiece: the unknown token, two bytes, and pieces, the best first."""
    tokens = ["<unk>", "<0xC3>", "<0xA9>", *texts]
    types = [UNKNOWN, BYTE, BYTE, *[NORMAL] * len(texts)]
    scores = [0.0] * 3 + [-float(index) for index in range(len(texts))]
    return table(tokens, types, **{"model": "llama", "scores": scores, **more})


def byte_level(*texts: str, **more: object) -> Metadata:
    """A vocabulary of all bytes, and further tokens."""
    tokens = [*BYTE_ALPHABET, *texts]
    return table(tokens, [NORMAL] * len(tokens), **{"model": "gpt2", "pre": "gpt-2", "merges": [], **more})


def words(name: str, text: str) -> list[str]:
    """The words of a text."""
    content, _ = hf_tokenizer(byte_level(pre=name))
    backend = tokenizers.Tokenizer.from_str(json.dumps(content))
    assert backend.pre_tokenizer is not None
    cut = backend.pre_tokenizer.pre_tokenize_str(text)
    return [bytes(BYTE_ALPHABET[char] for char in word).decode() for word, _ in cut]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt-2", "I|'ll| see| 12345| cats|,|\n\n  | OK|?|\n"),
        ("starcoder", "I|'ll| see| |1|2|3|4|5| cats|,|\n\n  | OK|?|\n"),
        ("falcon", "I|'|ll| see| |123|45| cats|,|\n\n  | OK|?|\n"),
        ("default", "I|'|ll| see| |123|45| cats|,|\n\n  | OK|?|\n"),
        ("llama-bpe", "I|'ll| see| |123|45| cats|,\n\n|  | OK|?\n"),
        ("qwen2", "I|'ll| see| |1|2|3|4|5| cats|,\n\n|  | OK|?\n"),
        ("tekken", "I|'ll| see| |1|2|3|4|5| cats|,\n\n|  | OK|?\n"),
        ("gpt-4o", "I'll| see| |123|45| cats|,\n\n|  | OK|?\n"),
        ("deepseek-v3", "I|'ll| see| |123|45| cats|,\n\n|  | OK|?\n"),
        ("tekken", "Http|Server|ABc|'s| x|/\n"),
        ("gpt-4o", "Http|Server's| ABc| x|/\n"),
        ("kimi-k2", "I'll| see| |123|45| cats|,\n\n|  | OK|?\n"),
        ("kimi-k2", "Http|Server's|世界|é|世| ABc| x|/\n"),
    ],
)
def test_words_are_cut_as_their_name_says(name: str, expected: str) -> None:
    cut = expected.split("|")
    assert words(name, "".join(cut)) == cut


def test_words_of_gpt2_and_starcoder_are_those_of_the_library(shared_data: Locate) -> None:
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
    starcoder = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    texts = json.loads(shared_data("adversarial/naughty_strings.json").read_text(encoding="utf-8"))
    for name, theirs in {"gpt-2": gpt2, "starcoder": starcoder}.items():
        content, _ = hf_tokenizer(byte_level(pre=name))
        ours = tokenizers.Tokenizer.from_str(json.dumps(content)).pre_tokenizer
        assert ours is not None
        for text in texts:
            assert ours.pre_tokenize_str(text) == theirs.pre_tokenize_str(text)


def known_names() -> list[str]:
    with pytest.raises(TokenizerError) as caught:
        hf_tokenizer(byte_level(pre="none such"))
    return caught.value.why.partition("known are ")[2].split(", ")


@pytest.mark.parametrize("name", known_names())
def test_any_way_to_cut_words_loses_nothing(name: str) -> None:
    tokenizer = tokenizer_of(byte_level(pre=name))
    for text in ("I'd x2 = 12345;\r\n\n\t  Ünï 你好, ΑΒΓ ⅷ ١٢٣ _a-b/c\n ", "  ", "\n", "", "…“”", "\U0001f9ff\ue000"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_longest_match_of_rwkv_is_read_with_its_escapes() -> None:
    every_byte = [repr(bytes([value]))[2:-1] for value in range(256)]
    tokens = ["<s>", *every_byte, r"\n\n", r"\xe4\xb8", "it's", r"\\n", "[PAD]"]
    kinds = [CONTROL, *[NORMAL] * 260, UNUSED]
    tokenizer = tokenizer_of(table(tokens, kinds, model="rwkv", eos_token_id=0))
    assert tokenizer.encode("it's\n\n世\\n") == [259, 257, 258, 151, 260]
    assert tokenizer.decode([259, 257, 258, 151, 260]) == "it's\n\n世\\n"
    assert (tokenizer.eos_token_id, tokenizer.adds_bos, tokenizer.special_ids) == (0, False, {0})


def test_a_control_token_that_spells_a_byte_is_refused() -> None:
    tokens = ["Ġ", *(repr(bytes([value]))[2:-1] for value in range(256))]  # the space's stand-in
    with pytest.raises(TokenizerError, match="tokens is not usable") as caught:
        hf_tokenizer(table(tokens, [CONTROL, *[NORMAL] * 256], model="rwkv"))
    assert "'Ġ'" in caught.value.why


def test_a_word_that_is_a_token_is_taken_whole_where_the_name_says_so() -> None:
    more = {"merges": ["a b", "ab c"]}  # no merge makes "abcd"
    tokens = ("ab", "abc", "abcd")
    for name, expected in [("llama-bpe", ["abcd"]), ("tekken", ["abcd"]), ("dbrx", ["abc", "d"])]:
        tokenizer = tokenizer_of(byte_level(*tokens, pre=name, **more))
        assert [tokenizer.token_text(index) for index in tokenizer.encode("abcd")] == expected


def test_bytes_stand_for_what_is_no_piece() -> None:
    tokenizer = tokenizer_of(pieces("▁a", "▁", "a"))
    assert tokenizer.encode("aé") == [3, 1, 2]
    assert tokenizer.decode([3, 1, 2]) == "aé"


@pytest.mark.parametrize(("prefixes", "expected"), [(None, ["▁a", "▁a"]), (True, ["▁a", "▁a"]), (False, ["a", "▁a"])])
def test_a_space_goes_in_front_unless_the_file_says_no(prefixes: bool | None, expected: list[str]) -> None:
    more = {} if prefixes is None else {"add_space_prefix": prefixes}
    metadata = pieces("▁a", "▁", "a", **more)
    tokenizer = tokenizer_of(metadata)
    ids = tokenizer.encode("a a")
    assert [metadata["tokenizer.ggml.tokens"][index] for index in ids] == expected
    assert tokenizer.decode(ids) == "a a"


def test_gemma_4_has_pieces_with_merges_and_no_space_in_front() -> None:
    more = {"model": "gemma4", "merges": ["▁ a", "▁a b", "\n \n"], "bos_token_id": 0, "unknown_token_id": 0}
    metadata = pieces("▁", "a", "b", "▁a", "▁ab", "\n", "\n\n", "ba", scores=None, **more)
    tokenizer = tokenizer_of(metadata)
    ids = tokenizer.encode("ab ab\n\n\n ba é")
    assert [metadata["tokenizer.ggml.tokens"][index] for index in ids] == [
        "a", "b", "▁ab", "\n\n", "\n", "▁", "b", "a", "▁", "<0xC3>", "<0xA9>",
    ]  # fmt: skip
    assert tokenizer.decode(ids) == "ab ab\n\n\n ba é"
    assert tokenizer.adds_bos
    as_ollama_has_it = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "gemma4"}
    assert hf_tokenizer({**metadata, **as_ollama_has_it}) == hf_tokenizer(metadata)
    with pytest.raises(TokenizerError, match=r"tokenizer\.ggml\.merges is not usable"):
        hf_tokenizer({**metadata, "tokenizer.ggml.merges": None})


def test_user_defined_spaces_are_pieces_and_other_user_defined_tokens_are_cut_out_first() -> None:
    tokens = ["<unk>", "▁", "a", "▁a", "  ", "\n\n", "<b>"]
    types = [UNKNOWN, NORMAL, NORMAL, NORMAL, *[USER_DEFINED] * 3]
    more = {"model": "llama", "scores": [0.0, -5.0, -6.0, -4.0, 0.0, 0.0, 0.0], "add_space_prefix": False}
    tokenizer = tokenizer_of(table(tokens, types, **more))
    assert tokenizer.encode("a  a\n\n<b> a") == [2, 4, 2, 5, 6, 3]
    assert tokenizer.decode([2, 4, 2, 5, 6, 3]) == "a  a\n\n<b> a"
    assert tokenizer.special_ids == {0}


def test_unused_and_repeated_tokens_are_left_out() -> None:
    metadata = byte_level("[PAD256]", "<|a|>", "a")
    metadata["tokenizer.ggml.token_type"] = [*[NORMAL] * 256, UNUSED, CONTROL, NORMAL]
    tokenizer = tokenizer_of(metadata)
    assert tokenizer.vocab_size == 258
    assert tokenizer.encode("a<|a|>", special=True) == [list(BYTE_ALPHABET).index("a"), 257]
    assert tokenizer.token_id("[PAD256]") is None


def test_merges_that_make_no_token_are_left_out() -> None:
    tokenizer = tokenizer_of(byte_level("ab", merges=["a b", "a c", "ab ", "x", "", "zz y"]))
    assert tokenizer.encode("abc") == [256, list(BYTE_ALPHABET).index("c")]


@pytest.mark.parametrize(
    ("metadata", "adds"),
    [
        (pieces("a", bos_token_id=0), True),
        (pieces("a", bos_token_id=0, add_bos_token=False), False),
        (byte_level("<s>", bos_token_id=256), False),
        (byte_level("<s>", bos_token_id=256, add_bos_token=True), True),
        (byte_level("<s>", bos_token_id=256, pre="llama-bpe"), True),
        (byte_level("<s>", bos_token_id=999, pre="llama-bpe"), False),
    ],
)
def test_a_bos_goes_in_front_where_the_file_or_its_kind_says_so(metadata: Metadata, adds: bool) -> None:
    assert tokenizer_of(metadata).adds_bos == adds


def test_chat_templates_have_their_names() -> None:
    key = "tokenizer.chat_template"
    assert "chat_template" not in hf_tokenizer(byte_level())[1]
    assert hf_tokenizer({**byte_level(), key: "{{ 1 }}"})[1]["chat_template"] == "{{ 1 }}"
    named = {key: "{{ 1 }}", f"{key}.tool_use": "{{ 2 }}", f"{key}s": ["tool_use"], f"{key}.none": 3}
    config = hf_tokenizer({**byte_level(), **named})[1]
    assert config["chat_template"] == [
        {"name": "default", "template": "{{ 1 }}"},
        {"name": "tool_use", "template": "{{ 2 }}"},
    ]


def test_several_templates_are_read_from_a_folder(tmp_path: Path) -> None:
    key = "tokenizer.chat_template"
    content, config = hf_tokenizer({**byte_level(), key: "{{ 1 }}", f"{key}.tool_use": "{{ 2 }}"})
    for name, value in {"tokenizer.json": content, "tokenizer_config.json": config}.items():
        (tmp_path / name).write_text(json.dumps(value))
    assert ChatTemplate.load(tmp_path, Tokenizer.load(tmp_path)).sources == {
        "default": "{{ 1 }}",
        "tool_use": "{{ 2 }}",
    }


# What is refused


@pytest.mark.parametrize("kind", ["bert", "t5", "none", "plamo2", "other", None, 3, ["gpt2"]])
def test_a_kind_that_is_not_read_is_refused_by_name(kind: object) -> None:
    with pytest.raises(TokenizerError, match="which is not read") as caught:
        hf_tokenizer(byte_level(model=kind), "a.gguf")
    assert "a.gguf" in caught.value.what
    assert caught.value.fixes


@pytest.mark.parametrize("name", ["none such", 3, ["gpt-2"]])
def test_an_unknown_way_to_cut_words_is_refused(name: object) -> None:
    with pytest.raises(TokenizerError, match="cuts words in a way"):
        hf_tokenizer(byte_level(pre=name))


@pytest.mark.parametrize(
    ("metadata", "key"),
    [
        (byte_level(tokens=None), "tokens"),
        (byte_level(tokens=[]), "tokens"),
        (byte_level(tokens=[1, 2]), "tokens"),
        (byte_level(tokens=["a"] * ((1 << 20) + 1)), "tokens"),
        (byte_level(token_type=[1]), "token_type"),
        (byte_level(token_type=["a"] * 256), "token_type"),
        (byte_level(token_type=3), "token_type"),
        (byte_level(merges=None), "merges"),
        (byte_level(merges=[1]), "merges"),
        (pieces("a", scores=None), "scores"),
        (pieces("a", scores=[0.0]), "scores"),
        (pieces("a", scores=["a"] * 4), "scores"),
        (table(["<" * (1 << 20), "<a>"], [CONTROL] * 2, model="gpt2", merges=[]), "tokens"),
        (pieces(*(f"{index:0100}" for index in range(60_001))), "tokens"),
        (pieces(*("a" * size for size in range(1, 256)), *(f"{'a' * 200}{i}" for i in range(9))), ""),
    ],
)
def test_tables_that_do_not_fit_are_refused_by_their_key(metadata: Metadata, key: str) -> None:
    if not key:
        hf_tokenizer(metadata)
        return
    with pytest.raises(TokenizerError, match=rf"tokenizer\.ggml\.{key} is not usable"):
        hf_tokenizer({name: value for name, value in metadata.items() if value is not None})


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=5,
)
KEYS = ["tokens", "token_type", "scores", "merges", "pre", "bos_token_id", "add_bos_token", "unknown_token_id"]


@settings(max_examples=examples(300), deadline=None)
@given(st.dictionaries(st.sampled_from(KEYS), VALUES), st.sampled_from(["llama", "gpt2"]))
def test_whatever_the_metadata_holds_it_is_read_or_refused(values: dict[str, object], kind: str) -> None:
    base = pieces("a", "b", "ab") if kind == "llama" else byte_level()
    try:
        content, config = hf_tokenizer({**base, **{f"tokenizer.ggml.{key}": value for key, value in values.items()}})
    except TokenizerError:
        return
    json.dumps([content, config])
