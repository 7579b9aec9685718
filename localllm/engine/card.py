"""A GPU as a plan sees it: what this process may hold there, and what it was measured to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from localllm.config import format_bytes
from localllm.engine.memory import (
    HEADROOM,
    choose_device,
    choose_dtype,
    is_device_out_of_memory,
    is_out_of_memory,
    out_of_memory,
)
from localllm.errors import CardFaultError, Fix, UsageError
from localllm.kernels.gpu.ready import check_once, keep_fault, why_not
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
    graph_bytes: int = 0,
) -> Machine:
    """Return the machine around this device; what is not known of it is measured first, once.

    vram: the cap on the device's memory.
    memory: of the host, asked after the measurement.
    graph_bytes: that this process's graphs have there already.

    Raises UsageError for a cap above what exists, DoesNotFitError where the card has no memory for a measurement.
    """
    check_once(device, say)
    try:
        with uncapped_allocator(device):  # the plan before has nothing to do with a measurement
            profile = measured(kept_profile(), recipe.name, recipe.blocks, dtype, say)
            profile = device_measured(profile, device, recipe.name, recipe.blocks, dtype, say)
            rates, known = profile.rates(recipe.name), profile.device
            assert rates is not None and known is not None
            found = known.formats[recipe.name]
            vram_memory = card_memory(device, vram, known, found.workspace_bytes, graph_bytes)
    except RuntimeError as error:
        raise out_of_memory(device, error) if is_device_out_of_memory(error) else error from None
    rates_of_card = CardRates(found.matrix_gbs, found.compute_gops, known.h2d_gbs, known.launch_s, known.hop_s)
    if not why_not(device):
        graph_launch_s = known.graph_launch_s
        rates_of_card = replace(rates_of_card, launch_s=graph_launch_s, launches=KERNELS, is_fused=True)
        vram_memory = replace(vram_memory, graph_node_bytes=known.graph_node_bytes)
    card = Card(vram_memory, rates_of_card)
    return Machine(memory(), rates, card, profile.corrections(recipe.name))


def card_memory(
    device: torch.device, vram_bytes: int | None, rates: DeviceRates, workspace_bytes: int, graph_bytes: int = 0
) -> CardMemory:
    """Return what this process may take of the card.

    vram_bytes: the cap. graph_bytes: of what it has there already, those that torch does not count. Raises UsageError
    for more than the card has.
    """
    torch.ones(1, device=device)  # makes the context, which what is free is counted without then
    free, total = torch.cuda.mem_get_info(device)
    if vram_bytes is not None and vram_bytes > total:
        raise UsageError(
            f"--vram {vram_bytes / GIB:.2f}GiB is more than this card has",
            why=f"it has {format_bytes(total, 2)} of memory",
            fix=Fix.flag("--vram", f"{total / GIB - 0.01:.2f}GiB"),
        )
    most = rates.context_bytes + int(HEADROOM * (free + torch.cuda.memory_reserved(device) + graph_bytes))
    return CardMemory(
        most if vram_bytes is None else min(vram_bytes, most), rates.context_bytes, workspace_bytes, most, total
    )


def require_no_fault(device: torch.device, error: BaseException, model: str) -> None:
    """Raise CardFaultError where, since that error, the device computes nothing for this process any more. Where our
    kernels computed, they are not used on this card from the next process on.

    model: its name.
    """
    if not isinstance(error, RuntimeError) or is_out_of_memory(error) or not (reason := fault_of(device)):
        return
    fix = "run it again"
    if not why_not(device):
        keep_fault(device, f"with {model} they ended in a fault of the GPU ({reason})")
        fix = "run it again: torch's operators compute then, slower and without our kernels"
    raise CardFaultError(f"the GPU ended in a fault with {model}", why=reason, fix=fix) from error


@contextmanager
def faults_told(device: torch.device, model: str) -> Iterator[None]:
    """Raise as `require_no_fault` for what is raised inside."""
    try:
        yield
    except RuntimeError as error:
        require_no_fault(device, error, model)
        raise


def fault_of(device: torch.device) -> str:
    """Return the error with which the device answers every call from now on; "" for none."""
    try:
        torch.get_device_module(device).synchronize(device)
    except RuntimeError as error:
        return str(error).strip().splitlines()[0]
    return ""


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


def cap_allocator(device: torch.device, card: CardMemory, graph_bytes: int) -> None:
    """Keep what torch takes on the card within the plan's share of it, of which graphs have a part; for more, torch
    raises its error for want of memory."""
    share = (card.vram_bytes - card.context_bytes - graph_bytes) / card.total_bytes
    torch.cuda.set_per_process_memory_fraction(min(1.0, max(0.0, share)), device)


def measure_again(say: Callable[[str], None]) -> Profile:
    """Measure the machine again with INT4 weights, after it was busy; other formats are measured when a plan needs
    them. Corrections by earlier runs are dropped, as they belong to the figures before. The old figures stay until
    there are new ones."""
    device, dtype, blocks = choose_device("auto"), choose_dtype("auto"), RECIPES[DEFAULT].blocks
    profile = measured(Profile(machine_key()), DEFAULT, blocks, dtype, say)
    return device_measured(profile, device, DEFAULT, blocks, dtype, say) if device.type != "cpu" else profile
