"""The process at the other end of a connection to an engine: how it is reached, and ended."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from localllm.runtime.protocol import Message


class EnginePeer:
    """A process that has an engine, or will have one. Others than the plain one know more of it."""

    pid: int | None = None  # once it is known
    socket_path: Path | None = None  # at which other programs reach the engine, where they can

    def __init__(self, connect: Callable[[], socket.socket]) -> None:
        self._connect = connect

    def connect(self) -> socket.socket:
        """Wait until the engine can be reached. Called once, on a thread of the connection."""
        return self._connect()

    def receive(self, message: Message) -> None:
        """Receive a message about the load."""

    def why_gone(self) -> str:
        """Explain a connection that has ended and that nobody has closed."""
        return "its process has ended"

    def kill(self) -> None:
        """End a process that does not move on."""

    def stop_load(self) -> None:
        """Give up an engine that is still being loaded."""

    def close(self, timeout_s: float) -> None:
        """Release the process, after the connection."""
