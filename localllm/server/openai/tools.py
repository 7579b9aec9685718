"""Tools and forms of answers, as OpenAI's requests have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StringConstraints, Tag, model_validator

from localllm.server.bodies import Body, Ignored, tagged_by
from localllm.server.fields import ANY_OBJECT, CACHES_ITSELF, ArgumentsSchema, Label, Labels, json_grammar, optional
from localllm.server.tools.toolset import KINDS, MAX_TOOLS, NO_SUCH_TOOL, ForeignTool, Tool, Toolset, toolset
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
    parameters: ArgumentsSchema | None = None
    strict: bool | None = optional("true: a grammar makes calls fit the schema, also where none is due.")

    @property
    def tool(self) -> Tool:
        return Tool(self.name, self.description or "", self.parameters or {}, bool(self.strict))


class OpenAIFunctionTool(Body):
    type: FunctionType
    function: OpenAIFunction
    cache_control: Annotated[Labels | None, CACHES_ITSELF] = None


FUNCTION_OR_FOREIGN = tagged_by("type", {"function": "FunctionTool", **KINDS}, NO_SUCH_TOOL, default="function")

AnyTool = Annotated[
    Annotated[OpenAIFunctionTool, Tag("FunctionTool")] | Annotated[ForeignTool, Tag("ForeignTool")],
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
    description: Annotated[Label | None, Ignored("the model is not told of the form")] = None
    schema_: Schema = None
    strict: bool | None = optional("A schema is held to in any case.")


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


_FORMATS = {"text": "TextFormat", "json_object": "ObjectFormat", "json_schema": "SchemaFormat"}
BY_FORMAT = tagged_by("type", _FORMATS, "its type is 'text', 'json_object' or 'json_schema'")

ResponseFormat = Annotated[
    Annotated[TextFormat, Tag("TextFormat")]
    | Annotated[ObjectFormat, Tag("ObjectFormat")]
    | Annotated[OpenAISchemaFormat, Tag("SchemaFormat")],
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
    return ANY_OBJECT if schema is None else json_grammar(schema)
