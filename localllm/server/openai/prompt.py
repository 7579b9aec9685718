"""Messages, tools and forms of answers, as OpenAI's requests have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StringConstraints, Tag, model_validator

from localllm.server import fields
from localllm.server.bodies import Body, Ignored, tagged_by_type
from localllm.server.tools.toolset import (
    MAX_TOOLS,
    NO_SUCH_TOOL,
    TYPES,
    ForeignTool,
    OpenCalls,
    Tool,
    Toolset,
    call_of,
    toolset,
)
from localllm.text.grammar.grammar import Grammar

NO_SERVER_TOOLS = "this server runs no tools of its own; a function's calls are for the client to make"

FunctionName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


def _is_function(kind: object) -> object:
    if isinstance(kind, str) and kind not in ("function", "custom", "allowed_tools"):
        raise ValueError(NO_SERVER_TOOLS)
    return kind


FunctionType = Annotated[Literal["function"], BeforeValidator(_is_function)]


class OpenAIFunction(Body):
    name: FunctionName
    description: str | None = None
    parameters: fields.ArgumentsSchema | None = None
    strict: bool | None = fields.optional("true: a grammar makes calls fit the schema, also where none is due.")

    @property
    def tool(self) -> Tool:
        return Tool(self.name, self.description or "", self.parameters or {}, bool(self.strict))


class OpenAIFunctionTool(Body):
    type: FunctionType
    function: OpenAIFunction
    cache_control: Annotated[fields.Labels | None, fields.CACHES_ITSELF] = None


FUNCTION_OR_FOREIGN = tagged_by_type(NO_SUCH_TOOL, default="function", foreign=TYPES)

AnyTool = Annotated[
    Annotated[OpenAIFunctionTool, Tag("Function")] | Annotated[ForeignTool, Tag("Foreign")],
    FUNCTION_OR_FOREIGN,
]
Tools = Annotated[list[AnyTool], Field(max_length=MAX_TOOLS)]


class NamedFunction(Body):
    name: str


class OpenAINamedChoice(Body):
    type: FunctionType
    function: NamedFunction


class AllowedTools(Body):
    mode: Literal["auto", "required"]
    tools: Annotated[list[OpenAINamedChoice], Field(min_length=1, max_length=MAX_TOOLS)]


class OpenAIAllowedChoice(Body):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Literal["none", "auto", "required"] | OpenAINamedChoice | OpenAIAllowedChoice


def chosen(tools: Sequence[AnyTool] | None, choice: ToolChoice | None, parallel: bool | None) -> Toolset | None:
    """Return the tools that may be called; None for none. Raises RequestError."""
    known = [each.function.tool for each in tools or () if isinstance(each, OpenAIFunctionTool)]
    match choice:
        case OpenAINamedChoice():
            return toolset_for(known, [choice.function.name], parallel=False)
        case OpenAIAllowedChoice():
            names, mode = [each.function.name for each in choice.allowed_tools.tools], choice.allowed_tools.mode
            return toolset_for(known, names, mode, parallel=parallel)
    return toolset_for(known, None, choice, parallel=parallel)


def toolset_for(
    known: Sequence[Tool], only: Sequence[str] | None, mode: str | None = "required", *, parallel: bool | None
) -> Toolset | None:
    """only: the names of those that may be called; None: any. mode: "required", "none", or what means "auto"."""
    found = toolset(known, must_call=mode == "required", only=only, one_call=parallel is False)
    return None if mode == "none" else found


class TextFormat(Body):
    type: Literal["text"]


Schema = Annotated[dict[str, Any] | None, Field(alias="schema", description="Without one, any object fits.")]


class ObjectFormat(Body):
    type: Literal["json_object"]
    schema_: Schema = None


class NamedSchema(Body):
    name: Annotated[FunctionName | None, Ignored("the model is not told of the form")] = None
    description: Annotated[fields.Label | None, Ignored("the model is not told of the form")] = None
    schema_: Schema = None
    strict: bool | None = fields.optional("A schema is held to in any case.")


class OpenAISchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: Annotated[NamedSchema, Field(description="What it has may stand beside `type` as well.")]

    @model_validator(mode="before")
    @classmethod
    def _wrapped(cls, given: Any) -> Any:
        if not isinstance(given, dict) or "json_schema" in given or "schema" not in given:
            return given
        rest = {key: value for key, value in given.items() if key != "type"}
        return {"type": given["type"], "json_schema": rest}


BY_FORMAT = tagged_by_type("its type is 'text', 'json_object' or 'json_schema'")

ResponseFormat = Annotated[
    Annotated[TextFormat, Tag("Text")]
    | Annotated[ObjectFormat, Tag("Json_object")]
    | Annotated[OpenAISchemaFormat, Tag("Json_schema")],
    BY_FORMAT,
]


def form_of(given: ResponseFormat | None) -> Grammar | None:
    match given:
        case OpenAISchemaFormat():
            return schema_form(given.json_schema.schema_)
        case ObjectFormat():
            return schema_form(given.schema_)
    return None


def schema_form(schema: dict[str, Any] | None) -> Grammar:
    return fields.ANY_OBJECT if schema is None else fields.json_grammar(schema)


_OTHER_PARTS = ("image_url", "input_audio", "file", "input_image", "input_file")


def refuse_other_parts(kind: object) -> object:
    """Raises ValueError for images, sound and files."""
    if kind in _OTHER_PARTS:
        raise ValueError(fields.TEXT_ONLY)
    return kind


class OpenAITextPart(Body):
    type: Annotated[Literal["text"], BeforeValidator(refuse_other_parts)]
    text: str
    cache_control: Annotated[fields.Labels | None, fields.CACHES_ITSELF] = None


class OpenAICalledFunction(Body):
    name: Annotated[str, Field(min_length=1)]
    arguments: fields.CallText = None
    # openai's library adds it to what it has parsed.
    parsed_arguments: Annotated[dict[str, Any] | None, fields.OF_A_REPLY] = None


class OpenAIToolCall(Body):
    id: Annotated[str, Field(min_length=1)]
    type: FunctionType
    function: OpenAICalledFunction
    index: Annotated[fields.Number | None, fields.OF_A_REPLY] = None  # some clients keep it of a stream


class OpenAIMessage(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[OpenAITextPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = fields.optional("Another name of `reasoning_content`.")
    thinking: str | None = fields.optional("Another name of `reasoning_content`.")
    refusal: None = None
    tool_calls: list[OpenAIToolCall] | None = None
    tool_call_id: str | None = None
    function_call: None = None
    audio: None = None
    annotations: fields.Nothing = None
    # openai's and LiteLLM's libraries add these to an answer.
    parsed: Annotated[Any, fields.OF_A_REPLY] = None
    provider_specific_fields: Annotated[dict[str, Any] | None, fields.OF_A_REPLY] = None
    cache_control: Annotated[fields.Labels | None, fields.CACHES_ITSELF] = None

    @property
    def thought(self) -> str | None:
        names = (self.reasoning_content, self.reasoning, self.thinking)
        return next((given for given in names if given is not None), None)

    @model_validator(mode="after")
    def _calls_as_assistant(self) -> OpenAIMessage:
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls are the assistant's")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise ValueError("a message of the role 'tool', and no other, has the tool_call_id of a call")
        return self


def chat_messages(messages: Sequence[OpenAIMessage]) -> list[dict[str, Any]]:
    """Return the messages as templates want them: text in one piece, no fields that were not set. Raises RequestError
    for the result of a call that never was, and for a call without a result."""
    calls, told = OpenCalls(), []
    for index, message in enumerate(messages):
        where, call_id = f"messages[{index}]", message.tool_call_id
        found: dict[str, Any] = {"role": message.role, "content": joined_text(message.content)}
        more: dict[str, Any] = {"name": message.name, "reasoning_content": message.thought}
        if call_id is not None:
            more |= {"tool_call_id": call_id, "name": calls.answered(where, call_id)}
        else:
            calls.settled(where)
        made = message.tool_calls or []
        for number, call in enumerate(made):
            calls.made(f"{where}.tool_calls[{number}]", call.id, call.function.name)
        more["tool_calls"] = [call_of(call.id, call.function.name, call.function.arguments) for call in made] or None
        told.append(found | {name: value for name, value in more.items() if value is not None})
    calls.settled(f"messages[{len(messages) - 1}]")
    return told


def joined_text(content: str | Sequence[OpenAITextPart] | None) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.text for part in content or ())
