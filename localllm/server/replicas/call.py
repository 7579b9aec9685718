"""A request on its way to a replica: plain data, whole, so that another replica can be given it again."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.types import Scope


@dataclass(frozen=True)
class ReplicaCall:
    """A request that was let in. beginning: as `beginning_of` has it."""

    method: str
    path: str
    raw_path: bytes
    query_string: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    beginning: tuple[bytes, ...]

    def scope(self) -> Scope:
        """Return the call's scope as ASGI has it."""
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "scheme": "http",
            "method": self.method,
            "path": self.path,
            "raw_path": self.raw_path,
            "query_string": self.query_string,
            "headers": list(self.headers),
            "client": None,
            "server": None,
            "state": {},
        }
