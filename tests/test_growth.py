"""The context of a loaded model becomes longer between two requests: blocks make room, no token changes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from localllm import Engine, EngineThread, FinishedEvent, GrownEvent, Request, SamplingParams
from localllm.engine import context_growth as growth
from localllm.engine import planner
from localllm.engine.events import Event
from localllm.engine.loader import LoadedModel
from localllm.engine.placement import model_shape, smaller_kv
from localllm.engine.prefix_config import KVReuse
from localllm.engine.residency import Residency
from localllm.errors import CheckpointError, ContextOverflowError, DoesNotFitError, Fix
from localllm.models.families import load_config
from localllm.models.offloaded_model import OffloadedModel
from localllm.offload.planner.advice import fixes_for_context
from localllm.offload.planner.machine import Held, Machine, Memory, Rates
from localllm.offload.planner.model_shape import BlockShape, ModelShape
from localllm.offload.planner.plan import KEPT_PAGES, Plan
from localllm.offload.planner.search import Search
from localllm.quant.recipe import RECIPES
from localllm.text.tokenizer import Tokenizer
from tests.engine_support import steps, token_ids
from tests.kv_support import check_pages
from tests.packed_support import pack, small_checkpoint
from tests.test_device_placement import Packed
from tests.test_placement import engine, shape_of, with_small_models

CTX, LONGEST = 64, 256
SHORT, LONG = tuple(range(3, 33)), tuple(range(3, 123))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


small_models = pytest.fixture(scope="module", autouse=True)(with_small_models)


def search(shape: ModelShape, memory_bytes: int, ctx: int) -> Search:
    return Search(shape, Machine(Memory(memory_bytes, 0, memory_bytes), Rates(1, 1, 1)), ctx)


def least(directory: Path, weights: str, ctx: int) -> int:
    return search(shape_of(directory, weights), 1, ctx).least_ram_bytes()


def whole(directory: Path, weights: str, ctx: int) -> int:
    """Where every block stays in memory, and not one more would."""
    return search(shape_of(directory, weights), 1 << 40, ctx).best().total_bytes("ram")


@contextmanager
def capped(directory: Path, weights: str, memory_bytes: int) -> Iterator[Engine]:
    """With so much memory, also for what is planned later."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "process_memory", lambda *_, **__: Memory(memory_bytes, 0, memory_bytes))
        patch.setattr(planner, "as_stored", lambda _files, _name, config, _weights: (config, None))
        with engine(directory, weights, ctx=CTX) as loaded:
            yield loaded


def answer(engine: Engine, prompt: tuple[int, ...], *, grows: bool = True, max_tokens: int | None = 8) -> list[Event]:
    request = Request(prompt, SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True), grows)
    engine.check(request)
    engine.submit(request)
    events = list(steps(engine))
    check_pages(engine.residency.kv_pages)
    return events


def refusal(events: list[Event]) -> ContextOverflowError:
    """Of a request of which nothing else is told."""
    (finished,) = events
    assert isinstance(finished, FinishedEvent) and isinstance(finished.error, ContextOverflowError)
    return finished.error


def grown(events: list[Event]) -> list[GrownEvent]:
    return [event for event in events if isinstance(event, GrownEvent)]


def expected(directory: Path, weights: str, *prompts: tuple[int, ...]) -> list[list[int]]:
    with engine(directory, weights, ctx=LONGEST) as large:
        return [token_ids(answer(large, prompt)) for prompt in prompts]


@pytest.mark.parametrize("weights", ["int4", "bf16"])
def test_a_prompt_that_does_not_fit_makes_the_context_grow_and_has_the_text_of_a_large_one(
    directory: Path, weights: str
) -> None:
    after = (*SHORT, 7, 7)
    right = expected(directory, weights, SHORT, LONG, after)
    with engine(directory, weights, ctx=CTX) as small:
        assert token_ids(answer(small, SHORT)) == right[0]
        events = answer(small, LONG)
        assert [(event.ctx_before, event.ctx) for event in grown(events)] == [(CTX, 128)]
        assert isinstance(events[0], GrownEvent) and token_ids(events) == right[1]
        assert (small.ctx, events[-1].ctx) == (128, 128)  # type: ignore[union-attr]
        assert token_ids(answer(small, after)) == right[2] and not grown(answer(small, after))


def test_blocks_go_to_the_disk_where_the_longer_context_needs_their_memory(directory: Path) -> None:
    right = expected(directory, "int4", LONG)
    with capped(directory, "int4", whole(directory, "int4", CTX)) as small:
        assert small.plan is not None and not small.plan.streamed
        events = answer(small, LONG)
        (event,) = grown(events)
        assert event.num_from_disk > 0 and event.num_from_memory == 0 and event.decode_tok_s
        assert small.residency.plan is not None and len(small.residency.plan.streamed) == event.num_from_disk
        assert small.residency.plan.total_bytes("ram") <= small.residency.plan.limits["ram"]
        assert token_ids(events) == right[0]


def test_pages_that_only_serve_later_prompts_give_way_to_a_longer_context(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with capped(directory, "int4", whole(directory, "int4", LONGEST) + (1 << 20)) as engine:
        planned, given_up = engine.planned, []

        def tight(ctx: int) -> Plan:
            if not given_up:
                raise DoesNotFitError("a longer context does not fit")
            return planned(ctx)

        monkeypatch.setattr(engine, "planned", tight)
        monkeypatch.setattr(engine.kv_allocator, "give_up_ram", lambda: given_up.append(1) or True)
        assert grown(answer(engine, LONG)) and given_up
        assert engine.prefix is not None and engine.plan is not None
        kept = engine.residency.plan and engine.residency.plan.ledger["ram"].get(KEPT_PAGES, 0)
        assert engine.prefix.ram_bytes <= (kept or 0)


def test_every_sequence_has_room_for_its_own_dense_pages(directory: Path) -> None:
    with capped(directory, "int4", whole(directory, "int4", LONGEST)) as engine:
        plan = engine.plan
        assert plan is not None
        limits = engine.scheduler.limits
        for count in range(1, 9):
            tokens = limits.kv_tokens - count * limits.sequence_tokens
            planned = plan.shape.kv_bytes(plan.most_kv_tokens, plan.sequences)
            assert plan.shape.kv_bytes(tokens, count) <= planned + plan.shape.kv_bytes_per_token


def test_a_growth_beyond_the_memory_is_refused_with_both_counts_and_the_engine_goes_on(directory: Path) -> None:
    right = expected(directory, "int4", SHORT)
    with capped(directory, "int4", least(directory, "int4", CTX)) as small:
        error = refusal(answer(small, LONG))
        assert "120 tokens" in error.what and "the context 64" in error.what
        assert "tokens of context" in error.why and error.fix
        assert small.ctx == CTX and token_ids(answer(small, SHORT)) == right[0]


def test_a_growth_that_is_refused_leaves_room_for_kept_pages(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with capped(directory, "int4", whole(directory, "int4", LONGEST) + (1 << 22)) as engine:
        assert engine.prefix is not None and engine.plan is not None
        engine.kv_allocator._reuse = KVReuse()
        engine.kv_allocator.share_ram(engine.plan)
        room = engine.prefix.ram_bytes

        def refused(_: int) -> Plan:
            raise DoesNotFitError("a longer context does not fit")

        monkeypatch.setattr(engine, "planned", refused)
        refusal(answer(engine, LONG))
        assert not engine.kv_allocator.give_up_ram() and engine.prefix.ram_bytes == room > 0


def test_a_prompt_that_fits_with_too_little_room_for_its_answer_has_what_there_is_where_nothing_can_grow(
    directory: Path,
) -> None:
    with capped(directory, "int4", least(directory, "int4", CTX)) as small:
        events = answer(small, tuple(range(3, 61)), max_tokens=None)
        assert not grown(events) and len(token_ids(events)) == CTX - 58


def test_a_prompt_longer_than_the_model_can_read_is_refused_at_once(directory: Path) -> None:
    with engine(directory, "int4", ctx=CTX) as small:
        with pytest.raises(ContextOverflowError, match="256 tokens"):
            answer(small, (5,) * LONGEST)
        events = answer(small, (5,) * (LONGEST - 1))
        assert [event.ctx for event in grown(events)] == [LONGEST] and len(token_ids(events)) == 1


def test_nothing_grows_for_a_request_that_does_not_ask_for_it(directory: Path) -> None:
    with engine(directory, "int4", ctx=CTX) as small:
        with pytest.raises(ContextOverflowError, match=r"120 tokens, the context 64"):
            answer(small, LONG, grows=False)
        assert not grown(answer(small, SHORT, grows=False, max_tokens=None)) and small.ctx == CTX


def test_a_request_that_needs_growth_waits_for_those_that_run_and_those_behind_it_for_it(directory: Path) -> None:
    right = expected(directory, "int4", SHORT, LONG, SHORT[:9])
    greedy = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    with capped(directory, "int4", whole(directory, "int4", CTX)) as small:
        service = EngineThread(lambda: small)
        streams = [service.submit(Request(prompt, greedy, grows=True)) for prompt in (SHORT, LONG, SHORT[:9])]
        told = [list(stream) for stream in streams]
        service.close()
    assert [token_ids(events) for events in told] == right
    assert [len(grown(events)) for events in told] == [0, 1, 0]


def test_pages_computed_before_are_found_after(directory: Path) -> None:
    with engine(directory, "int4", ctx=128) as small:
        first = tuple(range(3, 103))
        token_ids(answer(small, first))
        events = answer(small, (*first, *first))
        assert grown(events) and token_ids(events)
        finished = events[-1]
        assert isinstance(finished, FinishedEvent) and finished.usage.cached_tokens == 64


@pytest.mark.parametrize("where", ["blocks", "keys and values"])
@pytest.mark.parametrize("failure", [MemoryError("none"), CheckpointError("a block is damaged")])
def test_a_growth_that_fails_on_its_way_leaves_the_engine_as_it_was(
    directory: Path, where: str, failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = expected(directory, "int4", SHORT)
    with capped(directory, "int4", whole(directory, "int4", CTX)) as small:
        blocks = small.residency.placed.blocks  # type: ignore[union-attr]
        plain_place, plain_new = OffloadedModel.place, Residency.new_kv

        def place(self: OffloadedModel, blocks_then: object, *rest: object) -> None:
            if blocks_then != blocks:
                raise failure
            plain_place(self, blocks_then, *rest)  # type: ignore[arg-type]

        def new(self: Residency, capacity: int) -> object:
            if capacity > CTX:
                raise failure
            return plain_new(self, capacity)

        with monkeypatch.context() as patch:
            if where == "blocks":
                patch.setattr(OffloadedModel, "place", place)
            else:
                patch.setattr(Residency, "new_kv", new)
            (finished,) = answer(small, LONG)
        assert isinstance(finished, FinishedEvent) and finished.error is not None
        assert small.ctx == CTX and small.residency.placed.blocks == blocks  # type: ignore[union-attr]
        assert token_ids(answer(small, SHORT)) == right[0]
        assert token_ids(answer(small, LONG)) == expected(directory, "int4", LONG)[0]


def test_a_model_computed_from_its_checkpoint_grows_as_far_as_its_memory_goes(directory: Path) -> None:
    room = whole(directory, "bf16", 128)
    with capped(directory, "bf16", room) as small:
        assert small.residency.placed is None
        assert [event.ctx for event in grown(answer(small, SHORT, max_tokens=None))] == []
        events = answer(small, tuple(range(3, 83)))
        assert [event.ctx for event in grown(events)] == [128] and token_ids(events)
        error = refusal(answer(small, (5,) * 200))
        assert "cannot be moved" in error.why or "none of its blocks" in error.why
        assert small.ctx == 128 and token_ids(answer(small, SHORT))


def test_blocks_leave_a_devices_memory_for_the_longer_context(directory: Path, tmp_path: Path) -> None:
    """A CPU stands in for the device."""
    packed = Packed(directory, pack(directory, tmp_path / "packed", "int4-g32"), "int4-g32")
    tokenizer, kinds = Tokenizer.load(directory), ("resident", "computed", "streamed", "disk")
    shape = shape_of(directory, "int4")
    roomy = search(shape, 1 << 40, CTX).best()
    mixed = tuple(packed.blocks(lambda index: kinds[index % len(kinds)]))

    def replan(ctx: int, kv: str, held: Held) -> Plan:
        return replace(roomy, ctx=ctx, kv_tokens=ctx, blocks=mixed, many_rows=8)

    with packed.opened() as placed:
        placed.place(packed.blocks(lambda _: "resident"), 8)
        right = token_ids(answer(Engine(LoadedModel(placed.decode_model, LONGEST, placed=placed), tokenizer), LONG))
        small = Engine(LoadedModel(placed.decode_model, CTX, placed=placed, replan=replan), tokenizer)
        events = answer(small, LONG)
        (event,) = grown(events)
        moved = [block.tier for block in mixed[1:] if block.tier != "vram"]
        assert (event.num_from_memory, event.num_from_disk) == (moved.count("ram"), moved.count("disk"))
        assert token_ids(events) == right and placed.blocks == mixed


def test_a_request_behind_one_that_could_not_grow_grows_by_itself_or_is_refused(directory: Path) -> None:
    greedy = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    with capped(directory, "int4", least(directory, "int4", CTX)) as small:
        ids = [small.submit(Request(prompt, greedy, grows=True)) for prompt in (LONG, (*LONG, 5), SHORT)]
        events = list(steps(small))
    ended = {event.request_id: event.error for event in events if isinstance(event, FinishedEvent)}
    assert [isinstance(ended[number], ContextOverflowError) for number in ids] == [True, True, False]


def test_a_longer_context_is_offered_with_a_format_of_keys_and_values_where_that_makes_it_fit() -> None:
    embed, head = BlockShape("embed", 4096, 1), BlockShape("head", 4096, 1)
    blocks = tuple(BlockShape(f"{number}", 8192, 1) for number in range(4))
    kv = {"kv": "int8", "kv_bytes_per_token": 1000, "kv_bytes_per_sequence": 0, "default_ctx": 4096}
    rows = {"row_bytes": 10, "state_bytes": 10, "logits_bytes": 10, "batch_rows": (8,)}
    shape = ModelShape(name="it", weights="int4", embed=embed, blocks=blocks, head=head, **kv, **rows)  # type: ignore[arg-type]
    k8v4 = replace(shape, kv="k8v4", kv_bytes_per_token=750)
    smaller = {"k8v4": k8v4, "int4": replace(shape, kv_bytes_per_token=500)}
    memory = 1_000_000
    tight = search(shape, memory, 512)
    assert fixes_for_context(tight, 700, smaller) == [Fix.flag("--ctx", 700)]
    assert fixes_for_context(tight, 1200, smaller) == [Fix.flag("--ctx", 1200, "--kv", "k8v4")]
    assert fixes_for_context(tight, 1800, smaller) == [Fix.flag("--ctx", 1800, "--kv", "int4")]
    assert fixes_for_context(tight, 4000, smaller) == []
    roomy = replace(tight, machine=Machine(Memory(memory, 0, 1 << 30, 1 << 30), Rates(1, 1, 1)))
    more, smaller_format = map(str, fixes_for_context(roomy, 1800, smaller))
    assert re.fullmatch(r"--ctx 1800 --ram \d+MiB", more) and smaller_format == "--ctx 1800 --kv int4"


def test_the_formats_that_take_less_are_named_the_largest_first(tmp_path: Path) -> None:
    config = load_config(small_checkpoint(tmp_path / "gemma2", "gemma2"))
    shape = model_shape(config, RECIPES["bf16"], "bf16", "it", kv="bf16")
    found = smaller_kv(shape, config, "bf16")
    sizes = [shape.kv_bytes_per_token, *(other.kv_bytes_per_token for other in found.values())]
    assert list(found) == ["int8", "k8v4", "int4"] and sizes == sorted(sizes, reverse=True)


def test_an_engine_without_a_plan_never_grows(directory: Path) -> None:
    with engine(directory, "bf16", ctx=CTX) as loaded:
        refusal(answer(Engine(LoadedModel(loaded.model, CTX), loaded.tokenizer), LONG))


@pytest.mark.parametrize(("prompt", "most", "contexts"), [(100, None, [256, 131]), (60, 8, [128])])
def test_the_contexts_that_are_tried_are_the_longest_first(prompt: int, most: int | None, contexts: list[int]) -> None:
    tried = growth.contexts(prompt, most, 128, 4096)
    assert tried == sorted(tried, reverse=True) and tried[0] >= prompt + 1
