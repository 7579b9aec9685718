"""A model that is served: by which names, whether it is loaded, and how many requests it takes on at once."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

from localllm.engine.engine_info import EngineFacts
from localllm.engine.validation import require_same
from localllm.errors import (
    BugError,
    EngineClosedError,
    EngineGoneError,
    GrammarError,
    LocalLLMError,
    ModelChangedError,
    ModelNotFoundError,
)
from localllm.registry import BUILT_IN
from localllm.runtime.engine_client import EngineClient
from localllm.runtime.selection import Selection, told_of
from localllm.server.errors import RequestError, busy
from localllm.server.generation_request import GenerationRequest, PreparedRequest, joined, no_form, prepare
from localllm.server.grammar_checks import GrammarChecks
from localllm.server.metrics import Metrics
from localllm.server.stream import GenerationStream
from localllm.server.tools.grammars import schema_source
from localllm.text.grammar.definition import defined
from localllm.text.grammar.grammar import Grammar

if TYPE_CHECKING:
    from localllm.engine.engine_info import LoadedEngine
    from localllm.engine.request import Pooling, SamplingParams
    from localllm.hub import ModelFiles
    from localllm.runtime.engine_handle import EngineHandle
    from localllm.server.tools.toolset import Toolset

T = TypeVar("T")

LOAD_WAIT_S = 120.0  # for which a request waits for its model; libraries give up after 60 to 600 s of silence
_NOTICED_S = 30.0  # from the death of a process to the end of its socket it is milliseconds, but on a busy machine


@dataclass(frozen=True)
class Capacity:
    """parallel: answers that a model computes at once. queue: that may wait beside them."""

    parallel: int = 8
    queue: int = 64


class House(Protocol):
    """What a model needs of the server that it is in."""

    @property
    def metrics(self) -> Metrics: ...

    @property
    def capacity(self) -> Capacity: ...

    @property
    def pooling(self) -> Pooling:
        """What an embedding is made of."""
        ...

    @property
    def trials(self) -> GrammarChecks: ...

    async def load(self, served: Served) -> None:
        """Returns when it is loaded. Raises what keeps it from that."""
        ...

    async def has_changed(self, served: Served) -> bool:
        """Whether its files are others than those that it was loaded from. Raises ModelNotFoundError."""
        ...

    def left_alone(self, served: Served) -> None:
        """Its last answer has ended."""
        ...

    async def off_loop(self, work: Callable[[], T]) -> T: ...


class Served:
    """One model, loaded or not."""

    def __init__(
        self, house: House, selection: Selection, aliases: Sequence[str] = (), taken: Collection[str] = ()
    ) -> None:
        """aliases: more names for it. taken: names of others, in small letters."""
        self.house = house
        self.selection = selection
        entry = None if _is_pinned(selection) else selection.files.entry
        wanted = dict.fromkeys((own_name(selection), *aliases, *(entry.aliases if entry else ())))
        free = [name for name in wanted if name.casefold() not in taken]
        self.names = tuple(free if own_name(selection) in free else [_longer_name(selection, taken), *free])
        self.was = EngineFacts(0, "", "")  # as it was last loaded
        self.num_open = 0  # answers that were asked for and have not ended
        self.service: EngineHandle | None = None
        self.is_leaving = False  # it makes room for another as soon as nothing is asked of it
        self.last_used = 0.0  # as time.monotonic has it
        self.keep_s: float | None = None  # for which it stays when nobody asks for it; None: for good

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def capacity(self) -> Capacity:
        return self.house.capacity

    @property
    def pooling(self) -> Pooling:
        return self.house.pooling

    def has(self, name: str) -> bool:
        """Whether the model is called so, in letters of whatever size."""
        repo = None if _is_pinned(self.selection) else self.selection.files.repo
        return name.casefold() in {each.casefold() for each in (*self.names, repo or self.name)}

    def is_of(self, files: ModelFiles) -> bool:
        """Whether it is that model, of whatever commit."""
        own = self.selection.files
        return own.directory == files.directory or (
            own.repo is not None and (own.repo, own.name) == (files.repo, files.name)
        )

    @property
    def evicts(self) -> bool:
        """Whether the oldest turns leave a conversation that is too long."""
        return self.selection.settings.overflow == "evict"

    @property
    def is_loading(self) -> bool:
        return self.service is not None and not self.service.is_settled

    @property
    def is_doubtful(self) -> bool:
        """Whether its engine has not moved on for long though somebody waits for it."""
        return isinstance(self.service, EngineClient) and self.service.is_doubtful

    @property
    def engine_if_loaded(self) -> LoadedEngine | None:
        """None while it is not, and where it cannot be."""
        service = self.service
        if service is None or not service.is_settled:
            return None
        try:
            return service.wait_loaded(0)
        except Exception:
            return None

    def engine(self) -> LoadedEngine:
        """Raises RequestError where it is not loaded."""
        engine = self.engine_if_loaded
        if engine is None:
            why = "it takes seconds, or minutes where it is packed first"
            raise busy(f"{self.name} is being loaded", why, "loading")
        return engine

    async def ready(self) -> LoadedEngine:
        """The engine, when it is loaded. Raises RequestError where it cannot be, or takes very long."""
        self.last_used = time.monotonic()
        try:
            async with asyncio.timeout(LOAD_WAIT_S):
                while not await self._is_current():  # who came before may have unloaded it again
                    await self.load()
        except TimeoutError:
            why = f"it has taken {LOAD_WAIT_S:.0f} s so far"
            raise busy(f"{self.name} is being loaded", why, "loading") from None
        except (RequestError, EngineClosedError, EngineGoneError, ModelChangedError, ModelNotFoundError):
            raise
        except Exception as error:
            known = told_of(error, self.selection.files, self.selection.resolved)
            raise _gone(f"{self.name} cannot be used", known) from error
        return self.engine()

    async def _is_current(self) -> bool:
        """Whether it is loaded from the files as they are, when this returns: it may leave while they are looked at."""
        if self.is_leaving or self.engine_if_loaded is None or await self.house.has_changed(self):
            return False
        return not self.is_leaving and self.engine_if_loaded is not None

    async def load(self) -> None:
        """However long it takes. Raises what keeps it from that."""
        try:
            await self.house.load(self)
        except EngineGoneError:  # its process was killed meanwhile, which is no reason that it must be again
            await self.house.load(self)

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
            if not self.num_open:
                self.house.left_alone(self)

        return give_back

    async def ask(self, *asks: GenerationRequest) -> GenerationStream:
        """Has them answered, all or none. Raises RequestError where too many wait, and what `prepare` does."""
        return await self.answer(asks, self.take_places(sum(ask.best_of.rows(ask.n) for ask in asks)))

    async def answer(self, asks: Sequence[GenerationRequest], closed: Callable[[], None]) -> GenerationStream:
        """As `ask`, in places that were taken before. closed: called in any case, when they are not needed any more."""
        try:
            try:
                return await self._answers(asks, closed)
            except EngineGoneError:  # it was killed before anything was said: whoever asks next has it started anew
                await self._noticed()
                return await self._answers(asks, closed)
        except BaseException:
            closed()
            raise

    async def _answers(self, asks: Sequence[GenerationRequest], closed: Callable[[], None]) -> GenerationStream:
        # It may have left since its name was asked for; while it has these places it does not.
        engine = self.engine_if_loaded or await self.ready()
        prepared = await self.off_loop(lambda: [prepare(ask, engine) for ask in asks])
        prepared = [await self._tried(ask, each, engine) for ask, each in zip(asks, prepared, strict=True)]
        count = self.house.metrics.count_answer
        renewed = partial(self._renewed, engine.contents)
        return GenerationStream(self._loaded_service(), joined(prepared), closed, count, renewed)

    async def _noticed(self) -> None:
        """Until the server knows that the engine is gone, which who writes to it may be told before who reads."""
        if self.service is None:
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.to_thread(self.service.wait_ended), _NOTICED_S)

    async def _tried(self, ask: GenerationRequest, asked: PreparedRequest, engine: LoadedEngine) -> PreparedRequest:
        """The same, or with other tools that take any object where the schema of one is what cannot be honoured. Raises
        RequestError for a grammar that cannot be."""
        request = asked.requests[0]
        if request.grammar is None:
            return asked
        try:
            await self.house.trials.check((self.name, request.grammar), lambda: engine.check(request))
        except GrammarError as error:
            if ask.tools is None or ask.tools.unheld or not (unheld := await self._unheld(ask.tools)):
                raise no_form(ask, error) from None
            ask = replace(ask, tools=replace(ask.tools, unheld=unheld))
            return await self._tried(ask, await self.off_loop(lambda: prepare(ask, engine)), engine)
        return asked

    async def _unheld(self, tools: Toolset) -> dict[str, GrammarError]:
        """Why no call can be held to the schemas of some, each tried by itself."""
        found: dict[str, GrammarError] = {}
        for tool in tools.choices:
            schema = Grammar("json_schema", schema_source(tool))
            error = await self.house.trials.verdict(schema, partial(defined, schema))
            if error is not None:
                found[tool.name] = error
        return found

    async def _renewed(self, contents: str) -> EngineHandle:
        """Of an engine whose process has ended. contents: of the files that the request was made for. Raises as
        `ready`; ModelChangedError where they are others now."""
        require_same(contents, (await self.ready()).contents)
        return self._loaded_service()

    def _loaded_service(self) -> EngineHandle:
        if self.service is None:
            raise EngineClosedError("the engine has been closed")
        return self.service

    def off_loop(self, work: Callable[[], T]) -> Awaitable[T]:
        """What it gives, computed while the loop goes on: templates and tokenizers take milliseconds, or more."""
        return self.house.off_loop(work)


def own_name(selection: Selection) -> str:
    """A folder's own, without where it is."""
    files = selection.files
    is_folder = files.repo is None and files.name != BUILT_IN
    return files.directory.absolute().name if is_folder else files.name


def _longer_name(selection: Selection, taken: Collection[str]) -> str:
    """With as many of the folders that it is in as tell it apart."""
    parts = selection.files.directory.absolute().parts[1:]
    names = ("/".join(parts[-count:]) for count in range(2, len(parts) + 1))
    return next((name for name in names if name.casefold() not in taken), str(selection.files.directory.absolute()))


def _is_pinned(selection: Selection) -> bool:
    """Whether it is a revision that was asked for by name: other names are another's."""
    return selection.files.repo is not None and "@" in selection.files.name


def _gone(what: str, error: LocalLLMError) -> RequestError:
    """Of a bug, clients are told no more than that."""
    headers = {"x-should-retry": "false"}
    why, fix = ("a bug in localllm", "") if isinstance(error, BugError) else (f"{error.what}; {error.why}", error.fix)
    return RequestError(503, what, why=why, fix=fix, name=error.code, headers=headers)
