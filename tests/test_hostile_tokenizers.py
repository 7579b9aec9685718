"""What a hostile tokenizer may do: be refused by a typed error, within 5 s and 1 GiB, without a word of its own.

The folders are opened in a process of their own, bounded in memory, and what can be opened has to encode and decode.
"""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from localllm.errors import TokenizerError
from localllm.text.tokenizer import Tokenizer
from localllm.text.tokenizer_files import library_errors
from tests.patience import PATIENCE_S
from tests.thinning import thinned

GROWTH_BYTES = 896 << 20  # the promise is 1 GiB
LIMIT_S = 5.0  # of the processor, on all threads: the clock on the wall also counts what else is running
CHILD = """
import json, resource, sys, time
from pathlib import Path
from localllm.text.tokenizer import Tokenizer
from localllm.errors import LocalLLMError
pages = int(Path("/proc/self/statm").read_text().split()[0])
limit = pages * resource.getpagesize() + (1 << 30)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for directory in sys.argv[1:]:
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    try:
        tokenizer = Tokenizer.load(Path(directory))
        ids = tokenizer.encode("a" * 40 + "!\\u00e9 ", special=True, bos=True)
        outcome = ["accepted", str(len(ids) + len(tokenizer.decode(ids)))]
    except LocalLLMError as error:
        outcome = [type(error).__name__, f"{error.what} | {error.why} | {error.fix}"]
    except BaseException as error:
        outcome = [f"crash: {type(error).__name__}", str(error)[:200]]
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    print(json.dumps([*outcome, time.process_time() - started, grown]), flush=True)
    tokenizer = ids = None
"""


@dataclass(frozen=True)
class Outcome:
    error: str
    text: str
    seconds: float
    grown_bytes: int


Data = bytes | Callable[[], bytes]  # what is large is not made before it is needed
BPE: dict[str, Any] = {"type": "BPE", "vocab": {"a": 0, "!": 1, "aa": 2, "é": 3, " ": 4}, "merges": [["a", "a"]]}


def serialized(**parts: Any) -> bytes:
    return json.dumps({"version": "1.0", "added_tokens": [], "model": BPE, **parts}).encode()


def model(**parts: Any) -> bytes:
    return serialized(model={**BPE, **parts})


def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def steps(kind: str, part: dict[str, Any], count: int) -> dict[str, Any]:
    return {"type": "Sequence", kind: [part] * count}


def charsmap(rule: bytes) -> dict[str, str]:
    blob = (4).to_bytes(4, "little") + bytes(4) + rule
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(blob).decode()}


def post(piece: str) -> dict[str, Any]:
    single = [{"SpecialToken": {"id": piece, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    return {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": {}}


def unigram(pieces: Iterable[str]) -> bytes:
    return model(type="Unigram", unk_id=0, vocab=[[piece, -1.0] for piece in pieces])


def added(contents: Iterable[str]) -> bytes:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return serialized(added_tokens=[{"id": 5 + i, "content": text, **flags} for i, text in enumerate(contents)])


def filled(before: bytes, item: bytes, count: int, after: bytes) -> Callable[[], bytes]:
    return lambda: before + item * count + after


GROWING = replace({"String": "a"}, "a" * 1000)
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
NO_MERGES = b'{"model": {"type": "BPE", "vocab": {}, "merges": ['
BOMBS: dict[str, Data] = {
    "pieces of length 0": serialized(pre_tokenizer={"type": "FixedLength", "length": 0}),
    "undeclared special token": serialized(post_processor=post("<x>")),
    "undeclared special token within": serialized(post_processor=steps("processors", post("<x>"), 2)),
    "character map of three bytes": serialized(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
    "character map of no base64": serialized(normalizer={"type": "Precompiled", "precompiled_charsmap": "!"}),
    "character map that grows": serialized(normalizer=charsmap(b"a" * 1000)),
    "Replace to a thousand": serialized(normalizer=GROWING),
    "Replace to a thousand, four times": serialized(normalizer=steps("normalizers", GROWING, 4)),
    "Replace of nothing": serialized(normalizer=steps("normalizers", replace({"Regex": "(?=a)"}, "a"), 40)),
    "Replace of an empty text": serialized(normalizer=steps("normalizers", replace({"String": ""}, "a"), 40)),
    "Prepend of a megabyte": serialized(normalizer={"type": "Prepend", "prepend": "a" * 1_000_000}),
    "bytes of bytes of bytes": serialized(normalizer=steps("normalizers", {"type": "ByteLevel"}, 40)),
    "bytes of bytes in words": serialized(pre_tokenizer=steps("pretokenizers", BYTE_LEVEL, 40)),
    "a decoder that grows": serialized(decoder={"type": "Sequence", "decoders": [*[GROWING] * 4, {"type": "Fuse"}]}),
    "a prefix of a megabyte": model(merges=[], continuing_subword_prefix="a" * 1_000_000),
    "objects": filled(b'{"model": [', b'{"a":1},', 6_000_000, b"{}]}"),
    "lists": filled(b'{"model": [', b"[],", 16_000_000, b"[]]}"),
    "numbers": filled(b'{"model": [', b"1,", 24_000_000, b"1]}"),
    "as many objects as may be": filled(b'{"model": [', b'{"a":1},', 190_000, b"{}]}"),
    "as many lists as may be": filled(NO_MERGES, b"[],", 1_500_000, b"[]]}}"),
    "as many texts as may be": filled(NO_MERGES, b'"a",', 6_000_000, b'""]}}'),
    "a vocabulary of lists": filled(b'{"model": {"type": "Unigram", "vocab": [', b'["a",0],', 1_500_000, b'["b",0]]}}'),
    "as many merges as may be": filled(NO_MERGES, b'["a","b"],', 1_500_000, b"[]]}}"),
    "pieces of 1000 characters": lambda: unigram(f"{number:01000}" for number in range(4_000)),
    "a million pieces": lambda: unigram(f"{number:06}" for number in range(1_000_000)),
    "added tokens of 400 characters": lambda: added(f"{number:0400}" for number in range(10_000)),
    "two added tokens of 20 MB": lambda: added(["a" * 20_000_000, "b" * 20_000_000]),
    "added tokens under another spelling": lambda: added(["a" * 20_000_000]).replace(b'"content"', b'"\\u0063ontent"'),
    "NaN": model(dropout=float("nan")),
    "a dropout of -1": model(dropout=-1.0),
    "an id of 2^31": model(vocab={"a": 1 << 31}, merges=[]),
    "50 MB": filled(b"", b" ", 50_000_000, b""),
    "empty": b"",
    "cut": b'{"version": "1.0", "model": {"type": "BPE", "vo',
    "another type": b"[1, 2]",
    "deep": b"[" * 1_000_000,
    "unknown model": model(type="Magic"),
    "an id of 2^32": model(vocab={"a": (1 << 32) - 1}, merges=[]),
    "a merge of nothing": model(vocab={"a": 0}, merges=[["a", "b"]]),
    "no token": model(vocab={}, merges=[]),
}
CONFIGS: dict[str, Data] = {
    "objects": filled(b'{"a": [', b'{"a":1},', 1_800_000, b"{}]}"),
    "lists": filled(b'{"a": [', b"[],", 5_000_000, b"[]]}"),
    "numbers": filled(b'{"a": [', b"1,", 8_000_000, b"1]}"),
    "duplicate keys": b'{"bos_token": "a", "bos_token": "b"}',
    "NaN": b'{"model_max_length": NaN}',
    "half a surrogate pair": b'{"bos_token": "\\ud800"}',
    "half a surrogate pair in a token": b'{"added_tokens_decoder": {"5": {"content": "\\udfff"}}}',
    "an id of 9000 digits": b'{"added_tokens_decoder": {"' + b"9" * 9000 + b'": {"content": "x"}}}',
    "an id in Arabic digits": '{"added_tokens_decoder": {"٥": {"content": "x"}}}'.encode(),
    "added tokens of 400 characters": json.dumps(
        {"added_tokens_decoder": {str(5 + i): {"content": f"{i:0400}"} for i in range(10_000)}}
    ).encode(),
    "deep": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "17 MB": filled(b"", b" ", 17_000_000, b""),
}
VOCABULARIES: dict[str, Data] = {
    "duplicate keys": b'{"a": 0, "a": 1}',
    "NaN": b'{"a": NaN}',
    "a text as id": b'{"a": "0"}',
    "a negative id": b'{"a": -1}',
    "an id of 2^32": b'{"a": 4294967296}',
    "a boolean as id": b'{"a": true}',
    "objects": filled(b'{"a": [', b'{"a":1},', 6_000_000, b"{}]}"),
}
MERGES: dict[str, Data] = {
    "11 million lines": filled(b"", b"a a\n", 11_000_000, b""),
    "47 MB of ends of lines": filled(b"", b"\n", 47 << 20, b""),
    "an unknown part": b"a b\n",
    "one part": b"a\n",
}
HOSTILE = {f"tokenizer.json: {name}": {"tokenizer.json": data} for name, data in BOMBS.items()}
HOSTILE |= {
    f"tokenizer_config.json: {name}": {"tokenizer.json": serialized(), "tokenizer_config.json": data}
    for name, data in CONFIGS.items()
}
TWO_FILES: dict[str, Data] = {"vocab.json": b'{"a": 0, "b": 1}', "merges.txt": b"#version: 0.2\n"}
HOSTILE |= {
    f"{name}: {data!r}": {**TWO_FILES, name: data}
    for name in (*TWO_FILES, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
    for data in (b"\xff\xfe", b"{", b"[]", b"q q q")
}
HOSTILE |= {f"vocab.json: {name}": {"vocab.json": data, "merges.txt": b""} for name, data in VOCABULARIES.items()}
HOSTILE |= {
    f"merges.txt: {name}": {"vocab.json": b'{"a": 0, "aa": 1}', "merges.txt": data} for name, data in MERGES.items()
}


def write(folder: Path, files: dict[str, Data]) -> Path:
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data() if callable(data) else data)
    return folder


# Each takes half a second to two to read, and is bounded as those beside it are.
LONG = {
    f"tokenizer.json: {name}"
    for name in (
        "as many texts as may be", "two added tokens of 20 MB", "as many merges as may be", "a vocabulary of lists",
        "50 MB",
    )
}  # fmt: skip


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """Of those that this run is about."""
    root = tmp_path_factory.mktemp("tokenizers")
    named = [item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")]
    asked = {name: files for name, files in HOSTILE.items() if name in named}
    folders = [write(root / str(number), files) for number, files in enumerate(asked.values())]
    command = [sys.executable, "-c", CHILD, *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    shutil.rmtree(root)  # half a gigabyte
    found = [Outcome(*json.loads(line)) for line in done.stdout.splitlines()]
    assert len(found) == len(asked), f"{list(asked)[len(found)]}: {done.returncode} {done.stderr[-800:]}"
    assert "panicked" not in done.stderr, done.stderr[:800]
    return dict(zip(asked, found, strict=True))


@pytest.mark.parametrize("name", thinned(HOSTILE, lambda name: name not in LONG))
def test_a_hostile_tokenizer_ends_in_a_typed_error_in_time_and_memory(name: str, outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes[name]
    assert outcome.error == "TokenizerError", outcome
    assert "/tokenizers0/" in outcome.text and name.split(":")[0] in outcome.text
    assert outcome.seconds < LIMIT_S and outcome.grown_bytes < GROWTH_BYTES


def test_a_pattern_without_end_is_a_typed_error_when_text_comes_in(tmp_path: Path) -> None:
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    tokenizer = Tokenizer.load(write(tmp_path / "model", {"tokenizer.json": serialized(pre_tokenizer=split)}))
    assert tokenizer.encode("aa") == [2]
    with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot encode this text") as caught:
        tokenizer.encode("a" * 40 + "!")
    assert "retry-limit" in caught.value.why and tokenizer.encode("aa") == [2]


SPACES_TO_SIGNS = [{"type": "Prepend", "prepend": "▁"}, replace({"String": " "}, "▁")]
T5 = [{"type": "NFKC"}, replace({"Regex": " {2,}"}, " "), replace({"Regex": "\\n"}, " ")]


@pytest.mark.parametrize("normalizers", [SPACES_TO_SIGNS, T5, [{"type": "ByteLevel"}]], ids=["llama", "t5", "bytes"])
def test_what_tokenizers_in_use_do_to_a_text_is_allowed(tmp_path: Path, normalizers: list[dict[str, Any]]) -> None:
    data = serialized(normalizer={"type": "Sequence", "normalizers": normalizers})
    Tokenizer.load(write(tmp_path / "model", {"tokenizer.json": data}))


def test_a_token_that_reads_like_an_escape_is_none(tmp_path: Path) -> None:
    data = model(vocab={**BPE["vocab"], "\\u0061": 5, "\u0120": 6})
    assert rb'"\\u0061"' in data and rb'"\u0120"' in data
    assert Tokenizer.load(write(tmp_path / "model", {"tokenizer.json": data})).token_text(5) == "\\u0061"


def test_a_control_c_while_the_library_works_is_no_error_of_the_tokenizer() -> None:
    with pytest.raises(KeyboardInterrupt), library_errors("the tokenizer"):
        raise KeyboardInterrupt


def test_other_threads_run_while_a_long_text_is_encoded(qwen: Tokenizer) -> None:
    text = "once upon a time " * 100_000
    worker = threading.Thread(target=qwen.encode, args=(text,))
    turns = 0
    worker.start()
    while worker.is_alive():
        time.sleep(0.001)
        turns += 1
    assert turns > 20  # one or two, where the library keeps the interpreter to itself


def test_thirty_thousand_added_tokens_are_ready_in_time(tmp_path: Path) -> None:
    data = added(f"<|visual token {number:06}|>" for number in range(30_000))
    started = time.process_time()
    tokenizer = Tokenizer.load(write(tmp_path / "model", {"tokenizer.json": data}))
    assert len(tokenizer.encode("a<|visual token 000007|>", special=True)) == 2
    assert time.process_time() - started < 3
