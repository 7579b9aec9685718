"""A GPU as a plan sees it: what this process may hold there, and what it was measured to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from localllm.config import format_bytes
from localllm.engine.memory import HEADROOM, choose_device, choose_dtype, is_device_out_of_memory, out_of_memory
from localllm.errors import Fix, UsageError
from localllm.kernels.gpu.ready import why_not
from localllm.offload.measurements.measurement import device_measured, measured
from localllm.offload.planner.machine import KERNELS, Card, CardMemory, CardRates, Machine, Memory
from localllm.offload.planner.plan import GIB
from localllm.offload.planner.profile import DeviceRates, Profile, kept_profile, machine_key
from localllm.quant.recipe import DEFAULT, RECIPES, Recipe


def card_machine(
    device: torch.device,
    recipe: Recipe,
    dtype: torch.dtype,
    vram: int | None,
    memory: Callable[[], Memory],
    say: Callable[[str], None],
) -> Machine:
    """Return the machine around this device; what is not known of it is measured first, once.

    vram: the cap on the device's memory.
    memory: of the host, asked after the measurement.

    Raises UsageError for a cap above what exists, DoesNotFitError where the card has no memory for a measurement.
    """
    try:
        with uncapped_allocator(device):  # the plan before has nothing to do with a measurement
            profile = measured(kept_profile(), recipe.name, recipe.blocks, dtype, say)
            profile = device_measured(profile, device, recipe.name, recipe.blocks, dtype, say)
            rates, known = profile.rates(recipe.name), profile.device
            assert rates is not None and known is not None
            found = known.formats[recipe.name]
            vram_memory = card_memory(device, vram, known, found.workspace_bytes)
    except RuntimeError as error:
        raise out_of_memory(device, error) if is_device_out_of_memory(error) else error from None
    rates_of_card = CardRates(found.matrix_gbs, found.compute_gops, known.h2d_gbs, known.launch_s, known.hop_s)
    if not why_not(device):
        graph_launch_s = known.graph_launch_s
        rates_of_card = replace(rates_of_card, launch_s=graph_launch_s, launches=KERNELS, is_fused=True)
    card = Card(vram_memory, rates_of_card)
    return Machine(memory(), rates, card, profile.corrections(recipe.name))


def card_memory(device: torch.device, vram_bytes: int | None, rates: DeviceRates, workspace_bytes: int) -> CardMemory:
    """Return what this process may take of the card. vram_bytes: the cap. Raises UsageError for more than the card
    has."""
    torch.ones(1, device=device)  # makes the context, which what is free is counted without then
    free, total = torch.cuda.mem_get_info(device)
    if vram_bytes is not None and vram_bytes > total:
        raise UsageError(
            f"--vram {vram_bytes / GIB:.2f}GiB is more than this card has",
            why=f"it has {format_bytes(total, 2)} of memory",
            fix=Fix.flag("--vram", f"{total / GIB - 0.01:.2f}GiB"),
        )
    most = rates.context_bytes + int(HEADROOM * (free + torch.cuda.memory_reserved(device)))
    return CardMemory(
        most if vram_bytes is None else min(vram_bytes, most), rates.context_bytes, workspace_bytes, most, total
    )


@contextmanager
def uncapped_allocator(device: torch.device) -> Iterator[None]:
    """Let torch take all of the card inside; the cap of a model that is there holds again afterwards."""
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
    """Keep what torch takes on the card within the plan's share of it; for more, torch raises its error for want of
    memory."""
    share = (card.vram_bytes - card.context_bytes) / card.total_bytes
    torch.cuda.set_per_process_memory_fraction(min(1.0, max(0.0, share)), device)


def measure_again(say: Callable[[str], None]) -> Profile:
    """Measure the machine again with INT4 weights, after it was busy; other formats are measured when a plan needs
    them. Corrections by earlier runs are dropped, as they belong to the figures before. The old figures stay until
    there are new ones."""
    device, dtype, blocks = choose_device("auto"), choose_dtype("auto"), RECIPES[DEFAULT].blocks
    profile = measured(Profile(machine_key()), DEFAULT, blocks, dtype, say)
    return device_measured(profile, device, DEFAULT, blocks, dtype, say) if device.type != "cpu" else profile
