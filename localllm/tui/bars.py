"""Bars of amounts, and lines of the parts that fit. Knows columns, no widgets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from textual.content import Content

_EIGHTHS = " ▏▎▍▌▋▊▉█"


def bar(share: float, columns: int, style: str = "$primary") -> Content:
    """A share of 1 as a bar, to an eighth of a column."""
    eighths = round(min(1.0, max(0.0, share)) * columns * 8)
    if share > 0:
        eighths = max(1, eighths)
    full, rest = divmod(eighths, 8)
    text = _EIGHTHS[8] * full + (_EIGHTHS[rest] if rest else "")
    return Content.styled(text.ljust(columns), f"{style} on $surface-lighten-2")


def split_bar(parts: Mapping[str, float], columns: int, styles: Mapping[str, str]) -> Content:
    """Shares of 1 side by side, each in its style; at least one cell, for the largest."""
    shown, used, total = Content(), 0, 0.0
    for name, share in parts.items():
        total += share
        end = min(columns, round(total * columns))
        shown += Content.styled(_EIGHTHS[8] * (end - used), styles[name])
        used = end
    if total > 0 and not used:
        largest = max(parts, key=lambda name: parts[name])
        shown, used = Content.styled(_EIGHTHS[8], styles[largest]), 1
    return shown + Content.styled("░" * (columns - used), "$foreground-muted")


def fitting(parts: Sequence[tuple[int, Content]], columns: int, gap: str = "  ") -> Content:
    """The parts that fit, in their order; those of the highest rank are dropped first."""
    kept: list[int] = []
    used = -len(gap)
    for index in sorted(range(len(parts)), key=lambda index: parts[index][0]):
        length = parts[index][1].cell_length
        if length and used + len(gap) + length <= columns:
            kept.append(index)
            used += len(gap) + length
    return Content(gap).join([parts[index][1] for index in sorted(kept)])
