"""Keys that act in the order in which they are pressed, also when many come at once: over ssh, or on a busy machine.

Textual hands each key to the focused widget and asks the bindings when it has come back from there: a letter behind a
key that sends, opens or moves the focus would be written before that has happened.
"""

from __future__ import annotations

from collections import deque

from textual import events, on
from textual.app import App
from textual.message import Message
from textual.timer import Timer

_ROUNDS = 4  # from the widget to the app: a key that sends takes three, as each of its messages makes the next
_STUCK_S = 0.5  # for a round; a widget that goes away takes the message with it


class KeyQueue(App[None]):
    """Hands on a key when what the one before has brought about is done."""

    class Round(Message):
        """Takes the way of a key, behind it."""

        def __init__(self, number: int) -> None:
            super().__init__()
            self.number = number

    def __init__(self) -> None:
        super().__init__()
        self._waiting: deque[events.Key | events.Paste] = deque()
        self._number = 0  # of the round that is under way
        self._rounds_left = 0
        self._stuck: Timer | None = None

    async def on_event(self, event: events.Event) -> None:
        if isinstance(event, events.InputEvent | events.Paste) and not self.screen_stack:
            return  # the program is ending
        if not isinstance(event, events.Key | events.Paste) or event.is_forwarded:
            await super().on_event(event)
        elif self._rounds_left:
            self._waiting.append(event)
            self._stuck = self._stuck or self.set_timer(_STUCK_S, self._give_up)
        else:
            await self._hand_on(event)

    async def _hand_on(self, event: events.Key | events.Paste) -> None:
        is_written = isinstance(event, events.Paste) or self._is_written(event)
        await super().on_event(event)
        if not is_written:
            self._rounds_left = _ROUNDS
            self._go_round()

    def _is_written(self, event: events.Key) -> bool:
        """Whether the focused field takes it for a letter: then the next may follow at once."""
        focused = self.focused
        return focused is not None and event.is_printable and focused.check_consume_key(event.key, event.character)

    def _go_round(self) -> None:
        self._number += 1
        target = self.focused or self.screen
        if not target.post_message(self.Round(self._number)):
            self.post_message(self.Round(self._number))

    @on(Round)
    async def _on_round(self, message: Round) -> None:
        if message.number == self._number:
            self._rounds_left -= 1
            await self._go_on()

    async def _give_up(self) -> None:
        self._stuck = None
        self._rounds_left = 0
        await self._go_on()

    async def _go_on(self) -> None:
        if not self.screen_stack:
            return
        if self._rounds_left:
            self._go_round()
            return
        while self._waiting and not self._rounds_left:
            await self._hand_on(self._waiting.popleft())
        if self._stuck is not None:
            self._stuck.stop()
            self._stuck = self.set_timer(_STUCK_S, self._give_up) if self._waiting else None
