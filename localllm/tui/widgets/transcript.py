"""The messages of a conversation. Only a window of them has widgets; the rest is mounted when it is scrolled to."""

from __future__ import annotations

from collections.abc import Sequence, Set
from itertools import takewhile

from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widget import Widget
from textual.widgets import Static

from localllm.tui.code_index import CodeIndex
from localllm.tui.keys import KeyNames
from localllm.tui.messages import Turn
from localllm.tui.widgets.document import Clear
from localllm.tui.widgets.message_view import AnswerView, MessageView, QuestionView, Thought
from localllm.tui.widgets.welcome import Welcome

_FIRST = 16  # messages that are mounted at once
_MORE = 4  # when an end of the window is near: 80 ms
_MOST = 64  # mounted; those at the other end go


class Transcript(Clear, VerticalScroll, can_focus=False):
    def __init__(self, key_names: KeyNames, *, shows_thoughts: bool = False) -> None:
        super().__init__()
        self._shows_thoughts = shows_thoughts
        self._turns: list[Turn] = []
        self._first = 0  # of the turns that are mounted
        self._last = 0  # behind them
        self.live: AnswerView | None = None  # the answer that streams
        self._ending = ""
        self._thinking: Set[int] = frozenset()
        self.codes = CodeIndex()
        self._earlier = Static("", classes="edge")
        self.welcome = Welcome(key_names)
        self._is_moving = False

    def compose(self) -> ComposeResult:
        yield self.welcome
        yield self._earlier

    def on_mount(self) -> None:
        self._earlier.display = False
        self.anchor()

    @property
    def views(self) -> list[MessageView]:
        return [child for child in self.children if isinstance(child, MessageView)]

    async def show(self, turns: Sequence[Turn], ending: str = "", thinking: Set[int] = frozenset()) -> None:
        """Show the turns; those shown already stay as they are. ending: shown below the last answer. thinking: the
        answers that begin in a thought."""
        self._ending, self._thinking = ending, thinking
        self.codes.update(turns, thinking)
        await self._show(turns)
        for view in self.views:
            if isinstance(view, AnswerView):
                view.show_meta(ending=self._ending_of(view.index))

    async def _show(self, turns: Sequence[Turn]) -> None:
        pairs = zip(turns, self._turns, strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] is pair[1], pairs))
        self.welcome.display = not turns
        with self.app.batch_update():
            if self.live is not None and len(turns) > same and turns[same]["role"] == "assistant":
                if self._last < same:  # an earlier part is shown: the answer is mounted when it is scrolled to
                    await self.drop_answer()
                    self._turns = list(turns)
                    return
                self.live.turn, self.live.index = turns[same], same
                self.live, same, self._last = None, same + 1, same + 1
            self._turns = list(turns)
            if same == 0:  # another conversation
                self.anchor()
            if not self._first <= same <= self._last or same == 0 or len(turns) - self._first > _MOST:
                await self._window(max(0, len(turns) - _FIRST))
                return
            await self.remove_children([view for view in self.views if view.index >= same and view is not self.live])
            await self.mount_all(map(self._view, range(same, len(turns))))
            self._last = len(turns)
            self._show_earlier()

    async def begin_answer(self, *, is_thinking: bool) -> AnswerView:
        """Mount a new answer behind the last message."""
        await self.drop_answer()
        await self._to_end()
        index = len(self._turns)
        self.live = AnswerView(
            index, None, is_thinking=is_thinking, shows_thoughts=self._shows_thoughts,
            num_codes=self.codes.num_before(index),
        )  # fmt: skip
        await self.mount(self.live)
        self.anchor()
        return self.live

    async def drop_answer(self) -> None:
        if self.live is not None:
            await self.live.remove()
            self.live = None

    def _view(self, index: int) -> MessageView:
        turn = self._turns[index]
        if turn["role"] != "assistant":
            return QuestionView(index, turn)
        return AnswerView(
            index, turn, is_thinking=index in self._thinking, shows_thoughts=self._shows_thoughts,
            ending=self._ending_of(index), num_codes=self.codes.num_before(index),
        )  # fmt: skip

    def _ending_of(self, index: int) -> str:
        return self._ending if index == len(self._turns) - 1 else ""

    def _show_earlier(self) -> None:
        self._earlier.update(Content(f"↑ {self._first} earlier messages"))
        self._earlier.display = self._first > 0

    # The window

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        if self._is_moving or not self.is_mounted:
            return
        near = self.size.height  # more is there before it is scrolled to
        is_earlier = new_value <= near and self._first > 0
        if is_earlier or (new_value >= self.max_scroll_y - near and self._last < len(self._turns)):
            self._is_moving = True
            self.call_later(self._mount_more, is_earlier=is_earlier)

    async def _mount_more(self, *, is_earlier: bool) -> None:
        """Mount some messages at an end of the window; too many at the other end go."""
        first, last = self._first, self._last
        anchor = next(iter(self.views) if is_earlier else reversed(self.views), None)
        offset = anchor.virtual_region.y - self.scroll_y if anchor is not None else 0
        with self.app.batch_update():
            if is_earlier:
                self._first = max(0, first - _MORE)
                await self.mount_all(map(self._view, range(self._first, first)), after=self._earlier)
                if self.live is None:
                    self._last = min(last, self._first + _MOST)
            else:
                self._last = min(len(self._turns), last + _MORE)
                await self.mount_all(map(self._view, range(last, self._last)), before=self.live)
                self._show_live()
                self._first = max(first, self._last - _MOST)
            gone = [view for view in self.views if not self._first <= view.index < self._last and view is not self.live]
            await self.remove_children(gone)
            self._show_earlier()
        self.call_after_refresh(self._keep, anchor, offset)

    def _keep(self, anchor: Widget | None, offset: float) -> None:
        if anchor is not None and anchor.is_mounted:
            self.scroll_to(y=anchor.virtual_region.y - offset, animate=False, immediate=True)
        self._is_moving = False

    async def go_to(self, index: int) -> MessageView | None:
        """Mount the message and scroll to it."""
        if not 0 <= index < len(self._turns):
            return None
        if not self._first <= index < self._last:
            await self._window(max(0, index - _FIRST // 2))
        view = next((view for view in self.views if view.index == index), None)
        if view is not None:
            for other in self.views:
                other.set_class(other is view, "-found")
            self.release_anchor()
            self.call_after_refresh(self.scroll_to_widget, view, animate=False, top=True, immediate=True)
        return view

    def select(self, step: int) -> bool:
        """Focus the message before (-1) or after (1) the focused one, the last where none is. False behind the last."""
        target = step + next((number for number, view in enumerate(self.views) if view.has_focus), len(self.views))
        if target >= len(self.views):
            return False
        if target >= 0:
            self.views[target].focus()
        else:
            self.scroll_home(animate=False)
        return True

    def page(self, step: int) -> None:
        self.scroll_relative(y=step * max(1, self.size.height - 2), animate=False)

    def toggle_thoughts(self) -> None:
        """Unfold all thoughts, or fold them where any is unfolded."""
        thoughts = self.query(Thought)
        is_open = not any(thought.is_open for thought in thoughts)
        for thought in thoughts:
            thought.is_open = is_open

    async def go_home(self) -> None:
        if self._first > 0:
            await self._window(0)
        self.scroll_home(animate=False)

    async def go_end(self) -> None:
        """Scroll to the last message, and follow what comes."""
        await self._to_end()
        self.anchor()
        self.scroll_end(animate=False)

    async def _to_end(self) -> None:
        if self._last < len(self._turns):
            await self._window(max(0, len(self._turns) - _FIRST))

    async def _window(self, first: int) -> None:
        self._is_moving = True
        with self.app.batch_update():
            await self.remove_children([view for view in self.views if view is not self.live])
            self._first, self._last = first, min(len(self._turns), first + _FIRST)
            await self.mount_all(map(self._view, range(self._first, self._last)), after=self._earlier)
            self._show_live()
            self._show_earlier()
        self._is_moving = False

    def _show_live(self) -> None:
        """Show the answer that streams behind the last message, and nowhere else."""
        if self.live is not None:
            self.live.display = self._last >= len(self._turns)
