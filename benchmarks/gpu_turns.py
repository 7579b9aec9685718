"""The turns that the sides of `python -m benchmarks.gpu` take, part by part."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks import gpu_table
from benchmarks.gpu_engines import model_config, sized
from benchmarks.gpu_table import ACCELERATE, DEEPEST, FEW, LOOPS, MANY, MODEL, Row
from benchmarks.peers_protocol import UnavailableError, Worker
from localllm.models.block_layouts import block_layouts
from localllm.models.families import parse_config
from localllm.models.layout import HEAD
from localllm.models.shapes import shipped_shapes

Add = Callable[[Sequence[Row]], None]
Found = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """Common settings of the parts.

    until: of the monotonic clock.
    add: reports rows as they come.
    """

    device: str
    until: float
    rounds: int
    add: Add

    @property
    def is_small(self) -> bool:
        """A CPU stands in for the card."""
        return self.device == "cpu"

    @property
    def left_s(self) -> float:
        return self.until - time.monotonic()


# Products

_MODELS = (MODEL, "mistral-7b", "qwen3-14b", "llama-3.3-70b")
_FEW_OF_OTHERS = (1, 4, 16, 64)  # of the models without targets
_SMALL_FEW, _SMALL_MANY, _SMALL_SHAPE = (1, 16), (128,), (16, 64)

_Key = tuple[int, int, str]


def product_turns(worker: Worker, run: Run, found: Found) -> None:
    """Each matrix once, whichever models have it, the first model's first. found: what there is so far."""
    models = {MODEL: _small_matrices()} if run.is_small else {name: _matrices(name) for name in _MODELS}
    many = _SMALL_MANY if run.is_small else MANY
    measured: dict[_Key, Found] = {}
    took = 0.0  # by the last one: the first compiles for all
    found |= {"matrices": [], "models": {name: list(own) for name, own in models.items()}}
    for name, own in models.items():
        few = _SMALL_FEW if run.is_small else FEW if name == MODEL else _FEW_OF_OTHERS
        for key in own.values():
            if key in measured:
                continue
            if took > run.left_s:
                run.add([Row("products", f"{name} and what is behind it", note="not measured: no time was left")])
                return
            started, (N, K, weights) = time.monotonic(), key
            options = {"few": few, "many": many if weights == "int4" else (), "rounds": run.rounds}
            measured[key] = worker.call("matrix", device=run.device, shape=[N, K], weights=weights, **options)
            found["matrices"].append(measured[key])
            took = time.monotonic() - started if len(measured) > 1 else 0.0
        run.add(gpu_table.product_rows(name, {matrix: measured[key] for matrix, key in own.items()}))


def _matrices(name: str) -> dict[str, _Key]:
    """The matrices of one layer and of the head, by their names."""
    layouts = {layout.name: layout for layout in block_layouts(parse_config(shipped_shapes()[name], name))}
    return {
        matrix.name: (matrix.out_features, matrix.in_features, "int8" if block == HEAD else "int4")
        for block in ("layers.0.attention", "layers.0.mlp", HEAD)
        for matrix in layouts[block].matrices
    }


def _small_matrices() -> dict[str, _Key]:
    return {"gate_up_proj": (*_SMALL_SHAPE, "int4"), "lm_head": (*_SMALL_SHAPE, "int8")}


# A whole model on the card, beside a plain loop in torch

_DEPTHS, _KV = (512, 8192, DEEPEST), ("bf16", "int8", "int4")
_SMALL_DEPTHS = (70,)  # beyond one page
_TOKENS = {False: 64, True: 4}
_PROMPT = {False: 2048, True: 20}
_TURN = {False: (4096, 48), True: (64, 6)}  # tokens of a chat so far, and of its next message

Side = Callable[[], float]


class ModelTurns:
    """found: what there is so far."""

    def __init__(self, ours: Worker, theirs: Worker, run: Run, found: Found) -> None:
        self._ours, self._theirs, self._run, self._found = ours, theirs, run, found
        self._tokens, self._prompt = _TOKENS[run.is_small], _PROMPT[run.is_small]

    def measure(self) -> None:
        run = self._run
        depths = _SMALL_DEPTHS if run.is_small else _DEPTHS
        facts = self._found["facts"] = self._ours.call("load", device=run.device, depths=depths, small=run.is_small)
        run.add(gpu_table.load_rows(facts))
        first, *deeper = facts["depths"]
        loops = self._load_loops(first)
        self._beside(first, loops)
        self._at_depth(first)
        self._next_turn(facts["depths"][-1])
        for depth in deeper:
            self._at_depth(depth)
        # At last, as its compiling may take all of the time and is ended with it.
        if loops and run.left_s > 0 and self._is_prepared("whole"):
            sides = {"engine": self._engine(first), "whole": self._loop("whole")}
            found = self._found["beside_compiled"] = self._turns(sides)
            run.add(gpu_table.loop_rows(found))

    def _load_loops(self, depth: int) -> list[str]:
        """The ways in which torch's loop runs."""
        options = {"raw_config": model_config(small=self._run.is_small), "depth": depth, "tokens": self._tokens}
        try:
            self._theirs.call("load", device=self._run.device, prompt=self._prompt, **options)
        except UnavailableError as error:
            self._run.add([Row("model", "the plain torch loop", note=f"not measured: {error}")])
            return []
        return [loop for loop in ("graph", "layers") if self._is_prepared(loop)]

    def _is_prepared(self, loop: str) -> bool:
        try:
            self._theirs.call("prepare", variant=loop)
        except UnavailableError as error:
            self._run.add([Row("model", f"torch's loop, {LOOPS[loop]}", note=f"not measured: {error}")])
            return False
        return True

    def _engine(self, depth: int) -> Side:
        return lambda: self._ours.call("engine_decode", depth=depth, tokens=self._tokens)

    def _loop(self, loop: str) -> Side:
        return lambda: self._theirs.call("decode", variant=loop)

    def _beside(self, depth: int, loops: Sequence[str]) -> None:
        sides: dict[str, Side] = {
            "engine": self._engine(depth),
            "copied": lambda: self._ours.call("copied", depth=depth),
            "prefill": lambda: self._ours.call("prefill", tokens=self._prompt),
        }
        if loops:
            sides["bf16"] = lambda: self._theirs.call("prefill")
        found = self._found["beside"] = self._turns(sides | {loop: self._loop(loop) for loop in loops})
        self._run.add(gpu_table.beside_rows(depth, self._prompt, found))

    def _next_turn(self, deepest: int) -> None:
        """A message behind a chat whose keys and values are known, or not. deepest: the longest sequence that fits."""
        shared, own = _TURN[self._run.is_small]
        shared = min(shared, deepest)
        call = partial(self._ours.call, "first_token", shared=shared, own=own)
        sides = {
            "first token, all anew": partial(call, is_known=False),
            "first token, known": partial(call, is_known=True),
        }
        found = self._found["next_turn"] = self._turns(sides)
        self._run.add([gpu_table.turn_row(shared, own, found)])

    def _at_depth(self, depth: int) -> None:
        """The steps alone, in every format side by side; then the engine."""
        texts: dict[tuple[str, bool], list[int]] = {}

        def steps(kv: str, graphs: bool) -> float:
            found = self._ours.call("decode", kv=kv, depth=depth, tokens=self._tokens, graphs=graphs)
            texts[kv, graphs] = found["tokens"]
            return float(found["tok_s"])

        sides: dict[str, Side] = {}
        for kv in _KV:
            sides |= {f"{kv} graphs": partial(steps, kv, True), f"{kv} launches": partial(steps, kv, False)}
        found = self._turns({**sides, "engine": self._engine(depth)})
        self._found.setdefault("depths", {})[str(depth)] = found
        same = {kv: texts.get((kv, True)) == texts.get((kv, False)) for kv in _KV}
        self._run.add(gpu_table.depth_rows(depth, _KV, found, same))

    def _turns(self, sides: Mapping[str, Side]) -> dict[str, list[float]]:
        """Each side once to warm up, then in turn, as many rounds as there is time for. One that fails is left out."""
        found: dict[str, list[float]] = {side: [] for side in sides}
        going, took = dict(sides), 0.0
        for number in range(self._run.rounds + 1):
            if number > 1 and 1.2 * took > self._run.left_s:
                break
            started = time.monotonic()
            for side, turn in list(going.items()):
                try:
                    value = turn()
                except UnavailableError as error:
                    if self._run.left_s < 0:
                        return found
                    self._run.add([Row("model", side, note=f"ended: {error}")])
                    del going[side], found[side]
                    continue
                if number:
                    found[side].append(value)
            took = time.monotonic() - started
        return found


# Caps of the card's memory

LEAST_TOKENS, MOST_TOKENS = 3, 48
_SLOW_SHARE = {"found": 0.5, "streamed": 0.2}  # of what time is left, that a side's warm-up may take


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


class CapTurns:
    """The sides of one cap."""

    def __init__(self, ours: Worker, beside: Worker | None, run: Run) -> None:
        self._ours, self._beside, self._run = ours, beside, run
        self._tokens: dict[str, int] = {}
        self._turns: dict[str, Callable[[int], dict[str, float]]] = {}
        self._skipped: dict[str, str] = {}

    def measure(self, cap: Cap) -> Found:
        raw_config = sized(cap.shape, cap.weights, int(cap.share * cap.num_bytes))
        common = {"raw_config": raw_config, "cap_bytes": cap.num_bytes, "device": self._run.device}
        facts = self._ours.call("load", weights=cap.weights, **common)
        peak = self._ours.call("peak")
        for side, step_s in (*facts["decode_s"].items(), ("host", None)):
            self._add(side, partial(self._decode, side), step_s, cap)
        beside = self._load_beside(common, facts["context_bytes"], cap)
        rounds = self._rounds()
        if self._beside is not None and beside is not None:
            with suppress(UnavailableError):  # it was ended with its time
                beside["peak_bytes"] = self._beside.call("peak_bytes")
        return {
            "cap": cap.name, "cap_bytes": cap.num_bytes, "shape": cap.shape, "facts": facts, "peak": peak,
            "accelerate": beside, "tokens": self._tokens, "skipped": self._skipped, "rounds": rounds,
        }  # fmt: skip

    def _decode(self, side: str, tokens: int) -> dict[str, float]:
        found: dict[str, float] = self._ours.call("decode", placement=side, tokens=tokens)
        return found

    def _load_beside(self, common: Mapping[str, Any], context_bytes: int, cap: Cap) -> Found | None:
        beside = self._beside
        if beside is None:
            return None
        try:
            facts: Found = beside.call("load", context_bytes=context_bytes, **common)
        except UnavailableError as error:
            self._skipped[ACCELERATE] = str(error)
            return None
        self._add(ACCELERATE, lambda tokens: beside.call("decode", tokens=tokens), None, cap)
        return {**facts, "peak_bytes": None}

    def _add(self, side: str, turn: Callable[[int], dict[str, float]], step_s: float | None, cap: Cap) -> None:
        """Warm a side up, and choose the tokens of its turns. step_s: as predicted."""
        left_s = self._run.left_s
        if step_s is not None and step_s * (LEAST_TOKENS + 1) > _SLOW_SHARE[side] * left_s:
            self._skipped[side] = f"{step_s:.3g} s a token are predicted, {left_s:.0f} s are left"
            return
        try:
            rate = turn(LEAST_TOKENS)["tok_s"]
        except UnavailableError as error:
            self._skipped[side] = str(error)
            return
        self._tokens[side] = min(max(int(cap.stretch_s * rate), LEAST_TOKENS), MOST_TOKENS)
        self._turns[side] = turn

    def _rounds(self) -> list[Found]:
        """Each side in turn. A round that was not ended does not count."""
        found: list[Found] = []
        took = 0.0
        while self._turns and len(found) < self._run.rounds and 1.2 * took < self._run.left_s:
            started = time.monotonic()
            try:
                found.append(self._round())
            except UnavailableError as error:
                self._skipped["more rounds"] = str(error)
                break
            took = time.monotonic() - started
        return found

    def _round(self) -> Found:
        """The link is measured before and behind the side that depends on it, which comes first."""
        links = [self._ours.call("h2d_gbs")]
        values = {}
        for side, turn in sorted(self._turns.items(), key=lambda turn: turn[0] != "streamed"):
            try:
                values[side] = turn(self._tokens[side])
            except UnavailableError as error:
                if side != ACCELERATE or self._run.left_s < 0:
                    raise
                self._skipped[side] = str(error)  # the others' rounds go on without it
                del self._turns[side], self._tokens[side]
            if side == "streamed":
                links.append(self._ours.call("h2d_gbs"))
        return {"link_gbs": statistics.harmonic_mean(links), **values}
