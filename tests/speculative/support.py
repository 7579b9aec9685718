"""Engines that draft, placed in several ways, and what they must say: what one says that does not draft."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.oracle import FixedCount, Oracle
from localllm import Engine, FinishedEvent, Request, SamplingParams, TokenEvent, hub
from localllm.engine.events import Event, SpeculationStats
from localllm.engine.loader import LoadedModel
from localllm.engine.placement import model_shape
from localllm.engine.prefix_config import IN_POOLS, KVReuse
from localllm.engine.speculative.drafter import Drafter, ModelDrafter, SkipDrafter
from localllm.engine.speculative.ngram import NgramLookup
from localllm.engine.speculative.speculator import Speculation
from localllm.engine.weights import open_packed
from localllm.models.families import load_config
from localllm.models.layout import EMBED, HEAD
from localllm.models.load import DecoderParts
from localllm.models.offloaded_model import OffloadedModel
from localllm.offload.placement import NEVER, BlockPlacement
from localllm.quant.recipe import RECIPES
from localllm.settings import EngineConfig
from localllm.text.tokenizer import Tokenizer
from tests.engine_support import steps
from tests.kv_support import check_pages

TALE = (
    "Once upon a time there was a fox who found a lantern. The fox was proud of the lantern, and the fox said: "
    "I have found a lantern. Once upon a time there was a"
)
QUOTING = "one two three four. " * 8
SAMPLERS = {
    "greedy": {"temperature": 0},
    "plain": {"temperature": 1.0},
    "nucleus": {"temperature": 0.8, "top_p": 0.9, "min_p": 0.02},
    "top-k": {"temperature": 1.3, "top_k": 20, "repetition_penalty": 1.15},
    "penalties": {
        "temperature": 0.7,
        "frequency_penalty": 0.4,
        "presence_penalty": 0.3,
        "repeat_last_n": 9,
        "dry_multiplier": 0.8,
    },
    "typical": {"temperature": 0.9, "typical_p": 0.8, "logit_bias": {5: 1.5, 9: -4.0}},
}
# Of each: the names of the blocks that come from the disk at every step.
PLACEMENTS: dict[str, Callable[[str], bool]] = {
    "whole": lambda name: False,
    "some": lambda name: name.startswith(("layers.5.", "layers.6.", "layers.7.mlp")),
    "mlps": lambda name: name.endswith(".mlp"),
    "all": lambda name: name not in (EMBED, HEAD),
}
DRAFTERS = ("ngram", "skip", "model", "ngram+skip")
SKIPPED = frozenset({"layers.4.attention", "layers.5.attention", "layers.5.mlp", "layers.7.attention"})


def loaded(kv: str = "auto", ctx: int | None = None, reuse: KVReuse = IN_POOLS) -> Engine:
    """The built-in model in INT4."""
    config = EngineConfig(device="cpu", weights="int4", kv=kv, ctx=ctx, speculate="off")
    return Engine.load("tiny", config, reuse=reuse)


def loaded_in_fp32() -> Engine:
    """The same, packed as it is, so that its blocks can rest anywhere."""
    files, recipe = hub.locate("tiny"), RECIPES["fp32"]
    config, held = load_config(files.directory), ExitStack()
    packed = held.enter_context(open_packed(files, config, recipe, lambda _done, _total: None, lambda _text: None))
    parts = DecoderParts(packed.config, recipe, torch.float32, torch.device("cpu"))
    placed = held.enter_context(OffloadedModel(packed, parts, None))
    shape = model_shape(packed.config, recipe, "fp32", "tiny")
    blocks = (shape.embed, *shape.blocks, shape.head)
    placed.place([BlockPlacement(block.name, block.num_bytes, "ram", "cpu") for block in blocks], NEVER)
    return Engine(LoadedModel(placed.decode_model, 512, placed=placed, held=held), Tokenizer.load(files.directory))


def place(engine: Engine, placement: str) -> None:
    from_disk = PLACEMENTS[placement]
    engine.residency.move(
        [replace(each, tier="disk" if from_disk(each.name) else "ram") for each in engine.residency.blocks]
    )


@cache
def _second_engine() -> Engine:
    return loaded()


def draft_with(engine: Engine, drafter: str, draft_tokens: int) -> None:
    """Draft as many tokens as may be in every step from now on. `skip` leaves out what is streamed, or a few blocks
    where nothing is."""
    lookup = NgramLookup() if "ngram" in drafter else None
    drafters: list[Drafter] = []
    if "skip" in drafter:
        skipped = engine.residency.model.stream.names or SKIPPED
        drafters.append(SkipDrafter(lambda: engine.runner, lambda: skipped))
    if "model" in drafter:  # one that is nearly the same: without some blocks, with keys of its own
        second = _second_engine()
        drafters.append(ModelDrafter("model:second", lambda: second.runner.without(SKIPPED), second.residency.new_kv))
    engine.speculation.close()
    engine.speculation = Speculation(engine.residency, lookup, drafters, draft_tokens, FixedCount)


def draft_by_oracle(engine: Engine, wish: Request, answer: Said, alpha: float, draft_tokens: int) -> None:
    """From now on: drafts of which a share of alpha is right."""
    oracle = Oracle({wish.prompt_ids: (*wish.prompt_ids, *answer.token_ids)}, alpha, engine.config.vocab_size)
    engine.speculation = Speculation(engine.residency, oracle, (), draft_tokens, FixedCount)


def swap_two_words(folder: Path) -> tuple[str, str]:
    """Of the tokenizer in this folder: those with the ids 600 and 601."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    first, second = [word for word, index in words.items() if index in (600, 601)]
    words[first], words[second] = words[second], words[first]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return first, second


@dataclass(frozen=True)
class Said:
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str

    @classmethod
    def of(cls, events: Sequence[Event]) -> Said:
        finished = events[-1]
        assert isinstance(finished, FinishedEvent)
        if finished.error is not None:
            raise finished.error
        token_ids = tuple(event.token_id for event in events if isinstance(event, TokenEvent))
        text = "".join(event.text for event in events if isinstance(event, TokenEvent | FinishedEvent))
        return cls(token_ids, text, finished.finish_reason)


def answers(engine: Engine, requests: Sequence[Request]) -> list[list[Event]]:
    """All at once."""
    events: dict[int, list[Event]] = {engine.submit(request): [] for request in requests}
    for event in steps(engine):
        events[event.request_id].append(event)
    check_pages(engine.residency.kv_pages)
    return list(events.values())


def said(engine: Engine, *requests: Request) -> list[Said]:
    return [Said.of(events) for events in answers(engine, requests)]


def plainly(engine: Engine, *requests: Request, placement: str = "whole") -> list[Said]:
    """What each says alone, without drafts."""
    place(engine, placement)
    draft_with(engine, "", 0)
    return [said(engine, request)[0] for request in requests]


def stats(events: Sequence[Event]) -> SpeculationStats:
    finished = events[-1]
    assert isinstance(finished, FinishedEvent) and finished.speculation is not None
    return finished.speculation


def request(engine: Engine, prompt: str = TALE, mask: object = None, **sampling: object) -> Request:
    params = SamplingParams(**{"max_tokens": 24, "ignore_eos": True, "seed": 0, **sampling})  # type: ignore[arg-type]
    return Request(tuple(engine.encode(prompt)), params, mask=mask)  # type: ignore[arg-type]


def grammar_like(vocab_size: int) -> Callable[[Sequence[int]], Tensor]:
    """A third of the vocabulary, another one behind each token: a pure function of the answer so far."""

    def mask(token_ids: Sequence[int]) -> Tensor:
        state = (sum(token_ids) + len(token_ids)) % 3
        allowed = torch.zeros(vocab_size, dtype=torch.bool)
        allowed[state::3] = True
        return allowed

    return mask
