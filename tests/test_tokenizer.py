"""Text to ids and back: real tokenizers against llama.cpp's ids, hostile text, hostile files."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from localllm.errors import TokenizerError
from localllm.hub.names import TINY_DIRECTORY
from localllm.text.chat_template import ChatInput, ChatTemplate, encode_chat
from localllm.text.tokenizer import Tokenizer
from tests.checkpoints import write_byte_tokenizer
from tests.cli_support import run_cli, write_checkpoint, write_sentencepiece
from tests.thinning import examples

Locate = Callable[[str], Path]


@pytest.fixture(scope="module", params=["phi", "qwen", "tiny"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return Tokenizer.load(TINY_DIRECTORY) if request.param == "tiny" else request.getfixturevalue(request.param)


def backend_of(characters: str, **more: Any) -> tokenizers.Tokenizer:
    vocab = {char: index for index, char in enumerate(characters)}
    return tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], **more))


def small_backend(**parts: Any) -> tokenizers.Tokenizer:
    backend = backend_of("abcdefghij <|>s/")
    for name, part in parts.items():
        setattr(backend, name, part)
    return backend


@pytest.mark.parametrize(("name", "stem"), [("phi", "phi-3"), ("qwen", "qwen2")])
def test_ids_are_those_of_llama_cpp(request: pytest.FixtureRequest, shared_data: Locate, name: str, stem: str) -> None:
    tokenizer, stem = request.getfixturevalue(name), f"tokenizers/expected/ggml-vocab-{stem}.gguf"
    texts = shared_data(f"{stem}.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    expected = [[int(word) for word in line.split()] for line in shared_data(f"{stem}.out").read_text().split("\n")]
    assert len(texts) == 47  # 46, and nothing after the last separator
    assert [tokenizer.encode(text) for text in texts] == expected


def test_naughty_strings_come_back_and_make_no_special_id(tokenizer: Tokenizer, shared_data: Locate) -> None:
    naughty = json.loads(shared_data("adversarial/naughty_strings.json").read_text(encoding="utf-8"))
    assert len(naughty) == 515
    encoded = [tokenizer.encode(text) for text in naughty]
    assert [tokenizer.decode(ids) for ids in encoded] == naughty
    assert tokenizer.special_ids.isdisjoint(index for ids in encoded for index in ids)


@pytest.mark.parametrize("form", ["{}", " {} ", "a{}b", "{}{}", "{}\n", "<{}>", "{}|>"])
def test_the_text_of_a_special_token_is_plain_text(tokenizer: Tokenizer, form: str) -> None:
    for index in sorted(tokenizer.special_ids):
        text = form.replace("{}", tokenizer.token_text(index))
        ids = tokenizer.encode(text)
        assert tokenizer.special_ids.isdisjoint(ids) and tokenizer.decode(ids) == text


def test_a_special_token_that_is_meant_becomes_its_id(tokenizer: Tokenizer) -> None:
    for index in sorted(tokenizer.special_ids):
        assert tokenizer.encode(tokenizer.token_text(index), special=True) == [index]


def test_special_tokens_are_left_out_of_text_unless_asked_for(tokenizer: Tokenizer) -> None:
    index = min(tokenizer.special_ids)
    ids = [*tokenizer.encode("one"), index, *tokenizer.encode(" two")]
    assert tokenizer.token_text(index) not in tokenizer.decode(ids)
    assert tokenizer.token_text(index) in tokenizer.decode(ids, skip_special=False)


def test_two_files_of_vocabulary_give_the_ids_that_transformers_gives(shared_data: Locate, qwen: Tokenizer) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(shared_data("tokenizers/qwen2.5-0.5b-instruct"))
    text = "It's 1234 cafe\u0301 <|im_start|>user\nhi<tool_call> \u00c5ngstro\u0308m\r\n\r\n  x<|im_end|>"
    assert qwen.encode(text, special=True) == theirs.encode(text, add_special_tokens=False)
    assert qwen.vocab_size == len(theirs)
    assert (qwen.bos_token, qwen.eos_token) == (theirs.bos_token, theirs.eos_token)


def test_token_text_shows_what_is_no_character_as_escapes(phi: Tokenizer) -> None:
    assert [phi.token_text(index) for index in phi.encode("🦙 a")][1:3] == ["\\xf0", "\\x9f"]
    assert phi.token_text(phi.vocab_size + 5) == "" and phi.decode([phi.vocab_size + 5, -1]) == ""


def with_bos(*, config: dict[str, Any] | None = None) -> Tokenizer:
    backend = small_backend(decoder=decoders.Fuse())
    backend.add_special_tokens(["<s>", "</s>"])
    start = ("<s>", backend.token_to_id("<s>"))
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[start])
    return Tokenizer(backend, {"bos_token": "<s>", "eos_token": {"content": "</s>"}} if config is None else config)


def test_a_bos_stands_in_front_once() -> None:
    tokenizer = with_bos()
    assert tokenizer.adds_bos
    bos = tokenizer.bos_token_id
    assert tokenizer.encode("ab", bos=True) == [bos, 0, 1]
    assert tokenizer.encode("<s>ab", bos=True, special=True) == [bos, 0, 1]
    assert tokenizer.encode("", bos=True) == [bos] and bos not in tokenizer.encode("<s>ab")


def test_a_bos_is_found_in_the_post_processor_and_left_out_where_the_config_says_so() -> None:
    assert with_bos(config={}).bos_token == "<s>"
    tokenizer = with_bos(config={"bos_token": "<s>", "add_bos_token": False})
    assert not tokenizer.adds_bos and tokenizer.encode("ab", bos=True) == [0, 1]


def test_a_token_with_the_shape_of_a_control_token_is_special_though_its_flag_was_forgotten() -> None:
    backend = small_backend()
    backend.add_tokens([AddedToken("<|end|>", special=False), AddedToken("<think>", special=False)])
    tokenizer = Tokenizer(backend)
    assert {tokenizer.token_text(index) for index in tokenizer.special_ids} == {"<|end|>"}


def test_no_normalizer_turns_text_into_a_special_token() -> None:
    backend = small_backend(normalizer=normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()]))
    backend.add_special_tokens([AddedToken("<|s|>", normalized=True)])
    tokenizer = Tokenizer(backend)
    for text in ("<|S|>", "\uff1c|s|>"):
        assert tokenizer.special_ids.isdisjoint(tokenizer.encode(text, special=True))


def test_a_vocabulary_that_holds_a_special_text_as_a_piece_cannot_forge_it() -> None:
    vocab = [("<unk>", 0.0), *((char, -5.0) for char in "<s>ab"), ("<s>", -0.1)]
    backend = tokenizers.Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=False))
    backend.add_special_tokens(["<s>"])
    backend.decoder = decoders.Fuse()
    tokenizer = Tokenizer(backend)
    ids = tokenizer.encode("a<s>b<s>")
    assert tokenizer.special_ids.isdisjoint(ids) and tokenizer.decode(ids) == "a<s>b<s>"


def test_a_text_after_a_special_token_is_given_no_space_that_only_the_first_is_given() -> None:
    backend = backend_of("▁ab<|s>\x01")
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    backend.add_special_tokens(["<s>", "<|s>"])
    tokenizer = Tokenizer(backend)
    bos = tokenizer.token_id("<s>")
    pieces = [("<s>", True), ("a<s>b", False), ("<s>", True), ("b", False)]
    assert tokenizer.encode_pieces(pieces) == [bos, *map("▁ab<|s>".index, "a<s>b"), bos, 2]
    assert tokenizer.encode_pieces([("a<s>b", False)]) == list(map("▁ab<|s>".index, "▁a<s>b"))


@settings(max_examples=examples(150), deadline=None)
@given(data=st.data())
def test_pieces_have_the_ids_of_their_whole(tokenizer: Tokenizer, data: st.DataObject) -> None:
    special = st.sampled_from(sorted(tokenizer.special_texts)).map(lambda text: (text, True))
    words = st.lists(st.sampled_from(["a", "It's", " ", "\n", "\x1c", "\u3000", "\x85", "ü", "1"]), min_size=1)
    plain = words.map(lambda parts: ("".join(parts), False))
    pieces = [piece for pair in data.draw(st.lists(st.tuples(special, plain), max_size=4)) for piece in pair]
    pieces = data.draw(st.sampled_from([pieces, pieces[1:], pieces[:-1]]))
    whole = "".join(text for text, _ in pieces)
    assert tokenizer.encode_pieces(pieces) == tokenizer.encode(whole, special=True)


@pytest.mark.parametrize("flags", [{"lstrip": True}, {"rstrip": True}, {"lstrip": True, "rstrip": True}])
@pytest.mark.parametrize("space", [" ", "\n \t", "\x1c ", " \x1f", "\u2003", "\u200b", "\x85\xa0", "\u2029"])
def test_a_special_token_swallows_the_white_space_that_the_library_lets_it(flags: dict[str, bool], space: str) -> None:
    backend = backend_of(f"a{space}", unk_token="a")
    backend.add_special_tokens([AddedToken("<x>", **flags)])
    tokenizer = Tokenizer(backend)
    pieces = [(f"a{space}", False), ("<x>", True), (f"{space}a", False)]
    assert tokenizer.encode_pieces(pieces) == tokenizer.encode(f"a{space}<x>{space}a", special=True)


def test_half_a_surrogate_pair_becomes_a_replacement_character(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("a\ud800b\udfff")) == "a\ufffdb\ufffd"
    assert Tokenizer(small_backend(), {"bos_token": "\ud800"}).bos_token == "\ufffd"


def test_truncation_in_the_file_does_not_shorten_a_prompt(tmp_path: Path) -> None:
    backend = small_backend()
    backend.enable_truncation(max_length=2)
    backend.enable_padding(length=9)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer.load(tmp_path).encode("abcdef")) == 6


def test_a_megabyte_takes_less_than_two_seconds(shared_data: Locate, qwen: Tokenizer) -> None:
    text = shared_data("wikitext-2/valid.txt").read_text(encoding="utf-8")[: 1 << 20]
    start = time.process_time()
    qwen.encode(text)
    assert time.process_time() - start < 2


def test_a_file_of_many_gigabytes_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(TokenizerError, match="too large"):
        Tokenizer.load(tmp_path)


CLIP = {"tokenizer_class": "CLIPTokenizer"}


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"tokenizer.model": "\n"}, "tokenizer.model"),
        ({"tiktoken.model": "\n"}, "tiktoken.model"),
        ({"vocab.json": "{}", "merges.txt": "", "tokenizer_config.json": json.dumps(CLIP)}, "CLIPTokenizer"),
    ],
)
def test_a_folder_of_unknown_words_says_what_is_missing(tmp_path: Path, files: dict[str, str], says: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json") as caught:
        Tokenizer.load(tmp_path)
    assert says in caught.value.why


def test_an_added_token_with_an_impossible_id_is_an_error(tmp_path: Path) -> None:
    small_backend().save(str(tmp_path / "tokenizer.json"))
    declared = {"added_tokens_decoder": {"900": {"content": "<x>", "special": True}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(declared))
    with pytest.raises(TokenizerError, match="<x>"):
        Tokenizer.load(tmp_path)


def chat_ids(tokenizer: Tokenizer, source: str, text: str) -> list[int]:
    template = ChatTemplate(source, special_tokens=tokenizer.special_tokens)
    return encode_chat(template, tokenizer, ChatInput([{"role": "user", "content": text}]))


def declaring(directory: Path, config: dict[str, Any], older: dict[str, Any] | None = None) -> Path:
    """A folder whose tokenizer.json calls none of [U], [A], [T] and <image> special."""
    write_byte_tokenizer(directory)
    backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in ("[U]", "[A]", "[T]", "<image>")])
    backend.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    if older is not None:
        (directory / "special_tokens_map.json").write_text(json.dumps(older))
    return directory


ADDED = {
    "258": {"content": "[U]", "special": True, "rstrip": True},
    "259": {"content": "[A]", "special": True},
    "260": {"content": "[T]", "special": False},
}


@pytest.mark.parametrize(
    ("config", "older"),
    [
        ({"additional_special_tokens": ["[U]", "[A]"]}, None),
        ({"extra_special_tokens": ["[U]", "[A]"]}, None),
        ({"extra_special_tokens": {"user_token": "[U]", "answer_token": "[A]"}}, None),
        ({"user_token": "[U]", "pad_token": "[A]"}, None),
        ({"eos_token": {"__type": "AddedToken", "content": "[U]"}, "cls_token": "[A]"}, None),
        ({}, {"additional_special_tokens": ["[U]", "[A]"]}),
        ({}, {"eos_token": "[U]", "sep_token": {"content": "[A]"}}),
        ({"added_tokens_decoder": ADDED}, None),
    ],
)
def test_what_the_configuration_declares_special_is_so_as_in_transformers(
    tmp_path: Path, config: Any, older: Any
) -> None:
    tokenizer = Tokenizer.load(declaring(tmp_path, config, older))
    oracle = transformers.AutoTokenizer.from_pretrained(tmp_path)
    special = {*oracle.all_special_ids, *(i for i, token in oracle.added_tokens_decoder.items() if token.special)}
    assert {258, 259} <= special and special | {257} == tokenizer.special_ids | {257}
    text = "[U]  hi[A] [T]<image>"
    assert tokenizer.special_ids.isdisjoint(tokenizer.encode(text))
    assert tokenizer.decode(tokenizer.encode(text)) == text
    meant = oracle.encode(text, add_special_tokens=False)
    assert tokenizer.encode(text, special=True) == meant
    assert tokenizer.decode(meant) == "".join(map(oracle.decode, (each for each in meant if each not in special)))
    ids = chat_ids(tokenizer, "[U]{{ messages[0].content }}[A]", "x[A]y")
    assert [index for index in ids if index in (258, 259)] == [258, 259]


def test_a_piece_of_the_vocabulary_becomes_special_where_it_is_declared(tmp_path: Path) -> None:
    vocab = {"a": 0, "b": 1, "<": 2, ">": 3, "<a": 4, "<a>": 5}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [("<", "a"), ("<a", ">")]))
    backend.decoder = decoders.Fuse()
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"additional_special_tokens": ["<a>", "b", "<absent>"]}')
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.special_ids == {5} and tokenizer.encode("b<a>b") == [1, 2, 0, 3, 1]


def test_names_of_special_tokens_are_for_the_template_as_in_transformers(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(declaring(tmp_path, {"extra_special_tokens": {"image_token": "<image>"}}))
    oracle = transformers.AutoTokenizer.from_pretrained(tmp_path)
    source = "{{ bos_token }}{{ image_token }}"
    template = ChatTemplate(source, special_tokens=tokenizer.special_tokens)
    told = oracle.apply_chat_template([{"role": "user", "content": "x"}], chat_template=source, tokenize=False)
    assert template.render([{"role": "user", "content": "x"}]) == told == "<s><image>"


def test_too_many_declared_special_tokens_are_an_error(tmp_path: Path) -> None:
    many = [f"[{number:09}]" for number in range(100_000)]
    with pytest.raises(TokenizerError, match="too many special tokens"):
        Tokenizer.load(declaring(tmp_path, {"additional_special_tokens": many}))


def of_model(directory: Path, num_ids: int) -> Tokenizer:
    """The tokenizer of a model with so many rows."""
    config = {"model_type": "llama", "vocab_size": num_ids, "hidden_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "intermediate_size": 96, "max_position_embeddings": 64}
    (directory / "config.json").write_text(json.dumps(config | heads))
    return Tokenizer.load(directory)


def unigram(directory: Path) -> None:
    pieces = [("<unk>", 0.0), *((char, -9.0) for char in "▁Telm"), ("▁me", -1.0), ("▁Tell", -1.0), ("Te", -1.0)]
    backend = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    backend.decoder = decoders.Metaspace(prepend_scheme="never")
    backend.add_special_tokens(["[PAD]"])
    backend.save(str(directory / "tokenizer.json"))


def two_files(directory: Path) -> None:
    letters = [*pre_tokenizers.ByteLevel.alphabet()]
    merges = [("T", "e"), ("l", "l"), ("Te", "ll"), ("m", "e"), ("Ġ", "me")]
    vocab = {piece: index for index, piece in enumerate([*letters, *map("".join, merges)])}
    (directory / "vocab.json").write_text(json.dumps(vocab))
    (directory / "merges.txt").write_text("\n".join(map(" ".join, merges)))
    declared = {str(len(vocab)): {"content": "[PAD]", "special": True}}
    config = {"tokenizer_class": "GPT2Tokenizer", "pad_token": "[PAD]", "added_tokens_decoder": declared}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("write", [write_sentencepiece, unigram, two_files])
@pytest.mark.parametrize("num_missing", [1, 2, 3])
def test_a_token_that_the_model_has_no_row_for_is_spelled_by_others(
    tmp_path: Path, write: Any, num_missing: int
) -> None:
    write(tmp_path)
    size = Tokenizer.load(tmp_path).vocab_size - num_missing
    tokenizer = of_model(tmp_path, size)
    assert tokenizer.vocab_size == size and all(index < size for index in tokenizer.special_ids)
    for special in (False, True):
        ids = tokenizer.encode(" Tell me", special=special)
        assert max(ids) < size and tokenizer.decode(ids).lstrip() == "Tell me"
        assert max(tokenizer.encode("[PAD]<|assistant|>", special=special)) < size
    assert max(chat_ids(tokenizer, "{{ pad_token }}<|assistant|>{{ messages[0].content }}", "Tell")) < size


def test_a_tokenizer_as_large_as_its_model_stays_as_it_is(tmp_path: Path) -> None:
    write_sentencepiece(tmp_path)
    whole = Tokenizer.load(tmp_path)
    assert of_model(tmp_path, whole.vocab_size).difference(whole) == ""


def test_a_model_without_rows_for_letters_is_an_error(tmp_path: Path) -> None:
    unigram(tmp_path)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json") as caught:
        of_model(tmp_path, 4)
    assert "'l' is one of them" in caught.value.why


def test_a_real_tokenizer_gets_along_with_fewer_rows(tmp_path: Path, shared_data: Locate, phi: Tokenizer) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).symlink_to(shared_data(f"tokenizers/phi-3-mini/{name}"))
    tokenizer = of_model(tmp_path, 31_000)
    for text in ("Once upon a time 🦙 漢字", "<|end|>Łódź<|user|>"):
        ids = tokenizer.encode(text, special=True)
        assert max(ids) < 31_000 and tokenizer.decode(ids) == text
    assert tokenizer.encode("Once upon a time") == phi.encode("Once upon a time")


def test_a_model_with_fewer_rows_than_its_tokenizer_has_ids_answers_whatever_is_said(tmp_path: Path) -> None:
    def write(directory: Path) -> int:
        return write_sentencepiece(directory, "{{ messages[0].content }}<|assistant|>") - 3

    model = write_checkpoint(tmp_path, write_tokenizer=write, eos_token_id=2)
    ids = run_cli("tokenize", model, "--json", "Tell me[PAD]<|assistant|>").json["token_ids"]
    assert max(ids) < Tokenizer.load(model).vocab_size
    for arguments in (["--raw"], [], ["--regex", r"<\|assistant\|>Tell me"], ["--beams", "2"]):
        asked = ("-p", "Tell me<|assistant|>", "--max-tokens", "30", "--temperature", "0")
        result = run_cli("run", model, *arguments, *asked)
        assert result.code == 0, result.err
        assert "--regex" not in arguments or result.out == b"<|assistant|>Tell me\n"
