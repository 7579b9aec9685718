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
    expected = of_host(left, program, 0)
    assert expected == program + int(HEADROOM * left)
    assert of_host(left, program, int(share * left)) == expected
