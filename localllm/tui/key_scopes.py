"""What has keys of its own: for the help, and for a user's own keys. Imports every screen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from localllm.tui.app import ChatApp
from localllm.tui.screens.chat import ChatScreen
from localllm.tui.screens.chats import ChatsScreen
from localllm.tui.screens.dialogs import LineDialog
from localllm.tui.screens.models import ModelsScreen
from localllm.tui.screens.plan import PlanScreen
from localllm.tui.widgets.composer import Composer
from localllm.tui.widgets.message_view import MessageView

if TYPE_CHECKING:
    from textual.dom import DOMNode


def rooms() -> dict[str, type[DOMNode]]:
    """By the title under which the help has them."""
    found: dict[str, Any] = {
        "Everywhere": ChatApp,
        "Chat": ChatScreen,
        "Writing": Composer,
        "A message": MessageView,
        "Chats": ChatsScreen,
        "Asked for a line": LineDialog,
        "Models": ModelsScreen,
        "Plan": PlanScreen,
    }
    return found
