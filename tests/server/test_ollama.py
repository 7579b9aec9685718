"""Ollama's dialect, by Ollama's own library and by hand."""

from __future__ import annotations

import json
import math
import re
import threading
from dataclasses import replace
from typing import Any

import httpx2
import ollama
import pytest

from localllm import hub
from tests.fake_hub import FakeHub
from tests.hub.support import PIECE, REPO, single_model
from tests.patience import wait_for
from tests.server.support import OWL, Json, Patch, Running, each_once

GREEDY = {"temperature": 0, "num_predict": 20}
CHAT: Json = {"model": "tiny", "messages": OWL, "options": GREEDY}
PROMPT: Json = {"model": "tiny", "prompt": OWL[0]["content"], "options": GREEDY}
STORY: Json = {"model": "tiny", "prompt": "Once upon a time", "raw": True, "options": GREEDY}
DURATIONS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


@pytest.fixture
def raw(server: Running) -> httpx2.Client:
    """Requests to `server` by hand. To make a client takes 40 ms."""
    return server.client


@pytest.fixture
def fake(fake: FakeHub, own_folders: None, monkeypatch: Patch) -> FakeHub:
    """A hub with one model, and an empty cache."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", fake.endpoint)
    fake.reset({REPO: single_model(3 * PIECE)})
    return fake


def pull_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "localllm-pull"]


def refused(raw: httpx2.Client, path: str, body: Json) -> str:
    """What a 400 says."""
    reply = raw.post(path, json=body)
    assert reply.status_code == 400 and list(reply.json()) == ["error"], reply.text
    return str(reply.json()["error"])


def answered(client: ollama.Client, **options: Any) -> ollama.ChatResponse:
    """What the library gets; these options take the place of `GREEDY`'s."""
    return client.chat(**{**CHAT, "options": {**GREEDY, **options}})


@pytest.mark.supports("ollama", "/api/chat", "answer", "answer, streamed", "token usage")
def test_a_chat_says_the_same_streamed_or_whole(client: ollama.Client) -> None:
    whole = client.chat(**CHAT)
    parts = list(client.chat(**CHAT, stream=True))
    assert "".join(part.message.content or "" for part in parts) == whole.message.content != ""
    assert whole.message.role == "assistant" and whole.done and whole.done_reason == "length"
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert (whole.eval_count, parts[-1].eval_count) == (20, 20)


@pytest.mark.supports("ollama", "/api/generate", "answer", "answer, streamed", "token usage")
@pytest.mark.parametrize("asked", [PROMPT, STORY], ids=["chat template", "raw"])
def test_a_prompt_is_answered_the_same_streamed_or_whole(client: ollama.Client, asked: Json) -> None:
    whole = client.generate(**asked)
    parts = list(client.generate(**asked, stream=True))
    assert "".join(part.response or "" for part in parts) == whole.response != ""
    assert parts[-1].prompt_eval_count == whole.prompt_eval_count


@pytest.mark.supports("ollama", "/api/generate", "system prompt")
def test_a_prompt_is_a_chat_of_one_turn(client: ollama.Client) -> None:
    system = {"role": "system", "content": "You tell tales."}
    prompted = client.generate(**PROMPT, system=system["content"]).response
    assert prompted == client.chat(**{**CHAT, "messages": [system, *OWL]}).message.content


@pytest.mark.supports("ollama", "/api/generate", "raw prompt")
def test_a_raw_prompt_goes_on_as_it_is(client: ollama.Client, raw: httpx2.Client, server: Running) -> None:
    completion = {"model": "tiny", "prompt": STORY["prompt"], "temperature": 0, "max_tokens": 20}
    text = raw.post("/v1/completions", json=completion).json()["choices"][0]["text"]
    reply = client.generate(**STORY)
    assert reply.response == text and reply.prompt_eval_count == len(server.engine.encode(STORY["prompt"]))


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
@pytest.mark.parametrize("stream", [{}, {"stream": False}])
def test_without_a_prompt_the_model_is_loaded(raw: httpx2.Client, path: str, stream: Json) -> None:
    reply = raw.post(path, json={"model": "tiny", **stream}).json()
    said = reply["message"]["content"] if path == "/api/chat" else reply["response"]
    assert (said, reply["done"], reply["done_reason"], reply["model"]) == ("", True, "load", "tiny")


@pytest.mark.supports("ollama", "/api/chat", "loading a model")
@pytest.mark.supports("ollama", "/api/generate", "loading a model")
def test_the_library_loads_a_model_without_messages(client: ollama.Client) -> None:
    assert client.chat("tiny", [], keep_alive="5m").done_reason == "load"
    assert [part.done_reason for part in client.generate("tiny", "", stream=True)] == ["load"]


@pytest.mark.parametrize(("path", "body"), [("/api/chat", CHAT), ("/api/generate", PROMPT)])
def test_a_stream_is_the_default_and_every_line_of_it_is_json(raw: httpx2.Client, path: str, body: Json) -> None:
    reply = raw.post(path, json=body)
    assert reply.headers["content-type"] == "application/x-ndjson" and reply.text.endswith("}\n")
    lines = reply.text.removesuffix("\n").split("\n")
    assert all(json.loads(line)["model"] == "tiny" for line in lines) and len(lines) > 2


def test_an_answer_ends_with_whole_nanoseconds_and_a_time_of_day(raw: httpx2.Client) -> None:
    reply = raw.post("/api/chat", json={**CHAT, "stream": False}).json()
    assert all(type(reply[name]) is int and reply[name] >= 0 for name in DURATIONS)
    assert reply["total_duration"] >= reply["eval_duration"] > 0 and reply["prompt_eval_count"] > 5
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z", reply["created_at"])


def test_a_stop_text_ends_the_answer_before_it(client: ollama.Client) -> None:
    whole = client.chat(**CHAT).message.content or ""
    word = whole.split()[3]
    cut = answered(client, stop=[word])
    assert cut.message.content == whole[: whole.index(word)] and cut.done_reason == "stop"


@pytest.mark.parametrize("num_predict", [-1, -2])
def test_an_answer_may_go_on_to_the_end_of_its_context(client: ollama.Client, num_predict: int) -> None:
    reply = answered(client, num_predict=num_predict, num_ctx=48)
    assert reply.done_reason == "length" and (reply.prompt_eval_count or 0) + (reply.eval_count or 0) == 48


@pytest.mark.supports("ollama", "/api/chat", "seed")
def test_a_seed_gives_the_same_text_again_and_minus_one_another(client: ollama.Client) -> None:
    said = [answered(client, temperature=1.5, seed=seed).message.content for seed in (7, 7, -1, -1)]
    assert said[0] == said[1] and said[2] != said[3]


@pytest.mark.supports("ollama", "/api/chat", "log-probabilities", "log-probabilities, streamed")
def test_logprobs_come_with_the_likeliest_tokens(client: ollama.Client) -> None:
    whole = client.chat(**CHAT, logprobs=True, top_logprobs=2)
    assert whole.logprobs is not None and len(whole.logprobs) == 20
    assert all(each.top_logprobs and each.top_logprobs[0].logprob == each.logprob for each in whole.logprobs)
    parts = list(client.chat(**CHAT, stream=True, logprobs=True, top_logprobs=2))
    assert [each for part in parts for each in part.logprobs or ()] == list(whole.logprobs)


@pytest.mark.supports("ollama", "/api/chat", "several turns")
def test_what_was_thought_before_may_be_in_the_messages(client: ollama.Client) -> None:
    turns = [*OWL, {"role": "assistant", "content": "Once.", "thinking": "hm"}, {"role": "user", "content": "And?"}]
    assert client.chat(**{**CHAT, "messages": turns}).message.content


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_gpu", "all"), ("numa", 1), ("mirostat", 1), ("tfs_z", 0.5), ("penalize_newline", False),
        ("num_predict", 0), ("num_predict", -3), ("temperature", -1), ("temperature", "hot"), ("top_p", 2),
        ("repeat_last_n", -2), ("frobnicate", 1),
    ],
)  # fmt: skip
def test_an_option_that_cannot_be_honoured_is_refused_by_name(raw: httpx2.Client, name: str, value: object) -> None:
    assert name in refused(raw, "/api/chat", {**CHAT, "options": {name: value}})


def test_penalties_look_at_as_many_tokens_as_are_wanted(server: Running) -> None:
    def said(**options: float) -> str:
        wanted = {**GREEDY, "num_predict": 40, **options}
        return str(server.answer("/api/generate", {**STORY, "stream": False, "options": wanted})["response"])

    plain, whole = said(), said(repeat_penalty=2.0)
    assert said(repeat_penalty=2.0, repeat_last_n=0) == plain != whole == said(repeat_penalty=2.0, repeat_last_n=-1)
    assert said(repeat_penalty=2.0, repeat_last_n=1024) == whole
    assert said(repeat_penalty=2.0, repeat_last_n=8) not in (plain, whole)


def test_a_context_that_is_not_needed_may_be_longer_than_the_servers(raw: httpx2.Client) -> None:
    options = {**GREEDY, "num_ctx": 10**6, "num_predict": 2}
    assert raw.post("/api/chat", json={**CHAT, "options": options, "stream": False}).json()["eval_count"] == 2
    assert "num_ctx" in refused(raw, "/api/chat", {**CHAT, "options": {**options, "num_predict": 10**5}})


@pytest.mark.supports("ollama", "/api/chat", "options")
@pytest.mark.parametrize(
    "options",
    [
        {"repeat_last_n": -1, "repeat_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5},
        {"repeat_last_n": 64, "repeat_penalty": 1.0},
        {"mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1, "tfs_z": 1, "num_keep": -1, "penalize_newline": True},
        {"top_k": 40, "top_p": 0.9, "min_p": 0.05, "typical_p": 0.9, "seed": 3, "stop": []},
        {"num_gpu": None, "num_thread": None, "top_k": -1, "num_ctx": 256},
    ],
)
def test_an_option_that_can_be_honoured_is(client: ollama.Client, options: Json) -> None:
    assert answered(client, num_predict=2, **options).eval_count == 2


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("/api/chat", "tools", [{"type": "function"}]), ("/api/chat", "format", "yaml"),
        ("/api/chat", "format", {"type": "anything"}), ("/api/chat", "shift", True), ("/api/chat", "shift", 0.0),
        ("/api/chat", "options", {"penalize_newline": 1}), ("/api/chat", "top_logprobs", 3),
        ("/api/chat", "think", "deeply"), ("/api/chat", "messages", [{"role": "tool", "content": "7"}]),
        ("/api/chat", "messages", [{"role": "user", "content": "hi", "images": ["aGk="]}]),
        ("/api/chat", "frobnicate", 1), ("/api/generate", "template", "{{ .Prompt }}"),
        ("/api/generate", "suffix", "end"), ("/api/generate", "images", ["aGk="]), ("/api/generate", "context", [1, 2]),
        ("/api/generate", "truncate", True), ("/api/generate", "width", 64), ("/api/embed", "dimensions", 10**6),
        ("/api/pull", "insecure", True), ("/api/show", "verbose", True),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_name(raw: httpx2.Client, path: str, field: str, value: object) -> None:
    needed = {"/api/chat": CHAT, "/api/generate": PROMPT, "/api/embed": {"input": "a"}}.get(path, {"model": "tiny"})
    assert field in refused(raw, path, {**needed, field: value})


@pytest.mark.supports("ollama", "/api/chat", "refused: thinking that the model does not support")
def test_thinking_is_refused_where_the_template_knows_none(client: ollama.Client) -> None:
    assert client.chat(**CHAT, think=False).message.content
    with pytest.raises(ollama.ResponseError, match="thinking") as caught:
        client.chat(**CHAT, think=True)
    assert caught.value.status_code == 400


@pytest.mark.parametrize("field", ["system", "think"])
def test_a_raw_prompt_goes_with_no_template(raw: httpx2.Client, field: str) -> None:
    value = {"system": "You tell tales.", "think": True}[field]
    assert f"{field!r} cannot be honoured: a raw prompt" in refused(raw, "/api/generate", {**STORY, field: value})


@pytest.mark.parametrize(
    ("path", "keep_alive"),
    each_once(["/api/chat", "/api/generate", "/api/embed", "/api/embeddings"], ["later", "", "5 minutes"]),
)
def test_a_time_that_is_none_is_refused(raw: httpx2.Client, path: str, keep_alive: object) -> None:
    body = {"input": "a"} if path == "/api/embed" else {}
    said = refused(raw, path, {**body, "model": "tiny", "keep_alive": keep_alive})
    assert said.startswith("keep_alive is invalid: ")


@pytest.mark.parametrize("keep_alive", ["5m", 300, 60.5, "1h30m", "1.5h", "60", None, "-1", "-1m", -1])
def test_a_model_stays_loaded_as_long_as_is_asked(raw: httpx2.Client, keep_alive: object) -> None:
    assert raw.post("/api/chat", json={"model": "tiny", "keep_alive": keep_alive}).json()["done_reason"] == "load"


def test_the_oldest_turns_leave_where_the_client_says_so(raw: httpx2.Client) -> None:
    turns = [{"role": role, "content": "owl " * 150} for role in ("user", "assistant")] * 4
    body = {"messages": [*turns, *OWL], "options": GREEDY, "stream": False}
    replies = [raw.post("/api/chat", json={**body, "truncate": True, "stream": stream}) for stream in (False, True)]
    counts = [int(reply.headers["x-localllm-evicted-turns"]) for reply in replies]
    assert counts[0] == counts[1] > 0
    assert "maximum context length is 1024" in refused(raw, "/api/chat", {**body, "truncate": False})
    assert "maximum context length is 1024" in refused(raw, "/api/chat", {**body, "stream": True})


@pytest.mark.supports("ollama", "/api/embed", "several texts")
@pytest.mark.supports("ollama", "/api/embeddings", "one text")
def test_texts_are_embedded_alone_as_together(client: ollama.Client) -> None:
    texts = ["An owl.", "A fox found a lantern.", "The owl"]
    reply = client.embed("tiny", texts)
    single = client.embed("tiny", texts[1])
    assert all(math.isclose(math.hypot(*vector), 1, rel_tol=1e-5) for vector in reply.embeddings)
    assert list(single.embeddings[0]) == pytest.approx(list(reply.embeddings[1]), abs=1e-3)
    assert reply.prompt_eval_count and single.prompt_eval_count and reply.prompt_eval_count > single.prompt_eval_count
    assert list(client.embeddings("tiny", texts[1]).embedding) == list(single.embeddings[0])


@pytest.mark.supports("ollama", "/api/embed", "fewer dimensions")
def test_a_vector_may_be_cut_to_fewer_dimensions(client: ollama.Client) -> None:
    [whole], [cut] = (client.embed("tiny", "An owl.", dimensions=count).embeddings for count in (None, 16))
    assert len(cut) == 16 and math.isclose(math.hypot(*cut), 1, rel_tol=1e-5)
    assert [value / cut[0] for value in cut] == pytest.approx([value / whole[0] for value in whole[:16]], rel=1e-4)


@pytest.mark.supports("ollama", "/api/embed", "truncated text", "refused: prompt too long")
def test_a_text_too_long_to_embed_is_cut_where_the_client_says_so(client: ollama.Client, server: Running) -> None:
    text = "owl " * 100
    kept = server.engine.tokenizer.decode(server.engine.encode(text)[:64])
    cut = client.embed("tiny", text, truncate=True, options={"num_ctx": 64})
    assert cut.prompt_eval_count == 64
    assert list(cut.embeddings[0]) == pytest.approx(list(client.embed("tiny", kept).embeddings[0]), abs=1e-3)
    with pytest.raises(ollama.ResponseError, match="maximum context length is 64"):
        client.embed("tiny", text, options={"num_ctx": 64})


@pytest.mark.parametrize("asked", ["", []])
def test_without_a_text_nothing_is_embedded(client: ollama.Client, asked: Any) -> None:
    assert client.embed("tiny", asked).embeddings == [] and client.embeddings("tiny").embedding == []


@pytest.mark.supports("ollama", "/api/tags", "list of models")
def test_the_served_model_is_listed_under_its_names_with_what_else_is_here(client: ollama.Client) -> None:
    models = client.list().models
    assert [each.model for each in models[:2]] == ["tiny:latest", "teller:latest"]
    tiny: Any = models[0]
    assert tiny.digest == models[1].digest and re.fullmatch("[0-9a-f]{64}", tiny.digest)
    assert tiny.size > 10**7 and tiny.modified_at is not None
    assert (tiny.details.format, tiny.details.family, tiny.details.parameter_size) == ("safetensors", "llama", "6.95M")


@pytest.mark.supports("ollama", "/api/ps", "loaded model")
def test_the_loaded_model_never_expires(client: ollama.Client, server: Running) -> None:
    [loaded] = list[Any](client.ps().models)
    assert (loaded.name, loaded.model, loaded.context_length) == ("tiny:latest", "tiny:latest", server.engine.ctx)
    assert loaded.size > 10**6 and loaded.size_vram == 0 and loaded.expires_at.year > 2100
    assert loaded.details.quantization_level == server.engine.weights


@pytest.mark.supports("ollama", "/api/show", "fields that editors need")
@pytest.mark.parametrize("name", ["tiny", "tiny:latest", "teller", "Tiny"])
def test_a_model_is_shown_with_what_editors_look_for(client: ollama.Client, server: Running, name: str) -> None:
    shown = client.show(name)
    assert shown.capabilities == ["completion", "tools"] and shown.license == "apache-2.0"
    assert shown.template == server.engine.template.sources["default"] and shown.modelfile == "FROM tiny\n"
    info = shown.modelinfo or {}
    assert info["general.architecture"] == "llama" and info["general.parameter_count"] == 6_953_216
    assert (info["llama.context_length"], info["llama.embedding_length"], info["llama.block_count"]) == (1024, 256, 12)
    assert ["num_ctx", str(server.engine.ctx)] in [line.split() for line in (shown.parameters or "").splitlines()]


def test_ollamas_own_program_says_nothing_in_fields_that_it_always_sends(raw: httpx2.Client) -> None:
    empty = {"system": "", "template": "", "verbose": False, "options": None, "name": "tiny", "model": "tiny"}
    assert raw.post("/api/show", json=empty).status_code == 200
    pulled = {"model": "tiny", "insecure": False, "username": "", "password": "", "stream": False, "name": "tiny"}
    assert raw.post("/api/pull", json=pulled).json() == {"status": "success"}
    for field, path in (("system", "/api/show"), ("template", "/api/show"), ("password", "/api/pull")):
        assert field in refused(raw, path, {"model": "tiny", field: "something"})


def test_stop_texts_are_shown_as_editors_parse_them(raw: httpx2.Client, server: Running, monkeypatch: Patch) -> None:
    model = hub.describe("tiny")
    assert model.entry is not None
    told = replace(model, entry=replace(model.entry, stop=('a "b" c',)))
    monkeypatch.setattr(hub, "describe", lambda _name: told)
    monkeypatch.setattr("localllm.server.ollama.models.sampling_defaults", lambda *_: {})
    lines = raw.post("/api/show", json={"model": "tiny"}).json()["parameters"].splitlines()
    [stop] = [line.removeprefix("stop").strip() for line in lines if line.startswith("stop")]
    assert json.loads(stop) == 'a "b" c'


def test_older_clients_call_a_model_by_another_field(raw: httpx2.Client) -> None:
    assert raw.post("/api/show", json={"name": "tiny"}).json()["capabilities"] == ["completion", "tools"]
    assert "model: field required" in refused(raw, "/api/show", {})


@pytest.mark.supports("ollama", "/api/show", "refused: unknown model")
@pytest.mark.supports("ollama", "/api/delete", "refused: unknown model")
@pytest.mark.parametrize("name", ["absent", "/etc", "~", ".", "../..", "maker/absent", "localllm/tiny", "mistral-7b"])
def test_nothing_is_shown_or_deleted_but_what_is_listed(client: ollama.Client, name: str) -> None:
    for ask in (client.show, client.delete):
        with pytest.raises(ollama.ResponseError, match="not found") as caught:
            ask(name)
        assert caught.value.status_code == 404


@pytest.mark.parametrize(("name", "stream"), each_once(["absent", "/etc", "~", "../..", "tinny"], [True, False]))
def test_what_is_no_models_name_is_not_pulled(raw: httpx2.Client, name: str, stream: bool) -> None:
    reply = raw.post("/api/pull", json={"model": name, "stream": stream})
    assert reply.status_code == 404 and "not found" in reply.json()["error"]


@pytest.mark.supports("ollama", "/api/chat", "refused: unknown model")
def test_another_model_than_the_served_one_answers_nothing(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="ask for 'tiny'") as caught:
        client.chat("Tinny", OWL)
    assert caught.value.status_code == 404


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_programs_find_out_that_there_is_a_server(raw: httpx2.Client, method: str) -> None:
    reply = raw.request(method, "/")
    assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/plain")
    assert reply.text == ("Ollama is running" if method == "GET" else "")
    assert tuple(map(int, raw.get("/api/version").json()["version"].split("."))) >= (0, 6, 4)  # what editors want


@pytest.mark.parametrize("name", ["tiny", "tiny:latest", "teller"])
def test_the_served_model_is_here_already_and_is_not_deleted(client: ollama.Client, name: str) -> None:
    assert client.pull(name).status == "success"
    assert [part.status for part in client.pull(name, stream=True)] == ["success"]
    with pytest.raises(ollama.ResponseError, match="this server uses it") as caught:
        client.delete(name)
    assert caught.value.status_code == 400


@pytest.mark.supports("ollama", "/api/pull", "progress, streamed")
@pytest.mark.supports("ollama", "/api/delete", "a local model")
def test_a_pull_tells_of_each_file_in_order_and_its_model_is_listed_shown_and_deleted(
    client: ollama.Client, fake: FakeHub
) -> None:
    fake.seconds_per_chunk = 0.01
    parts = list(client.pull(f"{REPO}:latest", stream=True))
    said = list(dict.fromkeys(part.status for part in parts))
    assert said[0] == "pulling manifest" and said[-2:] == ["verifying sha256 digest", "success"]
    assert "pulling config.json" in said and said[-3] == "pulling model.safetensors"
    weights = [part for part in parts if part.status == "pulling model.safetensors"]
    counts = [part.completed or 0 for part in weights]
    assert counts == sorted(counts) and counts[-1] == weights[-1].total == 3 * PIECE
    assert len({part.digest for part in weights}) == 1 and str(weights[0].digest).startswith("sha256:")

    asked = len(fake.requests)
    assert client.pull(REPO).status == "success" and len(fake.requests) == asked
    assert f"{REPO}:latest" in [each.model for each in client.list().models]
    shown = client.show(REPO)
    assert shown.template == "" and "temperature" in (shown.parameters or "")
    assert client.delete(f"{REPO}:latest").status == "success"
    assert f"{REPO}:latest" not in [each.model for each in client.list().models]


@pytest.mark.supports("ollama", "/api/pull", "one response")
def test_a_pull_may_be_waited_for_in_one_reply(client: ollama.Client, fake: FakeHub) -> None:
    assert client.pull(REPO).status == "success"
    assert REPO in {(each.model or "").removesuffix(":latest") for each in client.list().models}


@pytest.mark.supports("ollama", "/api/pull", "refused: unknown model")
@pytest.mark.parametrize("stream", [True, False])
def test_a_repository_that_is_not_there_is_an_error(client: ollama.Client, fake: FakeHub, stream: bool) -> None:
    with pytest.raises(ollama.ResponseError, match="maker/absent"):
        list(client.pull("maker/absent", stream=stream))  # type: ignore[call-overload]


def test_a_pull_ends_with_its_reader_and_keeps_what_was_fetched(raw: httpx2.Client, fake: FakeHub) -> None:
    fake.repositories[REPO] = single_model(32 * PIECE)  # half a minute of it
    fake.seconds_per_chunk = 0.25
    with raw.stream("POST", "/api/pull", json={"model": REPO}) as reply:
        next(line for line in reply.iter_lines() if "model.safetensors" in line)
        assert pull_threads()
    wait_for(lambda: not pull_threads())
    kept = fake.sent_bytes("model.safetensors")
    assert 0 < kept < 32 * PIECE
    fake.seconds_per_chunk = 0
    assert raw.post("/api/pull", json={"model": REPO, "stream": False}).json() == {"status": "success"}
    assert fake.file_requests("model.safetensors")[-1].range_start > 0
