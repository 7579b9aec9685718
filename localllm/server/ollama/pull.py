"""POST /api/pull: fetch a model from the hub onto this disk, with lines of progress."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import threading
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, ClassVar, Literal

from starlette.responses import Response

from localllm import hub
from localllm.errors import ModelNotFoundError
from localllm.registry import BUILT_IN, REPO_ID, load_registry
from localllm.runtime.download import fetch
from localllm.runtime.model_pool import ModelPool
from localllm.server.bodies import Absent, OnlyFalse, ReplyBody
from localllm.server.endpoint import ApiCall, Endpoint
from localllm.server.errors import RequestError, body_of, busy
from localllm.server.fields import optional
from localllm.server.ollama.common import NamedBody, line
from localllm.server.replies import NDJSON, JsonReply, StreamReply

if TYPE_CHECKING:
    from localllm.config import ResolvedSettings
    from localllm.hub import PullProgress

_TELL_S = 0.1  # between two lines of one file
_MOST_PULLS = 4  # at once
_THREAD = "localllm-pull"


class PullBody(NamedBody):
    why: ClassVar = {
        "insecure": "models come from the hub that the server was started with, and from nowhere else",
        **dict.fromkeys(("username", "password"), "the hub's token is the server's own"),
    }

    username: Literal[""] | None = None
    password: Literal[""] | None = None
    insecure: OnlyFalse | None = None
    stream: bool | None = optional("Default: true.")


class PullLine(ReplyBody):
    """digest: tells files apart. total, completed: bytes of the file."""

    status: str
    digest: Absent[str] = None
    total: Absent[int] = None
    completed: Absent[int] = None


_SUCCESS = PullLine(status="success")


class PullStoppedError(Exception):
    """Nobody waits for it any more."""


class _Pull:
    """A pull on a thread of its own. Where nobody reads its lines, the last one of each file counts."""

    def __init__(self, name: str, resolved: ResolvedSettings) -> None:
        self._arrived = asyncio.Event()
        self._lines: dict[str, PullLine] = {}  # by status
        self._error: Exception | None = None
        self._is_stopped = False
        arguments = (name, resolved, asyncio.get_running_loop())
        threading.Thread(target=self._run, args=arguments, name=_THREAD, daemon=True).start()

    async def lines(self) -> AsyncIterator[PullLine]:
        """Yield lines to the end of the pull. Raises what `hub.pull` does."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            lines, self._lines = list(self._lines.values()), {}
            for each in lines:
                yield each
                if each == _SUCCESS:
                    return
            if self._error is not None:
                raise self._error

    def stop(self) -> None:
        """Stop at its next sign of life. What was fetched stays."""
        self._is_stopped = True

    def _run(self, name: str, resolved: ResolvedSettings, loop: asyncio.AbstractEventLoop) -> None:
        last, noted_at = "", 0.0

        def note(found: PullLine | Exception) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits
                loop.call_soon_threadsafe(self._note, found)

        def report(progress: PullProgress) -> None:
            nonlocal last, noted_at
            if self._is_stopped:
                raise PullStoppedError
            each, now = _line_of(name, progress), time.monotonic()
            is_whole = bool(progress.file_bytes) and progress.file_done_bytes == progress.file_bytes
            if is_whole or each.status != last or now - noted_at >= _TELL_S:
                last, noted_at = each.status, now
                note(each)

        try:
            fetch(name, resolved, report)
            note(PullLine(status="verifying sha256 digest"))  # each file's was, as it came
            note(_SUCCESS)
        except PullStoppedError:
            return
        except Exception as error:
            note(error)

    def _note(self, found: PullLine | Exception) -> None:
        if isinstance(found, Exception):
            self._error = found
        else:
            self._lines[found.status] = found
        self._arrived.set()


def _line_of(name: str, progress: PullProgress) -> PullLine:
    if progress.phase == "listing":
        return PullLine(status="pulling manifest")
    if progress.phase in ("waiting", "retrying"):
        return PullLine(status=progress.note)
    digest = hashlib.sha256(f"{name}/{progress.file}".encode()).hexdigest()
    return PullLine(
        status=f"pulling {progress.file}",
        digest=f"sha256:{digest}",
        total=progress.file_bytes,
        completed=progress.file_done_bytes,
    )


async def pull(call: ApiCall, body: PullBody) -> Response:
    """Raises RequestError for a name that cannot be pulled, and what ends a pull before its first line."""
    pool, name = call.pool, body.bare_name
    is_streamed = body.stream is not False
    if await pool.on_disk(lambda: _is_here(pool, name)):
        return Response(line(_SUCCESS), media_type=NDJSON) if is_streamed else JsonReply(_SUCCESS)
    if sum(thread.name == _THREAD for thread in threading.enumerate()) >= _MOST_PULLS:
        raise busy("the server has too much to do", f"{_MOST_PULLS} models are being fetched")
    running = _Pull(name, pool.first.selection.resolved)
    if is_streamed:
        return await _streamed(running)
    try:
        async for _ in running.lines():
            pass
    finally:
        running.stop()
    return JsonReply(_SUCCESS)


async def _streamed(running: _Pull) -> StreamReply:
    lines = running.lines()
    try:
        first = await anext(lines)
    except BaseException:
        running.stop()
        raise

    async def pieces() -> AsyncIterator[bytes]:
        yield line(first)
        async for each in lines:
            yield line(each)

    return StreamReply(pieces(), lambda failure: line(body_of(failure, "ollama")), running.stop, NDJSON)


def _is_here(pool: ModelPool, name: str) -> bool:
    """Return whether the model is on this disk. Raises RequestError for a name that is neither a known one nor
    ORG/REPOSITORY: a client's word is no path to look at."""
    if name == BUILT_IN or pool.known(name) is not None:
        return True
    registry = load_registry()
    if registry.find(name) is None and not REPO_ID.fullmatch(name.partition("@")[0]):
        near = registry.nearest(name[:200])
        fix = f"ask for {near[0]!r}" if near else "ask for ORG/REPOSITORY of the Hugging Face hub"
        why = "it is neither a known name nor ORG/REPOSITORY"
        raise RequestError(404, f"model {name[:200]!r} not found", why=why, fix=fix, param="model")
    try:
        hub.locate(name, registry=registry, offline=pool.first.selection.settings.offline)
    except ModelNotFoundError:
        return False
    return True


ENDPOINTS = (Endpoint("POST", "/api/pull", pull, "Fetch a model onto this disk", PullBody, PullLine, PullLine),)
