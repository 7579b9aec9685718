"""A GPU as a plan sees it: what this process may hold there, and what it was measured to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from localllm.config import format_bytes
from localllm.engine.memory import HEADROOM, is_device_out_of_memory, out_of_memory
from localllm.engine.placement import model_shape, process_memory
from localllm.errors import UsageError
from localllm.kernels.gpu.ready import why_not
from localllm.models.config import ModelConfig
from localllm.offload.planner.device_costs import KERNELS, CardRates
from localllm.offload.planner.device_rates import DeviceRates
from localllm.offload.planner.device_search import CardMemory, DeviceSearch
from localllm.offload.planner.format_rates import FormatRates
from localllm.offload.planner.plan import GIB, JobShape, Packing
from localllm.offload.planner.profile import device_measured, kept_profile, measured
from localllm.quant.recipe import Recipe


@dataclass(frozen=True)
class CardPlanning:
    """What a plan on `device` is asked for; ram, vram: caps in bytes."""

    device: torch.device
    dtype: torch.dtype
    kv: str
    ctx: int | None
    ram: int | None
    vram: int | None
    job: JobShape | None
    say: Callable[[str], None]

    def search(
        self,
        config: ModelConfig,
        recipe: Recipe,
        name: str,
        packing: Packing | None,
        *,
        cached_share: float = 0.0,
        placed_bytes: int = 0,
    ) -> DeviceSearch:
        """What the machine does is measured where it is not known, once. placed_bytes: of the host's memory that this
        process holds, the blocks that are placed anew. Raises UsageError for a cap above what exists, DoesNotFitError
        where the card has not even room for a measurement.
        """
        try:
            with uncapped_allocator(self.device):  # the plan before has nothing to do with a measurement
                profile = measured(kept_profile(), recipe.name, recipe.blocks, self.dtype, self.say)
                profile = device_measured(profile, self.device, recipe.name, recipe.blocks, self.dtype, self.say)
                rates, card = profile.rates(recipe.name), profile.device
                assert rates is not None and card is not None
                found = card.formats[recipe.name]
                vram = card_memory(self.device, self.vram, card, found.workspace_bytes)
        except RuntimeError as error:
            raise out_of_memory(self.device, error) if is_device_out_of_memory(error) else error from None
        return DeviceSearch(
            shape=model_shape(config, recipe, self.dtype, name, self.device, self.kv, packing),
            memory=process_memory(self.ram, recipe, config.vocab_size, placed_bytes, packs=packing is not None),
            card=vram,
            rates=replace(rates, cached_share=cached_share),
            card_rates=_card_rates(found, card, is_fused=not why_not(self.device)),
            ctx=self.ctx,
            job=self.job,
            corrections=profile.corrections(recipe.name),
        )


def _card_rates(found: FormatRates, card: DeviceRates, *, is_fused: bool) -> CardRates:
    rates = CardRates(found.matrix_gbs, found.compute_gops, card.h2d_gbs, card.launch_s, card.hop_s)
    if is_fused:
        return replace(rates, launch_s=card.graph_launch_s, launches=KERNELS, is_fused=True)
    return rates


def card_memory(device: torch.device, vram_bytes: int | None, rates: DeviceRates, workspace_bytes: int) -> CardMemory:
    """vram_bytes: the cap. Raises UsageError for more than the card has."""
    torch.ones(1, device=device)  # makes the context, which what is free is counted without then
    free, total = torch.cuda.mem_get_info(device)
    if vram_bytes is not None and vram_bytes > total:
        raise UsageError(
            f"--vram {vram_bytes / GIB:.2f}GiB is more than this card has",
            why=f"it has {format_bytes(total, 2)} of memory",
            fix=f"--vram {total / GIB - 0.01:.2f}GiB",
        )
    most = rates.context_bytes + int(HEADROOM * free) + torch.cuda.memory_reserved(device)
    return CardMemory(
        most if vram_bytes is None else min(vram_bytes, most), rates.context_bytes, workspace_bytes, most, total
    )


@contextmanager
def uncapped_allocator(device: torch.device) -> Iterator[None]:
    """Torch may take all of the card; the cap of a model that is there holds again afterwards."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_per_process_memory_fraction(device)
    torch.cuda.set_per_process_memory_fraction(1.0, device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)


def cap_allocator(device: torch.device, card: CardMemory) -> None:
    """What torch takes on the card stays within the plan's share of it; more is torch's error for want of memory."""
    share = (card.vram_bytes - card.context_bytes) / card.total_bytes
    torch.cuda.set_per_process_memory_fraction(min(1.0, max(0.0, share)), device)
