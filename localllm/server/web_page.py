"""The chat page for browsers: a few static files. They say nothing of this server, and a browser that opens an address
can send no key; so they are served without one. What the page then asks for needs it, as from any program."""

from __future__ import annotations

from pathlib import Path

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Scope

PAGE_PATH = "/page/{file}"
_FOLDER = Path(__file__).parent / "page"
_START = "/page/index.html"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
# Nothing but these files and this server, and no text that becomes a part of the page otherwise than as text.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)


class WebPage:
    """The files as they were when the server started."""

    def __init__(self) -> None:
        files = [file for file in _FOLDER.iterdir() if file.suffix in _TYPES]
        self._files = {PAGE_PATH.format(file=each.name): (each.read_bytes(), _TYPES[each.suffix]) for each in files}

    def reply(self, scope: Scope) -> Response | None:
        """Return the file that a browser asks for, at / the page itself; None for every other request. Programs ask /
        whether there is a server, and accept no HTML."""
        path = scope["path"]
        if path == "/" and "text/html" in Headers(scope=scope).get("accept", ""):
            path = _START
        if scope["method"] not in ("GET", "HEAD") or path not in self._files:
            return None
        data, media_type = self._files[path]
        return Response(data, headers={"content-security-policy": _POLICY}, media_type=media_type)
