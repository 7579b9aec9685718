"""The models of one server as HTTP requests use them: a place for each answer, grammars that are checked, streams."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from localllm.engine.validation import require_same
from localllm.errors import EngineGoneError, GrammarError
from localllm.runtime.model_pool import ModelPool
from localllm.runtime.served_model import ServedModel
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
    from localllm.engine.request import Pooling
    from localllm.runtime.engine_handle import EngineHandle
    from localllm.server.tools.toolset import Toolset

_NOTICED_S = 30.0  # from the death of a process to the end of its socket it is milliseconds, but on a busy machine


@dataclass(frozen=True)
class Capacity:
    """parallel: answers that a model computes at once. queue: that may wait beside them."""

    parallel: int = 8
    queue: int = 64


class ModelServer:
    """A pool of models, and how much is asked of each at once. pooling: how embeddings are pooled."""

    def __init__(self, pool: ModelPool, capacity: Capacity, pooling: Pooling = "mean") -> None:
        self.pool = pool
        self.capacity = capacity
        self.pooling: Pooling = pooling
        self.metrics = Metrics()
        self.grammar_checks = GrammarChecks(pool.off_loop)

    async def model(self, name: str | None, keep_s: float | None = None) -> ServedModel:
        """Return the model of that name, loaded. keep_s: for which it then stays unused; None: as before. Raises as
        `ModelPool.find` and `ModelPool.ready`."""
        model = await self.pool.find(name)
        await self.make_ready(model, keep_s)
        return model

    async def make_ready(self, model: ServedModel, keep_s: float | None = None) -> None:
        """As `model`, for one that was found."""
        if not self.pool.on_demand:
            if keep_s == 0:
                why = "it is one of several replicas, which stay as long as the server runs"
                raise RequestError(400, "the model is not unloaded", why=why, param="keep_alive")
            keep_s = None
        await self.pool.ready(model, keep_s)

    def take_places(self, model: ServedModel, count: int) -> Callable[[], None]:
        """Take places for so many answers; return what gives them back. Raises RequestError where there are fewer."""
        most = self.capacity.parallel + self.capacity.queue
        if count > most:
            what, why = f"{count} answers are asked for at once", f"this server takes on {most}"
            raise RequestError(400, what, why=why, fix="ask for fewer", param="n", name="invalid_value")
        if model.num_open + count > most:
            why = f"{model.num_open} of at most {most} answers are being computed or wait"
            raise busy("the server has too much to do", why)
        model.num_open += count

        def give_back() -> None:
            model.num_open -= count
            if not model.num_open:
                self.pool.residents.touch(model)

        return give_back

    async def ask(self, model: ServedModel, *requests: GenerationRequest) -> GenerationStream:
        """Begin to answer all requests, or none. Raises RequestError where too many wait, and what `prepare` does."""
        places = self.take_places(model, sum(each.best_of.rows(each.n) for each in requests))
        return await self.answer(model, requests, places)

    async def answer(
        self, model: ServedModel, requests: Sequence[GenerationRequest], closed: Callable[[], None]
    ) -> GenerationStream:
        """As `ask`, in places that were taken before. closed: called in any case, when they are not needed any more."""
        try:
            try:
                return await self._stream(model, requests, closed)
            except EngineGoneError:  # it was killed before anything was emitted: the next request has it started anew
                await _wait_noticed(model)
                return await self._stream(model, requests, closed)
        except BaseException:
            closed()
            raise

    async def _stream(
        self, model: ServedModel, requests: Sequence[GenerationRequest], closed: Callable[[], None]
    ) -> GenerationStream:
        # It may have left since its name was asked for; while it has these places it does not.
        engine = model.engine_if_loaded or await self.pool.ready(model)
        prepared = await self.pool.off_loop(lambda: [prepare(each, engine) for each in requests])
        prepared = [await self._checked(model, *pair, engine) for pair in zip(requests, prepared, strict=True)]
        renewed = partial(self._renewed, model, engine.contents)
        return GenerationStream(model.loaded_handle(), joined(prepared), closed, self.metrics.count_answer, renewed)

    async def _checked(
        self, model: ServedModel, request: GenerationRequest, prepared: PreparedRequest, engine: LoadedEngine
    ) -> PreparedRequest:
        """Return the same, or with other tools that take any object where the schema of one cannot be honoured. Raises
        RequestError for a grammar that cannot be."""
        own = prepared.requests[0]
        if own.grammar is None:
            return prepared
        try:
            await self.grammar_checks.check((model.name, own.grammar), lambda: engine.check(own))
        except GrammarError as error:
            tools = request.tools
            if tools is None or tools.unheld or not (unheld := await self._unheld(tools)):
                raise no_form(request, error) from None
            request = replace(request, tools=replace(tools, unheld=unheld))
            prepared = await self.pool.off_loop(lambda: prepare(request, engine))
            return await self._checked(model, request, prepared, engine)
        return prepared

    async def _unheld(self, tools: Toolset) -> dict[str, GrammarError]:
        """Return why no call can be held to the schemas of some tools, each checked by itself."""
        found: dict[str, GrammarError] = {}
        for tool in tools.choices:
            schema = Grammar("json_schema", schema_source(tool))
            error = await self.grammar_checks.verdict(schema, partial(defined, schema))
            if error is not None:
                found[tool.name] = error
        return found

    async def _renewed(self, model: ServedModel, contents: str) -> EngineHandle:
        """Return the handle of another engine in the place of one that has ended. contents: of the files that the
        request was made for. Raises as `ModelPool.ready`; ModelChangedError where they are others now."""
        require_same(contents, (await self.pool.ready(model)).contents)
        return model.loaded_handle()

    def close(self) -> None:
        """End what runs, and wait a moment for it, when the loop has ended."""
        self.pool.close()
        self.grammar_checks.close()


async def _wait_noticed(model: ServedModel) -> None:
    """Wait until the pool knows that the engine is gone: a thread that writes to it may be told before the one that
    reads."""
    if model.handle is not None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.to_thread(model.handle.wait_ended), _NOTICED_S)
