"""Wherever a model's blocks rest and whoever computes them, the text is the same; a CPU stands in for the device.

On a CPU torch's streams do nothing and copies are done at once. Where it matters what waits for what, streams are
played here: each does its work in order, and which one goes on is drawn, as far as the events between them allow.
"""

from __future__ import annotations

import gc
import itertools
import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.oracle import FixedCount, Oracle
from localllm import Engine, FinishedEvent, SamplingParams, TokenEvent
from localllm.engine.loader import LoadedModel
from localllm.engine.placement import model_shape
from localllm.engine.residency import Residency
from localllm.engine.runner import ModelRunner
from localllm.engine.speculative.drafter import SkipDrafter
from localllm.engine.speculative.speculator import Speculation
from localllm.engine.step_types import StepCancelledError
from localllm.errors import DoesNotFitError
from localllm.hub import locate
from localllm.kernels.cpu_gemv import MAX_ROWS
from localllm.models.architecture import ModelConfig
from localllm.models.capabilities import can_be_split
from localllm.models.families import load_config
from localllm.models.load import DecoderParts
from localllm.models.offloaded_model import OffloadedModel
from localllm.offload.placement import NEVER, BlockPlacement
from localllm.offload.streaming.device_stream import DeviceStream, HostRun, Lane
from localllm.offload.streaming.pinned import Pinning
from localllm.offload.streaming.ring import Ring
from localllm.quant.recipe import RECIPES
from localllm.text.tokenizer import Tokenizer
from tests.engine_support import generated
from tests.packed_support import open_packed, pack, small_checkpoint
from tests.thinning import every_other, thinned

CPU = torch.device("cpu")
KINDS: dict[str, tuple[str, str]] = {  # tier, exec
    "resident": ("vram", "gpu"),
    "streamed": ("ram", "gpu"),
    "computed": ("ram", "cpu"),
    "split": ("ram", "split"),
    "disk": ("disk", "gpu"),
    "disk-computed": ("disk", "cpu"),
}


class Event:
    """Has come when its stream has done what was given to it before."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.is_timed, self.sleeps = enable_timing, blocking
        alive.add(self)

    def record(self, stream: Stream) -> None:
        self.stream, self.position = stream, stream.given

    def query(self) -> bool:
        return self.stream.done >= self.position

    def elapsed_time(self, end: Event) -> float:
        assert self.is_timed and end.is_timed and self.query() and end.query()
        return 1.0

    def synchronize(self) -> None:
        self.stream.device.run_until(self.query)


alive: weakref.WeakSet[Event] = weakref.WeakSet()


class Stream:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.queue: list[Event | Callable[[], object]] = []
        self.given = self.done = 0

    def add(self, work: Event | Callable[[], object]) -> None:
        self.queue.append(work)
        self.given += 1

    def wait_event(self, event: Event) -> None:
        self.add(event)

    @property
    def can_go_on(self) -> bool:
        return bool(self.queue) and (not isinstance(self.queue[0], Event) or self.queue[0].query())

    def go_on(self) -> None:
        work = self.queue.pop(0)
        if not isinstance(work, Event):
            work()
        self.done += 1


SECOND_CARD = torch.device("cuda", 1)


class Device:
    """What `torch.get_device_module` gives, played."""

    Event = Event

    def __init__(self, choose: random.Random) -> None:
        self.choose = choose
        self.streams: list[Stream] = []
        self.compute = self.Stream(SECOND_CARD)
        self.copying: Stream | None = None

    def Stream(self, device: torch.device) -> Stream:
        assert device == SECOND_CARD, "another card would be taken in a thread where that is the current one"
        self.streams.append(Stream(self))
        return self.streams[-1]

    def current_stream(self, device: torch.device) -> Stream:
        assert device == SECOND_CARD
        return self.compute

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self.copying = stream
        yield
        self.copying = None

    def run_until(self, is_enough: Callable[[], bool]) -> None:
        while not is_enough():
            self.choose.choice([stream for stream in self.streams if stream.can_go_on]).go_on()

    def synchronize(self, device: torch.device) -> None:
        assert device == SECOND_CARD
        self.run_until(lambda: not any(stream.queue for stream in self.streams))

    def run_some(self) -> None:
        steps = self.choose.randrange(6)
        for _ in range(steps):
            if ready := [stream for stream in self.streams if stream.can_go_on]:
                self.choose.choice(ready).go_on()

    def copy(self, into: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        assert non_blocking and self.copying is not None
        self.copying.add(lambda: into.__setitem__(slice(None), source))
        return into


@settings(max_examples=200, deadline=None)
@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=7), seed=st.integers(0, 1 << 20))
def test_a_run_is_in_its_place_while_it_is_computed(sizes: list[int], seed: int) -> None:
    """Over forwards that end, forwards that are given up, and two streams that share one ring."""
    choose = random.Random(seed)
    device = Device(choose)
    contents = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    runs = [HostRun(str(index), content) for index, content in enumerate(contents)]
    some = [run for run in runs if choose.random() < 0.6] or runs[:1]
    rings = [Ring.of([run.content.numel() for run in chosen]) for chosen in (runs, some)]
    memory = torch.zeros(max(ring.num_bytes for ring in rings), dtype=torch.uint8)
    seen: list[bool] = []

    def look(begin: int, expected: Tensor) -> None:
        seen.append(torch.equal(memory[begin : begin + expected.numel()], expected))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "get_device_module", lambda _device: device)
        patch.setattr(Tensor, "copy_", lambda into, source, non_blocking: device.copy(into, source, non_blocking))
        lane = Lane(SECOND_CARD)
        streams = [DeviceStream(chosen, ring, memory, lane) for chosen, ring in zip((runs, some), rings, strict=True)]
        held = 0
        for _ in range(10):
            which = choose.randrange(2)
            stream, ring, chosen = streams[which], rings[which], (runs, some)[which]
            stream.begin()
            end = choose.randrange(len(chosen)) if choose.random() < 0.3 else len(chosen)
            with suppress(StepCancelledError):
                for index, (run, begin) in enumerate(zip(chosen, ring.offsets, strict=True)):
                    with stream.held(run.name), stream.held("what is not streamed"):
                        for _ in range(3):
                            device.compute.add(partial(look, begin, run.content))
                        held += 3
                        if index == end:
                            raise StepCancelledError
                    device.run_some()
            if choose.random() < 0.2:  # the ring is given back: nothing may write to it, nor read it, from then on
                lane.drain()
                assert all(stream.done == stream.given for stream in device.streams) and lane.user is None
        device.run_until(lambda: len(seen) == held)
    assert all(seen)


def test_what_was_timed_is_forgotten_where_nobody_looks_at_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(random.Random(0))
    monkeypatch.setattr(torch, "get_device_module", lambda _device: device)
    monkeypatch.setattr(Tensor, "copy_", lambda into, source, non_blocking: device.copy(into, source, non_blocking))
    runs = [HostRun(str(index), torch.zeros(8, dtype=torch.uint8)) for index in range(3)]
    ring = Ring.of([8, 8, 8])
    stream = DeviceStream(runs, ring, torch.zeros(ring.num_bytes, dtype=torch.uint8), Lane(SECOND_CARD))
    before = len(alive)
    for _ in range(200):
        stream.begin()
        for run in runs:
            with stream.held(run.name):
                device.compute.add(lambda: None)
        device.run_until(lambda: not device.compute.queue)
    assert len(alive) - before < 50
    assert stream.clock.wait_s == pytest.approx(0.6)  # a wait for each run, each of a millisecond


def test_a_thread_that_waits_for_a_copy_takes_no_core(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(random.Random(0))
    monkeypatch.setattr(torch, "get_device_module", lambda _device: device)
    lane = Lane(SECOND_CARD)
    assert lane.mark().sleeps and lane.mark(lane.stream).sleeps


FAMILIES = ["llama", "qwen2", "gemma2", "olmo2", "tiny"]
PROMPT = tuple(range(3, 45))
OFTEN = {("llama", "fp32"), ("gemma2", "int8"), ("qwen2", "int4-g32")}
MODELS = [
    pytest.param(model, marks=[pytest.mark.slow] * (model not in OFTEN), id="-".join(model))
    for model in itertools.product(FAMILIES, ("fp32", "int4-g32", "int8"))
]
Drafting = Callable[[Residency], Speculation]


@pytest.fixture(scope="module", params=MODELS)
def packed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Packed:
    family, weights = request.param
    is_there = family == "tiny"
    checkpoint = locate("tiny").directory if is_there else small_checkpoint(tmp_path_factory.mktemp(family), family)
    folder = pack(checkpoint, tmp_path_factory.mktemp("packed") / "model", weights)
    return Packed(checkpoint, folder, weights)


@dataclass(frozen=True)
class Packed:
    checkpoint: Path
    folder: Path
    weights: str

    @contextmanager
    def opened(self, device: torch.device = CPU) -> Iterator[OffloadedModel]:
        with open_packed(self.checkpoint, self.folder, self.weights) as model:
            parts = DecoderParts(model.config, RECIPES[self.weights], torch.float32, device)
            with OffloadedModel(model, parts, device) as placed:
                yield placed

    @property
    def config(self) -> ModelConfig:
        return load_config(self.checkpoint)

    def blocks(self, kinds: Callable[[int], str]) -> list[BlockPlacement]:
        """The kind of each block by its number; what a kind does not suit stays on the device."""
        config, recipe = self.config, RECIPES[self.weights]
        shape = model_shape(config, recipe, "fp32", "it")
        placed = [BlockPlacement(shape.embed.name, shape.embed.num_bytes, "ram", "cpu")]
        for index, block in enumerate((*shape.blocks, shape.head)):
            kind = kinds(index)
            if kind == "split" and not (block.name.endswith("mlp") and can_be_split(config, recipe)):
                kind = "resident"
            tier, computed_by = KINDS["computed" if block.name == "head" and config.tie_word_embeddings else kind]
            device_bytes = block.num_bytes // 2 if kind == "split" else 0
            placed.append(BlockPlacement(block.name, block.num_bytes, tier, computed_by, device_bytes))
        return placed

    def engine(self, placed: OffloadedModel) -> Engine:
        return Engine(LoadedModel(placed.decode_model, 128, placed=placed), Tokenizer.load(self.checkpoint))

    def text(self, placed: OffloadedModel, max_tokens: int = 12, drafting: Drafting | None = None) -> list[int]:
        engine = self.engine(placed)
        if drafting is not None:
            engine.speculation = drafting(engine.residency)
        return generated(engine, PROMPT, max_tokens)


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)


def mixed(seed: int) -> Callable[[int], str]:
    choose = random.Random(seed)
    return lambda _index: choose.choice(list(KINDS))


@pytest.mark.parametrize("kind", thinned([*KINDS, "mixed"], {"split", "mixed"}.__contains__))
def test_the_text_is_the_same_wherever_blocks_are(packed: Packed, kind: str) -> None:
    with packed.opened() as placed:
        placed.place(packed.blocks(lambda _index: "resident"), 8)
        expected = packed.text(placed)
        for seed in range(4 if kind == "mixed" else 1):
            kinds = mixed(seed) if kind == "mixed" else lambda _index: kind
            for many_rows in (NEVER, 8):
                placed.place(packed.blocks(kinds), many_rows)
                assert packed.text(placed) == expected


@pytest.mark.parametrize("who", every_other(["skip", "an oracle"]))
def test_drafts_change_no_text_wherever_blocks_are(packed: Packed, who: str) -> None:
    """Verified by whoever computes few rows and by whoever computes many; made without what is slow to come by."""
    with packed.opened() as placed:
        placed.place(packed.blocks(lambda _index: "resident"), NEVER)
        expected = packed.text(placed, max_tokens=24)

        def drafting(residency: Residency) -> Speculation:
            if who == "skip":
                return Speculation(residency, None, [SkipDrafter(lambda: residency.runner)], 4, FixedCount)
            oracle = Oracle({PROMPT: (*PROMPT, *expected)}, 0.8, packed.config.vocab_size)
            return Speculation(residency, oracle, (), 4, FixedCount)

        everywhere = [mixed(seed) for seed in range(3)] if who == "skip" else []
        for kinds in (lambda _index: "streamed", lambda _index: "computed", lambda _index: "split", *everywhere):
            for many_rows in (NEVER, 4):
                placed.place(packed.blocks(kinds), many_rows)
                assert packed.text(placed, 24, drafting) == expected


def test_what_is_released_is_held_by_nobody(packed: Packed) -> None:
    """What streamed last had the ring, and the memory of every block that was to go to the disk."""
    with packed.opened() as placed:
        for many_rows in (NEVER, 1):
            placed.place(packed.blocks(lambda index: "streamed" if index % 2 else "computed"), many_rows)
            packed.text(placed)
            streams = [weakref.ref(decoder.stream) for decoder in (placed.decode_model, placed.prefill_model)]
            placed.release()
            gc.collect()
            assert [stream() for stream in streams] == [None, None]


class Registered(Pinning):
    """What the driver would take for registered."""

    def __init__(self, _device: torch.device) -> None:
        super().__init__(CPU)
        self.sizes: dict[int, int] = {}

    def add(self, memory: Tensor, *, is_set_aside: bool = False) -> None:
        assert memory.data_ptr() not in self.sizes, "it would be copied from the pages that were here before"
        self.sizes[memory.data_ptr()] = memory.nbytes

    def remove(self, memory: Tensor) -> None:
        self.sizes.pop(memory.data_ptr(), None)


def test_only_memory_that_is_copied_from_and_still_there_is_registered(
    packed: Packed, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Registered] = []
    pinning = "localllm.models.offloaded_model.Pinning"
    monkeypatch.setattr(pinning, lambda device: made.append(Registered(device)) or made[0])
    with packed.opened() as placed:
        for kinds in ("streamed", "disk", "computed", "disk-computed", "streamed"):
            blocks = packed.blocks(lambda _index, kinds=kinds: kinds)  # type: ignore[misc]
            placed.place(blocks, 8)
            passing = [block.num_bytes for block in blocks[1:] if block.name != "head" or block.exec == "gpu"]
            from_disk = [block.num_bytes for block in blocks if block.tier == "disk"]
            in_ram = 0 if kinds.startswith("disk") else sum(passing)
            assert sum(made[0].sizes.values()) >= in_ram + Ring.of(from_disk).num_bytes
            placed.release()
            assert sum(made[0].sizes.values()) <= sum(block.num_bytes for block in blocks if block.tier == "ram")


def test_blocks_are_moved_while_an_answer_is_written(packed: Packed) -> None:
    """Every few tokens to other places, keys and values with them."""
    with packed.opened() as placed:
        placed.place(packed.blocks(lambda _index: "resident"), 8)
        expected = packed.text(placed, max_tokens=24)
        engine, answer = packed.engine(placed), []
        for event in engine.generate(PROMPT, greedy(24)):
            if isinstance(event, TokenEvent):
                answer.append(event.token_id)
                if len(answer) % 4 == 0:
                    engine.residency.move(packed.blocks(mixed(len(answer))))
        assert answer == expected


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("none left there"),
        RuntimeError("CUDA error: out of memory\nno room for a kernel that is loaded now"),
        MemoryError("none left here"),
    ],
)
def test_where_memory_is_taken_away_blocks_go_down_until_a_forward_comes_through(
    packed: Packed, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First fewer tokens at once, then blocks to the host, then to the disk; what nothing helps is one error."""
    right, left_to_fail = ModelRunner.forward, 0
    rows: list[int] = []

    def forward(runner: ModelRunner, *arguments: Any, **named: Any) -> Tensor:
        nonlocal left_to_fail
        rows.append(runner.batch_rows)
        if left_to_fail:
            left_to_fail -= 1
            raise error
        return right(runner, *arguments, **named)

    monkeypatch.setattr(ModelRunner, "forward", forward)
    with packed.opened() as placed:
        start = packed.blocks(lambda index: "resident" if index % 4 < 2 else "computed")
        for failures in (0, 1, 3, 4, 5, 40):
            placed.place(start, 8)
            engine, left_to_fail = packed.engine(placed), failures
            *_, finished = engine.generate(PROMPT, greedy(8))
            assert isinstance(finished, FinishedEvent)
            if failures == 0:
                expected = finished.text
            if failures == 40:
                assert isinstance(finished.error, DoesNotFitError)
                left_to_fail = 0
                generated(engine, PROMPT, 8)
            else:
                assert finished.error is None and finished.text == expected
            assert (list(placed.blocks) != start) == (failures > 3)
    assert min(rows) == MAX_ROWS


def test_a_model_that_lost_its_place_comes_back_when_there_is_memory(packed: Packed) -> None:
    """Every request ends in the one error until then, and the engine lives on."""
    with packed.opened() as placed:
        placed.place(packed.blocks(lambda _index: "resident"), 8)
        engine = packed.engine(placed)
        expected = generated(engine, PROMPT, 4)
        with mock.patch.object(OffloadedModel, "place", side_effect=MemoryError("none left")):
            with pytest.raises(DoesNotFitError):
                engine.residency.move(packed.blocks(lambda _index: "streamed"))
            for _ in range(2):
                *_, finished = engine.generate(PROMPT, greedy(4))
                assert isinstance(finished, FinishedEvent) and isinstance(finished.error, DoesNotFitError)
        assert generated(engine, PROMPT, 4) == expected


@pytest.mark.parametrize(("error", "tier"), [(torch.OutOfMemoryError("none"), "vram"), (MemoryError("none"), "ram")])
def test_everything_that_a_memory_has_of_a_model_can_be_given_up(
    packed: Packed, error: Exception, tier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Split blocks, the head and the embedding too; but an embedding that is the head's matrix stays in memory."""
    right = ModelRunner.forward
    tied = ("embed", "head") if packed.config.tie_word_embeddings else ()
    kinds = ("resident", "split") if tier == "vram" else ("computed", "split")
    start = packed.blocks(lambda index: kinds[index % 2])
    if tier == "vram":  # as a plan has it
        start = [replace(block, tier="vram", exec="gpu") if block.name in tied else block for block in start]

    def has_some(block: BlockPlacement) -> bool:
        return (block.tier == tier or block.exec == "split") and not (tier == "ram" and block.name in tied)

    def forward(runner: ModelRunner, *arguments: Any, **named: Any) -> Tensor:
        if any(map(has_some, placed.blocks)):
            raise error
        return right(runner, *arguments, **named)

    with packed.opened() as placed:
        placed.place(start, 8)
        assert any(map(has_some, placed.blocks))
        expected = packed.text(placed)
        monkeypatch.setattr(ModelRunner, "forward", forward)
        assert packed.text(placed) == expected and not any(map(has_some, placed.blocks))
