"""What `localllm plan` says of a model: its plan on this machine, how sure that is, and what would be better."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import torch

from localllm.config import format_bytes
from localllm.engine.advice import advise, other_model
from localllm.engine.card import CardPlanning
from localllm.engine.draft_loading import draft_bytes
from localllm.engine.loading import has_card, require_card
from localllm.engine.memory import DTYPES, choose_device, choose_dtype, require_context
from localllm.engine.placement import model_shape, process_memory, require_cap
from localllm.engine.speculative.choice import Speculate
from localllm.engine.speculative.harm import Harm
from localllm.engine.speculative.skip_file import known_harm, known_trials
from localllm.engine.weights import as_stored, choose_recipe, compact_form
from localllm.errors import DoesNotFitError
from localllm.hub import ModelFiles
from localllm.hub.packed import packed_recipes
from localllm.models.families import parse_config
from localllm.models.layout import model_bytes
from localllm.models.shapes import Shape, find_shape, shipped_shapes
from localllm.offload.device_rates import UNKNOWN_CONTEXT_BYTES
from localllm.offload.device_search import AnySearch, with_room_for_forks
from localllm.offload.guessing import USUAL_ALPHAS, Gain, gain, skipped, skipping, staging_s
from localllm.offload.plan import JobShape, ModelShape, Plan, with_kept_pages
from localllm.offload.profile import UNKNOWN_DISK_GBS, Profile, kept_profile, measured
from localllm.offload.search import Search, fits_whole, is_better
from localllm.quant.recipe import DEFAULT, RECIPES, Recipe


@dataclass(frozen=True)
class Prediction:
    """A rate or a time, and the band in which it is expected."""

    low: float
    mid: float
    high: float


@dataclass(frozen=True)
class Guessing:
    """Of one drafter, where a share alpha of its guesses is right. gain: with the best number of them. skipped: blocks
    that it leaves out. is_known: alpha is what trials on this model's text said, and no example."""

    drafter: str
    alpha: float
    gain: Gain
    skipped: int = 0
    is_known: bool = False


@dataclass(frozen=True)
class Planned:
    """advice: flags and commands that help, with what comes of them. refusal: why there is no plan, where the model
    does not fit. guesses: which rates behind it are no measurements. speculation: what those who guess tokens ahead
    would give."""

    shape: ModelShape
    plan: Plan | None
    advice: list[str]
    refusal: DoesNotFitError | None = None
    decode_tok_s: Prediction | None = None
    ttft_s: Prediction | None = None
    guesses: Sequence[str] = ()
    speculation: Sequence[Guessing] = ()


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


def plan_model(model: Shape, files: ModelFiles | None, wishes: Wishes, say: Callable[[str], None]) -> Planned:
    """files: where the model is on this disk. What this machine does is measured first, where that is not known.

    Raises UsageError for what cannot be honoured.
    """
    if wishes.threads is not None:
        torch.set_num_threads(wishes.threads)
    device = choose_device(wishes.device)
    require_card(device, wishes.vram)
    require_context(model.config, wishes.ctx)
    dtype = choose_dtype(wishes.weights if wishes.dtype == "auto" and wishes.weights in DTYPES else wishes.dtype)
    packed = () if files is None else tuple(packed_recipes(files))
    recipe = RECIPES[choose_recipe(wishes.weights, model.config, packed, dtype)]
    search = _search(model, files, recipe, dtype, device, wishes, say)
    if isinstance(search, Search) and not fits_whole(search):
        compact = compact_form(recipe, model.config, packed)
        other = None if compact is None else _search(model, files, compact, dtype, device, wishes, say)
        search = other if isinstance(other, Search) and is_better(other, search) else search
    profile, others = kept_profile(), partial(_others, dtype, device, wishes.kv)
    guesses = _guesses(profile)
    try:
        plan = search.best() if wishes.job is not None else with_kept_pages(search.best())
    except DoesNotFitError as error:
        fixes = [*search.fixes(), *(str(advice) for advice in other_model(search, others()))]
        return Planned(search.shape, None, fixes, error, guesses=guesses)
    int4 = None if recipe.name == DEFAULT else _shape(model, files, RECIPES[DEFAULT], dtype, device, wishes.kv)
    advice = [str(advice) for advice in advise(search, plan, int4, others())]
    speculation = () if wishes.job is not None else tuple(_speculation(plan, wishes.guessing, files, dtype))
    return Planned(search.shape, plan, advice, None, *_predictions(plan, profile), guesses, speculation)


def _speculation(plan: Plan, wish: Speculate, files: ModelFiles | None, dtype: torch.dtype) -> Iterator[Guessing]:
    most = wish.most_tokens
    if most < 1:
        return
    depth, staging = plan.prompt_tokens, staging_s(plan)
    if wish.who in ("auto", "ngram"):
        for alpha in USUAL_ALPHAS:
            yield Guessing("ngram", alpha, gain(plan.costs, depth, alpha, 0.0, most=most))
    if wish.skips and (left_out := skipped(plan)):
        trials = known_trials(files, plan.shape)
        harm = Harm([block.name for block in plan.shape.blocks], trials).expected()
        alpha, found = skipping(plan, harm, most)
        yield Guessing("skip", alpha, found, len(left_out), is_known=bool(trials))
    if wish.draft_model:
        config = find_shape(wish.draft_model).config
        recipe = RECIPES[choose_recipe("auto", config, (), dtype)]
        guess_s = plan.costs.fast_s(model_bytes(config, recipe))
        for alpha in USUAL_ALPHAS:
            found = gain(plan.costs, depth, alpha, guess_s, staging_s=staging, most=most)
            yield Guessing(wish.who, alpha, found)


def _shape(
    model: Shape, files: ModelFiles | None, recipe: Recipe, dtype: torch.dtype, device: torch.device, kv: str
) -> ModelShape:
    config, packing = as_stored(files, model.name, model.config, recipe)
    return model_shape(config, recipe, dtype, model.name, device, kv, packing)


def _search(
    model: Shape,
    files: ModelFiles | None,
    recipe: Recipe,
    dtype: torch.dtype,
    device: torch.device,
    wishes: Wishes,
    say: Callable[[str], None],
) -> AnySearch:
    if has_card(device):
        config, packing = as_stored(files, model.name, model.config, recipe)
        card = CardPlanning(device, dtype, wishes.kv, wishes.ctx, wishes.ram, wishes.vram, wishes.job, say)
        found = card.search(config, recipe, model.name, packing)
        return _with_guesses(found, files, wishes, dtype, device)
    require_cap(wishes.ram)  # before seconds of measuring
    profile = measured(kept_profile(), recipe.name, recipe.blocks, dtype, say)
    rates = profile.rates(recipe.name)
    assert rates is not None
    shape = _shape(model, files, recipe, dtype, device, wishes.kv)
    memory = process_memory(wishes.ram, recipe, model.config.vocab_size, packs=shape.packing is not None)
    search = Search(shape, memory, rates, wishes.ctx, wishes.job, profile.corrections(recipe.name))
    return _with_guesses(search, files, wishes, dtype, device)


def _with_guesses(
    search: AnySearch, files: ModelFiles | None, wishes: Wishes, dtype: torch.dtype, device: torch.device
) -> AnySearch:
    """With room for what guesses take, where there is any: a model is not refused for it."""
    wish, shape = wishes.guessing, search.shape
    if not wish.is_on:
        return search
    if wish.skips:
        search = replace(search, harm=known_harm(files, shape), draft_tokens=wish.most_tokens)
    if wish.draft_model:
        draft = find_shape(wish.draft_model)
        recipe = RECIPES[choose_recipe("auto", draft.config, (), dtype)]
        second = model_shape(draft.config, recipe, dtype, draft.name, device, wishes.kv)
        num_bytes = draft_bytes(second, min(wishes.ctx or shape.default_ctx, draft.config.longest_context))
        with_draft = replace(search, shape=replace(shape, draft_bytes=num_bytes))
        with suppress(DoesNotFitError):
            with_draft.best()
            search = with_draft
    return with_room_for_forks(search)


def _guesses(profile: Profile) -> list[str]:
    """What is behind a plan and could not be measured."""
    doubtful = ", ".join(profile.doubtful)
    found = [f"measured on a busy machine: {doubtful}; localllm doctor --measure measures again"] if doubtful else []
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
