"""The model that is served: by which names, whether it is loaded yet, and how many requests it takes on at once."""

from __future__ import annotations

import asyncio
import difflib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, TypeVar

from localllm.errors import BugError, LocalLLMError
from localllm.frontend.selection import Selection, told_of
from localllm.registry import BUILT_IN
from localllm.server.answering import Answers
from localllm.server.asking import Ask, joined, prepare
from localllm.server.failures import RequestError, busy
from localllm.server.metrics import Metrics

if TYPE_CHECKING:
    from localllm.engine.engine import Engine
    from localllm.engine.request import Pooling, SamplingParams
    from localllm.engine.service import EngineService

T = TypeVar("T")

_PREPARING_THREADS = 2  # templates and tokenizers, while the loop goes on; as many again look at the disk


@dataclass(frozen=True)
class Capacity:
    """parallel: answers that are computed at once. queue: that may wait beside them."""

    parallel: int = 8
    queue: int = 64


class Served:
    """One model, loaded or on its way."""

    def __init__(
        self,
        selection: Selection,
        service: EngineService,
        capacity: Capacity,
        aliases: Sequence[str] = (),
        pooling: Pooling = "mean",
    ) -> None:
        """aliases: more names for it. pooling: what an embedding is made of."""
        self.selection = selection
        self.service = service
        self.capacity = capacity
        self.metrics = Metrics()
        self.pooling = pooling
        self.started_at = time.time()
        entry = selection.files.entry
        self.names = tuple(dict.fromkeys((_name(selection), *aliases, *(entry.aliases if entry else ()))))
        self.num_open = 0  # answers that were asked for and have not ended
        self._preparing = ThreadPoolExecutor(_PREPARING_THREADS, "localllm-prepare")
        self._looking = ThreadPoolExecutor(_PREPARING_THREADS, "localllm-look")

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def is_loading(self) -> bool:
        return not self.service.is_settled

    def require(self, name: str | None) -> str:
        """The name under which the client knows it; None: the client leaves the choice to the server.

        Raises RequestError for a model that is not served.
        """
        if name is None:
            return self.name
        bare = name.removesuffix(":latest")
        if self.has(bare):
            return name
        near = difflib.get_close_matches(bare[:200], self.names, n=1, cutoff=0)
        what, why = f"the model {name[:200]!r} is not served here", f"this server has {', '.join(self.names)}"
        fix = f"ask for {near[0]!r}"
        raise RequestError(404, what, why=why, fix=fix, param="model", name="model_not_found")

    def has(self, name: str) -> bool:
        """Whether the model is called so, in letters of whatever size."""
        return name.casefold() in {each.casefold() for each in (*self.names, self.selection.files.repo or self.name)}

    @property
    def evicts(self) -> bool:
        """Whether the oldest turns leave a conversation that is too long."""
        return self.selection.settings.overflow == "evict"

    @property
    def started_text(self) -> str:
        """When the server was started, as RFC 3339 has it."""
        return datetime.fromtimestamp(self.started_at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    @property
    def engine_if_loaded(self) -> Engine | None:
        """None while it is loaded, and where it cannot be."""
        try:
            return self.engine()
        except RequestError:
            return None

    def engine(self) -> Engine:
        """Raises RequestError while it is loaded, and where it cannot be."""
        if self.is_loading:
            why = "it takes seconds, or minutes where it is packed first"
            raise busy(f"{self.name} is being loaded", why, "loading")
        try:
            engine = self.service.wait_loaded(0)
        except Exception as error:
            known = told_of(error, self.selection.files, self.selection.resolved)
            raise _gone(f"{self.name} cannot be used", known) from error
        if engine is None:
            raise busy(f"{self.name} is being closed", "the server is shutting down", "shutting_down")
        return engine

    def sampling(self) -> SamplingParams:
        """How tokens are drawn where a request says nothing."""
        return self.selection.sampling()

    def take_places(self, count: int) -> Callable[[], None]:
        """For so many answers; gives them back when it is called. Raises RequestError where there are not as many."""
        most = self.capacity.parallel + self.capacity.queue
        if count > most:
            what, why = f"{count} answers are asked for at once", f"this server takes on {most}"
            raise RequestError(400, what, why=why, fix="ask for fewer", param="n", name="invalid_value")
        if self.num_open + count > most:
            why = f"{self.num_open} of at most {most} answers are being computed or wait"
            raise busy("the server has too much to do", why)
        self.num_open += count

        def give_back() -> None:
            self.num_open -= count

        return give_back

    async def ask(self, *asks: Ask) -> Answers:
        """Has them answered, all or none. Raises RequestError where too many wait, and what `prepare` does."""
        return await self.answer(asks, self.take_places(sum(ask.choosing.rows(ask.n) for ask in asks)))

    async def answer(self, asks: Sequence[Ask], closed: Callable[[], None]) -> Answers:
        """As `ask`, in places that were taken before. closed: called in any case, when they are not needed any more."""
        try:
            engine = self.engine()
            asked = await self.off_loop(lambda: joined([prepare(ask, engine) for ask in asks]))
        except BaseException:
            closed()
            raise
        return Answers(self.service, asked, closed, self.metrics.count_answer)

    async def off_loop(self, work: Callable[[], T]) -> T:
        """What it gives, computed while the loop goes on: templates and tokenizers take milliseconds, or more."""
        return await asyncio.get_running_loop().run_in_executor(self._preparing, work)

    async def on_disk(self, work: Callable[[], T]) -> T:
        """As `off_loop`, of what may wait for a disk: no prompt waits behind it."""
        return await asyncio.get_running_loop().run_in_executor(self._looking, work)

    def stop(self) -> None:
        """Ends what runs."""
        self.service.stop()

    def close(self) -> None:
        """`stop`, and waits a moment for it."""
        for pool in (self._preparing, self._looking):
            pool.shutdown(wait=False, cancel_futures=True)
        self.service.close(timeout_s=1.0)


def _name(selection: Selection) -> str:
    """A folder's own, without where it is."""
    files = selection.files
    is_folder = files.repo is None and files.name != BUILT_IN
    return files.directory.absolute().name if is_folder else files.name


def _gone(what: str, error: LocalLLMError) -> RequestError:
    """Of a bug, clients are told no more than that."""
    headers = {"x-should-retry": "false"}
    why, fix = ("a bug in localllm", "") if isinstance(error, BugError) else (f"{error.what}; {error.why}", error.fix)
    return RequestError(503, what, why=why, fix=fix, name=error.code, headers=headers)
