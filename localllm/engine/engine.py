"""The engine: requests in, events out. Each `step` is one forward; everything else is bookkeeping around it.

Not a thread and not a server: whoever calls `step` owns the device. `submit` and `abort` may be called from any thread.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from functools import partial
from pathlib import Path

from localllm import hub
from localllm.cache.kv_format import choose_format, dense_heads_note
from localllm.cache.layer_group import Spill
from localllm.cache.page_folder import kv_root
from localllm.cache.prefix import PrefixCache
from localllm.engine.adaptable_layers import AdaptableLayers
from localllm.engine.adapters import AdapterCache, adapter_bytes
from localllm.engine.card import fault_of, faults_told
from localllm.engine.engine_info import EngineFacts, EngineStatus, SlotFacts
from localllm.engine.events import Event, FinishedEvent, ignore
from localllm.engine.kernel_check import note_device, scope_of
from localllm.engine.kv_allocator import KVAllocator
from localllm.engine.loader import DraftModel, LoadedModel, Loading, Watcher
from localllm.engine.perplexity import Perplexity, perplexity
from localllm.engine.planner import ModelPlanner
from localllm.engine.prefix_config import IN_POOLS, UNKNOWN_SOURCE, Computed, KVReuse
from localllm.engine.request import Request, SamplingParams, require_grammar_alone, require_ids
from localllm.engine.residency import Residency
from localllm.engine.runner import BATCH_ROWS, ModelRunner
from localllm.engine.sampler import breaker_ids
from localllm.engine.scheduler import Scheduler
from localllm.engine.sequence import Sequence
from localllm.engine.speculative.choice import Speculate
from localllm.engine.speculative.head_model import HeadModel
from localllm.engine.speculative.speculator import speculation
from localllm.engine.step import StepLoop
from localllm.engine.step_types import Limits
from localllm.engine.validation import Prompt, encode_prompt, is_chat, require_fit, require_unchanged
from localllm.errors import ContextOverflowError, DoesNotFitError, Fix, TemplateError, UsageError
from localllm.hub.packed import source_id
from localllm.models.architecture import ModelConfig
from localllm.models.decoder import Decoder
from localllm.models.families import load_config
from localllm.models.load import Progress
from localllm.offload.placement import ExpertCount
from localllm.offload.planner.machine import Held
from localllm.offload.planner.plan import JobShape, Plan
from localllm.settings import EngineConfig
from localllm.text.chat_template import ChatTemplate, end_of_turn_id
from localllm.text.detokenizer import Detokenizer
from localllm.text.grammar.compiled import Grammars
from localllm.text.grammar.grammar import Grammar
from localllm.text.tokenizer import Tokenizer


class Engine(StepLoop):
    def __init__(
        self,
        loaded: LoadedModel,
        tokenizer: Tokenizer,
        template: ChatTemplate | TemplateError | None = None,
        *,
        kv: str = "auto",
        limits: Limits | None = None,
        reuse: KVReuse = IN_POOLS,
        computed: Computed = UNKNOWN_SOURCE,
        speculate: Speculate = Speculate("off"),  # noqa: B008
        note: Callable[[str], None] = ignore,
        chosen_pages: int | None = None,
    ) -> None:
        """Serve a loaded model.

        limits: what runs at once, within the plan's memory if there is a plan.
        reuse: what later prompts find of earlier ones, computed with this checkpoint and recipe.
        speculate: who drafts tokens.
        note: called with what is worth a line.
        chosen_pages: as `EngineConfig` has it.
        """
        self.tokenizer, self._template = tokenizer, template
        model, plan, self.ctx = loaded.decoder, loaded.plan, loaded.ctx
        self.contents, self.plan, self.fixes_for = "", plan, loaded.fixes_for
        self._held = loaded.held
        self.kv_format = choose_format(kv, model.config.kv_shapes, model.dtype.itemsize)
        residency = Residency(
            model,
            self.kv_format,
            plan.batch_rows if plan else BATCH_ROWS,
            loaded.placed,
            lambda: self.planned(self.ctx),
            plan,
            note,
            None if loaded.resident_tokens is None else Spill(kv_root(), loaded.resident_tokens, model.device),
            chosen_pages,
            loaded.eviction,
        )
        self.adapters = AdapterCache(AdaptableLayers.of(model), lambda: residency.is_native, adapter_bytes(plan))
        self._replan, self._limits = loaded.replan, limits or Limits()
        end_of_turn = end_of_turn_id(template, tokenizer) if isinstance(template, ChatTemplate) else None
        eos = (*model.config.eos_token_ids, tokenizer.eos_token_id, end_of_turn)
        eos_ids = frozenset(token_id for token_id in eos if token_id is not None)
        super().__init__(
            residency,
            Scheduler(self._limits.within(plan), KVAllocator(residency, reuse, computed, plan, self.adapters, eos_ids)),
            speculation(speculate, residency, plan, loaded.new_drafter),
            eos_ids,
            tokenizer.token_text,
            computed.name,
        )
        looks_ahead = model.device.type != "cpu"  # there the cores are the model's: a thread more made a step longer
        self.grammars = Grammars(tokenizer, self.eos_ids, model.config.vocab_size, looks_ahead=looks_ahead)
        self._request_ids = itertools.count()
        self._inboxes: dict[int, deque[Event]] = {}

    @classmethod
    def load(
        cls,
        model: str | Path | hub.ModelFiles = "tiny",
        config: EngineConfig = EngineConfig(),  # noqa: B008
        *,
        limits: Limits | None = None,
        job: JobShape | None = None,
        watcher: Watcher | None = None,
        reuse: KVReuse = IN_POOLS,
    ) -> Engine:
        """Load a model by name, `org/repo`, directory, or files that were located before.

        config: formats, context, memory and drafts. What does not fit into `ram` and `vram` is placed one tier down, at
            last on the disk, from where it is read at every step. Packed weights are made at first use.
        limits: what runs at once. watcher: hears of what takes long. reuse: what is cached of keys and values.
        job: many prompts; memory is then shared out for the most tokens a second of all of them together, not for the
            fastest single one.

        Raises ModelNotFoundError, CheckpointError, ModelChangedError (files are written meanwhile), UsageError,
        UnsupportedModelError, DoesNotFitError; LocalLLMError where a packed model cannot be written.
        """
        started, watcher, speculate = time.perf_counter(), watcher or Watcher(), Speculate.of(config)
        files = model if isinstance(model, hub.ModelFiles) else hub.locate(str(model))
        contents, model_config = hub.contents(files.directory), load_config(files.directory)
        tokenizer, reuse = Tokenizer.load(files.directory), replace(reuse, moves=config.reuse == "chunks")
        planner = ModelPlanner.of(files.name, files, model_config, config, job, watcher.measuring)
        second = DraftModel.of(speculate.draft_model, tokenizer, planner)
        draft = second or HeadModel.of(model_config, files, speculate, planner)
        scopes = [scope_of(model_config, planner.recipe, planner.wanted.kv, planner.torch_dtype, config)]
        scopes += [] if second is None else [second.check_scope]
        note_device(planner.torch_device, scopes, watcher.measuring, watcher.noting)
        if note := dense_heads_note(config.kv, model_config.kv_shapes, planner.dtype):
            watcher.noting(note)
        planner = planner if draft is None else replace(planner, draft=draft.shape)
        with faults_told(planner.torch_device, files.name):
            loaded = Loading(planner, files, watcher, draft).load(model_config)
            engine = cls(
                loaded,
                tokenizer,
                ChatTemplate.load_or_why_not(files.directory, tokenizer),
                kv=planner.wanted.kv,
                limits=limits or (Limits() if job is None else Limits(max_sequences=job.sequences)),
                reuse=reuse,
                computed=Computed(source_id(files), planner.recipe.name, files.name),
                speculate=speculate,
                note=watcher.noting,
                chosen_pages=config.chosen_pages,
            )
            try:
                require_unchanged(files.directory, contents)
                engine.residency.warm_up(watcher.measuring)
            except BaseException:  # nobody has the engine yet who would close it
                engine.close()
                raise
        engine.load_s, engine.contents = time.perf_counter() - started, contents
        return engine

    def close(self) -> None:
        """End what reads blocks from the disk, and save how well the plan came true. The engine is not used after."""
        try:
            self._held.close()
        except RuntimeError:
            if not fault_of(self.residency.device):  # else nothing can be given back any more, and all of it has gone
                raise
        self._scores.keep()
        self.residency.kv_pages.close()
        self.speculation.close()
        self.grammars.close()
        self.kv_allocator.close()

    def generate(
        self, prompt: Prompt, sampling: SamplingParams | None = None, *, grammar: Grammar | None = None
    ) -> Iterator[Event]:
        """Answer one prompt: a text to continue, token ids, or chat messages; in the form of a grammar, if there is
        one. Closing the iterator stops the request.

        Several iterators may be read in turn; their requests run as one batch. Who calls `submit` and `step` himself
        does not use this beside them. A request that cannot run raises with the first event that is asked for.
        """
        ids = tuple(self.encode(prompt))
        request = Request(ids, sampling or SamplingParams(), opens_turn=is_chat(prompt), grammar=grammar)
        request_id = self.submit(request)
        inbox = self._inboxes[request_id] = deque[Event]()
        try:
            while inbox or self.has_work or self.scheduler.has_aborted:
                if not inbox:
                    self._deliver(self.step())
                    continue
                event = inbox.popleft()
                yield event
                if isinstance(event, FinishedEvent):
                    return
        finally:
            del self._inboxes[request_id]
            self.abort(request_id)
            self._deliver(self._drop_aborted())

    def _deliver(self, events: SequenceOf[Event]) -> None:
        """Give events to the iterators of `generate`; those of other requests are dropped."""
        for event in events:
            if event.request_id in self._inboxes:
                self._inboxes[event.request_id].append(event)

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the ids of a prompt: a text, with the BOS token where the model wants one; ids; or chat messages."""
        return encode_prompt(prompt, self.tokenizer, lambda: self.template)

    @property
    def template(self) -> ChatTemplate:
        """The model's chat template. Raises TemplateError where it has none, or a broken one: text can still go on."""
        if isinstance(self._template, ChatTemplate):
            return self._template
        if self._template is None:
            raise TemplateError("this engine was given no chat template", fix="continue a plain text")
        raise self._template.with_traceback(None)  # it is raised again and again, and would keep each caller's frames

    def submit(self, request: Request) -> int:
        """Queue a request; its id marks its events. Raises as `check` before anything runs."""
        self.check(request)
        sampling, request_id = request.sampling, next(self._request_ids)
        detokenizer = self._detokenizer(request)
        grammar, constraint = request.grammar, None
        if grammar is not None:
            constraint = self.grammars.constraint(grammar, detokenizer.leading_spaces)
        new_sequence = partial(
            Sequence,
            request_id,
            request,
            seed=secrets.randbits(63) if sampling.seed is None else sampling.seed,
            ctx=self.ctx,
            breaker_ids=breaker_ids(sampling, self.tokenizer.encode),
            constraint=constraint,
        )
        sequence = new_sequence(detokenizer=detokenizer)
        sequence.adapters = self.adapters.check(request.adapters)
        if request.beams > 1:
            from localllm.engine.beam_search import BeamSearch, Ends

            ends = Ends(self.eos_ids, self.config.rope_switch_length, self.tokenizer.token_text)
            self._searches[request_id] = BeamSearch(
                sequence, ends, lambda: new_sequence(detokenizer=self._detokenizer(request)), self._detokenizer(request)
            )
        elif self.speculation.is_on:
            sequence.drafter = self.speculation.name
        self.scheduler.add(sequence)
        return request_id

    def check(self, request: Request) -> None:
        """Raise ContextOverflowError, UsageError or GrammarError for a request that cannot run. A grammar that is new
        is compiled, which takes up to a second."""
        require_fit(request, self.ctx, self.config, self.fixes_for)
        self.adapters.check(request.adapters)
        self.kv_allocator.require_movable(request)
        if request.beams > 1:
            from localllm.engine.beam_search import require_room

            require_room(request, self.ctx, self.scheduler.limits)
        if request.grammar is not None:
            require_grammar_alone(request)
            self.grammars.check(request.grammar, self._detokenizer(request).leading_spaces)

    def unload_adapter(self, path: str) -> int:
        """Give up an adapter as `AdapterCache.unload` does; from any thread."""
        return self.adapters.unload(path)

    def _detokenizer(self, request: Request) -> Detokenizer:
        behind = () if request.opens_turn else request.prompt_ids
        return Detokenizer(self.tokenizer, request.shown_ids, behind)

    @property
    def current_plan(self) -> Plan | None:
        """The plan the model is placed by, or None."""
        return self.residency.plan or self.plan

    def facts(self) -> EngineFacts:
        """Return how the model is placed now."""
        plan, host_bytes = self.current_plan, self.residency.host_bytes
        facts = EngineFacts(
            self.ctx, self.weights, self.kv_format.name, self.load_s, host_bytes=host_bytes, contents=self.contents
        )
        if plan is None:
            return facts
        if (experts := ExpertCount.of(self.residency.blocks)) is not None:
            uses = self.residency.expert_uses
            facts = replace(facts, num_experts=experts.total, experts_in_memory=experts.in_memory)
            facts = replace(facts, experts_tier=experts.tier, experts_wanted=uses.wanted, expert_hits=uses.hits)
        return replace(
            facts,
            weight_bytes=plan.shape.num_bytes,
            ledger={str(tier): dict(owners) for tier, owners in plan.ledger.items()},
            limits={str(tier): count for tier, count in plan.limits.items()},
            bound_by=plan.bound_by,
            streamed_bytes=plan.streamed_bytes,
        )

    def status(self) -> EngineStatus:
        """Return what the engine is doing; from any thread."""
        idle_s = time.monotonic() - self.scheduler.used_at
        slots = []
        for each in list(self.scheduler.running):
            num_prefilled = 0 if each.kv is None else min(each.kv.length, each.num_prompt_tokens)
            slots.append(SlotFacts(each.request_id, each.num_prompt_tokens, num_prefilled, each.num_completion_tokens))
        return EngineStatus(tuple(slots), self.scheduler.num_waiting, idle_s, self.adapters.names)

    def abort(self, request_id: int) -> None:
        """Stop a request between two blocks of the running forward; its last event says "cancelled"."""
        self.scheduler.abort(request_id)

    @property
    def config(self) -> ModelConfig:
        return self.residency.config

    @property
    def model(self) -> Decoder:
        return self.residency.model

    @property
    def runner(self) -> ModelRunner:
        return self.residency.runner

    @property
    def weights(self) -> str:
        """The name of the weights' recipe: "bf16", "int4-g64"."""
        return self.residency.weights

    @property
    def prefix(self) -> PrefixCache | None:
        """The cache of earlier prompts; None where nothing is reused."""
        return self.kv_allocator.prefix

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.num_waiting)

    def _prepare(self) -> list[Event]:
        """Do what is due between answers: blocks move, the context grows."""
        is_between = bool(self.scheduler.waiting) and not self.scheduler.running
        if is_between or self.residency.is_lost:  # also in the midst of an answer
            if (plan := self.residency.settle()) is not None:
                self.scheduler.limits = self._limits.within(plan)
            self.residency.restore()
        if not is_between:
            return []
        return self._grow(self.scheduler.waiting[0]) if self.scheduler.waiting[0].wants_growth else []

    def _grow(self, sequence: Sequence) -> list[Event]:
        """Make the context longer for a sequence that wants that, or let it do with what there is. Raises as
        `Residency.move`."""
        sequence.fit(self.ctx)  # another one may have made it longer since
        if not sequence.wants_growth:
            return []
        from localllm.engine.context_growth import grow_for

        try:
            grown = grow_for(self, sequence, ctx=self.ctx, planned=self.planned, fixes_for=self.fixes_for)
        except ContextOverflowError as error:
            return [self._fail(sequence, error)]
        if grown is not None:
            plan, event = grown
            self.ctx, self.scheduler.limits = plan.ctx, self._limits.within(plan)
            for waiting in self.scheduler.waiting:  # this one, and others of the same prompt: they need not wait for it
                if waiting.wants_growth:
                    waiting.fit(self.ctx)
        sequence.wants_growth = False
        return [] if grown is None else [event]

    def planned(self, ctx: int) -> Plan:
        """Return the best plan for this context in the memory of now. Raises DoesNotFitError."""
        if self._replan is None:
            raise DoesNotFitError("the context cannot grow", why="this engine was given its model without a plan")
        held = Held(self.residency.kv_host_bytes, self.residency.graph_bytes)
        return self._replan(ctx, self.residency.kv_pages.format.name, held)

    def perplexity(self, token_ids: SequenceOf[int], ctx: int | None = None, progress: Progress = ignore) -> Perplexity:
        """Return how well the model predicts a text; see `engine.perplexity`. Raises UsageError or
        ContextOverflowError."""
        if ctx is not None and ctx > self.ctx:
            what = f"a window of {ctx} tokens is longer than the context of {self.ctx}"
            raise UsageError(what, fix=Fix.flag("--ctx", self.ctx))
        require_ids(token_ids, self.config.vocab_size)
        return perplexity(self.runner, token_ids, ctx=ctx or self.ctx, new_kv=self.residency.new_kv, progress=progress)
