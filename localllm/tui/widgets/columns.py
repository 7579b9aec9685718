"""The columns of the chat screen: containers that draw nothing themselves."""

from __future__ import annotations

from textual.containers import Horizontal, Vertical

from localllm.tui.widgets.document import Clear


class Columns(Clear, Horizontal):
    """The list of chats, and the conversation."""


class Column(Clear, Vertical):
    """The conversation, or what is below it."""
