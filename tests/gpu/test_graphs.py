"""Replayed steps, without a card: what a graph would keep is kept, and launched again for others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from localllm.engine.engine import Engine
from localllm.engine.loader import LoadedModel
from localllm.engine.runner import ModelRunner
from localllm.engine.step_types import Chunk
from localllm.models import gpu_warm
from localllm.models.decoder import Decoder
from localllm.models.gpu_program import GpuProgram
from localllm.settings import EngineConfig
from localllm.text.tokenizer import Tokenizer
from tests.checkpoints import write_checkpoint
from tests.gpu.test_step import by_operators, ids, sampling, texts
from tests.packed_support import pack
from tests.test_device_placement import Packed


class Replaying(GpuProgram):
    """Takes for a graph the forward that it would be captured in: of that one are the batch, the sequences and their
    pages which a replay has on the host. All else must come from the tables, as on a card."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(decoder)
        self._captures, self.replays = True, 0

    def _captured(self, launch: Callable[[], None]) -> SimpleNamespace:
        def replay() -> None:
            self.replays += 1
            launch()

        return SimpleNamespace(replay=replay)


def loaded(folder: Path, family: str, kv: str) -> Engine:
    write_checkpoint(folder, family, layers=2)
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
    engine.runner.gpu_program = replaying = Replaying(engine.model)
    assert texts(engine, wishes, prompts) == expected and replaying.replays > 0


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

    expected, step = found(GpuProgram(engine.model)), Replaying(engine.model)
    assert all(map(torch.equal, found(step), expected))
    assert step.replays == 5


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
        runner, step = (
            ModelRunner(placed.decode_model, prefill_model=placed.prefill_model, many_rows=8),
            Replaying(placed.decode_model),
        )
        runner.cpu_program, runner.gpu_program = None, step
        runner._gpu_prefill = step if placed.prefill_model is placed.decode_model else GpuProgram(placed.prefill_model)
        runner.warm_up(engine.residency.new_kv)
        for found, right in zip(logits(runner, engine), expected, strict=True):
            assert float((found - right).norm() / right.norm()) < 2e-5
        assert runner.gpu_program is step, "nothing was given up"
        assert step.replays >= 2 * len(placed.decode_model.stream.names) > 0
