"""Our sides of `python -m benchmarks.gpu` with whole models, each a process: `python -m benchmarks.gpu_worker SIDE`.

cap: a model under one cap of the card's memory, placed as the plan has it, and so that all which the cap does not hold
is copied in every step; besides, a CPU alone computes its blocks where they lie in the host's memory.
model: a whole model on the card: decode, prefill, first tokens, the card's memory.
long: steps behind a long text, in which tokens attend to all of it or choose their pages.
speculation: drafts that are right as often as asked for, and drafts that are all wrong, on the same model.
experts: a mixture under one cap: the experts used last in slots on the card, beside a CPU alone.
texts: the built-in model's greedy text in fp32 by the placement of its blocks; that of a CPU alone is right.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal, cast
from unittest.mock import patch

import torch

from benchmarks.engines import Answers, answer, random_ids
from benchmarks.gpu_engines import (
    MemoryModel,
    WithoutGraphs,
    as_card,
    behind,
    decoded,
    ignore,
    mixture_config,
    resident,
    sequence,
    written,
)
from benchmarks.gpu_kernels import copying
from benchmarks.gpu_table import MODEL
from benchmarks.measure import paired, plain
from benchmarks.oracle import Wrong, draft_with
from benchmarks.peers_protocol import UnavailableError, serve
from benchmarks.speculation import oracle_row
from localllm.cache.kv_format import KV_FORMATS
from localllm.cache.paged_kv import PagedKV
from localllm.engine.engine import Engine
from localllm.engine.kv_allocator import KVAllocator
from localllm.engine.loader import LoadedModel
from localllm.engine.memory import choose_device
from localllm.engine.placement import model_shape
from localllm.engine.planner import ModelPlanner
from localllm.engine.prefix_config import IN_POOLS, NO_REUSE, UNKNOWN_SOURCE
from localllm.engine.request import SamplingParams
from localllm.engine.residency import Residency, new_pages
from localllm.engine.speculative.choice import Speculate
from localllm.hub import locate
from localllm.kernels.kv_page import PAGE_TOKENS
from localllm.models.convert import convert
from localllm.models.families import load_config
from localllm.models.load import DecoderParts, load_decoder
from localllm.models.offloaded_model import OffloadedModel
from localllm.models.packed import PackedModel
from localllm.offload.measurements.device_rates import gpu
from localllm.offload.measurements.measurement import device_measured, measured
from localllm.offload.measurements.roofline import DeviceFloors, warm_up
from localllm.offload.placement import NEVER, BlockPlacement
from localllm.offload.planner.plan import Plan
from localllm.offload.planner.profile import kept_profile
from localllm.offload.planner.search import Search
from localllm.quant.layouts import SIZES
from localllm.quant.recipe import RECIPES
from localllm.settings import EngineConfig
from localllm.text.tokenizer import Tokenizer

CTX = 544
LONG_PROMPT = 512  # as many tokens as are computed at once: the activations are at their peak
PROMPT = 8  # tokens before those that are timed
_PLANNINGS = 5
_NO_HANDING_OVER_S = 1e3  # a plan that may let the host compute nothing
_HOST = torch.device("cpu")


class CappedModel:
    def machine(self, *, device: str, weights: Sequence[str]) -> dict[str, Any]:
        """Measure what a plan knows of this machine, and save it for the other processes."""
        on = choose_device(device)
        profile = kept_profile()
        for name in weights:
            profile = measured(profile, name, RECIPES[name].blocks, torch.bfloat16, ignore)
            profile = device_measured(profile, on, name, RECIPES[name].blocks, torch.bfloat16, ignore)
        found = gpu(on)
        return {"profile": asdict(profile), "card": None if found is None else asdict(found)}

    def load(self, *, raw_config: dict[str, Any], weights: str, cap_bytes: int, device: str) -> dict[str, Any]:
        started = time.perf_counter()
        self.device, recipe = choose_device(device), RECIPES[weights]
        with tempfile.TemporaryDirectory() as folder:
            files = written(Path(folder), raw_config)
            config = load_config(files.directory)
            self.model = MemoryModel(config, recipe)
            with as_card(self.device, self.model):
                asked = ModelPlanner(
                    files.name,
                    files,
                    SIZES[weights],
                    "bf16",
                    str(self.device),
                    EngineConfig(ctx=CTX, vram=cap_bytes),
                    None,
                    ignore,
                )
                self.search = asked.search(config)
                assert self.search.machine.card is not None
                self.card_memory = self.search.machine.card.memory
                plannings = [_planned_ms(self.search) for _ in range(_PLANNINGS)]
                _reset_peak(self.device)
                engine = Engine.load(
                    files,
                    EngineConfig(device=device, weights=weights, ctx=CTX, vram=cap_bytes, speculate="off"),
                    reuse=NO_REUSE,
                )
        plan, placed = engine.plan, engine.residency.placed
        assert plan is not None
        if placed is None:
            raise UnavailableError(f"the model fits into {cap_bytes / 1e9:.3g} GB: nothing is left to be placed")
        self.engine, self.plan, self.placed, self.recipe = engine, plan, placed, recipe
        # Nothing but `decode` moves blocks: the link's own memory, and another side's, come and go on the card as well.
        engine.residency = Residency(engine.model, engine.kv_format, plan.batch_rows, placed)
        machine = self.search.machine
        assert machine.card is not None
        streaming = replace(machine.card, rates=replace(machine.card.rates, hop_s=_NO_HANDING_OVER_S))
        copying = replace(self.search, machine=replace(machine, card=streaming)).best()
        self.placements = {"found": plan.blocks, "streamed": copying.blocks}
        self.alone: Engine | None = None
        self.floors: DeviceFloors | None = None
        return {
            "load_s": time.perf_counter() - started,
            "pinned_runs": placed.wait_until_pinned(),
            "plan_ms": statistics.median(plannings),
            "layers": config.num_layers,
            "model_bytes": plan.shape.num_bytes,
            "context_bytes": self.card_memory.context_bytes,
            "blocks": {name: _kinds(blocks) for name, blocks in self.placements.items()},
            "copied_bytes": {name: _copied_bytes(blocks) for name, blocks in self.placements.items()},
            "decode_s": {"found": plan.costs.decode_s(PROMPT), "streamed": copying.costs.decode_s(PROMPT)},
            "bound_by": plan.bound_by,
            "ledger": plan.ledger["vram"],
        }

    def peak(self) -> dict[str, Any]:
        """The peak of the card's memory over a prompt and the tokens behind it under the plan."""
        ttft_s = answer(self.engine, [random_ids(LONG_PROMPT, self._vocab_size, 0)], 3).ttft_s
        gave_way = self.placed.blocks != self.plan.blocks
        facts = {"ttft_s": ttft_s, "predicted_ttft_s": self.plan.costs.prompt_s(LONG_PROMPT), "gave_way": gave_way}
        return facts | _peak(self.device, self.card_memory.context_bytes)

    def decode(self, *, placement: str, tokens: int) -> dict[str, float]:
        """Tokens a second, and the plan's prediction. placement: found, streamed, or host, which is a CPU alone."""
        engine = self._alone() if placement == "host" else self._placed(self.placements[placement])
        tok_s = answer(engine, [random_ids(PROMPT, self._vocab_size, 1)], tokens).decode_tok_s
        predicted = self.plan.costs.decode_s(PROMPT + tokens // 2) if placement == "found" else 0.0
        return {"tok_s": tok_s, "predicted_s": predicted}

    def h2d_gbs(self) -> float:
        if self.floors is None:
            self.floors = DeviceFloors(self.device, 256 << 20)
            warm_up(self.device, self.floors.h2d_gbs)
        return statistics.median(self.floors.h2d_gbs() for _ in range(5))

    def _placed(self, blocks: Sequence[BlockPlacement]) -> Engine:
        if self.placed.blocks != blocks:
            self.engine.residency.move(blocks)
            self.placed.wait_until_pinned()
        return self.engine

    def _alone(self) -> Engine:
        if self.alone is None:
            decoder = load_decoder(self.model, self.model.config, self.recipe, dtype=torch.bfloat16, device=_HOST)
            self.alone = Engine(LoadedModel(decoder, CTX), self.engine.tokenizer)
        return self.alone

    @property
    def _vocab_size(self) -> int:
        return self.model.config.vocab_size


class CappedMixture:
    """A mixture under a cap of the card's memory: the experts used last are there, the host computes the others."""

    def load(self, *, weights: str, cap_bytes: int, device: str, small: bool) -> dict[str, Any]:
        self.device = choose_device(device)
        with tempfile.TemporaryDirectory() as folder:
            files = written(Path(folder), mixture_config(small=small))
            self.model = MemoryModel(load_config(files.directory), RECIPES[weights])
            config = EngineConfig(device=device, weights=weights, ctx=CTX, vram=cap_bytes, speculate="off")
            with as_card(self.device, self.model):
                _reset_peak(self.device)
                self.engine = Engine.load(files, config, reuse=NO_REUSE)
        plan = self.engine.plan
        assert plan is not None
        decoder = load_decoder(self.model, self.model.config, RECIPES[weights], dtype=torch.bfloat16, device=_HOST)
        self.sides = {"placed": self.engine, "host": Engine(LoadedModel(decoder, CTX), self.engine.tokenizer)}
        return {
            "cap_bytes": cap_bytes,
            "model_bytes": plan.shape.num_bytes,
            "held": _experts_on_device(plan),
            "total": sum(experts.count for _, experts in plan.shape.mixtures),
            "blocks": _kinds(plan.blocks),
            "predicted_tok_s": plan.decode_tok_s,
            "ledger": plan.ledger["vram"],
            "context_bytes": plan.ledger["vram"].get("context", 0),
        }

    def peak(self) -> dict[str, Any]:
        """The peak of the card's memory over a prompt and the tokens behind it."""
        prompt = random_ids(LONG_PROMPT, self.model.config.vocab_size, 0)
        ttft_s = answer(self.engine, [prompt], 3).ttft_s
        return {"ttft_s": ttft_s, **_peak(self.device, self.engine.facts().ledger["vram"].get("context", 0))}

    def decode(self, *, side: str, tokens: int, seed: int) -> dict[str, float | None]:
        """Tokens a second, and the share of wanted experts that were in slots; None where there are none."""
        engine, before = self.sides[side], self.engine.facts()
        tok_s = answer(engine, [random_ids(PROMPT, self.model.config.vocab_size, seed)], tokens).decode_tok_s
        after = self.engine.facts()
        wanted = after.experts_wanted - before.experts_wanted
        return {"tok_s": tok_s, "hit_rate": (after.expert_hits - before.expert_hits) / wanted if wanted else None}


def _experts_on_device(plan: Plan) -> int:
    """Return how many have room there at a time."""
    counts = {block.name: experts.count for block, experts in plan.shape.mixtures}
    mixtures = [block for block in plan.blocks if block.name in counts]
    slots = sum(block.experts.slots for block in mixtures if block.experts is not None and block.is_slotted)
    return slots + sum(counts[block.name] for block in mixtures if block.tier == "vram")


def _reset_peak(device: torch.device) -> None:
    if device.type != "cpu":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _peak(device: torch.device, context_bytes: int) -> dict[str, Any]:
    """The peak by torch with CUDA's own share, and by NVML. Lifts the cap: the link is measured with own memory."""
    if device.type == "cpu":
        return {}
    reserved, found = torch.cuda.max_memory_reserved(device), gpu(device)
    torch.cuda.set_per_process_memory_fraction(1.0, device)
    return {"peak_bytes": reserved + context_bytes, "own_bytes": None if found is None else found.own_bytes}


def _planned_ms(search: Search) -> float:
    started = time.perf_counter()
    replace(search).best()  # of a search that remembers no plan
    return 1e3 * (time.perf_counter() - started)


def _kinds(blocks: Sequence[BlockPlacement]) -> dict[str, int]:
    """The number of blocks of each kind, the embedding aside."""
    return dict(Counter(f"{block.tier}/{block.exec}" for block in blocks[1:]))


def _copied_bytes(blocks: Sequence[BlockPlacement]) -> int:
    """Bytes copied to the card in each step of one token."""
    return sum(block.num_bytes for block in blocks[1:] if block.tier != "vram" and block.exec == "gpu")


_KV = "int8"  # the engine's, which is the default
_ROOM = 256  # tokens behind the deepest sequence
_KV_BYTES = {"bf16": 131072, "int8": 70000, "int4": 40000}  # of a token of llama-3.1-8b, and a little more
_WEIGHT_BYTES = 9 * 10**9  # of that model in INT4, with what its steps take and a copy beside them
_SMALL_PROMPT = 20  # of a stand-in


class ResidentModel:
    def load(self, *, device: str, depths: Sequence[int], small: bool) -> dict[str, Any]:
        """depths: of tokens; those that the card has no memory for, in all formats side by side, are left out."""
        self.device = choose_device(device)
        self.depths = [depth for depth in depths if small or self._fits(depth)]
        if not self.depths:
            raise UnavailableError(f"{MODEL} in INT4 does not fit into what is free of the card's memory")
        self.most_tokens = _SMALL_PROMPT if small else 2048
        started = time.perf_counter()
        self.notes = list[str]()
        self.engine = resident(self.device, max(self.depths) + _ROOM, _KV, self.notes.append, small=small)
        loaded = time.perf_counter()
        ttft = [self._answer(self._prompt(min(512, self.most_tokens)), 2).ttft_s for _ in range(2)]
        assert self.engine.plan is not None and self.engine.runner.gpu_program is not None
        self.shape = self.engine.plan.shape
        # What is known of earlier prompts, for those that may use it.
        self.known = KVAllocator(
            self.engine.residency, IN_POOLS, UNKNOWN_SOURCE, self.engine.plan, self.engine.adapters
        )
        self._num_prompts = 0
        self.steps = {True: self.engine.runner.gpu_program, False: WithoutGraphs(self.engine.model)}
        self.pages = {name: new_pages(self.engine.model, KV_FORMATS[name]) for name in _KV_BYTES}
        self.sequences: dict[tuple[str, int], PagedKV] = {}
        peak = self._peak()
        self.copy_gbs = copying(self.device)
        facts = {"load_s": loaded - started, "is_whole": self.steps[True].is_whole, "depths": self.depths}
        return {**facts, "first_s": ttft[0], "second_s": ttft[1], "peak": peak}

    @torch.inference_mode()
    def decode(self, *, kv: str, depth: int, tokens: int, graphs: bool) -> dict[str, Any]:
        """Tokens a second of the steps alone, and the tokens."""
        cache, step = self._sequence(kv, depth), self.steps[graphs]
        torch.get_device_module(self.device).synchronize(self.device)
        started = time.perf_counter()
        found = decoded(step, cache, depth, tokens)
        return {"tok_s": tokens / (time.perf_counter() - started), "tokens": found}

    def engine_decode(self, *, depth: int, tokens: int) -> float:
        """Tokens a second by the engine, greedy."""
        with behind(self.engine, depth):
            return self._answer(self._prompt(depth + 1), tokens).decode_tok_s

    def copied(self, *, depth: int) -> float:
        """Tokens a second, if a step of the engine took as long as a copy on the device takes for as many bytes."""
        shape = self.shape
        num_bytes = shape.block_bytes + shape.lm_head.num_bytes + depth * shape.kv_bytes_per_token
        return self.copy_gbs() * 1e9 / num_bytes

    def prefill(self, *, tokens: int) -> float:
        """Tokens a second of a prompt, to its first token, in such chunks as the engine takes."""
        return tokens / self._answer(self._prompt(tokens), 1).ttft_s

    def first_token(self, *, shared: int, own: int, is_known: bool) -> float:
        """Seconds to the first token of a prompt of so many tokens that all have in common and so many of its own.

        is_known: the former were computed before.
        """
        self._num_prompts += 1
        prompt = self._prompt(shared) + random_ids(own, self.engine.config.vocab_size, self._num_prompts)
        if not is_known:
            return self._answer(prompt, 1).ttft_s
        prefix = self.known.prefix
        assert prefix is not None
        scheduler = self.engine.scheduler
        with patch.object(self.engine, "kv_allocator", self.known), patch.object(scheduler, "allocator", self.known):
            self._answer(prompt[:shared], 1)  # whose pages others may have taken since
            before = prefix.counts.pool
            found = self._answer(prompt, 1)
        if prefix.counts.pool - before < shared // PAGE_TOKENS:
            raise UnavailableError(f"of {shared} tokens, {prefix.counts.pool - before} pages were found again")
        return found.ttft_s

    def _answer(self, prompt: tuple[int, ...], tokens: int) -> Answers:
        """Raises UnavailableError where operators have computed it."""
        found = answer(self.engine, [prompt], tokens)
        if self.engine.runner.gpu_program is None:
            raise UnavailableError(f"our kernels gave up: {'; '.join(self.notes)}")
        return found

    def _fits(self, depth: int) -> bool:
        free, _ = torch.cuda.mem_get_info(self.device)
        return _WEIGHT_BYTES + (depth + _ROOM) * (sum(_KV_BYTES.values()) + _KV_BYTES[_KV]) < free

    def _sequence(self, kv: str, depth: int) -> PagedKV:
        if (kv, depth) not in self.sequences:
            for key in [key for key in self.sequences if key[1] != depth]:  # one depth at a time
                self.sequences.pop(key).close()
            self.sequences[kv, depth] = sequence(self.pages[kv], depth, _ROOM)
        return self.sequences[kv, depth]

    def _peak(self) -> dict[str, Any]:
        """The ledger, and the peak of the card's memory while a prompt is computed with the whole context reserved."""
        plan, engine = self.engine.plan, self.engine
        assert plan is not None
        prompt = self._prompt(min(self.most_tokens, engine.ctx // 2))
        sampling = SamplingParams(temperature=0, max_tokens=engine.ctx - len(prompt), ignore_eos=True)
        _reset_peak(self.device)
        events = engine.generate(prompt, sampling)
        for _ in range(len(prompt) // 512 + 3):
            next(events)
        events.close()  # type: ignore[attr-defined]
        vram = plan.ledger["vram"]
        return {"ledger_bytes": sum(vram.values()), **_peak(self.device, vram.get("context", 0))}

    def _prompt(self, tokens: int) -> tuple[int, ...]:
        return random_ids(tokens, self.engine.config.vocab_size, 0)


class LongTexts:
    @torch.inference_mode()
    def rows(self, *, device: str, seconds: float, rounds: int, small: bool) -> dict[str, Any]:
        """Tokens a second of steps behind a long text, by what they attend to, in turn."""
        until, on = time.monotonic() + seconds, choose_device(device)
        depth, pages, tokens = (300, 1, 3) if small else (32768, 64, 64)
        engine = resident(on, depth + _ROOM, _KV, ignore, small=small)
        step, found = engine.runner.gpu_program, dict[str, list[float]]()
        assert step is not None
        sequences = {}
        for name, chosen in (("all", None), (f"top:{pages}", pages)):
            kv = sequence(new_pages(engine.model, KV_FORMATS[_KV], chosen_pages=chosen), depth, _ROOM)
            kv.attend_from, sequences[name] = depth, kv
            decoded(step, kv, depth, 2)  # compiles, and makes sketches
        for _ in range(rounds):
            for name, kv in sequences.items():
                torch.get_device_module(on).synchronize(on)
                started = time.perf_counter()
                decoded(step, kv, depth, tokens)
                found.setdefault(name, []).append(tokens / (time.perf_counter() - started))
            if time.monotonic() > until:
                break
        return {"depth": depth, "tok_s": found}


_SPECULATION_CTX = 512
_SHARES = ((0.8, 4), (0.8, 8), (0.95, 8), (0.6, 4), (0.3, 2), (0.6, 8), (0.95, 4), (0.3, 8))  # the most telling first


class SpeculationRows:
    def rows(self, *, device: str, seconds: float, rounds: int, small: bool) -> dict[str, Any]:
        """Rows of both placements, as many as there is time for."""
        until, found = time.monotonic() + seconds, []
        engine = resident(choose_device(device), _SPECULATION_CTX, "int8", ignore, small=small)
        tokens, shares = (4, _SHARES[:1]) if small else (128, _SHARES)
        for placement in ("resident", "streamed"):
            if placement == "streamed":
                _stream_some(engine)
            half = time.monotonic() + (until - time.monotonic()) / (2 if placement == "resident" else 1)
            found.append(_wrong_row(engine, placement, rounds, tokens))
            for alpha, count in shares:
                if time.monotonic() < half:
                    found.append(oracle_row(engine, placement, alpha, count, rounds, tokens))
        return {"rows": json.loads(json.dumps(found, default=plain))}


def _wrong_row(engine: Engine, placement: str, rounds: int, tokens: int) -> dict[str, Any]:
    """The controller's speed where every draft is wrong."""
    prompt = random_ids(64, engine.config.vocab_size, 1)
    draft_with(engine, Speculate("off"))
    expected = (*prompt, *answer(engine, [prompt], tokens).ids)
    draft_with(engine, Speculate("ngram"), Wrong({prompt: expected}, engine.config.vocab_size))
    drafting, plain, drafted = engine.speculation, list[float](), list[float]()
    answer(engine, [prompt], tokens)
    for _ in range(rounds):
        draft_with(engine, Speculate("off"))
        plain.append(answer(engine, [prompt], tokens).token_s)
        engine.speculation = drafting
        drafted.append(answer(engine, [prompt], tokens).token_s)
    return {"placement": placement, "alpha": 0.0, "k": 8, "speedup": paired(plain, drafted)}


def _stream_some(engine: Engine) -> None:
    """Place every other MLP in the host's memory, to be copied to the card at each step."""
    blocks = []
    for number, block in enumerate(engine.residency.blocks):
        is_copied = block.name.endswith(".mlp") and number % 4 == 2
        blocks.append(replace(block, tier="ram", exec="gpu") if is_copied else block)
    engine.residency.move(blocks)


KINDS = {
    "resident": ("vram", "gpu"),
    "streamed": ("ram", "gpu"),
    "computed": ("ram", "cpu"),
    "split": ("ram", "split"),
    "disk": ("disk", "gpu"),
    "disk-computed": ("disk", "cpu"),
}
_TEXT_PROMPT = tuple(range(3, 45))
_TEXT_CTX = 512
_RECIPE = RECIPES["fp32"]


class Texts:
    def compare(self, *, device: str, tokens: int, many_tokens: int) -> dict[str, str]:
        """Compare the texts; "ok" or the fault, by the kind of placement."""
        # With more, cores that have other work made a token of so small a model take 10 x as long.
        torch.set_num_threads(1)
        self.files, self.tokens, self.many_tokens = locate("tiny"), tokens, many_tokens
        self.tokenizer = Tokenizer.load(self.files.directory)
        with _packed(self.files.directory) as packed:
            alone = load_decoder(packed, packed.config, _RECIPE, dtype=torch.float32, device=_HOST)
            expected = self._text(Engine(LoadedModel(alone, _TEXT_CTX), self.tokenizer), self.many_tokens)
            parts = DecoderParts(packed.config, _RECIPE, torch.float32, choose_device(device))
            with OffloadedModel(packed, parts, choose_device(device)) as placed:
                found = {kind: self._compared(placed, kind, expected) for kind in (*KINDS, "mixed")}
                found[f"mixed, {many_tokens} tokens twice"] = _outcome(lambda: self._twice(placed))
        return found

    def _compared(self, placed: OffloadedModel, kind: str, expected: list[int]) -> str:
        def compare() -> str:
            for seed, many_rows in enumerate((NEVER, 8)):
                placed.place(self._blocks(kind, seed), many_rows)
                text = self._text(
                    Engine(LoadedModel(placed.decode_model, _TEXT_CTX, placed=placed), self.tokenizer), self.tokens
                )
                if text != expected[: self.tokens]:
                    at = next(index for index, pair in enumerate(zip(text, expected, strict=False)) if len({*pair}) > 1)
                    return f"FAILED: another token at {at} of {self.tokens}, many_rows {many_rows}"
            return "ok"

        return _outcome(compare)

    def _twice(self, placed: OffloadedModel) -> str:
        placed.place(self._blocks("mixed", 2), 8)
        engine = Engine(LoadedModel(placed.decode_model, _TEXT_CTX, placed=placed), self.tokenizer)
        first, second = (self._text(engine, self.many_tokens) for _ in range(2))
        return "ok" if first == second else "FAILED: two texts"

    def _text(self, engine: Engine, max_tokens: int) -> list[int]:
        return list(answer(engine, [_TEXT_PROMPT], max_tokens).ids)

    def _blocks(self, kind: str, seed: int) -> list[BlockPlacement]:
        """Blocks of this kind. The embedding, which is the head's matrix, is on the device where everything is."""
        shape = model_shape(load_config(self.files.directory), _RECIPE, "fp32", "tiny")
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


def _outcome(compare: Callable[[], str]) -> str:
    """The result, or the failure: the other kinds are tried all the same."""
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
    serve(
        {
            "cap": CappedModel,
            "experts": CappedMixture,
            "long": LongTexts,
            "model": ResidentModel,
            "speculation": SpeculationRows,
            "texts": Texts,
        }[sys.argv[1]]()
    )
