"""What stands where nothing was said yet: this machine, the model, and where to go from here."""

from __future__ import annotations

from textual.content import Content
from textual.reactive import reactive
from textual.widget import Widget

from localllm.frontend.text import one_line
from localllm.registry import BUILT_IN


class Welcome(Widget):
    DEFAULT_CSS = """
    Welcome { height: auto; padding: 1 2; }
    """
    machine = reactive("", layout=True)
    model = reactive("", layout=True)

    def render(self) -> Content:
        lines = [Content.styled("localllm", "bold $text-primary")]
        if self.machine:
            lines.append(Content.styled(one_line(self.machine), "$foreground-muted"))
        if self.model == BUILT_IN:
            lines.append(Content(f"{BUILT_IN}, the model in the package, answers at once, and tells tales."))
            lines.append(Content("F3 shows the models that fit this machine."))
        elif self.model:
            lines.append(Content(f"{one_line(self.model)} answers. F3 chooses another model."))
        lines.append(
            Content.styled("F4 has the chats that are kept, F1 the keys; / begins a command.", "$foreground-muted")
        )
        return Content("\n").join(lines)
