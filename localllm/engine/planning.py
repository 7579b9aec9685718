"""What `localllm plan` says of a model: its plan on this machine, how sure that is, and what would be better."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from localllm import hub
from localllm.config import format_bytes
from localllm.engine.advice import advise, other_model
from localllm.engine.card import CardPlanning
from localllm.engine.draft_loader import draft_bytes, require_same_tokenizer, why_left_out
from localllm.engine.loader import has_card, require_card
from localllm.engine.memory import DTYPES, choose_device, choose_dtype, require_context
from localllm.engine.placement import model_shape, process_memory, require_cap
from localllm.engine.speculative.config import Speculate
from localllm.engine.weights import as_stored, choose_recipe, compact_form
from localllm.errors import DoesNotFitError, ModelNotFoundError
from localllm.hub import ModelFiles
from localllm.hub.packed import packed_recipes
from localllm.models.families import parse_config
from localllm.models.shapes import Shape, find_shape, shipped_shapes
from localllm.offload.planner.device_rates import UNKNOWN_CONTEXT_BYTES
from localllm.offload.planner.device_search import AnySearch, with_room_for_forks
from localllm.offload.planner.plan import JobShape, ModelShape, Plan, with_kept_pages
from localllm.offload.planner.profile import UNKNOWN_DISK_GBS, Profile, kept_profile, measured
from localllm.offload.planner.search import Search, fits_whole, is_better
from localllm.offload.planner.speculation_gain import (
    USUAL_ALPHAS,
    Gain,
    gain,
    skipped,
    skipping,
    slow,
    staging_s,
    usual_harm,
)
from localllm.quant.recipe import DEFAULT, RECIPES, Recipe
from localllm.text.tokenizer import Tokenizer

_ALL_BYTES = 1 << 62  # more than any process holds


@dataclass(frozen=True)
class Prediction:
    """A rate or a time, and the band in which it is expected."""

    low: float
    mid: float
    high: float


@dataclass(frozen=True)
class Guessing:
    """Of one drafter, where a share alpha of its guesses is right. gain: with the best number of them. skipped: blocks
    that it leaves out. is_known: alpha is what trials on this model's text said, and no example. why_not: why it does
    not guess, or nobody knows what it gives, and there is nothing else to tell of it."""

    drafter: str
    alpha: float | None = None
    gain: Gain | None = None
    skipped: int = 0
    is_known: bool = False
    why_not: str = ""


@dataclass(frozen=True)
class Planned:
    """advice: flags and commands that help, with what comes of them. refusal: why there is no plan, where the model
    does not fit. guesses: which rates behind it are no measurements. speculation: what those who guess tokens ahead
    would give. measured_at_s: when the rates were measured, as `time.time` has it. measured_busy: which of them beside
    other work."""

    shape: ModelShape
    plan: Plan | None
    advice: list[str]
    refusal: DoesNotFitError | None = None
    decode_tok_s: Prediction | None = None
    ttft_s: Prediction | None = None
    guesses: Sequence[str] = ()
    speculation: Sequence[Guessing] = ()
    measured_at_s: float | None = None
    measured_busy: Sequence[str] = ()


@dataclass(frozen=True)
class Wishes:
    """As the settings of these names."""

    weights: str = "auto"
    kv: str = "auto"
    dtype: str = "auto"
    device: str = "auto"
    ctx: int | None = None
    ram: int | None = None
    vram: int | None = None
    speculate: str = "auto"
    draft_tokens: int | None = None
    threads: int | None = None
    job: JobShape | None = None

    @property
    def guessing(self) -> Speculate:
        return Speculate(self.speculate, self.draft_tokens)


@dataclass(frozen=True)
class Considered:
    """planned: the plan, or why there is none, without advice. advise: what would be better; it tries every model of
    the registry, which takes many times as long."""

    planned: Planned
    advise: Callable[[], list[str]]

    def advised(self) -> Planned:
        return replace(self.planned, advice=self.advise())


def plan_model(model: Shape, files: ModelFiles | None, wishes: Wishes, say: Callable[[str], None]) -> Planned:
    """As `consider`, with what would be better."""
    return consider(model, files, wishes, say).advised()


def consider(
    model: Shape, files: ModelFiles | None, wishes: Wishes, say: Callable[[str], None], placed_bytes: int = 0
) -> Considered:
    """files: where the model is on this disk. What this machine does is measured first, where that is not known.
    placed_bytes: of the host's memory that this process holds, those of a model that would make room for this one.

    Raises UsageError for what cannot be honoured.
    """
    machine = _machine(model, wishes, say, placed_bytes)
    dtype, device = machine.dtype, machine.device
    unsure = _compare_tokenizers(model.name, files, wishes.guessing.draft_model)
    search = _best_search(model, files, machine)
    profile, others = kept_profile().of(search.shape.weights), partial(_others, dtype, device, wishes.kv)
    guesses = [*_guesses(profile), *unsure]
    taken: dict[str, Any] = {"measured_at_s": profile.measured_at_s, "measured_busy": profile.busy}
    try:
        plan = search.best() if wishes.job is not None else with_kept_pages(search.best())
    except DoesNotFitError as error:
        refused = Planned(search.shape, None, [], error, guesses=guesses, **taken)
        return Considered(refused, lambda: [*search.fixes(), *map(str, other_model(search, others()))])
    speculation = () if wishes.job is not None else tuple(_speculation(plan, search, wishes, dtype, device))
    planned = Planned(search.shape, plan, [], None, *_predictions(plan, profile), guesses, speculation, **taken)
    int4 = None if search.shape.weights == DEFAULT else _shape(model, files, RECIPES[DEFAULT], dtype, device, wishes.kv)
    return Considered(planned, lambda: [*map(str, advise(search, plan, int4, others()))])


def foresee(model: Shape, files: ModelFiles | None, wishes: Wishes, say: Callable[[str], None]) -> Plan:
    """The plan alone, as a process finds it that has no model yet: what this one holds counts as free.

    say: hears of each measurement before it begins, and may raise. Raises DoesNotFitError, and as `consider`.
    """
    return _best_search(model, files, _machine(model, wishes, say, _ALL_BYTES)).best()


@dataclass(frozen=True)
class _Machine:
    """What is asked for of the machine. placed_bytes, say: as `consider` has them."""

    dtype: torch.dtype
    device: torch.device
    wishes: Wishes
    say: Callable[[str], None]
    placed_bytes: int


def _machine(model: Shape, wishes: Wishes, say: Callable[[str], None], placed_bytes: int) -> _Machine:
    if wishes.threads is not None:
        torch.set_num_threads(wishes.threads)
    device = choose_device(wishes.device)
    require_card(device, wishes.vram)
    require_context(model.config, wishes.ctx)
    dtype = choose_dtype(wishes.weights if wishes.dtype == "auto" and wishes.weights in DTYPES else wishes.dtype)
    return _Machine(dtype, device, wishes, say, placed_bytes)


def _best_search(model: Shape, files: ModelFiles | None, machine: _Machine) -> AnySearch:
    """In the format that the wishes come to, or in another with the same numbers where that is faster."""
    packed = () if files is None else tuple(packed_recipes(files))
    recipe = RECIPES[choose_recipe(machine.wishes.weights, model.config, packed, machine.dtype)]
    search = _search(model, files, recipe, machine)
    if isinstance(search, Search) and not fits_whole(search):
        compact = compact_form(recipe, model.config, packed)
        other = None if compact is None else _search(model, files, compact, machine)
        search = other if isinstance(other, Search) and is_better(other, search) else search
    return search


def _compare_tokenizers(name: str, files: ModelFiles | None, word: str) -> list[str]:
    """What is not known of the tokenizer of a second model. Raises as `require_same_tokenizer`."""
    if not word:
        return []
    draft = None
    with suppress(ModelNotFoundError):
        draft = hub.locate(word, offline=True)
    absent = [
        who
        for who, its in ((name, files), (word, draft))
        if its is None or not (its.directory / "tokenizer.json").exists()
    ]
    if absent or files is None or draft is None:
        return [
            f"{word} is taken to have the tokenizer of {name}: no tokenizer.json of {' and of '.join(absent)} is here"
        ]
    require_same_tokenizer(Tokenizer.load(files.directory), name, draft)
    return []


def _speculation(
    plan: Plan, search: AnySearch, wishes: Wishes, dtype: torch.dtype, device: torch.device
) -> Iterator[Guessing]:
    wish = wishes.guessing
    most = wish.most_tokens
    if most < 1:
        return
    depth, staging = plan.prompt_tokens, staging_s(plan)
    if wish.who in ("auto", "ngram"):
        for alpha in USUAL_ALPHAS:
            yield Guessing("ngram", alpha, gain(plan.costs, depth, alpha, 0.0, most=most))
    if wish.skips and not slow(plan):
        why = "every block is near: none is left out"
        yield Guessing("skip", why_not=why)
    elif wish.skips and not (left_out := skipped(plan)):
        yield Guessing("skip", why_not="what stays near is too little to guess with")
    elif wish.skips:
        alpha, found = skipping(plan, usual_harm([block.name for block in plan.shape.blocks]), most)
        yield Guessing("skip", alpha, found, len(left_out))
    if wish.draft_model:
        _, second, why_not = _with_second(search, wishes, dtype, device)
        if not plan.shape.draft_bytes:
            yield Guessing(wish.who, why_not=f"left out, as {why_not}")
            return
        guess_s = plan.costs.fast_s(second.num_bytes)
        for alpha in USUAL_ALPHAS:
            found = gain(plan.costs, depth, alpha, guess_s, staging_s=staging, most=most)
            yield Guessing(wish.who, alpha, found)


def _shape(
    model: Shape, files: ModelFiles | None, recipe: Recipe, dtype: torch.dtype, device: torch.device, kv: str
) -> ModelShape:
    config, packing = as_stored(files, model.name, model.config, recipe)
    return model_shape(config, recipe, dtype, model.name, device, kv, packing)


def _search(model: Shape, files: ModelFiles | None, recipe: Recipe, machine: _Machine) -> AnySearch:
    dtype, device, wishes, say = machine.dtype, machine.device, machine.wishes, machine.say
    if has_card(device):
        config, packing = as_stored(files, model.name, model.config, recipe)
        card = CardPlanning(device, dtype, wishes.kv, wishes.ctx, wishes.ram, wishes.vram, wishes.job, say)
        found = card.search(config, recipe, model.name, packing, placed_bytes=machine.placed_bytes)
        return _with_guesses(found, wishes, dtype, device)
    require_cap(wishes.ram)  # before seconds of measuring
    profile = measured(kept_profile(), recipe.name, recipe.blocks, dtype, say)
    rates = profile.rates(recipe.name)
    assert rates is not None
    shape = _shape(model, files, recipe, dtype, device, wishes.kv)
    packs = shape.packing is not None
    memory = process_memory(wishes.ram, recipe, model.config.vocab_size, machine.placed_bytes, packs=packs)
    search = Search(shape, memory, rates, wishes.ctx, wishes.job, profile.corrections(recipe.name))
    return _with_guesses(search, wishes, dtype, device)


def _with_guesses(search: AnySearch, wishes: Wishes, dtype: torch.dtype, device: torch.device) -> AnySearch:
    """With room for what guesses take, where there is any: a model is not refused for it."""
    wish = wishes.guessing
    if not wish.is_on:
        return search
    if wish.skips:
        search = replace(search, draft_tokens=wish.most_tokens)
    if wish.draft_model:
        search = _with_second(search, wishes, dtype, device)[0]
    return with_room_for_forks(search) if wishes.job is None else search


def _with_second(
    search: AnySearch, wishes: Wishes, dtype: torch.dtype, device: torch.device
) -> tuple[AnySearch, ModelShape, str]:
    """With room for the second model, its shape, and why it had better not guess; then there is no room for it."""
    draft, ctx = find_shape(wishes.guessing.draft_model), wishes.ctx or search.shape.default_ctx
    recipe = RECIPES[choose_recipe("auto", draft.config, (), dtype)]
    second = model_shape(draft.config, recipe, dtype, draft.name, device, wishes.kv)
    sequences = 1 if wishes.job is None else wishes.job.sequences
    num_bytes = draft_bytes(second, min(ctx, draft.config.longest_context), sequences)
    with_it = replace(search, shape=replace(search.shape, draft_bytes=num_bytes))
    without = replace(search, shape=replace(search.shape, draft_bytes=0))
    alone = _foreseen(without)
    if alone is None:  # nothing fits: its refusal is to be told
        return without, second, ""
    why_not = why_left_out(num_bytes, second.num_bytes, _foreseen(with_it), alone)
    return (without if why_not else with_it), second, why_not


def _foreseen(search: AnySearch) -> Plan | None:
    try:
        return search.best()
    except DoesNotFitError:
        return None


def _guesses(profile: Profile) -> list[str]:
    """What is behind a plan and could not be measured."""
    doubtful = ", ".join(profile.doubtful)
    again = "a later start on a quiet machine measures again, or localllm doctor --measure"
    found = [f"measured on a busy machine: {doubtful}; {again}"] if doubtful else []
    if profile.disk_read_gbs == UNKNOWN_DISK_GBS:
        found.append(f"the disk is taken to read {UNKNOWN_DISK_GBS} GB/s: no file could be written to measure it")
    if profile.device is not None and profile.device.context_bytes == UNKNOWN_CONTEXT_BYTES:
        found.append(f"CUDA is taken to hold {format_bytes(UNKNOWN_CONTEXT_BYTES)}: the driver does not tell")
    return found


def _predictions(plan: Plan, profile: Profile) -> tuple[Prediction, Prediction]:
    weights, costs = plan.shape.weights, plan.costs
    return (
        _banded(plan.decode_tok_s, profile.band(weights, costs.step_term(plan.sequences))),
        _banded(plan.ttft_s, profile.band(weights, costs.prompt_term(plan.prompt_tokens))),
    )


def _banded(amount: float, band: float) -> Prediction:
    return Prediction(amount / (1 + band), amount, amount * (1 + band))


def _others(dtype: torch.dtype, device: torch.device, kv: str) -> Iterator[ModelShape]:
    """Every model of the registry in INT4, as if none were packed."""
    for name, raw in shipped_shapes().items():
        shape = Shape(name, parse_config(raw, f"the shape of {name}"), raw)
        yield _shape(shape, None, RECIPES[DEFAULT], dtype, device, kv)
