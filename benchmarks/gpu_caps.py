"""One cap of a card's memory and one format: every side's turns, and the rows that come of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.gpu_model import sized
from benchmarks.gpu_rows import Row
from benchmarks.measure import Spread, paired, spread
from benchmarks.peers_protocol import UnavailableError, Worker

ACCELERATE = "accelerate"  # the one side that is not ours
LEAST_TOKENS, MOST_TOKENS = 3, 48
_WANTED_LINK, _WANTED_ACCELERATE, _WANTED_PREDICTION, _WANTED_LEDGER = 0.92, 3.0, 0.2, 0.03
_SLOW_SHARE = {"found": 0.5, "streamed": 0.2}  # of what time is left, that its warm-up may take
_NOISE = 0.02  # between two sides that do the same


@dataclass(frozen=True)
class Cap:
    """share: of the model's bytes, of the cap. stretch_s: of decoding, in a turn."""

    num_bytes: int
    weights: str
    shape: str
    share: float
    stretch_s: float

    @property
    def name(self) -> str:
        size = f"{self.num_bytes / 1e9:g} GB" if self.num_bytes >= 1e9 else f"{self.num_bytes / 1e6:g} MB"
        return f"{size} {self.weights.split('-')[0]}"


class Parts:
    """The sides of one cap. They end at `until`, a time of the monotonic clock."""

    def __init__(self, ours: Worker, beside: Worker | None, device: str, until: float, rounds: int) -> None:
        self._ours, self._beside = ours, beside
        self._device, self._until, self._rounds = device, until, rounds
        self._tokens: dict[str, int] = {}
        self._turns: dict[str, Callable[[int], dict[str, float]]] = {}
        self.skipped: dict[str, str] = {}

    def measure(self, cap: Cap) -> dict[str, Any]:
        raw_config = sized(cap.shape, cap.weights, int(cap.share * cap.num_bytes))
        common = {"raw_config": raw_config, "cap_bytes": cap.num_bytes, "device": self._device}
        facts = self._ours.call("load", weights=cap.weights, **common)
        peak = self._ours.call("peak")
        for side, step_s in (*facts["decode_s"].items(), ("host", None)):
            self._add(side, partial(self._decode, side), step_s, cap)
        beside = self._load_beside(common, facts["context_bytes"], cap)
        rounds = self._rounds_of()
        if self._beside is not None and beside is not None:
            with suppress(UnavailableError):  # it was ended with its time
                beside["peak_bytes"] = self._beside.call("peak_bytes")
        return {
            "cap": cap.name, "cap_bytes": cap.num_bytes, "shape": cap.shape, "facts": facts, "peak": peak,
            "accelerate": beside, "tokens": self._tokens, "skipped": self.skipped, "rounds": rounds,
        }  # fmt: skip

    def _decode(self, side: str, tokens: int) -> dict[str, float]:
        told: dict[str, float] = self._ours.call("decode", placement=side, tokens=tokens)
        return told

    def _load_beside(self, common: Mapping[str, Any], context_bytes: int, cap: Cap) -> dict[str, Any] | None:
        beside = self._beside
        if beside is None:
            return None
        try:
            told: dict[str, Any] = beside.call("load", context_bytes=context_bytes, **common)
        except UnavailableError as error:
            self.skipped[ACCELERATE] = str(error)
            return None
        self._add(ACCELERATE, lambda n: beside.call("decode", tokens=n), None, cap)
        return {**told, "peak_bytes": None}

    def _add(self, side: str, turn: Callable[[int], dict[str, float]], step_s: float | None, cap: Cap) -> None:
        """A side, warm, and how many tokens its turns have. step_s: as predicted."""
        left = self._until - time.monotonic()
        if step_s is not None and step_s * (LEAST_TOKENS + 1) > _SLOW_SHARE[side] * left:
            self.skipped[side] = f"{step_s:.3g} s a token are predicted, {left:.0f} s are left"
            return
        try:
            rate = turn(LEAST_TOKENS)["tok_s"]
        except UnavailableError as error:
            self.skipped[side] = str(error)
            return
        self._tokens[side] = min(max(int(cap.stretch_s * rate), LEAST_TOKENS), MOST_TOKENS)
        self._turns[side] = turn

    def _rounds_of(self) -> list[dict[str, Any]]:
        """Each side in turn. A round that was not ended is none."""
        found: list[dict[str, Any]] = []
        took = 0.0
        while self._turns and len(found) < self._rounds and time.monotonic() + 1.2 * took < self._until:
            started = time.monotonic()
            try:
                found.append(self._round())
            except UnavailableError as error:
                self.skipped["more rounds"] = str(error)
                break
            took = time.monotonic() - started
        return found

    def _round(self) -> dict[str, Any]:
        """The link is measured before and behind the one that hangs on it, which comes first."""
        links = [self._ours.call("h2d_gbs")]
        values = {}
        for side, turn in sorted(self._turns.items(), key=lambda turn: turn[0] != "streamed"):
            try:
                values[side] = turn(self._tokens[side])
            except UnavailableError as error:
                if side != ACCELERATE or time.monotonic() > self._until:
                    raise
                self._drop(side, error)
            if side == "streamed":
                links.append(self._ours.call("h2d_gbs"))
        return {"link_gbs": statistics.harmonic_mean(links), **values}

    def _drop(self, side: str, error: Exception) -> None:
        """The others' rounds go on without it."""
        self.skipped[side] = str(error)
        del self._turns[side], self._tokens[side]


def measured_rows(cap: Cap, found: Mapping[str, Any]) -> list[Row]:
    """The figures of a cap, each beside what it is measured by."""
    rounds, facts, peak = found["rounds"], found["facts"], found["peak"]
    rates = {side: [turn[side]["tok_s"] for turn in rounds] for side in found["tokens"]} if rounds else {}
    rows = [
        _streaming(cap, rounds, rates, facts),
        _hybrid(cap, rates, facts),
        *([_beside(cap, rates, found)] if cap.weights == "bf16" else []),
        *([_peak(cap, peak, facts)] if "peak_bytes" in peak else []),
        _prediction(cap, rounds, rates, facts, peak),
    ]
    few = "" if len(rounds) >= 5 else f"{len(rounds)} rounds"
    skipped = [f"no {side}: {reason}" for side, reason in found["skipped"].items()]
    gave_way = ["memory ran out on the way: blocks gave way"] if peak["gave_way"] else []
    rows[0] = rows[0].noted("; ".join([few, *skipped, *gave_way]).strip("; "))
    return rows


def _streaming(cap: Cap, rounds: list[Any], rates: Mapping[str, list[float]], facts: Mapping[str, Any]) -> Row:
    what = "copied in every step, GB/s, beside the pinned copy"
    if "streamed" not in rates:
        return Row(cap.name, what, note="not measured")
    num_bytes = facts["copied_bytes"]["streamed"] / 1e9
    copied, links = [rate * num_bytes for rate in rates["streamed"]], [turn["link_gbs"] for turn in rounds]
    share = paired(copied, links)
    note = f"{num_bytes:.3g} GB a token, {facts['pinned_runs']} blocks pinned"
    wanted, is_met = f">= {_WANTED_LINK}", share.median >= _WANTED_LINK
    return Row(cap.name, what, spread(copied), spread(links), share, wanted, is_met, note)


def _hybrid(cap: Cap, rates: Mapping[str, list[float]], facts: Mapping[str, Any]) -> Row:
    names = {"streamed": "copying alone", "host": "the CPU alone"}
    others = {side: spread(rates[side]) for side in names if side in rates}
    what = "the plan, tok/s, beside the better of copying alone and the CPU alone"
    if "found" not in rates or not others:
        return Row(cap.name, what, note="not measured")
    better = max(others, key=lambda side: others[side].median)
    ratio, least = paired(rates["found"], rates[better]), 1 - _NOISE
    told = [f"{names[side]} {value}" for side, value in others.items()]
    note = ", ".join([*told, *(f"{count} {kind}" for kind, count in facts["blocks"]["found"].items())])
    is_met = ratio.median >= least
    return Row(cap.name, what, spread(rates["found"]), others[better], ratio, f">= {least:g}", is_met, note)


def _beside(cap: Cap, rates: Mapping[str, list[float]], found: Mapping[str, Any]) -> Row:
    what = "the plan, tok/s, beside accelerate"
    if ACCELERATE not in rates or "found" not in rates:
        return Row(cap.name, what, note="not measured")
    ratio, theirs = paired(rates["found"], rates[ACCELERATE]), found["accelerate"]
    note = f"{theirs['version']}, modules {theirs['modules']}"
    if theirs["peak_bytes"]:
        note += f", its peak {(theirs['peak_bytes'] + found['facts']['context_bytes']) / 1e9:.3g} GB"
    wanted, is_met = f">= {_WANTED_ACCELERATE:g}", ratio.median >= _WANTED_ACCELERATE
    return Row(cap.name, what, spread(rates["found"]), spread(rates[ACCELERATE]), ratio, wanted, is_met, note)


def _peak(cap: Cap, peak: Mapping[str, Any], facts: Mapping[str, Any]) -> Row:
    ledger, measured = sum(facts["ledger"].values()), peak["peak_bytes"]
    ratio = measured / ledger
    is_met = measured <= cap.num_bytes and abs(ratio - 1) <= _WANTED_LEDGER
    note = f"cap {cap.num_bytes / 1e9:.4g}, CUDA itself {facts['context_bytes'] / 1e9:.3g}"
    if peak["own_bytes"]:
        note += f", {peak['own_bytes'] / 1e9:.4g} by NVML"
    wanted = f"below the cap, ledger within {_WANTED_LEDGER:.0%}"
    what = "peak of the card's memory, GB, beside the ledger"
    return Row(cap.name, what, _one(measured / 1e9), _one(ledger / 1e9), _one(ratio), wanted, is_met, note)


def _prediction(
    cap: Cap, rounds: list[Any], rates: Mapping[str, list[float]], facts: Mapping[str, Any], peak: Mapping[str, Any]
) -> Row:
    what = "predicted tok/s beside the measured"
    if "found" not in rates:
        return Row(cap.name, what, note="not measured")
    predicted = [1 / turn["found"]["predicted_s"] for turn in rounds]
    ratio = paired(predicted, rates["found"])
    note = f"planned in {facts['plan_ms']:.3g} ms, bound by {facts['bound_by']}; a prompt of 512 tokens: "
    note += f"{peak['predicted_ttft_s']:.3g} s predicted, {peak['ttft_s']:.3g} s"
    is_met = abs(ratio.median - 1) <= _WANTED_PREDICTION
    wanted = f"within {_WANTED_PREDICTION:.0%}"
    return Row(cap.name, what, spread(predicted), spread(rates["found"]), ratio, wanted, is_met, note)


def _one(value: float) -> Spread:
    return Spread(value, value, value)
