"""The addresses of a server, as its user is told of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import socket

    from localllm.cli.output import Output


def address_of(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def tell_addresses(output: Output, addresses: Sequence[str]) -> None:
    """Say where the chat page is, and what other programs find. Browsers do not open the address of every interface."""
    page = addresses[0].replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
    output.note(f"chat in a browser: {page}")
    output.note("OpenAI: /v1, Anthropic: /v1/messages, Ollama: /api; Ctrl-C stops")
