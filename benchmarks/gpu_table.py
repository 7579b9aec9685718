"""The table of `python -m benchmarks.gpu`: one row for each figure, beside its floor or its peer. Runs nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.measure import Spread, paired, spread

MODEL = "llama-3.1-8b"  # the model that lies on the card as a whole, and whose figures have targets
MIXTURE = "qwen3-30b-a3b"  # whose experts have slots on the card
DEEPEST = 32768  # of the depths at which the model is decoded
FEW, MANY = (1, 2, 4, 8, 16, 32, 64), (128, 512)  # rows of products: of steps, and of prompts
ACCELERATE = "accelerate"  # the only side of a cap that is not ours
LOOPS = {
    "graph": "as it is, in one graph",
    "layers": "each layer compiled, in one graph",
    "whole": 'compiled with mode="reduce-overhead"',
}
_NOISE = 0.02  # between two sides that do the same
_WIDE = 16  # rows, which shall take hardly longer than one
_PEAK = "peak of the card's memory, GB, beside the ledger"
_LEAST_TOK_S, _MOST_FIRST_S, _LEDGER = 400, 1.0, 0.03

Found = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """figure, beside: in the units of `what`. is_met: None where there is no target."""

    part: str
    what: str
    figure: Spread | None = None
    beside: Spread | None = None
    ratio: Spread | None = None
    wanted: str = ""
    is_met: bool | None = None
    note: str = ""

    def noted(self, note: str) -> Row:
        return replace(self, note="; ".join(text for text in (self.note, note) if text))

    def line(self) -> str:
        state = {None: "    ", True: "ok  ", False: "MISS"}[self.is_met]
        figures = " | ".join(map(_shown, (self.figure, self.beside, self.ratio))) if self.figure else ""
        pieces = [f"{state} {self.part}: {self.what}", figures, f"wanted {self.wanted}" if self.wanted else ""]
        return " | ".join(piece for piece in (*pieces, self.note) if piece)


def _shown(value: Spread | None) -> str:
    if value is None:
        return "-"
    return str(value) if value.min != value.max else str(value).split(" ")[0]


def compared(
    part: str,
    what: str,
    ours: Sequence[float] | None,
    other: Sequence[float] | None,
    *,
    least: float | None = None,
    most: float | None = None,
    within: float | None = None,
    scale: float = 1.0,
    note: str = "",
) -> Row:
    """Ours beside the other, round by round.

    least, most: targets of the median ratio.
    within: the same as a share that the ratio may be off 1.
    scale: from the values to the units of `what`.
    """
    if not ours or not other:
        return Row(part, what, note="not measured")
    ratio, wanted, is_met = paired(ours, other), "", None
    if least is not None:
        wanted, is_met = f">= {least:g}", ratio.median >= least
    elif most is not None:
        wanted, is_met = f"<= {most:g}", ratio.median <= most
    elif within is not None:
        wanted, is_met = f"within {within:.0%}", abs(ratio.median - 1) <= within
    figure, beside = (spread([scale * value for value in values]) for values in (ours, other))
    return Row(part, what, figure, beside, ratio, wanted, is_met, note)


def table(rows: Sequence[Row]) -> list[str]:
    """Figure | beside | ratio, each a median with the least and the most."""
    return ["", "     figure | beside it | ratio: median (least to most)", *(row.line() for row in rows)]


def machine_lines(found: Found) -> list[str]:
    profile, card, system = found["profile"], found["card"] or {}, found["system"]
    device = profile["device"]
    rates = [
        f"device copy {device['device_copy_gbs']:.0f}",
        f"to it {device['h2d_gbs']:.1f}",
        f"from it {device['d2h_gbs']:.1f}",
        f"DRAM {profile['dram_read_gbs']:.0f}",
        f"disk {profile['disk_read_gbs']:.2f} GB/s",
        f"launch {1e6 * device['launch_s']:.1f} us",
        f"hop {1e6 * device['hop_s']:.0f} us",
        f"CUDA itself {device['context_bytes'] / 1e6:.0f} MB",
    ]
    lines = [
        f"{card.get('name') or 'a stand-in: ' + system['cpu']}, driver {card.get('driver_version')}, "
        f"PCIe {card.get('pcie_generation_max')} x{card.get('pcie_width_max')}, torch {system['torch']}, "
        f"{system['threads']} threads of {system['cpu']}",
        ", ".join(rates),
    ]
    for where, formats in (("the card", device["formats"]), ("the CPU", profile["formats"])):
        lines += [
            f"{weights} on {where}: {each['matrix_gbs']:.3g} GB/s for a token, {each['compute_gops'] / 1e3:.3g} "
            f"TFLOPS for many, workspace {each['workspace_bytes'] / 1e6:.0f} MB"
            for weights, each in formats.items()
        ]
    return lines


def speculation_rows(found: Sequence[Found]) -> list[Row]:
    """An oracle's drafts beside the formula, and drafts that are all wrong beside plain decoding."""
    rows = []
    for each in found:
        measured, part = Spread(**each["speedup"]), f"drafts, {each['placement']}"
        if not each["alpha"]:
            is_met = measured.median >= 0.97
            rows.append(Row(part, "all of them wrong, of plain decoding", measured, None, None, ">= 0.97", is_met))
            continue
        formula, share = Spread(**each["formula"]), Spread(**each["share"])
        what = f"{each['k']} at once, {each['alpha']:.0%} of them right: times plain decoding | by the formula"
        rows.append(Row(part, what, measured, formula, share, ">= 0.9 of it", share.median >= 0.9))
    return rows


def long_rows(depth: int, tok_s: Rates) -> list[Row]:
    """tok_s: by what tokens attend to, all of the text first."""
    everything, *chosen = tok_s
    what = f"of the pages of {depth} tokens, steps, tok/s, beside attention to all"
    return [compared("long texts", f"{name} {what}", tok_s[name], tok_s[everything]) for name in chosen]


def text_rows(texts: Mapping[str, str]) -> list[Row]:
    wrong = [f"{kind} {found}" for kind, found in texts.items() if found != "ok"]
    right = [kind for kind, found in texts.items() if found == "ok"]
    note = "; ".join([*wrong, f"ok: {', '.join(right) or 'none'}"])
    return [Row("texts", "fp32 text that of the CPU alone", wanted="identical", is_met=not wrong, note=note)]


# Products


def product_rows(model: str, found: Mapping[str, Found]) -> list[Row]:
    """The sum over a layer's matrices, which weighs each by its bytes; the head by itself."""
    layer = [each for each in found.values() if each["weights"] == "int4"]
    has_targets = model == MODEL

    def against(what: str, other: str, own: str, least: float | None = None) -> Row:
        """The other's time over ours."""
        what = f"{model}, {what} beside ours ({own.split()[0]})"
        return compared("products", what, _total_s(layer, other), _total_s(layer, own), least=least, scale=1e6)

    wide, one = _total_s(layer, f"gemm {_WIDE}"), _total_s(layer, "gemv 1")
    what = f"{model}, {_WIDE} rows, us a layer, beside one"
    rows = [
        _copied(f"{model}, a layer's INT4 matrices", layer, 0.60 if has_targets else None),
        *(_copied(f"{model}, the head in INT8", [each]) for each in found.values() if each["weights"] == "int8"),
        against("one row, us a layer, of torch's INT4 operator", "torch 1", "gemv 1", 1.3 if has_targets else None),
        compared("products", what, wide, one, most=1.25 if has_targets else None, scale=1e6),
        *(
            against(f"{count} rows, us a layer, of bf16", f"bf16 {count}", side)
            for count, side in ((1, "gemv 1"), (128, "gemm 128"), (512, "gemm 512"))
            if _total_s(layer, side)
        ),
        _faster(model, layer),
    ]
    skipped = sorted({f"no {side}: {why}" for each in found.values() for side, why in each["skipped"].items()})
    return [rows[0].noted("; ".join(skipped)), *rows[1:]]


def _total_s(layer: Sequence[Found], side: str) -> list[float]:
    """Seconds of all matrices in each round; nothing where one of them was not measured."""
    if not all(side in each["seconds"] for each in layer):
        return []
    return [sum(turn) for turn in zip(*(each["seconds"][side] for each in layer), strict=True)]


def _copied(what: str, layer: Sequence[Found], least: float | None = None) -> Row:
    num_bytes = sum(each["num_bytes"] for each in layer)
    ours = [num_bytes / seconds / 1e9 for seconds in _total_s(layer, "gemv 1")]
    floors = [
        num_bytes / sum(each["num_bytes"] / gbs for each, gbs in zip(layer, turn, strict=True))
        for turn in zip(*(each["copy_gbs"] for each in layer), strict=True)
    ]
    return compared("products", f"{what}, one row, GB/s, beside the device copy", ours, floors, least=least)


def _faster(model: str, layer: Sequence[Found]) -> Row:
    """Which of our kernels this card prefers, by the number of rows."""
    what = f"{model}, which kernel is faster"
    totals = {count: [_total_s(layer, f"{side} {count}") for side in ("gemv", "gemm")] for count in FEW}
    found = {count: [spread(each).median for each in both] for count, both in totals.items() if all(both)}
    shown = [
        f"{count}: {'gemv' if gemv <= gemm else 'gemm'} ({1e6 * gemv:.3g} us by gemv, {1e6 * gemm:.3g} by gemm)"
        for count, (gemv, gemm) in found.items()
    ]
    most = 0
    for count, (gemv, gemm) in found.items():
        if gemv > gemm:
            break
        most = count
    return Row("products", what, note=f"gemv_rows = {most}; rows {', '.join(shown)}" if shown else "not measured")


# A whole model on the card

Rates = Mapping[str, list[float]]


def load_rows(facts: Found) -> list[Row]:
    """The first token, and the peak of the card's memory."""
    note = f"loaded in {facts['load_s']:.3g} s"
    if not facts["is_whole"]:
        note += "; a step needs the host: not all of the model is on the card"
    what = "first token after load, s (which is what is wanted), beside the second prompt's"
    first = compared("model", what, [facts["first_s"]], [facts["second_s"]], note=note)
    rows = [replace(first, wanted=f"<= {_MOST_FIRST_S:g}", is_met=facts["first_s"] <= _MOST_FIRST_S)]
    peak = facts["peak"]
    if "peak_bytes" in peak:
        note = f"{peak['own_bytes'] / 1e9:.4g} by NVML" if peak["own_bytes"] else ""
        measured, ledger = [peak["peak_bytes"]], [peak["ledger_bytes"]]
        rows.append(compared("model", _PEAK, measured, ledger, within=_LEDGER, scale=1e-9, note=note))
    return rows


def beside_rows(depth: int, prompt: int, found: Rates) -> list[Row]:
    what = f"decode by the engine behind {depth} tokens, tok/s, beside a device copy of its bytes"
    decoded = compared("model", what, found.get("engine"), found.get("copied"))
    if decoded.figure is not None:
        is_met = decoded.figure.median >= _LEAST_TOK_S
        decoded = replace(decoded, wanted=f">= {_LEAST_TOK_S} tok/s", is_met=is_met)
    what = f"prefill of {prompt} tokens, tok/s, beside bf16 in torch"
    prefilled = compared("model", what, found.get("prefill"), found.get("bf16"), least=0.85)
    if prefilled.figure is None and found.get("prefill"):
        prefilled = Row("model", what, spread(found["prefill"]), note="not measured beside bf16")
    return [decoded, *loop_rows(found), prefilled]


def loop_rows(found: Rates) -> list[Row]:
    """The engine beside torch's loops, where both were measured."""
    what = "decode by the engine, tok/s, beside torch's loop, "
    return [
        compared("model", what + name, found["engine"], found[loop], least=1.5)
        for loop, name in LOOPS.items()
        if found.get(loop) and found.get("engine")
    ]


def depth_rows(depth: int, kvs: Sequence[str], found: Rates, same_tokens: Mapping[str, bool]) -> list[Row]:
    """same_tokens: by the format of keys and values, whether graphs change no token."""
    rows = []
    for kv in kvs:
        what = f"{kv} keys and values behind {depth} tokens, steps alone, tok/s, beside those without graphs"
        row = compared("model", what, found.get(f"{kv} graphs"), found.get(f"{kv} launches"))
        if row.figure is not None:
            rows.append(replace(row, wanted="the same tokens", is_met=same_tokens[kv]))
    graphs = {kv: found.get(f"{kv} graphs") for kv in ("int8", "int4", "bf16")}
    what = f"the engine behind {depth} tokens, int8 keys and values, tok/s, beside its steps alone"
    rows.append(compared("model", what, found.get("engine"), graphs["int8"]))
    what = f"int4 keys and values behind {depth} tokens, tok/s, beside bf16"
    rows.append(compared("model", what, graphs["int4"], graphs["bf16"], least=1.15 if depth >= DEEPEST else None))
    rows = [row for row in rows if row.figure is not None]
    return rows or [Row("model", f"decode behind {depth} tokens", note="not measured: no time was left")]


def turn_row(shared: int, own: int, found: Rates) -> Row:
    what = f"first token of {own} tokens behind {shared} known ones, s, beside all of them anew"
    return compared("model", what, found.get("first token, known"), found.get("first token, all anew"), most=0.05)


# Caps of the card's memory


def cap_rows(name: str, weights: str, cap_bytes: int, found: Found) -> list[Row]:
    """The figures of a cap, each beside what it is measured by."""
    rounds, facts, peak = found["rounds"], found["facts"], found["peak"]
    rates = {side: [turn[side]["tok_s"] for turn in rounds] for side in found["tokens"]} if rounds else {}
    rows = [_streaming(name, rounds, rates, facts), _hybrid(name, rates, facts)]
    if weights == "bf16":
        rows.append(_beside(name, rates, found))
    if "peak_bytes" in peak:
        rows.append(_peak(name, cap_bytes, peak, facts))
    rows.append(_prediction(name, rounds, rates, facts, peak))
    few = "" if len(rounds) >= 5 else f"{len(rounds)} rounds"
    skipped = [f"no {side}: {reason}" for side, reason in found["skipped"].items()]
    gave_way = ["memory ran out on the way: blocks gave way"] if peak["gave_way"] else []
    return [rows[0].noted("; ".join([few, *skipped, *gave_way]).strip("; ")), *rows[1:]]


def expert_rows(name: str, found: Found) -> list[Row]:
    """The figures of a mixture under a cap, whose random router wants other experts than a trained one."""
    facts, turns = found["facts"], found["turns"]
    ours, host = ([turn[side]["tok_s"] for turn in turns] for side in ("placed", "host"))
    hits = [turn["placed"]["hit_rate"] for turn in turns if turn["placed"]["hit_rate"] is not None]
    places = f"{facts['held']:,} of {facts['total']:,} experts on the card"
    note = f"{places}, {facts['model_bytes'] / 1e9:.3g} GB in all"
    rows = [
        compared(name, "tok/s beside the CPU alone", ours, host, least=1 - _NOISE, note=note),
        compared(name, "tok/s beside the plan's, of usual hits", ours, [facts["predicted_tok_s"]] * len(ours)),
        compared(
            name, "hits beside the share of experts with room", hits, [facts["held"] / facts["total"]] * len(hits)
        ),
    ]
    if "peak_bytes" in found["peak"]:
        rows.append(_peak(name, facts["cap_bytes"], found["peak"], facts))
    return rows


def _streaming(name: str, rounds: Sequence[Found], rates: Rates, facts: Found) -> Row:
    num_bytes = facts["copied_bytes"]["streamed"] / 1e9
    copied, links = [rate * num_bytes for rate in rates.get("streamed", [])], [turn["link_gbs"] for turn in rounds]
    note = f"{num_bytes:.3g} GB a token, {facts['pinned_runs']} blocks pinned"
    what = "copied in every step, GB/s, beside the pinned copy"
    return compared(name, what, copied, links, least=0.92, note=note)


def _hybrid(name: str, rates: Rates, facts: Found) -> Row:
    names = {"streamed": "copying alone", "host": "the CPU alone"}
    others = {side: spread(rates[side]) for side in names if side in rates}
    better = rates[max(others, key=lambda side: others[side].median)] if others else None
    shown = [f"{names[side]} {value}" for side, value in others.items()]
    note = ", ".join([*shown, *(f"{count} {kind}" for kind, count in facts["blocks"]["found"].items())])
    what = "the plan, tok/s, beside the better of copying alone and the CPU alone"
    return compared(name, what, rates.get("found"), better, least=1 - _NOISE, note=note)


def _beside(name: str, rates: Rates, found: Found) -> Row:
    theirs, note = found["accelerate"], ""
    if theirs is not None:
        note = f"{theirs['version']}, modules {theirs['modules']}"
        if theirs["peak_bytes"]:
            note += f", its peak {(theirs['peak_bytes'] + found['facts']['context_bytes']) / 1e9:.3g} GB"
    what = "the plan, tok/s, beside accelerate"
    return compared(name, what, rates.get("found"), rates.get(ACCELERATE), least=3.0, note=note)


def _peak(name: str, cap_bytes: int, peak: Found, facts: Found) -> Row:
    ledger, measured = sum(facts["ledger"].values()), peak["peak_bytes"]
    note = f"cap {cap_bytes / 1e9:.4g}, CUDA itself {facts['context_bytes'] / 1e9:.3g}"
    if peak["own_bytes"]:
        note += f", {peak['own_bytes'] / 1e9:.4g} by NVML"
    row = compared(name, _PEAK, [measured], [ledger], within=_LEDGER, scale=1e-9, note=note)
    is_met = bool(row.is_met) and measured <= cap_bytes
    return replace(row, wanted=f"below the cap, ledger within {_LEDGER:.0%}", is_met=is_met)


def _prediction(name: str, rounds: Sequence[Found], rates: Rates, facts: Found, peak: Found) -> Row:
    predicted = [1 / turn["found"]["predicted_s"] for turn in rounds] if "found" in rates else None
    note = f"planned in {facts['plan_ms']:.3g} ms, bound by {facts['bound_by']}; a prompt of 512 tokens: "
    note += f"{peak['predicted_ttft_s']:.3g} s predicted, {peak['ttft_s']:.3g} s"
    what = "predicted tok/s beside the measured"
    return compared(name, what, predicted, rates.get("found"), within=0.2, note=note)
