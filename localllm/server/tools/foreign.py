"""Tools of other types than functions, which other servers run, or their own models know how to call."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field

from localllm.server.bodies import Body

# As OpenAI's requests have them, then Anthropic's, there with the day of a version behind them.
TYPES = (
    "apply_patch", "code_interpreter", "computer", "computer_use_preview", "custom", "file_search", "image_generation",
    "local_shell", "mcp", "namespace", "programmatic_tool_calling", "shell", "tool_search", "web_search",
    "web_search_preview", "advisor", "bash", "code_execution", "mcp_toolset", "memory", "text_editor",
    "tool_search_tool_bm25", "tool_search_tool_regex", "web_fetch",
)  # fmt: skip
NO_SUCH_TOOL = "this server knows no such type of tools; a tool is a function, whose calls are for the client to make"
KINDS = dict.fromkeys(TYPES, "ForeignTool")


class ForeignTool(Body):
    """Without effect: such a tool cannot be run here, and the model is not told of it."""

    model_config = ConfigDict(extra="ignore")
    named_by: ClassVar = "type"

    type: Annotated[
        str, Field(pattern=rf"^({'|'.join(TYPES)})(_[0-9]{{4}}_?[0-9]{{2}}_?[0-9]{{2}})?$", examples=list(TYPES))
    ]
