"""n, best_of and beam_width: how many answers there are, which are given, and what is refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from localllm.engine.engine import Engine
from localllm.engine.prefix_config import NO_REUSE
from localllm.engine.request import Request, SamplingParams
from localllm.engine.step_types import Limits
from localllm.settings import EngineConfig
from tests.engine_support import answered
from tests.server.support import OWL, Json, Running, each_once, running

STORY = "Once upon a time"
TEXT: Json = {"prompt": STORY, "temperature": 1, "seed": 7, "max_tokens": 12}
CHAT: Json = {"messages": OWL, "temperature": 1, "seed": 7, "max_tokens": 12}
PATHS = {"/v1/completions": TEXT, "/v1/chat/completions": CHAT}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """In fp32: which rows share a step, and how many are drafted, changes no token."""
    with running(dtype="fp32") as server:
        yield server


def texts(reply: Any) -> list[str]:
    assert reply.status_code == 200, reply.text
    choices = reply.json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(len(choices)))
    return [choice["text"] if "text" in choice else choice["message"]["content"] for choice in choices]


@pytest.mark.parametrize("path", PATHS)
def test_the_best_of_several_are_those_with_the_likeliest_tokens(server: Running, path: str) -> None:
    body = PATHS[path] | {"logprobs": 0 if path == "/v1/completions" else True}
    everything = server.post(path, body | {"n": 6}).json()["choices"]

    def likelihood(choice: Any) -> float:
        """Per token; no answer of the tiny model's ends within 12."""
        logprobs = choice["logprobs"]
        values = logprobs.get("token_logprobs") or [each["logprob"] for each in logprobs["content"]]
        return sum(values) / len(values)

    ranked = sorted(everything, key=likelihood, reverse=True)
    assert all(choice["finish_reason"] == "length" for choice in ranked)
    reply = server.post(path, body | {"n": 2, "best_of": 6})
    best = [choice.get("text") or choice["message"]["content"] for choice in ranked[:2]]
    assert texts(reply) == best and reply.json()["usage"]["completion_tokens"] == 6 * 12  # all that was computed


def test_an_answer_that_meets_its_form_is_better_than_a_likelier_one_that_was_cut(server: Running) -> None:
    body = TEXT | {"structured_outputs": {"regex": "a|b{40}"}, "max_tokens": 4}
    ends = [each["finish_reason"] for each in server.post("/v1/completions", body | {"n": 6}).json()["choices"]]
    assert 0 < ends.count("stop") < 5
    best = server.post("/v1/completions", body | {"n": 5, "best_of": 6}).json()["choices"]
    assert [each["finish_reason"] for each in best] == sorted(ends, reverse=True)[:5]


def test_the_best_of_each_prompt_is_given_with_its_echo(server: Running) -> None:
    prompts = [STORY, "The fox"]
    both = texts(server.post("/v1/completions", TEXT | {"prompt": prompts, "best_of": 3, "echo": True}))
    alone = [texts(server.post("/v1/completions", TEXT | {"prompt": each, "best_of": 3}))[0] for each in prompts]
    assert both == [prompt + text for prompt, text in zip(prompts, alone, strict=True)]


@pytest.mark.parametrize("path", PATHS)
def test_without_more_to_choose_from_best_of_is_n(server: Running, path: str) -> None:
    plain = texts(server.post(path, PATHS[path] | {"n": 2}))
    assert texts(server.post(path, PATHS[path] | {"n": 2, "best_of": 2})) == plain
    lines = server.stream_lines(path, PATHS[path] | {"n": 2, "best_of": 2, "stream": True})
    assert lines[-1] == "data: [DONE]"


def test_the_pages_of_a_prompt_are_computed_once_for_all_of_its_answers(server: Running) -> None:
    prompt = " ".join(f"The fox saw {number} owls." for number in range(90))
    num_tokens = len(server.engine.encode(prompt))
    assert 513 < num_tokens < 1000  # two chunks
    before = server.engine.scheduler.num_chunks
    assert len(set(texts(server.post("/v1/completions", TEXT | {"prompt": prompt, "n": 5})))) > 1
    # They come one after the other: at worst each reads what the last page of the prompt has left over.
    assert server.engine.scheduler.num_chunks <= before + 2 + 4


@pytest.mark.parametrize("path", PATHS)
def test_beams_find_what_the_engine_finds(server: Running, path: str) -> None:
    body = {name: value for name, value in PATHS[path].items() if name != "temperature"} | {"beam_width": 4, "n": 3}
    given = texts(server.post(path, body | {"length_penalty": 0.5, "early_stopping": True}))
    engine = server.engine
    ids = engine.encode(STORY if path == "/v1/completions" else OWL)  # type: ignore[arg-type]
    alone = Engine.load("tiny", EngineConfig(dtype="fp32"), reuse=NO_REUSE, limits=Limits(max_sequences=1))
    stops = server.served.selection.sampling().stop
    sampling = SamplingParams(temperature=0, max_tokens=12, stop=stops)
    request = Request(tuple(ids), sampling, beams=4, num_answers=3, length_penalty=0.5, early_stopping=True)
    (heard,) = answered(alone, request)
    others = ["".join(getattr(event, "text", "") for event in events) for events in heard.finished.others]
    assert given == [heard.text, *others] and len(set(given)) == 3
    alone.close()


def test_a_search_is_streamed_when_it_ends(server: Running) -> None:
    body = {"prompt": STORY, "max_tokens": 12, "beam_width": 3}
    whole = texts(server.post("/v1/completions", body))
    *lines, done = server.stream_lines("/v1/completions", body | {"stream": True})
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole[0] and done == "data: [DONE]"


def test_of_a_search_every_answer_that_is_given_is_counted(server: Running) -> None:
    body = {"prompt": STORY, "max_tokens": 9, "beam_width": 4, "n": 4, "early_stopping": "never", "logprobs": 1}
    reply = server.post("/v1/completions", body).json()
    tokens = [len(choice["logprobs"]["tokens"]) for choice in reply["choices"]]
    assert reply["usage"]["completion_tokens"] == sum(tokens) and len(tokens) == 4


CONTRADICTIONS = [
    ({"best_of": 2, "n": 3}, "best_of"),
    ({"best_of": 3, "stream": True}, "best_of"),
    ({"best_of": 3, "n": 2, "stream": True}, "best_of"),
    ({"best_of": 17}, "best_of"),
    ({"beam_width": 17}, "beam_width"),
    ({"beam_width": 0}, "beam_width"),
    ({"beam_width": 4}, "temperature"),  # of 1
    ({"beam_width": 4, "temperature": 0, "top_p": 0.9}, "top_p"),
    ({"beam_width": 4, "temperature": 0, "top_k": 40}, "top_k"),
    ({"beam_width": 4, "temperature": 0, "best_of": 4}, "best_of"),
    ({"beam_width": 2, "temperature": 0, "n": 3}, "n"),
    ({"beam_width": 2, "temperature": 0, "n": 2, "stream": True}, "stream"),
    ({"length_penalty": 2.0}, "length_penalty"),
    ({"early_stopping": True}, "early_stopping"),
    ({"beam_width": 2, "temperature": 0, "length_penalty": 11}, "length_penalty"),
    ({"beam_width": 2, "temperature": 0, "early_stopping": "soon"}, "early_stopping"),
    ({"use_beam_search": True}, "use_beam_search"),
]


@pytest.mark.parametrize(("wrong", "path"), each_once(CONTRADICTIONS, PATHS))
def test_what_contradicts_itself_is_refused_by_name(server: Running, wrong: tuple[Any, str], path: str) -> None:
    fields, param = wrong
    assert server.error(path, PATHS[path] | fields)["param"] == param


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"messages": OWL, "max_tokens": 4}),
        ("/v1/responses", {"input": "Hi"}),
        ("/api/chat", {"messages": OWL}),
        ("/api/generate", {"prompt": "Hi"}),
    ],
)
def test_dialects_that_have_no_such_field_refuse_it(server: Running, path: str, body: Json) -> None:
    for field in ("best_of", "beam_width"):
        reply = server.post(path, {"model": "tiny", **body, field: 2})
        assert reply.status_code == 400 and field in reply.text


def test_more_answers_than_the_server_takes_on_are_refused(server: Running) -> None:
    body = TEXT | {"prompt": [STORY] * 16, "best_of": 16}
    reply = server.post("/v1/completions", body)
    assert reply.status_code == 400 and "256 answers" in reply.json()["error"]["message"]
