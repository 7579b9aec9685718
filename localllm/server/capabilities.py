"""The capabilities of a model, as every list of models has them."""

from __future__ import annotations

from pathlib import Path

from localllm.chat.thoughts import may_think
from localllm.errors import TemplateError
from localllm.text.chat_template import ChatTemplate


def capabilities(directory: Path) -> list[str]:
    """Return those of the model in that folder, in Ollama's words; its files are read.

    Any model that chats takes tools: they are described in words where its template has none. "embedding" is left out,
    although every model embeds: to Ollama's own program it means that a model does nothing else.
    """
    try:
        template = ChatTemplate.load(directory)
    except TemplateError:  # it has none, or a broken one, and goes on with texts
        return ["completion"]
    thinks = any(map(may_think, template.sources.values()))
    return ["completion", "tools", *(["thinking"] if thinks else [])]
