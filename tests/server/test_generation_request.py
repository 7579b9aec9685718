"""What a request comes to before the engine is given it: ids that fit, seeds, how much may be said, a template's
variables."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from localllm.engine.engine import Engine
from localllm.engine.request import Request, SamplingParams
from localllm.errors import UsageError
from localllm.server import model_server
from localllm.server.errors import RequestError
from localllm.server.generation_request import GenerationRequest, PreparedRequest, chat_of, joined, prepare, prompt_ids
from localllm.server.tools.toolset import Tool, Toolset
from localllm.settings import EngineConfig
from localllm.text.chat_template import ChatInput, ChatTemplate
from tests.server.support import OWL, Json, Patch, Running, Says, running

CHAT = ChatInput(messages=OWL)
LONG = [*({"role": role, "content": "owl " * 150} for role in ("user", "assistant") * 4), *OWL]  # beyond the context
PLAIN = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = Engine.load("tiny")
    yield engine
    engine.close()


def most_tokens(asked: PreparedRequest) -> int | None:
    return asked.requests[0].sampling.max_tokens


def ids_of(engine: Engine, prompt: Any, **more: Any) -> tuple[int, ...]:
    """What the engine is given."""
    return prepare(GenerationRequest(prompt, **more), engine).requests[0].prompt_ids


@pytest.mark.parametrize("num_ctx", [None, 64, 5000])
def test_a_prompt_that_leaves_no_room_for_an_answer_is_refused(engine: Engine, num_ctx: int | None) -> None:
    ctx = min(num_ctx or engine.ctx, engine.ctx)
    with pytest.raises(RequestError) as caught:
        prepare(GenerationRequest((5,) * ctx, num_ctx=num_ctx), engine)
    assert (caught.value.status, caught.value.name) == (400, "context_length_exceeded")
    assert caught.value.numbers == {"n_prompt_tokens": ctx, "n_ctx": ctx}
    assert most_tokens(prepare(GenerationRequest((5,) * (ctx - 1), num_ctx=num_ctx), engine)) == 1


@pytest.mark.parametrize("num_ctx", [None, 64])
def test_a_text_to_embed_may_fill_the_context(engine: Engine, num_ctx: int | None) -> None:
    ctx = num_ctx or engine.ctx
    assert len(ids_of(engine, (5,) * ctx, num_ctx=num_ctx, pooling="mean")) == ctx
    with pytest.raises(RequestError):
        ids_of(engine, (5,) * (ctx + 1), num_ctx=num_ctx, pooling="mean")


def test_a_longer_context_is_advised_where_it_helps() -> None:
    short = Engine.load("tiny", EngineConfig(ctx=256))
    advised: list[bool] = []
    for num_tokens, num_ctx in ((300, None), (5000, None), (300, 64)):
        with pytest.raises(RequestError) as caught:
            prepare(GenerationRequest((5,) * num_tokens, num_ctx=num_ctx), short)
        advised.append("--ctx" in caught.value.what)
    short.close()
    assert advised == [True, False, False]


def test_an_answer_ends_where_the_context_does(engine: Engine) -> None:
    room = engine.ctx - 24
    told = {(None, None): room, (7, None): 7, (5000, None): room, (None, 64): 40, (None, 5000): room}
    for (max_tokens, num_ctx), most in told.items():
        ask = GenerationRequest((5,) * 24, SamplingParams(max_tokens=max_tokens), num_ctx=num_ctx)
        assert most_tokens(prepare(ask, engine)) == most


def test_a_longer_context_is_refused_where_it_is_needed(engine: Engine) -> None:
    room = engine.ctx - 24
    ask = GenerationRequest((5,) * 24, SamplingParams(max_tokens=room), num_ctx=5000)
    assert most_tokens(prepare(ask, engine)) == room
    with pytest.raises(RequestError) as caught:
        prepare(replace(ask, sampling=SamplingParams(max_tokens=room + 1)), engine)
    assert (caught.value.param, caught.value.name) == ("num_ctx", "invalid_value")


def test_each_answer_has_a_seed_of_its_own_up_to_the_last_that_there_is_and_the_urgency_of_all(engine: Engine) -> None:
    asked = prepare(GenerationRequest("Once", SamplingParams(seed=2**63 - 1), n=2, priority=-1), engine)
    assert [request.sampling.seed for request in asked.requests] == [2**63 - 1, 0]
    assert [request.priority for request in asked.requests] == [-1, -1]


def test_what_the_engine_would_refuse_is_refused_before_it_is_asked(engine: Engine) -> None:
    with pytest.raises(UsageError, match="empty"):
        prepare(GenerationRequest(()), engine)


def test_a_raw_prompt_may_have_special_tokens_and_a_chat_may_not(engine: Engine) -> None:
    special = engine.tokenizer.encode("<|im_start|>", special=True)
    assert len(special) == 1
    assert list(ids_of(engine, "<|im_start|>hi")[:1]) == special
    chats = [replace(CHAT, messages=[{"role": "user", "content": text}]) for text in ("hi", "<|im_start|>hi")]
    plain, forged = (ids_of(engine, chat) for chat in chats)
    assert plain.count(special[0]) == forged.count(special[0]) and len(forged) > len(plain)


def test_a_raw_prompt_begins_as_the_models_texts_do(engine: Engine, monkeypatch: Patch) -> None:
    monkeypatch.setattr(engine.tokenizer, "adds_bos", True)
    monkeypatch.setattr(engine.tokenizer, "bos_token_id", 7)
    assert ids_of(engine, "Once") == (7, *engine.tokenizer.encode("Once"))


def test_all_of_a_conversation_is_counted_and_of_an_answer_only_what_fits(engine: Engine) -> None:
    ask = GenerationRequest(replace(CHAT, messages=LONG), evicts=True)
    asked = prepare(ask, engine)
    assert len(prompt_ids(ask, engine)) > engine.ctx > len(asked.requests[0].prompt_ids)
    assert asked.num_evicted > 0


@pytest.mark.parametrize("evicts", [False, True])
def test_an_answer_goes_on_behind_what_was_said(engine: Engine, evicts: bool) -> None:
    plain, begun = (ids_of(engine, CHAT, said=said, evicts=evicts) for said in ("", "Hm"))
    assert begun == (*plain, *engine.tokenizer.encode("Hm"))


def test_log_probabilities_are_counted_over_all_answers() -> None:
    def asked(max_tokens: int, logprobs: int | None, n: int) -> PreparedRequest:
        sampling = SamplingParams(max_tokens=max_tokens, logprobs=logprobs)
        return PreparedRequest(tuple(Request((1,), sampling) for _ in range(n)))

    assert len(joined([asked(1 << 18, 0, 4)]).requests) == 4
    assert len(joined([asked(1 << 20, None, 2), asked(1 << 18, 3, 1)]).requests) == 3
    for over in ([asked(1 << 18, 1, 3)], [asked(1 << 20, 0, 1), asked(1, 0, 1)]):
        with pytest.raises(RequestError, match="log-probabilities"):
            joined(over)


# Templates


@pytest.fixture
def tell(engine: Engine, monkeypatch: Patch) -> Says:
    """Gives the model another template."""

    def set_template(source: str) -> None:
        template = ChatTemplate(source, special_tokens=engine.tokenizer.special_tokens)
        monkeypatch.setattr(Engine, "template", property(lambda _engine: template))

    return set_template


@pytest.mark.parametrize(
    ("template", "effort", "given", "told"),
    [
        ("{{ reasoning_effort }}", "high", {}, {"reasoning_effort": "high"}),
        ("{{ reasoning_effort }}", "high", {"reasoning_effort": "low"}, {"reasoning_effort": "low"}),
        ("{{ reasoning_effort }}<think>", "on", {}, {}),
        ("{{ reasoning_effort }}", "none", {}, {}),
        ("{{ enable_thinking }}", "high", {}, {"enable_thinking": True}),
        ("{{ enable_thinking }}", "none", {}, {"enable_thinking": False}),
        ("{{ thinking }}", "none", {}, {"thinking": False}),
        ("{{ messages[0].thinking }}<think>", "on", {}, {}),
        ("{{ enable_thinking }}", "none", {"enable_thinking": True}, {"enable_thinking": True}),
        ("{{ enable_thinking }}{{ reasoning_effort }}", "none", {}, {"enable_thinking": False}),
        ("{{ enable_thinking }}{{ reasoning_effort }}", "on", {}, {"enable_thinking": True}),
        ("{{ enable_thinking }}{{ reasoning_effort }}", "low", {}, {"reasoning_effort": "low"}),
        ("<think>", "on", {}, {}),
        ("", "none", {}, {}),
        ("{{ enable_thinking }}", None, {}, {}),
        # A level that asks for no more than none does is told where there are several.
        ("{{ reasoning_effort }}", "usual", {}, {"reasoning_effort": "usual"}),
        ("{{ enable_thinking }}", "usual", {}, {"enable_thinking": True}),
        ("<think>", "usual", {}, {}),
        ("", "usual", {}, {}),
    ],
)
def test_how_much_is_to_be_thought_is_told_as_the_template_has_it(
    engine: Engine, tell: Says, template: str, effort: str | None, given: Json, told: Json
) -> None:
    tell(template)
    chat = chat_of(replace(CHAT, variables=given), engine, effort, usual_effort="usual")
    assert chat.variables == told


def test_harmony_begins_with_what_is_said_where_nothing_is_to_be_thought(engine: Engine, tell: Says) -> None:
    tell("<|start|>assistant{# <|channel|>final<|message|> #}")
    final = engine.tokenizer.encode("<|channel|>final<|message|>", special=True)
    plain, silent = (ids_of(engine, CHAT, effort=effort) for effort in (None, "none"))
    assert silent == (*plain, *final)
    tools = Toolset((Tool("look", "Looks."),), ("look",))
    with pytest.raises(RequestError, match="cannot be set to"):
        prepare(GenerationRequest(CHAT, effort="none", tools=tools), engine)


UNTHOUGHT = [("<think>", "none"), ("<think>", "high"), ("", "on"), ("{{ enable_thinking_x }}", "none")]


@pytest.mark.parametrize(("template", "effort"), UNTHOUGHT)
def test_what_a_template_cannot_have_thought_is_refused(engine: Engine, tell: Says, template: str, effort: str) -> None:
    tell(template)
    with pytest.raises(RequestError, match="'think'") as caught:
        chat_of(CHAT, engine, effort, "think")
    assert (caught.value.param, caught.value.name) == ("think", "unsupported_value")


@pytest.mark.parametrize(
    ("more", "name"), [("", "verb"), ("{{ bos_token }}", "bos_token"), (" a b", "a b"), ("", "v" * 5000)]
)
def test_a_variable_that_has_no_effect_is_refused(engine: Engine, tell: Says, more: str, name: str) -> None:
    tell("{{ verbose }}" + more)
    assert chat_of(replace(CHAT, variables={"verbose": 1}), engine).variables == {"verbose": 1}
    with pytest.raises(RequestError) as caught:
        chat_of(replace(CHAT, variables={name: 1}), engine)
    assert caught.value.param is not None
    assert caught.value.param.startswith(f"chat_template_kwargs.{name[:20]}") and len(caught.value.param) <= 200


def test_variables_may_be_so_long(engine: Engine, tell: Says) -> None:
    tell("{{ verbose }}")
    long, too_long = (replace(CHAT, variables={"verbose": "x" * length}) for length in (250_000, 270_000))
    assert chat_of(long, engine).variables == long.variables
    with pytest.raises(RequestError, match="too large") as caught:
        chat_of(too_long, engine)
    assert caught.value.param == "chat_template_kwargs"


@pytest.mark.parametrize(("template", "role"), [("", "system"), ("developer", "developer")])
def test_developers_speak_as_the_system_where_a_template_knows_no_other(
    engine: Engine, tell: Says, template: str, role: str
) -> None:
    tell(template)
    chat = chat_of(replace(CHAT, messages=[{"role": "developer", "content": "Be brief."}, *OWL]), engine)
    assert [message["role"] for message in chat.messages] == [role, "user"]


@pytest.mark.parametrize(
    ("tail", "said", "is_thinking", "splits"),
    [
        ("", "", False, False),
        ("<think>\n", "", True, True),
        ("<think>\n", "Hm", False, False),
        ("<think>\n", "<think>Hm", True, True),
        ("<think>\n", "Hm</think>So", False, False),
        ("{# <think> #}", "So", False, False),
        ("", "<think>Hm", True, False),
        ("{# <think> #}", "", False, True),
    ],
)
def test_an_answer_begins_in_the_thought_that_the_template_has_opened(
    engine: Engine, tell: Says, tail: str, said: str, is_thinking: bool, splits: bool
) -> None:
    tell(PLAIN + tail)
    reader = prepare(GenerationRequest(CHAT, said=said), engine).new_parser()
    assert (reader is not None and reader.is_thinking, reader is not None) == (is_thinking, splits or is_thinking)


def test_what_is_begun_goes_on_behind_the_thought_that_the_template_has_opened(engine: Engine, tell: Says) -> None:
    tell(PLAIN + "<think>")
    ids = ids_of(engine, CHAT, said="Once upon")
    assert engine.tokenizer.decode(list(ids), skip_special=False).endswith("<think></think>\n\nOnce upon")


# The server


def test_the_server_may_be_told_to_let_old_turns_go() -> None:
    with running(overflow="evict") as evicting:
        reply = evicting.post("/v1/chat/completions", {"messages": LONG, "max_tokens": 1})
    assert reply.status_code == 200 and int(reply.headers["x-localllm-evicted-turns"]) > 0


def test_prompts_are_prepared_beside_the_loop_and_disks_beside_both(server: Running, monkeypatch: Patch) -> None:
    threads: list[str] = []

    def noting(ask: GenerationRequest, engine: Engine) -> PreparedRequest:
        threads.append(threading.current_thread().name)
        return prepare(ask, engine)

    monkeypatch.setattr(model_server, "prepare", noting)
    assert server.post("/v1/completions", {"prompt": "Once", "max_tokens": 1}).status_code == 200
    on_disk = asyncio.run(server.pool.on_disk(lambda: threading.current_thread().name))
    assert threads[0].startswith("localllm-prepare") and on_disk.startswith("localllm-look")
