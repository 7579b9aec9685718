"""What `localllm plan` says of a model: its plan on this machine, how sure that is, and what would be better."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from localllm.engine.advice import Advice, advise, largest_that_fits
from localllm.engine.card import CardPlanning
from localllm.engine.loading import has_card
from localllm.engine.memory import choose_device, choose_dtype, require_context
from localllm.engine.placement import model_shape, process_memory
from localllm.engine.weights import choose_recipe
from localllm.errors import DoesNotFitError, UsageError
from localllm.models.families import parse_config
from localllm.models.shapes import Shape, shipped_shapes
from localllm.offload.device_search import AnySearch
from localllm.offload.plan import JobShape, ModelShape, Plan
from localllm.offload.profile import Profile, kept_profile, measured
from localllm.offload.search import Search
from localllm.quant.recipe import DEFAULT, RECIPES, Recipe

# A tokenizer's tables, for each entry of its vocabulary: 60 MB at 128,000.
_TOKENIZER_BYTES = 500


@dataclass(frozen=True)
class Prediction:
    """A rate or a time, and the band in which it is expected."""

    low: float
    mid: float
    high: float


@dataclass(frozen=True)
class Planned:
    """refusal: why there is no plan, where the model does not fit."""

    shape: ModelShape
    plan: Plan | None
    advice: list[Advice]
    refusal: DoesNotFitError | None = None
    decode_tok_s: Prediction | None = None
    ttft_s: Prediction | None = None


@dataclass(frozen=True)
class Wishes:
    """As the settings of these names."""

    weights: str = "auto"
    dtype: str = "auto"
    device: str = "auto"
    ctx: int | None = None
    ram: int | None = None
    vram: int | None = None
    threads: int | None = None
    job: JobShape | None = None


def plan_model(model: Shape, packed: tuple[str, ...], wishes: Wishes, say: Callable[[str], None]) -> Planned:
    """packed: recipes in which it is packed already. What this machine does is measured first, where that is not known.

    Raises UsageError for what cannot be honoured.
    """
    if wishes.threads is not None:
        torch.set_num_threads(wishes.threads)
    device = choose_device(wishes.device)
    if not has_card(device) and wishes.vram is not None:
        why = "the model runs on the CPU; --ram limits the memory that it takes there"
        raise UsageError("--vram is a limit for a GPU, and none is used", why=why, fix="leave --vram out")
    require_context(model.config, wishes.ctx)
    dtype = choose_dtype(wishes.dtype)
    recipe = RECIPES[choose_recipe(wishes.weights, model.config, packed, dtype)]
    search = _search(model, recipe, dtype, device, wishes, say)
    profile, others = kept_profile(), partial(_others, dtype, device)
    try:
        plan = search.best()
    except DoesNotFitError as error:
        fitting = largest_that_fits(search, others())
        return Planned(
            search.shape, None, [] if fitting is None else [Advice(fitting.shape.name, "fits into this memory")], error
        )
    int4 = None if recipe.name == DEFAULT else model_shape(model.config, RECIPES[DEFAULT], dtype, model.name, device)
    advice = advise(search, plan, int4, others())
    return Planned(search.shape, plan, advice, None, *_predictions(plan, profile))


def _search(
    model: Shape, recipe: Recipe, dtype: torch.dtype, device: torch.device, wishes: Wishes, say: Callable[[str], None]
) -> AnySearch:
    tokenizer_bytes = _TOKENIZER_BYTES * model.config.vocab_size
    if has_card(device):
        card = CardPlanning(device, dtype, wishes.ctx, wishes.ram, wishes.vram, wishes.job, say)
        return card.search(model.config, recipe, model.name, beside_bytes=tokenizer_bytes)
    profile = measured(kept_profile(), recipe.name, recipe.blocks, dtype, say)
    rates = profile.rates(recipe.name)
    assert rates is not None
    memory = process_memory(wishes.ram)
    memory = replace(memory, program_bytes=memory.program_bytes + tokenizer_bytes)
    shape = model_shape(model.config, recipe, dtype, model.name)
    return Search(shape, memory, rates, wishes.ctx, wishes.job, profile.corrections(recipe.name))


def _predictions(plan: Plan, profile: Profile) -> tuple[Prediction, Prediction]:
    weights, costs = plan.shape.weights, plan.costs
    return (
        _banded(plan.decode_tok_s, profile.band(weights, costs.step_term(plan.sequences))),
        _banded(plan.ttft_s, profile.band(weights, costs.prompt_term(plan.prompt_tokens))),
    )


def _banded(amount: float, band: float) -> Prediction:
    return Prediction(amount / (1 + band), amount, amount * (1 + band))


def _others(dtype: torch.dtype, device: torch.device) -> Iterator[ModelShape]:
    """Every model of the registry in INT4."""
    for name, raw in shipped_shapes().items():
        yield model_shape(parse_config(raw, f"the shape of {name}"), RECIPES[DEFAULT], dtype, name, device)
