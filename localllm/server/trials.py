"""Grammars that have not passed yet: each is tried out beside all else, a few at once. Who asks for none, or for one
that is known, does not wait for them. Of the server's loop."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor

from localllm.errors import GrammarError
from localllm.server.failures import busy

AT_ONCE = 2
MOST_WAITING = 16  # beside those: of ones that explode, for ten seconds
_MOST_KEPT = 32  # as an engine keeps them


class Trials:
    """key: which grammar, of which model."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(AT_ONCE, "localllm-trial")
        self._under_way: dict[Hashable, asyncio.Future[None]] = {}
        self._passed: OrderedDict[Hashable, None] = OrderedDict()

    def has_passed(self, key: Hashable) -> bool:
        """Whether it is cheap to check once more."""
        return key in self._passed

    async def try_out(self, key: Hashable, check: Callable[[], None]) -> None:
        """Raises what `check` does, of whomever it is who asked first; RequestError where too many wait."""
        trial = self._under_way.get(key)
        if trial is None:
            if len(self._under_way) >= AT_ONCE + MOST_WAITING:
                why = f"{len(self._under_way)} new grammars are being tried out, or wait for that"
                raise busy("the server has too much to do", why)
            trial = asyncio.get_running_loop().run_in_executor(self._threads, check)
            self._under_way[key] = trial
            trial.add_done_callback(lambda done: self._ended(key, done))
        try:
            await asyncio.shield(trial)
        except GrammarError as error:  # one error for all would keep the frames of each
            raise GrammarError(error.what, why=error.why, fix=error.fix) from None

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _ended(self, key: Hashable, trial: asyncio.Future[None]) -> None:
        del self._under_way[key]
        if trial.cancelled() or trial.exception() is not None:
            return
        self._passed[key] = None
        while len(self._passed) > _MOST_KEPT:
            self._passed.popitem(last=False)
