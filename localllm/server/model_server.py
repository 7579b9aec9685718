"""The models of one server as HTTP requests use them: a place for each answer, grammars that are checked, streams."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localllm.chat.thoughts import may_think
from localllm.config import format_bytes
from localllm.engine.validation import require_same
from localllm.errors import EngineGoneError, Fix, GrammarError, LocalLLMError, TemplateError
from localllm.runtime.model_pool import ModelPool
from localllm.runtime.served_model import AskedModel, ServedModel
from localllm.server.access_log import Metrics
from localllm.server.cascade import Cascade, CascadeStage
from localllm.server.errors import RequestError, busy
from localllm.server.generation_request import (
    GenerationRequest,
    PreparedRequest,
    joined,
    no_form,
    prepare,
    under_preset,
)
from localllm.server.stream import GenerationStream
from localllm.server.tools.tool_grammars import schema_source
from localllm.settings import EngineConfig
from localllm.text.chat_template import ChatTemplate
from localllm.text.grammar.definition import defined
from localllm.text.grammar.grammar import Grammar

if TYPE_CHECKING:
    from localllm.chat.cascade import Tried
    from localllm.engine.engine_info import LoadedEngine
    from localllm.engine.request import AdapterRef, Pooling
    from localllm.runtime.engine_handle import EngineHandle

_NOTICED_S = 30.0  # from the death of a process to the end of its socket it is milliseconds, but on a busy machine


AT_ONCE = 2
_MOST_WAITING = 16  # beside those: of ones that explode, for ten seconds
_MOST_KEPT = 32  # as an engine keeps them
_MOST_VERDICTS = 256  # of schemas by themselves: twice a request's tools


@dataclass(frozen=True)
class Capacity:
    """parallel: answers that a model computes at once. queue: that may wait beside them."""

    parallel: int = 8
    queue: int = 64


class GrammarChecks:
    """Checks of new grammars, a few at once, off the server's loop. A request without a grammar, or with a known one,
    does not wait for them. Keys name a grammar and its model. off_loop: for cheap checks."""

    def __init__(self, off_loop: Callable[[Callable[[], object]], Awaitable[object]]) -> None:
        self._off_loop = off_loop
        self._threads = ThreadPoolExecutor(AT_ONCE, "localllm-trial")
        self._under_way: dict[Hashable, asyncio.Future[Any]] = {}
        self._verdicts: dict[Hashable, GrammarError | None] = {}
        self._passed: dict[Hashable, None] = {}

    async def check(self, key: Hashable, check: Callable[[], object]) -> None:
        """Run the check; other requests for the same new grammar wait for the first. Raises what `check` does, and
        RequestError where too many wait."""
        while (other := self._under_way.get(key)) is not None:
            await asyncio.wait([other])
            error = None if other.cancelled() else other.exception()
            if isinstance(error, GrammarError):  # one error for all would keep the frames of each
                raise GrammarError(error.what, why=error.why, fix=error.fixes)
        if key in self._passed:  # kept by the engine, and cheap to check once more
            await self._off_loop(check)
            return
        if len(self._under_way) >= AT_ONCE + _MOST_WAITING:
            why = f"{len(self._under_way)} new grammars are being checked, or wait for that"
            raise busy("the server is overloaded", why)

        def ended(trial: asyncio.Future[Any]) -> None:
            del self._under_way[key]
            if not trial.cancelled() and trial.exception() is None:
                _keep(self._passed, key, None, _MOST_KEPT)

        trial = asyncio.get_running_loop().run_in_executor(self._threads, check)
        self._under_way[key] = trial
        trial.add_done_callback(ended)
        await asyncio.shield(trial)

    async def verdict(self, key: Hashable, check: Callable[[], object]) -> GrammarError | None:
        """Return the grammar's error, or None; both are remembered. Raises as `check` for the rest."""
        if key not in self._verdicts:
            found = None
            try:
                await self.check(key, check)
            except GrammarError as error:
                found = GrammarError(error.what, why=error.why, fix=error.fixes)
            _keep(self._verdicts, key, found, _MOST_VERDICTS)
        return self._verdicts.get(key)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _keep(known: dict[Hashable, Any], key: Hashable, value: object, most: int) -> None:
    """Keep the value; what was kept first goes where there are too many."""
    known[key] = value
    while len(known) > most:
        del known[next(iter(known))]


class ModelServer:
    """A pool of models, and how much is asked of each at once. pooling: how embeddings are pooled. cascade: of some of
    the models, where there is one."""

    def __init__(
        self, pool: ModelPool, capacity: Capacity, pooling: Pooling = "mean", cascade: Cascade | None = None
    ) -> None:
        self.pool = pool
        self.cascade = cascade
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

    async def asked(self, name: str | None, keep_s: float | None, tried: list[Tried]) -> AskedModel:
        """As `named`, loaded. Raises RequestError, too, for a preset that wants another engine than the model's."""
        asked = await self.named(name, tried)
        await self.make_ready(asked.served, keep_s)
        await refuse_other_engine(asked)
        return asked

    async def named(self, name: str | None, tried: list[Tried]) -> AskedModel:
        """Return a model with the settings that its name stands for. tried: as `Cascade.stage` has it. Raises as
        `ModelPool.asked`, and RequestError."""
        if self.cascade is not None and self.cascade.has(name):
            return self.cascade.stage(tried)
        if self.cascade is not None and self.cascade.has((name or "").partition(":")[0]):
            what, why = "a cascade takes no adapter", "an adapter fits one model"
            raise RequestError(400, what, why=why, param="model", name="unsupported_value")
        return await self.pool.asked(name)

    async def make_ready(self, model: ServedModel, keep_s: float | None = None) -> None:
        """As `model`, for one that was found."""
        if not self.pool.on_demand:
            if keep_s == 0:
                why = "it is one of several replicas, which stay loaded while the server runs"
                raise RequestError(400, "the model is not unloaded", why=why, param="keep_alive")
            keep_s = None
        await self.pool.ready(model, keep_s)

    def take_places(self, model: ServedModel, count: int) -> Callable[[], None]:
        """Take places for so many answers; return what gives them back. Raises RequestError where there are fewer."""
        most = self.capacity.parallel + self.capacity.queue
        if count > most:
            what, why = f"the request is for {count} answers at once", f"this server accepts at most {most}"
            raise RequestError(400, what, why=why, fix="request fewer", param="n", name="invalid_value")
        if model.num_open + count > most:
            why = f"{model.num_open} of at most {most} answers are being computed or wait"
            raise busy("the server is overloaded", why)
        model.num_open += count

        def give_back() -> None:
            model.num_open -= count
            if not model.num_open:
                self.pool.residents.touch(model)

        return give_back

    async def ask(self, asked: AskedModel, *requests: GenerationRequest) -> GenerationStream:
        """Begin to answer all requests, or none. Raises RequestError where too many wait, what `prepare` does, and
        UnsureError."""
        if isinstance(asked, CascadeStage):
            return await asked.answer(partial(self._ask, asked), requests)
        return await self._ask(asked, *requests)

    async def _ask(self, asked: AskedModel, *requests: GenerationRequest) -> GenerationStream:
        model, preset = asked.served, asked.selection.preset
        adapters = await self.adapters_of(asked)
        places = self.take_places(model, sum(each.best_of.rows(each.n) for each in requests))
        wanted = [replace(under_preset(each, preset), adapters=adapters) for each in requests]
        return await self.answer(model, wanted, places)

    async def adapters_of(self, asked: AskedModel) -> tuple[AdapterRef, ...]:
        """Return the adapters that a model's name stands for. Raises AdapterError."""
        return await self.pool.on_disk(asked.selection.adapters) if asked.selection.settings.adapter else ()

    async def answer(
        self, model: ServedModel, requests: Sequence[GenerationRequest], closed: Callable[[], None]
    ) -> GenerationStream:
        """As `ask`, in places that were taken before. closed: called in any case, when they are not needed any more."""
        try:
            try:
                return await self._stream(model, requests, closed)
            except EngineGoneError:  # it was killed before anything was emitted: the next request has it started anew
                if model.handle is not None:
                    # A thread that writes to it may be told before the one that reads.
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(asyncio.to_thread(model.handle.wait_ended), _NOTICED_S)
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

        contents = engine.contents

        async def renewed() -> EngineHandle:
            """Raises ModelChangedError where the files are others than those that the request was made for."""
            require_same(contents, (await self.pool.ready(model)).contents)
            return model.loaded_handle()

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
            if tools is None or tools.unheld:
                raise no_form(request, error) from None
            unheld: dict[str, GrammarError] = {}  # why no call can be held to the schema of a tool, checked by itself
            for tool in tools.choices:
                schema = Grammar("json_schema", schema_source(tool))
                if (of_tool := await self.grammar_checks.verdict(schema, partial(defined, schema))) is not None:
                    unheld[tool.name] = of_tool
            if not unheld:
                raise no_form(request, error) from None
            request = replace(request, tools=replace(tools, unheld=unheld))
            prepared = await self.pool.off_loop(lambda: prepare(request, engine))
            return await self._checked(model, request, prepared, engine)
        return prepared

    def close(self) -> None:
        """End what runs, and wait a moment for it, when the loop has ended."""
        self.pool.close()
        self.grammar_checks.close()


async def refuse_other_engine(asked: AskedModel) -> None:
    """Raises RequestError for a preset whose settings the model's engine does not have: it is loaded once."""
    preset = asked.selection.preset
    if preset is None:
        return
    names = [each.name for each in fields(EngineConfig) if each.name != "ctx"]  # which a request may have less of
    wanted = {name: preset.values[name] for name in names if name in preset.values}
    other = await other_settings(asked.served, wanted)
    if other is None and preset.values.get("overflow") == "grow":
        other = "the contexts of a server do not grow, and this preset has overflow = grow"
    if other is not None:
        fix = Fix.command("serve", preset.name) if wanted else Fix.command("run", preset.name)
        what = f"the preset {preset.name} cannot be served"
        raise RequestError(400, what, why=other, fix=fix, param="model", name="unsupported_value")


async def other_settings(served: ServedModel, wanted: Mapping[str, Any]) -> str | None:
    """Return how the engine differs from what is wanted: by its settings, or by what it chose where they are open."""
    engine, became = served.engine_if_loaded, dict[str, Any]()
    if wanted and engine is not None:
        with contextlib.suppress(LocalLLMError):  # it has just been killed
            facts = await asyncio.to_thread(engine.facts)
            device = "cuda" if "vram" in facts.limits else "cpu"
            weights = facts.weights.partition("-")[0]
            became = {"weights": weights, "kv": facts.kv, "ctx": facts.ctx, "device": device}
    for name, value in wanted.items():
        has = getattr(served.selection.settings, name, None)
        is_open = has in (None, "auto")
        if value not in (has, became.get(name, has)):
            what = became.get(name, "") if is_open else has
            differs = f"has {name} {_shown(name, what)}" if what else f"chooses {name} itself"
            return f"the server's engine {differs}, and this command asks for {_shown(name, value)}"
    return None


def _shown(name: str, value: Any) -> str:
    return format_bytes(value) if value and name in ("ram", "vram", "cache_disk") else str(value)


def capabilities(directory: Path) -> list[str]:
    """Return those of the model in that folder, in Ollama's words; its files are read.

    Any model that chats takes tools: they are described in words where its template has none. "embedding" is left out,
    although every model embeds: to Ollama's own program it means that a model does nothing else.
    """
    try:
        template = ChatTemplate.load(directory)
    except TemplateError:  # it has none, or a broken one, and goes on with texts
        return ["completion"]
    thinks = any(map(may_think, template.sources.values()))
    return ["completion", "tools", *(["thinking"] if thinks else [])]
