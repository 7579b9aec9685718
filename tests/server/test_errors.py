"""What fails while an answer is computed: a status before anything was said, an event after it, and the next request
works."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from openai.types.responses import ResponseErrorEvent

from localllm.engine.events import FinishedEvent
from localllm.errors import DoesNotFitError, EngineClosedError, NonFiniteError
from localllm.runtime.engine_handle import RequestStream
from localllm.server.errors import body_of, failure_of
from tests.server.support import OWL, Json, Patch, Running, num_cancelled, running, wait_for
from tests.thinning import thinned

CHAT = "/v1/chat/completions"
BODIES: dict[str, Json] = {
    CHAT: {"messages": OWL, "max_tokens": 30},
    "/v1/completions": {"prompt": "Once", "max_tokens": 30},
    "/v1/responses": {"input": "Once", "max_output_tokens": 30},
    "/v1/messages": {"messages": OWL, "max_tokens": 30},
    "/api/chat": {"messages": OWL, "options": {"num_predict": 30}},
    "/api/generate": {"prompt": "Once", "options": {"num_predict": 30}},
}
Fail = Callable[[int, Exception], None]


@pytest.fixture(scope="module")
def own() -> Iterator[Running]:
    with running(speculate="off") as server:
        yield server


@pytest.fixture
def fail(own: Running, monkeypatch: Patch) -> Fail:
    """Has the steps after so many fail."""

    def failing(num_steps: int, error: Exception) -> None:
        plain, left = own.engine.runner.forward, num_steps

        def forward(*arguments: Any, **keywords: Any) -> Any:
            nonlocal left
            if left <= 0:
                raise error
            left -= 1
            return plain(*arguments, **keywords)

        monkeypatch.setattr(own.engine.runner, "forward", forward)

    return failing


def message(body: Json) -> str:
    """Of an error in any dialect."""
    error = body.get("error", body)
    return str(error if isinstance(error, str) else error["message"])


FAILURES: list[tuple[Exception, int]] = [
    (NonFiniteError("a NaN in block 3"), 500),
    (DoesNotFitError("there is no room", why="3 GiB are missing"), 503),
    (ValueError("nobody foresaw it"), 500),
]


@pytest.mark.parametrize(
    ("path", "error", "status"),
    thinned(
        [(path, *failure) for path in BODIES for failure in FAILURES],
        lambda case: (
            case[0] == CHAT or (isinstance(case[1], NonFiniteError) and case[0] in ("/v1/messages", "/api/chat"))
        ),
    ),
    ids=str,
)
def test_what_fails_before_anything_is_said_has_a_status(
    own: Running, fail: Fail, monkeypatch: Patch, path: str, error: Exception, status: int
) -> None:
    if isinstance(error, ValueError):  # within the engine's bookkeeping: of one request alone

        def taken(*_: Any) -> Any:
            raise error

        monkeypatch.setattr("localllm.engine.step.StepLoop._taken", taken)
    else:
        fail(0, error)
    for stream in (False, True):
        reply = own.post(path, {**BODIES[path], "stream": stream})
        assert reply.status_code == status and reply.headers["x-should-retry"] == "false"
        assert str(error.args[0] if not isinstance(error, ValueError) else "ValueError") in message(reply.json())
    own.wait_until_idle()
    monkeypatch.undo()
    assert own.post(path, {**BODIES[path], "stream": False}).status_code == 200


@pytest.mark.parametrize("path", BODIES)
def test_what_fails_later_ends_a_stream_with_an_error(own: Running, fail: Fail, monkeypatch: Patch, path: str) -> None:
    own.log.clear()
    fail(6, NonFiniteError("a NaN in block 3"))
    lines = own.stream_lines(path, {**BODIES[path], "stream": True})
    last = [json.loads(line.removeprefix("data: ")) for line in lines if not line.startswith("event: ")][-1]
    assert "a NaN in block 3" in message(last) and "data: [DONE]" not in lines and len(lines) > 3
    own.wait_until_idle()
    assert path in own.line_with(" non-finite ")
    if path == "/v1/responses":
        assert ResponseErrorEvent.model_validate(last, strict=True).type == "error"
    monkeypatch.undo()
    assert own.post(path, {**BODIES[path], "stream": False}).status_code == 200


@pytest.mark.parametrize("path", thinned(BODIES, lambda path: path == CHAT))
def test_an_engine_that_has_broken_is_started_anew_for_the_next_request(monkeypatch: Patch, path: str) -> None:
    with running() as server:

        def step(*_: Any) -> list[FinishedEvent]:
            raise AssertionError("the engine's own bookkeeping")

        broken = server.service
        plain = broken.submit

        def submit(*arguments: Any) -> RequestStream:
            stream = plain(*arguments)
            wait_for(lambda: server.served.engine_if_loaded is None)  # it has broken before anybody asks for more
            return stream

        monkeypatch.setattr(server.engine, "step", step)
        monkeypatch.setattr(broken, "submit", submit)
        assert server.post(path, BODIES[path]).status_code == 500
        server.line_with("bug AssertionError test_errors.py:")
        wait_for(lambda: not server.served.num_open)
        assert server.get("/v1/models").status_code == 200
        assert server.post(path, BODIES[path]).status_code == 200
        assert server.service is not broken


def test_of_several_answers_none_is_left_where_one_cannot_be_begun(own: Running, monkeypatch: Patch) -> None:
    plain, count, before = own.service.submit, 0, num_cancelled(own)

    def submit(*arguments: Any) -> RequestStream:
        nonlocal count
        count += 1
        if count == 3:
            raise EngineClosedError("it is closed")
        return plain(*arguments)

    monkeypatch.setattr(own.service, "submit", submit)
    endless = {"messages": OWL, "n": 3, "logit_bias": {"2": -100, "0": -100}}
    assert own.error(CHAT, endless, 503)["code"] == "shutting_down"
    own.wait_until_idle()
    wait_for(lambda: num_cancelled(own) == before + 2)


def test_a_server_that_is_being_closed_says_so() -> None:
    with running() as server:
        server.pool.stop()
        wait_for(lambda: server.served.engine_if_loaded is None)
        assert server.error(CHAT, BODIES[CHAT], 503)["code"] == "shutting_down"


def test_a_model_is_known_by_the_name_of_its_repository(own: Running, monkeypatch: Patch) -> None:
    selection = own.served.selection
    files = replace(selection.files, repo="maker/Model")
    monkeypatch.setattr(own.served, "selection", replace(selection, files=files))
    replies = {name: own.post(CHAT, {**BODIES[CHAT], "model": name}) for name in ("Maker/model", "tiny", "maker/other")}
    assert [reply.status_code for reply in replies.values()] == [200, 200, 404]


LISTED = "GET /openapi.json lists all of them"
NOWHERE = {"/v1/chat/completion": "ask for /v1/chat/completions", "/health/": "ask for /health"}
NOWHERE |= {"/api/nowhere": LISTED, "/" + "x" * 5000: LISTED}


@pytest.mark.parametrize(("path", "fix"), NOWHERE.items(), ids=["misspelt", "a folder", "another", "long"])
def test_an_address_that_there_is_not_is_told_with_one_that_there_is(own: Running, path: str, fix: str) -> None:
    reply = own.post(path, {})
    assert reply.status_code == 404 and message(reply.json()).endswith(f"To fix it: {fix}")
    assert len(reply.content) < 600


def test_metrics_that_nobody_asked_for_are_told_to_come_with_a_flag() -> None:
    with running(with_metrics=False) as server:
        reply = server.get("/metrics")
    assert reply.status_code == 404 and message(reply.json()).endswith("To fix it: start the server with --metrics")


def test_a_method_that_an_address_does_not_know_is_told_with_those_it_knows(own: Running) -> None:
    reply = own.client.request("PATCH" * 100, "/v1/models")
    assert reply.status_code == 405 and reply.headers["allow"] == "GET"
    assert message(reply.json()).endswith("it knows GET") and len(reply.content) < 300


def test_a_bug_tells_its_kind_and_nothing_more() -> None:
    failure = failure_of(KeyError("/home/somebody/secret"))
    assert failure.status == 500 and failure.place is not None
    assert "secret" not in failure.place + json.dumps(body_of(failure, "openai"))


def test_a_bug_is_told_to_the_log_with_its_place(own: Running, monkeypatch: Patch) -> None:
    def taken(*_: Any) -> Any:
        raise ValueError("with something secret")

    monkeypatch.setattr("localllm.engine.step.StepLoop._taken", taken)
    own.log.clear()
    assert own.post(CHAT, BODIES[CHAT]).status_code == 500
    assert "secret" not in own.line_with(" 500 bug ValueError test_errors.py:")
