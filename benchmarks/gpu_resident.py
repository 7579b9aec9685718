"""A model of llama-3.1-8b's shape in INT4, all of it on the card, and sequences of any length without their prompts."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.gpu_model import MemoryModel, as_card, model_config, written
from benchmarks.peers_protocol import UnavailableError
from localllm.cache.paged_kv import KVPages, PagedKV
from localllm.cache.pages import Page
from localllm.engine.async_decode import Ahead
from localllm.engine.engine import Engine
from localllm.engine.loader import Watcher
from localllm.engine.prefix_config import NO_REUSE
from localllm.engine.sampler import PlainDraw
from localllm.engine.speculative.config import OFF
from localllm.kernels.gpu.ready import why_not
from localllm.kernels.kv_page import PAGE_TOKENS
from localllm.models.families import load_config
from localllm.models.gpu_step import GpuStep
from localllm.quant.recipe import RECIPES

WEIGHTS = "int4-g64"
_STAND_IN_BYTES = 1 << 30
_SCALE_CODE = 120  # 2^-4
_GREEDY = PlainDraw(0, 0.0, 0.0)


def resident(device: torch.device, ctx: int, kv: str, note: Callable[[str], None], *, small: bool) -> Engine:
    """As `Engine.load` makes it. note: hears where our kernels fail later. Raises UnavailableError where they would not
    compute it."""
    is_card = device.type == "cuda"
    if is_card and (reason := why_not(device)):
        raise UnavailableError(f"our kernels do not compute: {reason}")
    with tempfile.TemporaryDirectory() as folder:
        files = written(Path(folder), model_config(small=small))
        model = MemoryModel(load_config(files.directory), RECIPES[WEIGHTS])
        options: dict[str, Any] = {
            "watcher": Watcher(noting=note),
            "reuse": NO_REUSE,
            "kv": kv,
            "ctx": ctx,
            "speculate": OFF,
        }
        if not is_card:
            options |= {"vram": _STAND_IN_BYTES, "dtype": "fp32"}
        with as_card(device, model):
            engine = Engine.load(files, device=device.type, weights=WEIGHTS, **options)
    if not is_card:
        engine.runner.cpu_step, engine.runner.gpu_step = None, GpuStep(engine.model)
    engine.residency._replan = None  # another side's memory on the card comes and goes: nothing moves for it
    if engine.runner.gpu_step is None:
        raise UnavailableError(f"our kernels do not compute it with a context of {ctx} tokens")
    return engine


def decoded(step: GpuStep, kv: PagedKV, depth: int, tokens: int) -> list[int]:
    """So many greedy tokens behind the first `depth`. Each step is begun before the last one's token is known, where it
    needs nothing of the host."""
    rotaries, found = step.decoder.rotaries, list[int]()
    kv.trim(depth)
    ahead = Ahead.begun(step, rotaries, [kv], [_GREEDY], [1])
    for _ in range(tokens - 1):
        kv.advance(1)
        last = ahead.drawn if step.is_whole else ahead.drawn.tokens()
        following = Ahead.begun(step, rotaries, [kv], [_GREEDY], last)
        found += ahead.drawn.tokens()
        ahead = following
    return found + ahead.drawn.tokens()


class WithoutGraphs(GpuStep):
    def _is_capturable(self, _run: object) -> bool:
        return False


def filled(kv: PagedKV, depth: int) -> PagedKV:
    """With random keys and values of `depth` tokens, which no prompt was computed for. What they are does not decide
    how long attention takes, but they must be finite, as the logits of random bytes would be none."""
    while kv.length < depth:
        count = min(PAGE_TOKENS - kv.length % PAGE_TOKENS, depth - kv.length)
        kv.prepare(kv.length + count)
        kv.advance(count)
    for group in range(len(kv.tables)):
        for page in kv.owned(group):
            _randomize(page)
    return kv


def sequence(pages: KVPages, depth: int, room: int) -> PagedKV:
    """Of so many tokens, with room for so many more."""
    return filled(pages.new(depth + room), depth)


def _randomize(page: Page) -> None:
    for part in page.parts.values():
        keys, key_scales, values, value_scales = page.pool.layout.parts(part)
        for codes in (keys, values):
            if codes.is_floating_point():
                codes.normal_()
            else:
                codes.random_(*((-127, 128) if codes.dtype is torch.int8 else (0, 256)))
        for scales in (key_scales, value_scales):
            scales.fill_(_SCALE_CODE)


@contextmanager
def behind(engine: Engine, depth: int) -> Iterator[None]:
    """Inside, all of a prompt but what is longer than `depth` counts as computed when it is admitted."""
    supply = engine.kv_allocator
    admit = supply.allocate

    def admit_filled(sequence: Any, cancelled: Any) -> None:
        admit(sequence, cancelled)
        filled(sequence.kv, depth)

    with patch.object(supply, "allocate", admit_filled):
        yield
