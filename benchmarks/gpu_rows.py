"""The table of `python -m benchmarks.gpu`: a line for each figure, beside its floor or its peer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.measure import Spread


@dataclass(frozen=True)
class Row:
    """part: the cap and the format. figure, beside: in the units of `what`. is_met: None where nothing is wanted."""

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
        figures = f"{_told(self.figure)} | {_told(self.beside)} | {_told(self.ratio)}" if self.figure else ""
        pieces = [f"{state} {self.part}: {self.what}", figures, f"wanted {self.wanted}" if self.wanted else ""]
        return " | ".join(piece for piece in (*pieces, self.note) if piece)


def _told(value: Spread | None) -> str:
    if value is None:
        return "-"
    return str(value) if value.min != value.max else str(value).split(" ")[0]


def speculation_rows(found: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Of an oracle beside the formula, and of guesses that are all wrong beside plain decoding."""
    rows = []
    for each in found:
        measured, part = Spread(**each["speedup"]), f"guesses, {each['placement']}"
        if not each["alpha"]:
            is_met = measured.median >= 0.97
            rows.append(Row(part, "all of them wrong, of plain decoding", measured, None, None, ">= 0.97", is_met))
            continue
        formula, share = Spread(**each["formula"]), Spread(**each["share"])
        what = f"{each['k']} at once, {each['alpha']:.0%} of them right: times plain decoding | by the formula"
        rows.append(Row(part, what, measured, formula, share, ">= 0.9 of it", share.median >= 0.9))
    return rows


def text_rows(texts: Mapping[str, str]) -> list[Row]:
    wrong = [f"{kind} {told}" for kind, told in texts.items() if told != "ok"]
    right = [kind for kind, told in texts.items() if told == "ok"]
    note = "; ".join([*wrong, f"ok: {', '.join(right) or 'none'}"])
    return [Row("texts", "fp32 text that of the CPU alone", wanted="identical", is_met=not wrong, note=note)]


def machine_lines(told: Mapping[str, Any]) -> list[str]:
    profile, card, system = told["profile"], told["card"] or {}, told["system"]
    device = profile["device"]
    name = card.get("name") or f"a stand-in: {system['cpu']}"
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
        f"{name}, driver {card.get('driver_version')}, PCIe {card.get('pcie_generation_max')} "
        f"x{card.get('pcie_width_max')}, torch {system['torch']}, {system['threads']} threads of {system['cpu']}",
        ", ".join(rates),
    ]
    for where, formats in (("the card", device["formats"]), ("the CPU", profile["formats"])):
        for weights, found in formats.items():
            lines.append(
                f"{weights} on {where}: {found['matrix_gbs']:.3g} GB/s for a token, "
                f"{found['compute_gops'] / 1e3:.3g} TFLOPS for many, workspace {found['workspace_bytes'] / 1e6:.0f} MB"
            )
    return lines


def table(rows: Sequence[Row]) -> list[str]:
    """Figure | beside | ratio, each a median with the least and the most."""
    return ["", "     figure | beside it | ratio: median (least to most)", *(row.line() for row in rows)]
