"""The field `compress` of /v1/chat/completions, with the built-in model as the judge."""

from __future__ import annotations

from pathlib import Path

import pytest

from localllm.chat.cascade import Bar
from localllm.chat.compression import Compressible
from localllm.hub.names import TINY_DIRECTORY
from tests.cli_support import write_checkpoint
from tests.server.support import Json, Running, running
from tests.test_cli_compress import CODE, QUESTION, TALE

PATH = "/v1/chat/completions"
ASKED: Json = {
    "messages": [{"role": "system", "content": TALE}, {"role": "user", "content": f"{TALE}\n{CODE}\n\n{QUESTION}"}],
    "temperature": 0,
    "max_tokens": 4,
}


def test_the_prompt_is_shorter_and_the_reply_says_what_left(server: Running) -> None:
    whole, less = (server.answer(PATH, {**ASKED, **more}) for more in ({}, {"compress": 0.4}))
    told = less["compression"]
    assert "compression" not in whole
    assert (told["judge"], told["ratio"]) == ("tiny", 0.4)
    assert 0.3 < told["tokens_after"] / told["tokens_before"] <= 0.4
    assert any("tired of the rain" in run for run in told["removed"])
    left = whole["usage"]["prompt_tokens"] - less["usage"]["prompt_tokens"]
    assert left == pytest.approx(told["tokens_before"] - told["tokens_after"], abs=4)


def test_the_first_chunk_of_a_stream_says_it_alone(server: Running) -> None:
    chunks = server.events(PATH, {**ASKED, "compress": 0.4, "stream": True, "n": 2})
    assert ["compression" in chunk for chunk in chunks] == [True] + [False] * (len(chunks) - 1)
    assert chunks[0]["compression"] == server.answer(PATH, {**ASKED, "compress": 0.4})["compression"]


def test_a_prompt_that_is_only_its_question_stays(server: Running) -> None:
    told = server.answer(PATH, {"messages": [{"role": "user", "content": QUESTION}], "compress": 0.4, "max_tokens": 1})
    assert (told["compression"]["tokens_before"], told["compression"]["removed"]) == (0, [])


@pytest.mark.parametrize(
    ("more", "param", "status"),
    [
        ({"compress": 1.0}, "compress", 400),
        ({"compress": 0}, "compress", 400),
        ({"compress_with": "tiny"}, "compress_with", 400),
    ],
)
def test_what_cannot_be_honoured_is_refused(server: Running, more: Json, param: str, status: int) -> None:
    assert server.error(PATH, {**ASKED, **more}, status)["param"] == param


@pytest.mark.parametrize("more", [{}, {"compress": 0.8}])
def test_what_does_not_fit_is_told_the_share_with_which_it_does(server: Running, more: Json) -> None:
    asked = {"messages": [{"role": "user", "content": 40 * TALE + QUESTION}], "max_tokens": 1}
    error = server.error(PATH, {**asked, **more}, 400)
    ratio = float(error["message"].partition("Send 'compress': ")[2].split(";")[0])
    assert error["code"] == "context_length_exceeded"
    assert server.answer(PATH, {**asked, "compress": ratio})["compression"]["removed"]


def test_a_text_to_go_on_with_takes_none(server: Running) -> None:
    error = server.error("/v1/completions", {"prompt": TALE, "compress": 0.5}, 400)
    assert error["param"] == "compress" and "a field of chats" in error["message"]


def test_a_judge_that_is_not_here_is_named(server: Running) -> None:
    asked = {"compress": 0.5, "compress_with": "nobody"}
    error = server.error(PATH, {**ASKED, **asked}, 404)
    nothing_leaves = [{"role": "user", "content": QUESTION}]
    assert server.error(PATH, {"messages": nothing_leaves, **asked}, 404) == error
    assert "'nobody' is not served here" in error["message"] and "judge of 'compress'" in error["message"]


def test_the_usual_judge_has_its_own_context_where_the_server_has_a_longer_one(tmp_path: Path) -> None:
    with running(write_checkpoint(tmp_path / "long", context=4096), ctx=4096) as server:
        told = server.answer(PATH, {**ASKED, "model": "long", "compress": 0.4})["compression"]
    assert told["judge"] == "tiny" and told["removed"]


def test_another_model_judges_also_for_a_cascade_and_where_both_were_unloaded(tmp_path: Path) -> None:
    judge = tmp_path / "judge"
    judge.symlink_to(TINY_DIRECTORY)
    with running(also=(judge,), aliases=("cascade",), cascade=Bar(0.001)) as server:
        asked = {**ASKED, "model": "tiny", "compress": 0.4, "compress_with": "judge"}
        first = server.answer(PATH, asked)
        assert first["compression"]["judge"] == "judge"
        loaded = {each.name for each in server.pool.loaded}
        assert loaded == {"tiny", "judge"}
        for each in server.pool.loaded:
            assert each.handle is not None
            each.handle.close()
            each.handle = None
        for model in ("tiny", "cascade"):
            assert server.answer(PATH, {**asked, "model": model})["compression"] == first["compression"]


def test_the_judge_of_a_cascade_reads_a_request_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unsure = write_checkpoint(tmp_path / "unsure", context=1024, seed=1)
    read, readings = [], Compressible.readings
    monkeypatch.setattr(Compressible, "readings", lambda *given: read.append(1) or readings(*given))
    with running(unsure, also=[TINY_DIRECTORY], aliases=["cascade"], cascade=Bar(1.0)) as server:
        reply = server.post(PATH, {**ASKED, "model": "cascade", "compress": 0.4})
    assert reply.headers["x-localllm-cascade"].startswith("unsure:") and reply.json()["model"] == "tiny"
    assert reply.json()["compression"]["judge"] == "tiny" and len(read) == 1
