"""/v1/chat/completions, by OpenAI's own library and by hand."""

from __future__ import annotations

import inspect
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from localllm.engine.request import Request, SamplingParams
from localllm.runtime.served_model import AskedModel
from localllm.server.errors import RequestError
from localllm.server.generation_request import PreparedRequest, joined
from tests.server.support import OWL, Json, Patch, Running, Says

LIBRARYS_OWN = ("self", "extra_headers", "extra_query", "extra_body", "timeout")  # of its arguments: these are not sent
PATH = "/v1/chat/completions"
GREEDY: Json = {"model": "tiny", "messages": OWL, "temperature": 0, "max_tokens": 24}


def answered(client: openai.OpenAI, **more: Any) -> Any:
    """What the library gets; what more is asked takes the place of `GREEDY`'s."""
    return client.chat.completions.create(**{**GREEDY, **more})


def text_of(reply: Any) -> str:
    return str(reply.choices[0].message.content)


@pytest.mark.supports("openai", "/v1/chat/completions", "answer", "token usage", "token limit")
def test_the_library_gets_a_whole_answer(client: openai.OpenAI) -> None:
    reply = answered(client)
    assert reply.choices[0].finish_reason == "length"
    assert reply.choices[0].message.role == "assistant" and reply.choices[0].message.content
    assert (reply.usage.completion_tokens, reply.usage.total_tokens) == (24, reply.usage.prompt_tokens + 24)


@pytest.mark.supports("openai", "/v1/chat/completions", "answer, streamed", "token usage, streamed")
def test_a_stream_says_the_same_as_a_whole_answer(client: openai.OpenAI) -> None:
    chunks = list(answered(client, stream=True, stream_options={"include_usage": True}))
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert said == text_of(answered(client))
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 24


def test_a_document_is_reused_where_a_request_allows_it(client: openai.OpenAI) -> None:
    words = ["a", "king", "who", "had", "garden", "and", "in", "it", "stood", "tree", "with", "golden", "apples"]
    tales = [" ".join(random.Random(seed).choices(words, k=200)) for seed in range(2)]
    answered(client, messages=[{"role": "user", "content": f"First: {tales[0]} {tales[1]}"}], max_tokens=1)
    asked = [{"role": "user", "content": f"Another order: {tales[1]} {tales[0]}"}]
    exact = answered(client, messages=asked, max_tokens=1).usage.prompt_tokens_details
    asked = [{"role": "user", "content": f"An order of its own: {tales[1]} {tales[0]}"}]
    near = answered(client, messages=asked, max_tokens=1, extra_body={"reuse": "chunks"}).usage.prompt_tokens_details
    assert not hasattr(exact, "reused_tokens") and near.cached_tokens >= near.reused_tokens > 0
    with pytest.raises(openai.BadRequestError, match="reuse"):
        answered(client, extra_body={"reuse": "chunk"})


def test_a_stream_has_data_lines_alone_from_a_role_to_an_empty_delta_and_its_mark(server: Running) -> None:
    *lines, mark = server.stream_lines(PATH, {**GREEDY, "stream": True})
    assert all(line.startswith("data: ") for line in lines) and mark == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert all(len(chunk["choices"]) == 1 and "usage" not in chunk for chunk in chunks)
    first, last = chunks[0]["choices"][0], chunks[-1]["choices"][0]
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert last["delta"] == {} and last["finish_reason"] == "length"


@pytest.mark.supports("openai", "/v1/chat/completions", "stream accumulated by the client")
def test_the_librarys_stream_helper_accumulates_an_answer(client: openai.OpenAI) -> None:
    # Of an answer that was cut it raises, as it does with the original.
    with client.chat.completions.stream(**GREEDY, stop=["."]) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "content.delta" in events and final.choices[0].message.content


@pytest.mark.supports("openai", "/v1/chat/completions", "seed", "several answers")
def test_the_same_seed_gives_the_same_text_and_each_of_n_answers_has_its_own(client: openai.OpenAI) -> None:
    asked: Json = {"temperature": 1, "seed": -5, "n": 3}
    first, again = (answered(client, **asked) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in again.choices] and len(set(texts)) == 3
    assert [choice.index for choice in first.choices] == [0, 1, 2]


@pytest.mark.supports("openai", "/v1/chat/completions", "several answers, streamed")
def test_several_answers_are_streamed_side_by_side(client: openai.OpenAI) -> None:
    asked: Json = {"temperature": 1, "seed": 3, "n": 2}
    whole = [choice.message.content for choice in answered(client, **asked).choices]
    said = ["", ""]
    for chunk in answered(client, **asked, stream=True):
        for choice in chunk.choices:
            said[choice.index] += choice.delta.content or ""
    assert said == whole


@pytest.mark.supports("openai", "/v1/chat/completions", "log-probabilities")
def test_logprobs_come_with_the_tokens_bytes_and_the_likeliest_beside_them(client: openai.OpenAI) -> None:
    reply = answered(client, logprobs=True, top_logprobs=3)
    content = reply.choices[0].logprobs.content
    assert len(content) == 24
    assert all(len(token.top_logprobs) == 3 and token.logprob == token.top_logprobs[0].logprob for token in content)
    said = b"".join(bytes(token.bytes or ()) for token in content)
    assert said.decode().lstrip() == text_of(reply).lstrip()


@pytest.mark.supports("openai", "/v1/chat/completions", "stop sequences")
def test_a_stop_text_ends_the_answer_before_it(client: openai.OpenAI) -> None:
    whole = text_of(answered(client))
    word = whole.split()[3]
    reply = answered(client, stop=[word])
    assert text_of(reply) == whole[: whole.index(word)] and reply.choices[0].finish_reason == "stop"


@pytest.mark.supports("openai", "/v1/chat/completions", "content as text parts")
def test_parts_of_text_are_a_text(client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": OWL[0]["content"]}]
    in_parts = answered(client, messages=[{"role": "user", "content": parts}])
    assert text_of(in_parts) == text_of(answered(client))


@pytest.mark.supports("openai", "/v1/chat/completions", "logit bias")
def test_a_logit_bias_rules_a_token_out(client: openai.OpenAI, server: Running) -> None:
    first = answered(client, max_tokens=1, logprobs=True)
    token = server.engine.tokenizer.token_id(first.choices[0].logprobs.content[0].token)
    assert token is not None
    assert text_of(answered(client, max_tokens=1, logit_bias={str(token): -100})) != text_of(first)


@pytest.mark.supports("openai", "/v1/chat/completions", "refused: unsupported fields, by name")
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("response_format", {"type": "grammar"}),
        ("modalities", ["audio"]), ("n", 10**9), ("n", 0), ("top_logprobs", 10**6),
        ("logit_bias", {str(i): 1 for i in range(10**5)}), ("stop", ["x"] * 10**5), ("temperature", -1),
        ("temperature", "hot"), ("max_tokens", 0), ("frobnicate", 1), ("seed", 2**70), ("messages", []),
        ("max_completion_tokens", 2), ("verbosity", "low"), ("audio", {"voice": "alloy"}),
        ("function_call", {"name": "f"}), ("prediction", {"type": "content", "content": "a"}),
        ("reasoning_effort", "high"), ("chat_template_kwargs", {"enable_thinking": True}),
        ("stream_options", {"include_usage": True}),
    ], ids=lambda value: str(value)[:30],
)  # fmt: skip
def test_what_cannot_be_honoured_is_a_400_that_names_it(client: openai.OpenAI, field: str, value: object) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        answered(client, extra_body={field: value})
    assert field in str(caught.value.param) or field in caught.value.message


def test_what_has_no_effect_is_accepted(client: openai.OpenAI) -> None:
    inert: Json = {"user": "u", "metadata": {"a": "b"}, "store": True, "tools": [], "top_logprobs": 0}
    inert |= {"parallel_tool_calls": True, "function_call": "none", "verbosity": "medium", "service_tier": "scale"}
    assert answered(client, extra_body=inert).choices


def test_a_parameter_of_the_library_that_is_null_is_none(client: openai.OpenAI, server: Running) -> None:
    asked: tuple[tuple[str, Any, Json], ...] = (
        (PATH, client.chat.completions.create, {"messages": OWL, "max_tokens": 1}),
        ("/v1/completions", client.completions.create, {"prompt": "Once", "max_tokens": 1}),
        ("/v1/responses", client.responses.create, {"input": "Once", "max_output_tokens": 1}),
        ("/v1/embeddings", client.embeddings.create, {"input": "Once"}),
    )
    for path, create, body in asked:
        nulls = dict.fromkeys(set(inspect.signature(create).parameters) - set(LIBRARYS_OWN))
        server.answer(path, {**nulls, **body})


def test_an_answer_may_be_sent_back(client: openai.OpenAI, says: Says) -> None:
    says("There was an owl.")
    with client.chat.completions.stream(**GREEDY) as stream:
        parsed = stream.get_final_completion().choices[0].message
    for said in (parsed, answered(client).choices[0].message):
        assert text_of(answered(client, messages=[*OWL, said, {"role": "user", "content": "Go on."}]))


def test_a_developer_speaks_as_the_system_where_the_template_knows_no_other(client: openai.OpenAI) -> None:
    roles = ("developer", "system")
    one, other = (answered(client, messages=[{"role": role, "content": "Be brief."}, *OWL]) for role in roles)
    assert text_of(one) == text_of(other) and one.usage.prompt_tokens == other.usage.prompt_tokens


def test_a_context_that_is_not_needed_may_be_longer_than_the_servers(server: Running) -> None:
    body = {"messages": OWL, "max_tokens": 3, "num_ctx": 10**6}
    server.answer(PATH, body)
    assert server.error(PATH, {**body, "max_tokens": 10**5})["param"] == "num_ctx"


def test_a_stop_text_comes_to_those_of_the_model(server: Running, monkeypatch: Patch) -> None:
    own = replace(server.served.selection.sampling(), stop=(" a",))
    monkeypatch.setattr(AskedModel, "sampling", lambda _: own)
    asked = {"messages": OWL, "temperature": 0, "max_tokens": 20, "stop": "there is no such text"}
    reply = server.answer(PATH, asked)["choices"][0]
    assert " a" not in reply["message"]["content"] and reply["finish_reason"] == "stop"


def test_numbers_beyond_what_a_reply_may_have_are_refused() -> None:
    request = Request((1,), SamplingParams(logprobs=20, max_tokens=8192))
    assert joined([PreparedRequest((request,) * 6)]).requests
    with pytest.raises(RequestError, match="too many log-probabilities"):
        joined([PreparedRequest((request,) * 4), PreparedRequest((request,) * 4)])


def test_a_token_that_does_not_exist_is_refused_by_the_name_of_its_field(server: Running) -> None:
    error = server.error(PATH, {"messages": OWL, "logit_bias": {"999999": -100}})
    assert error["param"] == "logit_bias" and "999999" in error["message"]
    assert server.error("/v1/completions", {"prompt": [999999]})["param"] == "prompt"


def test_more_answers_than_the_server_ever_takes_on_are_not_asked_for_again(server: Running) -> None:
    assert "72" in server.error("/v1/completions", {"prompt": ["Once"] * 16, "n": 16})["message"]


@pytest.mark.supports("openai", "/v1/chat/completions", "refused: prompt too long")
def test_a_prompt_that_is_too_long_is_refused_with_the_numbers(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "owl " * 3000}])
    error: Any = caught.value.body
    assert caught.value.code == "context_length_exceeded"
    assert error["n_ctx"] == 1024 and error["n_prompt_tokens"] > 3000
    assert "maximum context length is 1024 tokens" in error["message"]
    assert "exceeds the available context size" in error["message"]


@pytest.mark.supports("openai", "/v1/chat/completions", "refused: unknown model")
def test_an_unknown_model_is_a_404_with_the_nearest_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        answered(client, model="tinny")
    assert caught.value.code == "model_not_found" and "'tiny'" in caught.value.message


@pytest.mark.parametrize("name", ["tiny", "tiny:latest", "teller"])
def test_a_model_is_known_by_its_names(client: openai.OpenAI, name: str) -> None:
    assert answered(client, model=name).model == name


@pytest.mark.supports("openai", "/v1/models", "list of models")
@pytest.mark.supports("openai", "/v1/models/{model:path}", "one model")
def test_the_models_are_listed(client: openai.OpenAI, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("LOCALLLM_CACHE", str(tmp_path))  # where no other test has packed a model
    assert [model.id for model in client.models.list()] == ["tiny", "teller"]
    assert client.models.retrieve("teller").id == "teller"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4o")


@pytest.mark.parametrize(
    ("path", "body", "hint"),
    [
        (PATH, {"n_predict": 5}, "'max_tokens'"),
        (PATH, {"prompt": "Once"}, "/v1/completions"),
        (PATH, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "no images"),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "no images"),
        ("/api/chat", {"temperature": 0.5}, "'options'"),
        ("/api/chat", {"messages": [{"role": "user", "content": "a", "images": ["aGk="]}]}, "no images"),
        ("/chat/completions", {}, "/v1/chat/completions"),
        ("/v1/v1/messages", {}, "/v1/messages"),
        ("/completion", {}, "/v1/completions"),
    ],
)
def test_what_belongs_elsewhere_is_told_where(server: Running, path: str, body: Json, hint: str) -> None:
    needed: Json = {} if path == "/v1/responses" else {"messages": OWL}
    refused = server.post(path, {**needed, **body})
    error = refused.json()["error"]
    assert refused.status_code in (400, 404) and hint in (error if isinstance(error, str) else error["message"])


def test_the_list_of_models_may_be_asked_for_with_a_slash(server: Running) -> None:
    assert server.get("/v1/models/").json()["object"] == "list"
    assert server.get("/v1/models/%0A").status_code == 404


def test_an_answer_that_was_begun_goes_on(server: Running, speaks: Says) -> None:
    turns = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    speaks(turns + "{% if add_generation_prompt %}<a>{% endif %}")
    begun = [*OWL, {"role": "assistant", "content": "Once upon a"}]
    asked = {"model": "tiny", "messages": begun, "max_tokens": 8, "temperature": 0}
    said = server.post(PATH, {**asked, "continue_final_message": True, "add_generation_prompt": False}).json()
    text = f"<user>{OWL[0]['content']}\n<a>Once upon a"
    raw = server.post("/v1/completions", {"model": "tiny", "prompt": text, "max_tokens": 8, "temperature": 0}).json()
    assert said["choices"][0]["message"]["content"] == raw["choices"][0]["text"]
    assert server.post(PATH, {**asked, "continue_final_message": True}).json()["choices"] == said["choices"]


def test_a_prompt_may_end_with_its_last_message(server: Running, speaks: Says) -> None:
    speaks("{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %} Once{% endif %}")
    greedy = {"model": "tiny", "max_tokens": 8, "temperature": 0}
    for wanted, text in ((False, OWL[0]["content"]), (True, OWL[0]["content"] + " Once")):
        said = server.post(PATH, {**greedy, "messages": OWL, "add_generation_prompt": wanted}).json()
        raw = server.post("/v1/completions", {**greedy, "prompt": text}).json()
        assert said["choices"][0]["message"]["content"] == raw["choices"][0]["text"]
        assert said["usage"]["prompt_tokens"] == raw["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("messages", "fields"),
    [
        ([*OWL, {"role": "assistant", "content": "Once"}], {"add_generation_prompt": True}),
        (OWL, {}),
        ([{"role": "assistant", "content": "Once"}], {}),
        ([*OWL, {"role": "assistant", "content": "Once", "reasoning": "hm"}], {}),
    ],
)
def test_an_answer_that_cannot_be_gone_on_with_is_refused(server: Running, messages: Any, fields: Any) -> None:
    error = server.error(PATH, {"messages": messages, "continue_final_message": True, **fields})
    assert error["param"] == "continue_final_message"


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "thinking"])
def test_what_was_thought_goes_back_by_each_of_its_names(server: Running, speaks: Says, name: str) -> None:
    speaks("{% for m in messages %}{{ m.content }}[{{ m.reasoning_content }}]{% endfor %}")
    messages = [*OWL, {"role": "assistant", "content": "Once.", name: "hm"}, *OWL]
    assert "Once.[hm]" in server.post("/apply-template", {"messages": messages}).json()["prompt"]


@pytest.mark.parametrize("path", [PATH, "/v1/completions"])
def test_every_chunk_has_the_usage_so_far(server: Running, path: str) -> None:
    prompt = {"messages": OWL} if path == PATH else {"prompt": ["Once", "An owl"]}
    body = {"model": "tiny", **prompt, "max_tokens": 5, "temperature": 0, "stream": True}
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = server.events(path, {**body, "stream_options": options})
    counts: dict[int, list[int]] = {}
    for chunk in chunks:
        usage = chunk["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        counts.setdefault(chunk["choices"][0]["index"], []).append(usage["completion_tokens"])
    assert all(each == sorted(each) and each[-1] == 5 for each in counts.values())
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 5 * len(counts)
    without = server.events(path, {**body, "stream_options": {"continuous_usage_stats": True}})
    assert all(chunk["usage"] for chunk in without) and without[-1]["choices"]
