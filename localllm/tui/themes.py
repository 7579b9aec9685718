"""The program's own colours, dark and light: one accent on neutral greys. Textual's themes are there beside them."""

from __future__ import annotations

from collections.abc import Mapping

from textual.theme import BUILTIN_THEMES, Theme

# The accent marks what a key or a click acts on. The second colour tells the parts of a chart apart, and nothing else.
DARK = Theme(
    name="localllm-dark",
    primary="#4fc1b0",
    accent="#4fc1b0",
    secondary="#8b9fd9",
    warning="#e3b35a",
    error="#e0707a",
    success="#8cbf6a",
    foreground="#dde3e6",
    background="#101416",
    surface="#171c1f",
    panel="#1d2427",
    variables={
        "border-blurred": "#39454a",
        "block-cursor-blurred-background": "#2b4a48",
        "scrollbar-background": "#171c1f",
    },
)
LIGHT = Theme(
    name="localllm-light",
    primary="#0b7a6c",
    accent="#0b7a6c",
    secondary="#4a5fae",
    warning="#8f5c00",
    error="#b3303c",
    success="#3f7a1c",
    foreground="#1d2427",
    background="#fbfcfc",
    surface="#f1f4f4",
    panel="#e6ebeb",
    dark=False,
    variables={
        "border-blurred": "#b9c4c6",
        "block-cursor-blurred-background": "#c3dfdb",
        "scrollbar-background": "#eef1f1",
    },
)
OWN = (DARK, LIGHT)
THEMES: Mapping[str, str] = {  # the names of all themes, by the words that choose them
    "dark": DARK.name,
    "light": LIGHT.name,
    **{name: name for name in (DARK.name, LIGHT.name, *BUILTIN_THEMES)},
}
