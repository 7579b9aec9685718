"""Tokens that choose the pages that they attend to, on a card: it computes what the CPU does, however late it is, and a
text is the same whatever is computed beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from localllm.engine.engine import Engine
from localllm.engine.events import TokenEvent
from localllm.engine.loader import LoadedModel
from localllm.engine.prefix_config import IN_POOLS
from localllm.engine.request import Request, SamplingParams
from localllm.engine.speculative.choice import Speculate
from localllm.engine.step_types import Chunk
from localllm.settings import EngineConfig
from localllm.text.tokenizer import Tokenizer
from tests.checkpoints import write_checkpoint
from tests.engine_support import answered, steps
from tests.kv_support import check_pages
from tests.simulated_card.device import DEVICE, CardConfig
from tests.simulated_card.support import blocks
from tests.test_device_placement import CPU, Packed

PAGES = 2  # chosen: from 5 pages on
LONG = tuple(3 + index * index % 90 for index in range(560))
WISH = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


@contextmanager
def opened(packed: Packed, device: torch.device, placement: str = "resident", **options: Any) -> Iterator[Engine]:
    with packed.opened(device) as placed:
        placed.place(blocks(packed, placement), 8)
        loaded = LoadedModel(placed.decode_model, 1024, placed=placed)
        engine = Engine(loaded, Tokenizer.load(packed.checkpoint), chosen_pages=PAGES, **options)
        yield engine
        assert (engine.runner.gpu_program is not None) == (device == DEVICE), "nothing was given up"
        check_pages(engine.residency.kv_pages)


def logits(engine: Engine, sizes: Sequence[int]) -> Tensor:
    """Of every token, fed in chunks of these sizes; from 300 on tokens choose."""
    kv = engine.residency.new_kv(len(LONG))
    kv.attend_from = 300
    found = [engine.runner.forward([Chunk(LONG, kv, size, all_logits=True)]).cpu() for size in sizes]
    kv.trim(kv.length - 70)
    found.append(engine.runner.forward([Chunk(LONG, kv, 75, all_logits=True)]).cpu())
    kv.close()
    return torch.cat(found)


@pytest.mark.parametrize(
    ("model", "schedule", "placement"),
    [("int8", "lazy", "resident"), ("int4-g32", "random", "mixed"), ("int8", "copies-late", "streamed")],
)
def test_a_card_computes_what_the_cpu_does(model, schedule, placement, packed_models, simulated_card):
    """Also of a sequence that was cut back."""
    sizes = (200, 100, 1, 1, 60, 5, 1, 20, 70, 1, 1)
    with opened(packed_models[model], CPU) as engine:
        expected = logits(engine, sizes)
    with simulated_card(CardConfig(schedule)) as card, opened(packed_models[model], DEVICE, placement) as engine:
        found = logits(engine, sizes)
        assert card.counts["replays"]
    assert (found - expected).norm() < 0.03 * expected.norm()  # a code falls on a step's other side


def test_sketches_are_made_once(packed_models, simulated_card):
    """The next token makes those of pages that have become full since."""
    with simulated_card(CardConfig()), opened(packed_models["int8"], DEVICE) as engine:
        kv, made = engine.residency.new_kv(len(LONG)), list[int]()
        kv.attend_from = 399
        for size in (399, 1, 120, 1):
            engine.runner.forward([Chunk(LONG, kv, size, all_logits=True)])
            made.append(kv.num_sketched)
        kv.close()
    assert made == [0, 5, 7, 7]  # all pages but a token's own and the one before that


def test_blocks_move_while_tokens_choose(packed_models, simulated_card):
    """The sketches are made where the layers are by then."""
    packed, found = packed_models["int8"], list[int]()
    with simulated_card(CardConfig("lazy")):
        with opened(packed, DEVICE) as engine:
            (expected,) = answered(engine, Request(LONG[:330], WISH))
        with opened(packed, DEVICE) as engine:
            engine.submit(Request(LONG[:330], WISH))
            for event in steps(engine):
                if isinstance(event, TokenEvent):
                    found.append(event.token_id)
                    if len(found) % 4 == 0:
                        engine.residency.move(blocks(packed, "mixed" if len(found) == 4 else "streamed"))
    assert found == expected.token_ids


def test_a_model_is_loaded_checked_and_counted_with_what_chooses(tmp_path, simulated_card):
    write_checkpoint(tmp_path, "llama", layers=2, max_position_embeddings=512)
    config = EngineConfig(device="cuda", weights="int8", dtype="fp32", ctx=512, attend=f"top:{PAGES}")
    with simulated_card(CardConfig()), closing(Engine.load(tmp_path, config)) as engine:
        program, plan, seen = engine.runner.gpu_program, engine.plan, list[int]()
        engine.submit(Request(LONG[:400], WISH))
        for _ in steps(engine):
            seen.append(engine.residency.kv_pages.nbytes)
        assert engine.runner.gpu_program is program is not None
        assert max(seen) <= plan.ledger["vram"]["kv"] + 512 * plan.shape.row_bytes


def test_tables_of_what_is_chosen_are_of_those_that_choose(tmp_path, simulated_card):
    """Not of each row of a prompt, where each has room for more pages than any text has."""
    write_checkpoint(tmp_path, "llama", layers=2, max_position_embeddings=512)
    config = EngineConfig(device="cuda", weights="int8", dtype="fp32", ctx=512, attend="top:65536")
    with simulated_card(CardConfig()) as card, closing(Engine.load(tmp_path, config)) as engine:
        assert engine.runner.gpu_program is not None
        assert card.memory.most_allocated_bytes < 16 << 20


def test_a_text_is_the_same_whatever_is_computed_beside_it(packed_models, simulated_card):
    """Behind a prefix that is found, with drafts, and among others."""
    requests = [Request(text, WISH) for text in (LONG[:440], LONG[:40], (5, 6, 7, 8) * 78)]
    options: dict[str, Any] = {"reuse": IN_POOLS, "speculate": Speculate("ngram")}
    with simulated_card(CardConfig("random")):
        with opened(packed_models["int8"], DEVICE) as engine:
            alone = [answered(engine, request)[0] for request in requests]
        with opened(packed_models["int8"], DEVICE, **options) as engine:
            answered(engine, requests[0])
            together = answered(engine, *requests)
            assert [heard.token_ids for heard in together] == [heard.token_ids for heard in alone]
            assert together[0].finished.usage.cached_tokens
