"""A tenth of what others leave stays free, whatever of it this process has taken already: a plan that is made again is
made within the same limit."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import psutil
import torch
from hypothesis import given
from hypothesis import strategies as st

from localllm.engine import placement
from localllm.engine.card import card_memory
from localllm.engine.placement import process_memory
from localllm.offload.planner.machine_memory import HEADROOM
from localllm.offload.planner.profile import DeviceRates
from localllm.quant.layouts import SIZES

GIB = 1 << 30
CUDA = torch.device("cuda", 0)
SHARES = st.floats(0, 1)
CONTEXT = 400 << 20


def of_card(left_bytes: int, loaded_bytes: int) -> int:
    """left_bytes: by other programs and by what CUDA takes. Return the limit where so much of it is loaded."""
    free = left_bytes - loaded_bytes
    with (
        mock.patch.object(torch, "ones"),
        mock.patch.object(torch.cuda, "mem_get_info", lambda _device: (free, 24 * GIB)),
        mock.patch.object(torch.cuda, "memory_reserved", lambda _device: loaded_bytes),
    ):
        rates = DeviceRates(800.0, 24.0, 24.0, 1e-6, 1e-6, 1e-5, CONTEXT)
        return card_memory(CUDA, None, rates, 0).vram_bytes


def of_host(left_bytes: int, program_bytes: int, placed_bytes: int) -> int:
    held = program_bytes + placed_bytes
    process = SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=held))
    with (
        mock.patch.object(psutil, "Process", lambda: process),
        mock.patch.object(placement, "free_bytes", lambda: left_bytes - placed_bytes),
    ):
        return process_memory(None, SIZES["int4-g64"], 32_000, placed_bytes).ram_bytes


@given(left=st.integers(GIB, 24 * GIB), share=SHARES)
def test_a_card_keeps_its_tenth_free_when_a_model_is_there(left: int, share: float) -> None:
    expected = of_card(left, 0)
    assert expected == CONTEXT + int(HEADROOM * left)
    assert of_card(left, int(share * left)) == expected


@given(left=st.integers(GIB, 64 * GIB), program=st.integers(100 << 20, 2 * GIB), share=SHARES)
def test_the_hosts_memory_keeps_its_tenth_free_when_a_model_is_there(left: int, program: int, share: float) -> None:
    """But for a tenth of what a process is counted for before it computes."""
    limit = of_host(left, program, 0)
    assert abs(left + program - limit - (1 - HEADROOM) * left) < 40 << 20
    assert of_host(left, program, int(share * left)) == limit


def test_what_a_process_holds_without_a_model_counts_as_free_for_another() -> None:
    """As the processes of a server ask, before they load."""
    program, everything = 300 << 20, 1 << 62
    alone = of_host(8 * GIB, program, 0)
    process = SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=program))
    with (
        mock.patch.object(psutil, "Process", lambda: process),
        mock.patch.object(placement, "free_bytes", lambda: 8 * GIB),
    ):
        assert process_memory(None, SIZES["int4-g64"], 32_000, everything).ram_bytes == alone
