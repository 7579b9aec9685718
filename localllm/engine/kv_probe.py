"""Whether keys and values in few bits change what a model says: asked once, at its first long prompt, and kept.

Knows the model as it is placed, and tokens. Knows no requests: the engine says when nothing else runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from localllm.cache.kv_format import (
    KV_FORMATS,
    WIDER,
    KVFormat,
    choose_format,
    kv_bytes_per_sequence,
    kv_bytes_per_token,
)
from localllm.config import format_bytes
from localllm.engine.kv_verdicts import Asked, Verdict, formats_from
from localllm.engine.loader import LoadedModel, Loading
from localllm.engine.prefix_config import Computed
from localllm.engine.residency import Residency
from localllm.engine.runner import Chunk
from localllm.errors import DoesNotFitError
from localllm.kernels.kv_page import GROUP, PAGE_TOKENS
from localllm.models.config import ModelConfig
from localllm.offload.planner.plan import Plan
from localllm.quant.dense import Dense

# Whose distributions are compared: of the four pages that the last of them sees, two are coded, the first one and its
# own are not.
FIRST, LAST = 3 * PAGE_TOKENS, 4 * PAGE_TOKENS
# Between what harms and what does not, in each of 28 texts (docs/quality.md): INT4 of a model without outliers comes to
# 0.0034 at most; where it costs 1 % of perplexity, to 0.017 at most; where it costs 13 %, to 0.041 at least.
LIMIT_NATS = 0.03


@dataclass(frozen=True)
class Switch:
    """The format to go on in, and the plan with what it takes; None where nobody planned."""

    kv_format: KVFormat
    plan: Plan | None


@dataclass(frozen=True)
class KVProbe:
    """Of an engine of whose format nothing is known yet. note: hears what was found, where that was too much."""

    asked: Asked
    note: Callable[[str], None]

    def run(
        self, residency: Residency, token_ids: Sequence[int], plan: Plan | None, cancelled: Callable[[], bool]
    ) -> Switch | None:
        """None where the format stays: it changes little, or there is no room for another one.

        token_ids: `LAST` or more. plan: None where nobody knows how much memory there is. Raises as a forward does,
        StepCancelledError where `cancelled` says so.
        """
        verdict = probe(residency, token_ids, cancelled)
        if verdict is None:
            return None
        self.asked.keep(verdict)
        if verdict.kv == self.asked.kv:
            return None
        found = f"{self.asked.finding(verdict)} on {LAST - FIRST} positions of this prompt, more than {LIMIT_NATS:g}"
        kv_format, shown = KV_FORMATS[verdict.kv], self.asked.shown(verdict.kv)
        wider = None if plan is None else with_kv(plan, residency, kv_format)
        missing = 0 if wider is None else max(wider.total_bytes(tier) - wider.limits[tier] for tier in wider.limits)
        if missing > 0:
            fix = f"--kv {verdict.kv} with a smaller --ctx"
            self.note(f"{found}; {shown} would take {format_bytes(missing)} more than there is: {fix}")
            return None
        self.note(f"{found}; they are kept in {shown}")
        return Switch(kv_format, wider)

    @property
    def formats(self) -> list[KVFormat]:
        """Those that may be tried."""
        return [KV_FORMATS[kv] for kv in formats_from(self.asked.kv)[1:]]


def with_kv(plan: Plan, residency: Residency, kv_format: KVFormat) -> Plan:
    """The plan with keys and values in another format; it may be more than its limits."""
    config, shape = residency.config, plan.shape
    layouts = kv_format.layouts(config.num_kv_heads, config.head_dim, residency.model.dtype)
    other = replace(
        shape,
        kv=kv_format.name,
        kv_bytes_per_token=kv_bytes_per_token(layouts, config.num_layers),
        kv_bytes_per_sequence=kv_bytes_per_sequence(layouts, config.num_layers),
    )
    before, after = (each.kv_bytes(plan.kv_tokens, plan.sequences) for each in (shape, other))
    ledger = {
        tier: {owner: count * after // before if owner == "kv" else count for owner, count in owners.items()}
        for tier, owners in plan.ledger.items()
    }
    return replace(plan, shape=other, ledger=ledger)


def probe(residency: Residency, token_ids: Sequence[int], cancelled: Callable[[], bool]) -> Verdict | None:
    """What the format that the model's keys and values are in changes, and which one changes little; None where the
    model computes no numbers here even without it. Raises as `ModelRunner.forward`."""
    asked = residency.kv_pages.format.name
    exact = _log_probabilities(residency, KV_FORMATS["bf16"], token_ids, cancelled)
    if not bool(exact.isfinite().all()):
        return None
    nats = None
    for kv in formats_from(asked)[:-1]:
        own = _log_probabilities(residency, KV_FORMATS[kv], token_ids, cancelled)
        found = _divergence(exact, own)
        nats = found if nats is None else nats
        if found <= LIMIT_NATS:
            return Verdict(kv, nats)
    assert nats is not None, "dense pages are not probed"
    return Verdict("bf16", nats)


@torch.inference_mode()
def _log_probabilities(
    residency: Residency, kv_format: KVFormat, token_ids: Sequence[int], cancelled: Callable[[], bool]
) -> Tensor:
    """fp32 [LAST - FIRST, V] after each of these tokens, with keys and values in pages of their own: of the room that a
    plan keeps for the context, nobody has much at the first long prompt."""
    ids, pages = list(token_ids[:LAST]), residency.new_pages(kv_format)
    with ExitStack() as stack:
        stack.callback(pages.release)
        kv = stack.enter_context(closing(pages.new(LAST)))
        residency.runner.forward([Chunk(ids, kv, FIRST)], cancelled=cancelled)
        logits = residency.runner.forward([Chunk(ids, kv, LAST - FIRST)], cancelled=cancelled, all_logits=True)
    logits -= logits.logsumexp(-1, keepdim=True)  # in place: 38 MB at a vocabulary of 150,000
    return logits


def _divergence(exact: Tensor, own: Tensor) -> float:
    """Mean KL(exact || own) in nats; infinite where there is no number."""
    rows = [functional.kl_div(q, p, reduction="sum", log_target=True).item() for p, q in zip(exact, own, strict=True)]
    mean = sum(rows) / len(rows)
    return mean if math.isfinite(mean) else math.inf


class Loaded(NamedTuple):
    """kv: the format in which keys and values are kept at first. probe: None where none is wanted."""

    model: LoadedModel
    kv: str
    probe: KVProbe | None


def load_as_found(loading: Loading, config: ModelConfig, computed: Computed, *, probes_kv: bool) -> Loaded:
    """The model, with keys and values in the format that was found to be needed, as far as that fits; where nothing was
    found yet, with what finds it. A job's format is part of its name: it stays what it is at first.

    Raises as `Loading.load` does.
    """
    note = loading.watcher.noting
    if told := dense_heads(loading.kv, config, loading.dtype):
        note(told)
    asked = Asked(computed, loading.dtype, choose_format(loading.kv, config.head_dim, loading.dtype).name)
    if not probes_kv or asked.kv not in WIDER:
        return Loaded(loading.load(config), asked.kv, None)
    verdict = asked.verdict()
    if verdict is None or verdict.kv == asked.kv:
        is_open = verdict is None and loading.job is None
        return Loaded(loading.load(config), asked.kv, KVProbe(asked, note) if is_open else None)
    found, shown = f"{asked.finding(verdict)}, as an earlier prompt showed", asked.shown(verdict.kv)
    try:
        model = replace(loading, kv=verdict.kv).load(config)
    except DoesNotFitError:
        model = loading.load(config)
        note(f"{found}; {shown} does not fit: --kv {verdict.kv} with a smaller --ctx")
        return Loaded(model, asked.kv, None)
    note(f"{found}; they are kept in {shown}")
    return Loaded(model, verdict.kv, None)


def dense_heads(kv: str, config: ModelConfig, dtype: torch.dtype) -> str:
    """What is to be said where a format was asked for by its name that these heads cannot have, "" where they can."""
    if kv in ("auto", "bf16") or config.head_dim % GROUP == 0:
        return ""
    kept = Dense(dtype).name
    return f"keys and values stay in {kept}: {kv} codes groups of {GROUP} features, a head here has {config.head_dim}"
