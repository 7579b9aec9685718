"""The facts behind `localllm plan`: a model's plan on this machine, how sure it is, and what would be better."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from localllm import hub
from localllm.config import format_bytes
from localllm.engine.device import DTYPES
from localllm.engine.placement import model_shape
from localllm.engine.planner import DraftShape, ModelPlanner
from localllm.engine.speculative.choice import Speculate
from localllm.engine.speculative.head_shape import head_config, head_shape
from localllm.engine.weights import as_stored, choose_weights
from localllm.errors import DoesNotFitError, ModelNotFoundError
from localllm.hub import ModelFiles
from localllm.models.families import parse_config
from localllm.models.shapes import Shape, find_shape, shipped_shapes
from localllm.offload.planner.advice import advise, other_model
from localllm.offload.planner.machine import Held
from localllm.offload.planner.model_shape import ModelShape
from localllm.offload.planner.plan import JobShape, Plan, with_kept_pages
from localllm.offload.planner.profile import UNKNOWN_CONTEXT_BYTES, UNKNOWN_DISK_GBS, Profile, kept_profile
from localllm.offload.planner.search import Search
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
from localllm.quant.layouts import DEFAULT, SIZES
from localllm.settings import EngineConfig

if TYPE_CHECKING:
    from localllm.offload.planner.card_sheets import OtherMachine

_ALL_BYTES = 1 << 62  # more than any process holds
_SLOW = 0.5  # of the memory's rate: below, it is not the memory that a step waits for


@dataclass(frozen=True)
class Prediction:
    """A rate or a time, and the band in which it is expected."""

    low: float
    mid: float
    high: float


@dataclass(frozen=True)
class DraftGain:
    """The gain of one drafter.

    alpha: the expected share of drafts that are accepted.
    gain: with the best number of drafts.
    skipped: the number of blocks that it leaves out.
    why_not: why it does not draft, or nobody knows its gain; nothing else is known then.
    """

    drafter: str
    alpha: float | None = None
    gain: Gain | None = None
    skipped: int = 0
    why_not: str = ""


@dataclass(frozen=True)
class Planned:
    """advice: flags and commands that help, with what comes of them.
    refusal: why there is no plan, where the model does not fit.
    estimates: which rates behind it are no measurements.
    speculation: what each drafter would give.
    measured_at_s: when the rates were measured, as `time.time` has it.
    measured_busy: which of them beside other work.
    """

    shape: ModelShape
    plan: Plan | None
    advice: list[str]
    refusal: DoesNotFitError | None = None
    decode_tok_s: Prediction | None = None
    ttft_s: Prediction | None = None
    estimates: Sequence[str] = ()
    speculation: Sequence[DraftGain] = ()
    measured_at_s: float | None = None
    measured_busy: Sequence[str] = ()


@dataclass(frozen=True)
class Considered:
    """planned: the plan, or why there is none, without advice. advise: what would be better; it tries every model of
    the registry, which takes many times as long."""

    planned: Planned
    advise: Callable[[], list[str]]

    def advised(self) -> Planned:
        return replace(self.planned, advice=self.advise())


def consider(
    model: Shape,
    files: ModelFiles | None,
    wanted: EngineConfig,
    say: Callable[[str], None],
    *,
    job: JobShape | None = None,
    placed_bytes: int = 0,
    other: OtherMachine | None = None,
) -> Considered:
    """Plan a model; what this machine does is measured first, where that is not known.

    files: where the model is on this disk.
    wanted, job: as `Engine.load` has them.
    placed_bytes: of the host's memory that this process holds, those of a model that would make room for this one.
    other: the machine that is planned for, where that is not this one.

    Raises UsageError for what cannot be honoured.
    """
    planner, speculate = _planner(model, files, wanted, say, job, other), Speculate.of(wanted)
    unsure = _compare_tokenizers(model.name, files, speculate.draft_model)
    search, why_no_draft = _best_search(planner, model, Held(placed_bytes))
    profile = kept_profile().of(search.shape.weights)
    if other is not None and other.card is not None:
        profile = profile.without_card()
    estimates = [*_estimates(profile), *unsure]
    taken: dict[str, Any] = {"measured_at_s": profile.measured_at_s, "measured_busy": profile.busy}
    others = partial(_others, planner)
    try:
        plan = search.best() if job is not None else with_kept_pages(search.best())
    except DoesNotFitError as error:
        refused = Planned(search.shape, None, [], error, estimates=estimates, **taken)
        return Considered(refused, lambda: [*map(str, search.fixes()), *map(str, other_model(search, others()))])
    drafting = () if job is not None else tuple(_drafting(plan, planner.draft, why_no_draft, speculate))
    planned = Planned(search.shape, plan, [], None, *_predictions(plan, profile), estimates, drafting, **taken)
    held = Held(placed_bytes)
    int4 = None if search.shape.weights == DEFAULT else partial(_search_in, DEFAULT, planner, model, held)
    int8 = partial(_search_in, "int8", planner, model, held) if _is_slow(search, profile) else None
    return Considered(planned, lambda: advise(search, plan, int4, others(), int8))


def foresee(
    model: Shape,
    files: ModelFiles | None,
    wanted: EngineConfig,
    say: Callable[[str], None],
    job: JobShape | None = None,
) -> Plan:
    """Return the plan alone, as a process finds it that has no model yet: what this one holds counts as free.

    say: is told of each measurement before it begins, and may raise.

    Raises DoesNotFitError, and as `consider`.
    """
    return _best_search(_planner(model, files, wanted, say, job), model, Held(_ALL_BYTES))[0].best()


def _planner(
    model: Shape,
    files: ModelFiles | None,
    wanted: EngineConfig,
    say: Callable[[str], None],
    job: JobShape | None,
    other: OtherMachine | None = None,
) -> ModelPlanner:
    planner = replace(ModelPlanner.of(model.name, files, model.config, wanted, job, say, other), measures=True)
    speculate = Speculate.of(wanted)
    head = head_config(model.config, files, speculate, planner.device)
    if head is not None:
        sizes = planner.sizes, planner.dtype, planner.name, planner.device, planner.wanted.kv
        return replace(planner, draft=head_shape(head, *sizes))
    if not speculate.is_on or not speculate.draft_model:
        return planner
    draft = find_shape(speculate.draft_model)
    recipe = choose_weights("auto", None, draft.config, planner.dtype)
    shape = model_shape(draft.config, recipe, planner.dtype, draft.name, planner.device, planner.wanted.kv)
    return replace(planner, draft=DraftShape(shape, draft.config.longest_context))


def _best_search(planner: ModelPlanner, model: Shape, held: Held) -> tuple[Search, str]:
    """Return the search in the best form of the weights, and why the second model is left out; "" where it is not."""
    planner, reason = planner.with_room_for_draft(model.config, held)
    best = planner.in_best_form(model.config, held)
    return best.search(model.config, held=held), reason


def _compare_tokenizers(name: str, files: ModelFiles | None, word: str) -> list[str]:
    """Return what is not known of the tokenizer of a second model. Raises as `require_same_tokenizer`."""
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
    from localllm.engine.loader import require_same_tokenizer
    from localllm.text.tokenizer import Tokenizer

    require_same_tokenizer(Tokenizer.load(files.directory), name, draft)
    return []


def _drafting(plan: Plan, draft: DraftShape | None, why_no_draft: str, wish: Speculate) -> Iterator[DraftGain]:
    """Yield what each drafter would give. draft: the second model."""
    most, depth, staging = wish.most_tokens, plan.prompt_tokens, staging_s(plan)
    if most < 1:
        return
    if wish.who in ("auto", "ngram"):
        for alpha in USUAL_ALPHAS:
            yield DraftGain("ngram", alpha, gain(plan.costs, depth, alpha, 0.0, most=most))
    if wish.skips and not slow(plan):
        yield DraftGain("skip", why_not="every block is in fast memory, so none is left out")
    elif wish.skips and not plan.shape.can_skip:
        yield DraftGain("skip", why_not="each layer reads what the one before it made of all states of a token")
    elif wish.skips and not (left_out := skipped(plan)):
        yield DraftGain("skip", why_not="what stays near is too little to draft with")
    elif wish.skips:
        alpha, found = skipping(plan, usual_harm([block.name for block in plan.shape.blocks]), most)
        yield DraftGain("skip", alpha, found, len(left_out))
    if draft is None:
        return
    drafter = "mtp" if draft.shares_head else wish.who
    if not plan.shape.draft_bytes:
        yield DraftGain(drafter, why_not=f"left out, as {why_no_draft}")
        return
    draft_s = plan.costs.fast_s(draft.read_bytes(plan.shape))
    for alpha in USUAL_ALPHAS:
        found = gain(plan.costs, depth, alpha, draft_s, staging_s=staging, most=most)
        yield DraftGain(drafter, alpha, found)


def _search_in(weights: str, planner: ModelPlanner, model: Shape, held: Held) -> Search:
    """Return the search in another format, by its own rates."""
    return replace(planner, sizes=SIZES[weights], draft=None).search(model.config, held=held)


def _is_slow(search: Search, profile: Profile) -> bool:
    """Return whether a CPU computes with weights as they are far slower than memory brings them: it has no instructions
    for bf16."""
    dram_gbs, is_dense = profile.sure_dram_gbs, search.shape.weights in DTYPES
    is_cpu = search.machine.card is None
    return is_cpu and is_dense and dram_gbs is not None and search.machine.rates.matrix_gbs < _SLOW * dram_gbs


def _shape(planner: ModelPlanner, model: Shape) -> ModelShape:
    """Return the model's sizes in the planner's format."""
    config, packing = as_stored(planner.files, model.name, model.config, planner.sizes)
    return model_shape(config, planner.sizes, planner.dtype, model.name, planner.device, planner.wanted.kv, packing)


def _estimates(profile: Profile) -> list[str]:
    """Return the figures behind a plan that could not be measured."""
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


def _others(planner: ModelPlanner) -> Iterator[ModelShape]:
    """Yield every model of the registry in INT4, as if none were packed."""
    planner = replace(planner, files=None, sizes=SIZES[DEFAULT])
    for name, raw in shipped_shapes().items():
        yield _shape(planner, Shape(name, parse_config(raw, f"the shape of {name}"), raw))
