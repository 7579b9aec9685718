"""What changes no answer is taken, and named in a header and in the log; what would change it is refused: in every
dialect by one rule."""

from __future__ import annotations

from typing import Any

import pytest

from localllm.server.bodies import NO_EFFECT
from tests.server.support import OWL, Json, Running
from tests.thinning import every_other

HEADER = "x-ignored-fields"
GREEDY = {"temperature": 0, "seed": 1}
CHAT = {"model": "tiny", "messages": OWL, "max_tokens": 4, **GREEDY}
TEXT = {"model": "tiny", "prompt": "Once", "max_tokens": 4, **GREEDY}
ASKED = {"model": "tiny", "input": "A tale, please.", "max_output_tokens": 4, **GREEDY}
MESSAGES = {"model": "tiny", "messages": OWL, "max_tokens": 4, "temperature": 0}
OPTIONS = {"num_predict": 4, **GREEDY}
OLLAMA = {"model": "tiny", "messages": OWL, "stream": False}
GENERATE = {"model": "tiny", "prompt": "Once", "stream": False}
CACHED = {"type": "ephemeral"}
PART = {"type": "text", "text": OWL[0]["content"], "cache_control": CACHED}

# Of Ollama's own documentation, but for `stop`, at which this model would end.
DOCUMENTED = {
    "num_keep": 5, "seed": 42, "num_predict": 4, "top_k": 20, "top_p": 0.9, "min_p": 0.0, "typical_p": 0.7,
    "repeat_last_n": 33, "temperature": 0.8, "repeat_penalty": 1.2, "presence_penalty": 1.5, "frequency_penalty": 1.0,
    "penalize_newline": True, "numa": False, "num_ctx": 1024, "num_batch": 2, "num_gpu": 1, "main_gpu": 0,
    "use_mmap": True, "num_thread": 8,
}  # fmt: skip
IGNORED_OPTIONS = {"num_keep", "numa", "num_batch", "num_gpu", "main_gpu", "use_mmap", "num_thread"}

# As Codex has it in each request.
CODEX = {
    "model": "tiny",
    "instructions": "You are an agent.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "A tale, please."}]},
    ],
    "tools": [
        {"type": "function", "name": "shell", "description": "", "strict": False, "parameters": {"type": "object"}},
        {"type": "namespace", "name": "mcp", "description": "", "tools": [{"type": "function", "name": "f"}]},
        {"type": "web_search", "external_web_access": False},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "a"}},
        {"type": "local_shell"},
        {"type": "image_generation", "output_format": "png"},
        {"type": "tool_search", "execution": "client", "parameters": {}},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199",
    "client_metadata": {"x-codex-installation-id": "1"},
    "stream_options": {"reasoning_summary_delivery": "sequential_cutoff"},
    "max_output_tokens": 4,
}
OF_CODEX = {
    "tools.namespace", "tools.web_search", "tools.custom", "tools.local_shell", "tools.image_generation",
    "tools.tool_search", "reasoning.summary", "store", "include.reasoning.encrypted_content", "prompt_cache_key",
    "client_metadata", "stream_options.reasoning_summary_delivery",
}  # fmt: skip


def ignored(server: Running, path: str, body: Any) -> set[str]:
    """The header's names, which the log has as well."""
    reply = server.post(path, body)
    assert reply.status_code == 200, reply.text
    names = reply.headers.get(HEADER, "").split(", ")
    line = server.line_with(reply.headers["x-request-id"])
    assert f" ignored={','.join(names)} " in line or names == [""]
    return set(names) - {""}


CASES: list[tuple[str, Json, Json, set[str]]] = [
    ("/v1/chat/completions", CHAT, {"user": "u", "metadata": {"a": "b"}, "store": True}, {"user", "metadata", "store"}),
    ("/v1/chat/completions", CHAT, {"tools": [{"type": "web_search"}]}, {"tools.web_search"}),
    ("/v1/chat/completions", CHAT, {"tools": [{"type": "custom", "custom": {"name": "f"}}]}, {"tools.custom"}),
    ("/v1/chat/completions", CHAT, {"messages": [{**OWL[0], "cache_control": CACHED}]}, {"messages.cache_control"}),
    ("/v1/chat/completions", CHAT, {"messages": [{**OWL[0], "content": [PART]}]}, {"messages.content.cache_control"}),
    ("/v1/completions", TEXT, {"user": "u", "prompt_cache_key": "k"}, {"user", "prompt_cache_key"}),
    ("/v1/responses", ASKED, {"store": True, "user": "u"}, {"store", "user"}),
    ("/v1/responses", ASKED, {"reasoning": {"summary": "auto"}}, {"reasoning.summary"}),
    ("/v1/responses", ASKED, {"tools": [{"type": "web_search_2025_08_26"}]}, {"tools.web_search"}),
    ("/v1/responses", ASKED, {"service_tier": "auto", "truncation": "disabled", "metadata": {"a": "b"}}, set()),
    ("/v1/messages", MESSAGES, {"metadata": {"user_id": "u"}, "service_tier": "auto"}, {"metadata", "service_tier"}),
    ("/v1/messages", MESSAGES, {"cache_control": CACHED}, {"cache_control"}),
    ("/v1/messages", MESSAGES, {"messages": [{**OWL[0], "content": [PART]}]}, {"messages.content.cache_control"}),
    ("/v1/messages", MESSAGES, {"tools": [{"type": "web_search_20250305", "name": "w"}]}, {"tools.web_search"}),
    ("/v1/messages", MESSAGES, {"tools": [{"type": "bash_20250124", "name": "bash"}]}, {"tools.bash"}),
    ("/api/chat", OLLAMA, {"options": {**OPTIONS, "num_thread": 4}}, {"options.num_thread"}),
    ("/api/generate", GENERATE, {"options": {**OPTIONS, "low_vram": True}}, {"options.low_vram"}),
    ("/api/embed", {"model": "tiny", "input": "Once"}, {"options": {"num_gpu": 1}}, {"options.num_gpu"}),
]


def said(reply: Any) -> Any:
    """What an answer says, without what is another each time."""
    kept = ("choices", "output", "content", "message", "response", "embeddings")
    found = {name: reply[name] for name in kept if name in reply}
    for item in found.get("output", ()):
        item.pop("id")
    return found


def named(value: Any) -> str:
    return str(sorted(value) if isinstance(value, set) else value)[:40]


@pytest.mark.parametrize(("path", "body", "more", "names"), every_other(CASES), ids=named)
def test_what_changes_no_answer_is_taken_and_named(
    server: Running, path: str, body: Json, more: Json, names: set[str]
) -> None:
    plain = {**body, "options": OPTIONS} if path.startswith("/api/") else body
    assert ignored(server, path, {**plain, **more}) == names
    assert said(server.post(path, {**plain, **more}).json()) == said(server.post(path, plain).json())


def test_what_is_honoured_or_says_nothing_is_not_named(server: Running) -> None:
    quiet = {"user": None, "metadata": {}, "tools": [], "service_tier": "flex", "store": None}
    assert ignored(server, "/v1/chat/completions", {**CHAT, **quiet}) == set()
    assert HEADER not in server.get("/health").headers


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_as_codex_sends_it_is_answered(server: Running, stream: bool) -> None:
    assert ignored(server, "/v1/responses", {**CODEX, "stream": stream}) == OF_CODEX


def test_a_tool_that_cannot_be_run_here_is_not_told_to_the_model(server: Running) -> None:
    function, *others = CODEX["tools"]
    told = [[function], [function, *others], others, []]
    counts = [server.answer("/v1/responses", {**CODEX, "tools": tools})["usage"]["input_tokens"] for tools in told]
    assert counts[0] == counts[1] > counts[2] == counts[3]
    shown = server.post("/v1/responses", CODEX).json()["tools"]
    assert [each["name"] for each in shown] == ["shell"]


@pytest.mark.parametrize(("path", "body"), [("/api/chat", OLLAMA), ("/api/generate", GENERATE)])
@pytest.mark.parametrize("stream", [False, True])
def test_the_options_that_ollama_documents_are_taken(server: Running, path: str, body: Any, stream: bool) -> None:
    names = ignored(server, path, {**body, "options": DOCUMENTED, "stream": stream})
    assert names == {f"options.{name}" for name in IGNORED_OPTIONS}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/responses", {**ASKED, "tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ("/v1/responses", {**ASKED, "reasoning": {"context": "all_turns"}}, "reasoning.context"),
        ("/v1/responses", {**ASKED, "include": ["frobnicate"]}, "include.0"),
        ("/v1/chat/completions", {**CHAT, "metadata": "a"}, "metadata"),
    ],
)
def test_what_would_change_an_answer_is_refused(server: Running, path: str, body: Any, param: str) -> None:
    reply = server.post(path, body)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == param and HEADER not in reply.headers


def test_a_page_of_another_origin_may_read_the_header(server: Running) -> None:
    reply = server.client.post("/v1/chat/completions", json={**CHAT, "user": "u"}, headers={"origin": server.url})
    assert HEADER in reply.headers["access-control-expose-headers"] and reply.headers[HEADER] == "user"


def test_the_document_says_which_fields_have_no_effect_and_why(server: Running) -> None:
    schemas = server.get("/openapi.json").json()["components"]["schemas"]
    for field in ("num_thread", "store", "cache_control", "client_metadata", "summary"):
        found = [each["properties"][field] for each in schemas.values() if field in each.get("properties", {})]
        assert any(own.get("description", "").startswith(f"{NO_EFFECT}: ") for own in found), field


WHOLE = [
    ("/v1/chat/completions", CHAT, "max_tokens"),
    ("/v1/chat/completions", {**CHAT, "n": 2}, "n"),
    ("/v1/chat/completions", {**CHAT, "top_k": 5}, "top_k"),
    ("/v1/completions", {**TEXT, "seed": 3}, "seed"),
    ("/v1/completions", {**TEXT, "prompt": [5, 6, 7]}, "prompt"),
    ("/v1/responses", ASKED, "max_output_tokens"),
    ("/v1/messages", MESSAGES, "max_tokens"),
    ("/api/generate", {**GENERATE, "options": OPTIONS}, "options"),
]


def with_points(value: Any, point: float) -> Any:
    """Its whole numbers as 1.0, or as 1.5."""
    match value:
        case bool():
            return value
        case int():
            return value + point
        case list():
            return [with_points(each, point) for each in value]
        case dict():
            return {name: with_points(each, point) for name, each in value.items()}
    return value


@pytest.mark.parametrize(("path", "body", "field"), WHOLE, ids=lambda value: str(value)[:30])
def test_a_whole_number_may_be_written_with_a_point(server: Running, path: str, body: Any, field: str) -> None:
    reply = server.post(path, {**body, field: with_points(body[field], 0.0)})
    assert reply.status_code == 200 and said(reply.json()) == said(server.post(path, body).json())
    reply = server.post(path, {**body, field: with_points(body[field], 0.5)})
    assert reply.status_code == 400 and "valid integer" in reply.text, reply.text


OPENAIS = [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT), ("/v1/responses", ASKED)]


@pytest.mark.parametrize(("path", "body"), OPENAIS)
@pytest.mark.parametrize("off", [-1, 0])
def test_top_k_may_be_off(server: Running, path: str, body: Any, off: int) -> None:
    """So that the seed's draw is another than among a few."""
    drawn = {**body, "temperature": 3.0}
    assert said(server.post(path, {**drawn, "top_k": off}).json()) == said(server.post(path, drawn).json())
    assert server.post(path, {**drawn, "top_k": -2}).status_code == 400
