"""A text goes on as if it had been decoded with what stands before it, also where a decoder drops a leading blank."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from localllm import Engine, SamplingParams
from localllm.text.detokenizer import Detokenizer
from localllm.text.grammar.grammar import Grammar
from localllm.text.tokenizer import Tokenizer
from tests.cli_support import Result, run_cli, write_chain, write_sentencepiece
from tests.thinning import examples

Locate = Callable[[str], Path]
GREEDY = SamplingParams(temperature=0, max_tokens=4)
CHAIN = ("]", "▁Once", "▁upon", "▁a", "▁time", "</s>")


@pytest.fixture(scope="module")
def teller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Says " Once upon a time" behind the end of a question, and the rest of it behind each of its words."""
    return write_chain(tmp_path_factory.mktemp("teller"), *CHAIN, eos_token_id=2)


@pytest.fixture(scope="module")
def engine(teller: Path) -> Engine:
    return Engine.load(teller)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("small")
    write_sentencepiece(directory)
    return Tokenizer.load(directory)


def run(model: Path, *arguments: str | Path) -> Result:
    return run_cli("run", model, "--temperature", "0", "--max-tokens", "4", *arguments)


def rest(tokenizer: Tokenizer, before: list[int], ids: list[int]) -> str:
    detokenizer = Detokenizer(tokenizer, behind=before)
    return "".join([*map(detokenizer.push, ids), detokenizer.finish()])


def said(engine: Engine, *prompt: object, **more: object) -> str:
    events = engine.generate(*prompt, GREEDY, **more)  # type: ignore[arg-type]
    return "".join(getattr(event, "text", "") for event in events)


@pytest.mark.parametrize("flags", [[], ["--json"], ["--jsonl"], ["--beams", "2", "--json"], ["--n", "1", "--json"]])
def test_a_raw_text_goes_on_with_its_blank(teller: Path, flags: list[str]) -> None:
    result = run(teller, "--raw", "-p", "Once upon", *flags)
    assert result.code == 0, result.err
    if "--jsonl" in flags:
        lines = map(json.loads, result.out.splitlines())
        text = "".join(line["text"] for line in lines if line["type"] == "token")
    else:
        text = result.json["text"] if flags else result.out.decode().removesuffix("\n")
    assert text == " a time"


def test_raw_lines_of_a_batch_go_on_with_their_blanks(teller: Path, tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"prompt": "Once upon"}\n{"prompt": "Once"}\n')
    result = run(teller, "--raw", "--batch", lines)
    assert [json.loads(line)["text"] for line in result.out.splitlines()] == [" a time", " upon a time"]


def test_a_text_goes_on_with_its_blank_in_python(engine: Engine) -> None:
    assert said(engine, "Once upon") == " a time"
    assert said(engine, engine.encode("Once upon")) == " a time"


def test_the_turn_of_a_chat_begins_without_a_blank(teller: Path, engine: Engine, tmp_path: Path) -> None:
    assert run(teller, "-p", "Tell me").out == b"Once upon a time\n"
    assert said(engine, [{"role": "user", "content": "Tell me"}]) == "Once upon a time"
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"prompt": "Tell me"}\n')
    assert run(teller, "--batch", lines).json["text"] == "Once upon a time"


def test_a_stop_text_with_a_blank_matches_at_the_seam(teller: Path) -> None:
    result = run(teller, "--raw", "-p", "Once", "--stop", " upon", "--json")
    assert (result.json["text"], result.json["finish_reason"]) == ("", "stop")
    assert run(teller, "--raw", "-p", "Once upon", "--stop", " time", "--beams", "2", "--json").json["text"] == " a"


def test_a_grammar_holds_what_is_said_with_its_blank(engine: Engine) -> None:
    assert said(engine, "Once upon", grammar=Grammar("regex", " a time")) == " a time"
    assert said(engine, "Once upon", grammar=Grammar("regex", "[a ]+ti")).startswith(("a", "ti", " a"))
    question = [{"role": "user", "content": "Tell me"}]
    assert said(engine, question, grammar=Grammar("regex", "Once upon")) == "Once upon"


def test_behind_nothing_but_special_tokens_a_text_begins(engine: Engine) -> None:
    bos = engine.tokenizer.bos_token_id
    once = engine.tokenizer.token_id("▁Once")
    assert bos is not None and once is not None
    assert rest(engine.tokenizer, [bos], [once, once]) == "Once Once"
    assert rest(engine.tokenizer, [bos, once], [once]) == " Once"


@pytest.fixture(params=["phi-3-mini", "qwen2.5-0.5b-instruct", ""])
def tokenizer(request: pytest.FixtureRequest, shared_data: Locate, small: Tokenizer) -> Tokenizer:
    return Tokenizer.load(shared_data(f"tokenizers/{request.param}")) if request.param else small


@settings(
    max_examples=examples(150),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_what_is_said_behind_a_text_is_what_both_decode_to_without_it(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    words = [" ", "  ", "Once", " upon", "a", " time", "\n", "é", "🐻", "!"]
    text = "".join(data.draw(st.lists(st.sampled_from(words), max_size=8)))
    specials = st.lists(st.sampled_from(sorted(tokenizer.special_ids)), max_size=2)
    before = [*data.draw(specials), *tokenizer.encode(text), *data.draw(specials)]
    ids = tokenizer.encode("".join(data.draw(st.lists(st.sampled_from(words), max_size=8))))
    assert tokenizer.decode(before) + rest(tokenizer, before, ids) == tokenizer.decode([*before, *ids])


def test_a_real_text_goes_on_as_transformers_decodes_it(shared_data: Locate) -> None:
    transformers = pytest.importorskip("transformers")
    directory = shared_data("tokenizers/phi-3-mini")
    oracle, tokenizer = transformers.AutoTokenizer.from_pretrained(directory), Tokenizer.load(directory)
    before, ids = oracle.encode("<s>Once upon"), oracle.encode("a time")
    whole = oracle.decode([*before, *ids], skip_special_tokens=True)
    assert whole == "Once upon a time"
    assert rest(tokenizer, before, ids) == whole.removeprefix(oracle.decode(before, skip_special_tokens=True))


def test_a_word_behind_a_vocabulary_of_words_is_spaced() -> None:
    backend = tokenizers.Tokenizer(models.WordPiece({"play": 0, "##ing": 1, "chess": 2, "[UNK]": 3}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    tokenizer = Tokenizer(backend)
    assert rest(tokenizer, [0] * 20, [2, 0, 1]) == " chess playing"
    assert rest(tokenizer, [0], [1] * 40) == "ing" * 40
