"""The engine: requests in, events out. `step` does one forward; everything else is bookkeeping around it.

Not a thread and not a server: whoever calls `step` owns the device. `submit` and `abort` may be called from any thread.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from localllm import hub
from localllm.cache.contiguous import ContiguousKV
from localllm.engine.chat_template import ChatInput, ChatTemplate, encode_chat
from localllm.engine.detokenizer import Detokenizer
from localllm.engine.events import Event, FinishedEvent, PrefillEvent, StepSplit, TokenLogprob
from localllm.engine.loading import Loading, Watcher
from localllm.engine.memory import DTYPES, choose_device, choose_dtype, is_out_of_memory, out_of_memory
from localllm.engine.perplexity import Perplexity, perplexity
from localllm.engine.request import Request, SamplingParams
from localllm.engine.residency import Residency
from localllm.engine.runner import BATCH_ROWS, Chunk, ModelRunner, StepCancelledError
from localllm.engine.sampler import sample
from localllm.engine.scheduler import Limits, Scheduler
from localllm.engine.scores import Scores
from localllm.engine.sequence import Sequence
from localllm.engine.tokenizer import Tokenizer
from localllm.engine.weights import choose_recipe
from localllm.errors import ContextOverflowError, LocalLLMError, TemplateError, UsageError
from localllm.hub.packed import packed_recipes
from localllm.layers.attention import Attention
from localllm.models.config import ModelConfig
from localllm.models.decoder import Decoder
from localllm.models.families import load_config
from localllm.models.load import Progress
from localllm.models.placed import PlacedModel
from localllm.offload.disk_stream import StreamClock
from localllm.offload.plan import JobShape, Placed, Plan
from localllm.quant.recipe import RECIPES

_TELL_S = 0.2  # between two pieces of news of one forward


def _load_template(directory: Path, tokenizer: Tokenizer) -> ChatTemplate | TemplateError:
    try:
        return ChatTemplate.load(directory, tokenizer)
    except TemplateError as error:
        return error


def _limited(limits: Limits, plan: Plan | None) -> Limits:
    """Within the memory that there is; where blocks are streamed, as much as can be shares one reading of them."""
    if plan is None:
        return limits
    limits = dataclasses.replace(limits, kv_tokens=plan.most_kv_tokens)
    if plan.ring_bytes:
        return dataclasses.replace(limits, chunk_tokens=plan.pass_tokens, shares_steps=True)
    return dataclasses.replace(limits, chunk_tokens=min(limits.chunk_tokens, plan.batch_rows))


def _forward_split(seconds: float, before: StreamClock, after: StreamClock) -> StepSplit:
    wait_s = after.wait_s - before.wait_s
    return StepSplit(
        compute_s=seconds - wait_s,
        wait_s=wait_s,
        copy_s=after.reading_s - before.reading_s + after.sending_s - before.sending_s,
        copied_bytes=after.bytes_read - before.bytes_read + after.bytes_sent - before.bytes_sent,
    )


def _untold(_event: Event) -> None:
    """Nobody listens."""


def _telling(scheduled: SequenceOf[tuple[Sequence, Chunk]], tell: Callable[[Event], None]) -> Progress:
    """Tells how far a forward is through its prompts, by its share of the blocks; what came of it tells its end."""
    prompts = [(sequence, chunk) for sequence, chunk in scheduled if not sequence.num_completion_tokens]
    told_at = time.perf_counter()

    def progress(done: int, total: int) -> None:
        nonlocal told_at
        now = time.perf_counter()
        if done == total or now - told_at < _TELL_S:
            return
        told_at = now
        for sequence, chunk in prompts:
            so_far = chunk.kv.length + chunk.num_tokens * done // total
            tell(PrefillEvent(sequence.request_id, so_far, sequence.num_prompt_tokens))

    return progress


Prompt = str | SequenceOf[int] | SequenceOf[dict[str, Any]]


class Engine:
    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer,
        template: ChatTemplate | TemplateError | None = None,
        *,
        ctx: int,
        limits: Limits | None = None,
        load_s: float = 0.0,
        plan: Plan | None = None,
        placed: PlacedModel | None = None,
        replan: Callable[[], Plan] | None = None,
        flags_for: Callable[[int], str] = "--ctx {}".format,
        held: ExitStack | None = None,
    ) -> None:
        """plan: by which the model was loaded, if one was made; limits are within it. placed: what can move the blocks;
        `model` is its `few` then. replan: the plan in the memory of now. flags_for: with which a longer context fits,
        "" where none does. held: what must stay open as long as the engine is used."""
        self.tokenizer = tokenizer
        self._template = template
        self.ctx = ctx
        self.load_s = load_s
        self.plan = plan
        self.flags_for = flags_for
        self._held = held or ExitStack()
        self._scores = Scores()
        self.residency = Residency(model, plan.batch_rows if plan else BATCH_ROWS, placed, replan, plan)
        self._limits = limits or Limits()
        self.scheduler = Scheduler(_limited(self._limits, plan), self._new_kv)
        eos = (*model.config.eos_token_ids, tokenizer.eos_token_id)
        self.eos_ids = frozenset(token_id for token_id in eos if token_id is not None)
        self._request_ids = itertools.count()
        self._aborted: set[int] = set()
        self._inboxes: dict[int, deque[Event]] = {}
        self._lock = threading.Lock()  # guards the waiting queue and the aborted set against other threads

    @classmethod
    def load(
        cls,
        model: str | Path | hub.ModelFiles = "tiny",
        *,
        device: str = "auto",
        dtype: str = "auto",
        weights: str = "auto",
        ctx: int | None = None,
        ram: int | None = None,
        vram: int | None = None,
        threads: int | None = None,
        limits: Limits | None = None,
        job: JobShape | None = None,
        watcher: Watcher | None = None,
    ) -> Engine:
        """Load a model by name, `org/repo`, directory, or files that were located before.

        device: auto, cpu, cuda. dtype: of activations and KV cache; auto (bf16), bf16, fp32. weights: the format that
        they are used in, see `choose_recipe`; a packed one is made at first use. ctx: tokens of context; None takes
        what the model was trained for, at most 8192, or less where that costs much of the speed. ram, vram: the most
        bytes that this process may hold on the host and on the GPU; what does not fit there is placed one tier down, at
        last on the disk, from where it is read at every step. threads: of the CPU. limits: of what runs at once. job:
        many prompts; memory is then shared out for the most tokens a second of all of them together, not for the
        fastest single one. watcher: hears of what takes long.

        Raises ModelNotFoundError, CheckpointError, UnsupportedModelError, DoesNotFitError, UsageError; LocalLLMError
        where a packed model cannot be written.
        """
        started = time.perf_counter()
        if threads is not None:
            if threads < 1:
                raise UsageError(f"{threads} threads cannot compute", why="at least one must", fix="--threads 2")
            torch.set_num_threads(threads)
        files = model if isinstance(model, hub.ModelFiles) else hub.locate(str(model))
        config = load_config(files.directory)
        tokenizer = Tokenizer.load(files.directory)
        on, of = choose_device(device), choose_dtype(weights if dtype == "auto" and weights in DTYPES else dtype)
        chosen = RECIPES[choose_recipe(weights, config, packed_recipes(files), of)]
        limits = limits or (Limits() if job is None else Limits(max_sequences=job.sequences))
        loaded = Loading(files, chosen, of, on, ctx, ram, vram, job, watcher or Watcher()).load(config)
        return cls(
            loaded.decoder,
            tokenizer,
            _load_template(files.directory, tokenizer),
            ctx=loaded.ctx,
            limits=limits,
            load_s=time.perf_counter() - started,
            plan=loaded.plan,
            placed=loaded.placed,
            replan=loaded.replan,
            flags_for=loaded.flags_for,
            held=loaded.held,
        )

    def close(self) -> None:
        """Ends what reads blocks from the disk, and keeps how well the plan came true. The engine is not used after."""
        self._held.close()
        self._scores.keep()

    def generate(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Iterator[Event]:
        """Answer one prompt: a text to continue, token ids, or chat messages. Closing the iterator stops the request.

        Several iterators may be read in turn; their requests run as one batch. Who calls `submit` and `step` himself
        does not use this beside them. A request that cannot run raises with the first event that is asked for.
        """
        request_id = self.submit(Request(tuple(self.encode(prompt)), sampling or SamplingParams()))
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
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, special=True, bos=True)
        if all(isinstance(item, int) for item in prompt):
            return [item for item in prompt if isinstance(item, int)]
        messages = [item for item in prompt if not isinstance(item, int)]
        return encode_chat(self.template, self.tokenizer, ChatInput(messages))

    @property
    def template(self) -> ChatTemplate:
        """The model's chat template. Raises TemplateError where it has none, or a broken one: text can still go on."""
        if isinstance(self._template, ChatTemplate):
            return self._template
        raise self._template or TemplateError("this engine was given no chat template", fix="continue a plain text")

    def submit(self, request: Request) -> int:
        """Queue a request; its id marks its events. Raises ContextOverflowError or UsageError before anything runs."""
        self.check(request)
        sampling = request.sampling
        room = self.ctx - len(request.prompt_ids)
        max_tokens = min(room, sampling.max_tokens or room)
        sequence = Sequence(
            next(self._request_ids),
            request,
            seed=secrets.randbits(63) if sampling.seed is None else sampling.seed,
            max_length=len(request.prompt_ids) + max_tokens,
            detokenizer=Detokenizer(self.tokenizer),
            breaker_ids=self._breaker_ids(sampling),
        )
        with self._lock:
            self.scheduler.waiting.append(sequence)
        return sequence.request_id

    def check(self, request: Request) -> None:
        """Raises ContextOverflowError or UsageError for a request that cannot run."""
        num_tokens = len(request.prompt_ids)
        if num_tokens == 0:
            raise UsageError("the prompt is empty", why="a model continues a text, and there is none")
        self._check_ids((*request.prompt_ids, *request.sampling.logit_bias))
        if num_tokens >= self.ctx:
            longest = self.config.longest_context
            flags = self.flags_for(min(longest, num_tokens + 512)) if num_tokens < longest else ""
            raise ContextOverflowError(
                f"the prompt has {num_tokens} tokens, the context {self.ctx}",
                why="at least one token must remain for the answer; nothing was cut",
                fix=flags or "shorten the prompt",
            )

    def _check_ids(self, token_ids: SequenceOf[int]) -> None:
        """Raises UsageError for one that the model does not have: the kernels read the row of any number."""
        vocab_size = self.config.vocab_size
        outside = next((token_id for token_id in token_ids if not 0 <= token_id < vocab_size), None)
        if outside is not None:
            raise UsageError(f"token id {outside} does not exist", why=f"the model has ids 0 to {vocab_size - 1}")

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

    def move(self, blocks: SequenceOf[Placed]) -> None:
        """Let the model's blocks rest elsewhere from the next step on; answers go on as they were. See Residency."""
        self.residency.move(blocks, self._held_kv)

    @property
    def _held_kv(self) -> list[ContiguousKV]:
        return [sequence.kv for sequence in self.scheduler.running if sequence.kv is not None]

    @property
    def weights(self) -> str:
        """The format of the blocks' weights: "bf16", "int4-g64"."""
        body = self.model.blocks[0].body
        assert isinstance(body, Attention)
        return body.qkv_proj.format.name

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    def step(self, tell: Callable[[Event], None] = _untold) -> list[Event]:
        """Run one forward and return what came of it; [] where there is nothing to do.

        `tell` hears while it runs, a few times a second, how far the prompts are.
        """
        events = self._drop_aborted()
        try:
            self.residency.restore(self._held_kv)
            if self.has_work and not self.scheduler.running and (plan := self.residency.settle()) is not None:
                self.scheduler.limits = _limited(self._limits, plan)
        except (MemoryError, RuntimeError, LocalLLMError) as error:
            return events + [self._fail(sequence, error) for sequence in self.scheduler.sequences]
        try:
            with self._lock:
                scheduled = self.scheduler.schedule()
        except (MemoryError, RuntimeError) as error:
            return events if self._gives_way(error, 0) else [*events, self._fail(self.scheduler.waiting[0], error)]
        if not scheduled:
            return events
        for sequence, _ in scheduled:
            sequence.clock.prefill_started = sequence.clock.prefill_started or time.perf_counter()
        ids = {sequence.request_id for sequence, _ in scheduled}
        before, started = dataclasses.replace(self.model.stream.clock), time.perf_counter()
        try:
            logits = self.runner.forward(
                [chunk for _, chunk in scheduled],
                cancelled=lambda: not ids.isdisjoint(self._aborted),
                progress=_telling(scheduled, tell),
            )
            totals = logits.sum(dim=-1).tolist()  # a NaN or an infinity stays what it is in a sum
        except StepCancelledError:
            return events + self._drop_aborted()
        except (MemoryError, RuntimeError, LocalLLMError) as error:
            if self._gives_way(error, sum(chunk.num_tokens for _, chunk in scheduled)):
                return events
            return events + [self._fail(sequence, error) for sequence, _ in scheduled]
        split = _forward_split(time.perf_counter() - started, before, self.model.stream.clock)
        for row, (sequence, chunk) in enumerate(scheduled):
            sequence.clock.split += split
            sequence.clock.ran_alone &= len(scheduled) == 1
            try:
                if not math.isfinite(totals[row]):
                    raise self.runner.locate_non_finite(chunk)
                events += self._take(sequence, chunk, logits[row])
            except Exception as error:  # one request's failure ends that request, not the others and not the engine
                events.append(self._fail(sequence, error))
        return events

    def _gives_way(self, error: Exception, rows: int) -> bool:
        """Whether memory ran out and something could be given up for it: the next step tries again."""
        try:
            return is_out_of_memory(error) and self.residency.give_way(error, rows, self._held_kv)
        except (MemoryError, RuntimeError, LocalLLMError) as another:  # nothing is left: the first error is to be told
            if isinstance(another, RuntimeError) and not is_out_of_memory(another):
                raise
            return False

    def _take(self, sequence: Sequence, chunk: Chunk, logits: Tensor) -> Iterator[Event]:
        """Tell how far a prompt has come; draw a token where the chunk reached the sequence's end."""
        reaches_end = chunk.kv.length == len(sequence.token_ids)
        if sequence.num_completion_tokens == 0:
            yield PrefillEvent(sequence.request_id, chunk.kv.length, sequence.num_prompt_tokens)
        if not reaches_end:
            return
        sampling, started = sequence.request.sampling, time.perf_counter()
        token_id = sample(
            logits,
            sampling,
            sequence.token_ids,
            num_prompt_tokens=sequence.num_prompt_tokens,
            seed=sequence.seed,
            breaker_ids=sequence.breaker_ids,
        )
        sequence.clock.split += StepSplit(sample_s=time.perf_counter() - started)
        logprob = None if sampling.logprobs is None else self._logprob(logits, token_id, sampling.logprobs)
        event = sequence.append(token_id, logprob, self.eos_ids)
        if event is not None:
            yield event
        if sequence.finish_reason is not None:
            self._remove([sequence])
            finished = sequence.finished(self.load_s)
            if sequence.clock.ran_alone:
                self._scores.take(finished, self.residency.plan)
            yield finished
        elif chunk.kv.length == self.config.rope_switch_length:
            # LongRoPE rotates all keys differently past its trained length: the old ones are computed anew.
            chunk.kv.trim(0)

    def _fail(self, sequence: Sequence, error: Exception) -> FinishedEvent:
        self._remove([sequence])
        if is_out_of_memory(error):
            error = out_of_memory(self.residency.device, error)
        sequence.finish_reason = "error"
        return sequence.finished(self.load_s, error)

    def _remove(self, sequences: SequenceOf[Sequence]) -> None:
        with self._lock:
            self.scheduler.remove(sequences)

    def _drop_aborted(self) -> list[Event]:
        with self._lock:
            aborted = [s for s in self.scheduler.sequences if s.request_id in self._aborted]
            self._aborted.clear()
            self.scheduler.remove(aborted)
        for sequence in aborted:
            sequence.finish_reason = "cancelled"
        return [sequence.finished(self.load_s) for sequence in aborted]

    def perplexity(
        self, token_ids: SequenceOf[int], ctx: int | None = None, progress: Progress = lambda _done, _total: None
    ) -> Perplexity:
        """How well the model predicts a text; see `engine.perplexity`. Raises UsageError or ContextOverflowError."""
        if ctx is not None and ctx > self.ctx:
            raise UsageError(
                f"a window of {ctx} tokens is longer than the context of {self.ctx}", fix=f"--ctx {self.ctx}"
            )
        self._check_ids(token_ids)
        return perplexity(
            self.runner,
            token_ids,
            ctx=ctx or self.ctx,
            new_kv=self._new_kv,
            progress=progress,
        )

    def _logprob(self, logits: Tensor, token_id: int, num_alternatives: int) -> TokenLogprob:
        logprobs = logits.log_softmax(-1)
        values, indices = logprobs.topk(min(num_alternatives, logprobs.shape[0]))
        top = tuple(
            TokenLogprob(i, self.tokenizer.token_text(i), value)
            for i, value in zip(indices.tolist(), values.tolist(), strict=True)
        )
        return TokenLogprob(token_id, self.tokenizer.token_text(token_id), logprobs[token_id].item(), top)

    def _breaker_ids(self, sampling: SamplingParams) -> frozenset[int]:
        """The tokens that stand for DRY's breakers: the last one of a text, as its first merges with what is before."""
        if not sampling.dry_multiplier:
            return frozenset()
        encoded = (self.tokenizer.encode("a" + breaker) for breaker in sampling.dry_breakers)
        return frozenset(ids[-1] for ids in encoded if ids)

    def _new_kv(self, capacity: int) -> ContiguousKV:
        return self.residency.new_kv(capacity)
