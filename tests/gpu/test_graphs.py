"""Replayed steps, without a card: what a graph would keep is kept, and launched again for others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from localllm.engine.engine import Engine
from localllm.engine.loader import LoadedModel
from localllm.engine.runner import ModelRunner
from localllm.engine.sampler import PlainDraw
from localllm.engine.step_types import Chunk
from localllm.layers.batch import Batch, Draw
from localllm.layers.segment import Segment
from localllm.models import gpu_graphs, gpu_warm
from localllm.models.gpu_graphs import Graphs
from localllm.models.gpu_program import GpuProgram
from localllm.settings import EngineConfig
from localllm.text.tokenizer import Tokenizer
from tests.checkpoints import write_checkpoint
from tests.engine_support import generated
from tests.gpu.test_step import SMALL, by_operators, ids, sampling, texts
from tests.packed_support import pack
from tests.test_device_placement import Packed


class Replaying(Graphs):
    """Takes for a graph the forward that it would be captured in: of that one are the batch, the sequences and their
    pages which a replay has on the host. All else must come from the tables, as on a card."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.captures, self.num_captured, self.replays = True, 0, 0

    def captured(self, launch: Callable[[], None]) -> SimpleNamespace:
        self.num_captured += 1

        def replay() -> None:
            self.replays += 1
            launch()

        return SimpleNamespace(replay=replay)


def loaded(folder: Path, family: str, kv: str, layers: int = 2) -> Engine:
    write_checkpoint(folder, family, layers=layers, **(SMALL if family == "llama" else {}))
    engine = Engine.load(folder, EngineConfig(device="cpu", weights="fp32", kv=kv))
    engine.runner.cpu_program = None
    return engine


def test_replayed_steps_draw_the_same_tokens(tmp_path):
    """In a batch that requests leave; with windows, so that groups of layers have pages of their own."""
    engine = loaded(tmp_path, "gemma3-scaled-and-capped", "bf16")
    wishes = [sampling(0.9, 3), sampling(0, 2)]
    prompts = [ids(length, seed=length) for length in (1, 3)]
    engine.runner.gpu_program = GpuProgram(engine.model)
    expected = texts(engine, wishes, prompts)
    graphs = Replaying()
    engine.runner.gpu_program = GpuProgram(engine.model, graphs)
    assert texts(engine, wishes, prompts) == expected and graphs.replays > 0


@pytest.mark.slow
def test_a_replay_reads_the_pages_that_the_tables_name(tmp_path):
    """Two chats of other lengths in turn, behind coded pages: the second's steps are replays of the first's, whose
    pages are another's by then."""
    engine = loaded(tmp_path, "qwen3", "int8")
    chats = [ids(132, seed=1), ids(140, seed=2), ids(68, seed=3)]

    def found(step: GpuProgram) -> list[Tensor]:
        logits = []
        for token_ids in chats:
            kv = engine.residency.new_kv(len(token_ids))
            engine.runner.gpu_program = None
            by_operators(engine.model).forward([Chunk(token_ids, kv, len(token_ids) - 2)])
            engine.runner.gpu_program = step
            logits += [engine.runner.forward([Chunk(token_ids, kv, 1)]) for _ in range(2)]
            kv.close()
        return logits

    expected, graphs = found(GpuProgram(engine.model)), Replaying()
    assert all(map(torch.equal, found(GpuProgram(engine.model, graphs)), expected))
    assert graphs.replays == 5


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Packed:
    folder = tmp_path_factory.mktemp("packed")
    write_checkpoint(folder / "it", "llama", layers=2)
    return Packed(folder / "it", pack(folder / "it", folder / "model", "fp32"), "fp32")


def logits(runner: ModelRunner, engine: Engine) -> list[Tensor]:
    """Of a prompt and of three steps behind it."""
    token_ids, kv = ids(20), engine.residency.new_kv(20)
    found = [runner.forward([Chunk(token_ids, kv, count)]) for count in (17, 1, 1, 1)]
    kv.close()
    return found


@pytest.mark.parametrize(
    "kinds", [pytest.param(("streamed",), marks=pytest.mark.slow), ("split", "disk", "resident", "streamed")]
)
def test_blocks_that_are_brought_are_computed_in_graphs_of_their_own(kinds, packed, monkeypatch):
    """Step after step over the same places of the ring, in which another block is each time; and prepared there."""
    monkeypatch.setattr(gpu_warm, "_ROWS", (1,))
    monkeypatch.setattr(gpu_warm, "_MANY_ROWS", (17,))
    with packed.opened() as placed:
        placed.place(packed.blocks(lambda _index: "resident"), 8)
        engine = Engine(LoadedModel(placed.decode_model, 64, placed=placed), Tokenizer.load(packed.checkpoint))
        expected = logits(by_operators(placed.decode_model), engine)
        placed.place(packed.blocks(lambda index: kinds[index % len(kinds)]), 8)
        engine = Engine(LoadedModel(placed.decode_model, 400, placed=placed), Tokenizer.load(packed.checkpoint))
        graphs = Replaying()
        runner = ModelRunner(placed.decode_model, prefill_model=placed.prefill_model, many_rows=8)
        step = GpuProgram(placed.decode_model, graphs)
        runner.cpu_program, runner.gpu_program = None, step
        runner._gpu_prefill = step if placed.prefill_model is placed.decode_model else GpuProgram(placed.prefill_model)
        runner.warm_up(engine.residency.new_kv)
        for found, right in zip(logits(runner, engine), expected, strict=True):
            assert float((found - right).norm() / right.norm()) < 2e-5
        assert runner.gpu_program is step, "nothing was given up"
        assert graphs.replays >= 2 * len(placed.decode_model.stream.names) > 0


def drawn(engine: Engine, program: GpuProgram, num_rows: int, past: int) -> list[int]:
    """A token behind each of so many sequences of one token, at this place."""
    kvs = [engine.residency.new_kv(past + 1) for _ in range(num_rows)]
    batch = Batch(
        token_ids=torch.arange(num_rows),
        positions=torch.full((num_rows,), past),
        segments=tuple(Segment(i, i + 1, kv, past, past + 1) for i, kv in enumerate(kvs)),
        logit_rows=torch.arange(num_rows),
        rotaries=engine.model.rotaries,
    )
    for kv in kvs:
        kv.prepare(past + 1)
    tokens = program.draw(batch, [Draw(1, 0.0, 0.0)] * num_rows).tokens()
    for kv in kvs:
        kv.close()
    return tokens


def test_only_so_many_graphs_are_kept_and_they_are_those_that_were_used_last(tmp_path, monkeypatch):
    """A card holds them beside everything else, and a plan counts them."""
    monkeypatch.setattr(gpu_graphs, "GRAPH_ROOMS", 2)
    engine, graphs = loaded(tmp_path, "llama", "bf16", layers=1), Replaying()
    program = GpuProgram(engine.model, graphs)
    expected = {rows: drawn(engine, GpuProgram(engine.model), rows, 0) for rows in (1, 2, 4)}
    for rows in (1, 2, 4, 4, 2):  # the room of one row was the last used one two rooms ago
        assert drawn(engine, program, rows, 0) == expected[rows]
        assert graphs.num_rooms <= 2
    assert (graphs.num_captured, graphs.replays) == (3, 2)
    assert drawn(engine, program, 1, 0) == expected[1] and graphs.num_captured == 4


def test_a_step_whose_logits_the_host_wants_replays_the_graph_that_draws(tmp_path):
    engine, graphs = loaded(tmp_path, "llama", "bf16"), Replaying()
    token_ids, runner = ids(6), by_operators(engine.model)
    kv = engine.residency.new_kv(8)
    expected = [runner.forward([Chunk(token_ids, kv, count)]) for count in (4, 1, 1)][2]
    kv.trim(5)
    runner.gpu_program = GpuProgram(engine.model, graphs)
    assert runner.draw([Chunk(token_ids, kv, 1)], [PlainDraw(0, 0.0, 0.0)], goes_on=False)
    kv.trim(5)
    found = runner.forward([Chunk(token_ids, kv, 1)])
    assert float((found - expected).norm() / expected.norm()) < 2e-5
    assert (graphs.num_captured, graphs.replays) == (1, 1)
    kv.close()


def test_graphs_are_given_up_by_halves():
    graphs, most = Graphs(torch.device("cpu")), []

    def kept() -> int:
        for rows in (1, 2, 4, 8, 16):
            graphs.room("a program", rows, lambda: SimpleNamespace(graphs={0: "a graph"}))
        return graphs.num_rooms

    for _ in range(5):
        most.append(kept())
        assert graphs.give_up() and graphs.num_rooms == 0 and not graphs.give_up()
    assert most == [5, 4, 2, 1, 1]
    graphs.restore()
    assert kept() == 5


def test_what_a_smaller_decoder_has_captured_counts_and_goes_with_it(tmp_path):
    engine, graphs = loaded(tmp_path, "llama", "bf16"), Replaying()
    runner = ModelRunner(engine.model, graphs=graphs)
    runner.cpu_program, runner.gpu_program = None, GpuProgram(engine.model, graphs)
    drawn(engine, runner.gpu_program, 1, 0)
    names = [frozenset({block.name}) for block in engine.model.blocks[2:]]
    smaller = runner.without(names[0])
    assert smaller.graphs is graphs
    smaller.gpu_program = GpuProgram(smaller.model, graphs)
    drawn(engine, smaller.gpu_program, 1, 0)
    assert graphs.num_rooms == 2
    runner.without(names[1])
    assert graphs.num_rooms == 1


def test_where_a_cards_memory_runs_out_graphs_go_before_anything_else(tmp_path, monkeypatch):
    """The second time there are none, and fewer tokens are computed at once."""
    engine, graphs = loaded(tmp_path, "llama", "bf16", layers=1), Replaying()
    engine.runner.graphs, engine.runner.gpu_program = graphs, GpuProgram(engine.model, graphs)
    expected, rows = generated(engine, ids(20), 3), engine.runner.batch_rows
    assert graphs.num_rooms == 1  # of steps: a prompt's graph is made when its number of rows comes again
    assert generated(engine, ids(20), 3) == expected and graphs.num_rooms == 2
    right, left_to_fail = GpuProgram._long, 1

    def long(program: GpuProgram, *arguments: Any) -> Tensor:
        nonlocal left_to_fail
        if left_to_fail:
            left_to_fail -= 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        return right(program, *arguments)

    monkeypatch.setattr(GpuProgram, "_long", long)
    assert generated(engine, ids(20, seed=1), 3) and engine.runner.batch_rows == rows
    assert graphs.num_rooms == 1 and graphs.num_captured == 3
    left_to_fail = 2
    assert generated(engine, ids(20), 3) == expected
    assert engine.runner.batch_rows < rows
