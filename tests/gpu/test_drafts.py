"""Drafts on a GPU: verified by its step, drawn by its kernel, made by a model without some of its blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.oracle import FixedCount
from localllm import Engine, Request, SamplingParams
from localllm.engine.speculative.drafter import Drafter, SkipDrafter
from localllm.engine.speculative.speculator import Speculation
from localllm.models.gpu_program import GpuProgram
from localllm.settings import EngineConfig
from tests.checkpoints import write_checkpoint
from tests.gpu.test_step import SMALL
from tests.speculative.support import draft_by_oracle, said


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    write_checkpoint(tmp_path, "llama", layers=2, **SMALL)
    engine = Engine.load(tmp_path, EngineConfig(device="cpu", weights="int8", dtype="fp32", speculate="off"))
    engine.runner.cpu_program, engine.runner.gpu_program = None, GpuProgram(engine.model)
    return engine


def check(engine: Engine, prompt: range, draft_tokens: int, max_tokens: int, **sampling: Any) -> None:
    params = SamplingParams(max_tokens=max_tokens, seed=3, ignore_eos=True, **sampling)
    wish = Request(tuple(prompt), params)
    engine.speculation = Speculation(engine.residency, None, (), 0)
    (expected,) = said(engine, wish)
    draft_by_oracle(engine, wish, expected, 0.7, draft_tokens)
    assert said(engine, wish) == [expected]


def test_what_a_gpu_verifies_is_what_it_would_have_written(engine: Engine) -> None:
    check(engine, range(60, 66), 2, 3, temperature=0)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.9, "top_k": 9}])
def test_longer_drafts_are_verified_too(engine: Engine, sampling: dict[str, float]) -> None:
    """Over the end of a page; drawn by its kernel, and by the host where more is asked for."""
    check(engine, range(60, 122), 3, 7, **sampling)


@pytest.mark.slow
def test_a_gpu_drafts_without_some_of_its_blocks(engine: Engine) -> None:
    wish = Request(tuple(range(60, 90)), SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    engine.speculation = Speculation(engine.residency, None, (), 0)
    (expected,) = said(engine, wish)
    drafters: list[Drafter] = [SkipDrafter(lambda: engine.runner, lambda: frozenset({"layers.1.attention"}))]
    engine.speculation = Speculation(engine.residency, None, drafters, 2, FixedCount)
    assert said(engine, wish) == [expected]
