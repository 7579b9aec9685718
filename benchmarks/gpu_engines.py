"""Engines of random models for a card: packed models of any size in the host's memory, and sequences of any length.

The blocks are made here instead of read, so that no disk decides how long it takes; planning, placing and computing are
the program's own. A CPU may stand in for the card: it has a cap, and no memory of its own.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.gpu_table import MIXTURE, MODEL
from benchmarks.peers_protocol import UnavailableError
from localllm.bench.random_model import RandomBlocks, word_vocabulary
from localllm.cache.kv_pages import KVPages
from localllm.cache.paged_kv import PagedKV
from localllm.cache.pages import Page
from localllm.engine import card, planner
from localllm.engine import loader as loading
from localllm.engine.engine import Engine
from localllm.engine.loader import Watcher
from localllm.engine.prefix_config import NO_REUSE
from localllm.engine.runner import Ahead
from localllm.engine.sampler import PlainDraw
from localllm.hub import ModelFiles, locate
from localllm.kernels.gpu.ready import why_not
from localllm.kernels.kv_page import PAGE_TOKENS
from localllm.models.architecture import ModelConfig
from localllm.models.block_layouts import block_layouts, model_bytes
from localllm.models.families import load_config, parse_config
from localllm.models.gpu_program import GpuProgram
from localllm.models.layout import BlockLayout
from localllm.models.packed_file import PackedFile
from localllm.models.shapes import shipped_shapes
from localllm.offload.planner.machine import CardMemory
from localllm.offload.planner.profile import DeviceRates
from localllm.offload.streaming.host_buffer import host_buffer
from localllm.quant.recipe import RECIPES, Recipe
from localllm.settings import EngineConfig

SMALL = "small"  # a shape with MLP blocks of 5 MB in bf16, for a stand-in
_SMALL = {
    "model_type": "llama", "vocab_size": 1024, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False,
    "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
_SMALL_MIXTURE = {
    **_SMALL, "model_type": "qwen3_moe", "num_hidden_layers": 16, "num_experts": 16, "num_experts_per_tok": 2,
    "moe_intermediate_size": 256, "norm_topk_prob": True,
}  # fmt: skip
_TINY = {  # in place of MODEL, for a stand-in that interprets kernels
    **_SMALL, "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
}  # fmt: skip
_WEIGHTS = "int4-g64"
_STAND_IN_BYTES = 1 << 30
_SCALE_CODE = 120  # 2^-4
_GREEDY = PlainDraw(0, 0.0, 0.0)


def ignore(_text: str) -> None:
    pass


def model_config(*, small: bool) -> dict[str, Any]:
    """config.json of the model that lies on the card as a whole."""
    return dict(_TINY) if small else dict(shipped_shapes()[MODEL])


def mixture_config(*, small: bool) -> dict[str, Any]:
    """config.json of the mixture whose experts have slots on the card."""
    return dict(_SMALL_MIXTURE) if small else dict(shipped_shapes()[MIXTURE])


def sized(shape: str, weights: str, num_bytes: int) -> dict[str, Any]:
    """config.json of a model with this shape's layers, as many of them as come closest to so many bytes."""
    raw = dict(_SMALL if shape == SMALL else shipped_shapes()[shape])

    def layers(count: int) -> dict[str, Any]:
        return {**raw, "num_hidden_layers": count}

    one, two = (model_bytes(parse_config(layers(count), shape), RECIPES[weights]) for count in (1, 2))
    return layers(max(2, 1 + round((num_bytes - one) / (two - one))))


def written(folder: Path, raw_config: Mapping[str, Any]) -> ModelFiles:
    """Write the files of a model other than its blocks."""
    (folder / "config.json").write_text(json.dumps(raw_config), encoding="utf-8")
    (folder / "tokenizer.json").write_text(json.dumps(word_vocabulary(raw_config["vocab_size"])), encoding="utf-8")
    return locate(str(folder))


class MemoryModel:
    """Stands for a PackedModel. Each block has memory of its own, shared by all who ask for the block.

    The weights are those of the first block of its kind: their values do not decide how fast they are copied or
    computed.
    """

    directory = Path("in-memory")  # there is none, and so nothing is kept from an earlier run

    def __init__(self, config: ModelConfig, recipe: Recipe) -> None:
        self.config = config
        self._files = {layout.name: PackedFile.of(layout, recipe, "random") for layout in block_layouts(config)}
        self._random = RandomBlocks(recipe)
        self._first: dict[str, Tensor] = {}  # by the kind of block: its bytes behind the header
        self._blocks: dict[str, Tensor] = {}

    def content(self, layout: BlockLayout) -> Tensor:
        if layout.name not in self._blocks:
            self._blocks[layout.name] = self._made(layout)
        return self._blocks[layout.name]

    def _made(self, layout: BlockLayout) -> Tensor:
        file, kind = self._files[layout.name], layout.name.rpartition(".")[2]
        memory = host_buffer(file.file_bytes)
        data = memory[file.data_begin :]
        if kind in self._first:
            data.copy_(self._first[kind])
            return memory
        views = file.views(memory)
        for name, tensor in self._random.tensors(layout).items():
            views[name].copy_(tensor)
        self._first[kind] = data
        return memory

    def views(self, layout: BlockLayout, memory: Tensor) -> dict[str, Tensor]:
        return self._files[layout.name].views(memory)

    def tensors(self, layout: BlockLayout) -> dict[str, Tensor]:
        return self.views(layout, self.content(layout))

    def read_ahead_only(self, _names: Iterable[str]) -> None:
        """No-op: nothing is read."""

    def finish(self) -> None:
        """No-op: there is no file to close."""

    def cached_share(self) -> float:
        return 0.0

    def streamed_file(self, layout: BlockLayout) -> None:
        raise UnavailableError(f"{layout.name} would have to be on the disk: the host's memory is too small")

    small_tensors = disk_embedding = streamed_file


@contextmanager
def as_card(device: torch.device, model: MemoryModel | None = None) -> Iterator[None]:
    """Inside, this model is what is loaded, and a CPU has the memory of a card: all that its cap allows."""
    with ExitStack() as patched:
        if model is not None:
            patched.enter_context(patch.object(loading, "open_packed", lambda *_: nullcontext(model)))
        if device.type == "cpu":
            patched.enter_context(patch.object(card, "card_memory", _stand_in_memory))
            for module in (loading, planner):
                patched.enter_context(patch.object(module, "has_card", lambda _device: True))
            patched.enter_context(patch.object(loading, "cap_allocator", lambda *_: None))
            patched.enter_context(patch.object(planner, "require_effect", lambda *_: None))  # of --vram on a CPU
        yield


def _stand_in_memory(
    _device: torch.device, vram: int | None, rates: DeviceRates, workspace: int, _graph_bytes: int = 0
) -> CardMemory:
    assert vram is not None
    return CardMemory(vram, rates.context_bytes, workspace, vram, vram)


def resident(device: torch.device, ctx: int, kv: str, note: Callable[[str], None], *, small: bool) -> Engine:
    """An engine of MODEL in INT4, all of it on the card, as `Engine.load` makes it.

    note: receives where our kernels fail later. Raises UnavailableError where they would not compute it.
    """
    is_card = device.type == "cuda"
    if is_card and (reason := why_not(device)):
        raise UnavailableError(f"our kernels do not compute: {reason}")
    config = EngineConfig(ctx=ctx, device=device.type, weights=_WEIGHTS, kv=kv, speculate="off")
    if not is_card:
        config = replace(config, vram=_STAND_IN_BYTES, dtype="fp32")
    with tempfile.TemporaryDirectory() as folder:
        files = written(Path(folder), model_config(small=small))
        model = MemoryModel(load_config(files.directory), RECIPES[_WEIGHTS])
        with as_card(device, model):
            engine = Engine.load(files, config, watcher=Watcher(noting=note), reuse=NO_REUSE)
    if not is_card:
        engine.runner.cpu_program, engine.runner.gpu_program = None, GpuProgram(engine.model)
    engine.residency._replan = None  # another side's memory on the card comes and goes: nothing moves for it
    if engine.runner.gpu_program is None:
        raise UnavailableError(f"our kernels do not compute it with a context of {ctx} tokens")
    return engine


def decoded(step: GpuProgram, kv: PagedKV, depth: int, tokens: int) -> list[int]:
    """Decode so many greedy tokens behind the first `depth`.

    Each step is begun before the last one's token is known, where it needs nothing of the host.
    """
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


class WithoutGraphs(GpuProgram):
    def _is_capturable(self, _run: object) -> bool:
        return False


def filled(kv: PagedKV, depth: int) -> PagedKV:
    """Fill with random keys and values of `depth` tokens, for which no prompt was computed.

    Their values do not decide how long attention takes, but they must be finite: random bytes would make NaN of logits.
    """
    while kv.length < depth:
        count = min(PAGE_TOKENS - kv.length % PAGE_TOKENS, depth - kv.length)
        kv.prepare(kv.length + count)
        kv.advance(count)
    for group in range(len(kv.tables)):
        for page in kv.owned(group):
            _randomize(page)
    return kv


def sequence(pages: KVPages, depth: int, more: int) -> PagedKV:
    """A sequence of so many tokens that can take so many more."""
    return filled(PagedKV(pages, depth + more), depth)


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
    """Inside, the first `depth` tokens of a prompt count as computed when it is admitted."""
    allocator = engine.kv_allocator
    allocate = allocator.allocate

    def allocate_filled(sequence: Any, cancelled: Any) -> None:
        allocate(sequence, cancelled)
        filled(sequence.kv, depth)

    with patch.object(allocator, "allocate", allocate_filled):
        yield
