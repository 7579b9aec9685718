"""The tools of a request and the calls of a conversation, the same in every dialect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field

from localllm.chat.tool_words import told_arguments
from localllm.errors import GrammarError
from localllm.server.bodies import Body
from localllm.server.errors import RequestError

MAX_TOOLS = 128
# Tools of other types than functions, which other servers run, or their own models know how to call: as OpenAI's
# requests have them, then Anthropic's, there with the day of a version behind them.
TYPES = (
    "apply_patch", "code_interpreter", "computer", "computer_use_preview", "custom", "file_search", "image_generation",
    "local_shell", "mcp", "namespace", "programmatic_tool_calling", "shell", "tool_search", "web_search",
    "web_search_preview", "advisor", "bash", "code_execution", "mcp_toolset", "memory", "text_editor",
    "tool_search_tool_bm25", "tool_search_tool_regex", "web_fetch",
)  # fmt: skip
NO_SUCH_TOOL = "this type of tool is unknown; a tool is a function, whose calls the client runs"


class ForeignTool(Body):
    """Without effect: the server cannot run such a tool, and leaves it out of the prompt."""

    model_config = ConfigDict(extra="ignore")
    named_by: ClassVar = "type"

    type: Annotated[
        str, Field(pattern=rf"^({'|'.join(TYPES)})(_[0-9]{{4}}_?[0-9]{{2}}_?[0-9]{{2}})?$", examples=list(TYPES))
    ]


@dataclass(frozen=True)
class Tool:
    """parameters: the JSON Schema of its arguments. strict: every call has to fit that schema."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False

    @property
    def schema(self) -> dict[str, Any]:
        """The schema with all that some templates look at."""
        return {"type": "object", "properties": {}, **self.parameters}

    @property
    def template_input(self) -> dict[str, Any]:
        """The tool as chat templates want it."""
        function = {"name": self.name, "description": self.description, "parameters": self.schema}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class Toolset:
    """The tools that a model may call.

    callable: names of those it may call this time; the prompt has the others, too, so that it stays the same
    must_call: the answer is a call
    one_call: the answer has one call at most
    unheld: by name, why no call of a tool can be held to its schema, as far as that was tried
    """

    tools: tuple[Tool, ...]
    callable: tuple[str, ...]
    must_call: bool = False
    one_call: bool = False
    unheld: Mapping[str, GrammarError] = field(default_factory=dict, compare=False)

    @property
    def is_constrained(self) -> bool:
        """A grammar has to enforce what was asked for."""
        is_part = len(self.callable) < len(self.tools)
        return self.must_call or self.one_call or is_part or any(tool.strict for tool in self.tools)

    @property
    def choices(self) -> tuple[Tool, ...]:
        """The tools that may be called."""
        return tuple(tool for tool in self.tools if tool.name in self.callable)


def toolset(
    tools: Sequence[Tool],
    *,
    must_call: bool = False,
    only: Sequence[str] | None = None,
    one_call: bool = False,
    param: str = "tool_choice",
) -> Toolset | None:
    """Return None for no tools. Raises RequestError for two tools of one name, and for a choice of a missing tool.

    only: names of those that may be called; None: any
    param: the field that chooses
    """
    names = [tool.name for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            what = f"tools[{index}]: there are two tools of the name {name!r}"
            raise RequestError(400, what, why="a call could be of either", param="tools", name="invalid_value")
    for name in only or ():
        if name not in names:
            why = f"the tools are {', '.join(names)[:200]}" if names else "there are no tools"
            what = f"{param} names {name!r}, which is not a tool of this request"
            raise RequestError(400, what, why=why, param=param, name="invalid_value")
    if not names and must_call:
        why = "a call is required, but there are no tools"
        raise RequestError(400, f"{param!r} cannot be honoured", why=why, param=param, name="invalid_value")
    return Toolset(tuple(tools), tuple(only or names), must_call, one_call) if names else None


def call_of(call_id: str, name: str, arguments: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a call that was made, as chat templates want it: its arguments are an object if they can be."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": told_arguments(arguments)}}


class OpenCalls:
    """Checks a conversation: one result directly follows every call, and no result is of anything else."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}  # of the calls that have no result yet, by their ids
        self._results: set[str] = set()  # ids

    def made(self, where: str, call_id: str, name: str) -> None:
        """Note a call. Raises RequestError for the id of another call."""
        if call_id in self._names or call_id in self._results:
            raise _refused(where, f"there are two calls of the id {call_id[:100]!r}", "a result could be of either")
        self._names[call_id] = name

    def answered(self, where: str, call_id: str) -> str:
        """Note a result; return its tool's name. Raises RequestError for a call that never was, or has its result."""
        name = self._names.pop(call_id, None)
        if name is None:
            has_one = call_id in self._results
            what = f"it is the result of the call {call_id[:100]!r}, which " + (
                "already has one" if has_one else "does not exist"
            )
            raise _refused(where, what, self._open())
        self._results.add(call_id)
        return name

    def answered_next(self, where: str, name: str | None) -> tuple[str, str]:
        """Note a result without an id: it is of the first open call, or of the first of that tool. Return (id, name).
        Raises RequestError where there is none."""
        for call_id, called in self._names.items():
            if name in (None, called):
                return call_id, self.answered(where, call_id)
        raise _refused(
            where,
            f"it is the result of a call{f' of {name[:100]!r}' if name else ''} that does not exist",
            self._open(),
        )

    def settled(self, where: str) -> None:
        """End a turn. Raises RequestError where a call has no result."""
        if self._names:
            call_id, name = next(iter(self._names.items()))
            raise _refused(
                where, f"the call {call_id[:100]!r} of {name!r} has no result", "it must follow the call directly"
            )

    def _open(self) -> str:
        calls = ", ".join(map(repr, self._names))[:200]
        return f"the calls without a result are {calls}" if calls else "no call waits for one"


def _refused(where: str, what: str, why: str) -> RequestError:
    return RequestError(400, f"{where}: {what}", why=why, param=where, name="invalid_value")
