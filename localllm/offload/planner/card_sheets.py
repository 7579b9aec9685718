"""Graphics cards by their data sheets, and a machine with one of them: what a plan knows of it without having it.

A figure of a data sheet is never reached. The shares of it that are taken here are what good kernels reach elsewhere.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from localllm.errors import Fix, UsageError
from localllm.offload.planner.calibration import Corrections
from localllm.offload.planner.machine import KERNELS, Card, CardMemory, CardRates, Machine, Memory
from localllm.offload.planner.machine_memory import HEADROOM
from localllm.offload.planner.plan import GIB, cap
from localllm.offload.planner.profile import UNKNOWN_CONTEXT_BYTES, UNKNOWN_GRAPH_NODE_BYTES

ALL, NONE = "all", "none"  # in place of a card's name

# Of the bandwidth, by one token's matrices: llama.cpp has 0.78 on an RTX 3090, and 0.91 on an RTX 4090 at 32k.
_MEMORY_SHARE = 0.85
# A100, H100 and H200 have 4 to 5 integer instructions a byte read, an RTX 3060 has 9: to unpack INT4 takes 4 and more.
# gpt-fast has 0.51 with INT4 on an A100, 0.63 with INT8; llama.cpp with 4 bits 0.44 there and 0.37 on an H100.
_HBM_INT4_SHARE, _HBM_SHARE = 0.5, 0.65
_WITH_HBM = ((8, 0), (9, 0))
_LOOKED_UP_SHARE = 0.5  # of nf4 and bf12, which are unpacked before they are multiplied
# Of the peak, by a prompt's products: llama.cpp computes 10,400 tokens a second of an 8B model on an RTX 4090.
_INT8_SHARE, _BF16_SHARE, _FP32_SHARE = 0.22, 0.7, 0.5
_LANE_GBS = 0.985  # of PCIe 3.0; each generation has twice that of the one before
_LINK_SHARE = 0.8  # 12.6 GB/s of pinned memory over PCIe 3.0 x16, as measured on many machines
_LAUNCH_S, _OVERLAPPED_LAUNCH_S = 1.5e-6, 0.5e-6  # in a graph; from 9.0 on, launches overlap
_HOP_S = 40e-6  # two copies and a wait
_WORKSPACE_BYTES = 64 << 20
_BF16_CAPABILITY = (8, 0)
_MAKERS = re.compile(r"^(nvidia|geforce|quadro|tesla)")
_SERIES = re.compile(r"^(rtx|gtx)(?=\w)")
_VARIANT = re.compile(r"-(\d+gb|pcie|sxm)$")


@dataclass(frozen=True)
class CardSheet:
    """A card, as cards.toml has it. bf16_tflops, int8_tops: None where prompts are computed in fp32.

    uncertain: its compute is derived from other figures.
    """

    name: str
    capability: tuple[int, int]
    year: int
    memory_gib: float
    memory_gbs: float
    fp32_tflops: float
    pcie: tuple[int, int]
    bf16_tflops: float | None = None
    int8_tops: float | None = None
    uncertain: bool = False

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gib * GIB)

    @property
    def has_bf16(self) -> bool:
        """Whether the card multiplies bf16; fp32 is the default activation type where it does not."""
        return self.capability >= _BF16_CAPABILITY

    def rates(self, weights: str) -> CardRates:
        """Return the expected rates with weights of this format."""
        (generation, lanes), (peak_share, peak_tops) = self.pcie, self._peak(weights)
        is_late = self.capability >= (9, 0)
        return CardRates(
            matrix_gbs=self.memory_gbs * self._memory_share(weights),
            compute_gops=1000 * peak_share * peak_tops,
            link_gbs=_LINK_SHARE * _LANE_GBS * 2 ** (generation - 3) * lanes,
            launch_s=_OVERLAPPED_LAUNCH_S if is_late else _LAUNCH_S,
            hop_s=_HOP_S,
            launches=KERNELS,
            is_fused=True,
        )

    def memory(self, vram_bytes: int | None) -> CardMemory:
        """Return what a process may hold where no other uses the card. vram_bytes: the cap."""
        context_bytes = UNKNOWN_CONTEXT_BYTES
        most = context_bytes + int(HEADROOM * (self.memory_bytes - context_bytes))
        room = most if vram_bytes is None else min(vram_bytes, most)
        # No more can be freed by closing programs, so the whole is not more than that.
        return CardMemory(room, context_bytes, _WORKSPACE_BYTES, most, most, UNKNOWN_GRAPH_NODE_BYTES)

    def shares(self, weights: str) -> tuple[float, float, float]:
        """Return the shares of bandwidth, peak and link that are expected with weights of this format."""
        return self._memory_share(weights), self._peak(weights)[0], _LINK_SHARE

    def _memory_share(self, weights: str) -> float:
        if weights in ("nf4", "bf12"):
            return _LOOKED_UP_SHARE
        if self.capability in _WITH_HBM:
            return _HBM_INT4_SHARE if weights.startswith("int4") else _HBM_SHARE
        return _MEMORY_SHARE

    def _peak(self, weights: str) -> tuple[float, float]:
        """Return the share that prompts reach, and of which peak, in 1e12 a second."""
        if weights == "fp32" or self.bf16_tflops is None or self.int8_tops is None:
            return _FP32_SHARE, self.fp32_tflops
        if weights in ("bf16", "nf4", "bf12"):
            return _BF16_SHARE, self.bf16_tflops
        return _INT8_SHARE, self.int8_tops


@dataclass(frozen=True)
class OtherMachine:
    """This machine with another card, or with none.

    card: None where the CPU computes alone.
    ram_bytes: of its memory; None: as much as is free here.
    """

    card: CardSheet | None
    ram_bytes: int | None = None

    @property
    def device(self) -> str:
        return "cpu" if self.card is None else "cuda"

    def dtype_name(self, wanted: str) -> str:
        """Return the type of activations that `auto`, `bf16` or `fp32` means there."""
        if wanted != "auto":
            return wanted
        return "bf16" if self.card is None or self.card.has_bf16 else "fp32"

    def of(self, host: Machine, weights: str, vram_bytes: int | None) -> Machine:
        """Return that machine. host: this one without a GPU. vram_bytes: the cap on the card's memory."""
        host = replace(host, memory=self._memory(host.memory), plan_flags=self._plan_flags)
        if self.card is None:
            return host
        card = Card(self.card.memory(vram_bytes), self.card.rates(weights))
        return replace(host, card=card, corrections=Corrections())  # those of runs are of another card

    def _memory(self, here: Memory) -> Memory:
        if self.ram_bytes is None:
            return here
        program = here.program_bytes
        most = program + int(HEADROOM * max(0, self.ram_bytes - program))
        return Memory(most, program, most, most)

    @property
    def _plan_flags(self) -> tuple[str, ...]:
        ram = () if self.ram_bytes is None else ("--ram", cap(self.ram_bytes))
        return ("--gpu", NONE if self.card is None else self.card.name, *ram)


@cache
def card_sheets() -> Mapping[str, CardSheet]:
    """Return all cards by their names, in the order of cards.toml."""
    generations: dict[str, Any] = tomllib.loads(Path(__file__).with_name("cards.toml").read_text(encoding="utf-8"))
    return {
        name: CardSheet(
            name,
            tuple(generation["capability"]),
            pcie=tuple(row["pcie"]),
            uncertain=name in generation["uncertain"],
            **{key: value for key, value in row.items() if key != "pcie"},
        )
        for generation in generations.values()
        for name, row in generation["cards"].items()
    }


def chosen_cards(names: Iterable[str]) -> list[CardSheet | None]:
    """Return the cards that were named, each once, in that order: "all" is every one, None stands for "none".

    Raises UsageError naming the nearest for a card that is not known.
    """
    found: dict[str, CardSheet | None] = {}
    for name in names:
        if name.casefold() == ALL:
            found |= card_sheets()
        elif name.casefold() == NONE:
            found[NONE] = None
        else:
            sheet = find_card(name)
            found[sheet.name] = sheet
    return list(found.values())


def find_card(word: str) -> CardSheet:
    """Return a card by its name, or a part that only it has: "rtx-4090", "RTX 4090", "4090". Raises UsageError."""
    keys = {_key(name): sheet for name, sheet in card_sheets().items()}
    key = _key(word)
    if key in keys:
        return keys[key]
    variants = [sheet.name for name, sheet in card_sheets().items() if _key(_VARIANT.sub("", name)) == key]
    if len(variants) == 1:
        return card_sheets()[variants[0]]
    if variants:
        why = f"there are {' and '.join(variants)}"
        fixes = [Fix.word(word, name) for name in variants]
        raise UsageError(f"--gpu {word[:40]} is more than one card", why=why, fix=fixes)
    near = keys[difflib.get_close_matches(key[:40], keys, n=1, cutoff=0.0)[0]]
    raise UsageError(
        f"there is no card {word[:40]!r}",
        why=f"{len(keys)} are known, of NVIDIA and from compute capability 7.5 on, which localllm's kernels need",
        fix=[Fix.word(word, near.name), Fix.flag("--gpu", ALL)],
    )


def _key(name: str) -> str:
    """Return what tells a card from the others: "RTX 4090" and "4090" give "4090"."""
    plain = re.sub(r"[^a-z0-9]", "", name.casefold())
    while (shorter := _MAKERS.sub("", plain)) != plain:
        plain = shorter
    return _SERIES.sub("", plain)
