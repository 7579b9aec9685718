"""`run --batch`: many prompts as one job, through the command itself."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm.cli.batch_input import BatchLine, LineRules, parse_line
from localllm.cli.journal import LIFETIME_S
from localllm.engine.engine import Engine
from localllm.engine.request import SamplingParams
from localllm.errors import LocalLLMError, NonFiniteError, UsageError
from localllm.hub.names import TINY_DIRECTORY
from tests.cli_support import Result, run_cli, start_cli, write_checkpoint

pytestmark = pytest.mark.usefixtures("own_folders", "own_jobs")
# The second has more tokens than any other: see `fail_on`.
PROMPTS = [
    "the fox",
    "once upon a time there was a zebra with jokes",
    "a lantern",
    "who",
    "the owl and the fox",
    "the end",
]


@pytest.fixture
def own_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of this test's journals."""
    monkeypatch.setenv("LOCALLLM_CACHE", str(tmp_path / "home" / "cache"))
    return tmp_path / "home" / "cache" / "jobs"


@pytest.fixture
def file(tmp_path: Path) -> Callable[..., Path]:
    """Writes lines of JSON, or bytes as they are."""

    def write(*lines: Any) -> Path:
        path = tmp_path / "prompts.jsonl"
        raw = b"".join(x if isinstance(x, bytes) else json.dumps(x).encode() + b"\n" for x in lines)
        path.write_bytes(raw)
        return path

    return write


def batch(model: Path | str, path: Path | str, *arguments: str, stdin: bytes = b"") -> Result:
    """`run --batch` with a seed and answers of four tokens."""
    return run_cli("run", model, "--batch", path, "--max-tokens", "4", "--seed", "1", *arguments, stdin=stdin)


def answers(result: Result) -> list[dict[str, Any]]:
    """The lines of the output without what the clock says."""
    lines = [json.loads(line) for line in result.out.splitlines()]
    return [{key: value for key, value in line.items() if key != "timings"} for line in lines]


def texts(result: Result) -> list[str]:
    assert result.code == 0, result.err
    return [line["text"] for line in answers(result)]


# The output


def test_every_line_is_an_object_with_the_keys_of_the_contract(model: Path, file: Callable[..., Path]) -> None:
    result = batch(model, file("the fox", {"id": "b7", "prompt": "the owl"}))
    first, second = (json.loads(line) for line in result.out.splitlines())
    keys = ["schema_version", "index", "model", "text", "token_ids", "finish_reason", "usage", "timings", "seed"]
    assert list(first) == keys
    assert list(second) == [*keys[:2], "id", *keys[2:]]
    assert (first["index"], second["index"], second["id"], second["seed"]) == (0, 1, "b7", 1)
    assert first["usage"]["completion_tokens"] == len(first["token_ids"]) == 4


@pytest.mark.skipif(
    not (TINY_DIRECTORY / "model.safetensors").exists(), reason="the built-in model is not in this tree"
)
@pytest.mark.parametrize("weights", [["--dtype", "fp32"], ["--weights", "int4"]], ids=["fp32", "int4"])
@pytest.mark.parametrize("draw", [["--temperature", "0"], ["--temperature", "1"]], ids=["greedy", "sampled"])
def test_a_line_is_answered_as_run_answers_its_prompt_alone(
    weights: list[str], draw: list[str], file: Callable[..., Path]
) -> None:
    prompts = [f"A tale about {who}, please." for who in ("an owl", "a fox who finds a lantern", "a bear")] * 4
    flags = [*weights, *draw, "--seed", "7", "--max-tokens", "24"]
    alone = {prompt: run_cli("run", "tiny", "-p", prompt, "--json", *flags).json["text"] for prompt in set(prompts)}
    together = run_cli("run", "tiny", "--batch", file(*prompts), *flags)
    assert texts(together) == [alone[prompt] for prompt in prompts]


def test_answers_come_in_the_order_of_the_prompts_whichever_ends_first(model: Path, file: Callable[..., Path]) -> None:
    draw = random.Random(0)
    lines = [{"id": n, "prompt": draw.choice(PROMPTS), "max_tokens": draw.randint(1, 40)} for n in range(60)]
    got = answers(batch(model, file(*lines), "--parallel", "5"))
    assert [line["index"] for line in got] == [line["id"] for line in got] == list(range(60))
    assert [line["usage"]["completion_tokens"] for line in got] == [line["max_tokens"] for line in lines]


def test_an_answer_is_printed_before_the_job_is_done(
    slow_model: Path, file: Callable[..., Path], start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    path = file({"prompt": "the fox", "max_tokens": 1}, {"prompt": "the owl", "max_tokens": 4000})
    process = start(slow_model, path)
    assert json.loads(process.stdout.readline())["index"] == 0  # type: ignore[union-attr]
    assert process.poll() is None


def test_without_a_seed_every_line_has_one_of_its_own_which_run_repeats(model: Path, file: Callable[..., Path]) -> None:
    got = answers(run_cli("run", model, "--batch", file(*["the fox"] * 3), "--max-tokens", "12"))
    assert len({line["text"] for line in got}) == 3
    seed = str(got[2]["seed"])
    alone = run_cli("run", model, "-p", "the fox", "--max-tokens", "12", "--seed", seed, "--json").json
    assert alone["text"] == got[2]["text"]


def test_a_closing_note_tells_what_was_done(model: Path, file: Callable[..., Path]) -> None:
    result = batch(model, file(*PROMPTS))
    assert re.fullmatch(r"6 answers, 24 tokens at [0-9.]+/s in [0-9.]+ s\n", result.err)
    assert "at most 3 at once" in batch(model, file(*PROMPTS), "--stats", "--parallel", "3").err


def test_answers_that_were_cut_unasked_are_told(tmp_path: Path, file: Callable[..., Path]) -> None:
    model = write_checkpoint(tmp_path / "model", context=1024)
    lines = ["the fox", {"prompt": "the owl", "max_tokens": 2}, {"prompt": "who", "max_tokens": 2000}]
    result = run_cli("run", model, "--batch", file(*lines))
    assert [line["finish_reason"] for line in answers(result)] == ["length"] * 3
    assert "1 answers were cut at 512 tokens" in result.err
    assert "1 answers were cut: their context is full" in result.err
    asked_for = run_cli("run", model, "--batch", file("the fox"), "--max-tokens", "512")
    assert "cut" not in asked_for.err


def test_logprobs_are_in_the_lines(model: Path, file: Callable[..., Path]) -> None:
    (got,) = answers(batch(model, file("the fox"), "--logprobs", "2"))
    assert [len(row["top"]) for row in got["logprobs"]] == [2] * 4


# The prompts


def test_a_line_has_its_own_sampling(model: Path, file: Callable[..., Path]) -> None:
    lines = [
        {"prompt": "the fox", "logit_bias": {"40": 1000}},
        {"prompt": "the fox", "seed": 9, "max_tokens": 12, "temperature": 1.5, "top_k": 40},
        {"prompt": "the fox", "stop": "", "temperature": None},
    ]
    got = answers(batch(model, file(*lines[:2])))
    assert got[0]["token_ids"] == [40] * 4
    flags = ["--seed", "9", "--max-tokens", "12", "--temperature", "1.5", "--top-k", "40"]
    assert got[1]["text"] == run_cli("run", model, "-p", "the fox", "--json", *flags).json["text"]
    assert "stop is" in batch(model, file(*lines)).err


def test_messages_and_a_system_message_are_rendered_as_run_does(
    model: Path, file: Callable[..., Path], tmp_path: Path
) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the fox"}]
    (tmp_path / "messages.json").write_text(json.dumps(messages))
    flags = ["--seed", "1", "--max-tokens", "4", "--json"]
    alone = run_cli("run", model, "--messages", tmp_path / "messages.json", *flags).json["text"]
    body = {"messages": messages, "max_completion_tokens": 4}
    openai = {"custom_id": "x", "method": "POST", "url": "/v1/chat/completions", "body": body}
    result = batch(model, file({"messages": messages}, {"prompt": "the fox", "system": "be brief"}, openai))
    assert texts(result) == [alone] * 3
    assert answers(result)[2]["id"] == "x"
    assert texts(batch(model, file("the fox"), "--system", "be brief")) == [alone]


def test_raw_takes_the_prompts_as_they_are(model: Path, file: Callable[..., Path]) -> None:
    alone = run_cli("run", model, "--raw", "-p", "once <|user|> upon", "--seed", "1", "--max-tokens", "4", "--json")
    assert texts(batch(model, file("once <|user|> upon"), "--raw")) == [alone.json["text"]]


def test_however_lines_end_they_are_the_same_prompts(model: Path, file: Callable[..., Path]) -> None:
    plain = texts(batch(model, file("the fox", "the öwl")))
    odd = b'\xef\xbb\xbf"the fox"\r\n\r\n  \n"the \xc3\xb6wl"'
    assert texts(batch(model, file(odd))) == plain
    assert texts(batch(model, "-", stdin=odd)) == plain


def test_a_line_of_megabytes_is_read(model: Path, file: Callable[..., Path]) -> None:
    result = batch(model, file("the fox", {"prompt": "fox " * (1 << 20)}))
    assert result.code == 5
    assert "line 2 has" in result.err


def test_a_line_beyond_every_context_is_refused_unread(model: Path, file: Callable[..., Path]) -> None:
    result = batch(model, file(b'"' + b"x" * (17 << 20) + b'"'))
    assert result.code == 2
    assert "line 1 of" in result.err
    assert "too long" in result.err


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
        ({"prompt": 3}, "prompt is no text"),
        ({"prompt": "a", "system": 3}, "system is no text"),
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
        ({"custom_id": "a", "body": {"messages": [], "n": 2}}, "unknown key 'n'"),
        ({"custom_id": "a", "url": "/v1/embeddings", "body": {}}, "url is '/v1/embeddings'"),
        ({"custom_id": "a", "body": {"model": "gpt-9"}}, "model is 'gpt-9'"),
        ({"custom_id": "a"}, "no body"),
    ],
)
def test_a_bad_line_is_named_before_anything_is_computed(
    line: Any, told: str, model: Path, file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "step", lambda _: pytest.fail("a step was computed"))
    result = batch(model, file("good", line))
    assert (result.code, result.out) == (2, b"")
    assert len(result.error_lines) == 4
    assert "1 of 2 lines" in result.err
    assert "line 2: " in result.err
    assert told in result.err


def test_of_many_bad_lines_the_first_are_named_and_all_are_counted(model: Path, file: Callable[..., Path]) -> None:
    result = batch(model, file("good", *[{"promt": "a"}] * 9))
    assert result.code == 2
    assert "9 of 10 lines" in result.err
    assert "line 6:" in result.err
    assert "line 7:" not in result.err
    assert "and 4 more" in result.err
    assert "sed -n '2p;3p;4p;5p;6p'" in result.err


def test_prompts_that_the_template_refuses_are_named(tmp_path: Path, file: Callable[..., Path]) -> None:
    model = write_checkpoint(tmp_path / "model")
    template = "{% if messages[0].content == 'no' %}{{ raise_exception('not that') }}{% endif %}x"
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    result = batch(model, file("yes", "no"))
    assert result.code == 2
    assert "line 2: " in result.err
    assert "not that" in result.err


def test_prompts_that_do_not_fit_are_named_with_the_context_that_holds_them(
    model: Path, file: Callable[..., Path]
) -> None:
    result = batch(model, file("fox", "fox " * 40, "owl " * 30), "--ctx", "24")
    assert (result.code, result.out) == (5, b"")
    assert "2 of 3 prompts do not fit into the context of 24 tokens" in result.err
    assert re.search(r"why: +line 2 has \d+ tokens, line 3 has \d+ tokens; nothing was cut", result.err)
    assert re.search(r"fix: +localllm run .* --ctx 512", result.err)


@pytest.mark.parametrize("content", [b"", b"\n \r\n"])
def test_a_file_without_prompts_is_refused(model: Path, file: Callable[..., Path], content: bytes) -> None:
    assert "has no prompts" in batch(model, file(content)).err


def test_a_file_that_is_not_there_is_named(model: Path, tmp_path: Path) -> None:
    result = batch(model, tmp_path / "absent")
    assert result.code == 2
    assert "--batch cannot read" in result.err


@pytest.mark.parametrize(
    "flags",
    [["-p", "x"], ["-f", "x"], ["--messages", "x"], ["--json"], ["--jsonl"], ["--no-stream"], ["--show-prompt"]],
    ids=lambda flags: flags[0],
)
def test_what_has_no_place_beside_batch_is_refused(model: Path, flags: list[str]) -> None:
    result = run_cli("run", model, "--batch", "prompts.jsonl", *flags)
    assert result.code == 2
    assert "--batch and " in result.err


def test_what_needs_batch_is_refused_without_it(model: Path) -> None:
    for flag in (["--parallel", "2"], ["--fresh"]):
        result = run_cli("run", model, "-p", "x", *flag)
        assert result.code == 2
        assert f"{flag[0]} needs --batch" in result.err
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
    assert line.id == line_id
    assert line.source.chat is not None
    assert line.source.chat.messages[-1]["content"] == prompt
    for name in ("max_tokens", "temperature", "top_k", "top_p", "seed"):
        assert getattr(line.sampling, name) == values.get(name, getattr(RULES.sampling, name))
    assert line.sampling.stop == tuple(values.get("stop", ()))


# What is computed at once


def test_parallel_bounds_what_runs_and_what_waits(
    model: Path, file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    step, running, held = Engine.step, [], []

    def watched(engine: Engine) -> Any:
        events = step(engine)
        running.append(len(engine.scheduler.running))
        held.append(len(engine.scheduler.sequences))
        return events

    monkeypatch.setattr(Engine, "step", watched)
    assert len(texts(batch(model, file(*PROMPTS * 5), "--parallel", "3"))) == 30
    assert max(running) == 3
    assert max(held) <= 6


# One that fails


def fail_on(prompt_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The token after a prompt of this length is never drawn."""
    from localllm.engine import engine

    sample = engine.sample

    def failing(logits: Any, params: Any, token_ids: Any, **options: Any) -> int:
        if options["num_prompt_tokens"] == prompt_tokens:
            raise NonFiniteError("the model computed a NaN", why="it was told to")
        return sample(logits, params, token_ids, **options)

    monkeypatch.setattr(engine, "sample", failing)


def test_one_prompt_that_fails_does_not_end_the_job_and_is_tried_again(
    model: Path, file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = file(*PROMPTS)
    whole = batch(model, path)
    with monkeypatch.context() as patch:
        fail_on(answers(whole)[1]["usage"]["prompt_tokens"], patch)
        failed = batch(model, path)
    got = answers(failed)
    assert failed.code == 1
    assert [line["index"] for line in got] == list(range(6))
    assert got[1]["finish_reason"] == "error"
    assert got[1]["error"]["what"] == "the model computed a NaN"
    assert got[:1] + got[2:] == answers(whole)[:1] + answers(whole)[2:]
    assert "1 prompts failed" in failed.err
    again = batch(model, path)
    assert "5 of 6 answers were there" in again.err
    assert "1 answers, 4 tokens" in again.err
    assert answers(again) == answers(whole)


def test_an_engine_that_breaks_ends_the_job_and_what_was_answered_is_kept(
    model: Path, file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, step, steps = file(*PROMPTS), Engine.step, iter(range(1000))

    def breaking(engine: Engine) -> Any:
        if next(steps) > 12:
            raise LocalLLMError("the disk is gone")
        return step(engine)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "step", breaking)
        broken = batch(model, path, "--parallel", "1")
    assert broken.code == 1
    assert "interrupted; 3 of 6 answers are kept. To go on: the same command\nerror: the disk is gone" in broken.err
    assert was_there(batch(model, path)) == len(answers(broken)) == 3


# The journal


def journal_in(jobs: Path) -> Path:
    """The journal of the only job that was begun."""
    (path,) = jobs.glob("*/answers")
    return path


@pytest.fixture
def unfinished(
    model: Path, file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, own_folders: None, own_jobs: Path
) -> Path:
    """A file of six prompts, of which a job has answered five."""
    path = file(*PROMPTS)
    with monkeypatch.context() as patch:
        fail_on(answers(batch(model, path))[1]["usage"]["prompt_tokens"], patch)
        assert batch(model, path).code == 1
    return path


def was_there(result: Result) -> int:
    """How many answers came from an earlier run."""
    found = re.search(r"(\d+) of \d+ answers were there", result.err)
    return int(found[1]) if found else 0


@pytest.mark.usefixtures("unfinished")
def test_a_journal_is_its_owners_alone(own_jobs: Path) -> None:
    path = journal_in(own_jobs)
    assert [p.stat().st_mode & 0o777 for p in (path, path.parent, own_jobs)] == [0o600, 0o700, 0o700]


def test_a_finished_job_leaves_nothing(model: Path, unfinished: Path, own_jobs: Path) -> None:
    assert was_there(batch(model, unfinished)) == 5
    assert list(own_jobs.iterdir()) == []
    assert was_there(batch(model, unfinished)) == 0


@pytest.mark.parametrize("damage", ["cut", "flip", "zeros", "other"])
def test_what_is_damaged_in_a_journal_is_computed_anew(
    damage: str, model: Path, unfinished: Path, own_jobs: Path
) -> None:
    path = journal_in(own_jobs)
    lines = path.read_bytes().splitlines(keepends=True)
    last = lines[-1]
    path.write_bytes(
        b"".join(lines[:-1])
        + {
            "cut": last[:-9],
            "flip": last.replace(b"text", b"tent"),
            "zeros": bytes(len(last)),
            "other": b'{"index": 1, "text": "never said"}\n',
        }[damage]
    )
    result = batch(model, unfinished)
    assert was_there(result) == 4
    assert answers(result) == answers(batch(model, unfinished))


def test_a_journal_without_its_beginning_counts_as_none(model: Path, unfinished: Path, own_jobs: Path) -> None:
    path = journal_in(own_jobs)
    path.write_bytes(path.read_bytes()[3:])
    assert was_there(batch(model, unfinished)) == 0


def test_fresh_computes_all_of_it(model: Path, unfinished: Path) -> None:
    result = batch(model, unfinished, "--fresh")
    assert (result.code, was_there(result)) == (0, 0)
    assert "6 answers" in result.err


@pytest.mark.parametrize(
    "change",
    [["--temperature", "0.5"], ["--dtype", "fp32"], ["--ctx", "100"], ["-s", "be brief"], ["--raw"]],
    ids=" ".join,
)
def test_what_changes_the_texts_makes_another_job(change: list[str], model: Path, unfinished: Path) -> None:
    assert was_there(batch(model, unfinished, *change)) == 0
    assert was_there(batch(model, unfinished)) == 5


def test_another_prompt_makes_another_job(model: Path, unfinished: Path, file: Callable[..., Path]) -> None:
    assert was_there(batch(model, file(*PROMPTS[:-1], "another end"))) == 0


def test_what_changes_no_text_goes_on_with_the_job(model: Path, unfinished: Path) -> None:
    assert was_there(batch(model, "-", "--parallel", "2", "--stats", stdin=unfinished.read_bytes())) == 5


def test_a_drawn_seed_belongs_to_the_job(
    model: Path, file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = ("run", model, "--batch", file(*PROMPTS), "--max-tokens", "4")
    with monkeypatch.context() as patch:
        fail_on(answers(run_cli(*line))[1]["usage"]["prompt_tokens"], patch)
        first = answers(run_cli(*line))
    second = answers(run_cli(*line))
    assert (first[1]["finish_reason"], second[1]["finish_reason"]) == ("error", "length")
    assert [line["seed"] for line in first] == [line["seed"] for line in second]
    assert [line["seed"] - second[0]["seed"] for line in second] == [0, 1, 2, 3, 4, 5]


def test_jobs_that_nobody_went_on_with_for_a_month_are_forgotten(
    model: Path, unfinished: Path, own_jobs: Path, file: Callable[..., Path]
) -> None:
    long_ago = time.time() - LIFETIME_S - 60
    os.utime(journal_in(own_jobs), (long_ago, long_ago))
    assert batch(model, file("another job")).code == 0
    assert list(own_jobs.iterdir()) == []


def test_a_journal_that_cannot_be_kept_is_an_error(model: Path, own_jobs: Path, file: Callable[..., Path]) -> None:
    own_jobs.parent.mkdir(parents=True)
    own_jobs.write_text("in the way")
    result = batch(model, file("the fox"))
    assert (result.code, result.out, len(result.error_lines)) == (1, b"", 4)
    assert "the journal of this job cannot be kept" in result.err


# Kills, signals and company

Start = Callable[..., subprocess.Popen[bytes]]
START_S = 60.0


@pytest.fixture(scope="module")
def slow_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some hundred tokens a second: slow enough to be caught at work."""
    return write_checkpoint(tmp_path_factory.mktemp("slow"), hidden=256, layers=8, context=4096)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a job with pipes for its output."""
    with ExitStack() as processes:

        def started(model: Path, path: Path, *arguments: str) -> subprocess.Popen[bytes]:
            line = ["run", model, "--batch", path, *(arguments or ("--max-tokens", "40")), "--parallel", "3"]
            streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            process = start_cli(tmp_path / "home", *line, **streams)
            processes.enter_context(process)
            processes.callback(process.kill)
            return process

        (tmp_path / "home").mkdir(exist_ok=True)
        yield started


def finish(process: subprocess.Popen[bytes]) -> Result:
    out, err = process.communicate(timeout=START_S)
    return Result(process.returncode, out, err.decode())


def wait_for_lines(process: subprocess.Popen[bytes], count: int) -> bytes:
    assert process.stdout is not None
    return b"".join(process.stdout.readline() for _ in range(count))


@pytest.mark.parametrize("seed", [[], ["--seed", "3"]], ids=["drawn", "given"])
def test_a_job_that_is_killed_again_and_again_prints_what_an_undisturbed_one_does(
    seed: list[str], slow_model: Path, file: Callable[..., Path], start: Start
) -> None:
    path, flags = file(*PROMPTS * 3), ["--max-tokens", "60", *seed]
    moment, printed = random.Random(), b""
    for least in (1, 5, 9):
        process = start(slow_model, path, *flags)
        head = wait_for_lines(process, least)
        time.sleep(moment.random() * 0.3)
        process.send_signal(signal.SIGKILL)
        whole_lines = (head + finish(process).out).rpartition(b"\n")[0]
        assert whole_lines.startswith(printed) or printed.startswith(whole_lines)  # with the clock's own words
        printed = max(printed, whole_lines, key=len)
    resumed = finish(start(slow_model, path, *flags))
    assert resumed.code == 0, resumed.err
    assert resumed.out.startswith(printed)
    assert was_there(resumed) >= printed.count(b"\n") + 1
    first_seed = answers(resumed)[0]["seed"]
    lines = [{"prompt": prompt, "seed": first_seed + (0 if seed else n)} for n, prompt in enumerate(PROMPTS * 3)]
    undisturbed = finish(start(slow_model, file(*lines), "--max-tokens", "60"))
    assert answers(resumed) == answers(undisturbed)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_job_and_says_how_it_goes_on(
    number: signal.Signals, code: int, slow_model: Path, file: Callable[..., Path], start: Start
) -> None:
    path = file(*PROMPTS * 3)
    process = start(slow_model, path)
    head = wait_for_lines(process, 2)
    sent = time.monotonic()
    process.send_signal(number)
    stopped = finish(process)
    assert stopped.code == code
    assert time.monotonic() - sent < 2.0
    assert re.fullmatch(r"interrupted; \d+ of 18 answers are kept. To go on: the same command\n", stopped.err)
    resumed = finish(start(slow_model, path))
    assert resumed.code == 0
    assert resumed.out.startswith(head + stopped.out)
    assert was_there(resumed) >= 2


def test_a_reader_that_goes_away_ends_a_job_in_silence(
    slow_model: Path, file: Callable[..., Path], start: Start
) -> None:
    path = file(*PROMPTS * 3)
    process = start(slow_model, path)
    wait_for_lines(process, 1)
    process.stdout.close()  # type: ignore[union-attr]
    process.stdout = None
    _, err = process.communicate(timeout=START_S)
    assert (process.returncode, err) == (0, b"")
    assert was_there(finish(start(slow_model, path))) >= 1


def test_a_second_process_at_the_same_job_is_refused_with_the_firsts_number(
    slow_model: Path, file: Callable[..., Path], start: Start, own_jobs: Path
) -> None:
    path = file(*PROMPTS * 3)
    first = start(slow_model, path, "--max-tokens", "400")
    while not list(own_jobs.glob("*/answers")):
        assert first.poll() is None
        time.sleep(0.05)
    second = finish(start(slow_model, path, "--max-tokens", "400"))
    assert (second.code, second.out, len(second.error_lines)) == (1, b"", 4)
    assert f"process {first.pid} is at it" in second.err
    assert first.poll() is None
