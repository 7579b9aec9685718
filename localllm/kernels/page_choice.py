"""Which pages a token attends to where it does not attend to all: a few that are chosen by what it looks for.

Of every page but the first, its own and the one before that, a sketch of the keys is known: their mean, and of each key
beside it one bit a feature, and a scale of 32 features (RaBitQ, arXiv:2405.12497, less its random rotation). That
estimates every query's score with every key, and so the share of its attention that a page gets. Query heads that share
a key head choose together, by the sum of their shares, so that a page is read once for all of them. The pages with the
largest sums are attended to, beside those three.

Of the facts in 2,048 tokens, SmolLM2 135M finds 43 % with eight pages, and 78 % with all. By bounds of the features
(Quest, arXiv:2406.10774), a third of the bytes, it finds 7 % with eight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from localllm.kernels import kv_page
from localllm.kernels.kv_page import GROUP, SCALE_BIAS, SCALE_HIGH, SCALE_LOW, SCALE_SHIFT
from localllm.kernels.sizes import FIXED_PAGES as FIXED_PAGES
from localllm.kernels.sizes import PAGE_TOKENS, KVShape, SketchLayout, attended_tokens, sketch_bytes

ROOM_PAGES = 16  # there is room for a multiple of so many, whose scores are compared at once
# Where a scale is the mean magnitude of normal numbers, signs miss pi / 2 - 1 of its square; half of what they miss of
# a query's score is added, by which the mean of its exponential grows.
NOISE = (math.pi / 2 - 1) / 2
# Of the sums of four features with their signs, in each head's own unit: four such sums and as much again fit a byte.
MOST_UNITS, LEAST_UNIT = 31, 1e-30


@dataclass(frozen=True)
class PageChoice:
    """pages: so many are chosen. first_token: those in front of it attend to all, as a prompt's do."""

    pages: int
    first_token: int

    @property
    def first_position(self) -> int:
        """The first position at which there is something to choose."""
        return max(self.first_token, attended_tokens(self.pages) or 0)


class PageSketches:
    """The sketches of a sequence's pages in all layers of a group, on the device of each. On the host, room for them is
    not touched before they are made."""

    def __init__(self, devices: Sequence[torch.device], shape: KVShape, pages: int) -> None:
        """devices: of each layer."""
        self.pages = -(-pages // ROOM_PAGES) * ROOM_PAGES
        self._sizes = shape.num_heads, self.pages, SketchLayout(shape.head_dim).nbytes
        self.nbytes = len(devices) * sketch_bytes(shape, self.pages)
        self._devices, self._made = tuple(devices), _none_made(devices)
        self._sketches = {device: self._new(device) for device in dict.fromkeys(devices)}

    def _new(self, device: torch.device) -> Tensor:
        return torch.zeros((self._devices.count(device), *self._sizes), dtype=torch.uint8, device=device)

    def on(self, device: torch.device) -> Tensor:
        """Return those of the layers on a device: uint8 [layers, KH, pages, bytes], see `SketchLayout`. Raises what
        torch does where layers have come there and it has no memory."""
        if device not in self._sketches:
            self._sketches[device] = self._new(device)
        return self._sketches[device]

    def made(self, device: torch.device) -> Tensor:
        """Return of how many pages, from the first on, each layer on a device has sketches: int64 [layers], on the
        host."""
        return self._made[device]

    @property
    def num_made(self) -> int:
        """Pages from the first on of which every layer has sketches."""
        return min(int(made.min()) for made in self._made.values())

    def move(self, devices: Sequence[torch.device]) -> None:
        """Forget all: layers have moved."""
        self._devices, self._made, self._sketches = tuple(devices), _none_made(devices), {}

    def trim(self, pages: int) -> None:
        """Forget what was made of pages from this number on."""
        for made in self._made.values():
            made.clamp_(max=pages)


def _none_made(devices: Sequence[torch.device]) -> dict[torch.device, Tensor]:
    return {device: torch.zeros(devices.count(device), dtype=torch.int64) for device in dict.fromkeys(devices)}


@dataclass(frozen=True)
class Sketch:
    """means: fp32 [KH, pages, D], NaN where a key is not finite; scales: fp32 [KH, pages, 64, groups]; signs: 1 or -1
    [KH, pages, 64, D]."""

    means: Tensor
    scales: Tensor
    signs: Tensor


def sketch_of(keys: Tensor) -> Sketch:
    """keys fp32 [KH, pages * 64, D], rotated."""
    paged = keys.view(len(keys), -1, PAGE_TOKENS, keys.shape[-1])
    means = paged.mean(2)
    means = (means + (means - means)).bfloat16().float()
    beside = paged - means.unsqueeze(2)
    signs = torch.where(beside < 0, -1.0, 1.0)
    wanted = _grouped(beside.abs()).sum(-1) / _grouped(signs.abs()).sum(-1)
    bits = wanted.nan_to_num(SCALE_LOW).clamp(SCALE_LOW, SCALE_HIGH).view(torch.int32) - SCALE_BIAS
    nearest = (bits + (1 << (SCALE_SHIFT - 1))) >> SCALE_SHIFT
    return Sketch(means, ((nearest << SCALE_SHIFT) + SCALE_BIAS).view(torch.float32), signs)


def rotated_groups(x: Tensor) -> Tensor:
    """fp32 [..., D], rotated as coded pages are, but for fewer features of the last group: see `mixed_together`."""
    parts = torch.tensor_split(x, [x.shape[-1] // GROUP * GROUP], dim=-1)
    return torch.cat([kv_page.rotated(part, mixed_together(part.shape[-1])) for part in parts if part.numel()], -1)


def mixed_together(features: int) -> int:
    """Return how many of so many features are mixed at a time: the largest power of two that divides them, up to 32."""
    return min(GROUP, features & -features)


def scores_of(q: Tensor, sketch: Sketch) -> Tensor:
    """q fp32 [KH, G, D], scaled and rotated. Returns [KH, pages]: the sum of the heads' shares of attention, as if
    there were these pages alone; NaN of a page with keys that are not finite."""
    fours, signs = (_grouped(x).view(*x.shape[:-1], -1, GROUP // 4, 4) for x in (q, sketch.signs))
    unit = fours.abs().sum(-1).amax((-1, -2)).clamp(min=LEAST_UNIT).unsqueeze(-1) / MOST_UNITS
    sums = torch.einsum("hgknf,hptknf->hgptkn", fours, signs) / unit[..., None, None, None]
    products, scales = sums.round().nan_to_num(0).sum(-1), sketch.scales.unsqueeze(1)
    missed = NOISE / unit * _grouped(q).square().sum(-1)
    beside = (products * scales + missed[:, :, None, None] * scales.square()).sum(-1)
    center = torch.einsum("hgd,hpd->hgp", q, sketch.means)
    logs = (beside * unit[..., None] + center.unsqueeze(-1)) * math.log2(math.e)
    peaks = logs.amax(-1).nan_to_num(-math.inf).amax(-1).round()
    # Powers of two as a float's bits have them: between whole ones a straight line.
    bits = ((logs - peaks[..., None, None] + 127) * 2.0**23).clamp(min=0)
    masses = bits.nan_to_num(0).int().view(torch.float32).sum(-1)
    shares = masses / torch.where(center.isnan(), 0, masses).sum(-1, keepdim=True)
    return torch.where(center.isnan(), torch.nan, shares).sum(1)


def chosen_pages(q: Tensor, keys: Tensor, choice: PageChoice) -> Tensor:
    """q [H, D] of one token, scaled; keys [KH, pages * 64, D]: all pages that are full; both rotated. Returns the
    numbers of those that it attends to, int64 [KH, count + 2], ascending: all but its own."""
    KH = len(keys)
    scores = scores_of(q.float().view(KH, -1, q.shape[-1]), sketch_of(keys[:, PAGE_TOKENS:-PAGE_TOKENS].float()))
    ranked = torch.where(scores.isnan(), torch.inf, scores).sort(dim=1, descending=True, stable=True).indices
    chosen = ranked[:, : choice.pages].sort(dim=1).values + 1
    last = keys.shape[1] // PAGE_TOKENS - 1
    return torch.cat((chosen.new_zeros(KH, 1), chosen, chosen.new_full((KH, 1), last)), dim=1)


def _grouped(x: Tensor) -> Tensor:
    """[..., D] -> [..., groups, 32], zeros behind the last feature."""
    return functional.pad(x, (0, -x.shape[-1] % GROUP)).view(*x.shape[:-1], -1, GROUP)
