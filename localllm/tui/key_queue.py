"""Keys that act in the order in which they are pressed, also when many come at once: over ssh, or on a busy machine.

Textual hands each key to the focused widget and asks the bindings when it has come back from there: a letter behind a
key that sends, opens or moves the focus would be written before that has happened.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from textual import events, on, work
from textual.app import App
from textual.message import Message

_ROUNDS = 4  # from the widget to the app: a key that sends takes three, as each of its messages makes the next
_STUCK_S = 0.5  # for a round; a widget that goes away takes the message with it


class KeyQueue(App[None]):
    """Hands on a key when the effects of the one before have happened."""

    @dataclass
    class Round(Message):
        """Takes the way of a key, behind it."""

        done: asyncio.Event

    def __init__(self) -> None:
        super().__init__()
        self._pressed: asyncio.Queue[events.Key | events.Paste] = asyncio.Queue()

    async def on_event(self, event: events.Event) -> None:
        if isinstance(event, events.InputEvent | events.Paste) and not self.screen_stack:
            return  # the program is ending
        if isinstance(event, events.Load):
            self._hand_on_keys()
        if not isinstance(event, events.Key | events.Paste) or event.is_forwarded:
            await super().on_event(event)
        else:
            self._pressed.put_nowait(event)

    @work(group="keys")
    async def _hand_on_keys(self) -> None:
        while True:
            event = await self._pressed.get()
            if not self.screen_stack:
                return
            is_written = isinstance(event, events.Paste) or self._is_written(event)
            await super().on_event(event)
            for _ in range(0 if is_written else _ROUNDS):
                done = asyncio.Event()
                target = self.focused or self.screen if self.screen_stack else self
                if not target.post_message(self.Round(done)):
                    self.post_message(self.Round(done))
                try:
                    await asyncio.wait_for(done.wait(), _STUCK_S)
                except TimeoutError:
                    break

    def _is_written(self, event: events.Key) -> bool:
        """Return whether the focused field takes the key as a letter: the next may then follow at once."""
        focused = self.focused
        return focused is not None and event.is_printable and focused.check_consume_key(event.key, event.character)

    @on(Round)
    def _on_round(self, message: Round) -> None:
        message.done.set()
