"""Tokens that choose the pages that they attend to, by the GPU's kernels in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, product

import pytest
import torch
from torch import Tensor

from localllm.cache.paged_kv import PagedKV
from localllm.engine.engine import Engine
from localllm.engine.step_types import Chunk
from localllm.kernels.gpu.check_attention import Heads
from localllm.kernels.gpu.check_choice import choice_cases
from localllm.settings import EngineConfig
from tests.checkpoints import write_checkpoint
from tests.gpu.test_step import SMALL, by_kernels, by_operators, ids
from tests.thinning import thinned

HEADS = [
    Heads("int8", "int4", 32, 4, 2, chooses=True),
    Heads("int4", "int4", 64, 2, 2, chooses=True),
    Heads("dense", "dense", 48, 2, 1, softcap=5.0, has_sinks=True, chooses=True),
    Heads("dense", "dense", 56, 2, 1, chooses=True),  # of which groups of 32 leave what is no power of two
]


@pytest.mark.parametrize(("heads", "count"), thinned([*product(HEADS, [2, 4])], [*product(HEADS, [2])].__contains__))
def test_pages_with_the_largest_shares_are_chosen_and_attended_to(heads, count):
    """In a step, and in a prompt."""
    wrong = [case.line() for case in islice(choice_cases(torch.device("cpu"), heads), count) if not case.is_right]
    assert not wrong


@pytest.mark.usefixtures("products_row_by_row")
def test_a_row_has_the_same_bits_whenever_sketches_were_made(tmp_path):
    """Step by step over the border of a page, and in a prompt's many rows; of a sequence that was cut back."""
    write_checkpoint(tmp_path, "llama", layers=2, **SMALL)
    engine = Engine.load(tmp_path, EngineConfig(device="cpu", weights="fp32", attend="top:1"))
    runner, token_ids = by_kernels(engine.model), ids(338)
    other_ids = [*token_ids[:200], *ids(138, seed=1)]

    def begun(text: list[int]) -> PagedKV:
        kv = engine.residency.new_kv(338)
        kv.attend_from = 318
        for size in (200, 116):
            by_operators(engine.model).forward([Chunk(text, kv, size)])
        return kv

    def found(kv: PagedKV, text: list[int], sizes: Sequence[int]) -> Tensor:
        return torch.cat([runner.forward([Chunk(text, kv, size, all_logits=True)]) for size in sizes])

    kv = begun(token_ids)
    in_steps = found(kv, token_ids, (3, 1, 17, 1))
    assert torch.equal(found(begun(token_ids), token_ids, (22,)), in_steps)
    kv.trim(200)
    by_operators(engine.model).forward([Chunk(other_ids, kv, 116)])
    assert torch.equal(found(kv, other_ids, (5,)), found(begun(other_ids), other_ids, (5,)))
