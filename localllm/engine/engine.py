"""The engine: requests in, events out. `step` does one forward; everything else is bookkeeping around it.

Not a thread and not a server: whoever calls `step` owns the device. `submit` and `abort` may be called from any thread.
"""

from __future__ import annotations

import dataclasses
import itertools
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from collections.abc import Set as SetOf
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from localllm import hub
from localllm.cache.kv_format import choose_format
from localllm.cache.prefix import PrefixCache
from localllm.engine.beam_search import BeamSearch, Ends, require_room
from localllm.engine.context_growth import grow_for
from localllm.engine.draft_loader import DraftModel
from localllm.engine.drawing import Outcome, Scheduled, compute, num_rows
from localllm.engine.engine_info import EngineFacts, EngineStatus
from localllm.engine.events import Event, FinishedEvent, PrefillEvent
from localllm.engine.kv_allocator import KVSupply
from localllm.engine.kv_probe import LAST, KVProbe, Switch, load_as_found
from localllm.engine.loader import Loading, Replan, Watcher, note_device
from localllm.engine.memory import DTYPES, choose_device, choose_dtype, is_out_of_memory, out_of_memory, use_threads
from localllm.engine.perplexity import Perplexity, perplexity
from localllm.engine.prefix_config import IN_POOLS, UNKNOWN_SOURCE, Computed, KVReuse
from localllm.engine.request import Request, SamplingParams, require_grammar_alone, require_ids
from localllm.engine.residency import Residency
from localllm.engine.runner import BATCH_ROWS, Chunk, ModelRunner, StepCancelledError, unheard
from localllm.engine.sampler import breaker_ids
from localllm.engine.scheduler import Limits, Scheduler
from localllm.engine.scores import Scores
from localllm.engine.sequence import Sequence
from localllm.engine.sharing import with_followers
from localllm.engine.speculative.config import AUTO, NO_GUESSES, Speculate, Speculating, speculation
from localllm.engine.state import facts_of, status_of
from localllm.engine.taking import taken
from localllm.engine.telling import tell_clocks, telling, untold
from localllm.engine.validation import Prompt, encode_prompt, is_chat, require_fit, require_unchanged
from localllm.engine.weights import choose_recipe
from localllm.errors import ContextOverflowError, DoesNotFitError, LocalLLMError, TemplateError, UsageError
from localllm.hub.packed import packed_recipes, source_id
from localllm.models.config import ModelConfig
from localllm.models.decoder import Decoder
from localllm.models.families import load_config
from localllm.models.load import Progress
from localllm.models.placed import PlacedModel
from localllm.offload.placement import BlockPlacement
from localllm.offload.planner.plan import JobShape, Plan
from localllm.quant.recipe import RECIPES
from localllm.text.chat_template import ChatTemplate, end_of_turn_id
from localllm.text.detokenizer import Detokenizer
from localllm.text.grammar.compiled import Grammars
from localllm.text.grammar.grammar import Grammar
from localllm.text.tokenizer import Tokenizer


class Engine:
    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer,
        template: ChatTemplate | TemplateError | None = None,
        *,
        ctx: int,
        kv: str = "auto",
        limits: Limits | None = None,
        plan: Plan | None = None,
        placed: PlacedModel | None = None,
        replan: Replan | None = None,
        flags_for: Callable[[int], str] = "--ctx {}".format,
        held: ExitStack | None = None,
        reuse: KVReuse = IN_POOLS,
        computed: Computed = UNKNOWN_SOURCE,
        kv_probe: KVProbe | None = None,
        speculating: Speculating = NO_GUESSES,
        note: Callable[[str], None] = unheard,
    ) -> None:
        """plan: by which the model was loaded, if one was made; limits are within it. placed: what can move the blocks;
        `model` is its `few` then. replan: as LoadedModel has it; without one the context never grows. flags_for: with
        which a longer context fits, "" where none does. held: what must stay open as long as the engine is used. reuse:
        what later prompts find of earlier ones, computed with this checkpoint and recipe. kv_probe: asks at the first
        long prompt whether the KV format is good enough; None where that is known, or of no concern. speculating: makes
        what guesses tokens ahead. note: hears what is worth a line."""
        self.tokenizer = tokenizer
        self._template = template
        self.ctx = ctx
        self.load_s = 0.0
        self.contents = ""
        self.plan = plan
        self.flags_for = flags_for
        self._held = held or ExitStack()
        self._scores = Scores()
        self.kv_format = choose_format(kv, model.config.head_dim, model.dtype)
        self.residency = Residency(
            model,
            self.kv_format,
            plan.batch_rows if plan else BATCH_ROWS,
            placed,
            lambda: self._planned(self.ctx),
            plan,
            note,
        )
        self._replan = replan
        self._kv_probe = kv_probe
        self.kv_supply = KVSupply(self.residency, reuse, computed, plan)
        self._limits = limits or Limits()
        self.scheduler = Scheduler(self._limits.within(plan), self._admit)
        end_of_turn = end_of_turn_id(template, tokenizer) if isinstance(template, ChatTemplate) else None
        eos = (*model.config.eos_token_ids, tokenizer.eos_token_id, end_of_turn)
        self.speculation = speculating(self.residency, plan)
        self.eos_ids = frozenset(token_id for token_id in eos if token_id is not None)
        looks_ahead = model.device.type != "cpu"  # there the cores are the model's: a thread more made a step longer
        self.grammars = Grammars(tokenizer, self.eos_ids, model.config.vocab_size, looks_ahead=looks_ahead)
        self._request_ids = itertools.count()
        self._aborted: set[int] = set()
        self.moved: Callable[[], None] = lambda: None  # hears of every block
        self._inboxes: dict[int, deque[Event]] = {}
        # Guards what arrives and the aborted set: to abort what has not been taken in yet is heard all the same.
        self._lock = threading.Lock()

    @classmethod
    def load(
        cls,
        model: str | Path | hub.ModelFiles = "tiny",
        *,
        device: str = "auto",
        dtype: str = "auto",
        weights: str = "auto",
        kv: str = "auto",
        ctx: int | None = None,
        ram: int | None = None,
        vram: int | None = None,
        threads: int | None = None,
        limits: Limits | None = None,
        job: JobShape | None = None,
        watcher: Watcher | None = None,
        reuse: KVReuse = IN_POOLS,
        probes_kv: bool = False,
        speculate: Speculate = AUTO,
    ) -> Engine:
        """Load a model by name, `org/repo`, directory, or files that were located before.

        device: auto, cpu, cuda. dtype: of activations and KV cache; auto (bf16), bf16, fp32. weights: the format that
        they are used in, see `choose_recipe`; a packed one is made at first use. kv: how keys and values are kept, see
        `cache.kv_format`. ctx: tokens of context; None takes what the model was trained for, at most 8192, or less
        where that costs much of the speed. ram, vram: the most bytes that this process may hold on the host and on the
        GPU; what does not fit there is placed one tier down, at last on the disk, from where it is read at every step.
        threads: of the CPU. limits: of what runs at once. job: many prompts; memory is then shared out for the most
        tokens a second of all of them together, not for the fastest single one. watcher: hears of what takes long.
        reuse: what is kept of keys and values for later prompts. probes_kv: take a wider format than `kv` where that
        changes what the model says, see `engine.kv_probe`; a job's format stays what it began with. speculate: who
        guesses tokens ahead, which changes the speed and no token.

        Raises ModelNotFoundError, CheckpointError, ModelChangedError where the files are written meanwhile,
        UnsupportedModelError, DoesNotFitError, UsageError; LocalLLMError where a packed model cannot be written.
        """
        started, watcher = time.perf_counter(), watcher or Watcher()
        if threads is not None:
            use_threads(threads)
        files = model if isinstance(model, hub.ModelFiles) else hub.locate(str(model))
        contents = hub.contents(files.directory)
        config = load_config(files.directory)
        tokenizer = Tokenizer.load(files.directory)
        on, of = choose_device(device), choose_dtype(weights if dtype == "auto" and weights in DTYPES else dtype)
        note_device(on, watcher, is_chosen=device == "auto")
        chosen = RECIPES[choose_recipe(weights, config, packed_recipes(files), of)]
        limits = limits or (Limits() if job is None else Limits(max_sequences=job.sequences))
        computed = Computed(source_id(files), chosen.name, files.name)
        draft = DraftModel.of(speculate.draft_model, tokenizer, files.name, of, on, kv)
        loading = Loading(files, chosen, of, on, kv, ctx, ram, vram, job, watcher, draft, speculate)
        loaded, kv, kv_probe = load_as_found(loading, config, computed, probes_kv=probes_kv)
        engine = cls(
            loaded.decoder,
            tokenizer,
            ChatTemplate.load_or_why_not(files.directory, tokenizer),
            ctx=loaded.ctx,
            kv=kv,
            limits=limits,
            plan=loaded.plan,
            placed=loaded.placed,
            replan=loaded.replan,
            flags_for=loaded.flags_for,
            held=loaded.held,
            reuse=reuse,
            computed=computed,
            kv_probe=kv_probe,
            speculating=partial(speculation, speculate, drafter=loaded.drafter),
            note=watcher.noting,
        )
        try:
            require_unchanged(files.directory, contents)
            engine.residency.warm_up(() if kv_probe is None else kv_probe.formats, watcher.measuring)
        except BaseException:  # nobody has the engine yet who would close it
            engine.close()
            raise
        engine.load_s, engine.contents = time.perf_counter() - started, contents
        return engine

    def close(self) -> None:
        """Ends what reads blocks from the disk, and keeps how well the plan came true. The engine is not used after."""
        self._held.close()
        self._scores.keep()
        self.speculation.close()
        self.grammars.close()
        self.kv_supply.close()

    def generate(
        self, prompt: Prompt, sampling: SamplingParams | None = None, *, grammar: Grammar | None = None
    ) -> Iterator[Event]:
        """Answer one prompt: a text to continue, token ids, or chat messages. Closing the iterator stops the request.
        grammar: what the answer has to look like.

        Several iterators may be read in turn; their requests run as one batch. Who calls `submit` and `step` himself
        does not use this beside them. A request that cannot run raises with the first event that is asked for.
        """
        ids = tuple(self.encode(prompt))
        request = Request(ids, sampling or SamplingParams(), opens_turn=is_chat(prompt), grammar=grammar)
        request_id = self.submit(request)
        inbox = self._inboxes[request_id] = deque[Event]()
        try:
            while inbox or self.has_work or self._aborted:
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
        """To the iterators of `generate`; what belongs to none of them goes nowhere."""
        for event in events:
            if event.request_id in self._inboxes:
                self._inboxes[event.request_id].append(event)

    def encode(self, prompt: Prompt) -> list[int]:
        """The ids of a prompt: a text, with the BOS token where the model wants one; ids; or chat messages."""
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
        sampling, detokenizer = request.sampling, self._detokenizer(request)
        sequence = Sequence(
            next(self._request_ids),
            request,
            seed=secrets.randbits(63) if sampling.seed is None else sampling.seed,
            ctx=self.ctx,
            detokenizer=detokenizer,
            breaker_ids=breaker_ids(sampling, self.tokenizer.encode),
            constraint=None
            if request.grammar is None
            else self.grammars.constraint(request.grammar, detokenizer.leading_spaces),
        )
        if request.beams > 1:
            ends = Ends(self.eos_ids, self.config.rope_switch_length, self.tokenizer.token_text)
            sequence.search = BeamSearch(sequence, ends)
        elif self.speculation.is_on:
            sequence.drafter = self.speculation.name
        with self._lock:
            self.scheduler.add(sequence)
        return sequence.request_id

    def check(self, request: Request) -> None:
        """Raises ContextOverflowError, UsageError or GrammarError for a request that cannot run. A grammar is compiled
        where it is new, which takes up to a second."""
        require_fit(request, self.ctx, self.config, self.flags_for)
        require_room(request, self.ctx, self.scheduler.limits)
        if request.grammar is not None:
            require_grammar_alone(request)
            self.grammars.check(request.grammar, self._detokenizer(request).leading_spaces)

    def _detokenizer(self, request: Request) -> Detokenizer:
        behind = () if request.opens_turn else request.prompt_ids
        return Detokenizer(self.tokenizer, request.shown_ids, behind)

    @property
    def current_plan(self) -> Plan | None:
        """By which the model is placed; None where it is not by one."""
        return self.residency.plan or self.plan

    def facts(self) -> EngineFacts:
        """How the model rests now."""
        return facts_of(self)

    def status(self) -> EngineStatus:
        """Of this moment; from any thread."""
        return status_of(self.scheduler)

    def abort(self, request_id: int) -> None:
        """Stop a request between two blocks of the running forward; its last event says "cancelled"."""
        with self._lock:
            self._aborted.add(request_id)

    @property
    def config(self) -> ModelConfig:
        return self.residency.config

    @property
    def model(self) -> Decoder:
        return self.residency.model

    @property
    def runner(self) -> ModelRunner:
        return self.residency.runner

    def move(self, blocks: SequenceOf[BlockPlacement]) -> None:
        """Let the model's blocks rest elsewhere from the next step on; answers go on as they were. See Residency."""
        self.residency.move(blocks)

    @property
    def weights(self) -> str:
        """The format of the blocks' weights: "bf16", "int4-g64"."""
        return self.residency.weights

    @property
    def prefix(self) -> PrefixCache | None:
        """What is known of earlier prompts; None where nothing is reused."""
        return self.kv_supply.prefix

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.num_waiting)

    def step(self, tell: Callable[[Event], None] = untold) -> list[Event]:
        """Run one forward and return what came of it; [] where there is nothing to do.

        `tell` hears while it runs, a few times a second, how far the prompts are.
        """
        events = self._drop_aborted()
        try:
            if grown := self._make_ready(tell):
                return events + grown  # before anything is told of the forward that follows
        except StepCancelledError:
            return events + self._drop_aborted()
        except (MemoryError, RuntimeError, LocalLLMError) as error:
            return events + [self._fail(sequence, error) for sequence in self.scheduler.sequences]
        try:
            scheduled = self.scheduler.schedule()
        except (MemoryError, RuntimeError) as error:
            if self.kv_supply.gives_way(error, 0):
                return events
            return [*events, self._fail(self.scheduler.waiting[0], error)]
        return events + self._computed(scheduled, tell) if scheduled else events

    def _make_ready(self, tell: Callable[[Event], None]) -> list[Event]:
        """What is done between answers: blocks move, the context grows, formats of keys and values are tried."""
        self.residency.restore()
        if not self.scheduler.waiting or self.scheduler.running:
            return []
        if (plan := self.residency.settle()) is not None:
            self.scheduler.limits = self._limits.within(plan)
        self._probe_kv(tell)
        return self._grow_for(self.scheduler.waiting[0])

    def _computed(self, scheduled: Scheduled, tell: Callable[[Event], None]) -> list[Event]:
        """Of one forward, with the guesses that it is worth."""
        for sequence, _ in scheduled:
            sequence.clock.prefill_started = sequence.clock.prefill_started or time.perf_counter()
        is_aborted = self._asked_of({sequence.request_id for sequence, _ in scheduled})
        before, started = dataclasses.replace(self.model.stream.clock), time.perf_counter()
        try:
            scheduled = self.speculation.drafted(scheduled, is_aborted)
            computed_at = time.perf_counter()
            goes_on = not self.scheduler.num_waiting and self.speculation.rests
            progress = telling(scheduled, tell)
            outcomes = compute(self.runner, scheduled, goes_on=goes_on, cancelled=is_aborted, progress=progress)
        except StepCancelledError:
            return self._drop_aborted()
        except (MemoryError, RuntimeError, LocalLLMError) as error:
            if self.speculation.gives_way(error) or self.kv_supply.gives_way(error, num_rows(scheduled)):
                return []
            return [self._fail(sequence, error) for sequence in dict.fromkeys(sequence for sequence, _ in scheduled)]
        events: list[Event] = []
        tell_clocks(scheduled, time.perf_counter() - started, before, self.model.stream.clock)
        for sequence, chunk, outcome in with_followers(self.scheduler, scheduled, outcomes):
            if sequence.finish_reason is not None:  # another beam of it has failed
                continue
            try:
                for event in self._take(sequence, chunk, outcome):
                    events.append(event)  # one by one: what was drawn before a failure was said
            except Exception as error:  # one request's failure ends that request, not the others and not the engine
                events.append(self._fail(sequence, error))
        self.speculation.learn(time.perf_counter() - computed_at)
        return events

    def _probe_kv(self, tell: Callable[[Event], None]) -> None:
        """At the first prompt that is long enough, where nothing else runs: see `engine.kv_probe`."""
        plan = self.residency.plan
        if self._kv_probe is None or (self.plan is not None and plan is None):  # memory ran out once: none for a probe
            return
        long = next((s for s in self.scheduler.waiting if s.num_prompt_tokens >= LAST), None)
        if long is None:
            return
        tell(PrefillEvent(long.request_id, 0, long.num_prompt_tokens))
        try:
            switch = self._kv_probe.run(
                self.residency, long.token_ids, plan, cancelled=self._asked_of({long.request_id})
            )
            if switch is not None:
                self._use_kv_format(switch)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
        self._kv_probe = None

    def _use_kv_format(self, switch: Switch) -> None:
        """What was known in the old format is not found again."""
        self.residency.use_format(switch.kv_format)
        self.kv_format = switch.kv_format
        if switch.plan is not None:
            self.plan = switch.plan
            self.scheduler.limits = self._limits.within(switch.plan)
        self.kv_supply.renew(self.plan)

    def _planned(self, ctx: int) -> Plan:
        """By which the model had best run with this context in the memory of now. Raises DoesNotFitError."""
        if self._replan is None:
            raise DoesNotFitError("the context cannot grow", why="this engine was given its model without a plan")
        return self._replan(ctx, self.residency.kv_pages.format.name, self.residency.kv_host_bytes)

    def _grow_for(self, sequence: Sequence) -> list[Event]:
        """More context for the next request, where that wants some, as long as nothing runs. Raises as `move` does."""
        if sequence.wants_growth:
            sequence.fit(self.ctx)  # another one may have made it longer since
        if not sequence.wants_growth:
            return []
        try:
            grown = grow_for(sequence, self.ctx, self.residency, self.kv_supply, self._planned, self.flags_for)
        except ContextOverflowError as error:
            return [self._fail(sequence, error)]
        if grown is not None:
            self.ctx = grown.plan.ctx
            self.scheduler.limits = self._limits.within(grown.plan)
            for waiting in self.scheduler.waiting:  # this one, and others of the same prompt: they need not wait for it
                if waiting.wants_growth:
                    waiting.fit(self.ctx)
        sequence.may_grow = False
        return [] if grown is None else [grown.event]

    def _admit(self, sequence: Sequence) -> None:
        self.kv_supply.admit(sequence, self._asked_of({sequence.request_id}))

    def _asked_of(self, ids: SetOf[int]) -> Callable[[], bool]:
        """Whether one of these requests was aborted: what is asked between blocks, when it is known that they come."""

        def is_aborted() -> bool:
            self.moved()
            return not ids.isdisjoint(self._aborted)

        return is_aborted

    def _take(self, sequence: Sequence, chunk: Chunk, outcome: Outcome) -> Iterator[Event]:
        """Tell how far a prompt has come; draw tokens where the chunk reached the sequence's end."""
        text_of, num_before = self.tokenizer.token_text, len(sequence.token_ids)
        yield from taken(sequence, chunk, outcome, self.kv_supply, self.runner, text_of, self.eos_ids)
        if sequence.finish_reason is not None:
            self._remove([sequence])
            finished = sequence.finished(self.load_s)
            if sequence.clock.ran_alone and sequence.request.prompt_logprobs is None:  # which take time of their own
                self._scores.take(finished, self.residency.plan, self.speculation.plain_s)
            yield finished
        elif chunk.kv.length == self.config.rope_switch_length and len(sequence.token_ids) > num_before:
            # LongRoPE rotates all keys differently past its trained length: the old ones are computed anew.
            chunk.kv.trim(0)

    def _fail(self, sequence: Sequence, error: Exception) -> FinishedEvent:
        self._remove([sequence])
        if is_out_of_memory(error):
            error = out_of_memory(self.residency.device, error)
        sequence.finish_reason = "error"
        return sequence.finished(self.load_s, error)

    def _remove(self, sequences: SequenceOf[Sequence]) -> None:
        for sequence in sequences:  # first: a branch ends before what it is a branch of
            self.speculation.forget(sequence)
        self.scheduler.remove(sequences)

    def _drop_aborted(self) -> list[Event]:
        with self._lock:
            self.scheduler.take_in()
            aborted = [s for s in self.scheduler.sequences if s.request_id in self._aborted]
            self._aborted.clear()
        self._remove(aborted)
        for sequence in aborted:
            sequence.finish_reason = "cancelled"
        return [sequence.finished(self.load_s) for sequence in aborted]

    def perplexity(
        self, token_ids: SequenceOf[int], ctx: int | None = None, progress: Progress = lambda _done, _total: None
    ) -> Perplexity:
        """How well the model predicts a text; see `engine.perplexity`. Raises UsageError or ContextOverflowError."""
        if ctx is not None and ctx > self.ctx:
            what = f"a window of {ctx} tokens is longer than the context of {self.ctx}"
            raise UsageError(what, fix=f"--ctx {self.ctx}")
        require_ids(token_ids, self.config.vocab_size)
        return perplexity(self.runner, token_ids, ctx=ctx or self.ctx, new_kv=self.residency.new_kv, progress=progress)
