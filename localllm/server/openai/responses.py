"""POST /v1/responses, without state: what was said before comes with the request."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, Tag
from starlette.responses import Response as HTTPResponse
from typing_extensions import TypedDict

from localllm.server.asking import Ask, prompt_ids
from localllm.server.bodies import Body, Ignored, OnlyFalse, told_apart
from localllm.server.endpoint import Call, Endpoint
from localllm.server.failures import Failure
from localllm.server.fields import (
    CACHES_ITSELF,
    MAX_MESSAGES,
    NOT_KEPT,
    OF_A_REPLY,
    CallText,
    Count,
    KeepAlive,
    Label,
    Nothing,
    Number,
    Objects,
    Penalty,
    Seed,
    Share,
    Temperature,
    TopK,
    overlaid,
)
from localllm.server.openai.messages import refuse_other_parts
from localllm.server.openai.response_object import Response, ResponseEvent, Said, Speech
from localllm.server.openai.shapes import NOT_OBFUSCATED, TIERS, PromptCacheOptions
from localllm.server.openai.tools import (
    BY_FORMAT,
    BY_TYPE,
    Function,
    FunctionType,
    Name,
    NamedSchema,
    ObjectFormat,
    TextFormat,
    schema_form,
)
from localllm.server.replying import EVENT_STREAM, Json, collected, event, evicted_header, streamed, whole
from localllm.server.structured import StructuredOutputs, grammar_of, one_grammar
from localllm.server.tools.calling import MAX_TOOLS, OpenCalls, Toolset, call_of, toolset
from localllm.server.tools.foreign import ForeignTool
from localllm.text.chat_template import ChatInput
from localllm.text.grammar.grammar import Grammar

_STATELESS = "nothing is kept of a response; send what was said before as input"


class InputText(Body):
    type: Annotated[Literal["input_text", "output_text"], BeforeValidator(refuse_other_parts)]
    text: str
    annotations: Annotated[Objects | None, OF_A_REPLY] = None
    logprobs: Annotated[Objects | None, OF_A_REPLY] = None


class InputMessage(Body):
    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText]
    id: Annotated[Label | None, OF_A_REPLY] = None
    status: Annotated[Label | None, OF_A_REPLY] = None
    phase: Annotated[Label | None, OF_A_REPLY] = None


class ReasoningText(Body):
    type: Literal["reasoning_text"]
    text: str


class SummaryText(Body):
    type: Literal["summary_text"]
    text: str


class InputReasoning(Body):
    """What was thought; of one that has no content, what its summary says."""

    type: Literal["reasoning"]
    content: list[ReasoningText] | None = None
    summary: list[SummaryText] | None = None
    id: Annotated[Label | None, OF_A_REPLY] = None
    status: Annotated[Label | None, OF_A_REPLY] = None
    encrypted_content: Annotated[str | None, Ignored("its author alone can read it")] = None

    @property
    def thought(self) -> str:
        parts: Sequence[ReasoningText | SummaryText] = self.content or self.summary or ()
        return "".join(part.text for part in parts)


class InputCall(Body):
    type: Literal["function_call"]
    call_id: Annotated[str, Field(min_length=1)]
    name: Annotated[str, Field(min_length=1)]
    arguments: CallText = None
    parsed_arguments: Annotated[dict[str, Any] | None, OF_A_REPLY] = None
    id: Annotated[Label | None, OF_A_REPLY] = None
    status: Annotated[Label | None, OF_A_REPLY] = None
    # Which openai's library writes out of a call that it was given.
    async_: None = None
    caller: None = None
    namespace: None = None


class InputResult(Body):
    type: Literal["function_call_output"]
    call_id: Annotated[str, Field(min_length=1)]
    output: str | list[InputText]
    id: Annotated[Label | None, OF_A_REPLY] = None
    status: Annotated[Label | None, OF_A_REPLY] = None


class _Typed(Body):
    type: FunctionType


class FunctionTool(Function, _Typed):
    """The type is looked at first: of another one, nothing else matters."""

    defer_loading: Annotated[bool | None, Ignored("the model is told of every function at once")] = None
    output_schema: Annotated[dict[str, Any] | None, Ignored("a result is told as it comes")] = None


AnyTool = Annotated[Annotated[FunctionTool, Tag("FunctionTool")] | Annotated[ForeignTool, Tag("ForeignTool")], BY_TYPE]


class NamedChoice(Body):
    type: FunctionType
    name: str


class AllowedChoice(Body):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedChoice], Field(min_length=1, max_length=MAX_TOOLS)]


class SchemaFormat(NamedSchema):
    type: Literal["json_schema"]
    name: Name


class TextOptions(Body):
    format: (
        Annotated[
            Annotated[TextFormat, Tag("TextFormat")]
            | Annotated[ObjectFormat, Tag("ObjectFormat")]
            | Annotated[SchemaFormat, Tag("SchemaFormat")],
            BY_FORMAT,
        ]
        | None
    ) = None
    verbosity: Literal["medium"] | None = None


Summary = Literal["auto", "concise", "detailed", "none"]
NO_SUMMARY = Ignored("what was thought is told as it is, not in a summary")


class Reasoning(Body):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Annotated[Summary | None, NO_SUMMARY] = None
    generate_summary: Annotated[Summary | None, NO_SUMMARY] = None
    context: Annotated[Literal["auto"] | None, Field(description="'auto': as the model's chat template has it.")] = None


class ResponseStreamOptions(Body):
    include_obfuscation: Annotated[bool | None, NOT_OBFUSCATED] = None
    reasoning_summary_delivery: Annotated[Label | None, NO_SUMMARY] = None


_ITEMS = {
    "message": "InputMessage",
    "reasoning": "InputReasoning",
    "function_call": "InputCall",
    "function_call_output": "InputResult",
}
_OTHER_ITEMS = "its type is 'message', 'reasoning', 'function_call' or 'function_call_output'"

InputItem = Annotated[
    Annotated[InputMessage, Tag("InputMessage")]
    | Annotated[InputReasoning, Tag("InputReasoning")]
    | Annotated[InputCall, Tag("InputCall")]
    | Annotated[InputResult, Tag("InputResult")],
    told_apart("type", _ITEMS, _OTHER_ITEMS, default="message"),
]


_LOGPROBS = "message.output_text.logprobs"
Included = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "web_search_call.action.sources",
    "web_search_call.results",
    "message.input_image.image_url",
]
_NO_SUCH_CALLS = "no such calls are made here"
_NOT_INCLUDED = {
    "reasoning.encrypted_content": "what was thought is told as it is",
    "code_interpreter_call.outputs": _NO_SUCH_CALLS,
    "computer_call_output.output.image_url": _NO_SUCH_CALLS,
    "file_search_call.results": _NO_SUCH_CALLS,
    "web_search_call.action.sources": _NO_SUCH_CALLS,
    "web_search_call.results": _NO_SUCH_CALLS,
    "message.input_image.image_url": "there are no images in what is read here",
}


class PromptBody(Body):
    """What a prompt is made of, and what comes with it where its tokens are counted."""

    why: ClassVar = {
        "text.verbosity": "how much is said cannot be turned up or down; 'medium' is as the model does",
        "personality": "there are no styles of a provider's here",
        **dict.fromkeys(("previous_response_id", "conversation"), _STATELESS),
    }

    model: str | None = None
    input: str | Annotated[list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    tools: Annotated[list[AnyTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | AllowedChoice | None = None
    parallel_tool_calls: Annotated[bool | None, Field(description="false: an answer has one call at most.")] = None
    keep_alive: KeepAlive = None
    previous_response_id: None = None
    conversation: None = None
    personality: None = None


class CountBody(PromptBody):
    """Of tokens."""

    text: Annotated[TextOptions | None, Ignored("the model is not told of the form")] = None
    truncation: Annotated[Literal["auto", "disabled"] | None, Ignored("all of the prompt is counted")] = None
    parallel_tool_calls: Annotated[bool | None, Ignored("the model is not told of it")] = None


class ResponsesBody(PromptBody):
    ignored_values: ClassVar = {"include": _NOT_INCLUDED}
    why: ClassVar = {
        **PromptBody.why,
        "moderation": "nothing is judged here",
        "image": "models here write text",
        "background_options": _STATELESS,
        **dict.fromkeys(("background", "prompt"), _STATELESS),
    }

    max_output_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: TopK | None = None
    min_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Seed | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    include: Annotated[list[Included], Field(max_length=16)] | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None
    structured_outputs: Annotated[StructuredOutputs | None, Field(description="What the answer has to look like.")] = (
        None
    )
    max_tool_calls: Annotated[Number | None, Ignored("it is of tools that a server runs")] = None
    background: OnlyFalse | None = None
    store: Annotated[bool | None, NOT_KEPT] = None
    client_metadata: Annotated[dict[str, Any] | None, NOT_KEPT] = None
    metadata: Annotated[dict[str, str] | None, Field(max_length=16, description="Given back.")] = None
    user: Annotated[Label | None, NOT_KEPT] = None
    safety_identifier: Annotated[Label | None, NOT_KEPT] = None
    prompt_cache_key: Annotated[Label | None, CACHES_ITSELF] = None
    prompt_cache_retention: Annotated[Label | None, CACHES_ITSELF] = None
    prompt_cache_options: Annotated[PromptCacheOptions | None, CACHES_ITSELF] = None
    prompt: None = None
    moderation: None = None
    image: None = None
    access_programs: Annotated[Any, Ignored("there are no programs of a provider here")] = None
    background_options: None = None
    context_management: Nothing = None


class InputTokens(TypedDict):
    object: Literal["response.input_tokens"]
    input_tokens: int


async def responses(call: Call, body: ResponsesBody) -> HTTPResponse:
    """Raises what refuses the request, or ends its answer before anything was said."""
    served = await call.model(body.model, body.keep_alive)
    model = body.model or served.name
    most = body.top_logprobs if body.top_logprobs is not None else (0 if _LOGPROBS in (body.include or ()) else None)
    names = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "seed")
    given = {name: getattr(body, name) for name in names}
    sampling = overlaid(served.sampling(), {**given, "max_tokens": body.max_output_tokens, "logprobs": most})
    tokenizer = served.engine().tokenizer
    grammar, grammar_field = one_grammar(
        **{"text.format": _form(body), "structured_outputs": grammar_of(body.structured_outputs)}
    )
    truncation = body.truncation or ("auto" if served.evicts else "disabled")
    asked = replace(_ask(body), sampling=sampling, evicts=truncation == "auto", grammar=grammar)
    priority = TIERS.get(body.service_tier or "", 0)
    answers = await served.ask(replace(asked, priority=priority, grammar_field=grammar_field))
    head = {**_head(body, model, sampling.temperature, sampling.top_p), "truncation": truncation}
    said = Said(head, tokenizer, most)
    if not body.stream:
        (piece,) = await collected(answers)
        said.take(piece)
        return await whole(said.response, evicted_header(answers))
    speech = Speech(said)

    def failed(failure: Failure) -> bytes:
        told = {"code": failure.name, "message": failure.message, "param": failure.param}
        return event({"type": "error", "sequence_number": speech.next_number(), **told}, "error")

    return await streamed(answers, speech.events, failed, EVENT_STREAM)


async def input_tokens(call: Call, body: CountBody) -> Json:
    """Of any prompt, also one that is too long. Raises what refuses it."""
    served = await call.model(body.model, body.keep_alive)
    engine, ask = served.engine(), _ask(body)
    count = len(await served.off_loop(lambda: prompt_ids(ask, engine)))
    reply: InputTokens = {"object": "response.input_tokens", "input_tokens": count}
    return Json(reply)


def _ask(body: PromptBody) -> Ask:
    """The prompt. Raises RequestError."""
    effort = None if body.reasoning is None else body.reasoning.effort
    chat, tools = ChatInput(_messages(body)), _tools(body)
    return Ask(chat, effort=effort, tools=tools, prompt_field="input", effort_field="reasoning.effort")


def _tools(body: PromptBody) -> Toolset | None:
    """None where the model is to call nothing. Raises RequestError."""
    known = [each.tool for each in _functions(body)]
    one_call = body.parallel_tool_calls is False
    match body.tool_choice:
        case "none":
            toolset(known)
            return None
        case NamedChoice(name=name):
            return toolset(known, must_call=True, only=[name], one_call=True)
        case AllowedChoice(mode=mode, tools=tools):
            only = [each.name for each in tools]
            return toolset(known, must_call=mode == "required", only=only, one_call=one_call)
    return toolset(known, must_call=body.tool_choice == "required", one_call=one_call)


def _functions(body: PromptBody) -> list[FunctionTool]:
    return [each for each in body.tools or () if isinstance(each, FunctionTool)]


def _form(body: PromptBody) -> Grammar | None:
    match body.text and body.text.format:
        case SchemaFormat(schema_=schema) | ObjectFormat(schema_=schema):
            return schema_form(schema)
    return None


def _messages(body: PromptBody) -> list[dict[str, Any]]:
    """As a chat template wants them; what was thought goes with what is behind it. Raises RequestError for the result
    of a call that never was, and for a call that has none."""
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    thought, calls = "", OpenCalls()
    for index, item in enumerate(body.input):
        where = f"input[{index}]"
        match item:
            case InputReasoning():
                thought = item.thought
                continue
            case InputCall():
                calls.made(where, item.call_id, item.name)
                _add_call(messages, call_of(item.call_id, item.name, item.arguments), thought)
            case InputResult():
                name = calls.answered(where, item.call_id)
                result = {"role": "tool", "content": _text(item.output)}
                messages.append({**result, "tool_call_id": item.call_id, "name": name})
            case _:
                calls.settled(where)
                message = {"role": item.role, "content": _text(item.content)}
                if thought and item.role == "assistant":
                    message["reasoning_content"] = thought
                messages.append(message)
        thought = ""
    calls.settled("input")
    return messages


def _add_call(messages: list[dict[str, Any]], call: dict[str, Any], thought: str) -> None:
    """To the turn that it belongs to: what was said in front of it, or the call before."""
    last = messages[-1] if messages else {}
    if last.get("role") == "assistant":
        messages[-1] = {**last, "tool_calls": [*last.get("tool_calls", ()), call]}
        return
    reasoning = {"reasoning_content": thought} if thought else {}
    messages.append({"role": "assistant", "content": "", **reasoning, "tool_calls": [call]})


def _text(content: str | Sequence[InputText]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _head(body: ResponsesBody, model: str, temperature: float, top_p: float) -> Mapping[str, Any]:
    """What of the request is said again in the response."""
    return {
        "created_at": int(time.time()),
        "model": model,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": dict(body.metadata or {}),
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
        "service_tier": "default" if body.service_tier in (None, "auto") else body.service_tier,
        "store": False,
        "temperature": temperature,
        "text": {"format": _dumped(body.text and body.text.format) or {"type": "text"}},
        "tool_choice": _dumped(body.tool_choice) or "auto",
        "tools": [_tool(each) for each in _functions(body)],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": top_p,
    }


def _dumped(given: Body | str | None) -> Any:
    """As it was given."""
    return given.model_dump(by_alias=True, exclude_none=True) if isinstance(given, Body) else given


def _tool(tool: FunctionTool) -> dict[str, Any]:
    return {**_dumped(tool), "parameters": tool.parameters, "strict": bool(tool.strict)}


ENDPOINTS = (
    Endpoint(
        "POST",
        "/v1/responses",
        responses,
        "Answer, in items",
        ResponsesBody,
        Response,
        (EVENT_STREAM, ResponseEvent),
    ),
    Endpoint("POST", "/v1/responses/input_tokens", input_tokens, "Count a prompt's tokens", CountBody, InputTokens),
)
