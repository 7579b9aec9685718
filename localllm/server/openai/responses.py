"""POST /v1/responses, without state: what was said before comes with the request."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BeforeValidator, Field, Tag
from starlette.responses import Response

from localllm.server import fields
from localllm.server.bodies import Body, Ignored, OnlyFalse, ReplyBody, tagged_by_type
from localllm.server.compression import CompressBody, compressed
from localllm.server.endpoint import ApiCall, Endpoint
from localllm.server.fields import optional
from localllm.server.generation_request import GenerationRequest, prompt_ids, under_preset
from localllm.server.openai import prompt
from localllm.server.openai.common import NOT_OBFUSCATED, OpenAISamplingBody, sampling_of
from localllm.server.openai.response_object import ResponseEvent, ResponseObject, ResponseWriter
from localllm.server.replies import JsonReply, replied
from localllm.server.tools.toolset import MAX_TOOLS, ForeignTool, OpenCalls, Toolset, call_of
from localllm.text.chat_template import ChatInput

_STATELESS = "the server keeps no responses; send earlier turns as input"


class InputText(Body):
    type: Annotated[Literal["input_text", "output_text"], BeforeValidator(prompt.refuse_other_parts)]
    text: str
    annotations: Annotated[fields.Objects | None, fields.OF_A_REPLY] = None
    logprobs: Annotated[fields.Objects | None, fields.OF_A_REPLY] = None


class InputMessage(Body):
    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText]
    id: Annotated[fields.Label | None, fields.OF_A_REPLY] = None
    status: Annotated[fields.Label | None, fields.OF_A_REPLY] = None
    phase: Annotated[fields.Label | None, fields.OF_A_REPLY] = None


class InputReasoningText(Body):
    type: Literal["reasoning_text"]
    text: str


class SummaryText(Body):
    type: Literal["summary_text"]
    text: str


class InputReasoning(Body):
    """Earlier thinking; without content, its summary counts."""

    type: Literal["reasoning"]
    content: list[InputReasoningText] | None = None
    summary: list[SummaryText] | None = None
    id: Annotated[fields.Label | None, fields.OF_A_REPLY] = None
    status: Annotated[fields.Label | None, fields.OF_A_REPLY] = None
    encrypted_content: Annotated[str | None, Ignored("only its author can read it")] = None

    @property
    def thought(self) -> str:
        parts: Sequence[InputReasoningText | SummaryText] = self.content or self.summary or ()
        return "".join(part.text for part in parts)


class InputCall(Body):
    type: Literal["function_call"]
    call_id: Annotated[str, Field(min_length=1)]
    name: Annotated[str, Field(min_length=1)]
    arguments: fields.CallText = None
    parsed_arguments: Annotated[dict[str, Any] | None, fields.OF_A_REPLY] = None
    id: Annotated[fields.Label | None, fields.OF_A_REPLY] = None
    status: Annotated[fields.Label | None, fields.OF_A_REPLY] = None
    # openai's library writes these out of a call that it was given.
    async_: None = None
    caller: None = None
    namespace: None = None


class InputResult(Body):
    type: Literal["function_call_output"]
    call_id: Annotated[str, Field(min_length=1)]
    output: str | list[InputText]
    id: Annotated[fields.Label | None, fields.OF_A_REPLY] = None
    status: Annotated[fields.Label | None, fields.OF_A_REPLY] = None


class _Typed(Body):
    type: prompt.FunctionType


class ResponsesFunctionTool(prompt.OpenAIFunction, _Typed):
    """The type is checked first: the other fields matter only for a function."""

    defer_loading: Annotated[bool | None, Ignored("the prompt always has every function")] = None
    output_schema: Annotated[dict[str, Any] | None, Ignored("the model gets a result as it is")] = None


AnyTool = Annotated[
    Annotated[ResponsesFunctionTool, Tag("Function")] | Annotated[ForeignTool, Tag("Foreign")],
    prompt.FUNCTION_OR_FOREIGN,
]


class ResponsesNamedChoice(Body):
    type: prompt.FunctionType
    name: str


class ResponsesAllowedChoice(Body):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ResponsesNamedChoice], Field(min_length=1, max_length=MAX_TOOLS)]


class ResponsesSchemaFormat(prompt.NamedSchema):
    type: Literal["json_schema"]
    name: prompt.FunctionName


class TextOptions(Body):
    format: (
        Annotated[
            Annotated[prompt.TextFormat, Tag("Text")]
            | Annotated[prompt.ObjectFormat, Tag("Json_object")]
            | Annotated[ResponsesSchemaFormat, Tag("Json_schema")],
            prompt.BY_FORMAT,
        ]
        | None
    ) = None
    verbosity: Literal["medium"] | None = None


Summary = Literal["auto", "concise", "detailed", "none"]
NO_SUMMARY = Ignored("thinking is returned as it is, not as a summary")


class Reasoning(Body):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Annotated[Summary | None, NO_SUMMARY] = None
    generate_summary: Annotated[Summary | None, NO_SUMMARY] = None
    context: Literal["auto"] | None = optional("'auto': as the model's chat template has it.")


class ResponseStreamOptions(Body):
    include_obfuscation: Annotated[bool | None, NOT_OBFUSCATED] = None
    reasoning_summary_delivery: Annotated[fields.Label | None, NO_SUMMARY] = None


_OTHER_ITEMS = "its type is 'message', 'reasoning', 'function_call' or 'function_call_output'"

InputItem = Annotated[
    Annotated[InputMessage, Tag("Message")]
    | Annotated[InputReasoning, Tag("Reasoning")]
    | Annotated[InputCall, Tag("Function_call")]
    | Annotated[InputResult, Tag("Function_call_output")],
    tagged_by_type(_OTHER_ITEMS, default="message"),
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
_NOT_INCLUDED = {
    **dict.fromkeys(get_args(Included)[1:], "the server makes no such calls"),
    "reasoning.encrypted_content": "thinking is returned as it is",
    "message.input_image.image_url": "the server reads no images",
}


class ResponsesPromptBody(Body):
    """The fields of a prompt, also of one whose tokens are counted."""

    why: ClassVar = {
        "text.verbosity": "the verbosity cannot be changed; 'medium' is the model's default",
        "personality": "the server defines no personalities",
        **dict.fromkeys(("previous_response_id", "conversation"), _STATELESS),
    }

    model: str | None = None
    input: str | Annotated[list[InputItem], Field(min_length=1, max_length=fields.MAX_MESSAGES)]
    instructions: str | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    tools: Annotated[list[AnyTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponsesNamedChoice | ResponsesAllowedChoice | None = None
    parallel_tool_calls: bool | None = optional("false: at most one call in an answer.")
    keep_alive: fields.KeepAlive = None
    previous_response_id: None = None
    conversation: None = None
    personality: None = None


class ResponsesCountBody(ResponsesPromptBody):
    text: Annotated[TextOptions | None, Ignored("the form is not part of the prompt")] = None
    truncation: Annotated[Literal["auto", "disabled"] | None, Ignored("the whole prompt is counted")] = None
    parallel_tool_calls: Annotated[bool | None, Ignored("it is not part of the prompt")] = None


class ResponsesBody(ResponsesPromptBody, OpenAISamplingBody, CompressBody):
    ignored_values: ClassVar = {"include": _NOT_INCLUDED}
    why: ClassVar = {
        **ResponsesPromptBody.why,
        "moderation": "there is no moderation here",
        "image": "models generate only text",
        "background_options": _STATELESS,
        **dict.fromkeys(("background", "prompt"), _STATELESS),
    }

    max_output_tokens: fields.Count | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    include: Annotated[list[Included], Field(max_length=16)] | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    max_tool_calls: Annotated[fields.Number | None, Ignored("it limits tools that a server runs")] = None
    background: OnlyFalse | None = None
    client_metadata: Annotated[dict[str, Any] | None, fields.NOT_KEPT] = None
    metadata: dict[str, str] | None = optional("Given back.", max_length=16)
    prompt: None = None
    moderation: None = None
    image: None = None
    access_programs: Annotated[Any, Ignored("OpenAI's programs do not apply here")] = None
    background_options: None = None
    context_management: fields.Nothing = None


class InputTokens(ReplyBody):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


async def responses(call: ApiCall, body: ResponsesBody) -> Response:
    """Raises what refuses the request, or ends its answer before anything was emitted."""
    request, told = await compressed(call, body, body.model, _request(body))
    asked = await call.asked(body.model, body.keep_alive)
    most = body.top_logprobs if body.top_logprobs is not None else (0 if _LOGPROBS in (body.include or ()) else None)
    sampling = sampling_of(body, asked, max_tokens=body.max_output_tokens, logprobs=most)
    tokenizer = asked.engine().tokenizer
    form = None
    match body.text and body.text.format:
        case ResponsesSchemaFormat(schema_=schema) | prompt.ObjectFormat(schema_=schema):
            form = prompt.schema_form(schema)
    grammar, grammar_field = fields.one_grammar(
        **{"text.format": form, "structured_outputs": fields.grammar_of(body.structured_outputs)}
    )
    truncation = body.truncation or ("auto" if asked.evicts else "disabled")
    more: dict[str, Any] = {"priority": body.priority, "grammar": grammar, "grammar_field": grammar_field}
    more |= {"reuse": body.reuse, "evicts": truncation == "auto"}
    answers = await call.server.ask(asked, replace(request, sampling=sampling, **more))
    head = head_of(body, asked.shown(body.model), truncation, sampling.temperature, sampling.top_p)
    head |= {"compression": told}
    return await replied(answers, ResponseWriter(head, tokenizer, most), is_streamed=body.stream)


async def input_tokens(call: ApiCall, body: ResponsesCountBody) -> JsonReply:
    """Count any prompt, also one that is too long. Raises what refuses it."""
    asked = await call.asked(body.model, body.keep_alive)
    engine, request = asked.engine(), under_preset(_request(body), asked.selection.preset)
    ids = await call.pool.off_loop(lambda: prompt_ids(request, engine))
    return JsonReply(InputTokens(input_tokens=len(ids)))


def _request(body: ResponsesPromptBody) -> GenerationRequest:
    """Return a request with the prompt alone. Raises RequestError."""
    return GenerationRequest(
        ChatInput(_messages(body)),
        effort=None if body.reasoning is None else body.reasoning.effort,
        tools=_tools(body),
        prompt_field="input",
        effort_field="reasoning.effort",
    )


def _tools(body: ResponsesPromptBody) -> Toolset | None:
    """Return the tools that may be called; None for none. Raises RequestError."""
    known = [each.tool for each in body.tools or () if isinstance(each, ResponsesFunctionTool)]
    match body.tool_choice:
        case ResponsesNamedChoice(name=name):
            return prompt.toolset_for(known, [name], parallel=False)
        case ResponsesAllowedChoice(mode=mode, tools=tools):
            return prompt.toolset_for(known, [each.name for each in tools], mode, parallel=body.parallel_tool_calls)
    return prompt.toolset_for(known, None, body.tool_choice, parallel=body.parallel_tool_calls)


def _messages(body: ResponsesPromptBody) -> list[dict[str, Any]]:
    """Return the messages as a chat template wants them; a thought goes with what is behind it. Raises RequestError for
    the result of a call that never was, and for a call without a result."""
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
                if not messages or messages[-1]["role"] != "assistant":
                    reasoning = {"reasoning_content": thought} if thought else {}
                    messages.append({"role": "assistant", "content": "", **reasoning})
                call = call_of(item.call_id, item.name, item.arguments)
                messages[-1]["tool_calls"] = [*messages[-1].get("tool_calls", ()), call]
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


def _text(content: str | Sequence[InputText]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def head_of(body: ResponsesBody, model: str, truncation: str, temperature: float, top_p: float) -> dict[str, Any]:
    """Return the fields of the response that repeat the request."""
    return {
        "created_at": int(time.time()),
        "model": model,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": dict(body.metadata or {}),
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
        "service_tier": "default" if body.service_tier in (None, "auto") else body.service_tier,
        "temperature": temperature,
        "text": {"format": _dumped(body.text and body.text.format) or {"type": "text"}},
        "tool_choice": _dumped(body.tool_choice) or "auto",
        "tools": [
            {**_dumped(tool), "parameters": tool.parameters, "strict": bool(tool.strict)}
            for tool in body.tools or ()
            if isinstance(tool, ResponsesFunctionTool)
        ],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": top_p,
        "truncation": truncation,
    }


def _dumped(given: Body | str | None) -> Any:
    return given.model_dump(by_alias=True, exclude_none=True) if isinstance(given, Body) else given


ENDPOINTS = (
    Endpoint("POST", "/v1/responses", responses, "Create a response", ResponsesBody, ResponseObject, ResponseEvent),
    Endpoint(
        "POST", "/v1/responses/input_tokens", input_tokens, "Count a prompt's tokens", ResponsesCountBody, InputTokens
    ),
)
