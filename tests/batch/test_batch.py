"""`run --batch`: many prompts as one job, through the command itself."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm.cli.batch_input import BatchLine, LineRules, parse_line
from localllm.engine.engine import Engine
from localllm.engine.request import SamplingParams
from localllm.errors import UsageError
from localllm.hub.names import TINY_DIRECTORY
from tests.batch.support import PROMPTS, Start, Write, answers, batch, texts
from tests.cli_support import run_cli, write_checkpoint

pytestmark = pytest.mark.usefixtures("own_folders", "own_jobs")


# The output


def test_every_line_is_an_object_with_the_keys_of_the_contract(model: Path, file: Write) -> None:
    result = batch(model, file("the fox", {"id": "b7", "prompt": "the owl"}))
    first, second = (json.loads(line) for line in result.out.splitlines())
    keys = [
        "schema_version", "index", "model", "text", "token_ids", "finish_reason", "complete", "context", "usage",
        "timings", "speculation", "seed",
    ]  # fmt: skip
    assert list(first) == keys and list(second) == [*keys[:2], "id", *keys[2:]]
    assert (first["index"], second["index"], second["id"], second["seed"]) == (0, 1, "b7", 1)
    assert first["usage"]["completion_tokens"] == len(first["token_ids"]) == 4


@pytest.mark.skipif(not (TINY_DIRECTORY / "model.safetensors").exists(), reason="the built-in model is not here")
@pytest.mark.parametrize(
    ("weights", "draw"),
    [
        (["--dtype", "fp32"], ["--temperature", "1"]),
        pytest.param(["--weights", "int4"], ["--temperature", "0"], marks=pytest.mark.slow),
        pytest.param(["--dtype", "fp32"], ["--temperature", "0"], marks=pytest.mark.slow),
        pytest.param(["--weights", "int4"], ["--temperature", "1"], marks=pytest.mark.slow),
    ],
    ids=["fp32-sampled", "int4-greedy", "fp32-greedy", "int4-sampled"],
)
def test_a_line_is_answered_as_run_answers_its_prompt_alone(weights: list[str], draw: list[str], file: Write) -> None:
    prompts = [f"A tale about {who}, please." for who in ("an owl", "a fox who finds a lantern", "a bear")] * 4
    flags = [*weights, *draw, "--seed", "7", "--max-tokens", "24"]
    alone = {prompt: run_cli("run", "tiny", "-p", prompt, "--json", *flags).json["text"] for prompt in set(prompts)}
    together = run_cli("run", "tiny", "--batch", file(*prompts), *flags)
    assert texts(together) == [alone[prompt] for prompt in prompts]


def test_answers_come_in_the_order_of_the_prompts_whichever_ends_first(model: Path, file: Write) -> None:
    draw = random.Random(0)
    lines = [{"id": n, "prompt": draw.choice(PROMPTS), "max_tokens": draw.randint(1, 40)} for n in range(60)]
    got = answers(batch(model, file(*lines), "--parallel", "5"))
    assert [line["index"] for line in got] == [line["id"] for line in got] == list(range(60))
    assert [line["usage"]["completion_tokens"] for line in got] == [line["max_tokens"] for line in lines]


def test_an_answer_is_printed_before_the_job_is_done(slow_model: Path, file: Write, start: Start) -> None:
    path = file({"prompt": "the fox", "max_tokens": 1}, {"prompt": "the owl", "max_tokens": 4000})
    process = start(slow_model, path)
    assert json.loads(process.stdout.readline())["index"] == 0  # type: ignore[union-attr]
    assert process.poll() is None


def test_without_a_seed_every_line_has_one_of_its_own_which_run_repeats(model: Path, file: Write) -> None:
    got = answers(run_cli("run", model, "--batch", file(*["the fox"] * 3), "--max-tokens", "12"))
    assert len({line["text"] for line in got}) == 3
    seed = str(got[2]["seed"])
    alone = run_cli("run", model, "-p", "the fox", "--max-tokens", "12", "--seed", seed, "--json").json
    assert alone["text"] == got[2]["text"]


def test_a_closing_note_tells_what_was_done(model: Path, file: Write) -> None:
    result = batch(model, file(*PROMPTS))
    assert re.fullmatch(r"6 of 6 prompts answered, 24 tokens at [0-9.]+/s in [0-9.]+ s\n", result.err)
    assert "at most 3 at once" in batch(model, file(*PROMPTS), "--stats", "--parallel", "3").err


def test_a_log_hears_of_the_progress_now_and_then(model: Path, file: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = file(*PROMPTS)
    assert " of 6 answers, " not in batch(model, path).err
    monkeypatch.setattr("localllm.cli.job._LOG_S", 0.0)
    assert re.search(r"^3 of 6 answers, [0-9.]+ tok/s$", batch(model, path, "--parallel", "1").err, flags=re.MULTILINE)


def test_answers_that_were_cut_unasked_are_told(tmp_path: Path, file: Write) -> None:
    model = write_checkpoint(tmp_path / "model", context=600)
    lines = ["the fox", {"prompt": "the owl", "max_tokens": 2}, {"prompt": "who", "max_tokens": 2000}]
    result = run_cli("run", model, "--batch", file(*lines))
    assert [line["finish_reason"] for line in answers(result)] == ["length"] * 3
    assert "1 of 3 answers were cut at 512 tokens" in result.err
    assert "1 of 3 answers were cut: their context is full" in result.err
    assert "cut" not in run_cli("run", model, "--batch", file("the fox"), "--max-tokens", "512").err


def test_logprobs_are_in_the_lines(model: Path, file: Write) -> None:
    (got,) = answers(batch(model, file("the fox"), "--logprobs", "2"))
    assert [len(row["top"]) for row in got["logprobs"]] == [2] * 4


# The prompts


def test_a_line_has_its_own_sampling(model: Path, file: Write) -> None:
    own = {"seed": 9, "max_tokens": 12, "temperature": 1.5, "top_k": 40}
    lines = [{"logit_bias": {"40": 1000}}, own, {"stop": "", "temperature": None}]
    lines = [{"prompt": "the fox", **line} for line in lines]
    got = answers(batch(model, file(*lines[:2])))
    assert got[0]["token_ids"] == [40] * 4
    flags = ["--seed", "9", "--max-tokens", "12", "--temperature", "1.5", "--top-k", "40"]
    assert got[1]["text"] == run_cli("run", model, "-p", "the fox", "--json", *flags).json["text"]
    assert "stop is" in batch(model, file(*lines)).err


def test_messages_and_a_system_message_are_rendered_as_run_does(model: Path, file: Write, tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the fox"}]
    (tmp_path / "messages.json").write_text(json.dumps(messages))
    flags = ["--seed", "1", "--max-tokens", "4", "--json"]
    alone = run_cli("run", model, "--messages", tmp_path / "messages.json", *flags).json["text"]
    body = {"messages": messages, "max_completion_tokens": 4}
    openai = {"custom_id": "x", "method": "POST", "url": "/v1/chat/completions", "body": body}
    result = batch(model, file({"messages": messages}, {"prompt": "the fox", "system": "be brief"}, openai))
    assert texts(result) == [alone] * 3 and answers(result)[2]["id"] == "x"
    assert texts(batch(model, file("the fox"), "--system", "be brief")) == [alone]


def test_raw_takes_the_prompts_as_they_are(model: Path, file: Write) -> None:
    alone = run_cli("run", model, "--raw", "-p", "once <|user|> upon", "--seed", "1", "--max-tokens", "4", "--json")
    assert texts(batch(model, file("once <|user|> upon"), "--raw")) == [alone.json["text"]]


def test_however_lines_end_they_are_the_same_prompts(model: Path, file: Write) -> None:
    plain = texts(batch(model, file("the fox", "the öwl")))
    odd = b'\xef\xbb\xbf"the fox"\r\n\r\n  \n"the \xc3\xb6wl"'
    assert texts(batch(model, file(odd))) == plain and texts(batch(model, "-", stdin=odd)) == plain


def test_a_line_of_megabytes_is_read(model: Path, file: Write) -> None:
    result = batch(model, file("the fox", {"prompt": "fox " * (1 << 19)}))
    assert result.code == 5 and "line 2 has" in result.err


def test_a_line_beyond_every_context_is_refused_unread(model: Path, file: Write) -> None:
    result = batch(model, file(b'"' + b"x" * (17 << 20) + b'"'))
    assert result.code == 2 and "line 1 of" in result.err and "too long" in result.err


# Bad input


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b"nope\n", "not valid JSON"),
        (b'"\xff"\n', "invalid start byte"),
        (b"3\n", "neither a text nor an object"),
        (b'["a"]\n', "jq -c"),
        (b'{"prompt": "a", "prompt": "b"}\n', "appears twice"),
        (b'{"prompt": "a", "seed": NaN}\n', "NaN is not a JSON number"),
        ({"prompt": "a", "temprature": 1}, "unknown key 'temprature': the nearest is 'temperature'"),
        ({"prompt": "a", "messages": []}, "prompt and messages"),
        ({"id": 1}, "no prompt"),
        ({"prompt": " \n"}, "blank"),
        ({"prompt": 3}, "prompt is not text"),
        ({"prompt": "a", "system": 3}, "system is not text"),
        ({"prompt": "a", "id": True}, "id is neither"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens is 0"),
        ({"prompt": "a", "temperature": "hot"}, "temperature is 'hot'"),
        ({"prompt": "a", "top_k": True}, "top_k is True"),
        ({"prompt": "a", "seed": 2**70}, "seed is"),
        ({"prompt": "a", "stop": [""]}, "stop is"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias is"),
        ({"prompt": "a", "logit_bias": [1]}, "logit_bias is"),
        ({"prompt": "a", "logit_bias": {"99999": 1}}, "token id 99999 does not exist"),
        ({"prompt": "a", "dry_base": 2}, "dry_multiplier above 0"),
        ({"prompt": "a", "tools": []}, "tools without messages"),
        ({"messages": [], "id": 1}, "no messages"),
        ({"messages": [{"role": "user", "content": "a"}], "system": "b"}, "system message cannot go together"),
        ({"custom_id": "a", "body": {"messages": [], "n": 2}}, "unknown key 'n': known are model, "),
        ({"custom_id": "a", "url": "/v1/embeddings", "body": {}}, "url is '/v1/embeddings'"),
        ({"custom_id": "a", "body": {"model": "gpt-9"}}, "model is 'gpt-9'"),
        ({"custom_id": "a"}, "no body"),
    ],
)
def test_a_bad_line_is_named_before_anything_is_computed(
    line: Any, told: str, model: Path, file: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "step", lambda _: pytest.fail("a step was computed"))
    result = batch(model, file("good", line))
    assert (result.code, result.out) == (2, b"") and len(result.error_lines) == 4
    assert "1 of 2 lines" in result.err and "line 2: " in result.err and told in result.err


def test_of_many_bad_lines_the_first_are_named_and_all_are_counted(model: Path, file: Write) -> None:
    result = batch(model, file("good", *[{"promt": "a"}] * 9))
    assert result.code == 2 and "9 of 10 lines" in result.err and "line 6:" in result.err
    assert "line 7:" not in result.err and "and 4 more" in result.err
    assert "sed -n '2p;3p;4p;5p;6p'" in result.err


def test_prompts_that_the_template_refuses_are_named(tmp_path: Path, file: Write) -> None:
    model = write_checkpoint(tmp_path / "model")
    template = "{% if messages[0].content == 'no' %}{{ raise_exception('not that') }}{% endif %}x"
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    result = batch(model, file("yes", "no"))
    assert result.code == 2 and "line 2: " in result.err and "not that" in result.err


def test_prompts_that_do_not_fit_are_named_with_the_context_that_holds_them(model: Path, file: Write) -> None:
    result = batch(model, file("fox", "fox " * 40, "owl " * 30), "--ctx", "24")
    assert (result.code, result.out) == (5, b"")
    assert "2 of 3 prompts do not fit into the context of 24 tokens" in result.err
    assert re.search(r"why: +line 2 has \d+ tokens, line 3 has \d+ tokens; nothing was cut", result.err)
    assert re.search(r"fix: +localllm run .* --ctx 512", result.err)


@pytest.mark.parametrize("content", [b"", b"\n \r\n"])
def test_a_file_without_prompts_is_refused(model: Path, file: Write, content: bytes) -> None:
    assert "has no prompts" in batch(model, file(content)).err


def test_a_file_that_is_not_there_is_named(model: Path, tmp_path: Path) -> None:
    result = batch(model, tmp_path / "absent")
    assert result.code == 2 and "--batch cannot read" in result.err


@pytest.mark.parametrize("flags", ["-p x", "-f x", "--messages x", "--json", "--jsonl", "--no-stream", "--show-prompt"])
def test_what_has_no_place_beside_batch_is_refused(model: Path, flags: str) -> None:
    result = run_cli("run", model, "--batch", "prompts.jsonl", *flags.split())
    assert result.code == 2 and "--batch and " in result.err


def test_what_needs_batch_is_refused_without_it(model: Path) -> None:
    for flag in (["--parallel", "2"], ["--fresh"]):
        result = run_cli("run", model, "-p", "x", *flag)
        assert result.code == 2 and f"{flag[0]} needs --batch" in result.err
    assert run_cli("run", model, "a prompt", "--batch", "x").code == 2


RULES = LineRules("tiny", SamplingParams())
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
KEYS = st.sampled_from(["id", "prompt", "messages", "tools", "system", "stop", "seed", "top_p", "logit_bias", "body"])


@given(st.binary(max_size=60) | (JSON | st.dictionaries(KEYS, JSON, max_size=5)).map(lambda x: json.dumps(x).encode()))
def test_whatever_a_line_holds_is_a_prompt_or_a_usage_error(data: bytes) -> None:
    try:
        line = parse_line(data, RULES)
    except UsageError as error:
        assert error.what
    else:
        assert isinstance(line, BatchLine)


@given(
    prompt=st.text(min_size=1).filter(str.strip),
    line_id=st.none() | st.text() | st.integers(),
    values=st.fixed_dictionaries(
        {},
        optional={
            "max_tokens": st.integers(1, 2**31),
            "temperature": st.floats(0, 100) | st.integers(0, 100),
            "top_k": st.integers(0, 2**31),
            "top_p": st.floats(0, 1),
            "seed": st.integers(0, 2**63 - 1),
            "stop": st.lists(st.text(min_size=1), max_size=3),
        },
    ),
)
def test_what_a_line_says_is_what_is_asked(prompt: str, line_id: str | int | None, values: dict[str, Any]) -> None:
    line = parse_line(json.dumps({"id": line_id, "prompt": prompt, **values}).encode(), RULES)
    assert line.id == line_id and line.source.chat is not None
    assert line.source.chat.messages[-1]["content"] == prompt
    for name in ("max_tokens", "temperature", "top_k", "top_p", "seed"):
        assert getattr(line.sampling, name) == values.get(name, getattr(RULES.sampling, name))
    assert line.sampling.stop == tuple(values.get("stop", ()))


# What is computed at once


def test_parallel_bounds_what_runs_and_what_waits(model: Path, file: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    step, running, held = Engine.step, [], []

    def watched(engine: Engine, tell: Any) -> Any:
        events = step(engine, tell)
        running.append(len(engine.scheduler.running))
        held.append(len(engine.scheduler.sequences))
        return events

    monkeypatch.setattr(Engine, "step", watched)
    assert len(texts(batch(model, file(*PROMPTS * 5), "--parallel", "3"))) == 30
    assert max(running) == 3
    assert max(held) <= 6
