"""A whole model by our kernels beside a plain loop in torch: the sides' turns, and the rows that come of them.

Also the rows of the checks of each kernel, and of where a step's time goes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.gpu_model import model_config
from benchmarks.gpu_rows import Row
from benchmarks.measure import Spread, paired, spread
from benchmarks.peers_protocol import UnavailableError, Worker

PART = "model"
DEPTHS, KV = (512, 8192, 32768), ("bf16", "int8", "int4")
_SMALL_DEPTHS = (70,)  # beyond one page
_TOKENS = {False: 64, True: 4}
_PROMPT = {False: 2048, True: 20}
_TURN = {False: (4096, 48), True: (64, 6)}  # tokens of a chat so far, and of its next message
_WANTED_LOOP, _WANTED_TOK_S, _WANTED_PREFILL, _WANTED_KV = 1.5, 400, 0.85, 1.15
_WANTED_LEDGER, _WANTED_FIRST_S, _WANTED_TURN = 0.03, 1.0, 0.05

Found = dict[str, Any]
Add = Callable[[list[Row]], None]


class ModelTurns:
    """found: what there is so far. until: of the monotonic clock."""

    def __init__(
        self, ours: Worker, theirs: Worker, device: str, until: float, rounds: int, found: Found, add: Add
    ) -> None:
        self._ours, self._theirs, self._device = ours, theirs, device
        self._until, self._rounds, self._found, self._add = until, rounds, found, add
        self._is_small = device == "cpu"
        self._tokens, self._prompt = _TOKENS[self._is_small], _PROMPT[self._is_small]

    def measure(self) -> None:
        depths = _SMALL_DEPTHS if self._is_small else DEPTHS
        facts = self._ours.call("load", device=self._device, depths=depths, small=self._is_small)
        self._found["facts"] = facts
        self._add([_first(facts), *([_peak(facts["peak"])] if "peak_bytes" in facts["peak"] else [])])
        first, *deeper = facts["depths"]
        variants = self._load_loop(first)
        self._beside(first, variants)
        self._at_depth(first)
        self._next_turn(facts["depths"][-1])
        for depth in deeper:
            self._at_depth(depth)
        if variants and time.monotonic() < self._until:
            self._beside_compiled(first)

    def _load_loop(self, depth: int) -> list[str]:
        """The ways in which torch's loop runs."""
        options = {"raw_config": model_config(small=self._is_small), "depth": depth, "tokens": self._tokens}
        try:
            self._theirs.call("load", device=self._device, prompt=self._prompt, **options)
        except UnavailableError as error:
            self._add([Row(PART, "the plain torch loop", note=f"not measured: {error}")])
            return []
        return [variant for variant in ("graph", "layers") if self._prepared(variant)]

    def _prepared(self, variant: str) -> bool:
        try:
            self._theirs.call("prepare", variant=variant)
        except UnavailableError as error:
            self._add([Row(PART, f"torch's loop, {_NAMES[variant]}", note=f"not measured: {error}")])
            return False
        return True

    def _beside(self, depth: int, variants: Sequence[str]) -> None:
        sides: dict[str, Callable[[], float]] = {
            "engine": lambda: self._ours.call("engine_decode", depth=depth, tokens=self._tokens),
            "copied": lambda: self._ours.call("copied", depth=depth),
            "prefill": lambda: self._ours.call("prefill", tokens=self._prompt),
        }
        if variants:
            sides["bf16"] = lambda: self._theirs.call("prefill")
        for variant in variants:
            sides[variant] = lambda variant=variant: self._theirs.call("decode", variant=variant)  # type: ignore[misc]
        found = self._found["beside"] = self._turns(sides)
        self._add([*self._decoded(depth, found, variants), _prefilled(self._prompt, found)])

    def _decoded(self, depth: int, found: Mapping[str, list[float]], variants: Sequence[str]) -> list[Row]:
        if not found.get("engine") or not found.get("copied"):
            return [Row(PART, "decode, tok/s", note="not measured")]
        ours, ratio = spread(found["engine"]), paired(found["engine"], found["copied"])
        wanted, is_met = f">= {_WANTED_TOK_S} tok/s", ours.median >= _WANTED_TOK_S
        what = f"decode by the engine behind {depth} tokens, tok/s, beside a device copy of its bytes"
        rows = [Row(PART, what, ours, spread(found["copied"]), ratio, wanted, is_met)]
        return rows + [_loop(found["engine"], found[variant], variant) for variant in variants if found.get(variant)]

    def _next_turn(self, deepest: int) -> None:
        """A message behind a chat whose keys and values are known, or not. deepest: tokens that there is room for."""
        shared, own = _TURN[self._is_small]
        options = {"shared": min(shared, deepest), "own": own}
        sides = {
            name: lambda is_known=is_known: self._ours.call("first_token", is_known=is_known, **options)
            for name, is_known in (("first token, all anew", False), ("first token, known", True))
        }
        found = self._found["next_turn"] = self._turns(sides)
        self._add([_turn(options["shared"], own, found)])

    def _beside_compiled(self, depth: int) -> None:
        """At last, as its compiling may take all of the time and is ended with it."""
        if not self._prepared("whole"):
            return
        sides: dict[str, Callable[[], float]] = {
            "engine": lambda: self._ours.call("engine_decode", depth=depth, tokens=self._tokens),
            "whole": lambda: self._theirs.call("decode", variant="whole"),
        }
        found = self._found["beside_compiled"] = self._turns(sides)
        if found.get("whole"):
            self._add([_loop(found["engine"], found["whole"], "whole")])

    def _at_depth(self, depth: int) -> None:
        """The steps alone, in every format side by side; then the engine."""
        sides = {
            f"{kv} {how}": self._steps(kv, depth, graphs=how == "graphs") for kv in KV for how in ("graphs", "launches")
        }
        sides["engine"] = lambda: self._ours.call("engine_decode", depth=depth, tokens=self._tokens)
        self._texts: dict[str, list[int]] = {}
        found = self._turns(sides)
        self._found.setdefault("depths", {})[str(depth)] = found
        rows = []
        for kv in KV:
            with_graphs, without = found.get(f"{kv} graphs"), found.get(f"{kv} launches")
            if with_graphs and without:
                is_same = self._texts[f"{kv} True"] == self._texts[f"{kv} False"]
                what = f"{kv} keys and values behind {depth} tokens, steps alone, tok/s, beside those without graphs"
                ratio = paired(with_graphs, without)
                wanted = "the same tokens"
                rows.append(Row(PART, what, spread(with_graphs), spread(without), ratio, wanted, is_same))
        if found.get("engine") and found.get("int8 graphs"):
            what = f"the engine behind {depth} tokens, int8 keys and values, tok/s, beside its steps alone"
            ratio = paired(found["engine"], found["int8 graphs"])
            rows.append(Row(PART, what, spread(found["engine"]), spread(found["int8 graphs"]), ratio))
        if found.get("int4 graphs") and found.get("bf16 graphs"):
            rows.append(_coded(depth, found["int4 graphs"], found["bf16 graphs"]))
        self._add(rows or [Row(PART, f"decode behind {depth} tokens", note="not measured: no time was left")])

    def _steps(self, kv: str, depth: int, *, graphs: bool) -> Callable[[], float]:
        def turn() -> float:
            told = self._ours.call("decode", kv=kv, depth=depth, tokens=self._tokens, graphs=graphs)
            self._texts[f"{kv} {graphs}"] = told["tokens"]
            return float(told["tok_s"])

        return turn

    def _turns(self, sides: Mapping[str, Callable[[], float]]) -> dict[str, list[float]]:
        """Each side once to warm up, then in turn, as many rounds as there is time for. One that fails is left out."""
        found: dict[str, list[float]] = {side: [] for side in sides}
        going, took = dict(sides), 0.0
        for number in range(self._rounds + 1):
            if number > 1 and time.monotonic() + 1.2 * took > self._until:
                break
            started = time.monotonic()
            for side, turn in list(going.items()):
                try:
                    value = turn()
                except UnavailableError as error:
                    if time.monotonic() > self._until:
                        return found
                    self._add([Row(PART, side, note=f"ended: {error}")])
                    del going[side], found[side]
                    continue
                if number:
                    found[side].append(value)
            took = time.monotonic() - started
        return found


_NAMES = {
    "graph": "as it is, in one graph",
    "layers": "each layer compiled, in one graph",
    "whole": 'compiled with mode="reduce-overhead"',
}


def _loop(ours: Sequence[float], theirs: Sequence[float], variant: str) -> Row:
    ratio = paired(ours, theirs)
    what = f"decode by the engine, tok/s, beside torch's loop, {_NAMES[variant]}"
    return Row(
        PART, what, spread(ours), spread(theirs), ratio, f">= {_WANTED_LOOP}", ratio.median >= _WANTED_LOOP
    )  # fmt: skip


def _prefilled(tokens: int, found: Mapping[str, list[float]]) -> Row:
    what = f"prefill of {tokens} tokens, tok/s, beside bf16 in torch"
    if not found.get("prefill") or not found.get("bf16"):
        figure = spread(found["prefill"]) if found.get("prefill") else None
        return Row(PART, what, figure, note="not measured beside bf16")
    ratio = paired(found["prefill"], found["bf16"])
    wanted, is_met = f">= {_WANTED_PREFILL}", ratio.median >= _WANTED_PREFILL
    return Row(PART, what, spread(found["prefill"]), spread(found["bf16"]), ratio, wanted, is_met)


def _coded(depth: int, coded: Sequence[float], dense: Sequence[float]) -> Row:
    ratio = paired(coded, dense)
    what = f"int4 keys and values behind {depth} tokens, tok/s, beside bf16"
    if depth < DEPTHS[-1]:
        return Row(PART, what, spread(coded), spread(dense), ratio)
    wanted, is_met = f">= {_WANTED_KV}", ratio.median >= _WANTED_KV
    return Row(PART, what, spread(coded), spread(dense), ratio, wanted, is_met)


def _first(facts: Mapping[str, Any]) -> Row:
    note = f"loaded in {facts['load_s']:.3g} s"
    if not facts["is_whole"]:
        note += "; a step needs the host: not all of the model is on the card"
    wanted, is_met = f"<= {_WANTED_FIRST_S:g}", facts["first_s"] <= _WANTED_FIRST_S
    what = "first token after load, s (which is what is wanted), beside the second prompt's"
    first, second = one(facts["first_s"]), one(facts["second_s"])
    return Row(PART, what, first, second, one(first.median / second.median), wanted, is_met, note)


def _turn(shared: int, own: int, found: Mapping[str, list[float]]) -> Row:
    what = f"first token of {own} tokens behind {shared} known ones, s, beside all of them anew"
    known, anew = found.get("first token, known"), found.get("first token, all anew")
    if not known or not anew:
        return Row(PART, what, note="not measured")
    ratio = paired(known, anew)
    wanted, is_met = f"<= {_WANTED_TURN}", ratio.median <= _WANTED_TURN
    return Row(PART, what, spread(known), spread(anew), ratio, wanted, is_met)


def _peak(peak: Mapping[str, float]) -> Row:
    ratio = peak["peak_bytes"] / peak["ledger_bytes"]
    figures = one(peak["peak_bytes"] / 1e9), one(peak["ledger_bytes"] / 1e9), one(ratio)
    note = f"{peak['own_bytes'] / 1e9:.4g} by NVML" if peak["own_bytes"] else ""
    what, wanted = "peak of the card's memory, GB, beside the ledger", f"within {_WANTED_LEDGER:.0%}"
    return Row(PART, what, *figures, wanted, abs(ratio - 1) <= _WANTED_LEDGER, note)


def one(value: float) -> Spread:
    return Spread(value, value, value)


def kernel_rows(found: Mapping[str, Any]) -> list[Row]:
    """A row for each family: the error that is closest to its tolerance."""
    rows = []
    for family, told in found["families"].items():
        error, tolerance = told["error"], told["tolerance"]
        note = "; ".join([f"{told['cases']} cases, closest: {told['closest']}", *told["wrong"]])
        figure, beside = (None, None) if error is None else (one(error), one(tolerance))
        ratio = one(error / tolerance) if error is not None and tolerance else None
        what = f"{family}, error beside its tolerance"
        rows.append(Row("kernels", what, figure, beside, ratio, "all right", not told["wrong"], note))
    if found["ended"]:
        rows.append(Row("kernels", "not all of them", is_met=False, note=found["ended"]))
    return rows


def profile_rows(found: Mapping[str, Any]) -> list[Row]:
    """By their time; each beside what its bytes take at the bandwidth of the device's copies."""
    part, copies = "profile", found["copy_gbs"]
    kinds = sorted(found["kinds"].items(), key=lambda kind: -spread(kind[1]["seconds"]).median)
    step = spread([1e6 * value for value in found["step_s"]])
    sums = [sum(turn) * 1e6 for turn in zip(*(told["seconds"] for _, told in kinds), strict=True)]
    rest = spread([1e6 * whole - kernels for whole, kernels in zip(found["step_s"], sums, strict=True)])
    rows = []
    for kind, told in kinds:
        times = [1e6 * value for value in told["seconds"]]
        floors = [told["num_bytes"] / gbs / 1e3 for gbs in copies]
        note = f"{told['launches']} launches, {told['num_bytes'] / 1e6:.3g} MB, "
        note += f"{spread(times).median / step.median:.0%} of a step"
        rows.append(
            Row(
                part,
                f"{kind}, us a step, beside its bytes'",
                spread(times),
                spread(floors),
                paired(times, floors),
                note=note,
            )
        )
    what = f"a step behind {found['depth']} tokens, {found['kv']} keys and values, us, beside the kernels' sum"
    note = f"torch's own copies, tables and gaps: {rest} us"
    return [Row(part, what, step, spread(sums), paired([1e6 * s for s in found["step_s"]], sums), note=note), *rows]
