"""A cascade over HTTP: one name, and the first model that is sure of its answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from localllm.chat.cascade import Bar
from localllm.server import replies
from tests.cli_support import run_cli, write_checkpoint
from tests.patience import wait_for
from tests.server.conftest import Connect
from tests.server.support import OWL, Json, Patch, Running, num_cancelled, running
from tests.speaker import write_speaker

CHAT, MESSAGES, RESPONSES, OLLAMA = "/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat"
BODIES: dict[str, Json] = {
    CHAT: {"messages": OWL, "max_tokens": 6, "temperature": 0},
    "/v1/completions": {"prompt": "Once", "max_tokens": 6, "temperature": 0},
    RESPONSES: {"input": "A tale.", "max_output_tokens": 6, "temperature": 0},
    MESSAGES: {"messages": OWL, "max_tokens": 6, "temperature": 0},
    OLLAMA: {"messages": OWL, "stream": False, "options": {"temperature": 0, "num_predict": 6}},
    "/api/generate": {"prompt": "A tale.", "stream": False, "options": {"temperature": 0, "num_predict": 6}},
}
SURE = "Once upon a time."


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {"sure": write_speaker(folder / "sure", [SURE]), "unsure": write_checkpoint(folder / "unsure", seed=1)}


@pytest.fixture(scope="module")
def sure_first(models: dict[str, Path]) -> Iterator[Running]:
    with running(models["sure"], also=[models["unsure"]], aliases=["cascade"], cascade=Bar(0.8)) as server:
        yield server


@pytest.fixture(scope="module")
def unsure_first(models: dict[str, Path]) -> Iterator[Running]:
    with running(models["unsure"], also=[models["sure"]], aliases=["cascade"], cascade=Bar(0.8)) as server:
        yield server


@pytest.fixture(params=["sure", "unsure"])
def cascade(request: pytest.FixtureRequest) -> Iterator[Running]:
    """Whoever is asked first: the model that is sure answers."""
    server: Running = request.getfixturevalue(f"{request.param}_first")
    yield server
    server.wait_until_idle()


@pytest.mark.parametrize("path", BODIES)
def test_the_model_that_is_sure_answers_in_every_dialect(cascade: Running, path: str) -> None:
    reply = cascade.post(path, {**BODIES[path], "model": "cascade"})
    assert reply.status_code == 200, reply.text
    assert reply.json()["model"] == "sure" and SURE in reply.text
    tried = reply.headers["x-localllm-cascade"].split(",")
    assert tried[-1].startswith("sure") and len(tried) == (1 if cascade.served.name == "sure" else 2)
    assert cascade.line_with("cascade=sure" if len(tried) == 1 else "cascade=unsure:0.")


@pytest.mark.parametrize("path", BODIES)
def test_streams_begin_when_it_is_known_who_answers(cascade: Running, path: str) -> None:
    alone = cascade.stream_lines(path, {**BODIES[path], "model": "sure", "stream": True})
    lines = cascade.stream_lines(path, {**BODIES[path], "model": "cascade", "stream": True})
    assert len(lines) == len(alone) and "unsure" not in "".join(lines)
    assert SURE in "".join(lines) and '"model":"sure"' in "".join(lines)


def test_a_request_that_names_no_model_is_for_the_cascade_and_one_that_names_a_model_is_not(
    unsure_first: Running,
) -> None:
    assert unsure_first.answer(CHAT, BODIES[CHAT])["model"] == "sure"
    reply = unsure_first.post(CHAT, {**BODIES[CHAT], "model": "unsure"})
    assert reply.json()["model"] == "unsure" and "x-localllm-cascade" not in reply.headers
    assert "cascade" in [each["id"] for each in unsure_first.get("/v1/models").json()["data"]]


def test_what_is_shown_of_it_is_of_the_model_that_answers_where_no_other_does(sure_first: Running) -> None:
    shown = [sure_first.post("/api/show", {"model": name}).json() for name in ("cascade", "unsure", "sure")]
    assert shown[0] == shown[1] != shown[2]


def test_a_stream_lives_while_the_first_model_is_heard(unsure_first: Running, monkeypatch: Patch) -> None:
    monkeypatch.setattr(replies, "SILENCE_S", 0.001)
    body = {**BODIES[CHAT], "max_tokens": 200, "model": "cascade", "stream": True}
    lines = unsure_first.stream_lines(CHAT, body)
    assert lines[0] == ": ping" and lines[-1] == "data: [DONE]"
    assert any(SURE in line for line in lines)


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_what_refuses_a_stream_that_has_begun_is_its_end(unsure_first: Running, monkeypatch: Patch, path: str) -> None:
    monkeypatch.setattr(replies, "SILENCE_S", 0)
    body = {**BODIES[path], "messages": OWL * 200, "model": "cascade", "stream": True}
    data = unsure_first.events(path, body)
    assert data[-1]["error"]["message"]


@pytest.mark.parametrize("silence_s", [15, 0.001])
def test_who_leaves_while_the_first_model_answers_ends_it(
    unsure_first: Running, connect: Connect, monkeypatch: Patch, silence_s: float
) -> None:
    monkeypatch.setattr(replies, "SILENCE_S", silence_s)
    before = num_cancelled(unsure_first)
    client = connect(unsure_first)
    client.post(CHAT, {**BODIES[CHAT], "max_tokens": 400, "model": "cascade", "stream": True})
    if silence_s < 1:
        assert client.read_until(b": ping")
    wait_for(lambda: not unsure_first.is_idle)
    client.close()
    assert "499" in unsure_first.line_with("499")
    unsure_first.wait_until_idle()
    wait_for(lambda: num_cancelled(unsure_first) == before + 1)


def test_the_next_model_is_loaded_when_it_is_needed(models: dict[str, Path]) -> None:
    short = {**BODIES[CHAT], "messages": OWL * 3, "max_tokens": 2}
    with running(models["sure"], also=[models["unsure"]], aliases=["cascade"], cascade=Bar(0.8), ctx=64) as server:
        assert server.answer(CHAT, BODIES[CHAT])["model"] == "sure"
        assert server.pool.models[1].handle is None
        refused = server.error(CHAT, short)  # there is no room in either
        assert "64 tokens" in refused["message"] and server.pool.models[1].handle is not None


def test_drafts_that_agree_are_given_once(models: dict[str, Path]) -> None:
    body: Json = {**BODIES[CHAT], "temperature": 1, "logprobs": True}
    with running(models["unsure"], also=[models["sure"]], aliases=["cascade"], cascade=Bar(0.6, 3)) as server:
        reply = server.post(CHAT, body)
        assert reply.json()["model"] == "sure" and reply.headers["x-localllm-cascade"].startswith("unsure:0.333,")
    with running(models["sure"], also=[models["unsure"]], aliases=["cascade"], cascade=Bar(0.6, 3)) as server:
        found = server.answer(CHAT, body)
        assert len(found["choices"]) == 1 and found["choices"][0]["message"]["content"] == SURE
        events = server.events(CHAT, {**body, "stream": True})
        assert SURE in [each["choices"][0]["delta"].get("content") for each in events if each["choices"]]
        assert server.error(CHAT, {**body, "temperature": 0})["param"] == "temperature"


@pytest.mark.parametrize(
    ("path", "more", "param"),
    [
        (CHAT, {"n": 2}, "n"),
        (CHAT, {"best_of": 2, "temperature": 1}, "n"),
        (CHAT, {"beam_width": 2, "temperature": 0}, "n"),
        (CHAT, {"logit_bias": {"5": 1}}, "logit_bias"),
        ("/v1/completions", {"prompt": [1, 2, 3]}, "prompt"),
        ("/v1/completions", {"prompt": ["a", "b"]}, "prompt"),
        ("/v1/completions", {"max_tokens": 0}, "max_tokens"),
        (CHAT, {"model": "cascade:teller"}, "model"),
    ],
)
def test_what_a_cascade_cannot_honour_is_refused(sure_first: Running, path: str, more: Any, param: str) -> None:
    assert sure_first.error(path, {**BODIES[path], "model": "cascade", **more})["param"] == param


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("{sure} --cascade {sure},{unsure}", "--cascade and the model"),
        ("--cascade {sure},{sure}", "twice"),
        ("--cascade {sure},nobody/knows-it", "nobody/knows-it"),
        ("--cascade {sure},{unsure} --adapter x", "--cascade and --adapter"),
        ("--accept 0.5", "--accept needs --cascade"),
    ],
)
def test_serve_refuses_what_cannot_be(models: dict[str, Path], flags: str, named: str) -> None:
    result = run_cli("serve", "--port", "0", *flags.format(**models).split())
    assert result.code in (2, 3) and named in result.error_lines[0]
