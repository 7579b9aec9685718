"""What stands where nothing was said yet: this machine, the model, and where to go from here."""

from __future__ import annotations

from textual.content import Content
from textual.reactive import reactive
from textual.widget import Widget

from localllm.chat.text import one_line
from localllm.registry import BUILT_IN
from localllm.tui.key_names import KeyNames


class Welcome(Widget):
    DEFAULT_CSS = """
    Welcome { height: auto; padding: 1 2; }
    """
    machine = reactive("", layout=True)
    model = reactive("", layout=True)

    def __init__(self, key_names: KeyNames) -> None:
        super().__init__()
        self._key_names = key_names

    def render(self) -> Content:
        keys = self._key_names
        lines = [Content.styled("localllm", "bold $text-primary")]
        if self.machine:
            lines.append(Content.styled(one_line(self.machine), "$foreground-muted"))
        if self.model == BUILT_IN:
            lines.append(Content(f"{BUILT_IN}, the model in the package, answers at once, and tells tales."))
            lines.append(Content(f"{keys['app.models']} shows the models that fit this machine."))
        elif self.model:
            lines.append(Content(f"{one_line(self.model)} answers. {keys['app.models']} chooses another model."))
        hint = f"{keys['app.chats']} has the chats that are kept, {keys['app.help']} the keys; / begins a command."
        lines.append(Content.styled(hint, "$foreground-muted"))
        return Content("\n").join(lines)
