"""Checks of new grammars, a few at once, off the server's loop. A request without a grammar, or with a known one, does
not wait for them."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from localllm.errors import GrammarError
from localllm.server.errors import busy

AT_ONCE = 2
MOST_WAITING = 16  # beside those: of ones that explode, for ten seconds
_MOST_KEPT = 32  # as an engine keeps them
_MOST_VERDICTS = 256  # of schemas by themselves: twice a request's tools


class GrammarChecks:
    """Keys name a grammar and its model. off_loop: for cheap checks."""

    def __init__(self, off_loop: Callable[[Callable[[], object]], Awaitable[object]]) -> None:
        self._off_loop = off_loop
        self._threads = ThreadPoolExecutor(AT_ONCE, "localllm-trial")
        self._under_way: dict[Hashable, asyncio.Future[Any]] = {}
        self._verdicts: OrderedDict[Hashable, GrammarError | None] = OrderedDict()
        self._passed: OrderedDict[Hashable, None] = OrderedDict()

    async def check(self, key: Hashable, check: Callable[[], object]) -> None:
        """Run the check; other requests for the same new grammar wait for the first. Raises what `check` does, and
        RequestError where too many wait."""
        while (other := self._under_way.get(key)) is not None:
            await asyncio.wait([other])
            if isinstance(error := _failure(other), GrammarError):  # one error for all would keep the frames of each
                raise GrammarError(error.what, why=error.why, fix=error.fixes)
        if key in self._passed:  # kept by the engine, and cheap to check once more
            await self._off_loop(check)
            return
        if len(self._under_way) >= AT_ONCE + MOST_WAITING:
            why = f"{len(self._under_way)} new grammars are being tried out, or wait for that"
            raise busy("the server has too much to do", why)
        trial = asyncio.get_running_loop().run_in_executor(self._threads, check)
        self._under_way[key] = trial
        trial.add_done_callback(lambda done: self._ended(key, done))
        await asyncio.shield(trial)

    async def verdict(self, key: Hashable, check: Callable[[], object]) -> GrammarError | None:
        """Return the grammar's error, or None; both are remembered. Raises as `check` for the rest."""
        if key not in self._verdicts:
            try:
                await self.check(key, check)
                self._verdicts[key] = None
            except GrammarError as error:
                self._verdicts[key] = GrammarError(error.what, why=error.why, fix=error.fixes)
            while len(self._verdicts) > _MOST_VERDICTS:
                self._verdicts.popitem(last=False)
        return self._verdicts.get(key)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _ended(self, key: Hashable, trial: asyncio.Future[Any]) -> None:
        del self._under_way[key]
        if trial.cancelled() or _failure(trial) is not None:
            return
        self._passed[key] = None
        while len(self._passed) > _MOST_KEPT:
            self._passed.popitem(last=False)


def _failure(trial: asyncio.Future[Any]) -> BaseException | None:
    return None if trial.cancelled() else trial.exception()
