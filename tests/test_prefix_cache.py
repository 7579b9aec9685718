"""What is reused gives what would have been computed: every bit of it, whatever tier it comes from."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Sequence
from functools import cache
from itertools import cycle, product
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from localllm.bench.random_model import RandomBlocks, word_tokenizer
from localllm.cache import prefix
from localllm.cache.disk import DiskTier
from localllm.engine.engine import Engine
from localllm.engine.events import FinishedEvent, TokenEvent
from localllm.engine.loader import LoadedModel
from localllm.engine.prefix_config import IN_POOLS, NO_REUSE, Computed, KVReuse
from localllm.engine.request import Request, SamplingParams
from localllm.kernels import cpu_linear
from localllm.models.decoder import Decoder
from localllm.models.families import parse_config
from localllm.models.load import load_decoder
from localllm.quant.recipe import recipe
from tests.kv_support import check_pages, check_prefix
from tests.packed_support import spoil
from tests.patience import PATIENCE_S
from tests.thinning import examples, thinned

VOCAB, CTX, ANSWER = 160, 512, 5
END = 2  # the token behind a message
SHAPE: dict[str, Any] = {
    "model_type": "llama", "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": CTX,
    "eos_token_id": END,
}  # fmt: skip
ODD = SHAPE | {"head_dim": 80}  # which groups of 32 do not divide
WINDOWED = SHAPE | {"model_type": "gemma2", "query_pre_attn_scalar": 32, "sliding_window": 70}
HYBRID = SHAPE | {
    "model_type": "qwen3_5_text", "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "partial_rotary_factor": 1.0, "num_hidden_layers": 4,
}  # fmt: skip
Answer = tuple[tuple[int, float], ...]  # tokens and their logprobs


@cache
def decoder(model: str = "llama", weights: str = "int4", dtype: torch.dtype = torch.bfloat16) -> Decoder:
    shapes = {"llama": SHAPE, "odd": ODD, "windowed": WINDOWED, "hybrid": HYBRID}
    config = parse_config(shapes[model], "a test's config")
    chosen = recipe(weights)
    return load_decoder(RandomBlocks(chosen), config, chosen, dtype=dtype, device=torch.device("cpu"))


def engine(kv: str = "int8", reuse: KVReuse = IN_POOLS, model: str = "llama", **options: Any) -> Engine:
    of = decoder(model, **options)
    loaded, computed_by = LoadedModel(of, CTX), Computed(f"test:{model}", "int4")
    return Engine(loaded, word_tokenizer(VOCAB), kv=kv, reuse=reuse, computed=computed_by)


def tokens(count: int, seed: int) -> list[int]:
    choose = random.Random(seed)
    return [choose.randrange(3, VOCAB) for _ in range(count)]


def greedy(max_tokens: int = ANSWER) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=0)


def ask(of: Engine, *prompts: Sequence[int]) -> tuple[list[Answer], list[int]]:
    """Every prompt's answer, all of them together, and how many of its tokens were not computed."""
    ids = [of.submit(Request(tuple(prompt), greedy())) for prompt in prompts]
    answers: dict[int, list[tuple[int, float]]] = {request_id: [] for request_id in ids}
    cached: dict[int, int] = {}
    while of.has_work:
        for event in of.step():
            if isinstance(event, TokenEvent):
                assert event.logprob is not None
                answers[event.request_id].append((event.token_id, event.logprob.logprob))
            if isinstance(event, FinishedEvent):
                assert event.error is None, event.error
                cached[event.request_id] = event.usage.cached_tokens
    check_pages(of.residency.kv_pages)
    return [tuple(answers[request_id]) for request_id in ids], [cached[request_id] for request_id in ids]


@cache
def computed(kv: str, prompt: tuple[int, ...], model: str = "llama") -> Answer:
    """By an engine that reuses nothing."""
    (answer,), (cached,) = ask(engine(kv, NO_REUSE, model), prompt)
    assert not cached
    return answer


def evict(of: Engine) -> None:
    """Every page that nobody has leaves the pools."""
    for seed in range(2):
        ask(of, tokens(CTX - ANSWER - 1, seed=10_000 + seed))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def reuse_of(tier: str, folder: Path) -> KVReuse:
    directory = folder if tier in ("disk", "restarted") else None
    return KVReuse(ram_bytes=(64 << 20) * (tier == "ram"), snapshot_bytes=8 << 20, directory=directory)


def finished(of: Engine, steps: int) -> FinishedEvent:
    """What so many steps end with."""
    last = [event for _ in range(steps) for event in of.step()][-1]
    assert isinstance(last, FinishedEvent)
    return last


def exhausted(_: int) -> None:
    raise MemoryError


TIERS, KV = ("pool", "ram", "disk", "restarted"), ("bf16", "int8", "k8v4", "int4")
MODELS = [*product(("llama", "windowed", "hybrid"), KV), ("odd", "int8")]


# Each model in each format, and each tier.
OFTEN = [(*model, tier) for model, tier in zip(MODELS, cycle((*TIERS, "ram")), strict=False)]


@pytest.mark.parametrize(
    ("model", "kv", "tier"), thinned([(*model, tier) for model in MODELS for tier in TIERS], OFTEN.__contains__)
)
def test_a_hit_gives_the_bits_of_a_miss_from_every_tier(kv, model, tier, folder):
    reuse, shared = reuse_of(tier, folder), tokens(300, seed=1)
    of = engine(kv, reuse, model)
    ask(of, [*shared, 5, 6])
    if tier != "pool":
        evict(of)
    if tier == "restarted":
        of.close()
        of = engine(kv, reuse, model)
    (answer,), (cached,) = ask(of, [*shared, 7, 8, 9])
    assert cached == 256 and answer == computed(kv, (*shared, 7, 8, 9), model)
    assert of.prefix is not None
    found = vars(of.prefix.counts)
    # A first page is dense in a coded format, and leaves its own pool later.
    assert found["disk" if tier == "restarted" else tier] >= 3 and sum(found[t] for t in ("pool", "ram", "disk")) == 4
    of.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", ["pool", "ram", "disk", "restarted", "cancelled", "eight at once"])
def test_where_operators_compute_a_hit_gives_the_bits_of_a_miss_in_the_same_chunks(dtype, how, folder):
    """Of eight at once the first tokens: operators sum a step of eight rows in another order than one of one."""

    def loaded(reuse: KVReuse) -> Engine:
        of = engine("bf16", reuse, weights="fp32" if dtype is torch.float32 else "bf16", dtype=dtype)
        of.scheduler.limits = type(of.scheduler.limits)(chunk_tokens=64)
        return of

    shared = tokens(300, seed=2)
    prompts = [[*shared, *tokens(5 + n, seed=n)] for n in range(8 if how == "eight at once" else 1)]
    hit = loaded(reuse_of(how, folder))
    if how == "cancelled":
        request_id = hit.submit(Request(tuple(shared), greedy()))
        for _ in range(5):
            hit.step()
        hit.abort(request_id)
    ask(hit, [*shared[: 192 if how == "cancelled" else 300], 9])
    if how in ("ram", "disk"):
        evict(hit)
    if how == "restarted":
        hit.close()
        hit = loaded(reuse_of(how, folder))
    answers, cached = ask(hit, *prompts)
    assert cached == [256] * len(prompts)
    missed = loaded(NO_REUSE)
    right = [ask(missed, prompt)[0][0] for prompt in prompts]
    assert [answer[0] for answer in answers] == [answer[0] for answer in right]
    assert len(prompts) > 1 or answers == right
    hit.close()


def test_eight_requests_at_once_share_what_they_have_in_common_and_answer_as_alone():
    of, shared = engine("int4"), tokens(200, seed=4)
    ask(of, shared)
    prompts = [[*shared, *tokens(1 + 9 * n, seed=n)] for n in range(8)]
    answers, cached = ask(of, *prompts)
    assert cached == [192] * 8
    assert answers == [computed("int4", tuple(prompt)) for prompt in prompts]


def test_a_cancelled_request_leaves_whole_pages_that_are_right():
    of, prompt = engine(), tokens(400, seed=5)
    of.scheduler.limits = type(of.scheduler.limits)(chunk_tokens=100)
    request_id = of.submit(Request(tuple(prompt), greedy()))
    of.step()
    of.step()
    of.abort(request_id)
    of.step()
    check_pages(of.residency.kv_pages)
    (answer,), (cached,) = ask(of, prompt)
    assert cached == 192 and answer == computed("int8", tuple(prompt))


def test_an_answer_is_part_of_what_the_next_turn_finds():
    of, prompt = engine(), tokens(120, seed=6)
    (answer,), _ = ask(of, prompt)
    chat = [*prompt, *(token_id for token_id, _ in answer), *tokens(30, seed=7)]
    assert ask(of, chat)[1] == [64]
    (_,), (cached,) = ask(of, [*chat, *tokens(3, seed=8)])
    assert cached == 128


def test_a_prompt_that_is_known_whole_still_computes_its_last_token():
    of, prompt = engine(), tokens(128, seed=9)
    ask(of, prompt)
    (answer,), (cached,) = ask(of, prompt)
    assert cached == 64 and answer == computed("int8", tuple(prompt))


@pytest.mark.parametrize("other", [{"kv": "int4"}, {"model": "windowed"}])
def test_pages_of_another_model_or_format_are_not_found(other, folder):
    prompt = tokens(200, seed=10)
    first = engine("int8", KVReuse(directory=folder))
    ask(first, prompt)
    first.close()
    second = engine(**other, reuse=KVReuse(directory=folder))
    assert ask(second, prompt)[1] == [0]
    second.close()


def test_a_damaged_page_is_computed_once_more(folder):
    prompt = tokens(300, seed=11)
    of = engine(reuse=KVReuse(directory=folder))
    ask(of, prompt)
    of.close()
    spoil(sorted(folder.rglob("*.page"))[1], 5000)
    of = engine(reuse=KVReuse(directory=folder))
    (answer,), (cached,) = ask(of, prompt)
    assert cached in (0, 64, 128, 192) and answer == computed("int8", tuple(prompt))
    of.close()


@pytest.mark.parametrize("harm", ["cut", "flipped", "of another model", "of another version", "gone"])
def test_a_snapshot_that_is_not_what_it_should_be_is_none(harm, folder):
    prompt = tokens(300, seed=11)
    of = engine(reuse=KVReuse(directory=folder), model="hybrid")
    ask(of, prompt)
    of.close()
    largest = max(path.stat().st_size for path in folder.rglob("*.page"))
    (snapshot,) = [path for path in folder.rglob("*.page") if path.stat().st_size == largest]
    if harm == "cut":
        os.truncate(snapshot, largest // 2)
    elif harm == "gone":
        snapshot.unlink()
    else:
        spoil(snapshot, {"flipped": largest - 9, "of another model": 30, "of another version": 8}[harm])
    of = engine(reuse=KVReuse(directory=folder), model="hybrid")
    (answer,), (cached,) = ask(of, prompt)
    assert not cached and answer == computed("int8", tuple(prompt), "hybrid")
    assert of.prefix is not None and of.prefix.disk is not None and of.prefix.disk.flush(PATIENCE_S)
    assert ask(of, prompt) == ([answer], [256])  # it was written anew
    of.close()


def test_a_prefix_is_found_up_to_its_last_snapshot(folder):
    """Behind a message, before the answer, and where the answer ends."""
    of, turn = engine(model="hybrid", reuse=KVReuse(snapshot_bytes=8 << 20)), tokens(130, seed=1)
    prompt = [*turn, END, *tokens(170, seed=2)]
    (answer,), _ = ask(of, prompt)
    other = tokens(60, seed=3)
    for beginning, found in (
        ([*prompt, *(token for token, _ in answer)], 256),  # of 305 tokens
        (prompt[:270], 256),
        (prompt[:200], 128),  # behind the first message: there is a page more, and no snapshot of it
        (prompt[:100], 0),
    ):
        chat = [*beginning, *other]
        (said,), (cached,) = ask(of, chat)
        assert cached == found and said == computed("int8", tuple(chat), "hybrid")


PIECES = st.integers(0, 9)


@pytest.mark.parametrize("model", ["llama", "windowed"])
def test_after_a_restart_what_is_new_goes_to_the_disk_too(model, folder):
    prompt = tokens(440, seed=1)
    for length, found in ((200, 0), (440, 192), (441, 384)):
        of = engine(reuse=KVReuse(directory=folder), model=model)
        _, (cached,) = ask(of, [*prompt, 5][:length])
        assert cached == found
        of.close()


def test_a_snapshot_that_a_full_queue_refused_is_written_when_the_answer_ends(folder, monkeypatch):
    of, prompt = engine(reuse=reuse_of("disk", folder), model="hybrid"), tokens(300, seed=1)
    assert of.prefix is not None and of.prefix.snapshots is not None and of.prefix.disk is not None
    put, num_bytes, refused = of.prefix.disk.put, of.prefix.snapshots.num_bytes, []

    def full_at_first(key, payload):
        if len(payload) == num_bytes and not refused:
            refused.append(key)
            return False
        return put(key, payload)

    monkeypatch.setattr(of.prefix.disk, "put", full_at_first)
    ask(of, prompt)
    of.close()
    of = engine(reuse=reuse_of("disk", folder), model="hybrid")
    _, cached = ask(of, [*prompt, 5])
    assert refused and cached == [256]
    of.close()


def test_ram_that_pages_come_and_go_in_stays_whole():
    of = engine(reuse=KVReuse(ram_bytes=140_000))
    assert of.prefix is not None
    prompts, choose = [tokens(300, seed=seed) for seed in range(6)], random.Random(4)
    for _ in range(60):
        ask(of, [*prompts[choose.randrange(6)], 5])
        check_prefix(of.prefix)
    assert of.prefix.ram_used_bytes > 90_000


def test_a_copy_for_the_disk_that_finds_no_memory_costs_no_answer(folder, monkeypatch):
    of = engine(reuse=KVReuse(directory=folder))
    monkeypatch.setattr(prefix, "host_buffer", exhausted)
    (answer,), _ = ask(of, tokens(300, seed=1))
    assert answer == computed("int8", tuple(tokens(300, seed=1)))


def test_memory_that_ends_while_pages_are_read_loses_no_page(folder, monkeypatch):
    of = engine(reuse=KVReuse(directory=folder), model="windowed")
    ask(of, tokens(300, seed=1))
    of.close()
    of = engine(reuse=KVReuse(directory=folder), model="windowed")
    with monkeypatch.context() as patch:
        patch.setattr(prefix, "host_buffer", exhausted)
        of.submit(Request(tuple(tokens(300, seed=1)), greedy()))
        assert finished(of, steps=3).finish_reason == "error"
    check_pages(of.residency.kv_pages)
    assert ask(of, tokens(300, seed=1))[1] == [256]


def test_a_request_is_given_up_while_its_pages_come_from_the_disk(folder, monkeypatch):
    of = engine(reuse=KVReuse(directory=folder))
    ask(of, tokens(500, seed=1))
    of.close()
    of = engine(reuse=KVReuse(directory=folder))
    monkeypatch.setattr(prefix, "_READ_BYTES", 0)
    monkeypatch.setattr(prefix, "READERS", 1)
    reads, read = [], DiskTier.read

    def given_up(tier: DiskTier, *arguments: Any) -> int:
        reads.append(len(arguments[0]))
        aborting = Thread(target=of.abort, args=(request_id,))
        aborting.start()
        aborting.join(PATIENCE_S)
        assert not aborting.is_alive(), "who gives a request up waits for the disk"
        return read(tier, *arguments)

    monkeypatch.setattr(DiskTier, "read", given_up)
    request_id = of.submit(Request(tuple(tokens(500, seed=1)), greedy()))
    assert finished(of, steps=2).finish_reason == "cancelled" and reads == [1]
    check_pages(of.residency.kv_pages)


def test_a_page_is_copied_for_the_disk_once(folder, monkeypatch):
    copies, copy = [], prefix.PrefixCache._payload
    monkeypatch.setattr(
        prefix.PrefixCache, "_payload", lambda of, entry: [copies.append(entry.number), copy(of, entry)][1]
    )
    of = engine(reuse=KVReuse(directory=folder))
    assert of.prefix is not None and of.prefix.disk is not None
    of.prefix.disk._queue_bytes = 4 * of.prefix.payload_bytes(1)
    goes_on, write = Event(), DiskTier._write
    monkeypatch.setattr(DiskTier, "_write", lambda *page: goes_on.wait(PATIENCE_S) and write(*page))
    ask(of, tokens(500, seed=1))
    assert sorted(copies) == list(range(len(copies))) and len(copies) <= 5
    goes_on.set()
    assert of.prefix.disk.flush(10)
    of.close()
    copies.clear()
    of = engine(reuse=KVReuse(directory=folder))
    assert of.prefix is not None and of.prefix.disk is not None
    assert bytes(32) not in of.prefix.disk  # which waits until all is listed
    kept = of.prefix.disk.num_pages
    ask(of, tokens(500, seed=1))
    assert sorted(copies) == list(range(kept, 7))


@pytest.mark.parametrize("kv", ["bf16", "int8", "k8v4", "int4"])
@pytest.mark.parametrize("place", [10, 70, 255])
@pytest.mark.parametrize("is_native", [True, False])
def test_a_nan_anywhere_in_a_prompt_is_an_error_and_known_to_no_other(kv, place, is_native, folder, monkeypatch):
    if not is_native:
        monkeypatch.setattr(cpu_linear, "is_available", lambda: False)
    config, chosen = parse_config(SHAPE, "a test's config"), recipe("bf16")
    of = load_decoder(RandomBlocks(chosen), config, chosen, dtype=torch.bfloat16, device=torch.device("cpu"))
    of.embed.matrix.tensors["weight"].data[2] = torch.nan
    poisoned = Engine(
        LoadedModel(of, CTX),
        word_tokenizer(VOCAB),
        kv=kv,
        reuse=KVReuse(directory=folder),
        computed=Computed("nan", "bf16"),
    )
    prompt = tokens(300, seed=1)
    prompt[place] = 2
    poisoned.submit(Request(tuple(prompt), greedy()))
    assert "a NaN or an infinity" in str(finished(poisoned, steps=3).error)
    assert poisoned.prefix is not None and not poisoned.prefix.num_pages
    poisoned.close()


@pytest.mark.skipif(not cpu_linear.is_available(), reason="other kernels' bits depend on the chunks")
class Chats(RuleBasedStateMachine):
    """Conversations as people have them, beside an engine that computes everything."""

    model = "llama"
    conversations = Bundle("conversations")

    @initialize()
    def begin(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.kv, self.header = "int8", tokens(40, seed=0)
        self.engine = self._engine()

    def _engine(self) -> Engine:
        snapshots = 4 * engine(model=self.model).residency.kv_pages.snapshot_bytes
        reuse = KVReuse(ram_bytes=60_000, snapshot_bytes=snapshots, directory=Path(self.folder.name) / "kv")
        return engine(self.kv, reuse, self.model)

    def _ask(self, *chats: tuple[int, ...]) -> list[tuple[int, ...]]:
        """What the chats become. Each is its tokens behind the template's header."""
        prompts = [tuple([*self.header, *chat][: CTX - ANSWER - 1]) for chat in chats]
        answers, _ = ask(self.engine, *prompts)
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer == computed(self.kv, prompt, self.model)
        return [(*chat, *(token_id for token_id, _ in answer)) for chat, answer in zip(chats, answers, strict=True)]

    @rule(target=conversations, message=PIECES)
    def open(self, message: int) -> tuple[int, ...]:
        return self._ask((*tokens(20 + 15 * message, seed=message), END))[0]

    @rule(target=conversations, chat=conversations, message=PIECES)
    def answer(self, chat: tuple[int, ...], message: int) -> tuple[int, ...]:
        return self._ask((*chat, END, *tokens(10 + 7 * message, seed=message), END))[0]

    @rule(target=conversations, chat=conversations, kept=st.integers(1, 200), message=PIECES)
    def edit(self, chat: tuple[int, ...], kept: int, message: int) -> tuple[int, ...]:
        return self._ask((*chat[:kept], *tokens(30, seed=message)))[0]

    @rule(chat=conversations)
    def regenerate(self, chat: tuple[int, ...]) -> None:
        if len(chat) > ANSWER:
            self._ask(chat[:-ANSWER])

    @rule(target=conversations, chats=st.lists(conversations, min_size=2, max_size=5), message=PIECES)
    def fork(self, chats: list[tuple[int, ...]], message: int) -> Any:
        return multiple(*self._ask(*((*chat, *tokens(12, seed=message + n)) for n, chat in enumerate(chats))))

    @rule(chat=conversations, steps=st.integers(0, 4))
    def cancel(self, chat: tuple[int, ...], steps: int) -> None:
        prompt = tuple([*self.header, *chat][: CTX - ANSWER - 1])
        request_id = self.engine.submit(Request(prompt, greedy()))
        for _ in range(steps):
            self.engine.step()
        self.engine.abort(request_id)
        self.engine.step()

    @rule()
    def evict(self) -> None:
        evict(self.engine)

    @rule()
    def persist(self) -> None:
        assert self.engine.prefix is not None and self.engine.prefix.disk is not None
        assert self.engine.prefix.disk.flush(10)

    @rule()
    def restart(self) -> None:
        self.engine.close()
        self.engine = self._engine()

    @rule(kv=st.sampled_from(["bf16", "int8", "k8v4", "int4"]))
    def change_format(self, kv: str) -> None:
        self.kv = kv
        self.restart()

    @rule(template=st.integers(0, 2))
    def change_template(self, template: int) -> None:
        self.header = tokens(40 + template, seed=template)

    @rule(number=st.integers(0, 1000), at=st.integers(0, 50_000))
    def damage(self, number: int, at: int) -> None:
        """A byte of some file of pages, behind the engine's back."""
        paths = sorted(Path(self.folder.name).rglob("*.page"))
        if paths:
            path = paths[number % len(paths)]
            spoil(path, at % path.stat().st_size)

    @invariant()
    def pages_are_owned_as_often_as_counted(self) -> None:
        if hasattr(self, "engine"):
            check_pages(self.engine.residency.kv_pages)

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.close()
            self.folder.cleanup()


COMMON: dict[str, Any] = {"deadline": None, "suppress_health_check": list(HealthCheck), "derandomize": True}
TestChats = Chats.TestCase
TestChats.settings = settings(max_examples=examples(25), stateful_step_count=40, **COMMON)


class HybridChats(Chats):
    """With a model whose states cannot be cut back."""

    model = "hybrid"


TestHybridChats = HybridChats.TestCase
TestHybridChats.settings = settings(max_examples=50, stateful_step_count=40, **COMMON)


class LongChats(Chats):
    """The same, for thousands of steps."""


@pytest.mark.slow
class TestLongChats(LongChats.TestCase):  # type: ignore[name-defined, misc]
    settings = settings(max_examples=150, stateful_step_count=60, **COMMON)


class LongHybridChats(HybridChats):
    """The same, for 20,000 steps."""


@pytest.mark.slow
class TestLongHybridChats(LongHybridChats.TestCase):  # type: ignore[name-defined, misc]
    settings = settings(max_examples=400, stateful_step_count=50, **COMMON)
