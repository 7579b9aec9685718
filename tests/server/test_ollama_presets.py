"""Presets over HTTP: made, copied and deleted as Ollama's library does it, asked for in every dialect."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import ollama
import pytest

from localllm.config import user_directories
from localllm.runtime.modelfile import parse_modelfile
from localllm.runtime.presets import find_preset, save_preset
from tests.cli_support import write_checkpoint
from tests.server.support import OWL, Json, Running, running

SYSTEM = "You tell tales of plumbers, in short sentences."
MARIO: Json = {"model": "tiny", "system": SYSTEM, "temperature": 0.0, "max_tokens": 12}
PARAMETERS: Json = {"temperature": 0.5, "seed": 7, "stop": ["END", "FIN"], "num_ctx": 512, "repeat_last_n": 64}

# Of each dialect: a path, a body without a system message, one with it, and the answer in a reply.
OPENAI = "/v1/chat/completions", {"messages": OWL}, {"messages": [{"role": "system", "content": SYSTEM}, *OWL]}
ANTHROPIC = "/v1/messages", {"messages": OWL, "max_tokens": 12}, {"messages": OWL, "max_tokens": 12, "system": SYSTEM}
RESPONSES = "/v1/responses", {"input": "A tale."}, {"input": "A tale.", "instructions": SYSTEM}
CHAT = "/api/chat", {"messages": OWL, "stream": False}, {"messages": OPENAI[2]["messages"], "stream": False}
PROMPT = {"prompt": "A tale.", "stream": False}
GENERATE = "/api/generate", PROMPT, {**PROMPT, "system": SYSTEM}
DIALECTS = [OPENAI, ANTHROPIC, RESPONSES, CHAT, GENERATE]
TYPED: dict[str, Json] = {
    "/v1/chat/completions": {"temperature": 0, "max_tokens": 12},
    "/v1/messages": {"temperature": 0},
    "/v1/responses": {"temperature": 0, "max_output_tokens": 12},
    "/api/chat": {"options": {"temperature": 0, "num_predict": 12}},
    "/api/generate": {"options": {"temperature": 0, "num_predict": 12}},
}
SAID: dict[str, Callable[[Any], str]] = {
    "/v1/chat/completions": lambda reply: str(reply["choices"][0]["message"]["content"]),
    "/v1/messages": lambda reply: str(reply["content"][0]["text"]),
    "/v1/responses": lambda reply: str(reply["output"][0]["content"][0]["text"]),
    "/api/chat": lambda reply: str(reply["message"]["content"]),
    "/api/generate": lambda reply: str(reply["response"]),
}


def num_read(reply: Json) -> int:
    """The tokens of the prompt, as each dialect has them."""
    usage = reply.get("usage", reply)
    names = ("prompt_tokens", "input_tokens", "cache_read_input_tokens", "prompt_eval_count")
    return sum(usage.get(name, 0) for name in names)


pytestmark = pytest.mark.usefixtures("own_folders")


@pytest.fixture
def raw(server: Running) -> httpx2.Client:
    return server.client


@pytest.fixture
def mario(own_folders: None) -> Path:
    return save_preset("mario", MARIO, replaces=False)


@pytest.mark.parametrize(("path", "bare", "whole"), DIALECTS, ids=[path for path, _, _ in DIALECTS])
@pytest.mark.usefixtures("mario")
def test_a_preset_says_what_its_model_says_with_the_same_settings(
    server: Running, path: str, bare: Json, whole: Json
) -> None:
    by_hand = server.answer(path, {"model": "tiny", **whole, **TYPED[path]})
    reply = server.answer(path, {"model": "Mario", **bare})
    assert SAID[path](reply) == SAID[path](by_hand) != ""
    plain = server.answer(path, {"model": "tiny", **bare, **TYPED[path]})
    assert num_read(reply) == num_read(by_hand) > num_read(plain)
    assert [each.name for each in server.pool.models] == ["tiny"]  # and no second engine


def test_the_preset_that_is_served_is_the_first_of_the_models(mario: Path) -> None:
    save_preset("alfa", MARIO, replaces=False)
    with running(preset="mario") as server:
        names = [each["id"] for each in server.get("/v1/models").json()["data"]]
    assert names[0] == "mario" and names.count("mario") == 1 and {"tiny", "alfa"} <= set(names)


def test_an_empty_system_message_takes_that_of_the_preset_beneath_away(server: Running, mario: Path) -> None:
    body = {"model": "bare", "from": "mario", "system": "", "stream": False}
    assert server.client.post("/api/create", json=body).status_code == 200
    preset = find_preset("bare")
    assert preset is not None and "system" not in preset.values and preset.values["temperature"] == 0


def test_a_preset_for_the_cpu_is_served_by_an_engine_that_is_there(server: Running) -> None:
    save_preset("here", {**MARIO, "device": "cpu"}, replaces=False)
    assert SAID[CHAT[0]](server.answer(CHAT[0], {"model": "here", **CHAT[1]}))


@pytest.mark.usefixtures("mario")
def test_what_a_request_says_itself_beats_the_preset(server: Running) -> None:
    path, _, whole = OPENAI
    own = {"messages": [{"role": "system", "content": "Be brief."}, *OWL], "max_tokens": 5}
    replies = [server.answer(path, {"model": name, **own, "temperature": 0}) for name in ("tiny", "mario")]
    assert SAID[path](replies[0]) == SAID[path](replies[1])
    assert [each["usage"]["completion_tokens"] for each in replies] == [5, 5]
    assert server.answer(path, {"model": "mario", **whole})["usage"]["completion_tokens"] == 12


@pytest.mark.usefixtures("mario")
def test_counted_and_shown_prompts_have_the_preset_s_system_message(server: Running) -> None:
    for path, bare, whole in (
        ("/v1/messages/count_tokens", {"messages": OWL}, {"messages": OWL, "system": SYSTEM}),
        ("/v1/responses/input_tokens", RESPONSES[1], RESPONSES[2]),
        ("/apply-template", {"messages": OWL}, {"messages": OPENAI[2]["messages"]}),
    ):
        assert server.answer(path, {"model": "mario", **bare}) == server.answer(path, {"model": "tiny", **whole})


def test_an_edited_file_counts_from_the_next_request_on(server: Running, mario: Path) -> None:
    path, bare, _ = OPENAI
    assert server.answer(path, {"model": "mario", **bare})["usage"]["completion_tokens"] == 12
    mario.write_text(mario.read_text().replace("max_tokens = 12", "max_tokens = 3"))
    assert server.answer(path, {"model": "mario", **bare})["usage"]["completion_tokens"] == 3
    mario.write_text("max_tokens = 3\n")
    message = server.error(path, {"model": "mario", **bare}, status=503)["message"]
    assert "localllm preset show mario" in message and str(mario.parent) not in message
    mario.unlink()
    assert "mario" in server.error(path, {"model": "mario", **bare}, status=404)["message"]


def test_a_context_is_what_a_preset_allows(server: Running) -> None:
    save_preset("short", {"model": "tiny", "ctx": 24}, replaces=False)
    assert server.answer(OPENAI[0], {"model": "short", **OPENAI[1]})["usage"]["total_tokens"] == 24


@pytest.mark.parametrize(("key", "value"), [("kv", "int4"), ("threads", 3), ("overflow", "grow")])
def test_a_preset_of_another_engine_is_refused_with_what_serves_it(server: Running, key: str, value: Any) -> None:
    save_preset("own", {"model": "tiny", key: value}, replaces=False)
    message = server.error(OPENAI[0], {"model": "own", **OPENAI[1]})["message"]
    assert key in message and ("localllm serve own" in message or "localllm run own" in message)


def test_a_server_that_was_started_with_a_preset_answers_as_it_where_no_model_is_named(mario: Path) -> None:
    path, bare, whole = OPENAI
    with running(preset="mario") as server:
        assert SAID[path](server.answer(path, bare)) == SAID[path](server.answer(path, {**whole, **TYPED[path]}))
        assert server.answer(path, bare)["model"] == "mario"
        assert server.get("/props").json()["default_generation_settings"]["params"]["max_tokens"] == 12
        assert server.client.request("DELETE", "/api/delete", json={"model": "mario"}).status_code == 400
    assert mario.exists()


@pytest.mark.supports("ollama", "/api/create", "a preset of a model", "progress, streamed", "one response")
@pytest.mark.supports("ollama", "/api/delete", "a preset")
@pytest.mark.parametrize("stream", [False, True])
def test_the_library_makes_lists_shows_and_deletes_a_preset(client: ollama.Client, stream: bool) -> None:
    made = client.create("mario", from_="tiny", system=SYSTEM, parameters=PARAMETERS, stream=stream)
    assert [part.status for part in (made if stream else [made])][-1] == "success"
    values = {"temperature": 0.5, "seed": 7, "stop": ("END", "FIN"), "ctx": 512, "repeat_last_n": 64}
    found = find_preset("mario")
    assert found is not None and found.values == {"model": "tiny", "system": SYSTEM, **values}
    listed = {model.model: model for model in client.list().models}
    assert "mario:latest" in listed and listed["mario:latest"].digest != listed["tiny:latest"].digest
    shown = client.show("mario")
    assert shown.modelfile is not None and parse_modelfile(shown.modelfile, "it").values == {"system": SYSTEM, **values}
    assert client.chat("mario", OWL, options={"num_predict": 2}).eval_count == 2
    client.delete("mario")
    assert find_preset("mario") is None
    with pytest.raises(ollama.ResponseError, match="not"):
        client.show("mario")


@pytest.mark.supports("ollama", "/api/copy", "a model", "a preset")
def test_the_library_copies_models_and_presets(client: ollama.Client, mario: Path) -> None:
    client.copy("mario", "luigi")
    client.copy("tiny", "small")
    assert (mario.parent / "luigi.toml").read_text() == mario.read_text()
    assert (mario.parent / "small.toml").read_text() == 'model = "tiny"\n'


def test_a_preset_is_made_over_another_one(client: ollama.Client, mario: Path) -> None:
    client.create("luigi", from_="mario:latest", parameters={"num_predict": -1, "top_k": 5})
    found = find_preset("luigi")
    assert found is not None
    assert found.values == {"model": "tiny", "system": SYSTEM, "temperature": 0.0, "top_k": 5}
    assert "luigi" not in mario.read_text()


@pytest.mark.supports("ollama", "/api/create", "refused: unknown model")
@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"from": None}, "from"),
        ({"from": "no-such-model"}, "not served here"),
        ({"from": "/etc"}, "not served here"),
        ({"from": "../tiny"}, "not served here"),
        ({"model": "tiny"}, "has a model of that name"),
        ({"model": "qwen3-8b"}, "may not hide a model"),
        ({"model": "../../up"}, "letters, digits"),
        ({"model": "mario:v2"}, "letters, digits"),
        ({"template": "{{ .Prompt }}"}, "chat template"),
        ({"adapters": {"a": "sha256:0"}}, "a request may not name files"),
        ({"messages": OWL}, "no messages"),
        ({"files": {"a.gguf": "sha256:0"}}, "may not name files"),
        ({"quantize": "q4_K_M"}, "localllm quantize"),
        ({"parameters": {"num_gpu": 1}}, "num_gpu has no effect"),
        ({"parameters": {"mirostat": 2}}, "mirostat"),
        ({"parameters": {"temprature": 1}}, "temperature"),
        ({"parameters": {"temperature": 999}}, "from 0 to 100"),
        ({"parameters": {"stop": ["", "a"]}}, "none empty"),
    ],
    ids=str,
)
def test_what_cannot_be_a_preset_is_refused_and_nothing_is_written(raw: httpx2.Client, more: Json, why: str) -> None:
    reply = raw.post("/api/create", json={"model": "mario", "from": "tiny", **more})
    assert reply.status_code in (400, 404) and why in reply.json()["error"]
    assert not (user_directories().config / "presets").exists()


def test_a_licence_is_named_as_without_effect(raw: httpx2.Client) -> None:
    reply = raw.post("/api/create", json={"model": "mario", "from": "tiny", "license": "MIT", "stream": False})
    assert reply.json() == {"status": "success"} and reply.headers["x-ignored-fields"] == "license"


def test_presets_are_among_the_models_and_broken_ones_are_not(server: Running, mario: Path) -> None:
    (mario.parent / "broken.toml").write_text("model = 1\n")
    (mario.parent / "gone.toml").write_text('model = "maker/absent"\n')
    names = [each["id"] for each in server.get("/v1/models").json()["data"]]
    assert "mario" in names and "broken" not in names and "gone" not in names
    assert server.get("/v1/models/mario").json()["id"] == "mario"
    tags = [each["name"] for each in server.get("/api/tags").json()["models"]]
    assert "mario:latest" in tags and "broken:latest" not in tags and "gone:latest" not in tags


def test_a_preset_of_a_folder_is_served_from_there(server: Running, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "other")
    save_preset("mine", {"model": str(folder), "max_tokens": 3}, replaces=False)
    with running() as own:
        assert own.answer(OPENAI[0], {"model": "mine", **OPENAI[1]})["usage"]["completion_tokens"] == 3
        assert "mine:latest" in [each["name"] for each in own.get("/api/tags").json()["models"]]
        assert own.post("/api/show", {"model": "mine"}).json()["modelfile"] == "FROM other\nPARAMETER num_predict 3\n"
    assert "mine" in [each["id"] for each in server.get("/v1/models").json()["data"]]
