"""The built-in model's greedy text in fp32, wherever its blocks rest: a process, `python -m benchmarks.gpu_texts`.

What a CPU alone writes is right.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, cast

import torch

from benchmarks.peers_protocol import serve
from localllm.engine.engine import Engine
from localllm.engine.events import FinishedEvent, TokenEvent
from localllm.engine.memory import choose_device
from localllm.engine.placement import model_shape
from localllm.engine.request import SamplingParams
from localllm.hub import locate
from localllm.models.convert import convert
from localllm.models.families import load_config
from localllm.models.load import DecoderParts, load_decoder
from localllm.models.packed import PackedModel
from localllm.models.placed import PlacedModel
from localllm.offload.placement import NEVER, BlockPlacement
from localllm.quant.recipe import RECIPES
from localllm.text.tokenizer import Tokenizer

KINDS = {
    "resident": ("vram", "gpu"),
    "streamed": ("ram", "gpu"),
    "computed": ("ram", "cpu"),
    "split": ("ram", "split"),
    "disk": ("disk", "gpu"),
    "disk-computed": ("disk", "cpu"),
}
PROMPT = tuple(range(3, 45))
CTX = 512
_HOST = torch.device("cpu")
_RECIPE = RECIPES["fp32"]


class Texts:
    def compare(self, *, device: str, tokens: int, many_tokens: int) -> dict[str, str]:
        """By the kind of placement: "ok", or what is wrong with it."""
        torch.set_num_threads(
            1
        )  # with more, cores that have other work made a token of so small a model take 10 x as long
        self.files, self.tokens, self.many_tokens = locate("tiny"), tokens, many_tokens
        self.tokenizer = Tokenizer.load(self.files.directory)
        with _packed(self.files.directory) as packed:
            alone = load_decoder(packed, packed.config, _RECIPE, dtype=torch.float32, device=_HOST)
            expected = self._text(Engine(alone, self.tokenizer, ctx=CTX), self.many_tokens)
            parts = DecoderParts(packed.config, _RECIPE, torch.float32, choose_device(device))
            with PlacedModel(packed, parts, choose_device(device)) as placed:
                found = {kind: self._told(placed, kind, expected) for kind in (*KINDS, "mixed")}
                found[f"mixed, {many_tokens} tokens twice"] = _said(lambda: self._twice(placed))
        return found

    def _told(self, placed: PlacedModel, kind: str, expected: list[int]) -> str:
        def compare() -> str:
            for seed, many_rows in enumerate((NEVER, 8)):
                placed.place(self._blocks(kind, seed), many_rows)
                text = self._text(Engine(placed.few, self.tokenizer, ctx=CTX, placed=placed), self.tokens)
                if text != expected[: self.tokens]:
                    at = next(index for index, pair in enumerate(zip(text, expected, strict=False)) if len({*pair}) > 1)
                    return f"FAILED: another token at {at} of {self.tokens}, many_rows {many_rows}"
            return "ok"

        return _said(compare)

    def _twice(self, placed: PlacedModel) -> str:
        placed.place(self._blocks("mixed", 2), 8)
        engine = Engine(placed.few, self.tokenizer, ctx=CTX, placed=placed)
        first, second = (self._text(engine, self.many_tokens) for _ in range(2))
        return "ok" if first == second else "FAILED: two texts"

    def _text(self, engine: Engine, max_tokens: int) -> list[int]:
        sampling, ids = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True), []
        for event in engine.generate(PROMPT, sampling):
            if isinstance(event, TokenEvent):
                ids.append(event.token_id)
            elif isinstance(event, FinishedEvent) and event.error is not None:
                raise event.error  # a NaN among the logits is one
        return ids

    def _blocks(self, kind: str, seed: int) -> list[BlockPlacement]:
        """The embedding, which is the head's matrix, is on the device where everything is."""
        shape = model_shape(load_config(self.files.directory), _RECIPE, torch.float32, "tiny")
        choose = random.Random(seed)
        vocabulary = _placed("resident" if kind == "resident" else "computed")
        blocks = [vocabulary(shape.embed.name, shape.embed.num_bytes)]
        for block in shape.blocks:
            chosen = choose.choice(list(KINDS)) if kind == "mixed" else kind
            if chosen == "split" and not (block.name.endswith("mlp") and shape.can_split):
                chosen = "resident"
            blocks.append(_placed(chosen)(block.name, block.num_bytes))
        return [*blocks, vocabulary(shape.head.name, shape.head.num_bytes)]


def _placed(kind: str) -> Callable[[str, int], BlockPlacement]:
    tier, computed_by = cast(tuple[Literal["vram"], Literal["gpu"]], KINDS[kind])
    return lambda name, num_bytes: BlockPlacement(
        name, num_bytes, tier, computed_by, num_bytes // 2 if kind == "split" else 0
    )


def _said(compare: Callable[[], str]) -> str:
    """One kind that fails leaves the others to be tried."""
    try:
        return compare()
    except Exception as error:
        return f"FAILED: {type(error).__name__}: {error}".splitlines()[0]


@contextmanager
def _packed(checkpoint: Path) -> Iterator[PackedModel]:
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "packed"
        convert(checkpoint, target, _RECIPE, "tiny")
        with PackedModel.open(target, load_config(checkpoint), _RECIPE, "tiny") as packed:
            yield packed


if __name__ == "__main__":
    serve(Texts())
