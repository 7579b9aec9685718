"""The shortest answer through every front end where the machine was measured: what came is then compared with a plan.

Elsewhere the tests begin where nothing is known of it; `pytest --measured` runs any of them as these are.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from localllm import Engine, FinishedEvent, SamplingParams
from localllm.config import load_settings
from localllm.runtime.selection import selected
from localllm.tui.app import ChatApp, Start
from localllm.tui.model_loader import serve
from tests.cli_support import run_cli
from tests.server.support import Running, running
from tests.speaker import write_speaker
from tests.tui import support

SAID = "Yes."
MESSAGES = [{"role": "user", "content": "Is it?"}]


@pytest.fixture(scope="module", autouse=True)
def machine(tmp_path_factory: pytest.TempPathFactory, known_machine: Callable[[Path], None]) -> Iterator[None]:
    cache = tmp_path_factory.mktemp("machine")
    known_machine(cache)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCALLLM_CACHE", str(cache))
        yield


@pytest.fixture(scope="module")
def laconic(machine: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that says one token, and ends."""
    return write_speaker(tmp_path_factory.mktemp("laconic"), [SAID])


def run(model: Path, *arguments: str) -> Any:
    result = run_cli("run", model, "-p", "Is it?", *arguments)
    assert result.code == 0, result.err
    return result


@pytest.mark.parametrize("how", [(), ("--beams", "2"), ("--n", "2"), ("--best-of", "2"), ("--max-tokens", "1")])
def test_run_says_it_and_that_no_rate_was_measured(laconic: Path, how: tuple[str, ...]) -> None:
    told = run(laconic, "--json", *how).json
    for answer in told.get("answers", [told]):
        assert (answer["text"], answer["usage"]["completion_tokens"]) == (SAID, 1)
        assert answer["timings"]["decode_tok_s"] is None and answer["timings"]["prefill_tok_s"] != 0
    assert "answer 1 tokens, " in run(laconic, "--stats", *how).err


def test_the_rate_of_an_answer_is_of_its_tokens_without_the_one_that_ends_it(tmp_path: Path) -> None:
    model = write_speaker(tmp_path / "brief", ["Yes", ", it is."])
    *_, last = map(json.loads, run(model, "--jsonl").out.splitlines())
    assert last["usage"]["completion_tokens"] == 2 and last["timings"]["decode_tok_s"] > 0


def test_an_answer_of_no_token_has_no_rate(tmp_path: Path) -> None:
    told = run(write_speaker(tmp_path / "mute", []), "--json").json
    assert told["usage"]["completion_tokens"] == 0 and told["timings"]["decode_tok_s"] is None


def test_a_job_answers_each_line(laconic: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    result = run_cli("run", laconic, "--batch", tmp_path / "prompts.jsonl")
    lines = [json.loads(line) for line in result.out.splitlines()]
    assert result.code == 0 and [line["text"] for line in lines] == [SAID] * 2, result.err
    assert [line["timings"]["decode_tok_s"] for line in lines] == [None] * 2


def test_a_plain_chat_says_it(laconic: Path) -> None:
    result = run_cli("chat", laconic, "--plain", stdin=b"Is it?\nIs it?\n")
    assert (result.code, result.out.decode().count(SAID)) == (0, 2), result.err


def test_the_full_screen_chat_says_it(laconic: Path) -> None:
    async def chat() -> None:
        resolved = load_settings({}, environ={})
        app = ChatApp(Start(selected(resolved, str(laconic)), resolved), serve)
        async with support.running(app) as pilot:
            await support.say(pilot, "Is it?")
            assert support.texts(app)[-1] == ("assistant", SAID)
            assert app.worker.answers.tok_s is None

    asyncio.run(chat())


def test_the_engine_says_it_in_python(laconic: Path) -> None:
    engine = Engine.load(laconic)
    *_, finished = engine.generate(engine.encode(MESSAGES), SamplingParams())
    engine.close()
    assert isinstance(finished, FinishedEvent) and finished.error is None
    assert finished.timings.decode_tok_s is None and finished.timings.ttft_s


@pytest.fixture(scope="module")
def server(laconic: Path) -> Iterator[Running]:
    with running(laconic, aliases=("it",)) as server:
        yield server


BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "Is it?"},
    "/v1/responses": {"input": "Is it?"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 9},
    "/api/chat": {"messages": MESSAGES},
    "/api/generate": {"prompt": "Is it?"},
}


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_the_server_says_it_in_each_dialect(server: Running, path: str, *, streams: bool) -> None:
    reply = server.post(path, {"model": "it", "stream": streams, **BODIES[path]})
    assert reply.status_code == 200 and SAID in reply.text and "bug" not in reply.text, reply.text
    assert '"predicted_per_second":0' not in reply.text.replace(" ", "")
