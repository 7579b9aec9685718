"""Block tables and pools: every page owned as often as counted, none of them changed under another owner's hands."""

from __future__ import annotations

import ctypes
import itertools
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from localllm.cache import page_folder
from localllm.cache.kv_eviction import Eviction
from localllm.cache.kv_format import KV_FORMATS, choose_format
from localllm.cache.kv_pages import KVPages
from localllm.cache.layer_group import Spill
from localllm.cache.paged_kv import PagedKV, shared_tokens
from localllm.cache.pages import HOST, PagePool
from localllm.cache.prefix import PrefixCache
from localllm.kernels import kv_page
from localllm.kernels.kv_page import PAGE_TOKENS
from localllm.kernels.paged_attention import write
from localllm.kernels.sizes import KVShape
from tests.cli_support import run_cli, write_checkpoint
from tests.kv_support import check_pages, check_prefix

KH, D, LAYERS = 2, 32, 2
CARD = torch.device("cpu", 0)  # equal to the host in all but its name
every_format = pytest.mark.parametrize("kv", KV_FORMATS)


def new_pages(
    kv: str = "int4",
    windows: tuple[int | None, ...] = (None, None),
    device: torch.device | tuple[torch.device, ...] = HOST,
    spill: Spill | None = None,
    eviction: Eviction | None = None,
) -> KVPages:
    return KVPages(
        KV_FORMATS[kv],
        windows=windows,
        devices=[device] * len(windows) if isinstance(device, torch.device) else device,
        shapes=[KVShape(KH, D)] * len(windows),
        dtype=torch.float32,
        spill=spill,
        eviction=eviction,
    )


TABLE = torch.randn(10_100, KH, D, generator=torch.Generator().manual_seed(0))


def features(token_ids: list[int]) -> Tensor:
    """[T, KH, D]: other numbers for every token."""
    return TABLE[torch.tensor(token_ids)]


def grow(kv: PagedKV, token_ids: list[int], *, advance: bool = True) -> None:
    """Write what is missing of a sequence."""
    past = kv.length
    kv.prepare(len(token_ids))
    new = features(token_ids[past:])
    for layer, _ in held_layers(kv):
        rows = iter(new)
        for count, at, part in kv.runs(layer, past, len(new)):
            run = torch.stack([*itertools.islice(rows, count)])
            write(part, at, run + layer, run - layer)
    if kv.masses is not None:
        for position in kv.masses.watched(past, past + len(new)):  # another page is looked at each time
            kv.masses.row(position)[0, position % kv.masses.row(position).shape[1]] += 1
    if advance:
        kv.advance(len(new))


def held_layers(kv: PagedKV) -> Iterator[tuple[int, list[Tensor]]]:
    """Each layer, and its parts of the pages that are on the disk, which are in memory meanwhile."""
    if (ring := kv.ring) is not None:
        ring.begin(range(LAYERS), [kv])
    for layer in range(LAYERS):
        with nullcontext() if ring is None else ring.held(layer):
            is_spilled = ring is not None and kv.extents.get(kv.places[layer][0])
            yield layer, ring.parts(kv, layer) if ring is not None and is_spilled else []


def used(pages: KVPages, prefix: PrefixCache, seed: int) -> list[int]:
    """500 tokens of a sequence that has come and gone."""
    ids = random.Random(seed).sample(range(10_000), 500)
    sequence = PagedKV(pages, 501)
    prefix.attach(sequence, ids)
    grow(sequence, ids)
    prefix.seal(sequence, ids)
    sequence.close()
    return ids


def assert_holds(kv: PagedKV, name: str, token_ids: list[int]) -> None:
    """Its pages hold the keys of these tokens, as later pages' queries read them."""
    assert kv.length == len(token_ids)
    for layer, spilled in held_layers(kv):
        group, index = kv.places[layer]
        pages = [None if page is None else page.layer(index) for page in kv.tables[group]]
        pages[1 : 1 + len(spilled)] = spilled
        for number, begin in enumerate(range(0, len(token_ids), PAGE_TOKENS)):
            own, page = features(token_ids[begin : begin + PAGE_TOKENS]), pages[number]
            if page is None:  # a window has left it
                continue
            dense, coded = kv.layouts_of(layer)
            layout, x = (dense if number == 0 else coded or dense), own + layer
            expected = torch.zeros(layout.layer_bytes, dtype=torch.uint8)
            kv_page.store(layout, expected, 0, *[kv_page.rotated(x) if name != "bf16" else x] * 2)
            theirs, ours = (kv_page.load(layout, part[None])[0][:, : len(own)] for part in (expected, page))
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


@every_format
def test_a_rollback_inside_the_open_page_is_free_and_is_written_over(kv):
    pages = new_pages(kv)
    sequence, ids = PagedKV(pages, 300), list(range(150))
    grow(sequence, ids)
    assert sequence.trim(140) == 140
    ids = [*ids[:140], *range(1000, 1020)]
    grow(sequence, ids)
    assert_holds(sequence, kv, ids)


def test_of_a_page_that_will_go_to_the_disk_no_room_is_saved_for_others(tmp_path):
    pages = new_pages(spill=Spill(tmp_path, 8 * PAGE_TOKENS))
    prefix, ids = PrefixCache(bytes(32), pages), list(range(1000))
    with closing(PagedKV(pages, 1000)) as first, closing(PagedKV(pages, 1000)) as second:
        grow(first, ids[:500])
        prefix.seal(first, ids[:500])
        prefix.attach(second, ids[:500])
        assert shared_tokens([first, second]) == PAGE_TOKENS, "the first one stays"
        with closing(PagedKV(pages, 1000)):
            promised = pages.nbytes
            for end in range(520, 1000, 60):
                grow(first, ids[:end])
                check_pages(pages)
        assert first.num_spilled and pages.groups[0].sealed.nbytes <= promised
        grow(second, ids[:980])
        assert_holds(second, "int4", ids[:980])


@every_format
def test_a_rollback_into_a_sealed_page_leaves_who_shares_it_as_he_was(kv):
    pages = new_pages(kv)
    prefix = PrefixCache(bytes(32), pages)
    first, second, ids = PagedKV(pages, 400), PagedKV(pages, 400), list(range(200))
    grow(first, ids)
    prefix.seal(first, ids)
    prefix.attach(second, ids)
    assert second.length == 192
    kept = second.trim(100)
    assert kept == (100 if kv == "bf16" else 64)
    changed = [*ids[:kept], *range(2000, 2080)]
    grow(second, changed)
    assert_holds(second, kv, changed)
    assert_holds(first, kv, ids)
    check_pages(pages)


@every_format
def test_what_a_forward_wrote_that_was_given_up_is_written_over(kv):
    pages = new_pages(kv)
    sequence, ids = PagedKV(pages, 300), list(range(100))
    grow(sequence, ids)
    grow(sequence, [*ids, *range(500, 600)], advance=False)
    grow(sequence, [*ids, *range(700, 780)])
    assert_holds(sequence, kv, [*ids, *range(700, 780)])


def test_pages_that_a_forward_needed_are_copied_outside_of_it():
    pages = new_pages("bf16")
    with torch.inference_mode():
        kv = PagedKV(pages, 200)
        grow(kv, list(range(70)))
    branch = kv.branch(90)
    grow(branch, list(range(80)))
    assert_holds(branch, "bf16", list(range(80)))
    assert_holds(kv, "bf16", list(range(70)))


def test_a_closed_sequence_gives_everything_back():
    pages = new_pages()
    sequence = PagedKV(pages, 1000)
    grow(sequence, list(range(900)))
    sequence.close()
    sequence.close()  # once more changes nothing
    check_pages(pages)
    assert all(pool.reserved == 0 and len(pool.free) == len(pool.pages) for pool in pages.groups[0].pools)


def test_a_reservation_that_finds_no_memory_takes_nothing(monkeypatch):
    pages = new_pages()
    PagedKV(pages, 64)
    before = [pool.reserved for pool in pages.groups[0].pools]

    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(type(pages.groups[0].dense), "_grow", fail)
    with pytest.raises(MemoryError):
        PagedKV(pages, 100_000)
    assert [pool.reserved for pool in pages.groups[0].pools] == before


def test_a_window_holds_no_more_pages_than_it_sees():
    pages = new_pages("int8", windows=(100, None))
    sequence, ids = PagedKV(pages, 1000), list(range(1000))
    for end in range(1, 1001, 7):
        grow(sequence, ids[:end])
    windowed, whole = (sum(page is not None for page in table) for table in sequence.tables)
    assert windowed <= 3 and whole == 16
    check_pages(pages)


def test_a_rollback_behind_what_a_window_has_left_begins_anew():
    pages = new_pages("int8", windows=(100, None))
    sequence, ids = PagedKV(pages, 1000), list(range(900))
    for end in (300, 600, 900):
        grow(sequence, ids[:end])
    assert sequence.trim(300) == 0
    grow(sequence, ids[:400])
    assert_holds(sequence, "int8", ids[:400])


@every_format
def test_pages_that_move_to_another_device_keep_their_bytes_and_their_owners(kv):
    pages = new_pages(kv)
    prefix = PrefixCache(bytes(32), pages)
    sequence, ids = PagedKV(pages, 300), list(range(200))
    grow(sequence, ids)
    prefix.seal(sequence, ids)
    other = CARD
    pages.move([HOST, other])
    assert not pages.is_on_host
    assert_holds(sequence, kv, ids)
    check_pages(pages)
    pages.move([HOST, HOST])
    assert pages.is_on_host
    assert_holds(sequence, kv, ids)
    again = PagedKV(pages, 300)
    prefix.attach(again, ids)
    assert_holds(again, kv, ids[:192])


def test_pages_go_to_ram_and_come_back_whatever_devices_they_are_on():
    pages = new_pages("int4", device=CARD)
    prefix = PrefixCache(bytes(32), pages, ram_bytes=1 << 24)
    ids, *_ = [used(pages, prefix, seed) for seed in range(4)]  # each pushes the one before out of the pools
    sequence = PagedKV(pages, 501)
    prefix.attach(sequence, ids)
    assert sequence.length == 448 and prefix.counts.ram >= 5
    assert_holds(sequence, "int4", ids[:448])


def test_a_page_goes_to_another_memory_and_back_in_one_copy(monkeypatch):
    """Not layer by layer: a GPU has all of them in one run of bytes."""
    pages = new_pages("int8", (None,) * 8, device=CARD)
    (group,) = pages.groups
    sequence = PagedKV(pages, 300)
    sequence.prepare(200)
    held = [page for page in sequence.tables[0] if page is not None]
    for page in held:
        page.parts[CARD].random_(0, 256)
    contents = [page.parts[CARD].clone().view(-1) for page in held]
    copy_, copies = Tensor.copy_, 0

    def counted(into: Tensor, *source: Any, **named: Any) -> Tensor:
        nonlocal copies
        copies += 1
        return copy_(into, *source, **named)

    monkeypatch.setattr(Tensor, "copy_", counted)
    payloads = [torch.zeros(page.pool.page_bytes, dtype=torch.uint8) for page in held]
    assert [page.write_to(payload) for page, payload in zip(held, payloads, strict=True)] == [*map(len, payloads)]
    assert all(map(torch.equal, payloads, contents)) and copies == len(held)
    for page, payload in zip(held, payloads, strict=True):
        page.read_from(payload)
    assert copies == 2 * len(held)
    pages.move([HOST] * 8)
    assert copies <= 3 * len(held) + len(group.pools) * 2
    sequence.close()


def test_room_in_ram_is_kept_within_its_limit():
    pages = new_pages("int4")
    prefix = PrefixCache(bytes(32), pages, ram_bytes=100_000)
    for seed in range(6):
        used(pages, prefix, seed)
        assert prefix.ram_used_bytes <= 100_000
    assert prefix.counts.spilled


def test_what_serves_later_prompts_alone_is_given_up_where_memory_runs_out():
    pages = new_pages("int4")
    prefix = PrefixCache(bytes(32), pages, ram_bytes=1 << 24)
    assert not prefix.limit_ram(0)
    prefix.limit_ram(1 << 24)
    *_, ids = [used(pages, prefix, seed) for seed in range(3)]
    assert prefix.ram_used_bytes and prefix.limit_ram(0)
    assert not prefix.ram_used_bytes
    sequence = PagedKV(pages, 501)
    prefix.attach(sequence, ids)
    assert sequence.length == 448  # in the pools still
    check_pages(pages)


def test_two_chats_that_share_what_a_window_leaves_grow_no_further_than_they_reserved(monkeypatch):
    pages = new_pages("int8", (70, None))
    prefix = PrefixCache(bytes(32), pages)
    ids, sequences = list(range(2000, 2450)), []
    for _ in range(2):
        kv = PagedKV(pages, 450)
        prefix.attach(kv, ids[:200])
        grow(kv, ids[:200])
        prefix.seal(kv, ids)
        sequences.append(kv)
    for pool in (pool for group in pages.groups for pool in group.pools):
        pool.reserve(len(pool.free) + len(pool.idle) - pool.reserved)
    monkeypatch.setattr(PagePool, "_grow", lambda *_: pytest.fail("it grows beyond what was reserved"))
    for end in range(201, 450):
        for kv in sequences:
            grow(kv, ids[:end])


def test_a_chain_is_let_go_from_its_tail_however_it_is_left():
    pages = new_pages("bf16")
    prefix = PrefixCache(bytes(32), pages)
    kv, ids = PagedKV(pages, 450), list(range(300))
    grow(kv, ids)
    prefix.seal(kv, ids)
    numbers = {page: number for number, page in enumerate(kv.tables[0])}
    kv.trim(0)
    assert [numbers[page] for page in pages.groups[0].dense.idle] == [3, 2, 1, 0]


def test_memory_that_nobody_was_promised_is_given_back():
    pages = new_pages("int8")
    kv, held = PagedKV(pages, 64), pages.nbytes
    PagedKV(pages, 4500).close()
    grown = pages.nbytes
    pages.shrink()
    check_pages(pages)
    assert grown > 2 * held and pages.nbytes <= held
    grow(kv, list(range(64)))


def test_the_disk_and_the_kernels_mean_the_same_page():
    assert page_folder.PAGE_TOKENS == PAGE_TOKENS


@pytest.mark.parametrize(("head_dim", "format_name"), [(64, "int4"), (80, "bf16"), (96, "int4"), (256, "int4")])
def test_heads_that_groups_do_not_divide_stay_dense(head_dim, format_name):
    assert choose_format("int4", [KVShape(2, 64), KVShape(2, head_dim)], 2).name == format_name


@pytest.mark.parametrize(("kv", "most"), [("int8", 0.55), ("k8v4", 0.42), ("int4", 0.29)])
def test_a_sequence_of_8192_tokens_takes_this_much_of_bf16(kv, most):
    """With its dense pages: an 8B model's shape."""

    def num_bytes(name: str) -> int:
        sizes = KV_FORMATS[name].sizes([KVShape(8, 128)] * 32, 2)
        return 8192 * sizes.per_token + sizes.per_sequence

    assert num_bytes(kv) / num_bytes("bf16") <= most


class Sequences(RuleBasedStateMachine):
    """Sequences that share a prefix cache, beside plain lists of their tokens."""

    @initialize(
        kv=st.sampled_from(list(KV_FORMATS)),
        window=st.sampled_from([None, 90]),
        ram=st.sampled_from([0, 60_000]),
        spills=st.sampled_from([0, 3, 8]),
        eviction=st.sampled_from(["off", "off", "sinks:64", "sinks:128", "heavy:192"]),
        homes=st.sampled_from([(HOST, HOST), (CARD, CARD), (CARD, HOST)]),
    )
    def begin(
        self,
        kv: str,
        window: int | None,
        ram: int,
        spills: int,
        eviction: str,
        homes: tuple[torch.device, torch.device],
    ) -> None:
        """spills: of a sequence so many pages stay in memory; 0: all. homes: of its layers; the others rest on the
        disk, or on the host where a layer is on a card."""
        self.directory = tempfile.TemporaryDirectory()
        rule = Eviction.of(eviction)
        homes = homes if rule is None else (HOST, HOST)  # it is for a CPU
        own = spills if rule is None else 0
        spill = Spill(Path(self.directory.name), own * PAGE_TOKENS, homes[0]) if own else None
        self.kv, self.pages = kv, new_pages(kv, (None, window), homes, spill, rule)
        self.prefix = PrefixCache(bytes(32), self.pages, ram_bytes=ram)
        self.live: list[tuple[PagedKV, list[int]]] = []
        self.is_full = False
        plain = PagePool._grow

        def grown(pool: PagePool, count: int) -> None:
            if self.is_full:
                raise MemoryError
            plain(pool, count)

        self.patch = mock.patch.object(PagePool, "_grow", grown)
        self.patch.start()

    def teardown(self) -> None:
        if hasattr(self, "patch"):
            self.patch.stop()
            self.pages.close()
            self.directory.cleanup()

    @rule(is_full=st.booleans())
    def memory(self, is_full: bool) -> None:
        """There is more of it, or none any more."""
        self.is_full = is_full

    @rule(family=st.integers(0, 2), length=st.integers(1, 350), own=st.integers(0, 3))
    def admit(self, family: int, length: int, own: int) -> None:
        ids = [family * 1000 + i for i in range(length)] + [5000 + own] * 3
        with suppress(MemoryError):
            kv = PagedKV(self.pages, 450)
            self.live.append((kv, ids))
            self.written(lambda: self.prefix.attach(kv, ids))

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 99), count=st.integers(1, 40))
    def go_on(self, which: int, count: int) -> None:
        kv, ids = self.live.pop(which % len(self.live))
        self.live.append((kv, ids))
        ids += [7000 + which + i for i in range(min(count, 450 - len(ids)))]
        self.written()

    def written(self, attach: Callable[[], object] = lambda: None) -> None:
        """The rest of the last sequence is computed; one for which memory ends is closed, as an engine does."""
        kv, ids = self.live[-1]
        try:
            attach()
            if len(ids) > kv.length:
                grow(kv, ids)
            self.prefix.seal(kv, ids)
        except MemoryError:
            kv.close()
            self.live.pop()

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 99), kept=st.integers(0, 450))
    def roll_back(self, which: int, kept: int) -> None:
        kv, ids = self.live[which % len(self.live)]
        try:
            del ids[kv.trim(min(kept, kv.length)) :]
        except MemoryError:
            kv.close()
            self.live.remove((kv, ids))

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 99), own=st.integers(1, 15), others=st.integers(1, 15), right=st.integers(0, 15))
    def branch(self, which: int, own: int, others: int, right: int) -> None:
        """Two ends of a sequence are computed; the sequence goes on as far as its own is accepted."""
        kv, ids = self.live.pop(which % len(self.live))
        self.live.append((kv, ids))
        own, others = (min(count, 450 - len(ids)) for count in (own, others))
        if not own:
            return
        with suppress(MemoryError), closing(kv.branch(len(ids) + others)) as branch:
            ends = ((kv, [8000 + i for i in range(own)]), (branch, [9000 + i for i in range(others)]))
            for each, more in ends:
                each.prepare(len(ids) + len(more))
            for each, more in ends:
                grow(each, ids + more)
            more = ends[0][1]
            kept = kv.trim(len(ids) + min(right, len(more)))
            ids += more[: kept - len(ids)]
            del ids[kept:]
        self.written()

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 99))
    def close(self, which: int) -> None:
        self.live.pop(which % len(self.live))[0].close()

    @invariant()
    def everyone_has_his_own(self) -> None:
        if hasattr(self, "pages"):
            check_pages(self.pages)
            check_prefix(self.prefix)
            for kv, ids in self.live[-2:]:
                assert_holds(kv, self.kv, ids)
                if kv.pages.eviction is not None:
                    _assert_bounded(kv)


def _assert_bounded(kv: PagedKV) -> None:
    """The first page is there, the newest are, and of the others no more than the rule and a forward's."""
    eviction, table = kv.pages.eviction, kv.tables[0]
    assert eviction is not None
    held = [number for number in range(kv.length // PAGE_TOKENS) if table[number] is not None]
    newest = eviction.pages if eviction.kind == "sinks" else eviction.newest
    last = kv.length // PAGE_TOKENS
    assert not kv.length or {0, *range(max(0, last - newest), last)} <= {*held, kv.length // PAGE_TOKENS}
    assert len(held) <= 1 + eviction.pages + 350 // PAGE_TOKENS + 1
    assert kv.num_evicted == PAGE_TOKENS * (last - len(held))


COMMON: dict[str, Any] = {"deadline": None, "suppress_health_check": list(HealthCheck), "derandomize": True}
TestSequences = Sequences.TestCase
TestSequences.settings = settings(max_examples=15, stateful_step_count=25, **COMMON)


def test_a_place_in_the_file_that_another_sequence_takes_is_read_anew(tmp_path):
    """As no forward of all pages comes between: the others' tokens choose theirs."""
    pages = KVPages(
        KV_FORMATS["int8"],
        windows=(None, None),
        devices=[HOST] * LAYERS,
        shapes=[KVShape(KH, D)] * LAYERS,
        dtype=torch.float32,
        spill=Spill(tmp_path, 12 * PAGE_TOKENS),
        chosen_pages=1,
    )
    ring = pages.ring
    assert ring is not None

    def filled_with(value: int) -> PagedKV:
        kv = PagedKV(pages, 8 * PAGE_TOKENS)
        for number in range(8):
            kv.prepare((number + 1) * PAGE_TOKENS)
            page = kv.tables[0][number]
            assert page is not None
            for part in page.parts.values():
                part.fill_(value)
            kv.advance(PAGE_TOKENS)
        kv.sketches(0).made(HOST).fill_(8)
        return kv

    def brought(kv: PagedKV) -> set[int]:
        """Return the first bytes of its pages on the disk, as a layer's tokens find them that choose all of them."""
        ring.begin(range(LAYERS), [kv], num_chosen=1)
        _, coded = kv.layouts_of(1)
        assert ring.brings and coded is not None
        chosen = kv.addresses(0, HOST)[1 : 1 + kv.num_spilled].clone()
        ring.bring(1, chosen)
        # Behind the part of layer 0, as kernels have it.
        return {ctypes.string_at(address + coded.layer_bytes, 1)[0] for address in chosen.tolist()}

    with closing(filled_with(1)), closing(filled_with(2)) as first:  # the file stays as long as one has pages there
        assert brought(first) == {2}
        first.close()
        assert brought(filled_with(3)) == {3}
    pages.close()


def test_heads_that_no_group_divides_keep_dense_pages_and_who_asked_for_others_is_told(tmp_path):
    model = write_checkpoint(tmp_path / "narrow-heads")
    told = run_cli("run", model, "-p", "the fox", "--max-tokens", "2", "--kv", "int8", "--raw")
    told_line = "keys and values stay in bf16: int8 codes groups of 32 features, a head here has 16"
    assert told.code == 0 and told.err.splitlines().count(told_line) == 1
    assert told_line not in run_cli("run", model, "-p", "the fox", "--max-tokens", "2", "--raw").err
