"""What a model can be asked for, as every list of models tells it."""

from __future__ import annotations

from pathlib import Path

from localllm.chat.thoughts import may_think
from localllm.errors import TemplateError
from localllm.text.chat_template import ChatTemplate


def capabilities(directory: Path) -> list[str]:
    """Of the model in that folder, in Ollama's words; its files are read. Any model that chats takes tools: one whose
    template knows none is told of them in words. "embedding" is not among them, although every model embeds: Ollama's
    own program takes it to mean that a model does nothing else."""
    try:
        template = ChatTemplate.load(directory)
    except TemplateError:  # it has none, or a broken one, and goes on with texts
        return ["completion"]
    thinks = any(map(may_think, template.sources.values()))
    return ["completion", "tools", *(["thinking"] if thinks else [])]
